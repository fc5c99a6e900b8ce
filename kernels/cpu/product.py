"""Products of stacks of matrices of logarithms by the C library, from left to right; see c/fold.h.

If there are fewer stacks than threads, stacks are cut into segments, whose products are multiplied in float64. Stacks
in which a row of a product underflowed ("lossy") are computed again by `kernels.plain`.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from ..numbers import exact_sum
from ..plain import product as plain
from ..tree import Product
from .arguments import Arguments, run_each
from .library import in_large_pages

# multiply-adds that are worth waking a thread
_SHARE = 2**22

# least matrices of a segment, which are worth the additional product
_SHORTEST = 8

# most matrices of a segment for gradients, whose rounding errors add up within it
_LONGEST = 128

# least rows of a product for one thread: a tile of registers; or all of at most _FEW, which c/fold.h multiplies at once
_ROWS = 8
_FEW = 16

_NO_SETS = torch.empty(0, dtype=torch.int64, device="cpu")

# entries after the products of the sets, so that the library may load and store whole vectors
_SLACK = 64


def product(stack: Tensor, *, inplace: bool) -> Product:
    """The products of g stacks (g, s, c, c) of any floating dtype; `stack` may be overwritten if `inplace`."""
    matrices = _matrices(stack)
    if stack.shape[1] == 1:
        return _only(matrices)
    segments = _Segments(matrices)
    root, lossy = segments.root(), segments.lossy
    if len(lossy):
        own = inplace or matrices.dtype != stack.dtype
        _put(root, plain.product(_some(matrices, lossy, inplace=own), inplace=own or len(lossy) < len(stack)), lossy)
    return root._replace(rescued=len(lossy) * stack[0, 0].numel())


def write_product(stack: Tensor, out: Tensor, *, inplace: bool) -> int | Tensor:
    """The number of rescued entries of products, see `product`, whose logarithms (g, c, c) are written to `out`."""
    g, s, c, _ = stack.shape
    matrices = _matrices(stack)
    if s > 1 and len(_segments(matrices, s)) == 1:
        lossy = torch.empty(g, c, dtype=torch.bool, device="cpu")
        call = _arguments(matrices, 0, s, lossy=lossy, log_forward=out)
        call.grad_set, call.grad_member = c * c, c
        if not _run("fold", matrices, [call], _spans(matrices)):
            return 0
    whole = product(stack, inplace=inplace)
    out.copy_(whole.total(out.dtype))
    return whole.rescued


def product_gradient(weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * log product)` with respect to stacks; weights are (g, c, c)."""
    matrices = _matrices(stack)
    if stack.shape[1] > 1 and len(_segments(matrices, stack.shape[1])) == 1:
        _gradients(plain.product_gradient, weight, matrices, into)
    else:
        Kept(matrices, into).gradient(weight)


