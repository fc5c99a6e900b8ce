"""Streams: states that are saved and reset, ends of members, long streams, best paths as soon as they are final."""

import copy
import io
import math
import re

import numpy as np
import pytest
import scipy.special
import torch

import logchain
from logchain import reference
from logchain.memory import peak_bytes
from logchain.stream import Stream
from tests.contract import Truth, assert_values
from tests.expected import prefixes
from tests.families import FAMILIES, INF, NAN, Chain
from tests.subjects import division, each_step, joined, steps_from, streamed
from tests.transitions.structures import MAKE, C, numbers

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def test_a_state_below_p0_counts_for_short_members():
    x = torch.zeros(2, 2, 2)
    x[:, 0, 0] = -INF
    stream = Stream(torch.zeros(1, 2, 2), torch.tensor([0.0, -3000.0]), log_params=True)
    found = stream.update(x, lengths=[1, 2])
    torch.testing.assert_close(found.log_norm, torch.tensor([-3000.0, -3000 + math.log(2)]))
    torch.testing.assert_close(found.filtered[:, 0], torch.tensor([[0.0, 1.0]] * 2))


def test_unwanted_posteriors_change_nothing():
    chain = FAMILIES["sharp"](F32)
    into = each_step(chain.bulk, chain.x.shape[-2])
    full, bare = Stream(None, chain.p0, lag=1), Stream(None, chain.p0, lag=1, filtered=False)
    for start, stop in ((0, 5), (5, 6), (6, 17)):
        piece = chain.x[..., start:stop, :], into[..., start:stop, :, :]
        found, less = full.update(*piece), bare.update(*piece)
        assert less.filtered is None and found.filtered.shape == piece[0].shape
        assert torch.equal(found.log_norm, less.log_norm) and torch.equal(found.smoothed, less.smoothed)
    assert bare.flush().filtered is None and torch.equal(bare.filtered, full.filtered)


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_results_have_the_dtype_of_the_stream(dtype):
    stream, found = streamed(*FAMILIES["dense"](BF16)[:3], division(17, 1), dtype=dtype)
    assert found.log_norm.dtype == found.filtered.dtype == stream.filtered.dtype == stream.log_norm.dtype == dtype


def test_matrix_without_axis_of_steps_serves_every_step():
    x, bulk, p0, _ = FAMILIES["dense"](F32, n=2, each=False)
    matrix = bulk.reshape(-1, *bulk.shape[-2:])[0]
    for own, given in ((True, False), (False, True)):
        updates = [
            Stream(one if own else None, p0, lag=1).update(x, one if given else None) for one in (matrix, matrix[None])
        ]
        assert all(a is b or torch.equal(a, b) for a, b in zip(*updates, strict=True))


@pytest.mark.parametrize("lag", [0, 2])
def test_one_matrix_for_each_piece(lag):
    """bulk_piece may have one matrix for all its steps, another one in each piece."""
    chain = FAMILIES["dense"](F64, v=9)
    into = torch.cat([part.expand(-1, -1, 3, -1, -1) for part in chain.bulk[..., :3, :, :].split(1, -3)], -3)
    stream, parts = Stream(None, chain.p0, lag=lag, viterbi=True), []
    for i in range(3):
        piece = slice(3 * i, 3 * i + 3)
        parts.append(stream.update(chain.x[..., piece, :], into[..., 3 * i : 3 * i + 1, :, :]))
    parts.append(stream.flush())
    whole = Chain(chain.x, into[..., 1:, :, :], chain.p0)
    best = logchain.viterbi(*whole[:3])
    assert torch.equal(joined(parts, 3), best.states)
    torch.testing.assert_close(parts[-1].log_norm, logchain.product(*whole[:3]), rtol=1e-14, atol=1e-14)
    if lag:
        np.testing.assert_allclose(joined(parts, 2), prefixes(whole, lag), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["dense", *MAKE])
