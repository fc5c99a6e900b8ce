"""A piece of a stream, computed by one call of the C loops whose arguments are cached for pieces of the same layout."""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..autograd.scan import ScaledMessage
from ..kernels.chain import Chain, Layout, arithmetic_dtype
from ..kernels.message import Residuals
from ..rescues import report_chains
from .piece import Piece, selected


def stretch_of(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, *, entered: bool = True) -> Any:
    """The `kernels.cpu.template.Stretch` of pieces with these shapes and strides."""
    chain = Chain.of(x, bulk, p0, None, log_params, stretch=True)
    return kernels.load("cpu.template").Stretch(chain, entered=entered)


def in_place(x: Tensor, bulk: Tensor) -> bool:
    """Whether the C loops read a piece in place: batch axes with separate matrices come first."""
    axes = Layout.of(x, bulk).set_axes
    return axes == tuple(range(len(axes)))


def plain_stretch(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, message: Tensor) -> Any:
    """The `Stretch` of pieces that one thread computes without a copy, by one matrix, and an empty log-partition.

    None for all other pieces. `message` [*B, c] is the one that enters.
    """

    def make() -> Any:
        plain = x.dtype == bulk.dtype == arithmetic_dtype(x, bulk, p0) and not bulk.is_neg() and bulk.shape[-3] == 1
        if not plain or x.dim() < 2 or x.numel() == 0 or (*x.shape[:-2], x.shape[-1]) != message.shape:
            return None
        if x.stride(-1) != 1 or not in_place(x, bulk):
            return None
        stretch = stretch_of(x, bulk, p0, log_params)
        return (stretch, x.new_empty(x.shape[:-2])) if stretch.on_one_thread else None

    if x.is_neg() or not kernels.in_c(x):
        return None
    places = x.shape, x.stride(), x.dtype, message.shape, bulk.shape, bulk.stride(), bulk.is_neg()
    return kernels.load("cpu.template").cached(
        (places, bulk.dtype, p0.dtype, log_params, torch.get_num_threads()), make
    )


def forward(
    piece: Piece, entering: ScaledMessage, with_posteriors: bool, with_messages: bool
) -> tuple[ScaledMessage, Tensor | None, Tensor | None]:
    """The message after a piece; posteriors in the dtype of the arithmetic, and messages, if wanted.

    `entering` is the message before the piece, which is not read if all sequences start there.
    """
    dtype = arithmetic_dtype(piece.x, piece.bulk, piece.p0)
    x, bulk, p0 = (operand.to(dtype).resolve_neg() for operand in (piece.x, piece.bulk, piece.p0))
    x, entered = x if x.stride(-1) == 1 else x.contiguous(), piece.going
    if not entered and bulk.shape[-3] > 1:
        bulk = bulk[..., 1:, :, :]
    layout, places = Layout.of(x, bulk), [(operand.shape, operand.stride()) for operand in (x, bulk, p0)]
    key = "stretch", *places, dtype, piece.log_params, entered, torch.get_num_threads()
    stretch = kernels.load("cpu.template").cached(
        key, lambda: stretch_of(x, bulk, p0, piece.log_params, entered=entered)
    )
    ends = None if piece.counts is None else layout.grouped(piece.counts + entered).contiguous()
    linear = x.new_empty(x.shape[-2] + entered, *layout.grid, x.shape[-1]) if with_messages else None
    recomputed = torch.empty(layout.grid, dtype=torch.bool, device=x.device)
    posteriors = x.new_empty(x.shape) if with_posteriors else None
    start = None if entered else p0
    after, count = stretch.forward(
        x, bulk, entering, p0=start, ends=ends, messages=linear, recomputed=recomputed, shares=posteriors
    )
    leaving, messages = ScaledMessage(*after), None
    report_chains(count)
    if linear is not None:
        messages = Residuals(leaving.scale, linear, recomputed).logs(slice(int(entered), None))
        messages = layout.batched(messages.movedim(0, 2))
    return leaving if piece.counts is None else selected(piece.counts > 0, leaving, entering), posteriors, messages
