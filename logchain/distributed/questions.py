"""What the questions of a sharded chain have in common: agreement, and results that refuse a derivative by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import Lengths, check_choice
from ..operands import Operands, differentiated
from ..schedules.ranks import STRATEGIES
from .exchange import Exchange
from .shards import Shards, agreed_shards

_REFUSAL = (
    "logchain.distributed: expected no derivative of this question, got one; over several ranks `product` alone has "
    "gradients"
)


def begin(
    question: str,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    group: Any,
    log_params: bool,
    lengths: Lengths | None,
    one_matrix: bool | None,
    strategy: object = "auto",
    options: dict[str, Any] | None = None,
    check: Callable[[], object] = lambda: None,
) -> tuple[Exchange, Shards, Operands]:
    """The exchange, the shards and the operands of a question; `options` are the same on all ranks.

    `check` raises for what is wrong with other arguments. Whatever is wrong on one rank is raised on all.
    """
    exchange = Exchange(group)

    def check_all() -> None:
        check_choice("strategy", strategy, STRATEGIES)
        check_choice("one_matrix", one_matrix, (None, False, True))
        check()

    described = {"question": question, "strategy": str(strategy), **(options or {})}
    agreed = agreed_shards(exchange, x, bulk, p0, log_params, lengths, described, check_all, one_matrix)
    exchange.operands = agreed[1]
    return exchange, *agreed


def underived(compute: Callable[[], Any], operands: Operands) -> Any:
    """What `compute` returns, a tensor or several; a derivative of it raises NotImplementedError when it is taken."""
    tensors = operands[:3]
    if not differentiated(*tensors):
        return compute()
    return _Underived.apply(compute, *tensors)  # type: ignore[no-untyped-call]


class _Underived(torch.autograd.Function):
    """compute, x, bulk, p0 -> results without a derivative."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], *tensors: Tensor) -> Any:
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_REFUSAL)
