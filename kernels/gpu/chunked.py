"""The log-partition of few long chains cut into segments, as in `schedules.chunked`, and its gradients, in Triton.

    w_s = w_{s-1} M_s        f_{s-1} = M_s f_s        M_s = P_b D_b ... P_e D_e, steps b to e of segment s

w_s and f_s are the forward and backward messages between segments, D_i = diag(exp x_i). A chain is a head of 1 to
`count` steps, then `count` segments of `length` steps each. All values are logarithms, and sums that underflow are
recomputed pairwise, so that no sequence has to be redone. Nothing waits for the device. All sequences have v steps.

For the log-partition alone, the products M_s (`segment_products`) are multiplied among themselves until few are left,
and a vector is multiplied with those. For gradients the products are a chain themselves, whose messages are w and f,
and the head and the segments, each from w_{s-1} P_b to f_s, are chains too; each set of matrices then has launches of
its own, since such batches are small.

Kept for the backward pass are `messages` (g, length, count, m, c), the forward messages within the segments, and
`others` (g, 2, count, m, c): the backward messages f at the ends of the head and of all segments but the last, then the
forward messages of the head. Definition: `logchain.reference.product`. Not measured yet.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain, segments_of
from ..numbers import exact_sum
from . import backward_chain, forward_chain
from .backward import copy_if_apart, p0_gradient, transitions_gradient
from .forward import operands
from .segments import segment_product, segment_products

# one vector is multiplied with at most FEW products of segments; while there are more, each GROUP of them is multiplied
FEW, GROUP = 48, 8


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, `others` and `rescued` that `forward` returns."""
    count, length = segments_of(v, segments)
    return ((g, length, count, m, c), (g, 2, count, m, c), (1,)) if keep else ((0,), (0,), (1,))


