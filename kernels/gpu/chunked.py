"""The log-partition of few long chains cut into segments, as `schedules.chunked` has it, on the Triton kernels.

    w_s = w_{s-1} M_s        f_{s-1} = M_s f_s        M_s = P_b D_b ... P_e D_e, steps b to e of segment s

All is logarithms, and exact where maxima are misaligned, so that nothing need be done again. Nothing waits for the
device. Sequences have no lengths.

Where the log-partition alone is wanted, the products (`segment_products`) are multiplied in turn until few are left,
and one vector passes through those. For gradients they are a chain themselves, whose forward and backward messages are
w and f; the segments, each from w_{s-1} P_b to f_s, and the head before them are ordinary chains. Then each set of
matrices has launches of its own: such chains are few.

Kept for the backward pass are `messages` (g, length, count, m, c), those of the segments, and `others` (g, 2, count, m,
c): the weights f of the head and of all segments but the last, and the head's messages. Definition:
`logchain.reference.product`. Not measured yet.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain, segments_of
from ..numbers import exact_sum
from . import backward_chain, forward_chain
from .backward import count_transitions, written
from .forward import operands
from .segments import segment_product, segment_products

# so many products of segments are left to one vector; if there are more, so many at a time are multiplied first
FEW, AGAIN = 48, 8


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """Those of `messages`, `others` and the count of what was redone."""
    count, length = segments_of(v, segments)
    return ((g, length, count, m, c), (g, 2, count, m, c), (1,)) if keep else ((0,), (0,), (1,))


def forward(chain: Chain, segments: int, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; messages; others; how many sums were redone pairwise."""
    assert chain.ends is None
    rescued = torch.zeros(1, dtype=torch.int64, device=chain.x.device)
    x, bulk, start, _ = operands(chain)
    shapes = kept_shapes(chain.v, chain.g, chain.m, chain.c, segments, keep)
    messages, others = chain.new(*shapes[0]), chain.new(*shapes[1])
    if not keep:
        # one matrix for many sequences, or one for each, is a view of both
        sets = [slice(None)] if 1 in (chain.g, chain.m) else [slice(z, z + 1) for z in range(chain.g)]
        norms = [_log_norm(chain, x[:, part], bulk[:, part], start[part], segments, rescued) for part in sets]
        return torch.cat(norms), messages, others, rescued
    count, length = segments_of(chain.v, segments)
    norms = []
    for z in range(chain.g):
        part = _Set(chain, x[:, z], bulk[:, z], count, length)
        norms.append(part.forward(start[z], messages[z], others[z], rescued))
    return torch.stack(norms), messages, others, rescued


def _log_norm(chain: Chain, x: Tensor, bulk: Tensor, start: Tensor, count: int, rescued: Tensor) -> Tensor:
    """The log-partitions (g, m) of chains of which g or m is 1."""
    v, g, m, c = x.shape
    shift = x[0].amax(-1, keepdim=True).double()
    shift.masked_fill_(shift == -torch.inf, 0.0)
    first = (start + (x[0] - shift)).reshape(g * m, 1, c)
    matrices = bulk.expand(v - 1, max(g, m), c, c)
    potentials: Tensor | None = x[1:].reshape(v - 1, g * m, c)
    offsets, length, log_params = [shift.view(1, -1)], math.ceil((v - 1) / count), chain.log_params
    while potentials is not None or len(matrices) > FEW:
        options: dict[str, Any] = {"log_params": log_params, "rescued": rescued, "dtype": chain.dtype}
        matrices, offset = segment_products(matrices, potentials, length, **options)
        offsets.append(offset)
        potentials, length, log_params = None, AGAIN, True
    norm, _ = _carried(first, matrices, chain.dtype, rescued)
    return _added(norm.view(1, -1), *offsets).view(g, m)


def _added(*offsets: Tensor) -> Tensor:
    """The sum of the rows of (k, n), which may cancel."""
    return torch.add(*exact_sum(torch.cat(offsets)))


