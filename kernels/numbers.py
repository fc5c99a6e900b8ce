"""Exponentials of shifted logarithms, with exact zeros and no bias, and float64 sums with their rounding errors.

`torch.exp` on a CPU takes 3 to 25 times as long where its result is zero or denormal; `torch.exp2` does not. It needs
the factor log2(e), which no float holds exactly: `exp(d) = exp2(d HIGH + d LOW)` with LOW = log2(e) - HIGH. Without LOW
a long chain would drift by 1e-8 per nat and step.
"""

import math

import torch
from torch import Tensor

# HIGH = log2(e) in the dtype, and LOW; that of float64 is too small to matter
_LOG2E = {torch.float32: (1.4426950216293335, 1.92596303350e-8), torch.float64: (math.log2(math.e), 0.0)}

# an exponential below FLUSH counts as zero: far enough above the denormals that its products are not denormal either
FLUSH = {torch.float32: 2.0**-115, torch.float64: 2.0**-1000}


def exp_shifted(x: Tensor, shift: Tensor) -> Tensor:
    """`exp(x - shift)` for `x <= shift`, with results below 2^-115 (float64: 2^-1000) set to zero.

    -inf gives 0; a shift of -inf must have been replaced by `finite` before.
    """
    high, low = _LOG2E[x.dtype]
    below = x - shift
    # the smaller part first: the sum is then one fused multiply-add, rounded once
    out = (below * low).add_(below, alpha=high) if low else below.mul_(high)
    return torch.threshold_(out.exp2_(), FLUSH[x.dtype], 0.0)


def finite(shift: Tensor) -> Tensor:
    """The shift with the lowest finite number for -inf, so that -inf less its shift is -inf and not NaN."""
    return shift.clamp(min=torch.finfo(shift.dtype).min)


def relative_logs(weights: Tensor, axes: int | tuple[int, ...], *, log: bool) -> tuple[Tensor, Tensor]:
    """The logarithms of float64 weights less the largest over `axes`, and the largest, a constant; 0 if not finite.

    `log`: the weights are logarithms. A logarithm is rounded by its distance from the largest, not by its own size.
    """
    top = weights.detach().amax(axes, keepdim=True)
    if log:
        top = torch.where(top.isfinite(), top, 0.0)
        return weights - top, top
    top = torch.where(top.isfinite() & (top > 0), top, 1.0)
    # the quotient of a small weight may underflow, where the difference of logarithms does not
    small = (weights.detach() / top < torch.finfo(top.dtype).tiny) & (weights > 0)
    of_small = torch.where(small, weights, 1.0).log() - top.log()
    logs = torch.where(small, of_small, log_weights(torch.where(small, 1.0, weights / top), False, top.dtype))
    return logs, top.log()


def near_one(weight: Tensor) -> tuple[Tensor, float]:
    """The weights divided by a power of two, and that power, so that products with large numbers do not overflow.

    The largest weight is then between 1 and 2; weights within 2^-20 to 2^20 are returned as they are, with 1.
    """
    top = torch.linalg.vector_norm(weight, math.inf).item() if weight.numel() else 1.0
    if 2.0**-20 <= top <= 2.0**20 or not math.isfinite(top) or top == 0:
        return weight, 1.0
    scale = 2.0 ** (math.frexp(top)[1] - 1)
    return weight / scale, scale


def exact_sum(terms: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of float64 terms over the first axis, and its rounding error; infinite where the plain sum is.

    They are added in pairs, level by level, and so are the errors of the additions.
    """
    error = torch.zeros_like(terms[0])
    while (count := terms.shape[0]) > 1:
        half = count // 2
        total, errors = two_sum(terms[:half], torch.zeros_like(error), terms[half : 2 * half])
        terms, error = torch.cat([total, terms[2 * half :]]) if count % 2 else total, error + errors.sum(0)
    return terms[0], error.masked_fill_(~terms[0].isfinite(), 0.0)


def shifted(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message less its largest entry, and that entry in float64 (..., 1), 0 in place of -inf."""
    top = message.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    return message - top, top.double()


def log_weights(weights: Tensor, log_params: bool, dtype: torch.dtype) -> Tensor:
    """The logarithms of weights, which are logarithms already with `log_params`, in `dtype`; gradient 0 at weight 0."""
    weights = weights.to(dtype)
    # tensors of torch.func may say that they need no gradient
    if log_params or not torch.is_grad_enabled():
        return weights if log_params else weights.log()
    positive = weights > 0
    return torch.where(positive, weights.masked_fill(~positive, 1.0).log(), weights.detach().log())


def probabilities(message: Tensor) -> Tensor:
    """The probabilities of states (..., c) with log-weights `message`, exactly 0 if all are -inf."""
    dead = (message == -math.inf).all(-1, keepdim=True)
    return torch.softmax(message.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)


def two_sum(total: Tensor, error: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """A running sum with one more term, and the sum of its rounding errors (D. E. Knuth's two-sum)."""
    after = total + term
    part = after - total
    return after, error + ((total - (after - part)) + (term - part))
