"""Products of stacks of matrices of logarithms on the tree of c/tree.h, in linear numbers with scales.

If there are fewer stacks than threads, stacks are cut into segments, whose products are multiplied in float64. Stacks
in which a sum may have underflowed are computed again by `kernels.plain`.
"""

import ctypes
import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from ..numbers import exact_sum, near_one
from ..plain import product as plain
from ..tree import Product
from .arguments import copies, fields, run_each

# multiply-adds that are worth waking a thread
_SHARE = 2**22

# least matrices of a segment, which are worth the additional product
_SHORTEST = 8

_SIZES = "matrices states segments prefixes first last"
_OPERANDS = "*stack stack_set stack_step stack_row stack_column"
_RESULTS = "*out out_set out_step *products *offset"
_GRADIENTS = "*weights weight_set weight_step *scale *grad *lossy *room"


class Arguments(ctypes.Structure):
    """`Stack` of c/tree.h, field by field."""

    _fields_ = fields(f"{_SIZES} {_OPERANDS} {_RESULTS} {_GRADIENTS}")


def write_product(stack: Tensor, out: Tensor, *, inplace: bool) -> int | Tensor:
    """The number of recomputed entries of products, whose logarithms (g, c, c) are written to `out`.

    Stacks (g, s, c, c) have any floating dtype; `stack` may be overwritten if `inplace`.
    """
    if stack.shape[1] == 1:
        out.copy_(stack[:, 0])
        return 0
    matrices, count = _matrices(stack), 0
    for some in _runs(_products(matrices, out)):
        plain.write_product(matrices[some], out[some], inplace=inplace or matrices is not stack)
        count += out[some].numel()
    return count


def product_gradient(weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * log product)` with respect to stacks; weights are (g, c, c)."""
    if stack.shape[1] == 1:
        into[:, 0] = weight
        into.masked_fill_(stack == -math.inf, 0.0)
        return
    matrices = _matrices(stack)
    for some in _runs(_gradients(weight, matrices, into)):
        plain.product_gradient(weight[some], matrices[some], into[some])


def prefixes(stack: Tensor, out: Tensor) -> int | Tensor:
    """The number of recomputed entries of the products of the first 1 to s matrices, written to `out` (g, s, c, c)."""
    matrices, count = _matrices(stack), 0
    if stack.shape[1] > 1:
        call = _arguments(matrices, prefixes=1)
        for some in _runs(_run(call, matrices, out=out)):
            plain.prefixes(matrices[some], out[some])
            count += out[some].numel()
    out[:, 0] = stack[:, 0]
    return count


def prefixes_gradient(weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * prefixes)`."""
    if stack.shape[1] == 1:
        product_gradient(weight[:, 0], stack, into)
        return
    matrices = _matrices(stack)
    for some in _runs(_run_gradient(_arguments(matrices, prefixes=1), weight, matrices, into)):
        plain.prefixes_gradient(weight[some], matrices[some], into[some])


def _products(stack: Tensor, out: Tensor) -> Tensor:
    """Write products; which stacks are lossy, and have no meaning there."""
    segments = _segments(stack)
    if segments == 1:
        return _run(_arguments(stack), stack, out=out)
    products, offset, lossy = _segment_products(stack, segments)
    (whole, last, again) = _segment_products(products, 1)
    offsets = torch.cat([offset, last], 1).flatten(1).T.contiguous()
    out.copy_(Product(whole[:, 0], torch.stack(exact_sum(offsets)), 0).total(out.dtype))
    return lossy | again


def _segment_products(stack: Tensor, segments: int) -> tuple[Tensor, Tensor, Tensor]:
    """The products (g, segments, c, c) less their offsets (g, segments, 2), and which stacks are lossy."""
    g, _, c, _ = stack.shape
    products = torch.empty(g, segments, c, c, dtype=torch.float64, device="cpu")
    offset = torch.zeros(g, segments, 2, dtype=torch.float64, device="cpu")
    lossy = _run(_arguments(stack, segments), stack, products=products, offset=offset)
    if lossy.any():
        products[lossy], offset[lossy] = 0.0, 0.0
    return products, offset, lossy


def _gradients(weight: Tensor, stack: Tensor, into: Tensor) -> Tensor:
    """Write gradients of products; which stacks are lossy, and have no meaning there."""
    segments = _segments(stack)
    if segments == 1:
        return _run_gradient(_arguments(stack), weight, stack, into)
    products, _, lossy = _segment_products(stack, segments)
    weights = torch.empty_like(products)
    lossy |= _run_gradient(_arguments(products), weight.double(), products, weights)
    return lossy | _run_gradient(_arguments(stack, segments), weights.to(stack.dtype), stack, into)


def _run_gradient(call: Arguments, weight: Tensor, stack: Tensor, grad: Tensor) -> Tensor:
    """Write gradients for weights of products or prefixes; which stacks are lossy."""
    weight, scale = near_one(weight.contiguous())
    factor = ctypes.c_double(scale)
    call.scale, call.weight_set = ctypes.addressof(factor), weight.stride(0) // call.segments
    call.weight_step = weight.stride(1) if call.prefixes else 0
    return _run(call, stack, weights=weight, grad=grad)


def _arguments(stack: Tensor, segments: int = 1, prefixes: int = 0) -> Arguments:
    _, s, c, _ = stack.shape
    call = Arguments(matrices=s, states=c, segments=segments, prefixes=prefixes, stack=stack.data_ptr())
    call.stack_set, call.stack_step, call.stack_row, call.stack_column = stack.stride()
    return call


def _run(call: Arguments, stack: Tensor, **tensors: Tensor) -> Tensor:
    """Run the library on as many threads as units are worth, with pointers to tensors; which stacks are lossy."""
    units = len(stack) * call.segments
    lossy = torch.empty(len(stack), call.segments, dtype=torch.bool, device="cpu")
    for name, tensor in {**tensors, "lossy": lossy}.items():
        setattr(call, name, tensor.data_ptr())
    if "out" in tensors:
        call.out_set, call.out_step = tensors["out"].stride()[:2]
    threads = _threads(stack, units)
    spans = [(units * i // threads, units * (i + 1) // threads) for i in range(threads)]
    run_each(copies(call, spans), stack.dtype, "tree")
    return lossy.any(1)


def _threads(stack: Tensor, most: int) -> int:
    g, s, c, _ = stack.shape
    return max(1, min(torch.get_num_threads(), most, g * s * c**3 // _SHARE))


def _segments(stack: Tensor) -> int:
    """The number of segments of each stack: one, unless there are fewer stacks than threads."""
    g, s = stack.shape[:2]
    return max(1, min(-(-_threads(stack, s) // g), s // _SHORTEST))


def _matrices(stack: Tensor) -> Tensor:
    """The matrices in the dtype of the arithmetic, and without torch's negative bit, which the library cannot see."""
    if stack.dtype in (torch.float32, torch.float64) and not stack.is_neg():
        return stack
    return stack.to(torch.promote_types(stack.dtype, torch.float32)).resolve_neg()


def _runs(lossy: Tensor) -> Iterator[slice]:
    """The ranges of stacks that are lossy."""
    flags = lossy.tolist()
    for flag, run in groupby(range(len(flags)), flags.__getitem__):
        if flag:
            numbers = list(run)
            yield slice(numbers[0], numbers[-1] + 1)