def test_state_dict_goes_on_with_the_same_bits(kind):
    """Before and after each piece, of sequences of different lengths, one of which has to be recomputed."""
    v, lengths = 17, torch.tensor([[4, 17, 9], [17, 1, 12]])
    rand = numbers(3)
    x, structure, p0 = rand(2, 3, v, C), MAKE.get(kind, MAKE["banded"])(rand, v - 1), rand(C)
    bulk = structure.to_dense() if kind == "dense" else structure
    x[0, 1:] *= -1000
    options, pieces = {"lag": 4, "viterbi": not structure.sums}, division(v, len(kind))
    stream, found, into = Stream(None, p0, **options), [], each_step(bulk, v)
    for start, stop in (*pieces, (v, v)):
        file, other = io.BytesIO(), Stream(None, p0, **options)
        torch.save(stream.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=kind == "dense"))
        stream, ends = copy.deepcopy(other), (lengths - start).clamp(0, stop - start)
        found.append(stream.update(x[..., start:stop, :], steps_from(into, start, stop), lengths=ends))
    found.append(stream.flush())
    expected = streamed(x, bulk, p0, pieces, lengths=lengths, **options)[1]
    assert found[-1].log_norm.equal(expected.log_norm)
    for field in (1, 2, 3):
        one = joined(found, field)
        assert (one is None and expected[field] is None) or one.equal(expected[field])


def test_reset_starts_members_again():
    """Each member's segments are chains of their own, whatever the others do, and the lag does not look across."""
    chain = FAMILIES["sharp"](F64, n=3, t=1, v=20, c=5, each=True)
    x, into, p0 = chain.x[:, 0], each_step(chain.bulk, chain.x.shape[-2])[:, 0], chain.p0[:, 0]
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


def test_ended_members_stay_ended_until_reset():
    chain = FAMILIES["dense"](F64, n=2, t=1, v=6, c=3, each=True)
    x, into, p0 = chain.x[:, 0], each_step(chain.bulk, chain.x.shape[-2])[:, 0], chain.p0[:, 0]
    stream = Stream(None, p0)
    stream.update(x[:, :3], into[:, :3], lengths=[3, 2])
    last = stream.update(x[:, 3:], into[:, 3:])
    truth = logchain.product(x, into[:, 1:], p0, lengths=[6, 2])
    torch.testing.assert_close(last.log_norm, truth, rtol=1e-14, atol=1e-14)
    assert (last.filtered[1] == 0).all() and (last.filtered[0] > 0).all()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_pieces_of_equal_layout_equal_others(dtype, batch):
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
        updates, rtol = (streams[0].update(piece), streams[1].update(piece, lengths=size)), (1e-6, 1e-12)[dtype == F64]
        torch.testing.assert_close(*updates, rtol=rtol, atol=0, equal_nan=True)
        torch.testing.assert_close(streams[0].filtered, streams[1].filtered, equal_nan=True)
        streams[0].load_state_dict(streams[0].state_dict())


@pytest.fixture
def going() -> tuple[Stream, torch.Tensor]:
    """A stream of one sequence whose pieces are one call each, and its matrix."""
    draw = torch.Generator().manual_seed(0)
    bulk = torch.rand(1, 3, 3, generator=draw)
    stream = Stream(bulk, torch.rand(3, generator=draw))
    for _ in range(3):
        stream.update(torch.zeros(4, 3))
    return stream, bulk


def assert_alike(stream: Stream, other: Stream, x: torch.Tensor) -> None:
    """The streams update alike, the other one where no piece lies like one before."""
    one, two = stream.update(x), other.update(x, lengths=x.shape[-2])
    torch.testing.assert_close(one.log_norm, two.log_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(one.filtered, two.filtered, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [lambda x: x[:, :3], lambda x: x[::2, :3], lambda x: x.T[:, :3]])
def test_strides_of_single_variables_are_not_remembered(rows):
    x = rows(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))
    streams = [Stream(torch.eye(3)[None] + 0.5, torch.ones(3)) for _ in range(2)]
    for start, stop in ((0, 4), (4, 5), (5, 10)):
        assert_alike(*streams, x[start:stop])


