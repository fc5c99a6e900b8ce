"""A random search for undetected underflow: small chains near the limits of a format, against float64 log-sum-exp."""

from typing import NamedTuple

import numpy as np
import torch

import logchain
from tests.contract import Truth, assert_contract
from tests.families import Chain

SEQUENCES = 64

# axes of as many sequences, of which matrices own some
BATCHES = [(64,), (64,), (8, 8), (4, 4, 4)]

# nats and decades between which float64 has its edges, over those of float32
WIDER = 8

# how far below the largest entry emissions lie: about 75 nats is where they are raised, 104 where float32 ends
NATS = [0, 0, 3, 17, 18, 20, 37, 50, 56, 69, 74, 75, 76, 87, 90, 104, 150, 300, np.inf]
DECADES = [0, 0, -3, -8, -12, -16, -17, -20, -30, -38, -44, 3, 5, 12, 19, 25, 30, 38]


class Drawn(NamedTuple):
    """Chains, and the steps of each sequence or None."""

    chain: Chain
    lengths: torch.Tensor | None


def search(seed: int, draws: int) -> np.ndarray:
    """Judge a number of draws, alternately in float32 and float64; the sums of `assert_within_bounds`."""
    rows = []
    for number in range(draws):
        drawn = draw(np.random.default_rng((seed, number)), (torch.float32, torch.float64)[number % 2])
        rows.append(assert_within_bounds(drawn, f"{seed} {number}", strategy="sequential"))
    return np.sum(rows, 0)


def draw(r: np.random.Generator, dtype: torch.dtype) -> Drawn:
    """Chains of one size, of which most are near the edges of the format."""
    batch = BATCHES[r.integers(len(BATCHES))]
    c = int(r.integers(1, 10)) if r.random() < 0.95 else int(r.choice([12, 16, 17, 40]))
    v = int(r.integers(1, 13)) if c < 10 else int(r.integers(1, 6))
    wider = WIDER if dtype == torch.float64 and r.random() < 0.8 else 1
    own = tuple(size if r.random() < 0.4 else 1 for size in batch)
    if r.random() < 0.5:
        x, bulk = _detours(r, batch, min(v, 6), c, wider)
    else:
        x, bulk = (
            _emissions(r, (*batch, v, c), wider),
            _matrices(r, (*own, 1 if r.random() < 0.3 else v - 1, c, c), wider),
        )
    p0 = _weights(r, (*(size if r.random() < 0.5 else 1 for size in batch), c), wider)
    largest = float(torch.finfo(dtype).max) * 0.9
    chain = Chain(
        *(torch.from_numpy(array).to(dtype) for array in (x, np.minimum(bulk, largest), np.minimum(p0, largest)))
    )
    if r.random() < 0.25:
        chain = chain.logs()
        stretch = float(r.choice([1, 1, 3, 20]))
        chain = chain._replace(bulk=chain.bulk * stretch, p0=chain.p0 * stretch)
    lengths = torch.from_numpy(r.integers(1, x.shape[-2] + 1, batch)) if r.random() < 0.2 else None
    return Drawn(chain, lengths)


def _emissions(r: np.random.Generator, shape: tuple[int, ...], wider: int) -> np.ndarray:
    kind = r.choice(["mild", "huge", "mostly equal", "levels", "of many sizes"], p=[0.35, 0.15, 0.2, 0.2, 0.1])
    if kind == "mild":
        x = r.normal(size=shape) * r.choice([0.3, 2, 7, 14, 25]) * wider
    elif kind == "huge":
        x = r.normal(size=shape) * r.choice([50, 90, 150, 300, 1e3, 1e5])
    elif kind == "mostly equal":
        low = r.choice([15, 40])
        x = np.where(r.random(shape) < r.choice([0.1, 0.4]), -r.uniform(low, low + 70, shape), 0) * wider
    elif kind == "levels":
        x = -r.choice(r.choice(NATS, r.integers(2, 5)), shape) * wider
    else:
        x = r.normal(size=shape) * 10 ** r.uniform(-2, 3, (*shape[:-1], 1))
    if r.random() < 0.3:
        x = np.where(r.random(shape) < r.choice([0.03, 0.25, 0.6]), -np.inf, x)
    if r.random() < 0.2:
        x = x + r.normal(size=(*shape[:-1], 1)) * 1e4
    return x


