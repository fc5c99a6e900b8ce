"""The most probable path of a chain whose variables are sharded over the ranks of a process group.

Max-plus messages go through the ranks like forward messages, and the state that a rank's path ends in comes back from
the next one. As in `schedules.overlapped_paths` ranks begin some steps early, where chains forget: if the message that
arrives has the bits of the one that was assumed, all messages are those of one walk, and so is the path.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import Lengths
from ..autograd.paths import log_weight
from ..operands import Operands, arithmetic_dtype
from ..rescues import report_boundaries
from ..schedules.overlapped_paths import differ, through
from ..viterbi import Path
from .exchange import Exchange
from .questions import begin, underived
from .shards import Shards
from .stretch import F64, Stretch


def viterbi(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    group: Any = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    one_matrix: bool | None = None,
) -> Path:
    """`logchain.viterbi` of chains whose variables are sharded: the same path, ties included, of this rank's variables.

    Args:
        x: log-potentials `[*B, v_r, c]` of this rank's variables. All arguments are those of `distributed.product`.
        bulk: one transition matrix for every step, or those that lead into this rank's variables.
        p0: initial weights, the same on every rank.
        group: a process group.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the numbers of variables of whole sequences.
        one_matrix: whether `bulk` is one matrix for every step.

    Returns:
        `Path(states, score)`: states int64 `[*B, v_r]` of this rank's variables, and the log-weight `[*B]` of the whole
        path, the same on all ranks. They have no derivative: taking one raises.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or on another, or differs between ranks.
        RuntimeError: a rank is gone or does not answer.
        NotImplementedError: a derivative is taken.

    Cost: that of `logchain.viterbi` for the rank's own shard where the chain forgets; otherwise ranks walk in turn.
    """
    exchange, shards, operands = begin("viterbi", x, bulk, p0, group, log_params, lengths, one_matrix)
    states, score = underived(lambda: _viterbi(exchange, shards, operands), operands)
    return Path(states, score.to(arithmetic_dtype(x, bulk, p0)))


def _viterbi(exchange: Exchange, shards: Shards, operands: Operands) -> tuple[Tensor, Tensor]:
    x, bulk, p0, ends, log_params = operands
    plain = Operands(x.detach(), bulk.detach(), p0.detach(), ends, log_params)
    stretch = Stretch(plain, shards.starts[exchange.rank], (False,) * 3, begins=shards.place == 0)
    with kernels.arithmetic_on(x):
        walks = _Walks(exchange, shards, stretch, ends)
        lost, unknown = walks.forward()
        states, before = walks.follow(lost)
    layout, lead = stretch.layout, stretch.chain.lead
    found = layout.states(states.reshape(*lead, states.shape[-1])).contiguous()

    def weight() -> Tensor | None:
        if shards.place is None:
            return None
        if before is None:
            inside = None if ends is None else ends.clamp(max=x.shape[-2])
            return log_weight(*plain[:3], found, inside, log_params)
        return _log_weight_behind(plain, layout.batched(before)[..., None], found, ends, shards.starts[exchange.rank])

    score = exchange.gather(found.shape[:-1], weight).sum(0)
    return found, score.masked_fill(layout.batched(unknown), torch.nan).to(x.device)


def _log_weight_behind(operands: Operands, before: Tensor, states: Tensor, ends: Tensor | None, start: int) -> Tensor:
    """The log-weight [*B] of the steps of paths [*B, v_r] from a state [*B, 1] before them; 0 where they have ended."""
    x, bulk, p0, _, log_params = operands
    nothing = x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    even = torch.full_like(p0, 0.0 if log_params else 1.0)
    inside = None if ends is None else (ends - start).clamp(0, x.shape[-2]) + 1
    reached = torch.ones_like(before[..., 0], dtype=torch.bool) if inside is None else inside > 1
    whole = torch.cat([torch.where(reached[..., None], before, 0), states], -1)
    return log_weight(torch.cat([nothing, x], -2), bulk, even, whole, inside, log_params)


class _Walks:
    """The walks of this rank's part of all sequences."""

    def __init__(self, exchange: Exchange, shards: Shards, stretch: Stretch, lengths: Tensor | None) -> None:
        self._exchange, self._filled, self._place, self._stretch = exchange, shards.filled, shards.place, stretch
        self._messages = kernels.path_messages(stretch.chain.x)
        self._kept: Any = None
        # whether sequences have variables on each rank that has some (places, g, m)
        everything = torch.full(stretch.grid[:2], shards.v, device="cpu")
        whole = everything if lengths is None else stretch.layout.sequences(lengths).cpu()
        self._reached = torch.stack([whole > shards.starts[rank] for rank in self._filled])

    def forward(self) -> tuple[Tensor, Tensor]:
        """Whether sequences are unknown or impossible, and which are unknown (g, m); all ranks have their messages."""
        assumed = self._begun_early()
        arrived = self._walked(range(len(self._filled) if assumed is not None else 1), assumed)
        for place in range(1, len(self._filled)):
            if assumed is not None:
                unlike = (arrived[place - 1] != assumed[place]).any(-1) & self._reached[place]
                if not unlike.any():
                    continue
                report_boundaries(unlike)
            entering = torch.zeros_like(arrived)
            entering[place] = arrived[place - 1]
            arrived[place] = self._walked([place], entering)[place]
        unknown = self._gathered(self._stretch.grid[:2], lambda: self._kept.unknown).any(0)
        ends_here = self._reached & ~torch.cat([self._reached[1:], torch.zeros_like(self._reached[:1])])
        impossible = ((arrived.amax(-1) == -torch.inf) & ends_here).any(0)
        return unknown | impossible, unknown

    def follow(self, lost: Tensor) -> tuple[Tensor, Tensor | None]:
        """The states (g, m, v_r) of this rank's variables, and that of the variable before them (g, m), if any.

        States are -1 behind a sequence's end and where it is `lost`.
        """
        chain, place = self._stretch.chain, self._place
        entered = int(place is not None and place > 0)
        states = torch.empty(*self._stretch.grid[:2], chain.v + entered, dtype=torch.int64, device=chain.x.device)
        given = torch.full(self._stretch.grid[:2], -1.0, dtype=F64, device="cpu")
        for at in reversed(range(len(self._filled))):

            def step(at: int = at, given: Tensor = given) -> Tensor | None:
                if place != at:
                    return None
                states[..., -1] = given
                self._kept.follow(states)
                return states[..., 0].double()

            before = self._gathered(self._stretch.grid[:2], step)[at]
            given = torch.where(self._reached[at], before, -1.0)
        states.masked_fill_(lost.to(states.device)[..., None], -1)
        return states[..., entered:], states[..., 0] if entered else None

    def _begun_early(self) -> Tensor | None:
        """The messages (places, g, m, c) that enter ranks, from their neighbours' last steps; None if some remember."""
        if len(self._filled) == 1:
            return None

        wanted = self._gathered((), lambda: torch.tensor(self._stretch.early(through, differ), device="cpu"))
        if not wanted.all():
            return None
        steps = int(wanted.max())

        def last_steps() -> Tensor:
            window = self._stretch.window(-min(steps, self._stretch.chain.v))
            uniform = torch.zeros(self._stretch.grid, dtype=F64, device=window.x.device)
            leaving: Tensor = self._messages(window, uniform).leaving
            return leaving

        return self._gathered(self._stretch.grid, last_steps).roll(1, 0)

    def _walked(self, places: Sequence[int], entering: Tensor | None) -> Tensor:
        """The messages (places, g, m, c) that leave these ranks, from those that enter."""

        def walk() -> Tensor | None:
            if self._place not in places:
                return None
            before = None if self._place == 0 or entering is None else entering[self._place]
            self._kept = self._messages(
                self._stretch.chain, None if before is None else before.to(self._stretch.chain.x.device)
            )
            leaving: Tensor = self._kept.leaving
            return leaving

        return self._gathered(self._stretch.grid, walk)

    def _gathered(self, shape: Sequence[int], compute: Callable[[], Tensor | None]) -> Tensor:
        """What each rank that has variables computes (places, *shape)."""
        return self._exchange.gather(shape, lambda: None if self._place is None else compute())[self._filled]
