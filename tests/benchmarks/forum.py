"""The forum's code that the library started from, written anew with its faults: a baseline, not to be used."""

import torch
from torch import Tensor


def product(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The same chain as `logchain.product`, by pairwise products of the materialised matrices; wrong in two ways.

    An odd stack is padded with log-zeros, which is a matrix of ones and not the identity, and whatever lies 23 nats
    below both maxima is lifted to that floor. The stack [*B, v-1, c, c] is materialised, and matrices are multiplied
    by matrices though a vector stands at the end.

    Args:
        x: log-potentials [*B, v, c] in nats, v >= 2.
        bulk: transition probabilities [*B, v-1, c, c], from and to; leading axes broadcast.
        p0: initial weights [*B, c]; leading axes broadcast.

    Returns:
        What it takes for the log-partition [*B], in nats.
    """
    stack = x[..., :-1, :, None] + bulk.log()  # (*B, v-1, c, c)
    while stack.shape[-3] > 1:
        if stack.shape[-3] % 2:
            padding = stack.new_zeros(*stack.shape[:-3], 1, *stack.shape[-2:])
            stack = torch.cat((stack, padding), -3)
        stack = matmul(stack[..., 0::2, :, :], stack[..., 1::2, :, :])
    joint = p0.log()[..., :, None] + stack[..., 0, :, :] + x[..., -1, None, :]  # (*B, c, c)
    return joint.logsumexp((-2, -1))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`log(exp(a) @ exp(b))` with one shift per row of `a` and per column of `b`, floored at 1e-10."""
    rows, columns = a.amax(-1, keepdim=True), b.amax(-2, keepdim=True)
    return ((a - rows).exp() @ (b - columns).exp()).clamp(1e-10).log() + rows + columns
