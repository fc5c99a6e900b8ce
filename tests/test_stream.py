"""A chain in pieces gives what the whole one gives: values, posteriors and paths, for any division."""

import math

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain import reference
from logchain.stream import Stream
from logchain.streams import filter as stream_filter
from logchain.streams import paths as stream_paths
from tests import oracle
from tests.contract import Truth, assert_values
from tests.families import FAMILIES, Chain
from tests.streams import (
    assert_posteriors,
    division,
    each_step,
    joined,
    messages_of,
    prefixes,
    reachable,
    streamed,
    weight_of,
)

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "each", "gradients"),
    [(F32, False, False), (F64, True, False), (F64, False, True)],
    ids=["float32 shared", "float64 each", "with gradients"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_division_of_every_family(name, dtype, each, gradients, monkeypatch):
    if dtype == F32:
        monkeypatch.setattr(stream_paths, "_LONG", 1)
    chain = FAMILIES[name](dtype, each=each)
    # by logarithms every second time: of a family, and of what it is asked
    chain = chain.logs() if (list(FAMILIES).index(name) + each + gradients) % 2 else chain
    if gradients:
        chain = chain._replace(x=chain.x.requires_grad_())
    truth = Truth(chain)
    v, c = chain.x.shape[-2:]
    seed = sum(map(ord, name))
    stream, found = streamed(chain, division(v, seed), lag=3, viterbi=c < 100)
    assert found.log_norm.dtype == found.filtered.dtype == found.smoothed.dtype == dtype
    assert_values(found.log_norm, truth.log_norm, truth.value_bound(dtype))
    rounding = 2.0**-50 * messages_of(chain)  # the reference is good to float64 at the size of its messages
    given = {lag: prefixes(chain, lag) for lag in (0, 3)}
    for states, lag in ((found.filtered, 0), (found.smoothed, 3)):
        assert (states.detach().numpy()[prefixes(reachable(chain), lag) == 0] == 0).all()
        assert_posteriors(states, given[lag], truth.gradient_bound(given[lag]) + rounding)
    torch.testing.assert_close(stream.filtered, found.filtered[..., -1, :], rtol=0, atol=0)
    if found.states is not None:
        best = reference.viterbi(chain.x.detach(), *chain[1:3], log_params=chain.log_params).states
        best = torch.from_numpy(best)
        weights = torch.from_numpy(weight_of(chain, found.states))
        assert_values(weights, weight_of(chain, best), truth.value_bound(dtype))
    # walked where they lie, without what needs a copy
    exact, bound = given[0], truth.gradient_bound(given[0]) + rounding
    for pieces in (division(v, seed), [(0, v)]):
        options = {"homogeneous": chain.bulk.shape[-3] == 1}
        stream, found = streamed(chain, pieces, **options)
        assert_values(found.log_norm, truth.log_norm, truth.value_bound(dtype))
        assert_posteriors(found.filtered, exact, bound)
        assert_posteriors(stream.filtered, exact[..., -1, :], bound[..., -1, :])
        without, _ = streamed(chain, pieces, filtered=False, **options)
        assert torch.equal(without.log_norm, stream.log_norm)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["dense", "bakis_jump", "offsets", "log_far"])
def test_lengths(name, seed):
    """A member's end may lie in any piece; NaN behind it has no influence, and nothing is returned there."""
    chain = FAMILIES[name](F32, each=True)
    v = chain.x.shape[-2]
    lengths = np.random.default_rng(seed).integers(1, v + 1, chain.x.shape[:-2])
    truth = Truth(chain, lengths)
    behind = torch.arange(v) >= torch.as_tensor(lengths)[..., None]
    spoiled = chain._replace(
        x=chain.x.masked_fill(behind[..., None], NAN),
        bulk=chain.bulk.masked_fill(behind[..., 1:, None, None], NAN),
    )
    _, found = streamed(spoiled, division(v, seed), lengths=lengths, lag=2, viterbi=True)
    assert_values(found.log_norm, truth.log_norm, truth.value_bound(F32))
    for states, lag in ((found.filtered, 0), (found.smoothed, 2)):
        exact = prefixes(chain, lag, lengths)
        assert_posteriors(states, exact, truth.gradient_bound(exact))
        assert (states[behind] == 0).all()
    assert (found.states[behind] == -1).all() and (found.states[~behind] >= 0).all()
    best = reference.viterbi(*chain[:3], log_params=chain.log_params, lengths=lengths).score
    assert_values(torch.from_numpy(weight_of(chain, found.states, lengths)), best, truth.value_bound(F32))


