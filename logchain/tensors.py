"""Properties of operands: dtypes, steps that are read, and active gradients, transforms or compilers."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor

from .internals import is_intercepted
from .kernels import on_gpu

_Bulk = TypeVar("_Bulk")

_PLAIN = {torch.Tensor, torch.nn.Parameter, bool, int, str, type(None)}


def with_steps(bulk: _Bulk) -> _Bulk:
    """Matrices with an axis of steps, of size 1 before a single matrix [c, c]; structures are returned unchanged."""
    return bulk[None] if isinstance(bulk, Tensor) and bulk.dim() == 2 else bulk  # type: ignore[return-value]


def with_axes(tensor: Tensor, axes: int) -> Tensor:
    """The tensor with `axes` axes, of size 1 where it has fewer."""
    return tensor if tensor.dim() == axes else tensor[(None,) * (axes - tensor.dim())]


def empty_gradients(operands: Sequence[Tensor], needs: Iterable[bool] = repeat(True)) -> Any:
    """A tuple of uninitialized tensors for the gradients of operands, empty for those that are not needed."""
    pairs = zip(operands, needs, strict=False)
    return tuple(operand.new_empty(operand.shape if need else 0) for operand, need in pairs)


def differentiated(*args: Any) -> bool:
    """Whether gradients are enabled and some argument requires one."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether arguments are plain tensors, and no dispatch mode, function transform or compiler is active."""
    return not torch.compiler.is_compiling() and not is_intercepted() and _PLAIN.issuperset(map(type, args))


def read_steps(lead: Sequence[int], v: int, lengths: Tensor | None) -> Tensor | None:
    """Which steps [*B or ones, s] of transitions are read; None: all.

    The last of several steps leads into the last of v variables; a single one serves all but the first variable.
    """
    *batch, s = lead
    if lengths is None and v > 1:
        return None
    if lengths is None or lengths.numel() == 0:
        return torch.zeros((1,) * len(lead), dtype=torch.bool)
    missing = lengths.dim() - len(batch)
    shared = [axis for axis in range(lengths.dim()) if axis < missing or batch[axis - missing] == 1]
    longest = lengths.amax(shared, keepdim=True) if shared else lengths
    longest = longest.reshape(longest.shape[missing:])[..., None]
    into = torch.arange(v - s, v, device=longest.device) if s > 1 else torch.ones(s, device=longest.device)
    return longest > into


def last_rows(x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The row of each sequence's last step, among all rows of x [*B, v, c]; any row where lengths are out of range."""
    v = x.shape[-2]
    if cu_seqlens is not None:
        return (cu_seqlens[1:].to(x.device, torch.int64) - 1).clamp(0, v - 1)
    first = torch.arange(x.shape[:-2].numel(), device=x.device) * v
    return first + (v - 1 if lengths is None else (lengths.flatten() - 1).clamp(0, v - 1))


def is_readable(*tensors: Tensor) -> bool:
    """Whether values can be read: tensors are neither on a GPU or the meta device, nor traced or mapped."""
    return is_plain(tensors) and not any(on_gpu(tensor) or tensor.is_meta for tensor in tensors)