def _carried(
    first: Tensor, products: Tensor, dtype: torch.dtype, rescued: Tensor, *, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Messages (m, 1, c) through products (count, m, c, c): as `forward_chain.forward`."""
    nothing = products.new_zeros(()).expand(len(products) + 1, *first.shape)
    return forward_chain.forward(
        nothing, products, first, None, log_params=True, keep=keep, dtype=dtype, rescued=rescued
    )


def backward(
    chain: Chain,
    segments: int,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m), as in `kernels.plain.backward`; `kept` by `forward`."""
    log_norm, messages, others, _ = kept
    x, bulk, _, _ = operands(chain)
    if grad_bulk is not None:
        grad_bulk = grad_bulk.view(len(grad_bulk), *bulk.shape[1:])
    flat_x = None if grad_x is None else grad_x.reshape(x.shape)
    count, length = segments_of(chain.v, segments)
    starts = []
    for z in range(chain.g):
        into = None if flat_x is None else flat_x[:, z], None if grad_bulk is None else grad_bulk[:, z]
        part = _Set(chain, x[:, z], bulk[:, z], count, length)
        starts.append(part.backward(log_norm[z], messages[z], others[z], weight[z], *into))
    return written(chain, torch.stack(starts), flat_x, grad_x)


@dataclass(frozen=True)
class _Set:
    """Those of a chain that share `bulk` (s, c, c), with `x` (v, m, c), cut into `count` segments of `length` steps."""

    chain: Chain
    x: Tensor
    bulk: Tensor
    count: int
    length: int

    @property
    def head_steps(self) -> int:
        """Transitions of the head."""
        return (len(self.x) - 1) % self.count

    def steps(self, x: Tensor) -> Tensor:
        """(v, m, c) of the segments (length, count, m, c)."""
        whole: Tensor = x[self.head_steps + 1 :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def matrices(self, bulk: Tensor) -> Tensor:
        """The matrices (length, count, c, c) that lead into the segments and on."""
        if len(bulk) == 1:
            return bulk[0].expand(self.length, self.count, *bulk.shape[1:])
        whole: Tensor = bulk[self.head_steps :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def within(self, bulk: Tensor) -> Tensor:
        """Those that do not lead into the segments, one for every step if it is the same."""
        return self.matrices(bulk)[:1] if len(bulk) == 1 else self.matrices(bulk)[1:]

    def ahead(self, bulk: Tensor) -> Tensor:
        """The head's (head_steps or 1, 1, c, c)."""
        return bulk[:, None] if len(bulk) == 1 else bulk[: self.head_steps, None]

    def forward(self, start: Tensor, messages: Tensor, others: Tensor, rescued: Tensor) -> Tensor:
        """The log-partitions (m); messages (length, count, m, c) and others (2, count, m, c) are written."""
        m = self.x.shape[1]
        dtype = self.chain.dtype
        linear: dict[str, Any] = {"log_params": self.chain.log_params, "dtype": dtype, "rescued": rescued}
        x, matrices = self.steps(self.x), self.matrices(self.bulk)
        scale = torch.empty(1, m, 2, dtype=torch.float64, device=self.x.device)
        head = forward_chain.forward(
            self.x[: self.head_steps + 1, None], self.ahead(self.bulk), start[None], None, keep=True, scale=scale,
            **linear,
        )[1]  # fmt: skip
        assert head is not None
        products, offset = segment_product(matrices[:, :, None].expand(-1, -1, m, -1, -1), x, **linear)
        first = head[-1].double().transpose(0, 1)  # (m, 1, c)
        norm, vectors = _carried(first, products, dtype, rescued, keep=True)
        ones = torch.zeros_like(first)
        _, weights = _carried(ones, products.flip(0).mT, dtype, rescued, keep=True)
        assert vectors is not None and weights is not None
        entering = self._entering(vectors[:-1, :, 0], rescued)[0].double()
        forward_chain.forward(x, self.within(self.bulk), entering, None, keep=True, room=messages, **linear)
        others[0] = weights[1:, :, 0].flip(0)
        others[1].zero_()[: self.head_steps + 1] = head[:, 0]
        return _added(norm.T, *scale.movedim(-1, 0), offset)

    def _entering(self, before: Tensor, rescued: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What enters the segments from messages (count, m, c), over its maximum, and what was taken out (count, m)."""
        nothing = before.new_zeros(()).expand(2, *before.shape)
        norm, messages = forward_chain.forward(
            nothing, self.matrices(self.bulk)[:1], before.double(), None,
            log_params=self.chain.log_params, keep=True, dtype=self.chain.dtype, rescued=rescued,
        )  # fmt: skip
        assert messages is not None
        sums = torch.logsumexp(messages[1].double(), -1)
        return messages[1], torch.where(sums == -torch.inf, 0.0, norm - sums)

    def backward(
        self, log_norm: Tensor, messages: Tensor, others: Tensor, weight: Tensor, grad_x: Tensor | None,
        grad_bulk: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write the gradients; `weight` times the posterior of the first state (m, c) is returned."""
        head_steps, m = self.head_steps, len(weight)
        options: dict[str, Any] = {"log_params": self.chain.log_params, "want_r": grad_bulk is not None}
        final = torch.cat([others[0], torch.zeros_like(others[0, :1])])
        norms, weights = (value.expand(self.count, m).contiguous() for value in (log_norm, weight))
        entered, r = backward_chain.backward(
            self.steps(self.x), self.within(self.bulk), None, messages, norms, weights,
            grad_x=None if grad_x is None else self.steps(grad_x), final=final[1:], **options,
        )  # fmt: skip
        head = others[1, : head_steps + 1, None].contiguous()  # (head_steps + 1, 1, m, c)
        start, head_r = backward_chain.backward(
            self.x[: head_steps + 1, None], self.ahead(self.bulk), None, head, log_norm[None].contiguous(),
            weight[None], grad_x=None if grad_x is None else grad_x[: head_steps + 1, None], final=final[:1], **options,
        )  # fmt: skip
        if grad_bulk is None or r is None or head_r is None:
            return start[0]
        before = torch.cat([head[-1], messages[-1, :-1]])
        arrived, scale = self._entering(before)
        share = (entered / weights[..., None]).masked_fill_(entered == 0, 0.0).double().log()
        share = torch.where(share == -torch.inf, share, share - arrived - scale[..., None]).to(before.dtype)
        into = torch.stack([before, arrived]), torch.stack([share, share]), weights
        if len(grad_bulk) > 1:
            whole = self.matrices(grad_bulk)
            count_transitions(self.chain, *into, self.matrices(self.bulk)[:1], whole[:1])
            count_transitions(self.chain, messages, r, weights, self.within(self.bulk), whole[1:])
            count_transitions(self.chain, head, head_r, weight[None], self.ahead(self.bulk), self.ahead(grad_bulk))
            return start[0]
        grad_bulk.zero_()
        for kept in (into, (messages, r, weights), (head, head_r, weight[None])):
            sets = len(kept[2])
            counts = grad_bulk.new_empty(1, sets, *grad_bulk.shape[1:])
            count_transitions(self.chain, *kept, self.bulk[:, None].expand(1, sets, *self.bulk.shape[1:]), counts)
            grad_bulk += counts.sum(1)
        return start[0]
