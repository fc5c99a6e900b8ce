"""Semirings of log-weights, and the total weight of a chain's paths in any of them."""

from functools import partial
from typing import Any

from torch import Tensor

from .arguments import Lengths
from .autograd.scan import total as sum_of_paths
from .chain import Chain
from .operands import Operands, as_dense
from .product import product
from .transitions import Transition
from .transitions.semiring import LINEAR, LOG, MAX, Semiring
from .viterbi import viterbi

__all__ = ["LINEAR", "LOG", "MAX", "Semiring", "total"]


def total(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    semiring: Semiring,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""Returns the semiring sum over paths z of `log p0(z_0) + x_0(z_0) + log P_1(z_0, z_1) + x_1(z_1) + ...`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`. `semiring`: `MAX` for the weight of the best path (that of `logchain.viterbi`),
    `LOG` for the log-partition (that of `logchain.product`), or your semiring.

    Returns:
        `[*B]` in nats, in float64 if an operand is and otherwise in float32; exactly -inf where every path is
        impossible. Gradients are those that torch's autograd takes through the semiring's sum.

    Cost: `v c^2` terms a sequence in `v` dependent steps, all of which are kept if gradients are needed; for `LOG` and
    `MAX` that of `logchain.product` and `logchain.viterbi`.

    Source: J. Goodman, "Semiring parsing", Computational Linguistics 25 (1999).

    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> total(x, bulk, torch.tensor([0.5, 0.5]), MAX)
    tensor(1.8606)
    """
    if not isinstance(semiring, Semiring):
        raise TypeError(f"semiring: expected a logchain.semirings.Semiring, got {type(semiring).__name__}")
    options: dict[str, Any] = {"log_params": log_params, "lengths": lengths, "cu_seqlens": cu_seqlens}
    if semiring is LOG:
        return product(x, bulk, p0, **options)
    if semiring is MAX:
        return viterbi(x, bulk, p0, **options).score
    chain = Chain.of(x, bulk, p0, **options)
    return chain.by_sequence(chain.map(partial(_of_batch, semiring=semiring))).to(chain.dtype)


def _of_batch(operands: Operands, semiring: Semiring) -> Tensor:
    if operands.transition.sums:
        operands = as_dense(operands)
    return sum_of_paths(operands.with_checked_lengths().steps(), semiring)
