"""The entropy of the posterior over paths of a chain whose variables are sharded over the ranks of a process group.

    H = log Z - E[log w],    E[log w] = sum of posteriors times logarithms of weights

Each rank adds up the terms of its own steps, in float64.
"""

from typing import Any

import torch
from torch import Tensor

from ..arguments import Lengths
from ..autograd.paths import finite_log
from ..operands import Operands, arithmetic_dtype
from ..schedules.ranks import Strategy
from .exchange import Exchange
from .questions import begin, underived
from .sharded import Sharded
from .shards import Shards
from .stretch import F64


def entropy(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    group: Any = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    one_matrix: bool | None = None,
    strategy: Strategy = "auto",
) -> Tensor:
    """`logchain.entropy` of chains whose variables are sharded, the same on all ranks.

    Args:
        x: log-potentials `[*B, v_r, c]` of this rank's variables. All arguments are those of `distributed.product`.
        bulk: one transition matrix for every step, or those that lead into this rank's variables.
        p0: initial weights, the same on every rank.
        group: a process group.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the numbers of variables of whole sequences.
        one_matrix: whether `bulk` is one matrix for every step.
        strategy: how the chain is cut.

    Returns:
        `[*B]` in nats; 0 where no path is possible. It has no derivative: taking one raises. In float64 throughout, but
        `log Z` and the expectation are formed and subtracted: an entropy is exact to some 1e-14 |log Z|.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or on another, or differs between ranks.
        RuntimeError: a rank is gone or does not answer.
        NotImplementedError: a derivative is taken.

    Cost: that of `distributed.product` forward and backward in float64.
    """
    exchange, shards, operands = begin("entropy", x, bulk, p0, group, log_params, lengths, one_matrix, strategy)
    value: Tensor = underived(lambda: _entropy(exchange, shards, operands, strategy), operands)
    return value.to(arithmetic_dtype(x, bulk, p0))


def _entropy(exchange: Exchange, shards: Shards, operands: Operands, strategy: str) -> Tensor:
    x, bulk, p0, ends, log_params = operands
    batch, everything = x.shape[:-2], (True, True, True)
    # an expected count for each sequence
    x, bulk, p0 = x.detach().to(F64), bulk.detach().expand(*batch, *bulk.shape[-3:]), p0.detach()
    apart = Operands(x, bulk.to(F64), p0.to(F64).expand(*batch, -1), ends, log_params)
    sharded = Sharded(exchange, shards._replace(needs=everything), apart, strategy, keep=True, by_log=True)
    log_norm = sharded.forward()
    states, counts, starts = sharded.gradients(torch.ones_like(log_norm), everything)
    assert states is not None and counts is not None and starts is not None
    own = torch.where(states == 0, 0.0, states * x).sum((-2, -1))
    steps = (counts * finite_log(apart.bulk, log_params)).sum((-3, -2, -1))
    first = (starts * finite_log(apart.p0, log_params)).sum(-1)
    own = own if shards.one_matrix else own + steps
    total = exchange.total(own.numel(), lambda: own).view(batch).to(x.device) + first
    total = total + steps if shards.one_matrix else total
    return torch.where(log_norm == -torch.inf, 0.0, log_norm - total)