@pytest.mark.parametrize("gradients", [False, True], ids=["kernels", "autograd"])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "sparse"])
def test_pieces_of_one_size(name, size, gradients):
    """One-shot values and posteriors, with ends in the middle, forbidden states, and a state saved on the way."""
    v, lengths = 1100 if size > 100 and not gradients else 120, torch.tensor([[1100], [40], [1]])
    lengths = lengths.clamp(max=v)
    chain = FAMILIES[name](F64, n=3, t=1, v=v, c=4)
    if name == "left_to_right":  # evidence that moves on with the path, or all would be lost in the last state
        chain = chain._replace(x=chain.x / 20)
    x = chain.x.requires_grad_(gradients)
    into, found = each_step(chain), []
    stream = Stream(None, chain.p0)
    for start in range(0, v, size):
        stop = min(v, start + size)
        ends = (lengths - start).clamp(0, stop - start)
        if stop > v // 2 > start and not gradients:
            saved = stream.state_dict()
            stream = Stream(None, chain.p0)
            stream.load_state_dict(saved)
        found.append(stream.update(x[..., start:stop, :], into[..., start:stop, :, :], lengths=ends))
    whole = logchain.forward_backward(*chain[:3], lengths=lengths)
    torch.testing.assert_close(found[-1].log_norm, whole.log_norm, rtol=1e-14, atol=1e-12)
    exact = torch.softmax(whole.forward, -1).nan_to_num(0.0)
    inside = torch.arange(v) < lengths[..., None]
    exact = torch.where(inside[..., None], exact, 0.0)
    torch.testing.assert_close(joined(found, 1), exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("pieces", [[(0, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 2), (2, 3)]], ids=str)
@pytest.mark.parametrize("lag", [0, 1])
def test_what_an_emission_hides_is_there_later(pieces, lag):
    """State 1 is 2000 nats behind, and 3000 of p0, but the only one that leads on."""
    x = torch.tensor([[0.0, 0.0], [0.0, -2000.0], [0.0, 0.0]])
    both, only = torch.zeros(2, 2), torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]])
    for middle, p0, truth in ((both, [0.0, 0.0], math.log(4) - 2000), (only, [0.0, -3000.0], math.log(2) - 5000)):
        stream, found = streamed(
            Chain(x, torch.stack([middle, only]), torch.tensor(p0), log_params=True), pieces, lag=lag
        )
        assert stream.log_norm.item() == pytest.approx(truth, rel=1e-6)
        torch.testing.assert_close(found.filtered[2], torch.tensor([0.5, 0.5]))
        assert not lag or found.smoothed[1].tolist() == [0.0, 1.0]


def test_what_p0_hides_is_there_for_who_ends_at_once():
    x = torch.zeros(2, 2, 2)
    x[:, 0, 0] = -INF
    stream = Stream(torch.zeros(1, 2, 2), torch.tensor([0.0, -3000.0]), log_params=True)
    found = stream.update(x, lengths=[1, 2])
    torch.testing.assert_close(found.log_norm, torch.tensor([-3000.0, -3000 + math.log(2)]))
    torch.testing.assert_close(found.filtered[:, 0], torch.tensor([[0.0, 1.0]] * 2))


def test_posteriors_that_nobody_wants():
    chain = FAMILIES["sharp"](F32)
    into = each_step(chain)
    full, bare = Stream(None, chain.p0, lag=1), Stream(None, chain.p0, lag=1, filtered=False)
    for start, stop in ((0, 5), (5, 6), (6, 17)):
        piece = chain.x[..., start:stop, :], into[..., start:stop, :, :]
        found, less = full.update(*piece), bare.update(*piece)
        assert less.filtered is None and found.filtered.shape == piece[0].shape
        assert torch.equal(found.log_norm, less.log_norm) and torch.equal(found.smoothed, less.smoothed)
    assert bare.flush().filtered is None and torch.equal(bare.filtered, full.filtered)


def test_against_decimals():
    """float64 pieces of sizes 1 to 9 against 34 digits: posteriors given all, where the lag reaches the end."""
    chain = FAMILIES["sharp"](F64, v=23, c=4)
    truth = oracle.chain(*(tensor.numpy() for tensor in chain[:3]))
    bound = Truth(chain)
    for size in (1, 4, 9, 23):
        pieces = [(start, min(23, start + size)) for start in range(0, 23, size)]
        _, found = streamed(chain, pieces, lag=30)
        assert_values(found.log_norm, truth.log_norm, bound.value_bound(F64))
        assert_posteriors(found.smoothed, truth.states, bound.gradient_bound(truth.states))


