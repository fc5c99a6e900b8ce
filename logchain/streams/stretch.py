"""A piece of a stream, computed by one call of the C loops whose arguments are cached for pieces of the same layout."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..autograd.scan import Message
from ..kernels.chain import Chain, is_view
from ..kernels.layout import Layout
from ..kernels.message import Kept
from ..operands import arithmetic_dtype
from ..rescues import report_chains
from .piece import Piece, selected


class Calls:
    """The arguments of C calls for the last pieces of a stream, to be used again for pieces of the same layout."""

    def __init__(self) -> None:
        self._stretch: tuple[Any, Any] = None, None
        self._repeated: tuple[Any, Any] = None, None

    def stretch(self, key: Any, make: Callable[[], Any]) -> Any:
        """The `Stretch` for pieces with a key: that of the last piece if it had the same, or a new one."""
        if self._stretch[0] != key:
            self._stretch = key, make()
        return self._stretch[1]

    def repeat(self, x: Tensor, bulk: Tensor, stretch: Any) -> None:
        """Keep a stretch for pieces of the layout of this one, which goes on by the stream's own matrix."""
        key = _layout(x, bulk)
        if self._repeated[0] != key:
            self._repeated = key, stretch.repeated(x, bulk)

    def repeated(self, x: Tensor, bulk: Tensor) -> Any:
        """The `Repeated` that `repeat` has stored for pieces of this layout; None without one."""
        key, repeated = self._repeated
        return repeated if repeated is not None and key == _layout(x, bulk) and x.numel() and not x.is_neg() else None


def _layout(x: Tensor, bulk: Tensor) -> tuple[Any, ...]:
    """What pieces for one `Repeated` have in common: of one sequence all but the number of variables."""
    sizes = x.shape if x.dim() > 2 else x.shape[-1]
    return sizes, x.stride(), x.dtype, x.device, bulk.data_ptr(), bulk.stride(), bulk.dtype


def walk(
    piece: Piece, entering: Message, head: bool, posteriors: Tensor | None, messages: Tensor | None, calls: Calls
) -> Message:
    """The message that leaves a piece; posteriors and messages are written if there is memory for them.

    `head`: whether the message enters the piece, which otherwise starts at p0.
    """
    dtype = arithmetic_dtype(piece.x, piece.bulk, piece.p0)
    x, bulk, p0 = (operand.to(dtype).resolve_neg() for operand in (piece.x, piece.bulk, piece.p0))
    x = x if is_view(x, 2) and x.stride(-1) == 1 else x.contiguous()
    if not head:
        bulk = bulk if bulk.shape[-3] == 1 else bulk[..., 1:, :, :]
        p0 = p0.expand(*x.shape[:-2], -1)
        p0 = p0 if is_view(p0, 1) else p0.contiguous()
    bulk = bulk if is_view(bulk, 3) else bulk.contiguous()
    layout = Layout.of(x, bulk)

    def make() -> Any:
        chain = Chain(layout.steps_first(x), layout.matrices(bulk), layout.weights(p0), None, piece.log_params, dtype)
        return kernels.load("cpu.stretch").Stretch(chain, head=head)

    stretch = calls.stretch((x.shape, x.stride(), bulk.shape, bulk.stride(), p0.stride(), dtype, head), make)
    ends = None if piece.counts is None else layout.grouped(piece.counts + head).contiguous()
    linear = None if messages is None else x.new_empty(x.shape[-2] + head, *layout.grid, x.shape[-1])
    shares = posteriors
    if posteriors is not None and posteriors.dtype != dtype:
        shares = torch.empty_like(posteriors, dtype=dtype)
    before = tuple(tensor.contiguous() for tensor in entering)
    after, redone, count = stretch.forward((x, bulk, p0), before, ends, linear, shares)
    leaving = Message(*after)
    if x is piece.x and bulk is piece.bulk and piece.name == "bulk" and head:
        calls.repeat(x, bulk, stretch)
    if count:
        report_chains(redone)
    if posteriors is not None and shares is not None and shares is not posteriors:
        posteriors.copy_(shares)
    if messages is not None and linear is not None:
        logs = Kept(leaving.scale, linear, redone).logs(slice(int(head), None))
        view = layout.steps_first(messages)
        view.copy_(logs.view(view.shape))
    return leaving if piece.counts is None or not head else selected(piece.counts > 0, leaving, entering)
