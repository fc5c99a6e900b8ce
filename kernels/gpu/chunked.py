"""The log-partition of few long chains cut into segments, as `kernels.chunked` has it, on the Triton kernels.

    w_s = w_{s-1} M_s        f_{s-1} = M_s f_s        M_s = P_b D_b ... P_e D_e, steps b to e of segment s

All is logarithms, and exact where maxima are misaligned, so that nothing need be done again. The products are made by
`forward_chain.segment_product`; they are a chain themselves, whose forward and backward messages are w and f. The
segments, each from w_{s-1} P_b to f_s, and the head before them are ordinary chains. Nothing waits for the device.
Each set of matrices has launches of its own: such chains are few. Sequences have no lengths.

Kept for the backward pass are `messages` (g, length, count, m, c), those of the segments, and `others` (g, 2, count, m,
c): the weights f of the head and of all segments but the last, and the head's messages. Definition:
`logchain.reference.product`. Not measured yet.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain
from ..cut import count_of
from . import backward_chain, forward_chain, transitions
from .sum_product import operands


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """Those of `messages`, `others` and the count of what was redone."""
    count, length = count_of(v, segments)
    return ((g, length, count, m, c), (g, 2, count, m, c), (1,)) if keep else ((0,), (0,), (1,))


def forward(
    chain: Chain, kernels: ModuleType, *, keep: bool, steps: int, segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; messages; others; how many sums were redone pairwise."""
    assert chain.v == steps and chain.ends is None
    rescued = torch.zeros(1, dtype=torch.int64, device=chain.x.device)
    x, bulk, start, _ = operands(chain)
    found = [_Set.of(chain, x, bulk, z, segments).forward(start[z], keep, rescued) for z in range(chain.g)]
    log_norm, messages, others = zip(*found, strict=True)
    if not keep:
        return torch.stack(log_norm), chain.new(0), chain.new(0), rescued
    if chain.g == 1:
        return log_norm[0][None], messages[0][None], others[0][None], rescued
    return torch.stack(log_norm), torch.stack(messages), torch.stack(others), rescued


