"""The checks of a stream's arguments and of its pieces, before anything is computed."""

from typing import Any

import torch
from torch import Tensor

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
from ..internals import is_mapped, takes_forward_derivatives
from ..kernels.weights import check_weights
from ..queries.operands import check_products
from ..transitions import Transition
from ..transitions.dense import Dense
from .piece import Piece
from .state import State


def check_stream(p0: Tensor, lag: object, dtype: torch.dtype | None) -> None:
    """Raise for arguments of `Stream` of a wrong kind or size."""
    check_tensor("p0", p0, 1)
    if p0.shape[-1] < 1:
        raise ValueError(f"p0: expected at least one state [..., c], got {list(p0.shape)}")
    if isinstance(lag, bool) or not isinstance(lag, int):
        raise TypeError(f"lag: expected an integer, got {lag!r}")
    if lag < 0:
        raise ValueError(f"lag: expected 0 or more, got {lag}")
    check_float_dtype("dtype", dtype)


def as_transition(name: str, matrices: Any, k: int, like: Tensor, viterbi: object) -> Transition:
    """Matrices that go with p0, or with a piece `like` of k variables, as a transition; raises for others."""
    c, expected = like.shape[-1], str(k) if k == 1 else f"{max(k, 1)} or {min(k, 1)}"
    if not isinstance(matrices, Transition):
        check_tensor(name, matrices, 3, like=like)
        if matrices.shape[-3] not in (1, k) or matrices.shape[-2:] != (c, c):
            hint = ": matrices that change go into update, as bulk_piece" if name == "bulk" else ""
            other = "p0" if name == "bulk" else "x_piece"
            raise ValueError(
                f"{name}: expected shape [..., {expected}, {c}, {c}] to go with {other} {list(like.shape)},"
                f" got {list(matrices.shape)}{hint}"
            )
        return Dense(matrices)
    if viterbi:
        check_products(matrices, name)
    if matrices.states != c:
        raise ValueError(f"{name}: expected {c} states, got {matrices} of {matrices.states}")
    for parameter, own in zip(matrices.parameters, matrices.own_axes, strict=True):
        check_tensor(name, parameter, own, like=like)
        if parameter.dim() > own and parameter.shape[-1 - own] not in (1, k):
            raise ValueError(f"{name}: expected {expected} steps before the last {own} axes, got {matrices}")
    return matrices


def checked_piece(
    x: Tensor,
    bulk_piece: Tensor | Transition | None,
    lengths: Lengths | None,
    bulk: Transition | None,
    p0: Tensor,
    state: State | None,
    log_params: bool,
    viterbi: bool,
) -> tuple[State, Piece, Tensor | None]:
    """The state before the next piece, the piece, and the lengths as int64 [*B]; raises for what does not go on."""
    _check_transforms()
    check_tensor("x_piece", x, 2, like=p0)
    if viterbi:  # the number of final states depends on values
        check_has_values("x_piece", x)
    *batch, k, c = x.shape
    before = x.shape[:-2] if state is None else state.fresh.shape
    if c != p0.shape[-1] or batch != list(before):
        sizes = ", ".join(str(size) for size in (*before, "k", p0.shape[-1]))
        raise ValueError(f"x_piece: expected shape [{sizes}], got {list(x.shape)}")
    _check_lead("p0", p0, 1, x)
    if (bulk is None) == (bulk_piece is None):
        expected = (
            "a torch.Tensor, since the stream has no bulk" if bulk is None else "None, since the stream has a bulk"
        )
        raise ValueError(f"bulk_piece: expected {expected} of its own")
    name = "bulk" if bulk_piece is None else "bulk_piece"
    transition = bulk or as_transition(name, bulk_piece, k, x, viterbi)
    for parameter, own in zip(transition.parameters, transition.own_axes, strict=True):
        if parameter.dim() > own:
            _check_lead(name, parameter, own + 1, x)
    ends = None
    if lengths is not None:  # in a piece 0 is a length too, so values are checked here
        ends = as_lengths(tensor_of(lengths).to(x.device), x)
        if not kernels.on_gpu(x) and has_values(ends) and ends.numel():
            low, high = int(ends.min()), int(ends.max())
            if not 0 <= low <= high <= k:
                raise ValueError(f"lengths: expected values from 0 to k = {k}, got {low} to {high}")
    state = State.before(x) if state is None else state
    counts = state.counts(ends, k)
    return state, Piece(x, transition, p0, name, state.fresh, counts, state.starting(counts), log_params), ends


def _check_transforms() -> None:
    """Raise inside torch.vmap, whose tensors a stream cannot keep, and for forward derivatives, which it lacks."""
    if torch.compiler.is_compiling():
        return
    if is_mapped():
        raise NotImplementedError("Stream: expected no torch.vmap around update, make its axis one of the batch")
    if takes_forward_derivatives():
        raise NotImplementedError("Stream: expected no forward derivative, take gradients")


def check_used(piece: Piece) -> None:
    """Raise for NaN, +inf or a negative probability in values that have influence."""
    x, names = torch.where(piece.active()[..., None], piece.x, 0.0), ("x_piece", piece.name, "p0")
    for value in piece.masked().parameters:
        check_values(x, value.reshape(-1, 1, 1), piece.p0, None, names)
    if not piece.log_params:
        check_weights(*piece.weights())


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


def _check_lead(name: str, value: Tensor, axes: int, x: Tensor) -> None:
    """Raise for leading axes that are neither left out nor of size 1 or that of the batch."""
    batch, lead = x.shape[:-2], value.shape[: value.dim() - axes]
    pairs = zip(lead[::-1], batch[::-1], strict=False)
    if len(lead) > len(batch) or any(size not in (1, full) for size, full in pairs):
        raise ValueError(
            f"{name}: expected leading axes of 1 or as in {list(batch)} to go with x_piece {list(x.shape)}, got"
            f" {list(value.shape)}"
        )
