"""What a stream carries from one piece to the next."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lag import Window
from .paths import Survivors


class State(NamedTuple):
    """`message` [*B, c]: the logarithm of the newest state's posterior, float64; -inf for none and for the impossible.

    `total` + `lost` [*B]: the log-partition. `fresh` [*B]: no variable yet; `over` [*B]: ended. `unlinked`: all are
    fresh, which is known without a look; `running`: likewise, that none is fresh or over. `double`: an operand was
    float64. `window`: what waits for its lag. `survivors`: the best paths. These two are None before they are needed.
    `number`: how many steps have been.
    """

    message: Tensor
    total: Tensor
    lost: Tensor
    fresh: Tensor
    over: Tensor
    unlinked: bool
    running: bool
    double: bool
    window: Window | None
    survivors: Survivors | None
    number: int = 0

    @classmethod
    def before(cls, x: Tensor) -> "State":
        """That of a batch of which no variable has come."""
        message = x.new_full((*x.shape[:-2], x.shape[-1]), -torch.inf, dtype=torch.float64)
        zero, no = x.new_zeros(x.shape[:-2], dtype=torch.float64), x.new_zeros(x.shape[:-2], dtype=torch.bool)
        return cls(message, zero, zero, ~no, no, True, False, False, None, None)

    def anew(self, mask: Tensor) -> "State":
        """The same with the sequences of the mask [*B] before their start."""
        return self._replace(
            message=self.message.masked_fill(mask[..., None], -torch.inf),
            total=self.total.masked_fill(mask, 0.0),
            lost=self.lost.masked_fill(mask, 0.0),
            fresh=self.fresh | mask,
            over=self.over & ~mask,
            running=False,
        )

    def detached(self) -> "State":
        """The same as constants."""
        some = self.message.requires_grad or (self.window is not None and self.window.messages.requires_grad)
        detached: State = _mapped(Tensor.detach, self) if some or self.total.requires_grad else self
        return detached

    def plain(self) -> dict[str, Any]:
        """Copies, in types that need no class to be loaded."""
        found: dict[str, Any] = _mapped(lambda tensor: tensor.detach().clone(), self)._asdict()
        for name in ("window", "survivors"):
            found[name] = None if found[name] is None else found[name]._asdict()
        return found

    @classmethod
    def of_plain(cls, found: dict[str, Any]) -> "State":
        """What `plain` has been made of."""
        window, survivors = found["window"], found["survivors"]
        found = found | {
            "window": None if window is None else Window(**window),
            "survivors": None if survivors is None else Survivors(**survivors),
        }
        state: State = _mapped(Tensor.clone, cls(**found))
        return state


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """All tensors within named tuples changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(*(_mapped(change, part) for part in value)) if isinstance(value, tuple) else value
