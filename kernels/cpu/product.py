"""Products of stacks of matrices of logarithms on the tree of c/tree.h, in linear numbers with scales.

If there are fewer stacks than threads, stacks are cut into segments, whose products are multiplied in float64. Stacks
in which a sum may have underflowed, and those of one matrix, are computed by `kernels.plain`.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..numbers import exact_sum, near_one
from ..plain import product as plain
from ..tree import add_offset
from .arguments import run, thread_spans
from .library import struct

# least matrices of a segment, which are worth the additional product
_SHORTEST = 8

# `Stack` of c/tree.h
Arguments = struct(
    "matrices states segments prefixes first last *stack stack_set stack_step stack_row stack_column *weights *scale"
    " *out *products *offset *grad *flagged *scratch"
)


def write_product(stack: Tensor, out: Tensor, *, inplace: bool) -> int:
    """The number of recomputed entries of products, whose logarithms (g, c, c) are written to `out`.

    Stacks (g, s, c, c) have any floating dtype, and may be overwritten if `inplace`.
    """
    matrices = _matrices(stack)
    again = partial(plain.write_product, inplace=inplace or matrices is not stack)
    return _recompute(_products(matrices, out), again, matrices, out)


def product_gradient(weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * log product)` with respect to stacks; weights are (g, c, c)."""
    matrices = _matrices(stack)
    _recompute(_gradients(weight, matrices, into), plain.product_gradient, weight, matrices, into)


def prefixes(stack: Tensor, out: Tensor) -> int:
    """The number of recomputed entries of the products of the first 1 to s matrices, written to `out` (g, s, c, c)."""
    matrices = _matrices(stack)
    count = _recompute(_run(matrices, prefixes=1, out=out), plain.prefixes, matrices, out)
    out[:, 0] = stack[:, 0]
    return count


def prefixes_gradient(weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * prefixes)`."""
    matrices = _matrices(stack)
    flagged = _run(matrices, prefixes=1, weights=weight, grad=into)
    _recompute(flagged, plain.prefixes_gradient, weight, matrices, into)


def _recompute(flagged: Tensor, function: Callable[..., Any], *tensors: Tensor) -> int:
    """The number of entries of the last tensor that belong to flagged stacks, which the function computes again."""
    flags, count = flagged.tolist(), 0
    for flag, group in groupby(range(len(flags)), flags.__getitem__):
        if flag:
            numbers = list(group)
            parts = [tensor[numbers[0] : numbers[-1] + 1] for tensor in tensors]
            function(*parts)
            count += parts[-1].numel()
    return count if tensors[-2].shape[1] > 1 else 0


def _products(stack: Tensor, out: Tensor) -> Tensor:
    """Write products; which stacks are flagged."""
    segments = _segments(stack)
    if segments == 1:
        return _run(stack, out=out)
    products, offset, flagged = _segment_products(stack, segments)
    root, rest, root_flagged = _segment_products(products, 1)
    parts = torch.cat([offset, rest], 1).flatten(1).T.contiguous()
    out.copy_(add_offset(root[:, 0], torch.stack(exact_sum(parts), -1)))
    return flagged | root_flagged


def _segment_products(stack: Tensor, segments: int) -> tuple[Tensor, Tensor, Tensor]:
    """The products (g, segments, c, c) less their offsets (g, segments, 2), and which stacks are flagged."""
    g, _, c, _ = stack.shape
    products, offset = (torch.zeros(g, segments, *size, dtype=torch.float64, device="cpu") for size in ((c, c), (2,)))
    return products, offset, _run(stack, segments=segments, products=products, offset=offset)


def _gradients(weight: Tensor, stack: Tensor, into: Tensor) -> Tensor:
    """Write gradients of products; which stacks are flagged."""
    segments = _segments(stack)
    if segments == 1:
        return _run(stack, weights=weight, grad=into)
    products, _, flagged = _segment_products(stack, segments)
    weights = torch.zeros_like(products)
    flagged |= _run(products, weights=weight.double(), grad=weights)
    return flagged | _run(stack, segments=segments, weights=weights.to(stack.dtype), grad=into)


def _run(stack: Tensor, *, segments: int = 1, prefixes: int = 0, **tensors: Tensor) -> Tensor:
    """Run the library, with pointers to contiguous tensors; which stacks are flagged, or single matrices."""
    if "weights" in tensors:
        weights, factor = near_one(tensors["weights"].contiguous())
        tensors.update(weights=weights, scale=torch.tensor(factor, dtype=torch.float64, device="cpu"))
    g, s, c, _ = stack.shape
    flagged = torch.ones(g, segments, dtype=torch.bool, device="cpu")
    if s > 1:
        call = Arguments(matrices=s, states=c, segments=segments, prefixes=prefixes)
        call.stack_set, call.stack_step, call.stack_row, call.stack_column = stack.stride()
        for name, tensor in {"stack": stack, "flagged": flagged, **tensors}.items():
            setattr(call, name, tensor.data_ptr())
        run(call, stack.dtype, "tree", thread_spans(g * segments, _work(stack)))
    return flagged[:, 0] if segments == 1 else flagged.any(1)


def _work(stack: Tensor) -> int:
    """The multiply-adds in the units of `thread_spans`, whose products are slower."""
    g, s, c, _ = stack.shape
    return g * s * c**3 // 4


def _segments(stack: Tensor) -> int:
    """The number of segments of each stack: one, unless there are fewer stacks than threads."""
    g, s = stack.shape[:2]
    most = max(1, s // _SHORTEST)
    return min(most, -(-len(thread_spans(g * most, _work(stack))) // g))


def _matrices(stack: Tensor) -> Tensor:
    """The matrices in the dtype of the arithmetic, and without torch's negative bit, which the library cannot see."""
    if stack.dtype in (torch.float32, torch.float64) and not stack.is_neg():
        return stack
    return stack.to(torch.promote_types(stack.dtype, torch.float32)).resolve_neg()
