"""Chains whose matrices are products of factors: log-partitions and gradients, see `scaled` for the formulas.

Flagged sequences are recomputed in logarithms, forward and backward.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..structured import Gradients, Structured, Walk, gradient_of_p0
from . import log_products, scaled
from .factors import DEEPEST
from .links import Products, add_counts
from .scaled import Scan, Weigh

# rows of products of which counts are made, in at most so many steps; and how many of these are summed in the dtype
_ROWS, _STEPS, _ADDED = 128, 16, 16


def forward(chain: Structured, keep: bool, weigh: Callable[[Scan], Weigh] = Weigh) -> Walk:
    """The log-partitions, and what `backward` reads: S, tables, logarithms of recomputed sequences, middles."""
    scan = Scan.of(chain)
    if scan is None:
        return log_products.forward(chain, keep)
    log_norm, state, middles = scaled.run(scan, keep, weigh(scan))
    chosen = scan.order[scan.flagged]
    logs = state.new_empty((chain.v, len(chosen), chain.c if keep else 0), dtype=torch.float64)
    if len(chosen):
        if sum(tensor.numel() for tensor in middles) + logs.numel() * 8 // state.element_size() > state.numel():
            middles = []  # two message tensors in all: they are recomputed
        walk = log_products.forward(_selected(chain, chosen), keep)
        log_norm[scan.flagged] = walk.log_norm
        logs = walk.kept[0].view(logs.shape) if keep else logs
    tensors = (state, scan.tops, scan.factors, scan.rough, logs, *middles) if keep else ()
    return Walk(scan.in_batch(log_norm).contiguous(), tensors, scan.in_batch(scan.flagged).contiguous())


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    scan = Scan.of(chain)
    if scan is None:
        return log_products.backward(chain, walk, weight, needs)
    state, scan.tops, scan.factors, scan.rough, logs, *middles = walk.kept
    weight, log_norm, scan.flagged = (scan.rows(tensor) for tensor in (weight.double(), walk.log_norm, walk.redone))
    alive = (weight != 0) & (log_norm != -math.inf)
    gradients = _Backward(scan, state, middles, weight, alive & ~scan.flagged, needs).run()
    which = alive & scan.flagged
    chosen = scan.order[which]
    if len(chosen):
        shape = (chain.v, -1, 1, chain.c) if scan.sets.g > 1 else (chain.v, 1, -1, chain.c)
        before = Walk(log_norm[which], (logs[:, which[scan.flagged]].view(shape),), scan.flagged[which])
        _add(chain, gradients, log_products.backward(_selected(chain, chosen), before, weight[which], needs), chosen)
    return gradients


class _Backward:
    """The backward scan of live rows."""

    def __init__(
        self,
        scan: Scan,
        state: Tensor,
        middles: list[Tensor],
        weight: Tensor,
        live: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> None:
        chain, n, dtype = scan.chain, scan.n, scan.chain.dtype
        self.scan, self.state, self.middles, self.live, self.needs = scan, state, middles, live, needs
        self.weight, self.last = weight.masked_fill(~live, 0.0), max(scan.last_steps) - 1
        self.complete = scan.ends is None and bool(live.all())
        together = scan.factors_of.one_step and scan.sets.g == 1 and needs[1]
        self.together = max(1, min(_STEPS, _ROWS // n, self.last)) if together else 1
        self.sources = scan.new(self.together, n, chain.c)
        self.following = [scan.new(self.together, n, link.size) for link in scan.back_links[:-1]]
        missing = needs[1] and not middles
        self.recomputed = [scan.new(self.together, n, link.size) for link in scan.links[:-1] if missing]
        self.forward = Products(scan.links, n, self.sources)
        values = scan.factors_of.values
        self.sums = [tensor.new_zeros(tensor.shape[1:], dtype=dtype) for tensor in values]
        self.totals = [torch.zeros_like(tensor, dtype=torch.float64 if len(tensor) < 2 else dtype) for tensor in values]
        self.factor, shares = _factored(self.weight)
        self.shares = None if shares is None else shares.to(dtype)[:, None].repeat(self.together, 1)
        narrow = max(min(k.entering, k.leaving) * k.size // k.leaving for k in scan.links)
        self.scratch = scan.new(0 if shares is None else len(shares) * self.together * narrow)
        self.added = 0
        self.rough = scan.rough.any(-1).tolist()
        # where weights over 2^spare may be denormal
        self.tiny = bool(((self.weight != 0) & (self.weight.abs() < 2.0**-30)).any())

    def run(self) -> Gradients:
        """The gradients."""
        scan, chain, weights = self.scan, self.scan.chain, self.scan.factors_of
        back, b, posterior = Products(scan.back_links, scan.n, self.sources), *scan.new(2, scan.n, chain.c)
        grad_x = scan.new(*chain.batch, chain.v, chain.c) if self.needs[0] else None
        if grad_x is not None:
            grad_x[..., self.last + 1 :, :] = 0.0
        first = last = self.last
        for step in range(self.last, -1, -1):
            inverse = self._meet(step, b, posterior)
            if grad_x is not None:
                factor = self.weight if self.tiny else inverse * self.weight
                factor = factor[:, None].to(chain.dtype)
                scaled = posterior * inverse[:, None].to(chain.dtype) if self.tiny else posterior
                torch.mul(scan.in_batch(scaled), scan.in_batch(factor), out=grad_x[..., step, :])
            if step == 0:
                break
            if step == last:
                first = max(1, last - self.together + 1)
            slot = step - first
            source, following = self.sources[slot], [tensor[slot] for tensor in self.following]
            self._source(step, b, inverse, posterior, source)
            matrices, diagonal = weights.at(step)
            back.run(source, [tensor.mT for tensor in matrices[::-1]], following, b)
            scan.add_diagonal(b, source, diagonal)
            if self.needs[1]:
                if self.recomputed:
                    self.forward.between(self.state[step - 1], matrices, [tensor[slot] for tensor in self.recomputed])
                if step == first:
                    self._count(first, last)
            last = step - 1 if step == first else last
        counts = (posterior.double() * (inverse * self.weight)[:, None]).masked_fill_(posterior == 0, 0.0)
        return Gradients(
            grad_x,
            self._parameters() if self.needs[1] else None,
            gradient_of_p0(chain, scan.in_batch(counts).contiguous()) if self.needs[2] else None,
        )

    def _meet(self, step: int, b: Tensor, posterior: Tensor) -> Tensor:
        """Write S B, which is 0 in rows that are not live here, and 1 / its sum (n), float64, or 0."""
        scan = self.scan
        if step + 1 in scan.last_steps:  # so that the sum below is 2^spare, as in all steps
            initial = (2.0**scan.factors_of.spare / self.state[step].sum(-1, keepdim=True).double()).to(b.dtype)
            b.copy_(initial if scan.ends is None else torch.where((scan.ends == step + 1)[:, None], initial, b))
        inside = self.live if scan.ends is None else self.live & (scan.ends > step)
        if not self.complete:
            b.masked_fill_(~inside[:, None], 0.0)
        torch.mul(self.state[step], b, out=posterior)
        total = posterior.sum(-1).double()
        return total.reciprocal_().masked_fill_(~inside, 0.0)

    def _source(self, step: int, b: Tensor, inverse: Tensor, scratch: Tensor, out: Tensor) -> None:
        """Write T of a step."""
        scan, dtype = self.scan, self.scan.chain.dtype
        torch.sub(scan.x(step), scan.tops[step][:, None], out=out)
        if self.rough[step]:
            out.clamp_(min=-DEEPEST[dtype] * math.log(2.0))
        out.exp_().mul_(b)
        if self.rough[step]:  # no weight where no path leads
            out.mul_(torch.sign(self.state[step], out=scratch))
        out.mul_((inverse * scan.factors[step] * 2.0**scan.factors_of.spare).to(dtype)[:, None])
        if not self.complete:
            out.masked_fill_((inverse == 0)[:, None], 0.0)
        torch.threshold_(out, scan.factors_of.least_source, 0.0)

    def _count(self, first: int, last: int) -> None:
        """Add the counts of the transitions into steps from `first` to `last`."""
        count = last - first + 1
        between = [tensor[first - 1 : last] for tensor in self.middles] or [
            tensor[:count] for tensor in self.recomputed
        ]
        entering = [tensor.flatten(0, 1) for tensor in (self.state[first - 1 : last], *between)]
        leaving = [tensor[:count].flatten(0, 1) for tensor in (*self.following[::-1], self.sources)]
        shares = None if self.shares is None else self.shares[: count * self.scan.n]
        self.added += 1
        stages = zip(self.scan.links, self.scan.chain.pattern.stages, entering, leaving, self.sums, strict=False)
        for place, (link, stage, front, following, sums) in enumerate(stages):
            if shares is not None:
                narrow = front if link.entering <= link.leaving else following
                scaled = torch.mul(narrow, shares, out=self.scratch[: narrow.numel()].view(narrow.shape))
                front, following = (scaled, following) if narrow is front else (front, scaled)
            add_counts(link, stage.transposed, front, following, sums)
            self._flush(place, first, self.added % _ADDED == 0)
        if self.scan.chain.pattern.diagonal:
            terms = entering[0] * leaving[-1] if shares is None else entering[0] * leaving[-1] * shares
            self.sums[-1] += terms.view(len(self.sums[-1]), -1, terms.shape[1]).sum(1)
            self._flush(len(self.sums) - 1, first, True)

    def _flush(self, place: int, step: int, add: bool) -> None:
        """Move sums to the gradient of a step, or add them to that of all, if they are to be added."""
        sums, total = self.sums[place], self.totals[place]
        if len(total) > 1:
            total[step - 1] = self._finished(place, step, sums)
        elif add:
            total[0] += sums
        if len(total) > 1 or add:
            sums.zero_()

    def _finished(self, place: int, step: int, counts: Tensor) -> Tensor:
        factor = self.factor * 2.0**-self.scan.factors_of.spare
        return self.scan.factors_of.gradient(place, step, counts, factor)

    def _parameters(self) -> tuple[Tensor, ...]:
        scan, gradients = self.scan, []
        for place, (total, operand) in enumerate(zip(self.totals, scan.chain.parameters, strict=True)):
            if len(total) == 1:
                total[0] += self.sums[place]
                total[0] = self._finished(place, 1, total[0])
            gradients.append(scan.sets.as_parameter(total, operand.shape).to(scan.chain.dtype))
        return tuple(gradients)


def _factored(weight: Tensor) -> tuple[float, Tensor | None]:
    """Weights (n) of rows that are not 0, as a factor and the rest: None if they are equal, or all at most 1."""
    nonzero = weight[weight != 0]
    if len(nonzero) == 0 or bool((nonzero == nonzero[0]).all()):
        return float(nonzero[0]) if len(nonzero) else 1.0, None
    factor = 2.0 ** int(torch.frexp(nonzero.abs().amax()).exponent)
    return factor, weight / factor


def _index(chain: Structured, tensor: Tensor, chosen: Tensor) -> tuple[Tensor, ...] | None:
    """The indices of chosen sequences along the batch axes of an operand; None if all share it."""
    sizes = tensor.shape[: len(chain.batch)]
    if all(size == 1 for size in sizes):
        return None
    places = torch.unravel_index(chosen, chain.batch)
    return tuple(place if size > 1 else torch.zeros_like(place) for place, size in zip(places, sizes, strict=True))


def _selected(chain: Structured, chosen: Tensor) -> Structured:
    """The chain of the chosen sequences, indices of the flattened batch, with one batch axis."""

    def of(tensor: Tensor) -> Tensor:
        index = _index(chain, tensor, chosen)
        return tensor[index] if index else tensor[(0,) * len(chain.batch)][None]

    return Structured(
        x=of(chain.x).expand(len(chosen), -1, -1),
        parameters=tuple(of(tensor) for tensor in chain.parameters),
        p0=of(chain.p0),
        pattern=chain.pattern,
        ends=None if chain.ends is None else chain.ends.reshape(-1)[chosen],
        log_params=chain.log_params,
        dtype=chain.dtype,
        by_log=chain.by_log,
    )


def _add(chain: Structured, gradients: Gradients, more: Gradients, chosen: Tensor) -> None:
    """Add the gradients of the chosen sequences to those of all."""

    def add(total: Tensor | None, part: Tensor | None, operand: Tensor) -> None:
        if total is None or part is None:
            return
        index = _index(chain, operand, chosen)
        if index:
            total.index_put_(index, part, accumulate=True)
        else:
            total += part.view(total.shape)

    add(gradients.x, more.x, gradients.x if gradients.x is not None else chain.x)
    add(gradients.p0, more.p0, chain.p0)
    for total, part, operand in zip(gradients.parameters or (), more.parameters or (), chain.parameters, strict=False):
        add(total, part, operand)
