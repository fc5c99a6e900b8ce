"""The log-weight of a given state path, by lookups and a sum, which torch's autograd differentiates."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..schedules.packed import Packed


def log_weight(x: Tensor, bulk: Tensor, p0: Tensor, states: Tensor, ends: Tensor | None, log_params: bool) -> Tensor:
    """`log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)` in float64, [*S, *B], of paths z [*S, *B, v].

    A path with a negative state before its sequence's end is impossible: -inf, with gradient 0.
    """
    v = x.shape[-2]
    steps = torch.arange(v, device=x.device)
    inside = torch.ones_like(states, dtype=torch.bool) if ends is None else (steps < ends[..., None]).expand_as(states)
    lost = inside & (states < 0)
    states = torch.where(inside & (states >= 0), states, 0)
    before = torch.arange(v - 1, device=x.device) if bulk.shape[-3] == v - 1 else steps[:1]
    start = _look_up(p0, states[..., :1]).double()
    weights = torch.cat([start, _look_up(bulk, before, states[..., :-1], states[..., 1:]).double()], -1)
    # a weight behind the end counts as 1
    weights = torch.where(inside, weights, 0.0 if log_params else 1.0)
    potentials = torch.where(inside, _look_up(x, steps, states).double(), 0.0)
    terms = torch.cat([logarithms(weights, log_params), potentials.masked_fill(lost, -torch.inf)], -1)
    return sum_of_logs(terms, exact=torch.float64 in (x.dtype, bulk.dtype, p0.dtype))


def sum_of_logs(terms: Tensor, *, exact: bool) -> Tensor:
    """The sums of float64 terms over their last axis, exactly -inf, with gradient 0, where a term is; see `_sum`."""
    return _sum(terms, lambda a: a.sum(-1), lambda a: a[..., None], exact)


def packed_log_weight(packed: Packed, states: Tensor, log_params: bool) -> Tensor:
    """The `log_weight` [*S, n] of paths [*S, total] of sequences that lie one behind the other."""
    x, bulk, p0 = packed.x, packed.bulk, packed.p0
    n, rows = len(packed.lengths), torch.arange(len(x), device=x.device)
    sequence = torch.repeat_interleave(packed.lengths).to(x.device)  # (total)
    first = torch.zeros_like(rows, dtype=torch.bool).index_fill_(0, packed.starts.to(x.device), True)
    lost, states = states < 0, states.clamp(min=0)
    start = p0.expand(n, -1)[sequence, states].double()
    moved = bulk[rows if len(bulk) > 1 else 0, states.roll(1, -1), states].double()
    terms = [logarithms(torch.where(first, start, moved), log_params), x[rows, states].double()]
    terms[1] = terms[1].masked_fill(lost, -torch.inf)
    sequence = torch.cat([sequence, sequence])

    def total(a: Tensor) -> Tensor:
        return a.new_zeros(*a.shape[:-1], n).index_add(-1, sequence, a)

    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    return _sum(torch.cat(terms, -1), total, lambda a: a[..., sequence], double)


def _sum(terms: Tensor, total: Callable[[Tensor], Tensor], of_terms: Callable[[Tensor], Tensor], exact: bool) -> Tensor:
    """The totals of terms; exactly -inf, with gradient 0, where a term is. `of_terms` gives each term its total.

    `exact`: the sums are rounded once, as if they were added with unlimited precision. Each term is split in two. The
    high parts are multiples of one unit, and add up to less than 2^53 of it, so that their sum is not rounded in any
    order; the low parts are too small for rounding to count.
    """
    impossible = total((terms.detach() == -torch.inf).double()) > 0
    terms = torch.where(of_terms(impossible), 0.0, terms)
    if not exact:
        return torch.where(impossible, -torch.inf, total(terms))
    size = total(terms.detach().abs())
    ahead = of_terms(1.5 * (size.log2().ceil() + 2).exp2())
    high = ((terms.detach() + ahead) - ahead).masked_fill(ahead == torch.inf, 0.0)
    return torch.where(impossible, -torch.inf, total(high) + total(terms - high))


def finite_log(value: Tensor, log_params: bool) -> Tensor:
    """The logarithm of weights, or logarithms as they are, in float64, with 0 for -inf and for NaN.

    No NaN gets lost: one that has influence makes the log-partition NaN too.
    """
    zero = (value == (-torch.inf if log_params else 0.0)) | value.isnan()
    value = torch.where(zero, 0.0 if log_params else 1.0, value.double())
    return value if log_params else value.log()


def logarithms(weights: Tensor, log_params: bool) -> Tensor:
    """The logarithms of weights, -inf with gradient 0 at weight 0."""
    if log_params:
        return weights
    zero = weights == 0
    return torch.where(zero, 1.0, weights).log().masked_fill(zero, -torch.inf)


def _look_up(operand: Tensor, *index: Tensor) -> Tensor:
    """Entries [*S, *B, k] of an operand [*B or ones, ...], whose last axes are indexed."""
    lead = operand.dim() - len(index)
    places = [
        torch.arange(size, device=operand.device).view(-1, *(1,) * (lead - axis))
        for axis, size in enumerate(operand.shape[:lead])
    ]
    return operand[(*places, *index)]