def test_bfloat16_and_dtype():
    chain = FAMILIES["dense"](BF16)
    truth = Truth(chain)
    stream, found = streamed(chain, division(17, 1))
    assert found.log_norm.dtype == found.filtered.dtype == stream.filtered.dtype == F32
    assert_values(found.log_norm, truth.log_norm, truth.value_bound(F32))
    for dtype in (BF16, F64):
        stream, found = streamed(chain, division(17, 1), dtype=dtype)
        assert found.log_norm.dtype == found.filtered.dtype == stream.log_norm.dtype == dtype
    mixed = Stream(None, chain.p0)
    assert mixed.update(chain.x, each_step(chain)).log_norm.dtype == F32
    assert mixed.update(chain.x.double(), each_step(chain)).log_norm.dtype == F64


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_one_matrix_for_every_step(batch):
    """Also without batch axes, with leading axes left out, and with a batch of nothing."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*batch, 40, 5, generator=draw, dtype=F64)
    bulk, p0 = torch.rand(1, 5, 5, generator=draw, dtype=F64), torch.rand(5, generator=draw, dtype=F64)
    options = {"lag": 4, "viterbi": True}
    _, found = streamed(Chain(x, bulk, p0), division(40, 3), homogeneous=True, **options)
    _, stepwise = streamed(Chain(x, bulk, p0), division(40, 5), **options)
    torch.testing.assert_close(found.log_norm, logchain.product(x, bulk, p0), rtol=1e-14, atol=1e-13)
    assert torch.equal(found.states, logchain.viterbi(x, bulk, p0).states)
    assert torch.equal(found.states, stepwise.states)
    torch.testing.assert_close(found.smoothed, stepwise.smoothed, rtol=0, atol=1e-14)
    _, nothing = streamed(Chain(x.expand(0, *x.shape), bulk, p0), division(40, 3), homogeneous=True, **options)
    assert nothing.smoothed.shape == (0, *x.shape) and nothing.states.shape == (0, *x.shape[:-1])


def test_nan_and_the_impossible_stay_in_their_sequence():
    chain = FAMILIES["dense"](F64, n=4, t=1, v=12, c=3, each=True)
    x, into, p0 = chain.x[:, 0].clone(), each_step(chain)[:, 0], chain.p0[:, 0]
    clean = Chain(x.clone(), into[:, 1:], p0)
    x[1, 5, 2], x[2, 5] = NAN, -INF
    into = into.clone()
    into[3, 8, 0, 1] = NAN
    _, good = streamed(clean, division(12, 2), lag=2, viterbi=True)
    _, found = streamed(Chain(x, into[:, 1:], p0), division(12, 2), lag=2, viterbi=True)
    torch.testing.assert_close(found.log_norm[0], good.log_norm[0], rtol=1e-14, atol=0)
    assert found.log_norm[[1, 3]].isnan().all() and found.log_norm[2] == -INF
    for some, all_of in ((found.filtered, good.filtered), (found.smoothed, good.smoothed)):
        torch.testing.assert_close(some[0], all_of[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(some[:, :3], all_of[:, :3], rtol=0, atol=1e-14)
    assert found.filtered[1, 5:].isnan().all() and found.smoothed[1, 3:].isnan().all()
    assert (found.filtered[2, 5:] == 0).all() and (found.smoothed[2, 3:] == 0).all()
    assert torch.equal(found.states[0], good.states[0])
    assert (found.states[[1, 2], 5:] == -1).all() and (found.states[3, 8:] == -1).all()


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


@pytest.mark.parametrize("homogeneous", [False, True], ids=["each step", "one matrix"])
@pytest.mark.parametrize(
    "name", ["dense", "peaked", "bakis_jump", "one_dead", "abyss", "offsets", "sparse", "far_start"]
)
def test_a_piece_in_blocks(name, homogeneous, plain, monkeypatch):
    """However a piece is cut inside, where no loop in C walks it, its values and posteriors are those of the whole."""
    chain = FAMILIES[name](F64, each=True, n=2, t=1, v=9, c=5)
    if homogeneous:
        chain = chain._replace(bulk=chain.bulk[..., :1, :, :])
    v, truth, lengths = chain.x.shape[-2], Truth(chain), torch.full(chain.x.shape[:-2], chain.x.shape[-2])
    lengths[0, 0] = 1
    ending = Truth(chain, lengths.numpy())
    for block in (1, 3 * chain.x[..., 0, :].numel(), 10**9):
        monkeypatch.setattr(stream_filter, "_BLOCK", block)
        _, found = streamed(chain, [(0, v)], homogeneous=homogeneous, lag=2)
        assert_values(found.log_norm, truth.log_norm, truth.value_bound(F64))
        messages = 2.0**-50 * messages_of(chain)
        for states, lag in ((found.filtered, 0), (found.smoothed, 2)):
            exact = prefixes(chain, lag)
            assert_posteriors(states, exact, truth.gradient_bound(exact) + messages)
        _, found = streamed(chain, [(0, v)], homogeneous=homogeneous, lengths=lengths)
        assert_values(found.log_norm, ending.log_norm, ending.value_bound(F64))
        exact = prefixes(chain, 0, lengths.numpy())
        assert_posteriors(found.filtered, exact, ending.gradient_bound(exact) + messages)


@pytest.mark.parametrize("name", ["dense", "detour", "one_dead"])
def test_the_kernels_of_a_gpu(name, device, monkeypatch):
    """The same answers, and lengths that nobody looks at: one out of range makes its sequence NaN."""
    chain = FAMILIES[name](F32, v=4, n=2, t=1, c=3)
    options = {"lag": 1, "viterbi": True, "lengths": [[4], [3]]}
    _, expected = streamed(chain, [(0, 1), (1, 4)], **options)
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    there = Chain(*(tensor.to(device) for tensor in chain[:3]), chain.log_params)
    _, found = streamed(there, [(0, 1), (1, 4)], **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    stream = Stream(None, there.p0, log_params=chain.log_params)
    norm = stream.update(there.x, each_step(there), lengths=torch.tensor([1, 9], device=device)).log_norm
    assert norm[0].isfinite().all() and norm[1].isnan().all()
