"""The checks of a stream's arguments and of its pieces, before anything is computed."""

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from .. import kernels
from ..arguments import (
    Lengths,
    as_lengths,
    check_float_dtype,
    check_has_values,
    check_tensor,
    check_values,
    has_values,
    tensor_of,
)
from ..kernels.weights import check_weights
from ..structured.operands import check_products
from ..transitions import Transition
from .piece import Piece, RawPiece, only_used
from .structures import Matrices, each, parts


def check_stream(bulk: Matrices | None, p0: Tensor, lag: object, dtype: torch.dtype | None, viterbi: object) -> None:
    """Raise for arguments of `Stream` of a wrong kind or size."""
    check_tensor("p0", p0, 1)
    c = p0.shape[-1]
    if c < 1:
        raise ValueError(f"p0: expected at least one state [..., c], got {list(p0.shape)}")
    if isinstance(bulk, Transition):
        _check_structure("bulk", bulk, 1, p0, viterbi)
    elif bulk is not None:
        check_tensor("bulk", bulk, 3, like=p0)
        if bulk.shape[-3:] != (1, c, c):
            raise ValueError(
                f"bulk: expected shape [..., 1, {c}, {c}] to go with p0 {list(p0.shape)}, got {list(bulk.shape)}:"
                " matrices that change go into update, as bulk_piece"
            )
    if isinstance(lag, bool) or not isinstance(lag, int):
        raise TypeError(f"lag: expected an integer, got {lag!r}")
    if lag < 0:
        raise ValueError(f"lag: expected 0 or more, got {lag}")
    check_float_dtype("dtype", dtype)


def check_transforms() -> None:
    """Raise inside torch.vmap, whose tensors a stream cannot keep, and for forward derivatives, which it lacks."""
    if torch.compiler.is_compiling():
        return
    if any(transform.key() == TransformType.Vmap for transform in retrieve_all_functorch_interpreters()):
        raise NotImplementedError("Stream: expected no torch.vmap around update, make its axis one of the batch")
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError("Stream: expected no forward derivative, take gradients")


def check_piece(
    x: Tensor,
    bulk_piece: Matrices | None,
    lengths: Lengths | None,
    bulk: Matrices | None,
    p0: Tensor,
    before: torch.Size,
    viterbi: bool,
) -> Tensor | None:
    """The lengths as int64 [*B], or None; raises for a piece that does not go on from a batch of shape `before`."""
    if viterbi:  # the number of final states depends on values
        check_has_values("x_piece", x)
    *batch, k, c = x.shape
    if c != p0.shape[-1] or batch != list(before):
        sizes = ", ".join(str(size) for size in (*before, "k", p0.shape[-1]))
        raise ValueError(f"x_piece: expected shape [{sizes}], got {list(x.shape)}")
    _check_lead("p0", p0, 1, x)
    if bulk is not None:
        if bulk_piece is not None:
            raise ValueError("bulk_piece: expected None, since the stream has a bulk of its own")
        _check_leads("bulk", bulk, x)
    elif bulk_piece is None:
        raise ValueError("bulk_piece: expected a torch.Tensor, since the stream has no bulk of its own")
    elif isinstance(bulk_piece, Transition):
        _check_structure("bulk_piece", bulk_piece, k, x, viterbi)
        _check_leads("bulk_piece", bulk_piece, x)
    else:
        check_tensor("bulk_piece", bulk_piece, 3, like=x)
        if bulk_piece.shape[-3] not in (1, k) or bulk_piece.shape[-2:] != (c, c):
            raise ValueError(
                f"bulk_piece: expected shape [..., {k} or 1, {c}, {c}] to go with x_piece {list(x.shape)}, got"
                f" {list(bulk_piece.shape)}"
            )
        _check_leads("bulk_piece", bulk_piece, x)
    if lengths is None:
        return None
    lengths = tensor_of(lengths).to(x.device)
    # in a piece 0 is a length too, so values are checked here
    ends = as_lengths(lengths, x)
    if not kernels.on_gpu(x) and has_values(ends) and ends.numel():
        low, high = int(ends.min()), int(ends.max())
        if not 0 <= low <= high <= k:
            raise ValueError(f"lengths: expected values from 0 to k = {k}, got {low} to {high}")
    return ends


def check_used(piece: Piece, raw: RawPiece) -> None:
    """Raise for NaN, +inf or a negative probability in values that have influence."""
    used = raw.bulk if raw.own else each(lambda one, own: only_used(one, piece.linked, own), raw.bulk)
    x = torch.where(piece.active[..., None], raw.x, 0.0)
    names = ("x_piece", "bulk" if raw.own else "bulk_piece", "p0")
    for value, own in parts(used):
        flat = value if own == 2 else value.reshape(*value.shape[: value.dim() - own], -1, 1)
        check_values(x, flat, raw.p0, None, names)
    if not raw.log_params:
        check_weights(*raw.weights())


def check_mask(mask: object, fresh: Tensor | None) -> None:
    """Raise for a mask that is neither None nor a bool tensor like `fresh`, which is None before the first update."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype)[6:] if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a torch.Tensor of bool, got {got}")
    if fresh is None or mask.shape != fresh.shape:
        expected = "None before the first update" if fresh is None else list(fresh.shape)
        raise ValueError(f"mask: expected shape {expected}, got {list(mask.shape)}")


def active_counts(ends: Tensor | None, over: Tensor, k: int) -> Tensor | None:
    """The number of variables of each sequence [*B], 0 for one that is over; None if all are known to have k.

    On a GPU values are not looked at, so that None only stands for what is known without.
    """
    unread = kernels.on_gpu(over) or not has_values(over)
    if ends is None:
        return torch.where(over, 0, k) if unread or over.any() else None
    counts = ends.clamp(0, k).masked_fill(over, 0)
    return counts if unread or (counts < k).any() else None


def _check_structure(name: str, structure: Transition, k: int, like: Tensor, viterbi: object) -> None:
    """Raise for a structure of other states than `like` [..., c], of neither 1 nor k steps, or without best paths."""
    if viterbi:
        check_products(structure, name)
    c = like.shape[-1]
    if structure.states != c:
        raise ValueError(f"{name}: expected {c} states, got {structure} of {structure.states}")
    for parameter, own in parts(structure):
        check_tensor(name, parameter, own, like=like)
        if parameter.dim() > own and parameter.shape[-1 - own] not in (1, k):
            expected = " or ".join(str(size) for size in sorted({1, k}, reverse=True))
            raise ValueError(f"{name}: expected {expected} steps before the last {own} axes, got {structure}")


def _check_leads(name: str, matrices: Matrices, x: Tensor) -> None:
    """Raise for matrices whose batch axes do not go with the batch."""
    for tensor, own in parts(matrices):
        if isinstance(matrices, Tensor) or tensor.dim() > own:
            _check_lead(name, tensor, own + 1, x)


def _check_lead(name: str, value: Tensor, axes: int, x: Tensor) -> None:
    """Raise for leading axes that are neither left out nor of size 1 or that of the batch."""
    batch, lead = list(x.shape[:-2]), list(value.shape[: value.dim() - axes])
    against = batch[len(batch) - len(lead) :] if len(lead) <= len(batch) else None
    if against is None or any(size not in (1, full) for size, full in zip(lead, against, strict=True)):
        raise ValueError(
            f"{name}: expected leading axes of 1 or as in {batch} to go with x_piece {list(x.shape)}, got"
            f" {list(value.shape)}"
        )
