"""The state of a stream between two pieces."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..transitions import Transition
from .lag import Window
from .paths import Survivors
from .piece import Carried

# the fields that are named tuples
_PARTS = {"carried": Carried, "window": Window, "survivors": Survivors}


class State(NamedTuple):
    """`carried`: the forward message and log-partition. `fresh` [*B]: no variable yet. `over` [*B]: ended.

    `unlinked`: whether all are known to be fresh, and `running`: whether none is known to be fresh or over, both
    without looking at values. `double`: whether an operand was float64. `window`: variables that wait for the lag.
    `survivors`: the best paths. The last two are None before they are needed.
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
        """The state before the first variable of a batch like x."""
        no = x.new_zeros(x.shape[:-2], dtype=torch.bool)
        return cls(Carried.before(x), ~no, no, True, False, False, None, None)

    def anew(self, mask: Tensor) -> "State":
        """The state with the sequences in a mask [*B] before their first variable again."""
        message, total, lost = self.carried
        carried = (
            message.masked_fill(mask[..., None], -torch.inf),
            total.masked_fill(mask, 0),
            lost.masked_fill(mask, 0),
        )
        return self._replace(carried=Carried(*carried), fresh=self.fresh | mask, over=self.over & ~mask, running=False)

    def detached(self) -> "State":
        """The state without gradients to earlier pieces."""
        leaves = [*self.carried[:2], *(() if self.window is None else (self.window.messages,))]
        detached: State = _mapped(Tensor.detach, self) if any(leaf.requires_grad for leaf in leaves) else self
        return detached

    def plain(self) -> dict[str, Any]:
        """A copy as dictionaries of tensors, bools, None and a structure if one waits for the lag."""
        fields: dict[str, Any] = _mapped(lambda tensor: tensor.detach().clone(), self)._asdict()
        return fields | {name: fields[name]._asdict() for name in _PARTS if fields[name] is not None}

    @classmethod
    def of_plain(cls, fields: dict[str, Any]) -> "State":
        """The state that `plain` has made dictionaries of."""
        parts = {name: kind(**fields[name]) for name, kind in _PARTS.items() if fields[name] is not None}
        state: State = _mapped(_contiguous_copy, cls(**fields | parts))
        return state


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with all tensors in it changed, also those in tuples, and the parameters of structures."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Transition):
        return value.map(change)
    return type(value)(*(_mapped(change, part) for part in value)) if isinstance(value, tuple) else value
