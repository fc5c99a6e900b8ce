"""Chains whose matrices are products of factors, in float64 logarithms: the definition, on any device."""

import math

import torch
from torch import Tensor

from ..stages import from_rows, mapped, matrices, own_shape, rows_behind, through, to_rows
from ..structured import Factors, Gradients, Structured, Walk
from . import matmul as log_matmul
from . import structured


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads."""
    return structured.forward(chain, _passing(chain.pattern), keep)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    return structured.backward(chain, _passing(chain.pattern), walk, weight, needs)


def _passing(pattern: Factors) -> structured.Passing:
    """A message through the factors; the largest cannot be taken out of each where a diagonal is added."""

    def forward_step(message: Tensor, parameters: list[Tensor]) -> Tensor:
        return through(message, parameters, pattern, _matmul, torch.logaddexp, torch.add)

    def backward_step(message: Tensor, weight: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return _back(message, weight, parameters, pattern)

    return structured.Passing(forward_step, backward_step, apart=not pattern.diagonal)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return log_matmul.forward(a, b, torch.float64)[0]


def _back(before: Tensor, weight: Tensor, parameters: list[Tensor], pattern: Factors) -> tuple[Tensor, list[Tensor]]:
    """The weights on the message before a step, from those on the sums after it, and the expected counts."""
    messages, counts, straight, stayed = [before], [], torch.zeros_like(before), []
    for stage, parameter in zip(pattern.stages, parameters, strict=False):
        messages.append(mapped(messages[-1], parameter, stage, _matmul))
    if pattern.diagonal:
        stays = before + parameters[-1][:, None]
        sums = torch.logaddexp(messages[-1], stays)
        sums = sums.masked_fill(sums == -math.inf, 0.0)
        straight = (stays - sums).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        weight = (messages[-1] - sums).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        stayed = [straight.sum(1)]
    for stage, parameter, message in list(zip(pattern.stages, parameters, messages, strict=False))[::-1]:
        rows = rows_behind(weight, stage, parameter)
        of_rows, of_matrices = log_matmul.backward(
            rows, to_rows(message, stage), matrices(parameter, stage), True, True, torch.float64
        )
        assert of_rows is not None and of_matrices is not None
        counts.append(own_shape(of_matrices, stage))
        into = stage._replace(order=tuple(range(len(stage.axes))))
        weight = from_rows(of_rows, into, before.shape[1])
    return weight + straight, [*counts[::-1], *stayed]
