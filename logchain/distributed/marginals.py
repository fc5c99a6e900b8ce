"""Posterior marginals of a chain whose variables are sharded over the ranks of a process group."""

from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import Lengths, check_choice
from ..marginals import Marginals
from ..operands import arithmetic_dtype
from ..schedules.ranks import Strategy
from .questions import begin, underived
from .sharded import Sharded


def marginals(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    transitions: Literal["sum", "full"] | None = None,
    group: Any = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    one_matrix: bool | None = None,
    strategy: Strategy = "auto",
) -> Marginals:
    """`logchain.marginals` of chains whose variables are sharded, for this rank's variables.

    Args:
        x: log-potentials `[*B, v_r, c]` of this rank's variables. All arguments that `distributed.product` has too are
            those.
        bulk: one transition matrix for every step, or those that lead into this rank's variables.
        p0: initial weights, the same on every rank.
        transitions: None for state posteriors alone; "sum" for expected counts in the shape of `bulk`, those of one
            matrix for all steps summed over all ranks; "full" for `[*B, v_r, c, c]`, transitions into this rank's
            variables (one less on the rank that has the first).
        group: a process group.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the numbers of variables of whole sequences.
        one_matrix: whether `bulk` is one matrix for every step.
        strategy: how the chain is cut.

    Returns:
        `Marginals(states [*B, v_r, c], transitions, log_norm [*B])`. They have no derivative: taking one raises.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or on another, or differs between ranks.
        RuntimeError: a rank is gone or does not answer.
        NotImplementedError: a derivative is taken.

    Cost: that of `distributed.product` forward and backward.
    """
    options = {"transitions": transitions}
    exchange, shards, operands = begin(
        "marginals", x, bulk, p0, group, log_params, lengths, one_matrix, strategy, options,
        lambda: check_choice("transitions", transitions, (None, "sum", "full")),
    )  # fmt: skip
    dtype = arithmetic_dtype(x, bulk, p0)
    x, bulk, p0 = x.to(dtype), bulk.to(dtype), p0.to(dtype)
    if transitions == "full":
        *batch, v, c = x.shape
        bulk = bulk.expand(*batch, v - (shards.place == 0) if v else 0, c, c)
        shards = shards._replace(one_matrix=False)
    needs = True, transitions is not None, False
    shards = shards._replace(needs=needs)
    plain = operands._replace(x=x.detach(), bulk=bulk.detach(), p0=p0.detach())

    def compute() -> tuple[Tensor, ...]:
        sharded = Sharded(exchange, shards, plain, strategy, keep=True, by_log=True)
        log_norm = sharded.forward()
        states, counts, _ = sharded.gradients(torch.ones_like(log_norm), needs)
        assert states is not None
        return (log_norm.to(dtype), states) if counts is None else (log_norm.to(dtype), states, counts)

    log_norm, states, *counts = underived(compute, operands)
    return Marginals(states, counts[0] if counts else None, log_norm)
