"""Paths drawn from the posterior of a chain whose variables are sharded over the ranks of a process group.

Forward messages are found as for `product`. Then the last rank draws its states, and with them that of the variable
before its first, from the message that entered; there the rank before it continues, and so on.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import Lengths
from ..sample import check_draws
from ..schedules.ranks import Strategy
from .exchange import Exchange
from .questions import begin
from .sharded import Sharded
from .shards import Shards
from .stretch import Stretch


def sample(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    num_samples: int,
    *,
    generator: torch.Generator | None = None,
    group: Any = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    one_matrix: bool | None = None,
    strategy: Strategy = "auto",
) -> Tensor:
    """`logchain.sample` of chains whose variables are sharded: the states of this rank's variables in each path.

    Args:
        x: log-potentials `[*B, v_r, c]` of this rank's variables. All arguments that `distributed.product` has too are
            those.
        bulk: one transition matrix for every step, or those that lead into this rank's variables.
        p0: initial weights, the same on every rank.
        num_samples: the number of paths of each sequence.
        generator: the source of randomness of the first rank, from which every rank gets a seed of its own; those of
            other ranks are not read. Equal states of it give equal paths for equal shards.
        group: a process group.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the numbers of variables of whole sequences.
        one_matrix: whether `bulk` is one matrix for every step.
        strategy: how the chain is cut.

    Returns:
        int64 `[num_samples, *B, v_r]`, -1 for no state, as of `logchain.sample`.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or on another, or differs between ranks.
        RuntimeError: a rank is gone or does not answer.

    Cost: forward messages as for `distributed.product`, without meeting in the middle; draws of the ranks in turn, for
    which a rank sends `num_samples` numbers for each sequence.
    """
    exchange, shards, operands = begin(
        "sample", x, bulk, p0, group, log_params, lengths, one_matrix, strategy, {"num_samples": num_samples},
        lambda: check_draws(num_samples, generator, x),
    )  # fmt: skip
    x, bulk, p0, ends, _ = operands
    plain = operands._replace(x=x.detach(), bulk=bulk.detach(), p0=p0.detach())
    seeds = exchange.gather((), lambda: torch.randint(2**52, (), generator=generator, device=x.device).double())
    own = torch.Generator(x.device).manual_seed(int(seeds[0]) + exchange.rank)
    sharded = Sharded(exchange, shards._replace(needs=(True, False, False)), plain, strategy, keep=True, turns=False)
    sharded.forward()
    drawn = [_drawn(exchange, shards, stretch, log_norm, num_samples, own) for stretch, log_norm in sharded.stretches]
    return torch.cat(drawn, 1) if len(drawn) > 1 else drawn[0]


def _drawn(
    exchange: Exchange, shards: Shards, stretch: Stretch, log_norm: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """The states [count, *B, v_r] of a block."""
    (g, m, _), chain, place = stretch.grid, stretch.chain, shards.place
    entered = int(place is not None and place > 0)
    states = torch.empty(count, g, m, chain.v + entered, dtype=torch.int64, device=chain.x.device)
    given = torch.full((count, g, m), -1.0, dtype=torch.float64, device="cpu")

    def draw(given: Tensor) -> Tensor:
        numbers = states.view(torch.float64)
        numbers.uniform_(generator=generator)
        goes_on = (given >= 0).to(states.device)
        numbers[..., -1] = torch.where(goes_on, -1 - given.to(states.device), numbers[..., -1])
        steps = chain
        if entered:  # the message that entered is that of a variable
            x = chain.x[:1].expand(chain.v + 1, *chain.x.shape[1:])
            steps = replace(chain, x=x, ends=None if chain.ends is None else chain.ends + 1)
        kernels.draw_kernels(chain.x).draw(steps, stretch.kept._replace(log_norm=log_norm), states)
        first = states[..., 0]
        return (first if stretch.reached is None else torch.where(stretch.reached, first, -1)).double()

    with kernels.arithmetic_on(chain.x):
        for at in reversed(range(len(shards.filled))):
            before = exchange.gather((count, g, m), lambda: draw(given) if place == at else None)  # noqa: B023
            given = before[shards.filled[at]]
    rest = states[..., entered:]
    return stretch.layout.states(rest.reshape(count, *chain.lead, rest.shape[-1])).contiguous()
