"""A long piece of one sequence on a CPU, in segments as in `schedules.overlapped`."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.chain import WORTH_A_THREAD, Chain
from ..operands import arithmetic_dtype
from ..schedules import choose
from ..schedules.cut import Cut
from ..schedules.overlapped import assumed, early, wrong
from . import stretch
from .piece import Carried, RawPiece, added
from .stretch import Calls

# memory for posteriors and messages, None for what is not asked for
Outputs = tuple[Tensor | None, Tensor | None]


def segments_of(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> int:
    """The number of segments that a piece is filtered in; 1 for one that is walked as a whole."""
    k, c = x.shape[-2:]
    if x.numel() != k * c or k * c**2 < WORTH_A_THREAD:
        return 1
    return choose.of(x, bulk, p0, log_params, False, choose.WALKS, False).segments


def walk(raw: RawPiece, carried: Carried, head: bool, outputs: Outputs, calls: Calls, segments: int) -> Carried:
    """The same as `stretch.walk`, of a piece of which one sequence has all variables."""
    k, c = raw.x.shape[-2:]
    whole = raw._replace(
        x=raw.x.reshape(k, c), bulk=raw.bulk.reshape(-1, c, c), p0=raw.p0.reshape(c), fresh=raw.fresh.reshape(())
    )
    cut = Cut(_chain(whole), segments)
    rest, steps = cut.rest + 1, early(cut)
    if steps == 0:
        return stretch.walk(raw, carried, head, *outputs, calls)
    flat = _of_outputs(outputs, lambda out: out.view(k, c))
    before = Carried(carried.message.view(c), carried.total.view(()), carried.lost.view(()))
    first = _of_outputs(flat, lambda out: out[:rest])
    before = stretch.walk(whole.part(0, rest), before, head, *first, calls)
    side_by_side = _of_outputs(flat, lambda out: out[rest:].unflatten(0, (segments, cut.length)))
    after = _segments(cut, whole.part(rest, k), before.message, steps, side_by_side)
    for total, lost in zip(after.total, after.lost, strict=True):
        before = added(before, total)
        before = before._replace(lost=before.lost + lost)
    if not before.total < torch.inf:  # what is not finite is that of one walk
        return stretch.walk(raw, carried, head, *outputs, calls)
    last = after.message[-1], before.total, before.lost
    return Carried(*(part.view(like.shape) for part, like in zip(last, carried, strict=True)))


def _of_outputs(outputs: Outputs, view: Callable[[Tensor], Tensor]) -> Outputs:
    first, second = (None if out is None else view(out) for out in outputs)
    return first, second


def _chain(whole: RawPiece) -> Chain:
    """The piece as a chain that begins with p0."""
    dtype, matrices = arithmetic_dtype(whole.x, whole.bulk, whole.p0), whole.bulk[:, None]
    matrices = matrices if len(matrices) == 1 else matrices[1:]
    return Chain(whole.x[:, None], matrices, whole.p0[None], None, whole.log_params, dtype)


def _segments(cut: Cut, behind: RawPiece, message: Tensor, steps: int, outputs: Outputs) -> Carried:
    """What is carried from each of the segments behind the head, whose `message` enters the first."""
    sizes, own = (cut.count, cut.length), len(behind.bulk) > 1
    each = behind._replace(x=behind.x.unflatten(0, sizes), fresh=behind.fresh.expand(cut.count))
    if own:
        each = each._replace(bulk=behind.bulk.unflatten(0, sizes))
    nothing, entering = message.new_zeros(cut.count), assumed(cut, steps, message.view(1, 1, -1))
    after = stretch.walk(each, Carried(entering.flatten(0, 2), nothing, nothing), True, *outputs, Calls())
    for s in wrong(cut, after.message.view(entering.shape), entering, cut.reached()):
        alone = each._replace(x=each.x[s], bulk=each.bulk[s] if own else each.bulk, fresh=behind.fresh)
        arrived = Carried(after.message[s - 1], nothing[s], nothing[s])
        posteriors, messages = (None if out is None else out[s] for out in outputs)
        left = stretch.walk(alone, arrived, True, posteriors, messages, Calls())
        for to, found in zip(after, left, strict=True):
            to[s] = found
    return after
