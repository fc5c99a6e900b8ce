"""The log-partition of few long chains, whose segments are computed side by side.

    M_s = P_b D_b ... P_e D_e             b, e: the first and the last step of segment s
    w_s = w_{s-1} M_s                     forward messages between segments
    f_{s-1} = M_s f_s                     backward messages between segments

A head of a few steps begins at p0, and segments of equal length follow it; all are views of the operands. First each
segment is walked from each of its states, which gives the rows of M_s. Then the products M_s are a short chain of their
own, whose forward messages w enter the segments and whose backward messages f follow them. With gradients the segments
are walked once more, forward from one w each and backward from one f each: their gradients are those of the whole
chain.

The backward pass needs `messages`, the forward messages of the head, and for each segment the w that enters it and the
segment's own; `following` (count + 1, g, m, c), the f; and which sequences were `redone` exactly, in the head and in
each segment.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain, segments_of
from ..kernels.message import Message, normalised
from ..kernels.numbers import exact_sum
from ..rescues import report_chains
from .cut import Cut
from .cut_backward import Backward


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, `following` and `redone`; the first two are empty unless they are to be kept."""
    count = segments_of(v, segments)[0]
    return ((v + count, g, m, c), (count + 1, g, m, c), (count + 1, g * m)) if keep else ((0,), (0,), (1, g * m))


def forward(chain: Chain, segments: int, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64, messages, following, redone."""
    walk, g, m, c = kernels.chain_kernels(chain.x), chain.g, chain.m, chain.c
    shapes = kept_shapes(chain.v, g, m, c, segments, keep)
    messages, following = chain.new(*shapes[0]), chain.x.new_empty(shapes[1], dtype=torch.float64)
    cut = ByRow(chain, segments_of(chain.v, segments)[0])
    head_messages, segment_messages = cut.parts(messages) if keep else (None, None)
    head, start = walk.forward(cut.head(), keep=head_messages, leave=True)
    by_row = cut.by_row()
    rows, products = walk.forward(by_row.rows(), by_row.unit_rows(), leave=True)
    between, shift = by_row.between(start.values, products)
    row_marks = rows.redone.view(*by_row.shape, c).any(-1)
    redone = [head.redone.view(1, g * m), by_row.by_segment(row_marks).reshape(-1, g * m)]
    if not keep:
        last = walk.forward(between)[0]
        marks = torch.cat([*redone, last.redone.view(1, g * m)]).any(0, keepdim=True)
        report_chains(marks)
        return _total([start.scale, shift, last.log_norm.view(1, g, m)]), messages, following, marks
    w = torch.empty_like(following)
    log_norm = _messages(between, w, following)
    entering = cut.entering(normalised(w[:-1])[0])
    passed = walk.forward(cut.segments(), entering, keep=segment_messages, leave=True)[0]
    own = cut.by_segment(passed.redone).reshape(-1, g * m)
    report_chains(torch.cat([*redone, own]).any(0))
    marks = torch.cat([head.redone.view(1, g * m), own])
    return _total([start.scale, shift, log_norm.view(1, g, m)]), messages, following, marks


def _messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m); the logarithms of messages (v, *lead, c) are written, each up to a constant.

    On a GPU one launch takes all steps, of the chain or of the reversed one.
    """
    if not kernels.on_gpu(chain.x):
        log_norm: Tensor = kernels.message_kernels(chain.x).messages(chain, forward, backward)
        return log_norm
    walk = kernels.chain_kernels(chain.x)
    last = torch.zeros_like(chain.p0)
    turned = replace(chain, bulk=chain.bulk.flip(0).mT, p0=last)
    ahead, behind = (walk.forward(one, keep=one.new(chain.v, chain.g, chain.m, chain.c))[0] for one in (chain, turned))
    forward.copy_(ahead.logs(slice(None)).view(forward.shape))
    backward.copy_(behind.logs(slice(None)).flip(0).view(backward.shape))
    total: Tensor = ahead.log_norm
    return total


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(exact_sum(torch.cat(terms))).sum(0)


def backward(
    chain: Chain,
    segments: int,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0 (*lead, c), as in `kernels.plain.backward`; `saved` is what `forward` returned."""
    log_norm, messages, following, redone = saved
    cut, marks = Cut(chain, segments_of(chain.v, segments)[0]), redone.view(-1, chain.g, chain.m)
    passes = Backward(cut, log_norm, messages, marks, weight, grad_x, grad_bulk)
    passes.segments(following[1:])
    return passes.head(following[0])


class ByRow(Cut):
    """A cut whose segments are walked from each of their states."""

    def by_row(self) -> "ByRow":
        """The cut with which segments are walked from each of their states.

        A GPU reads rows in place if each segment is a set of its own, which costs no memory for a single set.
        """
        chain = self.chain
        if not (self.homogeneous and chain.g == 1 and kernels.on_gpu(chain.x)):
            return self
        return ByRow(replace(chain, bulk=chain.bulk.expand(chain.v - 1, *chain.bulk.shape[1:])), self.count)

    def rows(self) -> Chain:
        """The chain of the segments, each of them c times (g', m' c)."""
        chain, c = self.segments(), self.chain.c
        x = chain.x.unsqueeze(-2).expand(*chain.x.shape[:-1], c, c)
        ends = None if chain.ends is None else chain.ends.expand(*self.shape, c).reshape(self.shape[0], -1, 1)
        return replace(chain, x=x, ends=ends)

    def unit_rows(self) -> Message:
        """A message (g', m' c) into each segment for each state, that has all its weight on this state."""
        (sets, members), c = self.shape, self.chain.c
        rows = torch.eye(c, dtype=self.chain.dtype, device=self.chain.x.device).log_().repeat(members, 1)
        scale = torch.zeros(1, dtype=torch.float64, device=rows.device)
        return Message(rows.expand(sets, -1, c), scale.expand(2, sets, members * c))

    def between(self, start: Tensor, products: Message) -> tuple[Chain, Tensor]:
        """The chain of the segments' products, behind the head's message, and their scales taken out (count, g, m)."""
        chain, c = self.chain, self.chain.c
        high, low = (self.by_segment(part.view(*self.shape, c)) for part in products.scale)
        top = high.amax(-1)
        top = top.masked_fill(top == -torch.inf, 0.0)
        matrices = self.by_segment(products.values.view(*self.shape, c, c))
        matrices.add_((high - top[..., None] + low)[..., None])
        x = matrices.new_zeros(c).expand(self.count + 1, chain.g, chain.m, c)
        return Chain(x, matrices, start, None, True, torch.float64), top
