"""What a stream carries from one piece to the next."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lag import Window
from .paths import Survivors
from .piece import Carried

# the fields that are named tuples
_PARTS = {"carried": Carried, "window": Window, "survivors": Survivors}


class State(NamedTuple):
    """`carried`: what the log-partition goes on from. `fresh` [*B]: no variable yet; `over` [*B]: ended.

    `unlinked`: all are fresh, which is known without a look; `running`: likewise, that none is fresh or over. `double`:
    an operand was float64. `window`: what waits for its lag. `survivors`: the best paths. These two are None before
    they are needed.
    """

    carried: Carried
    fresh: Tensor
    over: Tensor
    unlinked: bool
    running: bool
    double: bool
    window: Window | None
    survivors: Survivors | None

    @classmethod
    def before(cls, x: Tensor) -> "State":
        """That of a batch of which no variable has come."""
        no = x.new_zeros(x.shape[:-2], dtype=torch.bool)
        return cls(Carried.before(x), ~no, no, True, False, False, None, None)

    def anew(self, mask: Tensor) -> "State":
        """The same with the sequences of the mask [*B] before their start."""
        message, total, lost = self.carried
        carried = (
            message.masked_fill(mask[..., None], -torch.inf),
            total.masked_fill(mask, 0),
            lost.masked_fill(mask, 0),
        )
        return self._replace(carried=Carried(*carried), fresh=self.fresh | mask, over=self.over & ~mask, running=False)

    def detached(self) -> "State":
        """The same as constants."""
        leaves = [*self.carried[:2], *(() if self.window is None else (self.window.messages,))]
        detached: State = _mapped(Tensor.detach, self) if any(leaf.requires_grad for leaf in leaves) else self
        return detached

    def plain(self) -> dict[str, Any]:
        """Copies, in types that need no class to be loaded."""
        fields: dict[str, Any] = _mapped(lambda tensor: tensor.detach().clone(), self)._asdict()
        return fields | {name: fields[name]._asdict() for name in _PARTS if fields[name] is not None}

    @classmethod
    def of_plain(cls, fields: dict[str, Any]) -> "State":
        """The state that `plain` has copied."""
        parts = {name: kind(**fields[name]) for name, kind in _PARTS.items() if fields[name] is not None}
        state: State = _mapped(Tensor.clone, cls(**fields | parts))
        return state


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """All tensors within named tuples changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(*(_mapped(change, part) for part in value)) if isinstance(value, tuple) else value
