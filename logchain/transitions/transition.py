"""What the library needs of a transition matrix, which may have fewer parameters than entries."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..arguments import check_tensor
from ..tensors import with_axes
from .semiring import BEST, LINEAR, LOG, Semiring

if TYPE_CHECKING:
    from typing_extensions import Self


class Transition(ABC):
    r"""A transition matrix P `[from, to]` of c states, or a batch of them, in place of `bulk` in any function.

    A user's structure has `states`, `parameters`, the number of `axes` of each, and `apply`; all else follows.
    Where costs matter, `mT` and `entries` can take fewer operations than by `to_dense`.

    >>> class Shift(Transition):  # P(i, i + 1 mod c) = weight_i
    ...     axes = (1,)
    ...
    ...     def __init__(self, weight):
    ...         super().__init__(weight)
    ...         self.states = weight.shape[-1]
    ...
    ...     def apply(self, message, semiring):
    ...         (weight,) = self.parameters
    ...         return semiring.times(message, weight[..., None, :]).roll(1, -1)
    >>> Shift(torch.tensor([0.25, 0.5])).to_dense()
    tensor([[0.0000, 0.2500],
            [0.5000, 0.0000]])

    Attributes:
        states: c.
        parameters: non-negative weights `[*B or ones, v-1 or 1, *sizes]`, or their logarithms where a function is
            called with `log_params`. As with `bulk`, batch axes may be of size 1 or left out. A step axis of size 1, or
            none and no batch axes either, means one matrix for every step. All have as many of these axes.
        axes: the number of each parameter's axes, without those of batch and steps.
        sums: whether entries are sums of products of parameters, so that no best path passes through them.
        pattern: what the kernels of bands, arcs, durations and products take; None for a user's structures, which are
            computed in log space, in float64, by `apply`.
    """

    states: int
    axes: tuple[int, ...]
    sums: ClassVar[bool] = False
    pattern: Any = None

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = parameters

    @abstractmethod
    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P` `[*lead, rows, c]` of a message of that shape, for parameters `[*lead or ones, *sizes]`.

        In `LINEAR`, message and parameters are weights; in any other semiring, such as `LOG` or `MAX`, logarithms.
        `MAX` is not used where entries are `sums`.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.apply(torch.tensor([[0.5, 0.5, 0.0]]), LINEAR)
        tensor([[0.4500, 0.4500, 0.1000]])
        """

    @property
    def mT(self) -> "Transition":
        """The structure of the transposed matrices."""
        return Transposed(self)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]` `[..., *lead]`, for indices that broadcast with the parameters' `[*lead, *sizes]`.

        With `LOG`, parameters and entries are logarithms.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.entries(torch.tensor([0, 0]), torch.tensor([1, 2]))
        tensor([0.1000, 0.0000])
        """
        return look_up(self._dense(semiring), source, target)

    def best(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The largest `message(k) + log P(k, j)` for each state j, and the lowest k with it, int64.

        The message and both results are `[*lead, rows, c]`; parameters are logarithms.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.map(torch.log).best(torch.tensor([[0.5, 0.5, 0.0]]).log())
        (tensor([[-0.7985, -0.9163, -2.3026]]), tensor([[0, 1, 1]]))
        """
        # entries are labeled with the state that they come from
        labels = -torch.arange(self.states, dtype=message.dtype, device=message.device)
        best = self.apply(torch.complex(message, labels.expand_as(message)), BEST)
        return best.real, (-best.imag).clamp(0, self.states - 1).long()

    def columns(self, target: Tensor) -> Tensor:
        """`log P[:, target]` `[*lead, rows, c]` of states `[*lead, rows]`, for parameters that are logarithms."""
        unit = torch.full((*target.shape, self.states), -math.inf, dtype=self.dtype, device=self.device)
        return self.mT.apply(unit.scatter_(-1, target[..., None], 0.0), LOG)

    def draw(self, message: Tensor, target: Tensor, uniform: Tensor) -> Tensor:
        """States before `target`, drawn with weights `exp(message) P[:, target]` by `uniform` numbers in [0, 1).

        All are `[draws, *lead, rows]`, but `message` is `[*lead, rows, c]`; it and the parameters are logarithms.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.map(torch.log).draw(torch.zeros(1, 3), torch.tensor([[1], [1]]), torch.tensor([[0.1], [0.5]]))
        tensor([[0],
                [1]])
        """
        columns = self.columns(target.movedim(0, -2).flatten(-2))  # [*lead, draws rows, c]
        columns = columns.unflatten(-2, (len(target), -1)).movedim(-3, 0)
        return pick(message + columns, uniform)[0]

    def to_dense(self, *, log_params: bool = False) -> Tensor:
        """The matrices `[*lead, c, c]`, which define a structure; `log_params`: of logarithms, as parameters are.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.to_dense()
        tensor([[0.9000, 0.1000, 0.0000],
                [0.0000, 0.8000, 0.2000],
                [0.0000, 0.0000, 1.0000]])
        """
        return self._dense(LOG if log_params else LINEAR)

    def _dense(self, semiring: Semiring) -> Tensor:
        unit = torch.full((self.states, self.states), semiring.zero, dtype=self.dtype, device=self.device)
        return self.apply(unit.fill_diagonal_(semiring.one).expand(*self.lead, -1, -1), semiring)

    def with_parameters(self, *parameters: Tensor) -> "Self":
        """The same structure with other parameters, as many and with as many axes; leading axes may differ."""
        copy: Self = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.parameters = parameters
        return copy

    def with_lead(self, count: int) -> "Self":
        """The same structure with `count` leading axes, of size 1 where a parameter has fewer."""
        pairs = zip(self.parameters, self.axes, strict=True)
        return self.with_parameters(*(with_axes(parameter, count + axes) for parameter, axes in pairs))

    def between(self, start: int, stop: int) -> "Self":
        """The same structure at the steps from `start` to before `stop`; parameters that serve all steps stay."""
        pairs, size = zip(self.parameters, self.leads, strict=True), stop - start
        parts = [a if lead[-1:] in ((), (1,)) else a.narrow(len(lead) - 1, start, size) for a, lead in pairs]
        return self.with_parameters(*parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Self":
        """The same structure with a function applied to each parameter."""
        return self.with_parameters(*map(function, self.parameters))

    def to(self, *args: Any, **options: Any) -> "Self":
        """The same structure with parameters on another device or of another dtype; arguments as of `Tensor.to`."""
        return self.map(lambda parameter: parameter.to(*args, **options))

    def to_pattern(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Parameters in the order of `pattern`."""
        return parameters

    def from_pattern(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of parameters in the order of `pattern`, in that of the structure."""
        return gradients

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence; by default those of a dense matrix."""
        return self.states**2

    @property
    def lead(self) -> torch.Size:
        """The parameters' leading axes, broadcast: batch and steps."""
        lead: torch.Size = torch.broadcast_shapes(*self.leads)
        return lead

    @property
    def leads(self) -> list[torch.Size]:
        """The leading axes of each parameter: batch and steps."""
        pairs = zip(self.parameters, self.axes, strict=True)
        return [parameter.shape[: parameter.dim() - axes] for parameter, axes in pairs]

    @property
    def sizes(self) -> list[torch.Size]:
        """The sizes of each parameter's `axes`."""
        pairs = zip(self.parameters, self.axes, strict=True)
        return [parameter.shape[parameter.dim() - axes :] for parameter, axes in pairs]

    @property
    def names(self) -> list[str]:
        """The name of each parameter: that of its argument, where it is an attribute too."""
        names = [f"parameters[{i}]" for i in range(len(self.parameters))]
        for name, argument in inspect.signature(type(self)).parameters.items():
            if argument.kind is argument.VAR_POSITIONAL:
                return [f"{name}[{i}]" for i in range(len(names))]
            for i, parameter in enumerate(self.parameters):
                names[i] = name if getattr(self, name, None) is parameter else names[i]
        return names

    @property
    def used(self) -> list[Tensor | None]:
        """Which entries [*sizes] of each parameter have influence; None for all."""
        return [None] * len(self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the parameters."""
        return reduce(torch.promote_types, (parameter.dtype for parameter in self.parameters))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.parameters[0].device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(str(list(parameter.shape)) for parameter in self.parameters)})"


class Transposed(Transition):
    """The transposed matrices of a structure, by its dense ones."""

    def __init__(self, of: Transition) -> None:
        super().__init__(*of.parameters)
        self._of, self.states, self.axes = of, of.states, of.axes

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        return semiring.matmul(message, self.mT._dense(semiring).mT)

    @property
    def mT(self) -> Transition:
        """The structure itself."""
        return self._of.with_parameters(*self.parameters)


def pick(logs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The index that each number in [0, 1) draws from the logarithms of weights `[..., k]`, and a new uniform number.

    The index is the first whose cumulative weight exceeds `uniform` times the total, and has no weight of 0. The new
    number is the place of the old one within that weight's share.
    """
    top = logs.amax(-1, keepdim=True)
    weights = (logs - top.masked_fill(top == -math.inf, 0.0)).double().exp()
    sums = weights.cumsum(-1)
    threshold = uniform[..., None] * sums[..., -1:]
    index = ((sums > threshold) & (weights > 0)).to(torch.int8).argmax(-1, keepdim=True)
    weight = weights.gather(-1, index)
    rest = (threshold - (sums.gather(-1, index) - weight)) / weight
    return index[..., 0], rest[..., 0].clamp(0.0, 1.0)


def with_entries(values: Tensor, places: Tensor, states: int, zero: float) -> Tensor:
    """Matrices `[*lead, c, c]` of values `[*lead, k]` at flat places int64 `[k]`, and weight zero elsewhere.

    Values at place c^2 are left out.
    """
    flat = values.new_full((*values.shape[:-1], states**2 + 1), zero).index_copy(-1, places, values)
    return flat[..., :-1].view(*values.shape[:-1], states, states)


def check_parameter(name: str, value: Tensor, axes: int, like: Tensor | None = None) -> None:
    """Check for a floating tensor of at least `axes` axes, the last of them not empty, on the device of `like`."""
    check_tensor(name, value, axes, like=like)
    if 0 in value.shape[value.dim() - axes :]:
        raise ValueError(f"{name}: expected no empty axis among the last {axes}, got shape {list(value.shape)}")


def look_up(values: Tensor, *index: Tensor, rest: int = 0) -> Tensor:
    """Entries `[..., *lead, *rest]` of values `[*lead or ones, *indexed, *rest]`, `rest` being a number of axes."""
    lead = values.dim() - len(index) - rest
    has_axes = index[0].dim() >= lead  # then an axis of size 1 needs no index that broadcasts
    places = [
        0 if has_axes and size == 1 else torch.arange(size, device=values.device).view(-1, *(1,) * (lead - 1 - axis))
        for axis, size in enumerate(values.shape[:lead])
    ]
    return values[(*places, *index)]