def _matrices(r: np.random.Generator, shape: tuple[int, ...], wider: int) -> np.ndarray:
    kind = r.choice(["dense", "spread", "levels", "far from 1", "two sizes"], p=[0.3, 0.3, 0.15, 0.1, 0.15])
    found = r.random(shape)
    if kind == "spread":
        low, high = [(-8, 0), (-12, 0), (-20, 0), (-37, 0), (-44, 38), (-2, 30)][r.integers(6)]
        found = 10 ** (r.uniform(low, high, shape) * wider)
    elif kind == "levels":
        found = _levels(r, shape, wider)
    elif kind == "far from 1":
        found = found * 10 ** (r.uniform(-36, 37, (*shape[:-2], 1, 1)) * wider)
    elif kind == "two sizes":
        found = found * 10.0 ** (r.choice([0, -10, -18, -30], shape, p=[0.4, 0.2, 0.2, 0.2]) * wider)
    return found * _pattern(r, shape)


def _levels(r: np.random.Generator, shape: tuple[int, ...], wider: int) -> np.ndarray:
    decades = np.clip(r.choice(r.choice(DECADES, r.integers(1, 4)), shape) * wider, -323.0, 308.0)
    return 10.0**decades * r.uniform(0.5, 1, shape)


def _pattern(r: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ones, and zeros where a matrix has structure."""
    c, kind = (
        shape[-1],
        r.choice(["full", "triangular", "banded", "blocks", "hub", "random"], p=[0.3, 0.15, 0.15, 0.1, 0.1, 0.2]),
    )
    i, j = np.indices((c, c))
    ones = np.ones(shape)
    if kind == "triangular":
        ones *= i <= j
    elif kind == "banded":
        ones *= (i <= j) & (j <= i + 1)
    elif kind == "blocks":
        ones *= i // 2 == j // 2
    elif kind == "hub":
        hub = r.integers(c)
        ones *= (i == j) | (i == hub) | (j == hub)
    elif kind == "random":
        ones *= r.random(shape) < r.choice([0.2, 0.5, 0.8])
    if r.random() < 0.1:
        ones[..., r.integers(c), :] = 0
    return ones


def _weights(r: np.random.Generator, shape: tuple[int, ...], wider: int) -> np.ndarray:
    kind = r.choice(["dense", "spread", "one state", "some states"], p=[0.4, 0.25, 0.2, 0.15])
    p0 = r.random(shape)
    if kind == "spread":
        p0 = 10 ** (r.uniform(-44, 38, shape) * wider)
    elif kind == "one state":
        p0 = p0 * (np.arange(shape[-1]) == r.integers(shape[-1]))
    elif kind == "some states":
        p0 = p0 * (r.random(shape) < 0.5)
    return p0


def _detours(
    r: np.random.Generator, batch: tuple[int, ...], v: int, c: int, wider: int
) -> tuple[np.ndarray, np.ndarray]:
    """Few levels and many zeros: what is lost at one step is all that is left at a later one."""
    x = -r.choice(r.choice(NATS, 6), (*batch, v, c)) * wider
    shape = (*batch, 1 if r.random() < 0.3 else v - 1, c, c)
    return x, _levels(r, shape, wider) * (r.random(shape) < r.choice([0.3, 0.5, 0.7]))


def assert_within_bounds(drawn: Drawn, name: str, device: str = "cpu", **options) -> np.ndarray:
    """Value and gradients keep the contract; the numbers of sequences, and of possible and recomputed ones."""
    with np.errstate(all="ignore"), logchain.rescues() as seen:
        truth = Truth(drawn.chain, drawn.lengths, edges=True)
        try:
            assert_contract(drawn.chain, drawn.lengths, truth=truth, device=device, **options)
        except AssertionError as error:
            raise AssertionError(f"draw {name}: {error}") from error
    return np.array([truth.log_norm.size, np.isfinite(truth.log_norm).sum(), seen.sequences])
