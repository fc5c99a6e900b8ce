"""A stream goes on from its saved state, and its sequences end and start anew, each for itself."""

import copy
import io

import numpy as np
import pytest
import torch

import logchain
from logchain.stream import Stream, StreamUpdate
from tests.families import FAMILIES, Chain
from tests.streams import each_step, joined, prefixes

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("cut", [0, 1, 7, 16])
def test_state_dict_goes_on_with_the_same_bits(cut):
    chain = FAMILIES["bakis_jump"](F32, v=17, each=True)
    into, lengths = each_step(chain), torch.tensor([4, 17, 9])
    options = {"lag": 2, "viterbi": True}

    def update(stream: Stream, start: int, stop: int) -> StreamUpdate:
        ends = (lengths - start).clamp(0, stop - start)
        return stream.update(chain.x[..., start:stop, :], into[..., start:stop, :, :], lengths=ends)

    whole = Stream(None, chain.p0, **options)
    if cut:
        update(whole, 0, cut)
    stored = io.BytesIO()
    torch.save(whole.state_dict(), stored)
    stored.seek(0)
    other = Stream(None, chain.p0, **options)
    other.load_state_dict(torch.load(stored, weights_only=True))
    for start, stop in ((cut, cut + 1), (cut + 1, 17)):
        for a, b in zip(update(whole, start, stop), update(other, start, stop), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(whole.flush(), other.flush(), strict=True):
        assert torch.equal(a, b)


def test_reset_starts_some_members_anew():
    """Each member's segments are chains of their own, whatever the others do, and the lag does not look across."""
    chain = FAMILIES["sharp"](F64, n=3, t=1, v=20, c=5, each=True)
    x, into, p0 = chain.x[:, 0], each_step(chain)[:, 0], chain.p0[:, 0]
    into[:, 0] = torch.rand(5, 5, dtype=F64)
    stream = Stream(None, p0, lag=3, viterbi=True)
    found, before = [], []
    cuts = {0: [0, 9], 1: [0], 2: [0, 4, 9]}  # where the members start
    for start, stop in ((0, 4), (4, 9), (9, 20)):
        if start:
            mask = torch.tensor([start in cuts[member] for member in range(3)])
            before.append(stream.log_norm)
            stream.reset(mask)
            assert torch.equal(stream.log_norm, torch.where(mask, 0.0, before[-1]))
            assert (stream.filtered[mask] == 0).all() and (stream.filtered[~mask].sum(-1) > 0.99).all()
        found.append(stream.update(x[:, start:stop], into[:, start:stop]))
    found.append(stream.flush())
    smooth, states = joined(found, 2), joined(found, 3)
    for member, starts in cuts.items():
        for start, stop in zip(starts, [*starts[1:], 20], strict=True):
            part = Chain(x[member, start:stop], into[member, start + 1 : stop], p0[member])
            assert torch.equal(states[member, start:stop], logchain.viterbi(*part[:3]).states)
            np.testing.assert_allclose(smooth[member, start:stop], prefixes(part, 3), rtol=0, atol=1e-12)
            norm = found[-1].log_norm if stop == 20 else before[[4, 9].index(stop)]
            torch.testing.assert_close(norm[member], logchain.product(*part[:3]), rtol=1e-13, atol=1e-13)
    assert (stream.update(x[:, :2], into[:, :2]).filtered == 0).all(), "flushed, and so ended"
    stream.reset()
    again = stream.update(x, into)
    torch.testing.assert_close(again.log_norm, logchain.product(x, into[:, 1:], p0), rtol=1e-13, atol=1e-13)


def test_who_has_ended_stays_so_until_reset():
    chain = FAMILIES["dense"](F64, n=2, t=1, v=6, c=3, each=True)
    x, into, p0 = chain.x[:, 0], each_step(chain)[:, 0], chain.p0[:, 0]
    stream = Stream(None, p0)
    stream.update(x[:, :3], into[:, :3], lengths=[3, 2])
    last = stream.update(x[:, 3:], into[:, 3:])
    truth = logchain.product(x, into[:, 1:], p0, lengths=[6, 2])
    torch.testing.assert_close(last.log_norm, truth, rtol=1e-14, atol=1e-14)
    assert (last.filtered[1] == 0).all() and (last.filtered[0] > 0).all()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pieces_that_lie_alike_are_what_others_are(dtype, batch):
    """Underflow, nothing possible, a NaN and a fresh start among them; lengths of k take the general way.

    Some pieces are shorter than the one before, the last but one is empty.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(10, *batch, 4, 3, generator=draw, dtype=dtype)
    x[5:7, ..., 0] -= 2000.0
    if batch:
        x[7, 0] = -torch.inf
        x[7, -1, ..., 1, 2] = torch.nan
    bulk, p0 = torch.rand(1, 3, 3, generator=draw, dtype=dtype), torch.rand(3, generator=draw, dtype=dtype)
    bulk[0, 1, 0] = 0.0
    streams, mask = [Stream(bulk, p0) for _ in range(2)], torch.ones(batch, dtype=torch.bool)
    for index, piece in enumerate(x):
        if index == 9:
            for stream in streams:
                stream.reset(mask)
        size = 0 if index == 8 else 4 - index // 4
        piece = piece[..., :size, :]
        for one, other in zip(streams[0].update(piece), streams[1].update(piece, lengths=size), strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0, equal_nan=True
            )
        torch.testing.assert_close(streams[0].filtered, streams[1].filtered, equal_nan=True)
        kept = streams[0].state_dict()
        streams[0].load_state_dict(kept)


@pytest.fixture
def going() -> Stream:
    """A stream of one sequence whose pieces are one call each."""
    draw = torch.Generator().manual_seed(0)
    stream = Stream(torch.rand(1, 3, 3, generator=draw), torch.rand(3, generator=draw))
    for _ in range(3):
        stream.update(torch.zeros(4, 3))
    return stream


def assert_alike(stream: Stream, other: Stream, x: torch.Tensor) -> None:
    """The streams update alike, the other one where no piece lies like one before."""
    one, two = stream.update(x), other.update(x, lengths=x.shape[-2])
    torch.testing.assert_close(one.log_norm, two.log_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(one.filtered, two.filtered, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [lambda x: x[:, :3], lambda x: x[::2, :3], lambda x: x.T[:, :3]])
def test_a_piece_of_one_variable_says_nothing_of_the_steps_of_others(rows):
    x = rows(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))
    streams = [Stream(torch.eye(3)[None] + 0.5, torch.ones(3)) for _ in range(2)]
    for start, stop in ((0, 4), (4, 5), (5, 10)):
        assert_alike(*streams, x[start:stop])


def test_a_state_of_another_batch_is_loaded(going):
    other = Stream(going._bulk, going._p0)
    other.update(torch.zeros(2, 4, 3))
    going.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"^x_piece: expected shape \[2, k, 3\], got \[4, 3\]$"):
        going.update(torch.zeros(4, 3))


def test_wrong_pieces_are_refused_later_too(going):
    with pytest.raises(ValueError, match="^x_piece: expected device cpu, got meta$"):
        going.update(torch.zeros(4, 3, device="meta"))
    with pytest.raises(TypeError, match="^x_piece: expected a torch.Tensor, got NoneType$"):
        going.update(None)


def test_a_matrix_may_be_given_other_memory(going):
    other = copy.deepcopy(going)
    other._bulk = going._bulk.data = torch.rand(1, 3, 3)
    assert_alike(going, other, torch.zeros(4, 3))


@pytest.mark.parametrize("lag", [0, 1])
def test_an_empty_batch(lag):
    stream = Stream(torch.rand(0, 1, 3, 3), torch.rand(3), lag=lag)
    for _ in range(2):
        update = stream.update(torch.zeros(0, 4, 3))
        assert update.log_norm.shape == (0,) and update.filtered.shape == (0, 4, 3)
