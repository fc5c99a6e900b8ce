"""Matrices of a few diagonals: left-to-right models, alignments, CTC."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .semiring import LINEAR, Semiring
from .transition import Transition, check_parameter, look_up, with_entries


class Banded(Transition):
    r"""A matrix with entries on a few diagonals alone: `P[j - offset, j] = values[band, j]`.

    The column j of `values[band, j]` is the target, the state that a transition leads into, and not the state that it
    leads from: as in `scipy.sparse.dia_array`, a positive offset leads from state `j - offset` up to state j. Values
    without a source state, such as the first one of offset 1, are ignored and have gradient 0.

    Args:
        values: weights `[*B or ones, v-1 or 1, bands, c]`, or `[bands, c]`; logarithms with `log_params`.
        offsets: the diagonal of each band, different integers from -(c-1) to c-1.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or an offset is out of range or occurs twice.

    Cost of a step: `bands c` multiply-adds, in numbers with an exponent for each state, so that nothing underflows. On
    a CPU, a structure of 32 states or more and c / 16 bands or more is computed as a dense matrix if that is small
    compared with x: it takes less time.

    >>> Banded(torch.tensor([[0.9, 0.8, 1.0], [9.0, 0.1, 0.2]]), [0, 1]).to_dense()
    tensor([[0.9000, 0.1000, 0.0000],
            [0.0000, 0.8000, 0.2000],
            [0.0000, 0.0000, 1.0000]])

    State 0 is left with probability 0.1, state 1 with 0.2. Weights by the state that a transition leads from are moved
    to its target by `roll`: 0.1, which leads from state 0 to 1, is in column 1.

    >>> leave = torch.tensor([0.1, 0.2, 0.0])  # by source
    >>> Banded(torch.stack([1 - leave, leave.roll(1)]), [0, 1]).values
    tensor([[0.9000, 0.8000, 1.0000],
            [0.0000, 0.1000, 0.2000]])
    """

    axes = (2,)
    pattern: tuple[int, ...]

    def __init__(self, values: Tensor, offsets: Sequence[int]) -> None:
        check_parameter("values", values, 2)
        bands, c = values.shape[-2:]
        if not isinstance(offsets, Sequence) or any(isinstance(o, bool) or not isinstance(o, int) for o in offsets):
            raise TypeError(f"offsets: expected a sequence of integers, got {offsets!r}")
        if len(offsets) != bands:
            raise ValueError(f"offsets: expected one for each of {bands} bands of values, got {len(offsets)}")
        if len(set(offsets)) < bands or max(map(abs, offsets)) >= c:
            raise ValueError(f"offsets: expected different integers from {1 - c} to {c - 1}, got {list(offsets)}")
        super().__init__(values)
        self.states, self.pattern = c, tuple(offsets)

    @property
    def values(self) -> Tensor:
        """The weights `[..., bands, c]`."""
        return self.parameters[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The diagonal of each band."""
        return self.pattern

    @property
    def used(self) -> list[Tensor | None]:
        """The values with a source state."""
        return [self._sources()[1]]

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, shifted and multiplied for each band; see `Transition.apply`."""
        sources, inside = self._sources()
        values = torch.where(inside, self.values, semiring.zero)[..., None, :, :]
        shifted = message[..., sources]  # [*lead, rows, bands, c]
        return semiring.sum(semiring.times(torch.where(inside, shifted, semiring.zero), values), -2)

    def _dense(self, semiring: Semiring) -> Tensor:
        sources, inside = self._sources()
        places = sources * self.states + torch.arange(self.states, device=self.device)
        places = places.masked_fill(~inside, self.states**2)
        return with_entries(self.values.flatten(-2), places.flatten(), self.states, semiring.zero)

    def _sources(self) -> tuple[Tensor, Tensor]:
        """The state that each value leads from (bands, c), or any other, and whether it exists."""
        sources = torch.arange(self.states, device=self.device) - self._offsets[:, None]
        return sources % self.states, (sources >= 0) & (sources < self.states)

    @property
    def _offsets(self) -> Tensor:
        return torch.tensor(self.offsets, device=self.device)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        return self.values.shape[-2:].numel()

    @property
    def mT(self) -> "Banded":
        """The transposed matrices: `P[j, j - offset]` is in column j - offset of the band of -offset."""
        index = (torch.arange(self.states, device=self.device) + self._offsets[:, None]) % self.states
        values = self.values.gather(-1, index.expand_as(self.values))
        return Banded(values, [-offset for offset in self.offsets])

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, weight zero off the bands; see `Transition.entries`."""
        match = (target - source)[..., None] == self._offsets  # [..., bands]
        values = look_up(self.values, match.int().argmax(-1), target)
        return torch.where(match.any(-1), values, semiring.zero)
