"""Maximization of objectives without a maximum in closed form."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from .parameters import arithmetic


def maximize_by_lbfgs(parameters: list[torch.nn.Parameter], objective: Callable[[], Tensor], iterations: int) -> None:
    """Set parameters, in place, to the best that L-BFGS meets from the present ones.

    Parameters in half precision are optimized in float32. Where one is NaN, or the objective is not finite or raises a
    ValueError, such as for data that they exclude, the line search takes a shorter step.
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
