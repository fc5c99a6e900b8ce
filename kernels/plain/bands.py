"""The log-partition of chains whose matrices have entries on a few diagonals only, and its gradients, in float64.

With `o` the offset of band `d`, `V(d, j)` leads from state `j - o` to `j`:

    a_0 = p0 + x_0                 a_i(j) = x_i(j) + logsumexp over d of a_{i-1}(j - o) + V_{i-1}(d, j)
    b_{v-1} = 0                b_{i-1}(j) = logsumexp over d of V_{i-1}(d, j + o) + x_i(j + o) + b_i(j + o)

all in logarithms. Messages and x lose their largest entry at every step, and posteriors are shares of a step's sum, so
that no difference of large logarithms is taken.
"""

import torch
from torch import Tensor

from ..numbers import exact_sum
from ..structured import Gradients, Structured, Walk


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions; kept are the forward messages [*B, v, c], logarithms less the largest."""
    logs = _Logs(chain)
    tops = chain.x.new_zeros(2 * chain.v + 1, *chain.batch, dtype=torch.float64)
    kept = chain.x.new_zeros(*chain.x.shape if keep else (0,), dtype=torch.float64)
    message = logs.p0.expand(*chain.batch, chain.c)
    for step in range(chain.v):
        inside = logs.inside(step)
        into = logs.sum_to(message, step) if step else message
        x, tops[2 * step] = _lowered(logs.x(step))
        after, tops[2 * step + 1] = _lowered(into + x)
        message = torch.where(inside, after, message)
        tops[2 * step : 2 * step + 2].masked_fill_(~inside[..., 0], 0.0)
        if keep:
            kept[..., step, :] = message
    tops[-1] = torch.logsumexp(message, -1)
    total, error = exact_sum(tops)
    unknown = torch.zeros(chain.batch, dtype=torch.bool, device=chain.x.device)
    return Walk(total + error, (kept,) if keep else (), unknown)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of the log-partitions times `weight`."""
    (values,), logs = chain.parameters, _Logs(chain)
    live = (weight != 0) & (walk.log_norm != -torch.inf)
    weight = torch.where(live, weight, 0.0)[..., None]
    grad_x = chain.x.new_zeros(chain.x.shape, dtype=chain.dtype)
    grad_values = chain.x.new_zeros(values.shape, dtype=torch.float64)
    message = chain.x.new_zeros(*chain.batch, chain.c, dtype=torch.float64)
    into = message
    for step in reversed(range(chain.v)):
        inside = logs.inside(step) & live[..., None]
        before = walk.kept[0][..., step, :]
        shares = before + message
        grad_x[..., step, :] = torch.where(inside, weight * torch.softmax(shares, -1), 0.0)
        into = _lowered(logs.x(step))[0] + message
        if step == 0:
            break
        index = logs.index(step)
        into, _ = _lowered(into)
        counts = logs.counts(walk.kept[0][..., step - 1, :], into, step)
        counts = torch.where(inside[..., None], weight[..., None] * counts, 0.0)
        grad_values[..., index, :, :] += counts.sum_to_size(*values.shape[:-3], *values.shape[-2:])
        message = torch.where(logs.inside(step), _lowered(logs.sum_from(into, step))[0], message)
    grad_values.masked_fill_(logs.values_are_zero, 0.0)
    gradients = _shares_of(logs.p0, into, logs.p0 if chain.log_params or chain.by_log else torch.zeros_like(logs.p0))
    gradients = torch.where(live[..., None], weight * gradients, 0.0).masked_fill(logs.p0 == -torch.inf, 0.0)
    return Gradients(
        grad_x if needs[0] else None,
        (grad_values.to(chain.dtype),) if needs[1] else None,
        gradients.sum_to_size(chain.p0.shape).to(chain.dtype) if needs[2] else None,
    )


def _lowered(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (..., c) less the largest, and that (...), 0 in place of -inf."""
    top = logs.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return logs - top, top[..., 0]


def _shares_of(logs: Tensor, more: Tensor, counted: Tensor) -> Tensor:
    """The exponentials of `counted + more`, over the sum of those of `logs + more`."""
    return (counted + more - torch.logsumexp(logs + more, -1, keepdim=True)).exp()


class _Logs:
    """The operands of a chain as float64 logarithms, and sums over its bands."""

    def __init__(self, chain: Structured) -> None:
        (self._values,), self._chain = chain.parameters, chain
        self.p0 = chain.p0.double() if chain.log_params else chain.p0.double().log()
        self.values_are_zero = self._values == (-torch.inf if chain.log_params else 0.0)

    def inside(self, step: int) -> Tensor:
        """Whether a sequence has a step, [*B, 1]."""
        ends, batch = self._chain.ends, self._chain.batch
        if ends is None:
            return torch.ones(*batch, 1, dtype=torch.bool, device=self._chain.x.device)
        return ends[..., None] > step

    def x(self, step: int) -> Tensor:
        """The potentials of a step [*B, c]; 0 behind the end."""
        return self._chain.x[..., step, :].double().masked_fill(~self.inside(step), 0.0)

    def index(self, step: int) -> int:
        """Which matrix leads into a step."""
        return step - 1 if self._values.shape[-3] > 1 else 0

    def _bands(self, step: int) -> list[tuple[slice, slice, Tensor]]:
        """Each band's sources, its targets, and the logarithms of its values for these."""
        c, values = self._chain.c, self._values[..., self.index(step), :, :].double()
        logs = values if self._chain.log_params else values.log()
        bands = []
        for d, offset in enumerate(self._chain.pattern):
            sources, targets = slice(max(0, -offset), c - max(0, offset)), slice(max(0, offset), c - max(0, -offset))
            bands.append((sources, targets, logs[..., d, targets]))
        return bands

    def _sum(self, message: Tensor, step: int, side: int) -> Tensor:
        bands = self._bands(step)
        terms = message.new_full((*message.shape[:-1], len(bands), message.shape[-1]), -torch.inf)
        for d, (*ends, values) in enumerate(bands):
            terms[..., d, ends[side]] = message[..., ends[1 - side]] + values
        return torch.logsumexp(terms, -2)

    def sum_to(self, message: Tensor, step: int) -> Tensor:
        """The message into a step, from that of the step before [*B, c]."""
        return self._sum(message, step, 1)

    def sum_from(self, message: Tensor, step: int) -> Tensor:
        """The backward message of the step before, from that into a step [*B, c]."""
        return self._sum(message, step, 0)

    def counts(self, before: Tensor, into: Tensor, step: int) -> Tensor:
        """The posteriors of the bands' uses [*B, bands, c], divided by their values for gradients of these."""
        bands = self._bands(step)
        uses = before.new_full((*before.shape[:-1], len(bands), before.shape[-1]), -torch.inf)
        counted = uses.clone()
        for d, (sources, targets, values) in enumerate(bands):
            pairs = before[..., sources] + into[..., targets]
            uses[..., d, targets] = pairs + values
            counted[..., d, targets] = pairs
        norm = torch.logsumexp(uses, (-2, -1), keepdim=True)
        return ((uses if self._chain.log_params or self._chain.by_log else counted) - norm).exp()
