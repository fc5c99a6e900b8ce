"""The log-weight of a state path, by look-ups and a sum, which torch's autograd differentiates."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.numbers import log_weights
from ..operands import Operands
from ..transitions import Transition
from ..transitions.dense import Dense
from ..transitions.semiring import LINEAR, LOG
from ..transitions.transition import look_up


def log_weight(
    x: Tensor, bulk: Tensor | Transition, p0: Tensor, states: Tensor, ends: Tensor | None, log_params: bool
) -> Tensor:
    """`log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)` in float64, [*S, *B], of paths z [*S, *B, v].

    A path with a negative state before its sequence's end is impossible: -inf, with gradient 0.
    """
    transition = bulk if isinstance(bulk, Transition) else Dense(bulk)
    inside = None if ends is None else torch.arange(x.shape[-2], device=x.device) < ends[..., None]
    impossible = states < 0 if inside is None else inside & (states < 0)
    states = states.clamp(min=0) if inside is None else torch.where(inside & (states >= 0), states, 0)

    def read(values: Tensor, padding: float) -> Tensor:
        """Values of variables in float64, `padding` after a sequence's end, where they may be NaN."""
        return values.double() if inside is None else torch.where(inside, values.double(), padding)

    start, pairs = look_up(p0.unsqueeze(-2), states[..., :1]), (states[..., :-1], states[..., 1:])
    if len(transition.parameters) == 1:  # only those on the paths are converted
        moved = transition.entries(*pairs, LOG if log_params else LINEAR)
        weights = read(torch.cat([start, moved], -1), 0.0 if log_params else 1.0)
        logs = log_weights(weights, log_params, torch.float64)
    else:  # products may underflow
        structure = transition.map(lambda weights: log_weights(weights, log_params, torch.float64))
        start = log_weights(start, log_params, torch.float64)
        logs = read(torch.cat([start, structure.entries(*pairs, LOG)], -1), 0.0)
    potentials = read(look_up(x, states), 0.0)
    terms = torch.cat([logs, potentials.masked_fill(impossible, -torch.inf)], -1)
    exact = torch.float64 in {x.dtype, p0.dtype, *(parameter.dtype for parameter in transition.parameters)}
    return sum_of_logs(terms, exact=exact)


def sum_of_logs(terms: Tensor, *, exact: bool) -> Tensor:
    """The sums of float64 terms over their last axis, exactly -inf, with gradient 0, where a term is; see `_sum`."""
    return _sum(terms, lambda a: a.sum(-1), lambda a: a[..., None], exact)


def weight_of(operands: Operands, states: Tensor) -> Tensor:
    """The `log_weight` [*S, *B] of paths [*S, *B, v], or [*S, n] of paths [*S, total] of packed sequences."""
    x, transition, p0, lengths, log_params, packed = operands
    return _of_packed(operands, states) if packed else log_weight(x, transition, p0, states, lengths, log_params)


def _of_packed(operands: Operands, states: Tensor) -> Tensor:
    (x, bulk, p0, lengths, log_params), starts = operands.dense, operands.packed.starts
    assert lengths is not None
    n, rows = len(lengths), torch.arange(len(x), device=x.device)
    sequence = torch.repeat_interleave(lengths).to(x.device)  # (total)
    first = torch.zeros_like(rows, dtype=torch.bool).index_fill_(0, starts.to(x.device), True)
    impossible, states = states < 0, states.clamp(min=0)
    start = p0.expand(n, -1)[sequence, states].double()
    moved = bulk[rows if len(bulk) > 1 else 0, states.roll(1, -1), states].double()
    logs = log_weights(torch.where(first, start, moved), log_params, torch.float64)
    terms = [logs, x[rows, states].double().masked_fill(impossible, -torch.inf)]
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
    terms = terms.masked_fill(of_terms(impossible), -torch.inf)
    if not exact:
        return total(terms)
    size = total(terms.detach().abs())
    large = of_terms(1.5 * (size.log2().ceil() + 2).exp2())
    high = ((terms.detach() + large) - large).masked_fill(large == torch.inf, 0.0)
    return total(high) + total(terms - high)
