"""Maximum likelihood for any model with a `log_prob`, by expectation maximization or by gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from ..arguments import check_choice, check_flag, check_has_values, check_is_tensor
from ..progress import bar, check_progress
from .checks import check_count, check_differentiable, check_number, check_step, check_unsharded
from .data import Sequences
from .degenerate import DegenerateError, DegenerateWarning
from .em import em_step, trained_parts

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Fit(NamedTuple):
    """The result of `fit`; log-likelihoods are of all the data, in nats, and with restarts those of the best start.

    Attributes:
        log_likelihood: that of the final parameters.
        history: log-likelihoods before the first iteration and after each; with mini-batches each is a sum over batches
            between which the parameters changed.
        iterations: their number.
        converged: whether the last iteration gained less than the tolerance.
        starts: the final log-likelihood of each start that did not fail.
        set_aside: the number of starts that met a `DegenerateError` and were skipped.
    """

    log_likelihood: float
    history: tuple[float, ...]
    iterations: int
    converged: bool
    starts: tuple[float, ...]
    set_aside: int = 0

    def __str__(self) -> str:
        """A report of two lines, or of three for several starts."""
        end = "converged" if self.converged else "not converged"
        last = self.history[-1] - self.history[-2] if self.iterations else 0.0
        lines = [
            f"log-likelihood {self.log_likelihood:.2f} nats, {self.history[0]:.2f} at the start",
            f"{end} in {self.iterations} iterations, the last of which gained {last:.3g}",
        ]
        if len(self.starts) + self.set_aside > 1:
            aside = f"; {self.set_aside} skipped" if self.set_aside else ""
            starts = ", ".join(f"{start:.4f}" for start in self.starts)
            lines.append(f"best of {len(self.starts)} starts: {starts}{aside}")
        return "\n".join(lines)


def fit(
    model: torch.nn.Module,
    data: Tensor | Sequences,
    *,
    conditions: Mapping[str, Any] | None = None,
    method: Literal["em", "gradient"] = "em",
    max_iterations: int = 100,
    tolerance: float = 1e-2,
    batch_size: int | None = None,
    step: float | Callable[[int], float] | None = None,
    optimizer: Optimizer | None = None,
    restarts: int = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Fit:
    r"""Maximize the log-likelihood `sum log p(data)` over the trained parameters of a model, in place.

    Args:
        model: a module with `log_prob(data, **conditions) -> [n]`; for `restarts`, with `initialize(data, ...)` too.
        data: `[n, ...]`, of n independent sequences or samples.
        conditions: further arguments of `log_prob`, by name; tensors `[n, ...]` are divided into batches like the data.
        method: "em" for expectation maximization, where every trained parameter must belong to a part whose maximum has
            a closed form (see `em_step`); "gradient" for L-BFGS, or Adam with mini-batches.
        max_iterations: an iteration is one pass over the data by EM or Adam, or up to 20 steps of L-BFGS.
        tolerance: nats; the fit ends with the first iteration that gains less. 0 ends it where nothing is gained any
            more, -inf never. It has no effect with mini-batches, whose gains are random.
        batch_size: number of sequences that are computed at a time. "em" adds up the statistics of all batches, so that
            only the memory changes, unless a `step` makes them mini-batches. With "gradient" every batch, in random
            order, is a mini-batch: a step of the optimizer.
        step: makes the batches of "em" mini-batches, in random order: after each, the mean parameters move this part of
            the way, in 0..1, to its maximum. It is a number, or a function of the number of batches before.
        optimizer: for "gradient", a function of the list of parameters, such as `partial(torch.optim.Adam, lr=0.1)`.
        restarts: number of times to start from `model.initialize(data, generator=..., **conditions)`; the best fit is
            taken. Of several, a start that meets a `DegenerateError` is skipped: a variance that
            reaches 0, or a log-likelihood that is not finite. 0 starts from the present parameters.
        generator: the source of randomness for the order of batches and for `initialize`.
        progress: show a progress bar (tqdm) of the iterations.

    Returns:
        A `Fit`; its `str` is a short report.

    Raises:
        TypeError: an option is of another kind.
        ValueError: an option is out of range or belongs to the other method; with "em", a trained parameter has no
            maximum in closed form; or FSDP2 has sharded the model, which has to be fitted before.
        DegenerateError: in every start, a variance reaches 0, or the log-likelihood is not finite, as for data that are
            impossible. It is a ValueError.
        RuntimeError: `torch.inference_mode` is on.
        ImportError: `progress` is given, and tqdm is not installed.

    Warns:
        DegenerateWarning: starts were skipped, for what each of them met.

    A probability that expectation maximization has taken to 0 stays 0, under "gradient" too. The `prior` of
    `LogWeights` keeps it above; "gradient" from a start without zeros never reaches 0.

    Cost: a forward and a backward pass an iteration, and a forward pass at the end.

    Source: A. Dempster, N. Laird and D. Rubin, "Maximum likelihood from incomplete data via the EM algorithm", J. R.
    Stat. Soc. B 39 (1977); O. Cappe and E. Moulines, "On-line expectation-maximization algorithm for latent data
    models" (arXiv:0712.4273), for mini-batches.

    >>> from logchain.nn import HMM
    >>> hmm = HMM(1, "poisson")
    >>> report = fit(hmm, torch.tensor([[2, 4, 4, 4]]))  # one state: the rate is the mean
    >>> report.converged, round(report.log_likelihood, 2)
    (True, -6.69)
    >>> hmm.emission.log_rates.exp().detach()
    tensor([3.5000])
    """
    run = _Run(model, data, dict(conditions or {}), method, batch_size, step, optimizer, generator)
    check_unsharded(model)
    check_differentiable("fit")
    check_number("tolerance", tolerance)
    check_flag("progress", progress)
    check_count("max_iterations", max_iterations, least=0)
    check_count("restarts", restarts, least=0)
    run.check()
    if restarts and not hasattr(model, "initialize"):
        raise TypeError(f"restarts: expected 0 for {type(model).__name__}, which has no `initialize`")
    if progress:
        check_progress()
    fits: list[Fit] = []
    failed: dict[int, DegenerateError] = {}
    best: dict[str, Tensor] = {}
    for start in range(1, max(1, restarts) + 1):
        if restarts:
            run.model.initialize(data, generator=generator, **run.conditions)
        title = f"start {start} of {restarts}" if restarts > 1 else "fit"
        try:
            outcome = _one_start(run, bar(range(max_iterations), title, progress, "iterations"), tolerance)
        except DegenerateError as error:
            failed[start] = error
            continue
        fits.append(outcome)
        if restarts > 1 and outcome.log_likelihood >= max(outcome.log_likelihood for outcome in fits):
            best = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if not fits and restarts < 2:
        raise failed[1]
    if not fits:
        raise DegenerateError(f"{failed[1]} (start 1 of {restarts}, all of which failed)") from failed[1]
    if failed:
        reasons = (f"start {start}: {error}" for start, error in failed.items())
        text = "; ".join((f"fit: skipped {len(failed)} of {restarts} starts", *reasons))
        warn(text, DegenerateWarning, stacklevel=2)
    if best:
        model.load_state_dict(best)
    starts = tuple(outcome.log_likelihood for outcome in fits)
    return fits[starts.index(max(starts))]._replace(starts=starts, set_aside=len(failed))


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """A context that restores the parameters that are not trained, in which the others may be written."""
    check_unsharded(model)
    before = [(fixed, fixed.detach().clone()) for fixed in model.parameters() if not fixed.requires_grad]
    yield
    with torch.no_grad():
        for parameter, value in before:
            parameter.copy_(value)


class _Run(NamedTuple):
    """The options of a fit that are the same for all starts."""

    model: Any
    data: Tensor | Sequences
    conditions: dict[str, Any]
    method: str
    batch_size: int | None
    step: float | Callable[[int], float] | None
    optimizer: Optimizer | None
    generator: torch.Generator | None

    @property
    def moving(self) -> bool:
        """Whether the parameters change after each batch."""
        return self.step is not None or (self.method == "gradient" and self.batch_size is not None)

    @property
    def values(self) -> Tensor:
        """The tensor of the data."""
        return self.data.data if isinstance(self.data, Sequences) else self.data

    def batches(self) -> Iterator[Callable[[], Tensor]]:
        """A function for each batch that computes its log-likelihood."""
        n = len(self.data)
        size = self.batch_size or n
        if size >= n:
            yield partial(self.total, self.data, self.conditions)
            return
        order = torch.arange(n)
        if self.moving:
            where = "cpu" if self.generator is None else self.generator.device
            order = torch.randperm(n, generator=self.generator, device=where)
        for rows in order.to(self.values.device).split(size):
            conditions = {name: value[rows] if _divided(value) else value for name, value in self.conditions.items()}
            yield partial(self.total, self.data[rows], conditions)

    def total(self, data: Tensor | Sequences, conditions: dict[str, Any]) -> Tensor:
        """The log-likelihood of a batch, in float64."""
        log_likelihoods: Tensor = self.model.log_prob(data, **conditions)
        return log_likelihoods.double().sum()

    def check(self) -> None:
        """Check the data and the options, and that they go together."""
        check_choice("method", self.method, ("em", "gradient"))
        check_is_tensor("data", self.values)
        check_has_values("data", self.values)
        if not self.values.dim():
            raise ValueError("data: expected shape [n, ...], got []")
        if not len(self.data):
            raise ValueError("data: expected at least one sequence, got none")
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
            for name, value in self.conditions.items():
                if _divided(value) and len(value) != len(self.data):
                    expected = f"{len(self.data)} along the first axis, as the data"
                    raise ValueError(f"{name}: expected {expected}, got {len(value)}")
        if self.step is not None and not callable(self.step):
            check_step(self.step)
        if self.optimizer is not None and not callable(self.optimizer):
            raise TypeError(f"optimizer: expected a function of the parameters, got {self.optimizer!r}")
        trained = {name: part for name, part in self.model.named_parameters() if part.requires_grad}
        if self.method == "em":
            if self.optimizer is not None:
                raise ValueError("optimizer: expected None with method 'em'")
            closed = {id(parameter) for part in trained_parts(self.model) for parameter in part.parameters()}
            if names := [name for name, parameter in trained.items() if id(parameter) not in closed]:
                expected = "'gradient' for parameters without a maximum in closed form"
                raise ValueError(f"method: expected {expected}, got 'em' with {', '.join(names)}")
            return
        if not trained:
            raise ValueError("model: expected trained parameters with method 'gradient', got none")
        if self.step is not None:
            raise ValueError("step: expected None with method 'gradient', whose optimizer has one")
        if not self.optimizer and not self.moving and any(part.dtype == torch.float16 for part in trained.values()):
            raise ValueError("optimizer: expected one for parameters in float16, in which L-BFGS overflows, got None")


def _divided(condition: object) -> bool:
    """Whether a condition has a first axis, which is that of the sequences."""
    return isinstance(condition, Tensor) and condition.dim() > 0


def _one_start(run: _Run, iterations: Iterable[int], tolerance: float) -> Fit:
    advance = _em(run) if run.method == "em" else _gradient(run)
    history: list[float] = []
    converged = False
    for _ in iterations:
        batches = run.batches()
        parts = ([batch] for batch in batches) if run.moving else [batches]
        history.append(_finite(sum((advance(part) for part in parts), torch.zeros(()))))
        if not run.moving and len(history) > 1 and history[-1] - history[-2] < tolerance:
            converged = True
            break
    with torch.no_grad():
        history.append(_finite(sum((batch() for batch in run.batches()), torch.zeros(()))))
    return Fit(history[-1], tuple(history), len(history) - 1, converged, (history[-1],))


Advance = Callable[[Iterable[Callable[[], Tensor]]], Tensor]


def _em(run: _Run) -> Advance:
    """A function that does a step of EM for some batches and returns their log-likelihood before it."""
    numbers = count()

    def advance(batches: Iterable[Callable[[], Tensor]]) -> Tensor:
        step = run.step(next(numbers)) if callable(run.step) else run.step
        return em_step(run.model, batches, 1.0 if step is None else step)

    return advance


def _gradient(run: _Run) -> Advance:
    """A function that does a step of the optimizer for one batch and returns its log-likelihood before it."""
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    adam, lbfgs = partial(torch.optim.Adam, lr=1e-2), partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")
    optimizer: Any = (run.optimizer or (adam if run.moving else lbfgs))(parameters)
    if not hasattr(optimizer, "step"):
        raise TypeError(f"optimizer: expected a function that returns an optimizer, got one that returns {optimizer!r}")
    # the loss is a mean over sequences, so that a learning rate suits any number of them
    scale = 1 / min(run.batch_size or len(run.data), len(run.data))

    def advance(batches: Iterable[Callable[[], Tensor]]) -> Tensor:
        (batch,) = batches

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -batch() * scale
            loss.backward()
            return loss

        loss: Tensor = optimizer.step(closure)
        return -loss.detach() / scale

    return advance


def _finite(total: Tensor) -> float:
    value = total.item()
    if not -float("inf") < value < float("inf"):
        raise DegenerateError(f"data: expected a finite log-likelihood, got {value}: see `log_prob` of each sequence")
    return value
