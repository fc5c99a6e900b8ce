"""The Kullback-Leibler divergence between the posteriors of two chains."""

import torch
from torch import Tensor

from .arguments import Lengths, check_flag, check_question
from .autograd.entropy import divergence, packed_divergence
from .operands import arithmetic_dtype
from .schedules.packed import Packed

Operands = tuple[Tensor, Tensor, Tensor]


def kl_divergence(
    p: Operands,
    q: Operands,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""`sum_z p(z) log(p(z) / q(z))` over all state paths `z`, for the posteriors of two chains.

    It is `E_p[log w_p(z) - log w_q(z)] - log Z_p + log Z_q`, with `w` the weight of a path and `Z` the sum of them.

    Args:
        p: `(x, bulk, p0)` as `logchain.product` takes them: log-potentials `[*B, v, c]` in nats, transition weights
            `[*B or ones, v-1 or 1, c, c]`, initial weights `[*B or ones, c]`.
        q: the same of the other chain, with an `x` of the same shape.
        log_params: `bulk` and `p0` of both are logarithms (nats).
        lengths: how many variables each sequence has.
        cu_seqlens: sequences one behind the other, in both chains alike, as in `logchain.product`.

    Returns:
        `[*B]` in nats, with `cu_seqlens` `[n]`, in float64 if an operand is and otherwise in float32. It is +inf where
        `q` forbids what is possible under `p` (with probability above `2^-1000`), and 0 where nothing is possible under
        `p`. It can be differentiated once, in reverse mode, with respect to the operands of both; where it is +inf the
        gradient is 0.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or a length is out of range. `logchain.check` checks values.

    Cost: `4 v c^2` multiply-adds a sequence in `v` dependent steps, in float64, and two logarithms for each entry of
    `bulk`. What the terms have in common is in none of them, so that a divergence of 1e-3 is good however large
    |log Z|. Memory: two steps of messages of each chain. Elsewhere than on a CPU, where something would underflow, and
    where `q` forbids what the weights of `p` allow, in log space: two messages `[*B, v, c]` in float64.

    Source: the chain rule of relative entropy, as a derivative of the log-partition along the difference of the
    potentials. Definition: `logchain.reference.kl_divergence`.

    >>> x, bulk = torch.zeros(3, 2), torch.full((1, 2, 2), 0.5)
    >>> fair, biased = torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])
    >>> kl_divergence((x, bulk, fair), (x, bulk, biased))
    tensor(0.1438)
    """
    for name, operands in (("p", p), ("q", q)):
        if not isinstance(operands, tuple) or len(operands) != 3:
            raise TypeError(f"{name}: expected a tuple (x, bulk, p0), got {type(operands).__name__}")
    if cu_seqlens is None:
        ends, _ = (check_question(*operands, log_params, lengths) for operands in (p, q))
        _check_alike(p[0], q[0])
        divergences = divergence(p, q, ends, log_params)
    else:
        check_flag("log_params", log_params)
        packed_p, packed_q = (Packed(*operands, cu_seqlens, lengths) for operands in (p, q))
        _check_alike(p[0], q[0])
        divergences = packed_divergence(packed_p, packed_q, log_params)
    return divergences.to(torch.promote_types(arithmetic_dtype(*p), arithmetic_dtype(*q)))


def _check_alike(x: Tensor, other: Tensor) -> None:
    if x.shape != other.shape or x.device != other.device:
        raise ValueError(
            f"q: expected x {list(x.shape)} on {x.device} as in p, got {list(other.shape)} on {other.device}"
        )
