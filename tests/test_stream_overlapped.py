"""A long piece of one sequence in segments that begin early: the same filter as step after step, verified."""

import math

import pytest
import torch

import logchain
from logchain import kernels
from logchain.schedules import overlapped as schedule
from logchain.streams import filter as filters
from logchain.streams import overlapped

pytestmark = pytest.mark.skipif(not kernels.in_c(torch.empty(0)), reason="pieces are walked so by the C loops")

F32, F64 = torch.float32, torch.float64
V, PIECES = 400, (1, 160, 239)


def sequence(kind: str, c: int, batch: tuple[int, ...], each: bool, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(c)
    x = torch.randn(*batch, V, c, generator=generator, dtype=dtype)
    bulk = torch.rand(*(1 for _ in batch), V if each else 1, c, c, generator=generator, dtype=dtype)
    if kind == "never":
        x, bulk = 0.01 * x, torch.eye(c, dtype=dtype) + 0 * bulk
    if kind == "late":
        x, bulk = 0.1 * x, torch.eye(c, dtype=dtype) + 0.002 * bulk
    if kind == "deep":
        x = 300 * x
    if kind == "dies":
        x[..., 300, :] = -math.inf
    return x, bulk, torch.arange(1.0, c + 1, dtype=dtype).pow(2)


def run(x, bulk, p0, *, log_params=False, **options):
    """All results of a stream over three pieces, the last two of them long."""
    each = bulk.shape[-3] > 1
    bulk, p0 = (bulk.log(), p0.log()) if log_params else (bulk, p0)
    stream = logchain.Stream(None if each else bulk, p0, log_params=log_params, **options)
    results, start = [], 0
    for size in PIECES:
        matrices = (bulk[..., start : start + size, :, :],) if each else ()
        results += [part for part in stream.update(x[..., start : start + size, :], *matrices) if part is not None]
        start += size
    if options.get("lag") or options.get("viterbi"):
        results += [part for part in stream.flush()[1:] if part is not None]
    return [*results, stream.filtered, stream.log_norm]


def assert_same(found, expected, c, dtype):
    u = torch.finfo(dtype).eps / 2
    for one, other in zip(found, expected, strict=True):
        room = 2 * V * (c + 8) * u
        size = other.abs() * 4 * u if other.dim() == 0 else 0
        close = (one == other) | ((one - other).abs() <= room + size)
        assert close.all(), (one - other).abs().max()


@pytest.fixture
def cut(monkeypatch):
    """Cuts pieces of 100 variables and more into so many segments, which begin so many steps early if that is given."""

    def into(segments, early=None):
        monkeypatch.setattr(filters.overlapped, "segments_of", lambda x, *_: segments if x.shape[-2] >= 100 else 1)
        if early is not None:
            monkeypatch.setattr(schedule, "steps_to_forget", lambda *_: early)

    into(1)
    return into


@pytest.mark.parametrize("early", [None, 2, 30], ids=["found out", "too late", "early"])
@pytest.mark.parametrize("log_params", [False, True], ids=["linear", "logs"])
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("kind", ["plain", "never", "late", "deep", "dies"])
def test_results_are_those_of_whole_pieces(kind, each, log_params, early, cut):
    for dtype, c, batch, segments in ((F32, 5, (), 3), (F64, 17, (1,), 7), (F32, 33, (1, 1), 79)):
        operands = sequence(kind, c, batch, each, dtype)
        cut(1)
        expected = run(*operands, log_params=log_params)
        cut(segments, early)
        assert_same(run(*operands, log_params=log_params), expected, c, dtype)


@pytest.mark.parametrize("options", [{"lag": 5}, {"viterbi": True}, {"filtered": False}], ids=str)
def test_other_questions_are_answered_beside(options, cut):
    operands = sequence("plain", 5, (), False, F32)
    expected = run(*operands, **options)
    cut(4)
    with torch.device("meta"):  # what lies on the CPU stays there
        found = run(*operands, **options)
    assert_same(found, expected, 5, F32)


def test_boundaries_that_are_refused_are_counted(cut):
    operands = sequence("never", 5, (), False, F32)
    cut(4, early=10)
    with logchain.rescues() as seen:
        run(*operands)
    assert seen.boundaries > 0


def test_a_long_piece_is_cut_even_after_pieces_that_were_not(monkeypatch):
    taken = []
    walk = overlapped.walk
    monkeypatch.setattr(overlapped, "walk", lambda *args: taken.append(args[0].x.shape[-2]) or walk(*args))
    stream = logchain.Stream(torch.rand(1, 1024, 1024), torch.ones(1024))
    for size in (3, 4, 700):
        stream.update(torch.randn(size, 1024))
    assert taken == [700]


def test_infinite_weights_give_what_one_walk_gives(cut):
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(400, 4, generator=generator), torch.rand(400, 4, 4, generator=generator)
    bulk[200, 1, 2] = torch.inf
    updates = []
    for segments in (1, 4):
        cut(segments, 10)
        updates.append(logchain.Stream(None, torch.ones(4)).update(x, bulk))
    assert updates[0].log_norm == torch.inf
    for one, other in zip(*updates, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
