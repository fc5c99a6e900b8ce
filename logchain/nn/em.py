"""Expectation maximization of modules whose parts have maximum-likelihood parameters in closed form."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .checks import check_differentiable, check_step


@runtime_checkable
class Part(Protocol):
    """A module that expectation maximization fits by two methods.

    The `flow` is the derivative of the log-likelihood by what `forward(*inputs)` returned: how often each log-weight is
    expected to be used.
    """

    def statistics(self, flow: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """The expected sufficient statistics of a batch, in float64; those of several batches are added."""

    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Take the parameters of the largest expected log-likelihood, or move the mean parameters `step` of the way."""


def trained_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model that expectation maximization fits: each `Part` of which a parameter is trained."""
    parts = [part for part in model.modules() if isinstance(part, Part)]
    return [part for part in parts if any(parameter.requires_grad for parameter in part.parameters())]


def expected_statistics(
    model: torch.nn.Module, log_likelihood: Callable[[], Tensor]
) -> tuple[Tensor, list[tuple[Part, Tensor]]]:
    r"""The log-likelihood, and the expected sufficient statistics `E[T]` of every call of a part: the E step.

    `log_likelihood` computes that of a batch, a scalar, by calling parts of the model. Its derivative by a log-weight
    is the flow of that weight, by one forward and one backward pass. Each part turns its flows into statistics.

    Source: A. Darwiche, "A differential approach to inference in Bayesian networks", J. ACM 50 (2003).
    """
    used: list[tuple[Part, tuple[Any, ...], dict[str, Any], Tensor]] = []

    def record(part: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        assert isinstance(part, Part)
        if output.requires_grad:
            used.append((part, inputs, named, output))

    handles = [part.register_forward_hook(record, with_kwargs=True) for part in trained_parts(model)]
    try:
        with torch.enable_grad():
            total = log_likelihood()
    finally:
        for handle in handles:
            handle.remove()
    outputs = [output for *_, output in used]
    flows = torch.autograd.grad(total, outputs, materialize_grads=True) if used else ()
    with torch.no_grad():
        statistics = [
            (part, part.statistics(flow, *inputs, **named))
            for (part, inputs, named, _), flow in zip(used, flows, strict=True)
        ]
    return total.detach(), statistics


def em_step(model: torch.nn.Module, log_likelihoods: Iterable[Callable[[], Tensor]], step: float = 1.0) -> Tensor:
    r"""One step of expectation maximization: `theta <- argmax E[log p(data, hidden; theta)]` over all parts of a model.

    Args:
        model: a module; fitted are its submodules (or itself) that have methods `statistics` and `maximize`, as
            `LogWeights` and most emissions have, and of which any parameter is trained.
        log_likelihoods: for each batch, a function that computes its log-likelihood (a scalar, nats) by calling the
            model. The statistics of all batches are added up before the parameters change.
        step: in 0..1, the part of the way to the maximum that the mean parameters move; less than 1 for mini-batches.

    Returns:
        The log-likelihood before the step. With `step=1`, all the data and no priors it never falls from step to step.

    Raises:
        ValueError: there is no batch, or `step` is out of range.
        RuntimeError: `torch.inference_mode` is on.
        DegenerateError: a part has no maximum; see `Gaussian`.

    >>> from logchain.nn import LogWeights
    >>> coin = LogWeights(2)
    >>> before = em_step(coin, [lambda: 3 * coin()[0] + coin()[1]])
    >>> coin().exp().detach()
    tensor([0.7500, 0.2500])
    """
    check_step(step)
    check_differentiable("em_step")
    totals: list[Tensor] = []
    sums: dict[Part, Tensor] = {}
    for log_likelihood in log_likelihoods:
        total, statistics = expected_statistics(model, log_likelihood)
        totals.append(total)
        for part, expected in statistics:
            sums[part] = sums[part] + expected if part in sums else expected
    if not totals:
        raise ValueError("log_likelihoods: expected at least one batch, got none")
    for part, expected in sums.items():
        part.maximize(expected, step)
    return sum(totals[1:], totals[0])
