"""Chains whose matrices are products of factors: log-partitions and gradients, see `scaled` for the formulas.

Flagged sequences have to be computed in logarithms, forward and backward. So have all of a GPU, where no flag is read
on the host.
"""

import math

import torch
from torch import Tensor

from .. import on_gpu
from ..structured import Gradients, Structured, Walk
from . import scaled
from .factors import add_counts, multiply, operand
from .scaled import Scan, Steps

Needs = tuple[bool, bool, bool]

# rows of products of which counts are made, without and with blocks, in at most so many steps; and how many of these
# are summed in the dtype
_ROWS, _STEPS, _ADDED = (128, 32), 16, 16


def forward(chain: Structured, keep: bool, steps_of: type[Steps] = Steps) -> Walk | None:
    """The log-partitions, and what `backward` reads: S, tables, middles. None for what is not computed here."""
    if on_gpu(chain.x):
        return None
    scan = Scan(chain)
    log_norm, state, middles = scaled.run(scan, keep, steps_of)
    tensors = (state, scan.tops, scan.factors, *middles) if keep else ()
    return Walk(scan.in_batch(log_norm), tensors, scan.in_batch(scan.flagged))


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: Needs, steps_of: type[Steps] = Steps) -> Gradients:
    """The gradients of `sum(weight * log_norm)` over sequences that are not flagged; see `Gradients`."""
    scan = Scan(chain)
    state, scan.tops, scan.factors, *middles = walk.kept
    weight, log_norm, flagged = (scan.rows(tensor) for tensor in (weight.double(), walk.log_norm, walk.flagged))
    scan.flagged = flagged
    scan.live = (weight != 0) & (log_norm != -math.inf) & ~flagged
    scan.weight = weight.masked_fill(~scan.live, 0.0)
    return _backward(scan, state, middles, needs, steps_of(scan, state))


