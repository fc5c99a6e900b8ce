"""Maximization of objectives without a maximum in closed form."""

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor


def maximize_by_lbfgs(parameters: list[torch.nn.Parameter], objective: Callable[[], Tensor], iterations: int) -> None:
    """Set parameters, in place, to the best that L-BFGS meets from the present ones."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")
    best, values = math.inf, [parameter.detach().clone() for parameter in parameters]

    def loss_of_parameters() -> Tensor:
        nonlocal best, values
        optimizer.zero_grad()
        loss = -objective()
        if not loss.isfinite():  # the supremum may lie at infinity, where a line search leaves the numbers
            raise FloatingPointError
        if loss < best:
            best, values = loss.item(), [parameter.detach().clone() for parameter in parameters]
        loss.backward()
        return loss

    with suppress(FloatingPointError):
        optimizer.step(loss_of_parameters)
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
