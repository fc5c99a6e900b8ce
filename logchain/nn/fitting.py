"""Maximum likelihood or a posteriori for any model with a `log_prob`, by expectation maximization or by gradients."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple
from warnings import warn

import numpy as np
import torch
from torch import Generator, Tensor, nn

from ..arguments import check_choice, check_flag, check_has_values, check_is_tensor
from ..progress import bar, check_progress
from .checks import check_count, check_differentiable, check_number, check_step, check_unsharded
from .data import Array, Sequences, as_tensor
from .em import em_step, trained_parts
from .parameters import log_prior, reset_parameters, set_parameters, untrained

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ConvergenceWarning(UserWarning):
    """A warning of `fit`: it stopped before it converged, or starts failed."""


class Fit(NamedTuple):
    """The result of `fit`: the best start, on all data. Logarithms are in nats.

    Attributes:
        log_likelihood: that of the final parameters, `sum weight log p(data)`.
        log_posterior: the log-likelihood and the `log_prior()` of all parts; without priors it is the same.
        history: log-posteriors before the first iteration and after each; with mini-batches each is a sum over batches
            between which the parameters changed.
        iterations: their number.
        converged: whether the further iterations are estimated to gain less than the tolerance.
        starts: the final log-posterior of each start that did not fail.
        num_failed: the number of starts that failed and were skipped.
        num_parameters: the number of free trained parameters; k probabilities of sum 1 that are not 0 count as k - 1.
        num_observations: the weighted sum of the model's `num_observations(data, **conditions)` `[n]`, in an `HMM` the
            numbers of steps at which something is observed; 1 for each sequence of a model without that method.
    """

    log_likelihood: float
    log_posterior: float
    history: tuple[float, ...]
    iterations: int
    converged: bool
    starts: tuple[float, ...]
    num_failed: int = 0
    num_parameters: int = 0
    num_observations: float = 0.0

    @property
    def aic(self) -> float:
        """Akaike's information criterion, `2 num_parameters - 2 log_likelihood`: less is better."""
        return 2 * self.num_parameters - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """The Bayesian information criterion, `num_parameters log(num_observations) - 2 log_likelihood`."""
        return self.num_parameters * math.log(self.num_observations) - 2 * self.log_likelihood

    def __str__(self) -> str:
        """A report of two lines, or of three for several starts."""
        end = "converged" if self.converged else "not converged"
        last = self.history[-1] - self.history[-2] if self.iterations else 0.0
        report = f"{self.log_posterior:.2f} nats, {self.history[0]:.2f} at the start"
        if self.log_posterior == self.log_likelihood:
            report = f"log-likelihood {report}"
        else:
            report = f"log-posterior {report}; log-likelihood {self.log_likelihood:.2f}"
        report += f"\n{end} in {self.iterations} iterations, the last of which gained {last:.3g}"
        if len(self.starts) + self.num_failed == 1:
            return report
        starts = ", ".join(f"{start:.4f}" for start in self.starts)
        failed = f"; {self.num_failed} failed" if self.num_failed else ""
        return f"{report}\nbest of {len(self.starts)} starts: {starts}{failed}"


