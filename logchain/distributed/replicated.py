"""Parameters that every rank has, used on every rank's own data: their gradients are sums over the ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..autograd.operator import Final, call
from .agreement import agree, check_same, digest, marks
from .exchange import Exchange


def replicated(
    exchange: Exchange, question: str, parameters: Mapping[str, Tensor], steps: Callable[[], int]
) -> tuple[dict[str, Tensor], int]:
    """The same parameters, whose gradients are summed over ranks, and the number of steps on the ranks before this one.

    Every rank has the same parameters, computes with them what belongs to its own data, and takes the gradient of one
    loss, which all ranks have in common. Then all ranks have equal gradients. `steps` counts those of this rank; what
    it raises is raised on all. Parameters have to be the same on all ranks, or all raise ValueError.
    """
    described = [
        f"{name} {list(value.shape)} {value.dtype} {value.requires_grad}" for name, value in parameters.items()
    ]
    values = list(parameters.values())

    def describe() -> tuple[dict[str, Any], Tensor]:
        fields = {"question": question, "parameters": f"names, shapes and dtypes {digest(described)}"}
        count = torch.tensor([steps()], dtype=torch.float64, device="cpu")
        return fields, torch.cat([count, marks(*values)])

    numbers = agree(exchange, describe)
    least = max((value.dtype for value in values), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    check_same("parameters", "the same values", numbers[:, 1:4], least)
    return _summed(exchange, parameters), int(numbers[: exchange.rank, 0].sum())


def _summed(exchange: Exchange, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not parameters:
        return {}
    return dict(zip(parameters, _Replicated.apply(exchange, *parameters.values()), strict=True))  # type: ignore[no-untyped-call]


class _Replicated(torch.autograd.Function):
    """exchange, parameters -> the same parameters, of each of which the gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *call(_Summed, ctx.exchange, *gradients)


class _Summed(Final):
    """exchange, gradients -> their sums over ranks, which cannot be differentiated again."""

    refusal = "logchain.nn: expected one derivative with a group, got a second; it needs the chain on one rank"

    @staticmethod
    def forward(exchange: Exchange, *gradients: Tensor) -> tuple[Tensor, ...]:
        flat = [gradient.flatten().to("cpu", torch.float64) for gradient in gradients]
        total = exchange.total(sum(map(len, flat)), lambda: torch.cat(flat))
        parts = total.split([len(one) for one in flat])
        return tuple(part.view(like.shape).to(like) for part, like in zip(parts, gradients, strict=True))