def prefixes(stack: Tensor, out: Tensor) -> int | Tensor:
    """The number of rescued entries of the products of the first 1 to s matrices, written to `out` (g, s, c, c)."""
    (g, s, c, _), matrices = stack.shape, _matrices(stack)
    lossy = torch.zeros(g, c, dtype=torch.bool, device="cpu")
    if s > 1:
        arguments = _arguments(matrices, 0, s, lossy=lossy, log_forward=out)
        arguments.grad_set, arguments.grad_step, arguments.grad_member, _ = out.stride()
        parts = _ranges(g * c, _threads(matrices, g * -(-c // _ROWS)))
        lost = _run("fold", matrices, [arguments], parts if c > _FEW else _spans(matrices))
    numbers = _lossy_sets(lossy) if s > 1 and lost else _NO_SETS
    if len(numbers):
        redone = torch.empty_like(out[: len(numbers)])
        plain.prefixes(matrices[numbers], redone)
        out[numbers] = redone
    out[:, 0] = stack[:, 0]
    return len(numbers) * s * c * c


def prefixes_gradient(weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * prefixes)`."""
    if stack.shape[1] > 1:
        _gradients(plain.prefixes_gradient, weight, _matrices(stack), into)
    else:
        Kept(stack, into).gradient(weight[:, 0])


class Kept:
    """The products of stacks (g, s, c, c), kept until gradients are written `into` a tensor of that shape."""

    def __init__(self, stack: Tensor, into: Tensor) -> None:
        self._stack, self._into = _matrices(stack), into
        if stack.shape[1] == 1:
            return
        self._segments = segments = _Segments(self._stack, into)
        self._root, self._lossy = segments.root(), segments.lossy
        if len(self._lossy):
            redone = torch.empty_like(into[: len(self._lossy)])
            self._redone = redone, plain.Kept(self._stack[self._lossy], redone)
            _put(self._root, self._redone[1].root(), self._lossy)

    def root(self) -> Product:
        """The products of all matrices."""
        return _only(self._stack) if self._stack.shape[1] == 1 else self._root

    def gradient(self, weight: Tensor) -> None:
        """Write the gradients of `sum(weight * log product)`."""
        if self._stack.shape[1] == 1:
            self._into[:, 0] = weight
            self._into.masked_fill_(self._stack == -math.inf, 0.0)
            return
        self._segments.gradients(weight)
        if len(self._lossy):
            redone, kept = self._redone
            kept.gradient(weight[self._lossy])
            self._into[self._lossy] = redone


class _Segments:
    """The products of segments of stacks, and, if there is memory for gradients, what these need."""

    def __init__(self, stack: Tensor, into: Tensor | None = None) -> None:
        g, _, c, _ = stack.shape
        self._stack, segments = stack, _segments(stack, stack.shape[1] if into is None else _LONGEST)
        products = torch.empty(len(segments), g, c, c, dtype=torch.float64, device="cpu")
        self._offset = torch.empty(2, len(segments), g, dtype=torch.float64, device="cpu")
        lossy = torch.empty(len(segments), g, c, dtype=torch.bool, device="cpu")
        self._spans, self._held = _spans(stack), [lossy]  # held because the arguments point to it
        self._calls = [
            _arguments(stack, *segment, leaving=value, log_norm=size, log_norm_error=lacking, lossy=lost)
            for segment, value, size, lacking, lost in zip(segments, products, *self._offset, lossy, strict=True)
        ]
        for (first, last), call in zip(segments, self._calls, strict=True):
            if into is not None:
                self._keep(call, last - first, into[:, first:])
        lost = _run("fold", stack, self._calls, self._spans)
        self.lossy = _lossy_sets(lossy) if lost else _NO_SETS
        self._products = products.transpose(0, 1)
        if len(self.lossy):  # which may hold uninitialised entries
            self._offset[:, :, self.lossy] = self._products[self.lossy] = 0.0
        if len(segments) > 1:
            self._whole = Kept(self._products, torch.empty_like(self._products).contiguous())

    def _keep(self, call: Arguments, steps: int, into: Tensor) -> None:
        """Point a call to memory for the products of each of its steps; exponentials are kept where gradients go."""
        g, _, c, _ = self._stack.shape
        products = in_large_pages(self._stack.new_empty(g * (steps * c * c + _SLACK)))
        factors = self._stack.new_empty(g * steps * c)
        call.messages, call.factors, call.grad_bulk = products.data_ptr(), factors.data_ptr(), into.data_ptr()
        call.count_set, call.count_step = into.stride()[:2]
        self._held.extend((products, factors))

    def root(self) -> Product:
        """The product of all segments; those of lossy sets have no meaning."""
        if len(self._calls) == 1:
            return Product(self._products[:, 0], self._offset[:, 0], 0)
        values, offset, _ = self._whole.root()
        return Product(values, torch.stack(exact_sum(torch.cat([*self._offset, offset]))), 0)

    def gradients(self, weight: Tensor) -> None:
        """Write the gradients of all segments, for weights (g, c, c) of the root."""
        weights, scale = _near_one(weight)
        weights = weights[None]
        if len(self._calls) > 1:
            self._whole.gradient(weights[0].double())
            weights = self._whole._into.transpose(0, 1)
        weights = weights.to(self._stack.dtype).contiguous()
        for call, own in zip(self._calls, weights, strict=True):
            call.final_weights, call.x_set, call.weight = own.data_ptr(), own.stride(0), ctypes.addressof(scale)
        _run("unfold", self._stack, self._calls, self._spans)


def _gradients(redo: Any, weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write gradients for weights of products (g, c, c) or prefixes (g, s, c, c); `redo` writes those of lossy sets."""
    g, s, c, _ = stack.shape
    lossy = torch.zeros(g, c, dtype=torch.bool, device="cpu")
    weights, scale = _near_one(weight)
    weights = weights.contiguous()
    call = _arguments(stack, 0, s, lossy=lossy, grad_bulk=into)
    call.count_set, call.count_step = into.stride()[:2]
    call.weight, call.x_set = ctypes.addressof(scale), weights.stride(0)
    if weight.dim() == 3:
        call.final_weights = weights.data_ptr()
    else:
        call.x, call.x_step = weights.data_ptr(), weights.stride(1)
    lost = _run("fold_gradients", stack, [call], _spans(stack))
    # so few at a time that all copies together take no more memory than the stacks
    for numbers in _lossy_sets(lossy).split(max(1, g // 4)) if lost else ():
        redone = torch.empty_like(into[: len(numbers)])
        redo(weight[numbers], stack[numbers], redone)
        into[numbers] = redone


def _arguments(stack: Tensor, first: int, last: int, **outputs: Tensor) -> Arguments:
    """The arguments for the products of the matrices from `first` to before `last`, with pointers to the outputs."""
    g, _, c, _ = stack.shape
    arguments = Arguments(steps=last - first, sets=g, members=c, states=c, first=0, last=g * c, logarithms=1)
    over_sets, over_steps, over_rows, over_columns = stack.stride()
    arguments.p0 = stack.data_ptr() + first * over_steps * stack.element_size()
    arguments.p0_set, arguments.p0_member, arguments.p0_state = over_sets, over_rows, over_columns
    arguments.bulk = arguments.p0 + over_steps * stack.element_size()
    arguments.bulk_set, arguments.bulk_step = over_sets, over_steps
    arguments.bulk_from, arguments.bulk_to, arguments.one_matrix = over_rows, over_columns, over_steps == 0
    for name, tensor in outputs.items():
        setattr(arguments, name, tensor.data_ptr())
    return arguments


def _run(name: str, stack: Tensor, arguments: list[Arguments], spans: list[tuple[int, int]]) -> int:
    """The number of lossy rows of all calls; each call runs on one thread for every span of rows."""
    calls = (Arguments * (len(arguments) * len(spans)))(*(one for one in arguments for _ in spans))
    for index, call in enumerate(calls):
        call.first, call.last = spans[index % len(spans)]
    return sum(run_each(calls, stack.dtype, name))


def _threads(stack: Tensor, most: int) -> int:
    g, s, c, _ = stack.shape
    return max(1, min(torch.get_num_threads(), most, g * s * c**3 // _SHARE))


def _segments(stack: Tensor, longest: int) -> list[tuple[int, int]]:
    """The ranges of matrices of segments: one, unless sets are fewer than threads or it would be over `longest`."""
    g, s = stack.shape[:2]
    return _ranges(s, max(1, -(-s // longest), min(_threads(stack, s) // g, s // _SHORTEST)))


def _spans(stack: Tensor) -> list[tuple[int, int]]:
    """The ranges of rows of each thread, which has whole sets."""
    g, c = len(stack), stack.shape[-1]
    return [(first * c, last * c) for first, last in _ranges(g, _threads(stack, g))]


def _ranges(size: int, parts: int) -> list[tuple[int, int]]:
    """The `parts` ranges of about the same size that cover a range."""
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


def _matrices(stack: Tensor) -> Tensor:
    """The matrices in the dtype of the arithmetic, and without torch's negative bit, which the library cannot see."""
    if stack.dtype in (torch.float32, torch.float64) and not stack.is_neg():
        return stack
    return stack.to(torch.promote_types(stack.dtype, torch.float32)).resolve_neg()


def _only(stack: Tensor) -> Product:
    return Product(stack[:, 0].double(), torch.zeros(2, len(stack), dtype=torch.float64, device="cpu"), 0)


def _lossy_sets(lossy: Tensor) -> Tensor:
    """The indices of sets of which a row (..., g, c) is lossy."""
    return lossy.any(-1).view(-1, lossy.shape[-2]).any(0).nonzero()[:, 0]


def _some(stack: Tensor, numbers: Tensor, *, inplace: bool) -> Tensor:
    """The stacks of ascending indices: `stack` if these are all, else copies, in its own memory if `inplace`."""
    if len(numbers) == len(stack):
        return stack
    if not inplace:
        return stack[numbers]
    for place, number in enumerate(numbers.tolist()):
        if place != number:
            stack[place] = stack[number]
    return stack[: len(numbers)]


def _put(root: Product, redone: Product, numbers: Tensor) -> None:
    root.values[numbers] = redone.values.double()
    root.offset[:, numbers] = 0.0
    root.offset[: len(redone.offset), numbers] = redone.offset


def _near_one(weight: Tensor) -> tuple[Tensor, ctypes.c_double]:
    """Weights divided by a power of two, so that the largest is near 1, and that power; 1 if a weight is not finite."""
    top = float(torch.linalg.vector_norm(weight, math.inf))
    weight = weight.resolve_neg() if weight.is_neg() else weight
    if 0.125 <= top <= 2.0 or not 0.0 < top < math.inf:
        return weight, ctypes.c_double(1.0)
    scale = 2.0 ** (math.frexp(top)[1] - 1)
    return weight / scale, ctypes.c_double(scale)
