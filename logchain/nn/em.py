"""Expectation maximisation of modules whose parts have a maximum in closed form."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .checks import check_step


@runtime_checkable
class Part(Protocol):
    """The methods by which expectation maximisation fits a module.

    `statistics(flow, *inputs)`: the expected sufficient statistics, in float64, where `flow` is how often each entry of
    what `forward(*inputs)` returned is expected to be used. They add up over batches. `maximise(statistics, step)`:
    take the parameters of the largest expected log-likelihood, or go a `step` of the way in the mean parameters.
    """

    def statistics(self, flow: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """The expected sufficient statistics, in float64."""

    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Change the parameters."""


Statistics = dict[Part, Tensor]


def expected_statistics(
    model: torch.nn.Module, log_likelihood: Callable[[], Tensor], before: Statistics | None = None
) -> tuple[Tensor, Statistics]:
    r"""The E step: `E[T]` under the posterior, for every part of a model, from one forward and one backward pass.

    The derivative of a log-likelihood by a log-weight is its flow, how often the weight is expected to be used. A part
    turns flows into its sufficient statistics: no model needs formulas of its own.

    Args:
        model: a module, whose parts with `statistics` and `maximise` are fitted if all of their parameters are trained.
        log_likelihood: computes the sum over a batch, a scalar, by calling the parts of the model.
        before: statistics of earlier batches, which are added to.

    Returns:
        The log-likelihood, and the statistics of each part that was used.

    Cost: one forward and one backward pass of `log_likelihood`.

    Source: A. Darwiche, "A differential approach to inference in Bayesian networks", J. ACM 50 (2003).
    """
    used: list[tuple[Part, tuple[Any, ...], dict[str, Any], Tensor]] = []

    def see(part: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        assert isinstance(part, Part)
        if output.requires_grad:
            used.append((part, inputs, named, output))

    parts = [part for part in model.modules() if isinstance(part, Part)]
    trained = [part for part in parts if all(parameter.requires_grad for parameter in part.parameters())]
    handles = [part.register_forward_hook(see, with_kwargs=True) for part in trained]
    try:
        with torch.enable_grad():
            total = log_likelihood()
    finally:
        for handle in handles:
            handle.remove()
    if not used:
        return total.detach(), before or {}
    flows = torch.autograd.grad(total, [output for *_, output in used], materialize_grads=True)
    sums = dict(before or {})
    with torch.no_grad():
        for (part, inputs, named, _), flow in zip(used, flows, strict=True):
            statistics = part.statistics(flow, *inputs, **named)
            sums[part] = sums[part] + statistics if part in sums else statistics
    return total.detach(), sums


def maximise(statistics: Statistics, step: float = 1.0) -> None:
    """The M step: each part takes the parameters of the largest expected log-likelihood, or goes part of the way."""
    for part, expected in statistics.items():
        part.maximise(expected, step)


def em_step(model: torch.nn.Module, log_likelihoods: Iterable[Callable[[], Tensor]], step: float = 1.0) -> Tensor:
    r"""One step of expectation maximisation: `theta <- argmax E[log p(data, hidden; theta)]` over all parts of a model.

    Args:
        model: see `expected_statistics`.
        log_likelihoods: of each batch; the statistics of all are added up before the parameters change.
        step: in 0..1, how far to go, for batches that are only a part of the data.

    Returns:
        The log-likelihood before the step. With `step=1`, all the data and no priors it never falls.

    Raises:
        ValueError: there is no batch, or `step` is out of range.

    >>> from logchain.nn import LogWeights
    >>> coin = LogWeights(2)
    >>> before = em_step(coin, [lambda: 3 * coin()[0] + coin()[1]])
    >>> coin().exp().detach()
    tensor([0.7500, 0.2500])
    """
    check_step(step)
    total: Tensor | None = None
    statistics: Statistics = {}
    for log_likelihood in log_likelihoods:
        reached, statistics = expected_statistics(model, log_likelihood, statistics)
        total = reached if total is None else total + reached
    if total is None:
        raise ValueError("log_likelihoods: expected at least one batch, got none")
    maximise(statistics, step)
    return total
