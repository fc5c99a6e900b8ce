"""Expectation maximization: a step of all parts of a model, and L-BFGS for parts without a closed form."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_differentiable, check_step
from .parameters import arithmetic, frozen


def trained_parts(model: nn.Module) -> list[Any]:
    """The outermost modules with trained parameters that have a maximization step, which fits what is inside them."""
    if callable(getattr(model, "statistics", None)):
        return [model] if any(parameter.requires_grad for parameter in model.parameters()) else []
    parts = (part for child in model.children() for part in trained_parts(child))
    return list(dict.fromkeys(parts))  # a part may be shared


def em_step(model: nn.Module, log_likelihoods: Iterable[Callable[[], Tensor]], step: float = 1.0) -> Tensor:
    r"""One step of expectation maximization: `theta <- argmax E[log p(data, hidden; theta)]` over all parts of a model.

    Args:
        model: a module. Its parts are the submodules (or itself) that have a trained parameter and two methods, as
            `LogWeights` and emissions have: `statistics(flow, *inputs)`, whose results can be added (`+`), where
            `flow` is the derivative of the log-likelihood by the result of `forward(*inputs)`, the expected number of
            times that each log-weight is used; and `maximize(statistics, step)`.
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
    parts, calls, sums = trained_parts(model), list[Any](), dict[Any, Any]()
    parameters = [parameter for part in parts for parameter in part.parameters()]

    def record(part: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            calls.append((part, output, inputs, named))

    handles = [part.register_forward_hook(record, with_kwargs=True) for part in parts]
    totals = list[Tensor]()
    try:
        for batch in log_likelihoods:
            calls.clear()
            with torch.enable_grad():
                total = batch()
            totals.append(total.detach())
            outputs = [output for _, output, _, _ in calls]
            flows = torch.autograd.grad(total, outputs, materialize_grads=True) if outputs else ()
            with torch.no_grad():
                for (part, _, inputs, named), flow in zip(calls, flows, strict=True):
                    statistics = part.statistics(flow, *inputs, **named)
                    sums[part] = sums[part] + statistics if part in sums else statistics
    finally:
        for handle in handles:
            handle.remove()
    if not totals:
        raise ValueError("log_likelihoods: expected at least one batch, got none")
    with frozen(parameters):
        for part, statistics in sums.items():
            part.maximize(statistics, step)
    return sum(totals[1:], totals[0])


def maximize_by_lbfgs(parameters: list[nn.Parameter], objective: Callable[[], Tensor], iterations: int) -> None:
    """Set parameters, in place, to the best that L-BFGS visits from the present ones, in float32 at least.

    Where one is NaN, or the objective is not finite or raises a ValueError, the line search takes a shorter step.
    """
    stored = [parameter.data for parameter in parameters]
    best, values = math.inf, [data.clone() for data in stored]
    for parameter in parameters:
        parameter.data = arithmetic(parameter.data)
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")

    def loss_of_parameters() -> Tensor:
        nonlocal best, values
        optimizer.zero_grad()
        loss = torch.tensor(math.inf)
        with nullcontext() if best == math.inf else suppress(ValueError):
            if not any(bool(parameter.isnan().any()) for parameter in parameters):
                loss = -objective()
        if not loss.isfinite():  # the line search needs a number, more than the least so far
            return loss.new_tensor(best + 1 + abs(best))
        if loss < best:
            best, values = loss.item(), [parameter.detach().clone() for parameter in parameters]
        loss.backward()
        return loss

    try:
        with suppress(ZeroDivisionError):  # of torch, where a line search has no interval left
            optimizer.step(loss_of_parameters)
    finally:
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, data, value in zip(parameters, stored, values, strict=True):
                parameter.data = data
                parameter.copy_(value)
