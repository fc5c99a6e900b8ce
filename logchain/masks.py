"""What a layer of pytorch-crf is given, as the variables of a chain."""

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import check_tensor
from .operands import at_hand


def check_crf(emissions: Tensor, mask: Tensor | None, c: int, batch_first: bool) -> None:
    """Kinds and sizes."""
    check_tensor("emissions", emissions, 3)
    if emissions.dim() != 3 or emissions.shape[-1] != c:
        axes = "n, v" if batch_first else "v, n"
        raise ValueError(f"emissions: expected shape [{axes}, {c}], got {list(emissions.shape)}")
    if emissions.shape[int(batch_first)] < 1:
        raise ValueError(f"emissions: expected at least one step, got {list(emissions.shape)}")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask: expected bool or integers, got {str(mask.dtype)[6:]}")
    if mask.shape != emissions.shape[:2]:
        raise ValueError(f"mask: expected shape {list(emissions.shape[:2])}, got {list(mask.shape)}")
    if mask.device != emissions.device:
        raise ValueError(f"mask: expected device {emissions.device}, got {mask.device}")


def with_end(emissions: Tensor, end: Tensor, ends: Tensor | None) -> Tensor:
    """Emissions (n, v, c) with the end transitions (c) at the last variable of each sequence; float32 at least."""
    v = emissions.shape[1]
    steps = torch.arange(1, v + 1, device=emissions.device)
    last = steps == (v if ends is None else ends[:, None])  # (v) or (n, v)
    emissions = emissions.to(torch.promote_types(emissions.dtype, torch.float32))
    return emissions + torch.where(last[..., None], end, 0.0)


class Sequences(NamedTuple):
    """What a mask (n, v) leaves of each sequence, as the first variables of a chain.

    `inside` is the mask, `lengths` and `empty` are (n), `order` (n, v) says from which step each variable is taken.
    An empty sequence is given one variable, and left out of the results. `order` and `empty` are None where the mask is
    known to leave the first variables of each sequence, and all are None without a mask.
    """

    inside: Tensor | None = None
    lengths: Tensor | None = None
    order: Tensor | None = None
    empty: Tensor | None = None

    def gathered(self, values: Tensor) -> Tensor:
        """Values (n, v) or (n, v, c) as the chain has them."""
        if self.order is None or self.inside is None:
            return values
        values = torch.where(_like(self.inside, values), values, 0)  # an empty sequence is given what is not its own
        return values.gather(1, _like(self.order, values))

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values (n, v) or (n, v, c) of the chain as the mask has them."""
        if self.order is None or self.inside is None:
            return values
        values = values.gather(1, _like(self.order.argsort(1), values))
        return torch.where(_like(self.inside, values), values, fill)

    def known(self, found: Tensor) -> Tensor:
        """What was found of each sequence (n), 0 for the one path of an empty one."""
        return found if self.empty is None else found.masked_fill(self.empty, 0.0)


def sequences(mask: Tensor | None) -> Sequences:
    """Those of a mask (n, v). Nothing waits for a GPU: the values of a mask are looked at on the host alone."""
    if mask is None:
        return Sequences()
    inside = mask.bool()
    lengths = inside.sum(1)
    if at_hand(mask):
        first = torch.arange(mask.shape[1]) < lengths[:, None]
        if inside.equal(first) and lengths.all():
            return Sequences(inside, lengths)
    return Sequences(inside, lengths.clamp(min=1), inside.logical_not().argsort(dim=1, stable=True), lengths == 0)


def _like(steps: Tensor, values: Tensor) -> Tensor:
    """(n, v) for values (n, v) or (n, v, c)."""
    return steps if values.dim() == 2 else steps[..., None].expand_as(values)
