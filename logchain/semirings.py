"""Semirings of log-weights, and the total weight of a chain's paths in any of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import Lengths, check_question
from .autograd import semiring as semiring_chain
from .autograd.viterbi import best_weight
from .kernels.plain.semiring import maximum
from .operands import arithmetic_dtype
from .product import product
from .schedules.packed import Packed

__all__ = ["LOG", "MAX", "Semiring", "total"]


@dataclass(frozen=True)
class Semiring:
    r"""A semiring of log-weights, given by its addition; multiplication is the sum `a + b`, and zero is -inf.

    The addition must be associative and commutative, and adding a constant to all terms must add it to their sum:
    `sum(a + s) = sum(a) + s`.

    Args:
        name: a name for the user.
        sum: `sum(terms, dim)` adds a floating tensor along one axis. It is never called with terms that are all -inf,
            whose sum is -inf with gradient 0. Gradients are those of torch's autograd through it.

    Ready made are `LOG`, log-sum-exp over all paths, and `MAX`, the weight of the best path (the gradient is that of
    one of the best).

    Source: J. Goodman, "Semiring parsing", Computational Linguistics 25 (1999).

    >>> MAX.sum(torch.tensor([0.0, 3.0, 1.0]), 0)
    tensor(3.)

    A semiring of one's own, between the two: a soft maximum with temperature 1/4 (temperature 0 would be `MAX`).

    >>> SOFT = Semiring("soft maximum", lambda terms, dim: torch.logsumexp(4.0 * terms, dim) / 4.0)
    >>> SOFT.sum(torch.tensor([0.0, 3.0, 3.0]), 0)
    tensor(3.1733)
    """

    name: str
    sum: Callable[[Tensor, int], Tensor]


LOG = Semiring("log", torch.logsumexp)
MAX = Semiring("max", maximum)


def total(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    semiring: Semiring,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""The semiring sum over paths z of log-weights `log p0(z_0) + x_0(z_0) + log P_1(z_0, z_1) + x_1(z_1) + ...`.

    Args:
        x: log-potentials `[*B, v, c]` in nats. All arguments that `logchain.product` has too are those.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`.
        p0: initial weights `[*B or ones, c]`.
        semiring: `MAX` for the weight of the best path (that of `logchain.viterbi`), `LOG` for the log-partition (that
            of `logchain.product`), or one of your own.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the number of variables of each sequence.
        cu_seqlens: the offsets of concatenated sequences.

    Returns:
        `[*B]` in nats, in float64 if an operand is and otherwise in float32; exactly -inf where every path is
        impossible. Gradients are those that torch's autograd takes through the semiring's sum.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or a length is out of range.

    Cost: `v c^2` terms a sequence in `v` dependent steps, all of which are kept if gradients are needed; for `LOG` and
    `MAX` that of `logchain.product` and `logchain.viterbi`.

    Source: J. Goodman, "Semiring parsing", Computational Linguistics 25 (1999).

    >>> x = torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> total(x, bulk, torch.tensor([0.5, 0.5]), MAX)
    tensor(1.8606)
    """
    if not isinstance(semiring, Semiring):
        raise TypeError(f"semiring: expected a logchain.semirings.Semiring, got {type(semiring).__name__}")
    if semiring is LOG:
        return product(x, bulk, p0, log_params=log_params, lengths=lengths, cu_seqlens=cu_seqlens)
    if cu_seqlens is not None:
        packed = Packed(x, bulk, p0, cu_seqlens, lengths, log_params)
        return packed.by_sequence(
            [total(*piece[:3], semiring, log_params=log_params, lengths=piece.lengths) for piece in packed]
        )
    ends = check_question(x, bulk, p0, log_params, lengths)
    if semiring is MAX:
        weight = best_weight(x, bulk, p0, ends, log_params)[1]
    else:
        weight = semiring_chain.total(x, bulk, p0, ends, log_params, semiring.sum)
    return weight.to(arithmetic_dtype(x, bulk, p0))
