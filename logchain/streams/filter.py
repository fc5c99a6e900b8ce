"""The posteriors of a piece, filtered and smoothed with a lag, and the forward message after it.

Dense matrices without gradients are computed by the kernels of chains, other pieces by the differentiable scan.
"""

from functools import partial

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..autograd.scan import ScaledMessage, Steps, forward_messages
from ..internals import between_graphs, tree_leaves
from ..kernels.chain import Chain
from ..kernels.message import Message
from ..kernels.numbers import probabilities, shifted
from ..operands import check_signs
from ..rescues import report_chains
from ..tensors import differentiated
from ..transitions import LOG, Transition
from ..transitions.dense import Dense
from . import stretch
from .piece import Piece, Window, after_each, mapped, scaled, selected

# numbers of x, and of matrices that change, in a block: some megabytes, and enough to hide the overhead of a block
_BLOCK = 2**19

# the message after a piece; posteriors and messages of its variables, None for what is not wanted
Results = tuple[ScaledMessage, Tensor | None, Tensor | None]


@partial(between_graphs, reason="a stream is computed between graphs; logchain.product has one")
def filtered(piece: Piece, entering: ScaledMessage, dtype: torch.dtype | None, with_messages: bool) -> Results:
    """The message with sum 1 after a piece, posteriors [*B, k, c] if there is a `dtype`, and messages if wanted.

    Messages [*B, k, c] are logarithms up to a constant. Where a sequence has no variable, posteriors are 0 and messages
    -inf.
    """
    x = piece.x
    if not piece.log_params:
        check_signs(x, piece.transition, piece.p0, piece.weights)
    if x.numel() == 0:
        return entering, None if dtype is None else x.to(dtype), x.double()
    dense = isinstance(piece.transition, Dense) and has_values(x)
    if not dense or differentiated(x, piece.p0, entering.values, *piece.transition.parameters):
        return _by_scan(piece.logs, entering, dtype)
    with kernels.arithmetic_on(x):
        if piece.going or (piece.starting and not with_messages and _in_place(piece)):
            return _by_kernels(piece, entering, dtype, with_messages)
        # a step apart for sequences that start, since a message enters the kernels
        first, rest = _by_scan(piece.part(0, 1).logs, entering, dtype), piece.part(1, x.shape[-2])
        return _joined(first, _by_kernels(rest, first[0], dtype, with_messages)) if rest.x.numel() else first


def _in_place(piece: Piece) -> bool:
    """Whether the C loops read a piece."""
    return kernels.in_c(piece.x) and stretch.in_place(piece.x, piece.bulk)


def _joined(*parts: Results) -> Results:
    """The results of parts of a piece, one after another."""
    *_, (leaving, posteriors, messages) = parts
    if posteriors is not None:
        posteriors = torch.cat([part[1] for part in parts if part[1] is not None], -2)
    if messages is not None:
        messages = torch.cat([part[2] for part in parts if part[2] is not None], -2)
    return leaving, posteriors, messages


def _by_scan(piece: Piece, entering: ScaledMessage, dtype: torch.dtype | None) -> Results:
    """The results for a piece in logarithms, step by step.

    The scale is a constant to autograd, and so is the sum that a message is divided by: derivatives of both would
    cancel, up to rounding errors. `log_norm` has the gradient of the message.
    """
    fresh = None if piece.going else piece.fresh
    steps = Steps(piece.x, piece.transition, piece.p0, None, True, entered=True, fresh=fresh)
    first = ScaledMessage(*map(steps.layout.grouped, entering))
    fields = zip(first, *forward_messages(steps, first), strict=True)
    columns = [steps.layout.batched(torch.stack(field, 2)) for field in fields]  # [*B, k + 1, c or 1]
    messages, leaving = columns[0][..., 1:, :], ScaledMessage(*(column[..., -1, :] for column in columns))
    if piece.counts is not None:
        messages = torch.where(piece.active()[..., None], messages, -torch.inf)
        index = piece.counts[..., None, None]
        leaving = ScaledMessage(*(column.take_along_dim(index, -2).squeeze(-2) for column in columns))
    norm = LOG.sum(leaving.values.detach(), -1)[..., None]
    leaving = scaled(leaving, norm)._replace(values=leaving.values - norm.masked_fill(norm == -torch.inf, 0.0))
    if piece.counts is not None:
        leaving = selected(piece.counts > 0, leaving, entering)
    return leaving, None if dtype is None else probabilities(messages).to(dtype), messages