def test_wrong_pieces_are_refused_later_too(going):
    stream, _ = going
    with pytest.raises(ValueError, match="^x_piece: expected device cpu, got meta$"):
        stream.update(torch.zeros(4, 3, device="meta"))
    with pytest.raises(TypeError, match="^x_piece: expected a torch.Tensor, got NoneType$"):
        stream.update(None)
    other = Stream(torch.ones(1, 3, 3), torch.ones(3))
    other.update(torch.zeros(2, 4, 3))
    stream.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"^x_piece: expected shape \[2, k, 3\], got \[4, 3\]$"):
        stream.update(torch.zeros(4, 3))


def test_a_matrix_may_be_given_other_memory(going):
    stream, bulk = going
    bulk.data = torch.rand(1, 3, 3)
    other = Stream(bulk, torch.ones(3))
    other.load_state_dict(stream.state_dict())
    assert_alike(stream, other, torch.zeros(4, 3))


def test_a_copy_reads_its_own_matrix(going):
    stream, bulk = going
    other = copy.deepcopy(stream)
    expected = stream.update(torch.zeros(4, 3))
    bulk.fill_(NAN)
    found = other.update(torch.zeros(4, 3))
    torch.testing.assert_close(found.log_norm, expected.log_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.filtered, expected.filtered, rtol=1e-6, atol=0)


@pytest.mark.parametrize("filtered", [False, True])
def test_memory_does_not_grow(filtered):
    draw = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(300, 8, generator=draw), torch.softmax(torch.randn(1, 8, 8, generator=draw), -1)

    def run(updates: int) -> list[torch.Tensor]:
        stream = Stream(bulk, torch.ones(8), filtered=filtered)
        for _ in range(updates):
            stream.update(x)
        return [stream.log_norm]

    run(2)  # arguments of calls, which are made once
    assert peak_bytes(lambda: run(40)) <= peak_bytes(lambda: run(5))


def test_a_long_stream_keeps_its_scale_and_its_memory():
    """|log Z| of 5e5, what is held does not grow, and posteriors stay good."""
    draw = torch.Generator().manual_seed(0)
    v, c = 2000, 4
    x = torch.randn(v, c, generator=draw) + 250.0
    bulk, p0 = torch.softmax(torch.randn(1, c, c, generator=draw), -1), torch.full((c,), 0.25)
    stream, states, sizes, smooth = Stream(bulk, p0, lag=5, viterbi=True), [], [], []
    for start in range(0, v, 100):
        update = stream.update(x[start : start + 100])
        states.append(update.states)
        smooth.append(update.smoothed)
        stored = io.BytesIO()
        torch.save(stream.state_dict(), stored)
        sizes.append(len(stored.getvalue()))
    last = stream.flush()
    truth = reference.forward_backward(x, bulk, p0)
    assert_values(last.log_norm, truth.log_norm, np.spacing(np.float32(truth.log_norm)))
    assert torch.equal(torch.cat([*states, last.states]), logchain.viterbi(x.double(), bulk.double(), p0).states)
    emissions, ahead = np.exp(x.double().numpy() - 250), np.ones((v, c))
    for lag in range(5, 0, -1):
        ahead[:-lag] = (emissions[lag:] * ahead[:-lag]) @ bulk[0].double().numpy().T
    posteriors = scipy.special.softmax(truth.forward + np.log(ahead), -1)
    assert (np.abs(torch.cat([*smooth, last.smoothed]).numpy() - posteriors) < 1e-5).all()
    assert max(sizes) < min(sizes) + 4000