def _backward(scan: Scan, state: Tensor, middles: list[Tensor], needs: Needs, steps: Steps) -> Gradients:
    """The gradients of live rows."""
    chain, n, c, active, sets = scan.chain, scan.n, scan.chain.c, scan.active, scan.layout.grid[0]
    reverse, blocks = [factor.reverse for factor in reversed(scan.product)], scan.product[0].blocks or 1
    together = min(_STEPS, _ROWS[blocks > 1] // max(1, n)) if scan.prepared.one_step and sets == 1 and needs[1] else 1
    missing = needs[1] and not middles
    sizes = [c, *(factor.size for factor in reverse[:-1]), *(factor.size for factor in scan.product[:-1] if missing)]
    memories, b = [scan.new(max(1, together) * n * size) for size in sizes], scan.new(n, c)
    grad_x = scan.new(n, chain.v, c) if needs[0] else None
    if grad_x is not None and sum(active) < n * chain.v:
        grad_x.zero_()
    counts = _Counts(scan) if needs[1] else None
    before, last = 0, len(active) - 1
    while last > 0:  # steps from first to last, whose counts are made together
        count, first = active[last], last
        while first > 1 and last - first + 1 < together and active[first - 1] == count:
            first -= 1
        length = last - first + 1
        views = [tensor[: length * count * size].view(length, -1) for tensor, size in zip(memories, sizes, strict=True)]
        sources, following, between = views[0], views[1 : len(reverse)], views[len(reverse) :]
        for slot in range(length - 1, -1, -1):
            step, source = first + slot, sources[slot].view(count, c)
            steps.backward(step, count, b, before, blocks, source, grad_x)
            before, (matrices, diagonal) = count, scan.prepared.at(step)
            transposed = [matrix.mT for matrix in reversed(matrices)]
            multiply(reverse, source, transposed, [rows[slot] for rows in following], b, sets)
            scan.add_diagonal(b, source, diagonal)
            if missing:
                multiply(scan.product, state[step - 1, :count], matrices, [rows[slot] for rows in between], None, sets)
        if counts is not None:
            places = slice(first - 1, last)
            for rows, factor in zip(middles, scan.product, strict=False):
                between.append(rows[places, : count * factor.size])
            counts.add(first, [state[places, :count], *between], [*following[::-1], sources])
        last = first - 1
    source = memories[0][: n * c].view(n, c)
    if active:
        steps.backward(0, n, b, before, blocks, source, grad_x)
    return Gradients(
        None if grad_x is None else grad_x.view(*chain.batch, chain.v, c),
        None if counts is None else counts.gradients(),
        _gradient_of_p0(scan, source) if needs[2] else None,
    )


def _gradient_of_p0(scan: Scan, source: Tensor) -> Tensor:
    """The gradient of p0, or of its logarithm, from S B of the first step; exactly 0 at weight 0."""
    chain, counts = scan.chain, source.double() * (scan.inverse * scan.weight)[:, None]
    counts = scan.in_batch(counts.masked_fill_(source == 0, 0.0))
    if not (chain.log_params or chain.by_log):
        counts = (counts / chain.p0.double()).masked_fill(counts == 0, 0.0)
    return counts.sum_to_size(chain.p0.shape).to(chain.dtype).contiguous()


class _Counts:
    """Sums over rows of products of what enters and what leaves each factor."""

    def __init__(self, scan: Scan) -> None:
        self.scan, values, dtype = scan, scan.prepared.values, scan.chain.dtype
        self.sums = [tensor.new_zeros(tensor.shape[1:], dtype=dtype) for tensor in values]
        self.totals = [torch.zeros_like(tensor, dtype=torch.float64 if len(tensor) < 2 else dtype) for tensor in values]
        factor, shares = _factored(scan.weight)
        self.factor, self.added = factor * 2.0**-scan.prepared.spare, 0
        self.shares = None if shares is None else shares.to(dtype)

    def add(self, first: int, entering: list[Tensor], leaving: list[Tensor]) -> None:
        """Add those of the steps from `first` on, of what enters and leaves each factor (steps, rows and states)."""
        scan, sets, length = self.scan, self.scan.layout.grid[0], len(leaving[-1])
        count, self.added = leaving[-1][0].numel() // scan.chain.c, self.added + 1
        shares = None if self.shares is None else self.shares[:count].repeat(length)
        factors = zip(scan.product, entering, leaving, self.sums, strict=False)
        for place, (factor, front, following, sums) in enumerate(factors):
            front = operand(factor, front, sets, length, place > 0)
            following = operand(factor.reverse, following, sets, length, place + 1 < len(scan.product))
            if shares is not None:
                weights = shares.view(sets, 1, -1, 1) if factor.blocks else shares[:, None]
                narrow = factor.entering <= factor.leaving
                front, following = (front * weights, following) if narrow else (front, following * weights)
            add_counts(factor, front, following, sums)
        if scan.chain.pattern.diagonal:
            terms = entering[0].reshape(len(self.sums[-1]), -1, scan.chain.c)
            terms = terms * leaving[-1].view(terms.shape)
            self.sums[-1] += (terms if shares is None else terms * shares.view(len(terms), -1, 1)).sum(1)
        for place, total in enumerate(self.totals):
            if len(total) > 1 or self.added % _ADDED == 0:
                self._flush(place, first)

    def _flush(self, place: int, step: int) -> None:
        """Move sums to the gradient of a step, or add them to those of all."""
        sums, total = self.sums[place], self.totals[place]
        if len(total) > 1:
            total[step - 1] = self.scan.prepared.gradient(place, step, sums, self.factor)
        else:
            total += sums
        sums.zero_()

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of the parameters."""
        gradients = []
        for place, (total, parameter) in enumerate(zip(self.totals, self.scan.chain.parameters, strict=True)):
            if len(total) == 1:
                self._flush(place, 1)
                total[0] = self.scan.prepared.gradient(place, 1, total[0], self.factor)
            gradients.append(self.scan.layout.as_parameter(total, parameter.shape).to(self.scan.chain.dtype))
        return tuple(gradients)


def _factored(weight: Tensor) -> tuple[float, Tensor | None]:
    """Weights (n) of rows that are not 0, as a factor and the rest: None if they are equal, or all at most 1."""
    nonzero = weight[weight != 0]
    if len(nonzero) == 0 or bool((nonzero == nonzero[0]).all()):
        return float(nonzero[0]) if len(nonzero) else 1.0, None
    factor = 2.0 ** int(torch.frexp(nonzero.abs().amax()).exponent)
    return factor, weight / factor
