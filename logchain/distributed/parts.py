"""Parts of an axis that lie on several ranks: agreement on operands, and linear maps across ranks with derivatives.

Tensors are replicated, the same on all ranks, or parts, each rank's own. The gradient of a replicated tensor is whole
on every rank, that of a part is the rank's own; so the adjoint of each map is another of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import differentiated
from ..structured.operands import Operands
from .agreement import agree, check_same, integers_said, marks
from .exchange import Exchange

_Linear = Callable[[Tensor], Tensor]


class Parts:
    """The parts of an axis, `sizes` of them in the order of ranks; `start` is where this rank's begins."""

    def __init__(self, exchange: Exchange, sizes: list[int]) -> None:
        self.exchange, self.sizes = exchange, sizes
        self.start, self.size = sum(sizes[: exchange.rank]), sizes[exchange.rank]

    def copied(self, tensor: Tensor) -> Tensor:
        """A replicated tensor, of which each rank makes use of its own."""
        return _mapped(tensor, _same, self.exchange.summed)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape."""
        return _mapped(tensor, self.exchange.summed, _same)

    def gather(self, part: Tensor) -> Tensor:
        """The parts [..., size] of a last axis behind each other [..., c]."""
        return _mapped(part, self.joined, self.own)

    def part(self, tensor: Tensor) -> Tensor:
        """The rank's own part of a replicated tensor."""
        return _mapped(tensor, self.own, self.joined)

    def stack(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, all of one shape (ranks, *shape)."""
        return _mapped(tensor, self.exchange.stacked, lambda grad: grad[self.exchange.rank])

    def first(self, tensor: Tensor) -> Tensor:
        """The tensor of the first rank, without a derivative."""
        return self.exchange.summed(tensor if self.exchange.rank == 0 else torch.zeros_like(tensor))

    def own(self, tensor: Tensor) -> Tensor:
        """The rank's own part [..., size] of a tensor's last axis [..., c]."""
        return tensor.narrow(-1, self.start, self.size)

    def joined(self, part: Tensor) -> Tensor:
        """`gather`, without a derivative."""
        if part.is_complex():
            real = self.joined(torch.view_as_real(part.resolve_conj()).movedim(-1, 0))
            return torch.view_as_complex(real.movedim(0, -1).contiguous())
        padded = torch.nn.functional.pad(part.detach(), (0, max(self.sizes) - self.size))
        parts = self.exchange.stacked(padded)
        return torch.cat([one[..., :size] for one, size in zip(parts, self.sizes, strict=True)], -1)

    def agree(self, options: dict[str, Any], check: Callable[[], Operands]) -> Operands:
        """The operands that `check` returns; raises on all ranks for what it raises on one, and for what differs."""
        checked: list[Operands] = []

        def describe() -> tuple[dict[str, Any], Tensor]:
            checked.append(check())
            x, _, p0, ends, log_params = checked[0]
            fields = {
                **{name: integers_said(one) if isinstance(one, Tensor) else one for name, one in options.items()},
                "x": f"shape {list(x.shape)} of {x.dtype}",
                "p0": f"shape {list(p0.shape)} of {p0.dtype}",
                "log_params": log_params,
                "lengths": integers_said(ends),
                "gradients": [differentiated(tensor) for tensor in checked[0].tensors],
            }
            return fields, torch.cat([marks(x), marks(p0)])

        numbers = agree(self.exchange, describe)
        x, _, p0, *_ = checked[0]
        check_same("x", "the same log-potentials", numbers[:, :3], x.dtype)
        check_same("p0", "the same weights", numbers[:, 3:6], p0.dtype)
        return checked[0]


class _Map(torch.autograd.Function):
    """A tensor -> `there(tensor)`, a linear map whose adjoint is `back`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Linear, back: _Linear) -> Tensor:
        ctx.maps = back, there
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _mapped(grad, *ctx.maps), None, None


def _mapped(tensor: Tensor, there: _Linear, back: _Linear) -> Tensor:
    mapped: Tensor = _Map.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return mapped


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