@pytest.mark.parametrize("filtered", [False, True])
def test_many_pieces_keep_the_contract(filtered):
    """Messages tens of nats wide are rounded to float32 on the way into each piece, and the sum is still good."""
    draw, v, c = torch.Generator().manual_seed(0), 1500, 4
    x, p0 = 10 * torch.randn(v, c, generator=draw), torch.ones(c)
    bulk = torch.softmax(4 * torch.randn(1, c, c, generator=draw), -1)
    stream = Stream(bulk, p0, filtered=filtered)
    for part in x.split(3):
        stream.update(part)
    truth = reference.forward_backward(x, bulk, p0)
    bound = Truth(Chain(x, bulk, p0)).value_bound()
    assert_values(stream.log_norm, truth.log_norm, bound)
    last = scipy.special.softmax(truth.forward[-1])
    assert (np.abs(stream.filtered.numpy() - last) < 1e-5).all()


def test_large_pieces_that_cancel():
    """Each piece's log-partition is near 2^41, and known to 2^-13 if it is rounded; their sum is good to float64."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-4096, 4096, (4, 3), generator=draw).double() / 4096  # exact beside 2^40
    bulk, p0 = torch.rand(1, 3, 3, generator=draw, dtype=F64), torch.ones(3, dtype=F64)
    stream = Stream(bulk, p0)
    for i, sign in ((0, 1.0), (2, -1.0)):
        stream.update(x[i : i + 2] + sign * 2.0**40)
    torch.testing.assert_close(stream.log_norm, logchain.product(x, bulk, p0), rtol=0, atol=1e-14)


def test_states_are_returned_as_soon_as_paths_merge():
    """A forced state settles all before it; two lanes that never meet settle nothing until flush."""
    x = torch.zeros(6, 3)
    x[3, [0, 2]] = -INF
    uniform = Stream(torch.rand(1, 3, 3), torch.ones(3), viterbi=True)
    counts = [len(uniform.update(x[i : i + 1]).states) for i in range(4)]
    assert sum(counts) == 4
    lanes = Stream(torch.eye(2)[None], torch.tensor([0.4, 0.6]), viterbi=True)
    assert all(len(lanes.update(torch.zeros(1, 2)).states) == 0 for _ in range(5))
    assert lanes.flush().states.tolist() == [1] * 5
    lanes.reset()
    other = torch.tensor([1.0, 0.0]).expand(4, 2)
    assert lanes.update(other, lengths=3).states.tolist() == [0, 0, 0, -1], "an end leaves one path"


def test_an_impossible_segment_does_not_spoil_the_one_before():
    lanes = Stream(torch.eye(2)[None], torch.tensor([[0.4, 0.6]]).expand(2, 2), viterbi=True)
    lanes.update(torch.zeros(2, 3, 2))
    lanes.reset(torch.tensor([True, False]))
    first = lanes.update(torch.full((2, 2, 2), 0.0).index_fill(0, torch.tensor([0]), -INF)).states
    found = torch.cat([first, lanes.flush().states], -1)
    assert found.tolist() == [[1, 1, 1, -1, -1], [1] * 5]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("size", [2, 20])
def test_best_paths_of_unknown_sequences_are_minus_one(size, value):
    """Wherever the value is: in long pieces, a compiled Viterbi to each last state must not miss that of another."""
    draw = torch.Generator().manual_seed(0)
    x, bulk, p0 = torch.randn(3, size, 4, generator=draw), torch.rand(1, 4, 4, generator=draw), torch.ones(4)
    for step in (0, size // 2, size - 1):
        stream, unknown = Stream(bulk, p0, viterbi=True), x.clone()
        stream.update(torch.zeros(3, 1, 4))
        unknown[1, step, 2] = value
        states = torch.cat([stream.update(unknown).states, stream.flush().states], -1)
        assert ((states == -1).all(-1) == torch.tensor([False, True, False])).all(), step
        assert (states[[0, 2]] >= 0).all()


def test_transforms():
    """Inside torch.compile a stream works, by graph breaks; torch.vmap and forward derivatives are refused."""
    chain = FAMILIES["dense"](F32, n=2, t=1)
    x, bulk, p0 = chain.x[:, 0], chain.bulk[0, 0, :1], chain.p0[0, 0]

    def last(x: torch.Tensor) -> torch.Tensor:
        stream = Stream(bulk, p0)
        stream.update(x[..., :7, :])
        return stream.update(x[..., 7:, :]).filtered

    with pytest.raises(NotImplementedError, match="expected no torch.vmap"):
        torch.vmap(last)(x)
    with pytest.raises(NotImplementedError, match="expected no forward derivative"):
        torch.func.jvp(last, (x,), (x,))
    torch.testing.assert_close(torch.compile(last, backend="eager")(x), last(x), rtol=0, atol=0)
    gradient = torch.func.grad(lambda x: last(x).square().sum())(x)
    x.requires_grad_()
    last(x).square().sum().backward()
    torch.testing.assert_close(gradient, x.grad)


def test_wrong_arguments_are_named():
    x, bulk, p0, _ = FAMILIES["dense"](F32)
    into = each_step(bulk, 17)
    stream, wide = Stream(None, p0), Stream(None, p0.expand(5, 1, 6))
    other = Stream(None, p0, lag=1).state_dict()
    older = {**stream.state_dict(), "state": {"carried": torch.ones(1)}}
    with pytest.raises(RuntimeError, match="expected an update before"):
        _ = stream.log_norm
    wrong = [
        (TypeError, "lag: expected an integer, got True", lambda: Stream(None, p0, lag=True)),
        (ValueError, "lag: expected 0 or more, got -1", lambda: Stream(None, p0, lag=-1)),
        (TypeError, "viterbi: expected True or False", lambda: Stream(None, p0, viterbi=1)),
        (ValueError, "bulk: expected shape [..., 1, 6, 6]", lambda: Stream(bulk, p0)),
        (ValueError, "bulk_piece: expected a torch.Tensor", lambda: stream.update(x)),
        (ValueError, "bulk_piece: expected shape", lambda: stream.update(x, into[..., 1:, :, :])),
        (ValueError, "p0: expected leading axes of 1", lambda: wide.update(x, into)),
        (ValueError, "lengths: expected values from 0 to k = 17, got 18", lambda: stream.update(x, into, lengths=18)),
        (TypeError, "lengths: expected integers", lambda: stream.update(x, into, lengths=[1.5] * 3)),
        (ValueError, "mask: expected shape None", lambda: stream.reset(torch.tensor([True]))),
        (TypeError, "mask: expected a torch.Tensor of bool", lambda: stream.reset([True])),
        (ValueError, "state: expected that of a stream", lambda: stream.load_state_dict(other)),
        (ValueError, "state: expected the result of state_dict() of a", lambda: stream.load_state_dict(older)),
        (ValueError, "bulk_piece: expected None", lambda: Stream(bulk[..., :1, :, :], p0).update(x, into)),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=re.escape(text)):
            call()
    stream.update(x, into)
    with pytest.raises(ValueError, match=r"x_piece: expected shape \[3, 2, k, 6\], got \[2, 17, 6\]"):
        stream.update(x[0], into)


def test_validate():
    chain = FAMILIES["dense"](F32)
    into = each_step(chain.bulk, chain.x.shape[-2])
    stream = Stream(None, chain.p0, validate=True)
    stream.update(chain.x[..., :3, :], into[..., :3, :, :])  # what is not used may be NaN
    with pytest.raises(ValueError, match="bulk_piece: expected non-negative"):
        stream.update(chain.x, -chain.bulk[..., :1, :, :])
    x = chain.x.clone()
    x[..., -1, 0] = NAN
    with pytest.raises(ValueError, match="^x_piece: expected no NaN"):
        stream.update(x, chain.bulk[..., :1, :, :])
    for name, own, given in (("bulk_piece", None, into * NAN), ("bulk", chain.bulk[..., :1, :, :] * NAN, None)):
        with pytest.raises(ValueError, match=f"^{name}: expected no NaN"):
            Stream(own, chain.p0, validate=True).update(chain.x, given)
    stream.update(x, chain.bulk[..., :1, :, :], lengths=[16] * 3)
