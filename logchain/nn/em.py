"""Expectation maximization of modules whose parts have maximum-likelihood parameters in closed form."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .checks import check_differentiable, check_step
from .parameters import frozen


class Part(Protocol):
    """A module that expectation maximization fits by two methods.

    The `flow` is the derivative of the log-likelihood by what `forward(*inputs)` returned: how often each log-weight is
    expected to be used. Parameters that are not trained stay as they are.
    """

    def statistics(self, flow: Tensor, *inputs: Any, **named: Any) -> Any:
        """The expected sufficient statistics of a batch; those of several batches are added (`+`)."""

    def maximize(self, statistics: Any, step: float = 1.0) -> None:
        """Take the parameters of the largest expected log-posterior, or move the mean parameters `step` of the way."""


class Call(NamedTuple):
    """A call of a part, and what it returned."""

    part: Any
    output: Tensor
    inputs: tuple[Any, ...]
    named: dict[str, Any]


def trained_parts(model: torch.nn.Module) -> list[Any]:
    """The modules of a model that expectation maximization fits: each outermost `Part` of which a parameter is trained.

    What is inside a part is fitted by the part.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return []
    if callable(getattr(model, "statistics", None)):
        return [model]
    parts = (part for child in model.children() for part in trained_parts(child))
    return list(dict.fromkeys(parts))  # a part may be shared


def em_step(model: torch.nn.Module, log_likelihoods: Iterable[Callable[[], Tensor]], step: float = 1.0) -> Tensor:
    r"""One step of expectation maximization: `theta <- argmax E[log p(data, hidden; theta)]` over all parts of a model.

    Args:
        model: a module; fitted are its submodules (or itself) that have methods `statistics` and `maximize`, as
            `LogWeights` and emissions have, and of which a parameter is trained.
        log_likelihoods: for each batch, a function that computes its log-likelihood (a scalar, nats) by calling the
            model. The statistics of all batches are added up before the parameters change.
        step: in 0..1, the part of the way to the maximum that the mean parameters move; less than 1 for mini-batches.

    Returns:
        The log-likelihood before the step. With `step=1` and all the data, the sum of the log-likelihood and the
        `log_prior()` of all parts never falls from step to step.

    Raises:
        ValueError: there is no batch, `step` is out of range, or a part has no maximum; see `Gaussian`.
        RuntimeError: `torch.inference_mode` is on.

    Source: A. Darwiche, "A differential approach to inference in Bayesian networks", J. ACM 50 (2003), for expected
    counts as derivatives.

    >>> from logchain.nn import LogWeights
    >>> coin = LogWeights(2)
    >>> before = em_step(coin, [lambda: 3 * coin()[0] + coin()[1]])
    >>> coin().exp().detach()
    tensor([0.7500, 0.2500])
    """
    check_step(step)
    check_differentiable("em_step")
    with em_steps(model) as update:
        return update(log_likelihoods, step)


@contextmanager
def em_steps(model: torch.nn.Module) -> Iterator[Callable[[Iterable[Callable[[], Tensor]], float], Tensor]]:
    """The function `em_step` of a model whose calls are recorded in this context."""
    parts, calls = trained_parts(model), list[Call]()
    parameters = [parameter for part in parts for parameter in part.parameters()]

    def record(part: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            calls.append(Call(part, output, inputs, named))

    def update(batches: Iterable[Callable[[], Tensor]], step: float) -> Tensor:
        totals, sums = list[Tensor](), dict[Any, Any]()
        for batch in batches:
            calls.clear()
            with torch.enable_grad():
                total = batch()
            totals.append(total.detach())
            outputs = [call.output for call in calls]
            flows = torch.autograd.grad(total, outputs, materialize_grads=True) if outputs else ()
            with torch.no_grad():
                for (part, _, inputs, named), flow in zip(calls, flows, strict=True):
                    statistics = part.statistics(flow, *inputs, **named)
                    sums[part] = sums[part] + statistics if part in sums else statistics
        calls.clear()
        if not totals:
            raise ValueError("log_likelihoods: expected at least one batch, got none")
        with frozen(parameters):
            for part, statistics in sums.items():
                part.maximize(statistics, step)
        return sum(totals[1:], totals[0])

    handles = [part.register_forward_hook(record, with_kwargs=True) for part in parts]
    try:
        yield update
    finally:
        for handle in handles:
            handle.remove()
