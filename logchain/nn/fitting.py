"""Maximum likelihood for any model with a `log_prob`: by expectation maximisation, or by gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_choice, check_flag, check_is_tensor
from ..progress import check_progress
from .checks import check_count, check_number, check_step
from .em import Part, em_step

Optimiser = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Fit(NamedTuple):
    """The result of a fit; log-likelihoods are of all the data, in nats.

    `log_likelihood`: of the parameters that were kept. `history`: before the first iteration and after each, of the
    start that was kept; with mini-batches each is the sum over batches while the parameters move. `converged`: the last
    iteration gained less than the tolerance. `starts`: what each start reached.
    """

    log_likelihood: float
    history: tuple[float, ...]
    iterations: int
    converged: bool
    starts: tuple[float, ...]

    def __str__(self) -> str:
        """A few lines to read."""
        end = "converged" if self.converged else "not converged"
        last = self.history[-1] - self.history[-2] if self.iterations else 0.0
        lines = [
            f"log-likelihood {self.log_likelihood:.2f} nats, {self.history[0]:.2f} at the start",
            f"{end} in {self.iterations} iterations, the last of which gained {last:.3g}",
        ]
        if len(self.starts) > 1:
            lines.append(f"best of {len(self.starts)} starts: {', '.join(f'{start:.4f}' for start in self.starts)}")
        return "\n".join(lines)


def fit(
    model: torch.nn.Module,
    data: Tensor,
    *,
    conditions: Mapping[str, Tensor | None] | None = None,
    method: Literal["em", "gradient"] = "em",
    max_iterations: int = 100,
    tolerance: float = 1e-2,
    batch_size: int | None = None,
    step: float | Callable[[int], float] | None = None,
    optimiser: Optimiser | None = None,
    restarts: int = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Fit:
    r"""Raise `sum log p(data)` by changing the trained parameters of a model.

    Args:
        model: a module with `log_prob(data, **conditions) -> [n]`; for `restarts`, with `initialise(data, ...)` too.
        data: `[n, ...]`, of n independent sequences or samples.
        conditions: further arguments of `log_prob`, by name; tensors `[n, ...]` are divided into batches like the data.
        method: "em", expectation maximisation: every trained parameter has to belong to a part with a maximum in closed
            form (see `em_step`). "gradient": any; by L-BFGS of all data, or Adam of mini-batches.
        max_iterations: how many at most. An iteration is one pass over the data by EM or Adam, and up to 20 steps of
            L-BFGS.
        tolerance: in nats; an iteration over all the data that gains less is the last one. 0 stops where nothing is
            gained any more, -inf never. A `step` or the batches of a gradient make gains random: then it has no effect.
        batch_size: how many sequences are computed at a time. With "em" the statistics of all batches are added up, so
            that it changes the memory and not the result, unless there is a `step`. With "gradient" every batch, in
            random order, is a step of the optimiser.
        step: "em" with mini-batches: after every batch, in random order, go so much of the way to its maximum, in the
            mean parameters: a number in 0..1, or a function of how many batches there were before.
        optimiser: "gradient": makes an optimiser of the list of parameters, as `partial(torch.optim.Adam, lr=0.1)`.
        restarts: how many times to start at what `model.initialise(data, generator=..., **conditions)` makes of the
            data, of which the best is kept; 0 goes on from the present parameters.
        generator: where the order of batches and the starts come from.
        progress: show a bar (tqdm) of the iterations.

    Returns:
        A `Fit`; its `str` is a short report.

    Raises:
        TypeError: an option is of the wrong kind.
        ValueError: an option is out of range or goes with another method; "em" and a parameter without a maximum in
            closed form; the data are impossible, or the likelihood is no finite number.
        ImportError: `progress`, and tqdm is not installed.

    Cost: an iteration is a forward and a backward pass; one forward pass more at the end.

    Source: A. Dempster, N. Laird and D. Rubin, "Maximum likelihood from incomplete data via the EM algorithm", J. R.
    Stat. Soc. B 39 (1977); O. Cappe and E. Moulines, "On-line expectation-maximization algorithm for latent data
    models" (arXiv:0712.4273), for mini-batches.
    """
    check_choice("method", method, ("em", "gradient"))
    check_is_tensor("data", data)
    check_number("tolerance", tolerance)
    check_flag("progress", progress)
    run = _Run(model, data, dict(conditions or {}), method, batch_size, step, optimiser, generator)
    _check_options(run, max_iterations, restarts)
    if progress:
        check_progress()
    best: tuple[Fit, dict[str, Tensor]] | None = None
    reached = []
    for start in range(max(1, restarts)):
        if restarts:
            initialise: Any = model.initialise
            initialise(data, generator=generator, **run.conditions)
        title = f"start {start + 1} of {restarts}" if restarts > 1 else "fit"
        outcome = _one_start(run, _iterations(max_iterations, title, progress), tolerance)
        reached.append(outcome.log_likelihood)
        if best is None or outcome.log_likelihood > best[0].log_likelihood:
            best = outcome, {name: value.detach().clone() for name, value in model.state_dict().items()}
    assert best is not None
    if len(reached) > 1:
        model.load_state_dict(best[1])
    return best[0]._replace(starts=tuple(reached))


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """A context after which parameters that are not trained have their values again."""
    before = [(fixed, fixed.detach().clone()) for fixed in model.parameters() if not fixed.requires_grad]
    yield
    with torch.no_grad():
        for parameter, value in before:
            parameter.copy_(value)


def _divided(condition: object) -> bool:
    """Whether a condition has a row for each sequence."""
    return isinstance(condition, Tensor) and condition.dim() > 0


class _Run(NamedTuple):
    """The options that all starts share."""

    model: Any
    data: Tensor
    conditions: dict[str, Any]
    method: str
    batch_size: int | None
    step: float | Callable[[int], float] | None
    optimiser: Optimiser | None
    generator: torch.Generator | None

    @property
    def moving(self) -> bool:
        """Whether parameters change from batch to batch."""
        return self.step is not None or (self.method == "gradient" and self.batch_size is not None)

    def batches(self) -> Iterator[Callable[[], Tensor]]:
        """The log-likelihood of each batch."""
        n = len(self.data)
        size = self.batch_size or n
        if size >= n:
            yield partial(self.total, self.data, self.conditions)
            return
        where = "cpu" if self.generator is None else self.generator.device
        order = torch.randperm(n, generator=self.generator, device=where) if self.moving else torch.arange(n)
        for rows in order.to(self.data.device).split(size):
            own = {name: value[rows] if _divided(value) else value for name, value in self.conditions.items()}
            yield partial(self.total, self.data[rows], own)

    def total(self, data: Tensor, conditions: dict[str, Any]) -> Tensor:
        """The sum over a batch, in float64."""
        log_likelihoods: Tensor = self.model.log_prob(data, **conditions)
        return log_likelihoods.double().sum()


def _one_start(run: _Run, iterations: Iterable[int], tolerance: float) -> Fit:
    advance = _em(run) if run.method == "em" else _gradient(run)
    history: list[float] = []
    converged = False
    for _ in iterations:
        history.append(_finite(advance()))
        if not run.moving and len(history) > 1 and history[-1] - history[-2] < tolerance:
            converged = True
            break
    with torch.no_grad():
        history.append(_finite(sum((batch() for batch in run.batches()), torch.zeros(()))))
    return Fit(history[-1], tuple(history), len(history) - 1, converged, (history[-1],))


def _em(run: _Run) -> Callable[[], Tensor]:
    """One iteration as a function, which returns the log-likelihood before it."""
    batches_before = 0

    def advance() -> Tensor:
        nonlocal batches_before
        if run.step is None:
            return em_step(run.model, run.batches())
        total = torch.zeros(())
        for batch in run.batches():
            total = total + em_step(run.model, [batch], run.step(batches_before) if callable(run.step) else run.step)
            batches_before += 1
        return total

    return advance


def _gradient(run: _Run) -> Callable[[], Tensor]:
    """One iteration as a function, which returns the log-likelihood before it."""
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    optimiser: Any = (run.optimiser or (_adam if run.moving else _lbfgs))(parameters)
    # the mean over sequences, for optimisers with a step of their own
    scale = 1 / min(run.batch_size or len(run.data), len(run.data))

    def advance() -> Tensor:
        total = torch.zeros(())
        for batch in run.batches():

            def closure(batch: Callable[[], Tensor] = batch) -> Tensor:
                optimiser.zero_grad()
                loss = -batch() * scale
                loss.backward()
                return loss

            total = total - optimiser.step(closure).detach() / scale
        return total

    return advance


def _lbfgs(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")


def _adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _iterations(count: int, title: str, shown: bool) -> Iterable[int]:
    if not shown:
        return range(count)
    from tqdm.auto import tqdm

    bar: Iterable[int] = tqdm(range(count), desc=title, unit=" iterations")
    return bar


def _finite(total: Tensor) -> float:
    value = total.item()
    if not -float("inf") < value < float("inf"):
        raise ValueError(f"data: expected a finite log-likelihood, got {value}: see `log_prob` of each sequence")
    return value


def _check_options(run: _Run, max_iterations: int, restarts: int) -> None:
    check_count("max_iterations", max_iterations, least=0)
    check_count("restarts", restarts, least=0)
    if run.batch_size is not None:
        check_count("batch_size", run.batch_size)
        for name, value in run.conditions.items():
            if _divided(value) and len(value) != len(run.data):
                raise ValueError(
                    f"{name}: expected {len(run.data)} along the first axis, as the data, got {len(value)}"
                )
    if run.step is not None and not callable(run.step):
        check_step(run.step)
    if run.optimiser is not None and not callable(run.optimiser):
        raise TypeError(f"optimiser: expected a function of the parameters, got {run.optimiser!r}")
    if run.method == "em" and run.optimiser is not None:
        raise ValueError("optimiser: expected None with method 'em'")
    if run.method == "gradient" and run.step is not None:
        raise ValueError("step: expected None with method 'gradient', whose optimiser has one")
    if restarts and not hasattr(run.model, "initialise"):
        raise TypeError(f"restarts: expected 0 for {type(run.model).__name__}, which has no `initialise`")
    if not len(run.data):
        raise ValueError("data: expected at least one sequence, got none")
    if run.method == "em":
        _check_closed(run.model)


def _check_closed(model: torch.nn.Module) -> None:
    """Check that each trained parameter belongs to a part that maximises all of its own."""
    closed = set()
    for part in model.modules():
        if isinstance(part, Part):
            own = list(part.parameters())
            closed |= {id(parameter) for parameter in own if all(one.requires_grad for one in own)}
    names = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in closed]
    if names:
        expected = "'gradient' for parameters without a maximum in closed form"
        raise ValueError(f"method: expected {expected}, got 'em' with {', '.join(names)}")
