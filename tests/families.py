"""The named families of chains on which every promise is checked, from dense ones to those that break shifted sums."""

from collections.abc import Callable
from typing import NamedTuple

import torch

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


class Chain(NamedTuple):
    """One problem: x [*B, v, c], bulk [*Bb, v-1 or 1, c, c], p0 [*Bp, c], and whether bulk and p0 are logarithms."""

    x: torch.Tensor
    bulk: torch.Tensor
    p0: torch.Tensor
    log_params: bool = False

    def to(self, dtype: torch.dtype) -> "Chain":
        return Chain(self.x.to(dtype), self.bulk.to(dtype), self.p0.to(dtype), self.log_params)

    def logs(self) -> "Chain":
        """The same chain with logarithmic parameters, rounded in the chain's own dtype."""
        if self.log_params:
            return self
        bulk, p0 = self.bulk.double().log(), self.p0.double().log()
        return Chain(self.x, bulk.to(self.bulk.dtype), p0.to(self.p0.dtype), True)


class Numbers:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


class Draw(Numbers):
    """Numbers and the sizes of one problem: batch [3, 2], a bulk for all sequences or for each."""

    def __init__(self, seed: int, n: int, t: int, v: int, c: int, each: bool):
        super().__init__(seed)
        self.v, self.c = v, c
        self.batch, self.bulk_batch = (n, t), (n, t) if each else (1, 1)

    def x(self, scale: float = 1.0) -> torch.Tensor:
        return scale * self.normal(*self.batch, self.v, self.c)

    def bulk(self, mask: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Random rows that sum to 1 on the mask, away from 0; rows without an entry stay 0."""
        weights = (0.1 + self.uniform(*self.bulk_batch, self.v - 1, self.c, self.c)) * mask
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)

    def p0(self) -> torch.Tensor:
        return torch.softmax(self.normal(*self.bulk_batch, self.c), -1)

    def start(self) -> torch.Tensor:
        return torch.eye(self.c, dtype=torch.float64)[0].expand(*self.bulk_batch, self.c).clone()

    def band(self, width: int) -> torch.Tensor:
        """1 from each state to itself and to the next `width` ones, 0 elsewhere."""
        ones = torch.ones(self.c, self.c, dtype=torch.float64)
        return ones.triu().tril(width)

    def __call__(self, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x(scale), self.bulk(), self.p0()


FAMILIES: dict[str, Callable[..., Chain]] = {}


def family(v: int = 17, c: int = 6, log_params: bool = False, **aliases: dict[str, int]) -> Callable:
    """Register a family under its function's name, and under each alias with other sizes."""

    def register(draw_chain: Callable) -> Callable:
        def build(defaults: dict[str, int]) -> Callable[..., Chain]:
            def make(dtype=F64, seed=0, each=False, log=False, **sizes: int) -> Chain:
                chain = Chain(*draw_chain(Draw(seed, **(defaults | sizes), each=each)), log_params).to(dtype)
                return chain.logs() if log else chain

            return make

        defaults = {"n": 3, "t": 2, "v": v, "c": c}
        for name, sizes in {draw_chain.__name__: {}, **aliases}.items():
            FAMILIES[name] = build(defaults | sizes)
        return FAMILIES[draw_chain.__name__]

    return register


# families that take long to check
LARGE = {
    "v600": {"n": 1, "t": 1, "v": 600, "c": 3},
    "n40": {"n": 20, "t": 2, "v": 9, "c": 20},
    "c301": {"n": 1, "t": 1, "v": 2, "c": 301},
}


@family(v1={"v": 1}, v2={"v": 2}, v3={"v": 3}, v5={"v": 5}, c1={"c": 1}, **LARGE)
def dense(draw):
    return draw()


@family()
def peaked(draw):
    return draw(300.0)


@family()
def sharp(draw):
    return draw(20.0)


def misaligned(draw, depth):
    """Odd steps fall from 0 to -depth along the states, even steps climb back: every path pays the depth half-way."""
    x = 0.1 * draw.x()
    slope = -depth * torch.linspace(0, 1, draw.c, dtype=torch.float64)
    noise = 0.1 * draw.normal(*draw.bulk_batch, draw.v - 1, draw.c, draw.c)
    down = slope.expand(draw.c, draw.c)
    up = slope.flip(0)[:, None].expand(draw.c, draw.c)
    steps = [down if i % 2 else up for i in range(draw.v - 1)]
    bulk = noise + torch.stack(steps) if steps else noise
    return x, bulk, slope.expand(*draw.bulk_batch, draw.c) + 0.1 * draw.normal(*draw.bulk_batch, draw.c)


@family(log_params=True, detour2={"v": 2, "c": 2})
def detour(draw):
    return misaligned(draw, 200.0)


@family(log_params=True)
def abyss(draw):
    return misaligned(draw, 1000.0)


@family()
def detour_linear(draw):
    x, bulk, p0 = misaligned(draw, 80.0)
    return x, bulk.exp(), p0.exp()


@family(c=12)
def left_to_right(draw):
    return draw.x(20.0), draw.bulk(draw.band(1)), draw.start()


@family(c=16, v=24)
def bakis_jump(draw):
    """Stay, advance or skip, with evidence that jumps to any state and costs 25 nats for each state it is missed by."""
    target = torch.randint(draw.c, (*draw.batch, draw.v, 1), generator=draw.generator)
    evidence = -25.0 * (torch.arange(draw.c) - target).abs()
    return evidence + draw.x(), draw.bulk(draw.band(2)), draw.start()


@family(c=16)
def banded(draw):
    return draw.x(20.0), draw.bulk(draw.band(3)), draw.p0()


@family(v=5)
def impossible(draw):
    """Two groups of states that never mix: the start is in the first, the end must be in the second."""
    first = torch.arange(draw.c) < draw.c // 2
    x = draw.x()
    x[..., -1, first] = -INF
    return x, draw.bulk((first[:, None] == first).double()), draw.p0() * first


@family(v=5)
def one_dead(draw):
    """Step 2 of the first sequence has no state at all; the others are ordinary."""
    x, bulk, p0 = draw()
    x.flatten(0, 1)[0, min(2, draw.v - 1)] = -INF
    return x, bulk, p0


@family()
def tiny_transitions(draw):
    """Entries near 1e-36, on every way out of every third step."""
    x, bulk, p0 = draw()
    tiny = draw.uniform(*bulk.shape) < 0.5
    tiny[..., ::3, :, :] = True
    return x, torch.where(tiny, 1e-36 * (1 + draw.uniform(*bulk.shape)), bulk), p0


@family()
def offsets(draw):
    x, bulk, p0 = draw()
    return x + 1e4 * (1 - 2 * (torch.arange(draw.v) % 3 % 2))[:, None] + 100.0 * torch.arange(draw.v)[:, None], bulk, p0


@family(c=20)
def sparse(draw):
    """70 % zeros in bulk and some in x."""
    x, bulk, p0 = draw()
    x[draw.uniform(*x.shape) < 0.1] = -INF
    return x, bulk * (draw.uniform(*bulk.shape) < 0.3), p0


@family(log_params=True)
def log_far(draw):
    """Logarithms down to -500, where float32 has no linear number left."""
    bulk = -500.0 * draw.uniform(*draw.bulk_batch, draw.v - 1, draw.c, draw.c)
    return draw.x(), bulk, -500.0 * draw.uniform(*draw.bulk_batch, draw.c)


@family(log_params=True, far_start1={"v": 1})
def far_start(draw):
    """The only starts that x allows lie 200 nats below the one that it forbids."""
    x, bulk, p0 = draw()
    x[..., 0, 0] = -INF
    return x, bulk.log(), p0 - 200.0 * (torch.arange(draw.c) > 0)


@family()
def one_hot(draw):
    return draw.x(), draw.bulk(), draw.start()


def small(seed: int, zeros: float = 0.0, v: int = 5, c: int = 3) -> Chain:
    draw = Draw(seed, 1, 1, v, c, False)
    x, bulk, p0 = draw.normal(v, c), draw.bulk()[0, 0], draw.p0()[0, 0]
    x[draw.uniform(*x.shape) < zeros / 2] = -INF
    return Chain(x, bulk * (draw.uniform(*bulk.shape) >= zeros), p0 * (draw.uniform(*p0.shape) >= zeros))