def _by_kernels(piece: Piece, entering: ScaledMessage, dtype: torch.dtype | None, with_messages: bool) -> Results:
    """The results for a dense piece, which the message enters unless all sequences start."""
    x, bulk, k = piece.x, piece.bulk, piece.x.shape[-2]
    if _in_place(piece):
        leaving, posteriors, messages = stretch.forward(piece, entering, dtype is not None, with_messages)
    else:
        size = max(1, _BLOCK * k // (x.numel() + (bulk.numel() if bulk.shape[-3] > 1 else 0)))
        leaving, parts = entering, []
        for start in range(0, k, size):
            part = piece.part(start, min(start + size, k))
            parts.append(_by_any_kernels(part, leaving, dtype is not None or with_messages))
            leaving = parts[-1][0]
        leaving, posteriors, messages = _joined(*parts)
    if dtype is not None and posteriors is not None:
        posteriors = posteriors.to(dtype)
        posteriors = posteriors if piece.counts is None else torch.where(piece.active()[..., None], posteriors, 0.0)
    if messages is not None and with_messages:
        # linear messages have small entries flushed to zero: each again, in log space, from the one before it
        before = torch.cat([entering.values[..., None, :], messages[..., :-1, :]], -2)
        logs = shifted(after_each(piece.logs.transition, before) + shifted(piece.logs.x)[0])[0]
        messages = torch.where(piece.active()[..., None], logs, -torch.inf)
    return leaving, None if dtype is None else posteriors, messages


def _by_any_kernels(piece: Piece, entering: ScaledMessage, wanted: bool) -> Results:
    """The results of `stretch.forward` by the kernels of any device; posteriors and messages if `wanted`."""
    x, bulk = piece.x, piece.bulk
    chain = Chain.of(x, bulk, piece.p0, piece.counts, piece.log_params, stretch=True)
    layout = chain.layout
    values = layout.weights(entering.values).reshape(chain.g, chain.m, chain.c)
    before = Message(values, values.new_zeros(2, chain.g, chain.m))
    memory, posteriors, messages = chain.new(chain.v + 1, *values.shape) if wanted else None, None, None
    residuals, after = kernels.forward(chain, before, keep=memory, leave=True)
    report_chains(residuals.recomputed)
    if wanted:
        messages = layout.batched(residuals.logs(slice(1, None)).movedim(0, 2)).contiguous()
        posteriors = probabilities(messages)
    leaving = entering._replace(values=layout.states(after.values.view(*chain.lead, chain.c)))
    for term in after.scale:
        leaving = scaled(leaving, layout.batched(term)[..., None])
    return leaving, posteriors, messages


def passed(before: Window | None, piece: Piece, messages: Tensor, lag: int) -> tuple[Tensor, Window]:
    """The posteriors [*B, m, c] of variables that `lag` more follow after a piece in logarithms, and the window."""
    axis, k, transition = piece.x.dim() - 2, piece.x.shape[-2], None

    def joined(old: Tensor, new: Tensor) -> Tensor:
        if old.shape[:axis] != new.shape[:axis]:
            lead = torch.broadcast_shapes(old.shape[:axis], new.shape[:axis])
            old, new = (part.expand(*lead, *part.shape[axis:]) for part in (old, new))
        return torch.cat([old, new], axis)

    if piece.name == "bulk_piece":
        transition = piece.transition.map(lambda a: a.expand(*a.shape[:axis], k, *a.shape[axis + 1 :]))
    window = Window(piece.x, messages, piece.linked(), transition)
    if before is not None:
        if before.transition is not None and transition is not None:
            _check_alike(before.transition, transition)
        window = mapped(joined, before, window)
    ready = max(0, window.x.shape[axis] - lag)
    # copied so that the memory of those before is free
    rest = mapped(lambda a: a.narrow(axis, ready, a.shape[axis] - ready).clone(), window)
    return smoothed(window, piece.transition, ready, lag), rest


def smoothed(window: Window, transition: Transition | None, ready: int, lag: int) -> Tensor:
    """The posteriors [*B, ready, c] of the first states, conditional on up to `lag` more variables; 0 for no variable.

    Backward messages of all of them pass `lag` steps at once. `transition` is that of the stream, if it has one.
    """
    n, transition = window.x.shape[-2], window.transition or transition
    assert transition is not None
    transposed = transition.mT
    x = shifted(torch.where(window.linked[..., None], window.x, 0.0))[0]
    backward = torch.zeros_like(window.messages[..., :ready, :])
    for j in range(min(lag, n - 1) if backward.numel() else 0, 0, -1):
        stop = min(j + ready, n)
        into = shifted(backward[..., : stop - j, :] + x[..., j:stop, :])[0]
        before = after_each(transposed.between(j, stop), into)
        # the backward message of a sequence's last variable is 0
        before = torch.where(window.linked[..., j:stop, None], before, 0.0)
        backward = torch.cat([before, backward[..., stop - j :, :]], -2)
    return probabilities(window.messages[..., :ready, :] + backward)


def _check_alike(old: Transition, new: Transition) -> None:
    """Raise for structures that cannot be concatenated: all but leading axes and values of parameters must be equal."""
    was, now = (tree_leaves([type(a), a.pattern or vars(a.with_parameters()), a.sizes]) for a in (old, new))
    pairs = zip(was, now, strict=False)
    if len(was) != len(now) or not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs):
        expected = f"that of the last update, {type(old).__name__}, with other parameters, since lag holds both"
        raise ValueError(f"bulk_piece: expected {expected}, got another {type(new).__name__}")