def forward(chain: Chain, segments: int, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; `messages`; `others`; `rescued` (1), the number of recomputed sums."""
    assert chain.ends is None
    rescued = torch.zeros(1, dtype=torch.int64, device=chain.x.device)
    x, bulk, start, _ = operands(chain)
    shapes = kept_shapes(chain.v, chain.g, chain.m, chain.c, segments, keep)
    messages, others = chain.new(*shapes[0]), chain.new(*shapes[1])
    if not keep:
        # with one set, or one sequence a set, matrices broadcast over sequences as a view; else one set at a time
        sets = [slice(None)] if 1 in (chain.g, chain.m) else [slice(z, z + 1) for z in range(chain.g)]
        norms = [_log_norm(chain, x[:, part], bulk[:, part], start[part], segments, rescued) for part in sets]
        return torch.cat(norms), messages, others, rescued
    count, length = segments_of(chain.v, segments)
    each = [_Set(chain, x[:, z], bulk[:, z], count, length) for z in range(chain.g)]
    norms = [one.forward(start[z], messages[z], others[z], rescued) for z, one in enumerate(each)]
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
        potentials, length, log_params = None, GROUP, True
    norm, _ = _through(first, matrices, chain.dtype, rescued)
    return _added(norm.view(1, -1), *offsets).view(g, m)


def _added(*offsets: Tensor) -> Tensor:
    """The sum over k of offsets (k, n), exact although they may cancel."""
    return torch.add(*exact_sum(torch.cat(offsets)))


def _through(
    first: Tensor, products: Tensor, dtype: torch.dtype, rescued: Tensor, *, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`forward_chain.forward` of messages (m, 1, c) multiplied with products (count, m, c, c), with all x_i zero."""
    zeros = products.new_zeros(()).expand(len(products) + 1, *first.shape)
    return forward_chain.forward(zeros, products, first, None, log_params=True, keep=keep, dtype=dtype, rescued=rescued)


def backward(
    chain: Chain,
    segments: int,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0, and of x and bulk in memory, as by `kernels.plain.backward`; `kept` is `forward`'s result."""
    log_norm, messages, others, _ = kept
    x, bulk, _, _ = operands(chain)
    if grad_bulk is not None:
        grad_bulk = grad_bulk.view(len(grad_bulk), *bulk.shape[1:])
    flat_x = None if grad_x is None else grad_x.reshape(x.shape)
    count, length = segments_of(chain.v, segments)
    starts = []
    for z in range(chain.g):
        grads = (None if one is None else one[:, z] for one in (flat_x, grad_bulk))
        one_set = _Set(chain, x[:, z], bulk[:, z], count, length)
        starts.append(one_set.backward(log_norm[z], messages[z], others[z], weight[z], *grads))
    copy_if_apart(flat_x, grad_x)
    return p0_gradient(chain, torch.stack(starts))


@dataclass(frozen=True)
class _Set:
    """The sequences of one set, `x` (v, m, c) and `bulk` (s, c, c), cut into `count` segments of `length` steps."""

    chain: Chain
    x: Tensor
    bulk: Tensor
    count: int
    length: int

    @property
    def head_steps(self) -> int:
        """The number of transitions within the head."""
        return (len(self.x) - 1) % self.count

    def steps(self, x: Tensor) -> Tensor:
        """The segments' part of x or its gradient (v, m, c), as a view (length, count, m, c)."""
        whole: Tensor = x[self.head_steps + 1 :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def matrices(self, bulk: Tensor) -> Tensor:
        """The matrices (length, count, c, c) into each step of the segments, as a view of `bulk` or its gradient."""
        if len(bulk) == 1:
            return bulk[0].expand(self.length, self.count, *bulk.shape[1:])
        whole: Tensor = bulk[self.head_steps :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def within(self, bulk: Tensor) -> Tensor:
        """The matrices between steps of one segment (length - 1, count, c, c), or (1, count, c, c) if all are one."""
        return self.matrices(bulk)[:1] if len(bulk) == 1 else self.matrices(bulk)[1:]

    def in_head(self, bulk: Tensor) -> Tensor:
        """The matrices of the head (head_steps or 1, 1, c, c)."""
        return bulk[:, None] if len(bulk) == 1 else bulk[: self.head_steps, None]

    def forward(self, start: Tensor, messages: Tensor, others: Tensor, rescued: Tensor) -> Tensor:
        """The log-partitions (m); messages (length, count, m, c) and others (2, count, m, c) are written."""
        m, dtype = self.x.shape[1], self.chain.dtype
        options: dict[str, Any] = {"log_params": self.chain.log_params, "dtype": dtype, "rescued": rescued}
        x, matrices = self.steps(self.x), self.matrices(self.bulk)
        scale = torch.empty(1, m, 2, dtype=torch.float64, device=self.x.device)
        head = forward_chain.forward(
            self.x[: self.head_steps + 1, None], self.in_head(self.bulk), start[None], None, keep=True, scale=scale,
            **options,
        )[1]  # fmt: skip
        assert head is not None
        products, offset = segment_product(matrices[:, :, None].expand(-1, -1, m, -1, -1), x, **options)
        first = head[-1].double().transpose(0, 1)  # (m, 1, c)
        norm, w = _through(first, products, dtype, rescued, keep=True)
        _, f = _through(torch.zeros_like(first), products.flip(0).mT, dtype, rescued, keep=True)
        assert w is not None and f is not None
        entering = self._entering(w[:-1, :, 0], rescued)[0].double()
        forward_chain.forward(x, self.within(self.bulk), entering, None, keep=True, out=messages, **options)
        others[0] = f[1:, :, 0].flip(0)
        others[1].zero_()[: self.head_steps + 1] = head[:, 0]
        return _added(norm.T, *scale.movedim(-1, 0), offset)

    def _entering(self, before: Tensor, rescued: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The messages w_{s-1} P_b (count, m, c) from w_{s-1}, less their maxima, and the maxima (count, m)."""
        zeros = before.new_zeros(()).expand(2, *before.shape)
        norm, messages = forward_chain.forward(
            zeros, self.matrices(self.bulk)[:1], before.double(), None,
            log_params=self.chain.log_params, keep=True, dtype=self.chain.dtype, rescued=rescued,
        )  # fmt: skip
        assert messages is not None
        sums = torch.logsumexp(messages[1].double(), -1)
        return messages[1], torch.where(sums == -torch.inf, 0.0, norm - sums)

    def backward(
        self, log_norm: Tensor, messages: Tensor, others: Tensor, weight: Tensor, grad_x: Tensor | None,
        grad_bulk: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The weighted posterior of the first step (m, c); the gradients of x and bulk are written."""
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
            self.x[: head_steps + 1, None], self.in_head(self.bulk), None, head, log_norm[None].contiguous(),
            weight[None], grad_x=None if grad_x is None else grad_x[: head_steps + 1, None], final=final[:1], **options,
        )  # fmt: skip
        if grad_bulk is None or r is None or head_r is None:
            return start[0]
        before = torch.cat([head[-1], messages[-1, :-1]])
        arrived, scale = self._entering(before)
        log_posterior = (entered / weights[..., None]).masked_fill_(entered == 0, 0.0).double().log()
        r_first = log_posterior - arrived - scale[..., None]
        r_first = torch.where(log_posterior == -torch.inf, log_posterior, r_first).to(before.dtype)
        into_segments = torch.stack([before, arrived]), torch.stack([r_first, r_first]), weights
        if len(grad_bulk) > 1:
            grads, bulk, in_head = self.matrices(grad_bulk), self.bulk, self.in_head
            transitions_gradient(self.chain, *into_segments, self.matrices(bulk)[:1], grads[:1])
            transitions_gradient(self.chain, messages, r, weights, self.within(bulk), grads[1:])
            transitions_gradient(self.chain, head, head_r, weight[None], in_head(bulk), in_head(grad_bulk))
            return start[0]
        grad_bulk.zero_()
        for kept in (into_segments, (messages, r, weights), (head, head_r, weight[None])):
            sets = len(kept[2])
            counts = grad_bulk.new_empty(1, sets, *grad_bulk.shape[1:])
            transitions_gradient(self.chain, *kept, self.bulk[:, None].expand(1, sets, *self.bulk.shape[1:]), counts)
            grad_bulk += counts.sum(1)
        return start[0]