def backward(
    chain: Chain,
    kernels: ModuleType,
    log_norm: Tensor,
    messages: Tensor,
    others: Tensor,
    redone: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
    *,
    steps: int,
    segments: int,
) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m), as in `kernels.sum_product`."""
    x, bulk, _, _ = operands(chain)
    flat_x = None if grad_x is None else grad_x.reshape(x.shape)
    found = []
    for z in range(chain.g):
        part = _Set.of(chain, x, bulk, z, segments)
        into = None if flat_x is None else flat_x[:, z], None if grad_bulk is None else grad_bulk[:, z]
        found.append(part.backward(log_norm[z], messages[z], others[z], weight[z], *into))
    if grad_x is not None and flat_x is not None and flat_x.data_ptr() != grad_x.data_ptr():
        grad_x.copy_(flat_x.view(grad_x.shape))  # axes that do not fold into sets and members
    grad_p0 = torch.stack(found).double().view(*chain.lead, chain.c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)


@dataclass(frozen=True)
class _Set:
    """The chains `x` (v, m, c) that share `bulk` (s, c, c), cut into `count` segments of `length` steps."""

    x: Tensor
    bulk: Tensor
    count: int
    length: int
    log_params: bool
    by_log: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, chain: Chain, x: Tensor, bulk: Tensor, z: int, segments: int) -> "_Set":
        count, length = count_of(chain.v, segments)
        by_log = chain.by_log and not chain.log_params
        return cls(x[:, z], bulk[:, z], count, length, chain.log_params, by_log, chain.dtype)

    @property
    def rest(self) -> int:
        """Transitions of the head."""
        return (len(self.x) - 1) % self.count

    def steps(self, x: Tensor) -> Tensor:
        """(v, m, c) of the segments (length, count, m, c)."""
        whole: Tensor = x[self.rest + 1 :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def matrices(self, bulk: Tensor) -> Tensor:
        """The matrices (length, count, c, c) that lead into the segments and on."""
        if len(bulk) == 1:
            return bulk[0].expand(self.length, self.count, *bulk.shape[1:])
        whole: Tensor = bulk[self.rest :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def within(self, bulk: Tensor) -> Tensor:
        """Those that do not lead into the segments, one for every step if it is the same."""
        return self.matrices(bulk)[:1] if len(bulk) == 1 else self.matrices(bulk)[1:]

    def ahead(self, bulk: Tensor) -> Tensor:
        """The head's (rest or 1, 1, c, c)."""
        return bulk[:, None] if len(bulk) == 1 else bulk[: self.rest, None]

    def forward(self, start: Tensor, keep: bool, rescued: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log-partitions (m), messages (length, count, m, c) and others (2, count, m, c)."""
        (m, c), count = self.x.shape[1:], self.count
        linear: dict[str, Any] = {"log_params": self.log_params, "dtype": self.dtype, "rescued": rescued}
        logs: dict[str, Any] = {**linear, "log_params": True}
        x, matrices = self.steps(self.x), self.matrices(self.bulk)
        head_norm, head = forward_chain.forward(
            self.x[: self.rest + 1, None], self.ahead(self.bulk), start[None], None, keep=True, **linear
        )
        assert head is not None
        products, offset = forward_chain.segment_product(
            matrices[:, :, None].expand(-1, -1, m, -1, -1), x, log_params=self.log_params, rescued=rescued
        )
        first = head[-1].double().transpose(0, 1)  # (m, 1, c)
        sums = torch.logsumexp(first, -1)
        scale = torch.where(sums == -torch.inf, 0.0, head_norm.T - sums)
        nothing = self.x.new_zeros(()).expand(count + 1, m, 1, c)
        norm, vectors = forward_chain.forward(nothing, products, first, None, keep=keep, **logs)
        log_norm = (norm + scale)[:, 0] + offset.sum(0)
        if not keep or vectors is None:
            return log_norm, first, first
        backwards = products.flip(0).mT
        _, weights = forward_chain.forward(nothing, backwards, torch.zeros_like(first), None, keep=True, **logs)
        entering = self._entering(vectors[:-1, :, 0], rescued)[0]
        _, messages = forward_chain.forward(x, self.within(self.bulk), entering.double(), None, keep=True, **linear)
        assert weights is not None and messages is not None
        others = torch.zeros(2, count, m, c, dtype=self.dtype, device=self.x.device)
        others[0] = weights[1:, :, 0].flip(0)
        others[1, : self.rest + 1] = head[:, 0]
        return log_norm, messages, others

    def _entering(self, before: Tensor, rescued: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What enters the segments from messages (count, m, c), over its maximum, and what was taken out (count, m)."""
        nothing = before.new_zeros(()).expand(2, *before.shape)
        norm, messages = forward_chain.forward(
            nothing, self.matrices(self.bulk)[:1], before.double(), None,
            log_params=self.log_params, keep=True, dtype=self.dtype, rescued=rescued,
        )  # fmt: skip
        assert messages is not None
        sums = torch.logsumexp(messages[1].double(), -1)
        return messages[1], torch.where(sums == -torch.inf, 0.0, norm - sums)

    def backward(
        self, log_norm: Tensor, messages: Tensor, others: Tensor, weight: Tensor, grad_x: Tensor | None,
        grad_bulk: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write the gradients; `weight` times the posterior of the first state (m, c) is returned."""
        rest, m = self.rest, len(weight)
        options: dict[str, Any] = {"log_params": self.log_params, "want_r": grad_bulk is not None}
        final = torch.cat([others[0], torch.zeros_like(others[0, :1])])
        norms, weights = (value.expand(self.count, m).contiguous() for value in (log_norm, weight))
        entered, r = backward_chain.backward(
            self.steps(self.x), self.within(self.bulk), None, messages, norms, weights,
            grad_x=None if grad_x is None else self.steps(grad_x), final=final[1:], **options,
        )  # fmt: skip
        head = others[1, : rest + 1, None].contiguous()  # (rest + 1, 1, m, c)
        start, head_r = backward_chain.backward(
            self.x[: rest + 1, None], self.ahead(self.bulk), None, head, log_norm[None].contiguous(), weight[None],
            grad_x=None if grad_x is None else grad_x[: rest + 1, None], final=final[:1], **options,
        )  # fmt: skip
        if grad_bulk is None or r is None or head_r is None:
            return start[0]
        before = torch.cat([head[-1], messages[-1, :-1]])
        arrived, taken = self._entering(before)
        share = (entered / weights[..., None]).masked_fill_(entered == 0, 0.0).double().log()
        share = torch.where(share == -torch.inf, share, share - arrived - taken[..., None]).to(self.dtype)
        into = torch.stack([before, arrived]), torch.stack([share, share]), weights
        if len(grad_bulk) > 1:
            whole = self.matrices(grad_bulk)
            self._count(*into, self.matrices(self.bulk)[:1], whole[:1])
            self._count(messages, r, weights, self.within(self.bulk), whole[1:])
            self._count(head, head_r, weight[None], self.ahead(self.bulk), self.ahead(grad_bulk))
            return start[0]
        grad_bulk.zero_()
        for chain in (into, (messages, r, weights), (head, head_r, weight[None])):
            sets = len(chain[2])
            counts = grad_bulk.new_empty(1, sets, *grad_bulk.shape[1:])
            self._count(*chain, self.bulk[:, None].expand(1, sets, *self.bulk.shape[1:]), counts)
            grad_bulk += counts.sum(1)
        return start[0]

    def _count(self, messages: Tensor, r: Tensor, weight: Tensor, bulk: Tensor, out: Tensor) -> None:
        bulk = bulk.to(self.dtype).log() if self.by_log else bulk
        transitions.gradient(messages, r, weight, bulk, out, log_params=self.log_params or self.by_log)
