"""The products of a chain's segments, all segments side by side: each row of a product is a vector of its own.

    M = P_1 D_1 P_2 D_2 ... P_L        the emission of the last step is left to the caller

Row i starts as that of P_1, and is multiplied as a message is, and divided by its largest entry; these scales are
summed as float64 logarithms. What is multiplied in last is a matrix, so that an entry of 0 is an exact one:
a sum that was small though a path reaches it would have been found by the certificate.

Work: c^2 multiply-adds for each row, step and segment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .certificate import Certificate, least_scale, period_of
from .chain import Chain, Emissions, Matrices
from .numbers import exact_sum, trusted_sum

# float64 scales summed at a time
_PIECE = 2**15


class Products(NamedTuple):
    """`values` (g, m, c, c), rows over their maxima, and the logarithms of those, -inf for a row of zeros.

    `shift` (2, g, m) has been taken out of all rows. The logarithms, `scale` (2, g, m, c), and `shift` come in two
    parts: the second is what the first's rounding lost.
    """

    values: Tensor
    scale: Tensor
    shift: Tensor


def products(chain: Chain, first: Tensor) -> Products | None:
    """The products of chains (v, *lead, c); None where something that may matter underflowed.

    `first` (*own, c, c) are the matrices that lead into their first steps; `p0` is not looked at. Where a sequence has
    ended its product is left as it is, after the emission of the last step.
    """
    g, m, c, v = chain.g, chain.m, chain.c, chain.v
    rows = _rows(chain, first)
    matrices, (initial, log_top) = Matrices(rows), rows.start()
    period = period_of(rows, matrices)
    if period and not initial.amin().item() >= trusted_sum(chain.dtype, c) * max(1.0, matrices.high) * 2.0**8:
        period = 0
    certificate = None if period else Certificate(rows, matrices)
    scales = _Scales(rows, -(-(v - 1) // max(1, period)) + 1)
    scales.start(log_top.expand(*rows.lead, 1).reshape(g, m * c))
    slots, z = rows.new(min(v, 2), g, m, c, c), rows.new(g, m * c, 1).fill_(1.0)
    flat, tiny = slots.view(len(slots), g, m * c, c), torch.finfo(chain.dtype).tiny
    slots[0].view(*chain.lead, c, c).copy_(initial)
    identity = torch.eye(c, dtype=chain.dtype, device=first.device).repeat(m, 1)
    if chain.ended is not None:
        scales.total[0].view(g, m, c).masked_fill_(chain.ended[0], 0.0)
    emissions = Emissions(chain)
    lost = torch.empty((), dtype=torch.bool, device=first.device)
    for start, stop in emissions.blocks:
        block = emissions(start, stop)
        for step in range(start, stop):
            message, sums = slots[step % 2], flat[step % 2]
            if step > 0:
                torch.bmm(flat[(step - 1) % 2], matrices(step), out=sums)
            if certificate is not None:
                certificate.look(step, sums, z)
            if step < v - 1:
                message.mul_(block[step - start].unsqueeze(-2))
            if rows.ended is not None:
                torch.where(rows.ended[step], flat[(step - 1) % 2] if step else identity, sums, out=sums)
            if step < v - 1 and (not period or step % period == 0):
                sums.div_(torch.amax(sums, -1, keepdim=True, out=z).clamp_(min=tiny))
                scales.add(z)
                if certificate is not None:
                    certificate.look_at_scale(step, z)
        if certificate is not None and torch.amax(certificate.lossy, (0, 1), out=lost).item():
            return None
    sums = flat[(v - 1) % 2]
    dead = torch.amax(sums, -1, keepdim=True, out=z) == 0
    sums.div_(z.clamp_(min=tiny))
    scales.add(z)
    if period and scales.least < least_scale(rows, matrices, period + 1):
        return None
    scale = scales.sum().view(2, g, m, c)
    scale[0].masked_fill_(dead.view(g, m, c), -torch.inf)
    return Products(sums.view(g, m, c, c), scale, _shift(chain, matrices, emissions.shift))


def _rows(chain: Chain, first: Tensor) -> Chain:
    """The rows of the products as sequences of their own, that start with those of the first matrices."""
    c, own = chain.c, chain.bulk.dim() - 3
    x = chain.x.unsqueeze(-2).expand(*chain.x.shape[:-1], c, c)
    p0 = first.view(*first.shape[:-2], *(1,) * (len(chain.lead) - own), c, c)
    ends = None
    if chain.ends is not None:
        ends = chain.ends.expand(chain.g, chain.m, c).reshape(chain.g, -1, 1)
    return Chain(x, chain.bulk, p0, ends, chain.log_params, chain.dtype)


def _shift(chain: Chain, matrices: Matrices, shifts: Tensor) -> Tensor:
    """What was taken out of the emissions but for the last, and of the matrices but for the first (2, g, m)."""
    parts = [chain.x.new_zeros(1, chain.g, chain.m, dtype=torch.float64), shifts[:-1, ..., 0].double()]
    log_scale = matrices.log_scale(0, chain.v)
    if log_scale is not None:
        parts.append(log_scale.expand(-1, chain.g, chain.m))
    if chain.ended is not None:
        ended = chain.ended[..., 0]
        parts[1:] = [part.masked_fill(ended[: len(part)], 0.0) for part in parts[1:]]
    return torch.stack(exact_sum(torch.cat(parts)))


class _Scales:
    """The logarithms of scales (g, m, 1), summed in float64 and two parts, and the least of them."""

    def __init__(self, chain: Chain, count: int) -> None:
        rows = chain.g * chain.m
        size = max(1, _PIECE // rows, -(-count // 8))  # at most eight pieces, however long the chain
        self._room = chain.x.new_empty(1 + min(size, count), chain.g, chain.m, dtype=torch.float64)
        self._filled = 1
        self.total = torch.zeros(2, chain.g, chain.m, dtype=torch.float64, device=chain.x.device)
        self.least = torch.inf

    def start(self, value: Tensor) -> None:
        """Begin with these (g, m), which are logarithms."""
        self.total[0] = value

    def add(self, scale: Tensor) -> None:
        """One more."""
        self._room[self._filled] = scale[..., 0]
        self._filled += 1
        if self._filled == len(self._room):
            self.sum()

    def sum(self) -> Tensor:
        """The sum so far, and what it lost."""
        terms = self._room[: self._filled]
        if len(terms) > 1:
            self.least = min(self.least, terms[1:].amin().item())
        terms[1:].log_()
        terms[0] = self.total[0]
        high, low = exact_sum(terms)
        self.total[0] = high
        self.total[1] += low
        self._filled = 1
        return self.total
