"""The operands of chains whose states have few transitions each, bands or arcs, as the kernels read them.

Transitions lie in rows: a row is a state with those that lead to it, or out of it. For arcs rows are sorted by their
numbers of transitions, largest first, so that neighbours finish together.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..structured import Arcs, Structured, places
from . import launch


class Rows(NamedTuple):
    """The transitions of each state, int32. Bands have only `first`, their offsets, and their number `bands`.

    order (c): the state of a row. first, degree (c): the place of the row's first transition, and their number.
    other, entry (arcs): the state at the other end, and where its parameter is, in the order of rows' states.
    """

    first: Tensor
    order: Tensor | None = None
    degree: Tensor | None = None
    other: Tensor | None = None
    entry: Tensor | None = None
    bands: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in the order of the kernels."""
        return self.order, self.first, self.degree, self.other, self.entry


class Operands(NamedTuple):
    """A batch of n chains.

    `x`, `parameter` and `p0` have any strides and float types; sequence q has its own from `places[q]` (n, 3) on, the
    distances from the beginnings of the three. `ends` (n), int64, or None.
    """

    x: Tensor
    parameter: Tensor
    p0: Tensor
    places: Tensor
    ends: Tensor | None
    log_params: bool
    dtype: torch.dtype
    banded: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, v and c."""
        return len(self.places), self.x.shape[-2], self.x.shape[-1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of x from step to step and between states, and those of the parameter's steps, bands and entries."""
        step, *own = self.parameter.stride()[-3 if self.banded else -2 :]
        steps = self.parameter.shape[-3 if self.banded else -2]
        return *self.x.stride()[-2:], step if steps > 1 else 0, *(own if self.banded else (0, *own))


def operands(chain: Structured) -> Operands:
    """The chain as the kernels read it; nothing is copied."""
    (parameter,), batch = chain.parameters, chain.batch
    at = torch.stack([places(tensor, batch) for tensor in (chain.x, parameter, chain.p0)], 1)
    ends = None if chain.ends is None else chain.ends.expand(batch).reshape(-1).contiguous()
    banded = not isinstance(chain.pattern, Arcs)
    return Operands(chain.x, parameter, chain.p0, at, ends, chain.log_params, chain.dtype, banded)


def banded_rows(offsets: tuple[int, ...], device: torch.device) -> Rows:
    """The rows of a state space in which bands stand, of states with those that lead to them as well as out of them."""
    first = torch.tensor(offsets, dtype=torch.int32)
    if device.type == "cuda":  # from pinned memory nothing waits for the device
        first = first.pin_memory().to(device=device, non_blocking=True)
    return Rows(first, bands=len(offsets))


def arc_rows(own: Tensor, other: Tensor, c: int, *, is_sorted: bool) -> Rows:
    """The rows of arcs by their states `own`, of which arcs are sorted by or not. Nothing waits for the device."""
    entry = torch.arange(len(own), device=own.device) if is_sorted else own.argsort(stable=True)
    bounds = torch.searchsorted(own[entry], torch.arange(c + 1, device=own.device))
    degree = bounds.diff()
    order = degree.argsort(descending=True, stable=True)
    return Rows(bounds[order].int(), order.int(), degree[order].int(), other[entry].int(), entry.int())


def sizes(c: int, dtype: torch.dtype) -> dict[str, int]:
    """The states that a program computes at a time, and its warps; with these no register is spilled."""
    each = 32 if dtype == torch.float64 else 64
    block = min(16 * each, triton.next_power_of_2(c))
    return {"BLOCK": block} | launch.all_registers(max(1, block // each))
