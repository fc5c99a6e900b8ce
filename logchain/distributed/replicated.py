"""Parameters that every rank has, used on every rank's own data: their gradients are sums over the ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange
from .shards import digest


def replicated(parameters: Mapping[str, Tensor], group: Any = None) -> dict[str, Tensor]:
    """The same parameters, whose gradients are summed over the ranks of a process group, in one exchange.

    Every rank has the same parameters, computes with them what belongs to its own data, and takes the gradient of one
    loss, which all ranks have in common, as that of `distributed.product` is. Then all ranks have equal gradients.

    Args:
        parameters: tensors by name, as of `dict(module.named_parameters())`, for `torch.func.functional_call`.
        group: a process group of `torch.distributed`, by default that of all processes.

    Raises:
        ValueError: names, shapes or dtypes are not the same on all ranks.
        RuntimeError: a rank is gone or does not answer; or there is no group.

    Cost: one gather of a number; backward, one sum of the gradients in float64.
    """
    exchange = Exchange(group)
    described = [
        f"{name} {list(value.shape)} {value.dtype} {value.requires_grad}" for name, value in parameters.items()
    ]
    digests = exchange.gather((), lambda: torch.tensor(float(digest(described))))
    if (digests != digests[0]).any():
        rank = int((digests != digests[0]).nonzero()[0])
        raise ValueError(f"rank {rank}: parameters: expected the same names, shapes and dtypes as on rank 0")
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
