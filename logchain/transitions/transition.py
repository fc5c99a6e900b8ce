"""What the library asks of a transition matrix that is given by fewer parameters than it has entries."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..arguments import check_tensor
from .semiring import BEST, LINEAR, LOG, Semiring

if TYPE_CHECKING:
    from typing_extensions import Self


class Transition(ABC):
    r"""A transition matrix P `[from, to]` of c states, or a batch of them, in place of `bulk` in any function.

    To make a structure of one's own: say what its parameters are, how many axes each has of its own, and how a message
    passes through it. Where costs matter, `mT` and `entries` can be said in fewer operations than by `to_dense`.

    >>> class Shift(Transition):  # P(i, i + 1 mod c) = weight_i
    ...     own = (1,)
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
        parameters: non-negative weights `[*B or ones, v-1 or 1, *own]`, or their logarithms where a function is called
            with `log_params`. As with `bulk`, batch axes may be of size 1 or left out. A step axis of size 1, or none
            and no batch axes either, means one matrix for every step. All have as many of these axes.
        own: the number of each parameter's last axes, behind batch and steps.
        sums: whether entries are sums of products of parameters, so that no best path passes through them.
        pattern: what the kernels of bands, arcs and products know the structure by; None for structures of one's own,
            which are computed in log space, in float64, by `apply`.
    """

    states: int
    own: ClassVar[tuple[int, ...]]
    sums: ClassVar[bool] = False
    pattern: Any = None

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = parameters

    @abstractmethod
    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, for parameters `[*lead or ones, *own]`.

        Args:
            message: `[*lead, rows, c]`.
            semiring: `LINEAR`, in which messages and parameters are weights; `LOG` or `MAX`, in which they are
                logarithms. `MAX` is not asked for where entries are `sums`.

        Returns:
            `[*lead, rows, c]`.

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
        """`P[source, target]`, for indices `[..., *lead]` that broadcast with the parameters' `[*lead, *own]`.

        Args:
            source: indices that transitions leave.
            target: indices that they enter.
            semiring: `LOG` if the parameters are logarithms.

        Returns:
            `[..., *lead]`, logarithms if the parameters are.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.entries(torch.tensor([0, 0]), torch.tensor([1, 2]))
        tensor([0.1000, 0.0000])
        """
        return look_up(self._dense(semiring), source, target)

    def best(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The largest `message(k) + log P(k, j)` for each state j, and the lowest k with it.

        Args:
            message: logarithms `[*lead, rows, c]`; so are the parameters.

        Returns:
            Logarithms and int64, both `[*lead, rows, c]`.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.map(torch.log).best(torch.tensor([[0.5, 0.5, 0.0]]).log())
        (tensor([[-0.7985, -0.9163, -2.3026]]), tensor([[0, 1, 1]]))
        """
        # entries are labelled with the state that they come from
        labels = -torch.arange(self.states, dtype=message.dtype, device=message.device)
        found = self.apply(torch.complex(message, labels.expand_as(message)), BEST)
        return found.real, (-found.imag).clamp(0, self.states - 1).long()

    def columns(self, target: Tensor) -> Tensor:
        """`log P[:, target]`, for parameters that are logarithms.

        Args:
            target: int64 `[*lead, rows]`.

        Returns:
            `[*lead, rows, c]`.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.map(torch.log).columns(torch.tensor([1])).exp()
        tensor([[0.1000, 0.8000, 0.0000]])
        """
        unit = torch.full((*target.shape, self.states), -math.inf, dtype=self.dtype, device=self.device)
        return self.mT.apply(unit.scatter_(-1, target[..., None], 0.0), LOG)

    def draw(self, message: Tensor, target: Tensor, uniform: Tensor) -> Tensor:
        """States before `target`, drawn by `exp(message) P[:, target]`.

        Args:
            message: logarithms `[*lead, rows, c]`; so are the parameters.
            target: int64 `[draws, *lead, rows]`.
            uniform: numbers in [0, 1), of its shape.

        Returns:
            int64 `[draws, *lead, rows]`.

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
        """The matrices that a structure stands for: its definition.

        Args:
            log_params: whether the parameters are logarithms, and so the entries.

        Returns:
            `[*lead, c, c]`.

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
        """The same structure with other parameters.

        Args:
            *parameters: as many, with the same own axes; leading axes may be others.

        Returns:
            The structure.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.with_parameters(torch.ones(5, 1, 2, 3)).to_dense().shape
        torch.Size([5, 1, 3, 3])
        """
        other: Self = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.parameters = parameters
        return other

    def map(self, function: Callable[[Tensor], Tensor]) -> "Self":
        """The same structure with a function applied to each parameter.

        Args:
            function: from a tensor to a tensor.

        Returns:
            The structure.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.map(lambda weights: weights / 2).to_dense()[0]
        tensor([0.4500, 0.0500, 0.0000])
        """
        return self.with_parameters(*map(function, self.parameters))

    def to(self, *args: Any, **options: Any) -> "Self":
        """The same structure with parameters on another device or of another dtype.

        Args:
            *args: as of `Tensor.to`.
            **options: as of `Tensor.to`.

        Returns:
            The structure.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.to(torch.float64).dtype
        torch.float64
        """
        return self.map(lambda parameter: parameter.to(*args, **options))

    def to_pattern(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The parameters in the order of `pattern`: as they are, where a structure says nothing else.

        Args:
            parameters: those of the structure.

        Returns:
            As many, of the same shapes.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.to_pattern(step.parameters)[0] is step.values
        True
        """
        return parameters

    def from_pattern(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of the parameters: as they are, where a structure says nothing else.

        Args:
            gradients: those of the parameters in the order of `pattern`.

        Returns:
            As many, of the same shapes.

        >>> from logchain.transitions import Banded
        >>> step = Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
        >>> step.from_pattern((torch.ones(2, 3),))[0].shape
        torch.Size([2, 3])
        """
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
        axes = zip(self.parameters, self.own_axes, strict=True)
        return [parameter.shape[: parameter.dim() - own] for parameter, own in axes]

    @property
    def own_axes(self) -> tuple[int, ...]:
        """The number of own axes of each parameter."""
        return self.own

    @property
    def names(self) -> list[str]:
        """The name of each parameter: that of the argument that it was given as, if it is an attribute."""
        names = [f"parameters[{i}]" for i in range(len(self.parameters))]
        for name, argument in inspect.signature(type(self)).parameters.items():
            if argument.kind is argument.VAR_POSITIONAL:
                return [f"{name}[{i}]" for i in range(len(names))]
            for i, parameter in enumerate(self.parameters):
                names[i] = name if getattr(self, name, None) is parameter else names[i]
        return names

    @property
    def used(self) -> list[Tensor | None]:
        """Which entries [*own] of each parameter have influence; None for all."""
        return [None] * len(self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the parameters."""
        dtype = self.parameters[0].dtype
        for parameter in self.parameters[1:]:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.parameters[0].device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(str(list(parameter.shape)) for parameter in self.parameters)})"


class Transposed(Transition):
    """The transposed matrices of a structure that does not say what they are."""

    def __init__(self, of: Transition) -> None:
        super().__init__(*of.parameters)
        self._of, self.states = of, of.states

    @property
    def own_axes(self) -> tuple[int, ...]:
        """Those of the other structure."""
        return self._of.own_axes

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        return semiring.matmul(message, self._of.with_parameters(*self.parameters)._dense(semiring).mT)

    @property
    def mT(self) -> Transition:
        """The other structure."""
        return self._of.with_parameters(*self.parameters)


def pick(logs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The index that each number in [0, 1) draws from weights `[..., k]`, given as logarithms, and a new number.

    The index is the first whose cumulative weight exceeds `uniform` times the total; none has weight 0. Where the
    number lies within that weight's share is uniform again.
    """
    top = logs.amax(-1, keepdim=True)
    weights = (logs - top.masked_fill(top == -math.inf, 0.0)).double().exp()
    sums = weights.cumsum(-1)
    threshold = uniform[..., None] * sums[..., -1:]
    index = ((sums > threshold) & (weights > 0)).to(torch.int8).argmax(-1, keepdim=True)
    weight = weights.gather(-1, index)
    rest = (threshold - (sums.gather(-1, index) - weight)) / weight
    return index[..., 0], rest[..., 0].clamp(0.0, 1.0)


def check_parameter(name: str, value: Tensor, axes: int, like: Tensor | None = None) -> None:
    """Check for a floating tensor with at least its own axes, none of which is empty, on the device of another."""
    check_tensor(name, value, axes, like=like)
    if 0 in value.shape[value.dim() - axes :]:
        raise ValueError(f"{name}: expected no empty axis among the last {axes}, got shape {list(value.shape)}")


def look_up(values: Tensor, *index: Tensor, kept: int = 0) -> Tensor:
    """Entries `[..., *lead]` of values `[*lead or ones, ...]`, whose last axes but the `kept` ones are indexed."""
    lead = values.dim() - len(index) - kept
    places = [
        torch.arange(size, device=values.device).view(-1, *(1,) * (lead - 1 - axis))
        for axis, size in enumerate(values.shape[:lead])
    ]
    return values[(*places, *index)]