def fit(
    model: nn.Module,
    data: Any,
    *,
    conditions: Mapping[str, Any] | None = None,
    weights: Tensor | Array | Sequence[float] | None = None,
    method: Literal["em", "gradient"] = "em",
    max_iterations: int = 100,
    tolerance: float = 1e-2,
    batch_size: int | None = None,
    step: float | Callable[[int], float] | None = None,
    optimizer: Optimizer | None = None,
    restarts: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Fit:
    r"""Maximize `sum weight log p(data) + sum log_prior` over the trained parameters of a model, in place.

    The second sum is over all modules that have a method `log_prior() -> Tensor`, as parts with a `prior` have.

    Args:
        model: a module with `log_prob(data, **conditions) -> [n]`.
        data: `[n, ...]`, of n independent sequences or samples.
        conditions: further arguments of `log_prob` by name, tensors as `[n, ...]`, which are batched as the data.
        weights: non-negative weights `[n]` of the sequences' log-likelihoods; None for ones.
        method: "em" for expectation maximization, where every trained parameter must belong to a part that it fits
            (see `em_step`); "gradient" for L-BFGS, or Adam with mini-batches.
        max_iterations: an iteration is one pass over the data by EM or Adam, or up to 20 steps of L-BFGS.
        tolerance: nats; the fit ends when an iteration gains less and, with "em", all further ones would together gain
            less, by Aitken's extrapolation of the last two gains; or when nothing is gained. 0 ends it only then, -inf
            never. It has no effect with mini-batches, whose gains are random.
        batch_size: number of sequences that are computed at a time. "em" adds up the statistics of all batches, so that
            only the memory changes, unless a `step` makes them mini-batches. With "gradient" every batch, in random
            order, is a mini-batch: a step of the optimizer.
        step: makes the batches of "em" mini-batches, in random order: after each, the mean parameters move this part of
            the way, in 0..1, to its maximum. It is a number, or a function of the number of batches before.
        optimizer: for "gradient", a function of the list of parameters, such as `partial(torch.optim.Adam, lr=0.1)`.
        restarts: number of starts, the best of which is taken. Each draws all trained parameters again, by
            `model.initialize(data, generator=..., **conditions)` or, in a model without that method, by
            `reset_parameters` of its modules. One of several that raises an error of values or of arithmetic is
            skipped. 0 starts from the present parameters. None, too, but it first draws those parts of the library
            that nobody has set since they were constructed: by `set`, `load_state_dict`, an optimizer or a fit.
        generator: the source of randomness for the order of batches and for draws of parameters.
        progress: show a progress bar (tqdm) of the iterations.

    Returns:
        A `Fit`; its `str` is a short report.

    Raises:
        TypeError: an option is of another kind.
        ValueError: an option is out of range or belongs to the other method; with "em", a trained parameter belongs to
            no part; FSDP2 has sharded the model; a trained parameter cannot be drawn again; or, in every start, a part
            has no maximum, as where a variance reaches 0, or the log-posterior is not finite, as for impossible data.
        RuntimeError: `torch.inference_mode` is on, or every start failed by an error that is not a ValueError.
        ImportError: `progress` is set, and tqdm is not installed.

    Warns:
        ConvergenceWarning: the best fit did not converge, or starts were skipped, for the reasons in the message.

    A probability that expectation maximization takes to 0 stays 0, under "gradient" too, unless a `Dirichlet` prior
    prevents it; "gradient" from a start without zeros never reaches 0.

    Cost: a forward and a backward pass per iteration, and a forward pass at the end.

    Source: A. Dempster, N. Laird and D. Rubin, "Maximum likelihood from incomplete data via the EM algorithm", J. R.
    Stat. Soc. B 39 (1977); O. Cappe and E. Moulines, "On-line expectation-maximization algorithm for latent data
    models" (arXiv:0712.4273), for mini-batches; D. Boehning et al., "The distribution of the likelihood ratio for
    mixtures of densities from the one-parameter exponential family", Ann. Inst. Stat. Math. 46 (1994), for the end.

    >>> from logchain.nn import HMM
    >>> hmm = HMM(1, "poisson")
    >>> report = fit(hmm, torch.tensor([[2, 4, 4, 4]]))  # one state: the rate is the mean
    >>> report.converged, round(report.log_likelihood, 2)
    (True, -6.69)
    >>> hmm.emission.log_rates.exp().detach()
    tensor([3.5000])
    """
    check_unsharded(model)
    check_differentiable("fit")
    check_number("tolerance", tolerance)
    if math.isnan(tolerance):
        raise ValueError("tolerance: expected a number, got nan")
    check_flag("progress", progress)
    check_count("max_iterations", max_iterations, least=0)
    if restarts is not None:
        check_count("restarts", restarts, least=0)
    run = _Run(model, data, conditions or {}, weights, method, tolerance, batch_size, step, optimizer, generator)
    if progress:
        check_progress()
    stacklevel = 3 if isinstance(data, Sequences) else 2  # the line that calls the method `fit` of a model, or this
    num_starts, fits, best = restarts or 1, list[Fit](), dict[str, Tensor]()
    failures: dict[int, Exception] = {}
    for start in range(1, num_starts + 1):
        title = f"start {start} of {num_starts}" if num_starts > 1 else "fit"
        try:
            run.draw(restarts)
            fits.append(run.start(bar(range(max_iterations), title, progress, "iterations")))
        except (ValueError, RuntimeError, ArithmeticError) as error:
            if num_starts == 1:
                raise
            failures[start] = error
            continue
        if num_starts > 1 and fits[-1].log_posterior == max(outcome.log_posterior for outcome in fits):
            best = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if not fits:
        kind = ValueError if isinstance(failures[1], ValueError) else RuntimeError
        raise kind(f"{failures[1]} (start 1 of {num_starts}, all of which failed)") from failures[1]
    if failures:
        reasons = (f"start {start}: {error}" for start, error in failures.items())
        text = "; ".join((f"fit: skipped {len(failures)} of {num_starts} starts", *reasons))
        warn(text, ConvergenceWarning, stacklevel=stacklevel)
    if best:
        model.load_state_dict(best)
    starts = tuple(outcome.log_posterior for outcome in fits)
    result = fits[starts.index(max(starts))]
    if not (result.converged or run.moving or max_iterations == 0 or tolerance == -math.inf):
        gain = result.history[-1] - result.history[-2]
        text = f"the last of {max_iterations} iterations gained {gain:.3g} nats; pass a larger max_iterations"
        warn(f"fit: expected convergence, but {text} or tolerance", ConvergenceWarning, stacklevel=stacklevel)
    of_model = getattr(model, "num_observations", None)
    numbers = torch.ones(len(data)) if of_model is None else of_model(data, **run.conditions)
    total = float((numbers if run.weights is None else numbers.to(run.weights) * run.weights).sum())
    return result._replace(
        starts=starts, num_failed=len(failures), num_parameters=_num_parameters(model), num_observations=total
    )


Rows = Tensor | None  # indices of sequences, None for all


@dataclass
class _Run:
    """The options of a fit that are the same for all starts."""

    model: Any
    data: Any
    conditions: Mapping[str, Any]
    weights: Any
    method: str
    tolerance: float
    batch_size: int | None
    step: float | Callable[[int], float] | None
    optimizer: Optimizer | None
    generator: Generator | None

    def __post_init__(self) -> None:
        """Check the data and the options, and that they go together."""
        check_choice("method", self.method, ("em", "gradient"))
        values = self.data.data if isinstance(self.data, Sequences) else self.data
        check_is_tensor("data", values)
        check_has_values("data", values)
        n, self.device = len(self.data), values.device
        if not n:
            raise ValueError("data: expected at least one sequence, got none")
        if self.weights is not None:
            weights = self.weights if isinstance(self.weights, Tensor) else np.asarray(self.weights)
            self.weights = as_tensor("weights", weights, values, cast=False)
            if self.weights.shape != (n,):
                raise ValueError(f"weights: expected shape [{n}], got {list(self.weights.shape)}")
            self.weights = self.weights.to(self.device, torch.float64)
            if not bool((self.weights >= 0).all() and self.weights.isfinite().all() and (self.weights > 0).any()):
                raise ValueError("weights: expected finite numbers from 0 on, not all 0")
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
            for name, value in self.conditions.items():
                if isinstance(value, Tensor) and value.dim() and len(value) != n:
                    expected = f"{n} along the first axis, as the data"
                    raise ValueError(f"{name}: expected {expected}, got {len(value)}")
        if self.step is not None and not callable(self.step):
            check_step(self.step)
        if self.optimizer is not None and not callable(self.optimizer):
            raise TypeError(f"optimizer: expected a function of the parameters, got {self.optimizer!r}")
        self.trained = {name: part for name, part in self.model.named_parameters() if part.requires_grad}
        if self.method == "em":
            if self.optimizer is not None:
                raise ValueError("optimizer: expected None with method 'em'")
            of_parts = {id(parameter) for part in trained_parts(self.model) for parameter in part.parameters()}
            if names := [name for name, parameter in self.trained.items() if id(parameter) not in of_parts]:
                expected = "'gradient' for parameters without a maximum in closed form"
                raise ValueError(f"method: expected {expected}, got 'em' with {', '.join(names)}")
            return
        if not self.trained:
            raise ValueError("model: expected trained parameters with method 'gradient', got none")
        if self.step is not None:
            raise ValueError("step: expected None with method 'gradient', whose optimizer has one")
        half = any(parameter.dtype == torch.float16 for parameter in self.trained.values())
        if half and not self.optimizer and not self.moving:
            raise ValueError("optimizer: expected one for parameters in float16, in which L-BFGS overflows, got None")

    @property
    def moving(self) -> bool:
        """Whether the parameters change after each batch."""
        return self.step is not None or (self.method == "gradient" and self.batch_size is not None)

    def batches(self) -> Iterator[Rows]:
        """The indices of the sequences of each batch."""
        n = len(self.data)
        size = self.batch_size or n
        if size >= n:
            yield None
            return
        order = torch.arange(n)
        if self.moving:
            where = "cpu" if self.generator is None else self.generator.device
            order = torch.randperm(n, generator=self.generator, device=where)
        yield from order.to(self.device).split(size)

    def share(self, rows: Rows) -> float:
        """The share of all data that a batch has, 1 if batches are added up before each step."""
        return len(rows) / len(self.data) if self.moving and rows is not None else 1.0

    def log_likelihood(self, rows: Rows) -> Tensor:
        """The log-likelihood of a batch, divided by its share."""

        def part(value: Any) -> Any:
            divided = isinstance(value, Sequences) or (isinstance(value, Tensor) and value.dim() > 0)
            return value[rows] if divided and rows is not None else value

        conditions = {name: part(value) for name, value in self.conditions.items()}
        log_likelihoods: Tensor = self.model.log_prob(part(self.data), **conditions).double()
        log_likelihoods = log_likelihoods.flatten(1).sum(1) if log_likelihoods.dim() > 1 else log_likelihoods
        weights = part(self.weights)
        if weights is not None:  # a weight of 0 excludes impossible sequences, too
            log_likelihoods = torch.where(weights > 0, log_likelihoods, 0.0) * weights
        return log_likelihoods.sum() / self.share(rows)

    def has_converged(self, history: list[float]) -> bool:
        """Whether the last gain is below the tolerance and, by EM, all further ones are, if they fall geometrically."""
        gains = [after - before for before, after in pairwise(history[-3:])]
        if self.moving or not gains or self.tolerance < 0:
            return False
        if gains[-1] <= 0:
            return True
        if self.method == "gradient":
            return gains[-1] < self.tolerance
        slower = len(gains) == 2 and gains[1] < min(self.tolerance, gains[0])
        return slower and gains[1] ** 2 / (gains[0] - gains[1]) < self.tolerance

    def draw(self, restarts: int | None) -> None:
        """Draw the parameters of a start, with None those that nobody has set."""
        if restarts == 0:
            return
        with untrained(set_parameters(self.model) if restarts is None else ()):
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                return
            if hasattr(self.model, "initialize"):
                self.model.initialize(self.data, generator=self.generator, **self.conditions)
            elif restarts is not None:
                reset_parameters(self.model, self.generator)

    def start(self, iterations: Iterable[int]) -> Fit:
        """The fit from the present parameters."""
        history, converged, self.numbers = list[float](), False, count()
        advance = self.em if self.method == "em" else partial(self.gradient, self.new_optimizer())
        for _ in iterations:
            groups = [[rows] for rows in self.batches()] if self.moving else [list(self.batches())]
            history.append(_finite(sum(advance(group) * self.share(group[0]) for group in groups)))
            if converged := self.has_converged(history):
                break
        with torch.no_grad():
            log_likelihood = _finite(sum(self.log_likelihood(rows) * self.share(rows) for rows in self.batches()))
            history.append(_finite(log_likelihood + log_prior(self.model)))
        converged = converged or self.has_converged(history)
        return Fit(log_likelihood, history[-1], tuple(history), len(history) - 1, converged, (history[-1],))

    def em(self, batches: list[Rows]) -> Tensor:
        """Take a step of expectation maximization; returns an estimate of the log-posterior before it."""
        step = self.step(next(self.numbers)) if callable(self.step) else self.step
        with torch.no_grad():
            before: Tensor = log_prior(self.model)
        functions = (partial(self.log_likelihood, rows) for rows in batches)
        return em_step(self.model, functions, 1.0 if step is None else step) + before

    def gradient(self, optimizer: Any, batches: list[Rows]) -> Tensor:
        """Take a step of an optimizer; returns an estimate of the log-posterior before it."""

        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                # a mean over sequences, so that a learning rate suits any number of them
                loss: Tensor = -(self.log_likelihood(batches[0]) + log_prior(self.model)) / len(self.data)
            loss.backward()
            return loss

        loss: Tensor = optimizer.step(closure)
        return -loss.detach() * len(self.data)

    def new_optimizer(self) -> Any:
        """The optimizer of a start: the user's, L-BFGS, or Adam with mini-batches."""
        adam, lbfgs = partial(torch.optim.Adam, lr=1e-2), partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")
        optimizer: Any = (self.optimizer or (adam if self.moving else lbfgs))(list(self.trained.values()))
        if not hasattr(optimizer, "step"):
            expected = "a function that returns an optimizer"
            raise TypeError(f"optimizer: expected {expected}, got one that returns {optimizer!r}")
        return optimizer


def _num_parameters(model: nn.Module) -> int:
    """Free trained parameters: `num_parameters()` of the modules that have it, of their own parameters."""
    total, counted = 0, set[nn.Parameter]()
    for part in model.modules():
        if trained := [p for p in part.parameters(recurse=False) if p.requires_grad and p not in counted]:
            counted.update(trained)
            of_part: Any = getattr(part, "num_parameters", None)
            total += sum(parameter.numel() for parameter in trained) if of_part is None else of_part()
    return total


def _finite(total: Any) -> float:
    value = float(total)
    if not math.isfinite(value):
        raise ValueError(f"data: expected a finite log-likelihood, got {value}: see `log_prob` of each sequence")
    return value
