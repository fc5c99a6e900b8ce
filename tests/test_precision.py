"""Chains of which float32 sums would lose something in each step, the same each time: float64 ones are taken."""

import numpy as np
import pytest
import torch

import logchain
from logchain import Stream
from tests.contract import Truth, assert_contract, assert_values, ulp
from tests.families import Chain

pytest.importorskip("numba")
from logchain.kernels import native_chain, native_precision
from logchain.kernels.chain import Chain as Operands


def stay(c: int) -> torch.Tensor:
    return torch.eye(c)


def cycle(c: int) -> torch.Tensor:
    return torch.eye(c).roll(1, 1)


def blocks(c: int) -> torch.Tensor:
    """Two groups of states, every other one, in which all is likely."""
    group = torch.arange(c) % 2
    return (group[:, None] == group).float()


MATRICES = {"stay": stay, "cycle": cycle, "blocks": blocks}


def chain(kind: str, v: int, c: int, *, own=False, lead=(1,), spread=0.01, seldom=3e-8, seed=0) -> Chain:
    """`seldom`: the largest weight of what is not of its kind."""
    draw = torch.Generator().manual_seed(seed)
    likely = MATRICES[kind](c) * (0.5 + torch.rand(c, c, generator=draw) if kind == "blocks" else 1.0)
    weights = likely + seldom * torch.rand(*lead[:1], v - 1 if own else 1, c, c, generator=draw)
    x = spread * torch.randn(*lead, v, c, generator=draw)
    bulk = weights / weights.sum(-1, keepdim=True)
    return Chain(x, bulk if len(lead) == 1 else bulk[:, None], torch.rand(c, generator=draw))


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("own", [False, True], ids=["one", "own"])
@pytest.mark.parametrize("kind", MATRICES)
def test_contract(kind, own, spread):
    assert_contract(chain(kind, 1000, 40, own=own, spread=spread))


@pytest.mark.parametrize("kind", MATRICES)
def test_long_chains(kind):
    assert_contract(chain(kind, 10_000, 16))


@pytest.mark.parametrize("seldom", [1e-7, 1e-6, 1e-5])
def test_what_is_seldom_is_not_lost(seldom):
    assert_contract(chain("cycle", 2000, 64, seldom=seldom), wanted="x")


def peaked(c: int) -> torch.Tensor:
    return torch.softmax(5 * torch.randn(c, c, generator=torch.Generator().manual_seed(3)), -1)


def smoothed(c: int) -> torch.Tensor:
    """A few transitions of each state, and a little of all others."""
    draw = torch.Generator().manual_seed(3)
    likely = sum(torch.eye(c)[torch.randperm(c, generator=draw)] for _ in range(3)) / 3 + 3e-8
    return likely / likely.sum(-1, keepdim=True)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("matrix", [peaked, smoothed])
def test_entries_that_are_small_together(matrix, m, log):
    """States mix, but a sum of two hundred terms has many that are too small for its float32."""
    x = torch.zeros(m, 400, 200)
    given = Chain(x, matrix(200)[None, None], torch.rand(200, generator=torch.Generator().manual_seed(4)))
    found = logchain.product(*(given.logs() if log else given)[:3], log_params=log)
    truth = logchain.product(*(part.double() for part in (given.logs() if log else given)[:3]), log_params=log)
    bound = ulp(truth.numpy(), torch.float32) + 2.0**-20 * 400**0.5
    assert ((found.double() - truth).abs().numpy() <= bound).all()


@pytest.mark.parametrize("c", [20, 200])
def test_rows_that_sum_nearly_to_one(c):
    """Without emissions the message would stay the same, and how far the sums are from 1 would be lost."""
    bulk = 0.9 * torch.eye(c) + 0.1 / (c - 1) * (1 - torch.eye(c))
    v = 100_000 // c * 20
    found = logchain.product(torch.zeros(1, v, c), bulk[None, None], torch.full((c,), 1 / c))
    truth = logchain.product(torch.zeros(1, v, c).double(), bulk[None, None].double(), torch.full((c,), 1 / c).double())
    assert ((found.double() - truth).abs().numpy() <= ulp(truth.numpy(), torch.float32) + 2.0**-20 * v**0.5).all()


def scales(c: int) -> torch.Tensor:
    """Two groups of states that tend to stay, and are left much less often than states are."""
    group = torch.arange(c) % 2
    same = (group[:, None] == group).float()
    weights = 0.99 * torch.eye(c) + 0.01 * same / same.sum(-1) + 1e-8 * torch.rand(c, c)
    return weights / weights.sum(-1, keepdim=True)


def test_groups_are_found_behind_states_that_stay():
    assert widened(scales(16)[None], v=2000, n=1, log_params=False, dtype=torch.float32)
    assert widened(scales(16).log()[None], v=2000, n=1, log_params=True, dtype=torch.float32)


