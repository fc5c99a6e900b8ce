"""Parameters that every rank has, used on every rank's own data: their gradients are sums over the ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange
from .shards import digest


def replicated(
    exchange: Exchange, parameters: Mapping[str, Tensor], steps: Callable[[], int]
) -> tuple[dict[str, Tensor], int]:
    """The same parameters, whose gradients are summed over ranks, and the number of steps on the ranks before this one.

    Every rank has the same parameters, computes with them what belongs to its own data, and takes the gradient of one
    loss, which all ranks have in common. Then all ranks have equal gradients. `steps` counts those of this rank; what
    it raises is raised on all. Names, shapes and dtypes have to be the same on all ranks, or all raise ValueError.
    """
    described = [
        f"{name} {list(value.shape)} {value.dtype} {value.requires_grad}" for name, value in parameters.items()
    ]
    counts, digests = exchange.gather((2,), lambda: torch.tensor([float(steps()), float(digest(described))])).T
    if (digests != digests[0]).any():
        rank = int((digests != digests[0]).nonzero()[0])
        raise ValueError(f"rank {rank}: parameters: expected the same names, shapes and dtypes as on rank 0")
    return _summed(exchange, parameters), int(counts[: exchange.rank].sum())


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
        flat = [gradient.flatten().to("cpu", torch.float64) for gradient in gradients]
        total = ctx.exchange.total(sum(map(len, flat)), lambda: torch.cat(flat))
        parts = total.split([len(one) for one in flat])
        summed = [part.view(like.shape).to(like) for part, like in zip(parts, gradients, strict=True)]
        return None, *summed
