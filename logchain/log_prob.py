"""The log-probability of given state paths."""

import torch
from torch import Tensor

from . import kernels
from .arguments import Lengths, check_flag, check_question
from .autograd.chain import log_norm, packed_log_norm
from .autograd.operator import checked_values
from .autograd.paths import log_weight, packed_log_weight
from .operands import arithmetic_dtype
from .schedules.packed import Packed


def log_prob(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    states: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""`log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i) - log_norm` for paths `z`: their posterior.

    This is a linear-chain CRF's log-likelihood of a labelling, and what a score-function gradient of drawn paths takes
    (`logchain.sample`). There is no transition before the first variable, and `bulk` is `[from, to]`.

    Args:
        x: log-potentials `[*B, v, c]` in nats: `v` variables (time steps), `c` states.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, non-negative, not necessarily normalised. Leading axes
            may be of size 1 or left out; a size of 1 on the step axis means one matrix for every step.
        p0: initial weights `[*B or ones, c]`, non-negative.
        states: integers `[*S, *B, v]`: one path of each sequence, or several. -1 stands for no state: a path that holds
            one is impossible. What lies behind a sequence's end is not looked at.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: integers from 1 to v, of the shape of the first axes of `B`, or one for all: how many variables each
            sequence has.
        cu_seqlens: sequences one behind the other, as in `logchain.product`: paths are `[*S, total]`, and the result
            `[*S, n]`.

    Returns:
        `[*S, *B]`, natural logarithm; float64 if an operand is, otherwise float32. Exactly -inf, with gradient 0, where
        the path is impossible, also where all are. The gradient is that of the path's own log-weight, which is 1 at
        what it visits, less the posteriors of `logchain.product`. It can be differentiated twice.

    The two terms may be far larger than their difference: both are kept in float64, so that the result carries the
    error of the log-partition, and no other.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, or a state is not in -1..c-1. On a GPU states
            are not looked at: one that is out of range is the device's error.

    Cost: that of `logchain.product` once, however many paths, and `v` look-ups a path. Memory: a few `[*S, *B, v]`.

    Source: J. Lafferty, A. McCallum and F. Pereira, "Conditional random fields", ICML (2001). Definition:
    `logchain.reference.log_prob`.

    >>> x = torch.zeros(3, 2)  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.0, 1.0]]])  # one matrix for every step
    >>> paths = torch.tensor([[0, 0, 0], [0, 0, 1], [1, 0, 1]])
    >>> log_prob(x, bulk, torch.tensor([0.5, 0.5]), paths).exp()
    tensor([0.4050, 0.0450, 0.0000])
    """
    if cu_seqlens is not None:
        check_flag("log_params", log_params)
        packed = Packed(x, bulk, p0, cu_seqlens, lengths)
        states = _checked(_integers(states, x), x.shape[-1])
        weight, norm = packed_log_weight(packed, states, log_params), packed_log_norm(packed, log_params)  # [*S, n]
    else:
        ends = check_question(x, bulk, p0, log_params, lengths)
        states = _integers(states, x)
        if ends is not None:
            states = torch.where(torch.arange(x.shape[-2], device=x.device) < ends[..., None], states, -1)
        states = _checked(states, x.shape[-1])
        weight, norm = log_weight(x, bulk, p0, states, ends, log_params), log_norm(x, bulk, p0, ends, log_params)
    # where the path is impossible the sequence may be so too: -inf - (-inf) is no NaN that was in the input
    lost = (weight == -torch.inf) & ~norm.isnan()
    result = torch.where(lost, -torch.inf, weight - norm)
    return result.to(arithmetic_dtype(x, bulk, p0))


def _integers(states: object, x: Tensor) -> Tensor:
    """States of shape [*S, *B, v] as int64."""
    if not isinstance(states, Tensor):
        raise TypeError(f"states: expected a torch.Tensor, got {type(states).__name__}")
    if states.is_floating_point() or states.is_complex() or states.dtype == torch.bool:
        raise TypeError(f"states: expected integers, got {str(states.dtype)[6:]}")
    if states.layout != torch.strided or states.is_nested:
        raise TypeError(f"states: expected a dense tensor, got {'a nested one' if states.is_nested else states.layout}")
    if states.device != x.device:
        raise ValueError(f"states: expected device {x.device}, got {states.device}")
    *batch, v, c = x.shape
    axes = len(batch) + 1
    if states.dim() < axes or list(states.shape[states.dim() - axes :]) != [*batch, v]:
        text = ", ".join(["...", *map(str, batch), str(v)])
        raise ValueError(f"states: expected shape [{text}] to go with x {list(x.shape)}, got {list(states.shape)}")
    return states.to(torch.int64)


def _check_values(states: Tensor, c: int) -> None:
    if not kernels.on_gpu(states) and states.numel():
        low, high = (int(bound) for bound in torch.aminmax(states))
        if low < -1 or high >= c:
            raise ValueError(f"states: expected values from -1 to c - 1 = {c - 1}, got {low} to {high}")


_checked = checked_values("checked_states", _check_values)
