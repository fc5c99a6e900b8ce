"""The log-semiring matrix product by the C library, see c/matmul.h, and its gradients; as in `kernels.plain.matmul`.

Large products, and batch axes that cannot be flattened without a copy, are left to `kernels.plain`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..plain import matmul as plain
from ..plain.matmul import Groups
from .arguments import run, thread_spans
from .library import struct

# the longest inner axis, and the longest of rows or columns, up to which these loops are faster than torch's products
_MOST = 512

# multiply-adds in the time of an entry's exponentials and logarithm
_ENTRY = 64

# `Operands` of c/matmul.h
Arguments = struct(
    "sets rows depth columns first last *a a_set a_row a_k *b b_set b_k b_j *out out_set out_row out_j *weight"
    " weight_set weight_row weight_j *grad_a grad_a_set grad_a_row grad_a_k *grad_b grad_b_set grad_b_k grad_b_j"
    " *part_b *scratch"
)


def forward(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """`log(exp(a) exp(b))` (*batch, m, n), and the number of its entries that were recomputed."""
    groups = Groups.of(a, b)
    flat = _flat(groups, a.resolve_neg(), b.resolve_neg())
    out = None if flat is None else a.new_empty(groups.shape)
    joint = None if flat is None or out is None else _flat_joint(groups, out, *flat)
    if flat is None or out is None or joint is None:
        return plain.forward(a, b)
    if joint.shape[2] > _MOST:
        flat, joint = _transposed(*flat), joint.mT
    arguments = _arguments(*flat)
    _point(arguments, "out", joint, "row", "j")
    return out, run(arguments, a.dtype, "matmul", _spans(arguments))


def backward(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j for a, and over i for b."""
    groups = Groups.of(a, b)
    flat = _flat(groups, a.resolve_neg(), b.resolve_neg())
    joint = None if flat is None else _flat_joint(groups, weight.resolve_neg(), *flat)
    if flat is None or joint is None:
        return plain.backward(weight, a, b, need_a, need_b)
    grad_a, grad_b = torch.empty_like(a) if need_a else None, torch.empty_like(b) if need_b else None
    into = _flat(groups, a if grad_a is None else grad_a, b if grad_b is None else grad_b)
    if into is None:
        return plain.backward(weight, a, b, need_a, need_b)
    if joint.shape[2] > _MOST:
        flat, into, joint, need_a, need_b = _transposed(*flat), _transposed(*into), joint.mT, need_b, need_a
    arguments = _arguments(*flat)
    _point(arguments, "weight", joint, "row", "j")
    if need_a:
        _point(arguments, "grad_a", into[0], "row", "k")
    spans = _spans(arguments, whole_sets=need_b)
    if need_b and len(joint) == 1 and len(spans) > 1:
        parts = torch.empty(len(spans), *into[1].shape, dtype=torch.float64, device="cpu")
        run(arguments, a.dtype, "matmul", spans, [{"part_b": part} for part in parts])
        into[1].copy_(parts.sum(0))
        return grad_a, grad_b
    if need_b:
        _point(arguments, "grad_b", into[1], "k", "j")
    run(arguments, a.dtype, "matmul", spans)
    return grad_a, grad_b


def _flat(groups: Groups, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Views (g, m, k) and (g, k, n) of operands or their gradients; None if large, or if axes cannot be flattened."""
    g, k = math.prod(groups.shape[axis] for axis in groups.sets), a.shape[-1]
    try:
        left, right = groups.left(a).view(g, -1, k), groups.right(b).view(g, k, -1)
    except RuntimeError:
        return None
    return (left, right) if max(k, min(left.shape[1], right.shape[2])) <= _MOST else None


def _flat_joint(groups: Groups, tensor: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """A view (g, m, n) of a tensor of the product's shape; None if its axes cannot be flattened."""
    try:
        return groups.joint(tensor).view(len(left), left.shape[1], right.shape[2])
    except RuntimeError:
        return None


def _transposed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of the transposed product: many columns are better as rows."""
    return right.mT, left.mT


def _arguments(left: Tensor, right: Tensor) -> Any:
    g, m, k = left.shape
    arguments = Arguments(sets=g, rows=m, depth=k, columns=right.shape[2])
    _point(arguments, "a", left, "row", "k")
    _point(arguments, "b", right, "k", "j")
    return arguments


def _point(arguments: Any, name: str, tensor: Tensor, *axes: str) -> None:
    """Set the address of a tensor and its strides; the first axis is that of sets."""
    setattr(arguments, name, tensor.data_ptr())
    for axis, stride in zip(("set", *axes), tensor.stride(), strict=True):
        setattr(arguments, f"{name}_{axis}", stride)


def _spans(arguments: Any, *, whole_sets: bool = False) -> list[tuple[int, int]]:
    """The first row of each thread and the one after its last; of whole sets if there are several."""
    g, m, n = arguments.sets, arguments.rows, arguments.columns
    size = m if whole_sets and g > 1 else 1
    spans = thread_spans(g * m // size, g * m * n * (arguments.depth + _ENTRY))
    return [(first * size, last * size) for first, last in spans]
