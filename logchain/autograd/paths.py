"""The weight of a given state path, differentiable: lookups and a sum, no recursion."""

import torch
from torch import Tensor


def log_weight(x: Tensor, bulk: Tensor, p0: Tensor, states: Tensor, ends: Tensor | None, log_params: bool) -> Tensor:
    """`log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)` in float64 for paths [*S, *B, v]: [*S, *B].

    A negative state is none: such a path is impossible, unless it is behind the end. What is impossible has gradient 0.
    """
    v = x.shape[-2]
    steps = torch.arange(v, device=x.device)
    inside = torch.ones_like(states, dtype=torch.bool) if ends is None else (steps < ends[..., None]).expand_as(states)
    lost = (inside & (states < 0)).any(-1)
    states = torch.where(inside & (states >= 0), states, 0)
    before = torch.arange(v - 1, device=x.device) if bulk.shape[-3] == v - 1 else steps[:1]
    weights = torch.cat(
        [_look_up(p0, states[..., :1]).double(), _look_up(bulk, before, states[..., :-1], states[..., 1:]).double()], -1
    )
    weights = torch.where(inside, weights, 0.0 if log_params else 1.0)  # the first is never behind the end
    if not log_params:
        zero = weights == 0
        weights = torch.where(zero, 1.0, weights).log().masked_fill(zero, -torch.inf)
    terms = torch.cat([weights, torch.where(inside, _look_up(x, steps, states).double(), 0.0)], -1)
    lost = lost | (terms == -torch.inf).any(-1)
    terms = torch.where(lost[..., None], 0.0, terms)
    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    return torch.where(lost, -torch.inf, _exact_sum(terms) if double else terms.sum(-1))


def _exact_sum(terms: Tensor) -> Tensor:
    """The sum over the last axis to one rounding, as `kernels.numbers` has it, by operations that all have gradients.

    Those of what is lost in an addition cancel.
    """
    lost = torch.zeros_like(terms[..., 0])
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        a, b = terms[..., :half], terms[..., half : 2 * half]
        total = a + b
        other = total - a
        lost = lost + ((a - (total - other)) + (b - other)).sum(-1)
        terms = torch.cat([total, terms[..., 2 * half :]], -1)
    return terms[..., 0] + torch.where(lost.isfinite(), lost, 0.0)


def finite_log(value: Tensor, log_params: bool) -> Tensor:
    """The logarithm of weights, or the weights that are logarithms, in float64 with 0 for -inf and for NaN.

    A NaN that counts is in the log-partition too.
    """
    zero = (value == (-torch.inf if log_params else 0.0)) | value.isnan()
    value = torch.where(zero, 0.0 if log_params else 1.0, value.double())
    return value if log_params else value.log()


def _look_up(operand: Tensor, *index: Tensor) -> Tensor:
    """Entries [*S, *B, k] of an operand [*B or ones, ...], whose last axes are indexed."""
    lead = operand.dim() - len(index)
    own = [
        torch.arange(size, device=operand.device).view(-1, *(1,) * (lead - axis))
        for axis, size in enumerate(operand.shape[:lead])
    ]
    return operand[(*own, *index)]
