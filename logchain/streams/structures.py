"""Matrices of a stream: a tensor `[*Bb, k or 1, c, c]`, or a structure of parameters `[*B or ones, k or 1, *own]`."""

from collections.abc import Callable

from torch import Tensor

from ..autograd.matmul import broadcast_log_matmul
from ..transitions import LOG, Transition

Matrices = Tensor | Transition


def parts(matrices: Matrices) -> list[tuple[Tensor, int]]:
    """The tensors that matrices consist of, each with the number of its last axes behind batch and steps."""
    if isinstance(matrices, Tensor):
        return [(matrices, 2)]
    return list(zip(matrices.parameters, matrices.own_axes, strict=True))


def each(function: Callable[..., Tensor], *matrices: Matrices) -> Matrices:
    """The matrices of which each tensor is `function(*tensors, own)`, of one or more that differ in tensors alone."""
    first, columns = matrices[0], zip(*map(parts, matrices), strict=True)
    found = [function(*(tensor for tensor, _ in column), column[0][1]) for column in columns]
    return found[0] if isinstance(first, Tensor) else first.with_parameters(*found)


def with_lead(matrices: Matrices, axes: int) -> Matrices:
    """Matrices of which all parameters of a structure have so many leading axes: batch and steps."""
    if isinstance(matrices, Tensor):
        return matrices
    return each(lambda parameter, own: parameter[(None,) * (axes + own - parameter.dim())], matrices)


def steps_of(matrices: Matrices) -> int:
    """The size of the axis of steps."""
    return max(tensor.shape[-1 - own] for tensor, own in parts(matrices))


def step_at(matrices: Matrices, i: int) -> Matrices:
    """The matrices of step i, without the axis of steps; of one for all steps that one."""
    return each(lambda tensor, own: tensor.select(-1 - own, 0 if tensor.shape[-1 - own] == 1 else i), matrices)


def steps_between(matrices: Matrices, start: int, stop: int) -> Matrices:
    """The matrices of the steps from `start` to before `stop`; of one for all steps that one."""

    def between(tensor: Tensor, own: int) -> Tensor:
        return tensor if tensor.shape[-1 - own] == 1 else tensor.narrow(-1 - own, start, stop - start)

    return each(between, matrices)


def through(messages: Tensor, matrices: Matrices) -> Tensor:
    """Logarithmic messages [*lead, rows, c] behind matrices [*lead or ones, c, c], or behind such a structure."""
    if isinstance(matrices, Tensor):
        return broadcast_log_matmul(messages, matrices)
    return matrices.apply(messages, LOG)