@pytest.mark.parametrize("period", [2, 3, 7])
def test_turns_are_found(period):
    c = 21
    turn = torch.arange(c) % period
    matrix = ((turn[:, None] + 1) % period == turn).float() * random_rows(c) + 1e-8
    assert widened(matrix[None], v=200, n=1, log_params=False, dtype=torch.float32)


def test_states_of_no_influence_are_not_looked_at():
    """One that leads nowhere, and one that leads to the others and is not returned to."""
    matrix = random_rows(16)
    matrix[3], matrix[:, 5] = 0.0, 0.0
    assert not widened(matrix[None], log_params=False, dtype=torch.float32)


@pytest.mark.parametrize("m", [1, 3, 4, 6])
@pytest.mark.parametrize("c", [9, 16, 17, 23, 33])
def test_sums_in_float64(c, m):
    """Vectors and what is left of them, groups of sequences and what is left of those."""
    own = chain("cycle", 200, c, lead=(2, m), own=True, spread=1.0)
    one = chain("stay", 200, c, lead=(2, m), spread=1.0).logs()
    assert widened(own.bulk[0, 0], v=200, log_params=False, dtype=torch.float32)
    assert widened(one.bulk[0, 0], v=200, log_params=True, dtype=torch.float32)
    assert_contract(own)
    assert_contract(one)


def test_gradients_are_not_torchs(monkeypatch):
    given = chain("cycle", 4000, 40)
    monkeypatch.setattr(native_chain, "_WIDE", 1)
    assert_contract(given)


def whole(given: Chain) -> tuple[np.ndarray, np.ndarray]:
    """The log-partition of a chain in float64, and how far a stream's may lie from it."""
    log_norm = logchain.product(given.x.double(), given.bulk.double(), given.p0.double()).numpy()
    return log_norm, ulp(log_norm, torch.float64) + 2.0**-20 * given.x.shape[-2] ** 0.5


@pytest.mark.parametrize("size", [25, 500])
def test_streams(size):
    given = chain("cycle", 20_000, 16)
    stream = Stream(given.bulk, given.p0)
    for piece in given.x.split(size, -2):
        stream.update(piece)
    assert_values(stream.log_norm, *whole(given))


def test_stream_whose_matrix_changes():
    """How exact sums have to be is looked at again where the matrix was written to."""
    given, c = chain("cycle", 4000, 64), 64
    bulk = torch.full_like(given.bulk, 1 / c)
    stream = Stream(bulk, given.p0)
    stream.update(given.x[:, :1])
    bulk.copy_(given.bulk)
    for piece in given.x[:, 1:].split(500, -2):
        stream.update(piece)
    assert_values(stream.log_norm, *whole(given))


def left_to_right(c):
    return torch.eye(c) + torch.eye(c).roll(1, 1).triu()


def random_rows(c):
    return 0.01 + torch.rand(c, c, generator=torch.Generator().manual_seed(1))


def sticky(c):
    return 0.99 * torch.eye(c) + 0.01 / c


def band(c):
    return (torch.ones(c, c).triu(-2) - torch.ones(c, c).triu(3)) * random_rows(c)


def widened(bulk: torch.Tensor, v=4000, n=8, **options) -> bool:
    """Of matrices (s, c, c)."""
    c = bulk.shape[-1]
    return native_precision.needs_float64(Operands(torch.zeros(v, n, c), bulk, torch.ones(c), None, **options))


@pytest.mark.parametrize("matrix", [left_to_right, random_rows, sticky, band, torch.zeros_like])
def test_states_that_mix_are_summed_in_float32(matrix):
    matrix = matrix(torch.ones(16, 16) if matrix is torch.zeros_like else 16)
    options = {"log_params": False, "dtype": torch.float32}
    assert not widened(matrix[None], **options)
    assert not widened(matrix.expand(3999, 16, 16), **options)
    assert not widened(matrix.log()[None], log_params=True, dtype=torch.float32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_looked_at(value):
    matrix = random_rows(16)
    matrix[3, 5] = value
    assert not widened(matrix[None], log_params=False, dtype=torch.float32)


def test_one_set_is_enough():
    bulk = torch.stack([random_rows(16), stay(16)])[None]
    x = torch.zeros(4000, 2, 4, 16)
    given = Operands(x, bulk, torch.ones(16), None, False, torch.float32)
    assert native_precision.needs_float64(given)


def test_one_part_is_enough():
    """Steps that mix may come first."""
    bulk = torch.cat([random_rows(16).expand(2000, 16, 16), stay(16).expand(2000, 16, 16)])
    assert widened(bulk, v=4001, log_params=False, dtype=torch.float32)
    assert widened(bulk.log(), v=4001, log_params=True, dtype=torch.float32)


def test_float64_stays():
    given = chain("cycle", 2000, 16)
    assert not widened(given.bulk[0].double(), log_params=False, dtype=torch.float64)
    found = logchain.product(given.x.double(), given.bulk.double(), given.p0.double())
    truth = Truth(given.to(torch.float64))
    assert (np.abs(found.numpy() - truth.log_norm) <= truth.value_bound()).all()
