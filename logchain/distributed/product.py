"""The log-partition of a chain whose variables are sharded over the ranks of a process group."""

from typing import Any

from torch import Tensor

from ..arguments import Lengths, check_choice
from ..operands import arithmetic_dtype, differentiated
from .cost import STRATEGIES, Strategy
from .exchange import Exchange
from .shards import agree
from .sharded import Sharded, log_norm


def product(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    group: Any = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    strategy: Strategy = "auto",
) -> Tensor:
    """`logchain.product` of a chain."""
    exchange = Exchange(group)
    check_choice("strategy", strategy, STRATEGIES)
    shards, operands = agree(exchange, x, bulk, p0, log_params, lengths, {"question": "product", "strategy": strategy})
    sharded = Sharded(exchange, shards, operands, strategy, keep=differentiated(x, bulk, p0))
    return log_norm(sharded).to(arithmetic_dtype(x, bulk, p0))
