"""`kernels.plain.product` with its passes over matrices compiled by numba: one before each product, one behind it.

    a leaf        top = max a,           e = exp(a - top)           each matrix while a cache holds it
    a product     least and largest sum, then sums over the largest

Largest and least are found among the bits of floats, as integers, whose order does not depend on NaN: so the loops
become vectors. Names, meaning and numerics are those of `kernels.plain.product`, which takes over where the
sums say that linear numbers do not do; exponentials to 1e-7 (float32) and 3e-16, and 0 below 2^-115 and 2^-995.
Cost of a product: c^3 multiply-adds, two passes over its result and two over each leaf.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from . import native_exp
from .native import compiled
from .plain import product as tree
from .plain.nodes import Block, Nodes

__all__ = ["Arithmetic", "Nodes"]

bits: Any = native_exp.bits
from_bits: Any = native_exp.from_bits
ordered: Any = native_exp.ordered
from_ordered: Any = native_exp.from_ordered
exp: Any = native_exp.exp


class Arithmetic(tree.Arithmetic):
    """Products of nodes, see `kernels.plain.product`."""

    def __init__(self, c: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(c, most, dtype, device)
        self._arrays = self._buffers.numpy()

    def multiply(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """`out = left right`; it may lie over either."""
        sides = [self._side(nodes) for nodes in (left, right)]
        if None in sides or out.values.stride(-1) != 1:
            super().multiply(left, right, out)
            return
        taken, lines = out.taken.zero_().numpy(), _lines(out.values)
        finish = _compiled(self._buffers.dtype)[1]
        (g, p), (sets, slots) = taken.shape[:2], self._block(out)
        credit = 1  # where linear products fail, it is not tried each time
        for z, i in product(range(0, g, sets), range(0, p, slots)):
            grid = z, i, min(sets, g - z), min(slots, p - i)
            at = slice(z, z + sets), slice(i, i + slots)
            done = False
            if credit > 0:
                factors = [side(number, taken, grid, at) for number, side in enumerate(sides) if side]
                torch.bmm(*factors, out=self._buffers[2].narrow(0, 0, grid[2] * grid[3]))
                done = finish(self._arrays[2], self._trusted, taken, *grid, *lines)
                credit += 1 if done else -1
            if not done:
                a, b, into = (Block(nodes.values[at], nodes.linear[at], nodes.leaf) for nodes in (left, right, out))
                self._multiply_logs(a, b, into, out.taken[at])
            out.linear[at] = done
        self._add_offsets(left, right, out)

    def _side(self, nodes: Nodes) -> Callable[..., Tensor] | None:
        """What makes linear matrices (n, c, c) of an operand's nodes, a block at a time; None if torch is to do it."""
        if not nodes.leaf and nodes.linear.all():

            def flat(number: int, taken: Any, grid: tuple[int, ...], at: tuple[slice, slice]) -> Tensor:
                values = nodes.values[at]
                return tree._flat(values, self._buffers[number].narrow(0, 0, grid[2] * grid[3]).view(values.shape))

            return flat
        if not nodes.leaf or nodes.values.dtype != self._buffers.dtype or nodes.values.stride(-1) != 1:
            return None
        leaves, lines = _compiled(self._buffers.dtype)[0], _lines(nodes.values)

        def linear(number: int, taken: Any, grid: tuple[int, ...], at: tuple[slice, slice]) -> Tensor:
            leaves(self._arrays[number], taken, number + 1, *grid, *lines)
            return self._buffers[number].narrow(0, 0, grid[2] * grid[3])

        return linear

    def _linear(self, block: Block, buffer: Tensor, top: Tensor) -> Tensor:
        if block.values.dtype != buffer.dtype or not block.leaf and block.are_linear or block.values.stride(-1) != 1:
            return super()._linear(block, buffer, top)
        flat = buffer.flatten(0, 1)
        _compiled(buffer.dtype)[0](flat.numpy(), top[..., None].numpy(), 0, 0, 0, *top.shape, *_lines(block.values))
        return flat


def _lines(values: Tensor) -> tuple[Any, ...]:
    """Matrices (g, p, c, c) whose rows are contiguous as the memory that they span, and their strides."""
    g, p, rows, length = values.shape
    over_sets, over_slots, over_rows, _ = values.stride()
    span = (g - 1) * over_sets + (p - 1) * over_slots + (rows - 1) * over_rows + length
    flat = values.as_strided((span,), (1,)).numpy()
    if over_rows == length:
        return flat, over_sets, over_slots, 0, 1, rows * length
    return flat, over_sets, over_slots, over_rows, rows, length


def _leaves(out, taken, part, z0, i0, sets, slots, flat, over_sets, over_slots, over_rows, rows, length):  # type: ignore[no-untyped-def]
    """Logarithms less the largest of each matrix as linear numbers (n, c, c).

    A `part` of `taken` (g, p, 4) becomes what was taken out. One that is -inf makes NaN, whose sums are not trusted.
    """
    found = out.reshape(out.shape[0], -1)
    for n in range(sets * slots):
        z, i = z0 + n // slots, i0 + n % slots
        start = z * over_sets + i * over_slots
        best = ordered(flat[start])
        for row in range(rows):
            line = flat[start + row * over_rows : start + row * over_rows + length]
            for j in range(length):
                entry = ordered(line[j])
                best = entry if entry > best else best
        taken[z, i, part] = from_ordered(best)
        shift = taken[z, i, part]
        for row in range(rows):
            line = flat[start + row * over_rows : start + row * over_rows + length]
            target = found[n, row * length : (row + 1) * length]
            for j in range(length):
                target[j] = exp(line[j] - shift)


def _finish(sums, trusted, taken, z0, i0, sets, slots, flat, over_sets, over_slots, over_rows, rows, length):  # type: ignore[no-untyped-def]
    """Sums (n, c, c) over the largest of each matrix, unless one is too small.

    The first part of `taken` (g, p, 4) becomes what they were divided by.
    """
    found = sums.reshape(sums.shape[0], -1)
    for n in range(sets * slots):
        matrix = found[n]
        least = most = bits(matrix[0])
        for j in range(len(matrix)):
            entry = bits(matrix[j])
            least = entry if entry < least else least
            most = entry if entry > most else most
        # a NaN is larger than infinity or, of the other sign, smaller than zero
        if not (from_bits(least) >= trusted and from_bits(most) < np.inf):
            return False
        taken[z0 + n // slots, i0 + n % slots, 0] = from_bits(most)
    for n in range(sets * slots):
        z, i = z0 + n // slots, i0 + n % slots
        start, most = z * over_sets + i * over_slots, taken[z, i, 0]
        for row in range(rows):
            line = found[n, row * length : (row + 1) * length]
            target = flat[start + row * over_rows : start + row * over_rows + length]
            for j in range(length):
                target[j] = line[j] / most
    return True


@cache
def _compiled(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both passes for float32 or float64, from numba's cache on disk where there is one."""
    real = numba.float64 if dtype == torch.float64 else numba.float32
    place = real[:, :, :], *(numba.int64,) * 4, real[::1], *(numba.int64,) * 5
    taken, *grid_and_lines = place
    leaves = numba.void(real[:, :, ::1], taken, numba.int64, *grid_and_lines)
    finish = numba.boolean(real[:, :, ::1], numba.float64, taken, *grid_and_lines)
    return compiled(_leaves, leaves), compiled(_finish, finish)
