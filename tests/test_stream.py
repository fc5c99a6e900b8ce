"""A chain in pieces gives what the whole one gives: values, posteriors, paths and gradients, for any division."""

import io
import math
import random

import numpy as np
import pytest
import torch

import logchain
from logchain import _device, _stream_filter, _stream_paths, reference
from logchain._measure import peak_bytes
from logchain.stream import Stream, StreamUpdate
from tests import oracle
from tests.contract import Truth, assert_gradient, assert_values
from tests.families import FAMILIES, Chain

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAN, INF = float("nan"), float("inf")


def division(v: int, seed: int) -> list[tuple[int, int]]:
    """Pieces of random sizes, 0 among them, that make up v variables."""
    draw, found, start = random.Random(seed), [], 0
    while start < v:
        size = min(v - start, draw.choice([0, 1, 1, 2, 3, 5, 8]))
        found.append((start, start + size))
        start += size
    return found


def each_step(chain: Chain) -> torch.Tensor:
    """The matrices into each variable [*Bb, v, c, c]; what leads into the first one is NaN, and has no influence."""
    v = chain.x.shape[-2]
    into = chain.bulk.expand(*chain.bulk.shape[:-3], v - 1, -1, -1)
    first = chain.bulk.new_full((*chain.bulk.shape[:-3], 1, *chain.bulk.shape[-2:]), NAN)
    return torch.cat([first, into], -3)


def streamed(chain: Chain, pieces, *, lengths=None, homogeneous=False, **options) -> tuple[Stream, StreamUpdate]:
    """The stream after all pieces and a flush, and what it returned, one behind the other."""
    stream = Stream(chain.bulk if homogeneous else None, chain.p0, log_params=chain.log_params, **options)
    into = None if homogeneous else each_step(chain)
    found = []
    for start, stop in pieces:
        ends = None if lengths is None else (torch.as_tensor(lengths) - start).clamp(0, stop - start)
        matrices = None if into is None else into[..., start:stop, :, :]
        found.append(stream.update(chain.x[..., start:stop, :], matrices, lengths=ends))
    found.append(stream.flush())
    return stream, StreamUpdate(found[-1].log_norm, *(joined(found, field) for field in range(1, 4)))


def joined(found: list[StreamUpdate], field: int) -> torch.Tensor | None:
    parts = [update[field] for update in found]
    return None if parts[0] is None else torch.cat(parts, -1 if field == 3 else -2)


def prefixes(chain: Chain, lag: int, lengths=None) -> np.ndarray:
    """The posterior of each state given `lag` variables more, each from a chain of its own that ends there."""
    x, bulk, p0 = (tensor.detach().double().numpy() for tensor in chain[:3])
    v, found = x.shape[-2], []
    ends = np.full(x.shape[:-2], v) if lengths is None else np.broadcast_to(lengths, x.shape[:-2])
    bulk = np.broadcast_to(bulk, (*bulk.shape[:-3], v - 1, *bulk.shape[-2:]))
    for i in range(v):
        stop = min(v, i + lag + 1)
        part = reference.marginals(
            x[..., :stop, :],
            bulk[..., : stop - 1, :, :],
            p0,
            log_params=chain.log_params,
            lengths=np.minimum(ends, stop),
        )
        found.append(part.states[..., i, :])
    return np.stack(found, -2)


def weight_of(chain: Chain, states: torch.Tensor, lengths=None) -> np.ndarray:
    """The log-weight of paths, by its own sum in NumPy."""
    x, bulk, p0 = (tensor.detach().double().numpy() for tensor in chain[:3])
    log = (lambda a: a) if chain.log_params else np.log
    batch, v = x.shape[:-2], x.shape[-2]
    bulk = np.broadcast_to(bulk, (*batch, v - 1, *bulk.shape[-2:]))
    p0 = np.broadcast_to(p0, (*batch, p0.shape[-1]))
    out = np.full(batch, -np.inf)
    with np.errstate(divide="ignore"):
        for index in np.ndindex(batch):
            path = states[index].numpy()
            end = v if lengths is None else int(np.broadcast_to(lengths, batch)[index])
            if (path[:end] < 0).any():
                continue
            terms = [log(p0[index][path[0]]), *x[index][range(end), path[:end]]]
            terms += [*log(bulk[index][range(end - 1), path[: end - 1], path[1:end]])]
            out[index] = -np.inf if -np.inf in terms else math.fsum(terms)
    return out


def assert_posteriors(found: torch.Tensor, truth: np.ndarray, bound: np.ndarray) -> None:
    error = np.abs(found.detach().double().numpy() - truth)
    assert found.shape == truth.shape
    assert (error <= bound).all(), f"error {error.max():.3g}, {np.nanmax(error / bound):.3g} times the bound"


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize(
    ("dtype", "each", "gradients"),
    [(F32, False, False), (F64, True, False), (F64, False, True)],
    ids=["float32 shared", "float64 each", "with gradients"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_division_of_every_family(name, dtype, each, gradients, log, monkeypatch):
    if dtype == F32:
        monkeypatch.setattr(_stream_paths, "_LONG", 1)
    chain = FAMILIES[name](dtype, each=each)
    chain = chain.logs() if log else chain
    if gradients:
        chain = chain._replace(x=chain.x.requires_grad_())
    truth = Truth(chain)
    v, c = chain.x.shape[-2:]
    seed = sum(map(ord, name))
    stream, found = streamed(chain, division(v, seed), lag=3, viterbi=c < 100)
    assert found.log_norm.dtype == found.filtered.dtype == found.smoothed.dtype == dtype
    assert_values(found.log_norm, truth.log_norm, truth.value_bound(dtype))
    bound = truth.gradient_bound[..., None, None]
    for states, lag in ((found.filtered, 0), (found.smoothed, 3)):
        exact = prefixes(chain, lag)
        assert (states.detach().numpy()[exact == 0] <= bound.max()).all()
        # the reference is good to float64 at the size of its messages
        assert_posteriors(states, exact, bound + 2.0**-50 * np.abs(messages_of(chain)))
    torch.testing.assert_close(stream.filtered, found.filtered[..., -1, :], rtol=0, atol=0)
    if found.states is not None:
        best = reference.viterbi(chain.x.detach(), *chain[1:3], log_params=chain.log_params).states
        best = torch.from_numpy(best)
        weights = torch.from_numpy(weight_of(chain, found.states))
        assert_values(weights, weight_of(chain, best), truth.value_bound(dtype))


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize(("dtype", "each"), [(F32, False), (F32, True), (F64, False)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_walked_where_they_lie(name, dtype, each, log):
    """Any division of every family, without what needs a copy."""
    chain = FAMILIES[name](dtype, each=each)
    homogeneous = chain.bulk.shape[-3] == 1
    chain = chain.logs() if log else chain
    truth, exact, seed = Truth(chain), prefixes(chain, 0), sum(map(ord, name))
    bound = truth.gradient_bound[..., None, None] + 2.0**-50 * messages_of(chain)
    for pieces in (division(chain.x.shape[-2], seed), [(0, chain.x.shape[-2])]):
        stream, found = streamed(chain, pieces, homogeneous=homogeneous)
        assert found.log_norm.dtype == found.filtered.dtype == dtype
        assert_values(found.log_norm, truth.log_norm, truth.value_bound(dtype))
        assert_posteriors(found.filtered, exact, bound)
        assert_posteriors(stream.filtered, exact[..., -1, :], bound[..., 0])
        without, _ = streamed(chain, pieces, homogeneous=homogeneous, filtered=False)
        assert torch.equal(without.log_norm, stream.log_norm)


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("own", "steps"), [((), 1), ((5, 1), 1), ((5, 6), 1), ((), 40), ((5, 1), 40)], ids=str)
def test_no_piece_of_a_plain_chain_is_copied(own, steps, dtype, log, monkeypatch):
    """And the loop that does without agrees with torch's steps, also of a sequence that is NaN or impossible."""
    pytest.importorskip("numba")
    draw, v, c = torch.Generator().manual_seed(0), 40, 5
    x = 3 * torch.randn(5, 6, v, c, generator=draw, dtype=dtype)
    x[1, 2, 7, 3] = x[0, 1, 0, 2] = -INF
    x[2, 3, 12], x[4, 0, 30, 1] = -INF, NAN
    bulk, p0 = torch.rand(*own, steps, c, c, generator=draw, dtype=dtype), torch.rand(c, generator=draw, dtype=dtype)
    bulk, p0 = (bulk.log(), p0.log()) if log else (bulk, p0)

    def found() -> StreamUpdate:
        stream = Stream(bulk if steps == 1 else None, p0, log_params=log)
        updates = []
        for start, stop in ((0, 9), (9, 10), (10, 10), (10, 40)):
            into = None if steps == 1 else bulk[..., start:stop, :, :]
            updates.append(stream.update(x[..., start:stop, :], into))
        return StreamUpdate(updates[-1].log_norm, joined(updates, 1), stream.filtered, None)

    with monkeypatch.context() as patch:
        patch.setattr(_stream_filter, "Block", None)
        compiled = found()
    monkeypatch.setattr(_device, "_numba", lambda: False)
    plain, bound = found(), 3e-6 if dtype == F32 else 1e-13
    assert compiled.log_norm[2, 3] == -INF and compiled.log_norm[4, 0].isnan()
    for one, other in zip(compiled[:3], plain[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


def messages_of(chain: Chain) -> float:
    """The size of the reference's largest message."""
    forward = reference.forward_backward(chain.x.detach(), *chain[1:3], log_params=chain.log_params).forward
    return float(np.abs(forward[np.isfinite(forward)]).max(initial=1.0))


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
    bound = truth.gradient_bound[..., None, None]
    for states, lag in ((found.filtered, 0), (found.smoothed, 2)):
        assert_posteriors(states, prefixes(chain, lag, lengths), bound)
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


@pytest.mark.parametrize("homogeneous", [False, True], ids=["each step", "one matrix"])
@pytest.mark.parametrize(
    "name", ["dense", "peaked", "bakis_jump", "one_dead", "abyss", "offsets", "sparse", "far_start"]
)
def test_a_piece_in_blocks(name, homogeneous, monkeypatch):
    """However a piece is cut inside, its values, posteriors and messages are those of the whole."""
    chain = FAMILIES[name](F64, each=True)
    if homogeneous:
        chain = chain._replace(bulk=chain.bulk[..., :1, :, :])
    v, truth, lengths = chain.x.shape[-2], Truth(chain), torch.full(chain.x.shape[:-2], chain.x.shape[-2])
    lengths[0, 0] = 1
    ending = Truth(chain, lengths.numpy())
    for block in (1, 3 * chain.x[..., 0, :].numel(), 10**9):
        monkeypatch.setattr(_stream_filter, "_BLOCK", block)
        _, found = streamed(chain, [(0, v)], homogeneous=homogeneous, lag=2)
        assert_values(found.log_norm, truth.log_norm, truth.value_bound(F64))
        bound = truth.gradient_bound[..., None, None] + 2.0**-50 * messages_of(chain)
        for states, lag in ((found.filtered, 0), (found.smoothed, 2)):
            assert_posteriors(states, prefixes(chain, lag), bound)
        _, found = streamed(chain, [(0, v)], homogeneous=homogeneous, lengths=lengths)
        assert_values(found.log_norm, ending.log_norm, ending.value_bound(F64))
        assert_posteriors(found.filtered, prefixes(chain, 0, lengths.numpy()), bound)


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


@pytest.mark.parametrize("filtered", [False, True])
def test_memory_does_not_grow(filtered):
    draw = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(300, 8, generator=draw), torch.softmax(torch.randn(1, 8, 8, generator=draw), -1)

    def run(updates: int) -> list[torch.Tensor]:
        stream = Stream(bulk, torch.ones(8), filtered=filtered)
        for _ in range(updates):
            stream.update(x)
        return [stream.log_norm]

    run(1)
    assert peak_bytes(lambda: run(40)) <= peak_bytes(lambda: run(3))


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


def test_against_decimals():
    """float64 pieces of sizes 1 to 9 against 34 digits: posteriors given all, where the lag reaches the end."""
    chain = FAMILIES["sharp"](F64, v=23, c=4)
    truth = oracle.chain(*(tensor.numpy() for tensor in chain[:3]))
    bound = Truth(chain)
    for size in (1, 4, 9, 23):
        pieces = [(start, min(23, start + size)) for start in range(0, 23, size)]
        _, found = streamed(chain, pieces, lag=30)
        assert_values(found.log_norm, truth.log_norm, bound.value_bound(F64))
        assert_posteriors(found.smoothed, truth.states, bound.gradient_bound[..., None, None])


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
    truth = reference.marginals(x, bulk, p0)
    assert_values(last.log_norm, truth.log_norm, np.spacing(np.float32(truth.log_norm)))
    assert torch.equal(torch.cat([*states, last.states]), logchain.viterbi(x.double(), bulk.double(), p0).states)
    # five variables more say nearly all
    assert (np.abs(torch.cat([*smooth, last.smoothed]).numpy() - truth.states) < 0.02).all()
    assert max(sizes) < min(sizes) + 4000


def test_what_rounding_loses_between_pieces_is_kept():
    stream = Stream(torch.ones(1, 1, 1), torch.ones(1), dtype=F64)
    for value in (1e16, 1.0, -1e16):
        stream.update(torch.tensor([[value]]))
    # float32 rounds 1e16 on the way in, the same both times
    assert stream.log_norm == 1.0


@pytest.mark.parametrize("filtered", [False, True])
def test_many_pieces_keep_the_contract(filtered):
    """Messages tens of nats wide are rounded to float32 on the way into each piece, and the sum is still good."""
    draw, v, c = torch.Generator().manual_seed(0), 1500, 4
    x, p0 = 10 * torch.randn(v, c, generator=draw), torch.ones(c)
    bulk = torch.softmax(4 * torch.randn(1, c, c, generator=draw), -1)
    stream = Stream(bulk, p0, filtered=filtered)
    for part in x.split(3):
        stream.update(part)
    truth = logchain.product(x.double(), bulk.double(), p0.double()).numpy()
    assert_values(stream.log_norm, truth, np.spacing(np.float32(truth)) + 2.0**-20 * math.sqrt(v))
    double = Stream(bulk.double(), p0.double())
    double.update(x.double())
    torch.testing.assert_close(stream.filtered.double(), double.filtered, rtol=0, atol=1e-5)


def test_large_pieces_that_cancel():
    """Each piece's log-partition is near 2^41, and known to 2^-13 if it is rounded; their sum is good to float64."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-4096, 4096, (4, 3), generator=draw).double() / 4096  # exact beside 2^40
    bulk, p0 = torch.rand(1, 3, 3, generator=draw, dtype=F64), torch.ones(3, dtype=F64)
    stream = Stream(bulk, p0)
    for i, sign in ((0, 1.0), (2, -1.0)):
        stream.update(x[i : i + 2] + sign * 2.0**40)
    torch.testing.assert_close(stream.log_norm, logchain.product(x, bulk, p0), rtol=0, atol=1e-14)


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


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize(
    "name", ["dense", "sharp", "bakis_jump", "impossible", "one_dead", "sparse", "abyss", "offsets"]
)
def test_gradients(name, detach):
    """Those of the whole chain, back to the first piece; or those of the last piece alone, in which they are exact."""
    chain = FAMILIES[name](F64, each=True)
    truth, v = Truth(chain), chain.x.shape[-2]
    x, p0 = (tensor.clone().requires_grad_() for tensor in (chain.x, chain.p0))
    into = each_step(chain)
    into.requires_grad_()
    pieces, last = division(v, 4), 0
    stream = Stream(None, p0, log_params=chain.log_params, detach=detach)
    for start, stop in pieces:
        last = start if stop > start else last
        stream.update(x[..., start:stop, :], into[..., start:stop, :, :])
    stream.log_norm.sum().backward()
    bound = truth.gradient_bound[..., None, None]
    if not detach:
        assert_gradient(x, truth.states, truth.reach.states, bound)
        bulk = chain.bulk.clone()
        bulk.grad = into.grad[..., 1:, :, :]
        assert_gradient(bulk, truth.transitions, truth.reach.transitions, bound[..., None], chain.log_params)
        assert_gradient(p0, truth.states[..., 0, :], truth.reach.states[..., 0, :], bound[..., 0], chain.log_params)
        assert (into.grad[..., 0, :, :] == 0).all()
        return
    assert last > 0 and p0.grad is None or (p0.grad == 0).all()
    error = np.abs(x.grad.numpy() - truth.states)[..., last:, :]
    assert (x.grad[..., :last, :] == 0).all() and (error <= bound).all()
    assert (into.grad[..., :last, :, :] == 0).all()


def test_posteriors_have_gradients():
    """First and second derivatives of all that a piece returns, by differences."""
    chain = FAMILIES["dense"](F64, n=2, t=1, v=4, c=2, each=True)
    lengths = torch.tensor([4, 3])

    def outputs(x, into, p0):
        stream = Stream(None, p0, lag=1, detach=False)
        parts = [stream.update(x[:, :2], into[:, :2]), stream.update(x[:, 2:], into[:, 2:], lengths=lengths - 2)]
        parts.append(stream.flush())
        return parts[-1].log_norm, joined(parts, 1), joined(parts, 2)

    into = each_step(chain)[:, 0]
    into[:, 0] = 1.0
    operands = [t.clone().requires_grad_() for t in (chain.x[:, 0], into, chain.p0[:, 0])]
    assert torch.autograd.gradcheck(outputs, operands)
    assert torch.autograd.gradgradcheck(outputs, operands, fast_mode=True)


def test_gradients_beside_nan():
    """NaN behind an end gives no gradient; NaN that counts, none to other sequences."""
    chain = FAMILIES["dense"](F64, n=3, t=1, v=6, c=3, each=True)
    x, into, p0 = chain.x[:, 0].clone(), each_step(chain)[:, 0].clone(), chain.p0[:, 0]
    x[1, 4:], into[1, 4:], x[2, 3, 0] = NAN, NAN, NAN
    x.requires_grad_(), into.requires_grad_()
    stream = Stream(None, p0, lag=1, detach=False)
    parts = [stream.update(x[:, :3], into[:, :3]), stream.update(x[:, 3:], into[:, 3:], lengths=[3, 1, 3])]
    parts.append(stream.flush())
    sums = [parts[-1].log_norm[:2].sum(), joined(parts, 1)[:2].square().sum(), joined(parts, 2)[:2].square().sum()]
    sum(sums).backward()
    assert x.grad[:2].isfinite().all() and into.grad[:2].isfinite().all()
    assert (x.grad[1, 4:] == 0).all() and (into.grad[1, 4:] == 0).all() and (x.grad[1, :4] != 0).any()


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


def test_best_paths_of_long_pieces(monkeypatch):
    """By compiled loops or step by step, in blocks or not: ties aside, the same states as soon."""
    draw = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(2, 90, 4, generator=draw, dtype=F64), torch.rand(1, 4, 4, generator=draw, dtype=F64) ** 4
    bulk[0, 0, 1:] = 0.0
    x[1, 50, :3] = -INF
    found = []
    for long, terms in ((1, 2**20), (1, 300), (1000, 2**20)):
        monkeypatch.setattr(_stream_paths, "_LONG", long)
        monkeypatch.setattr(_stream_paths, "_TERMS", terms)
        stream = Stream(bulk, torch.ones(4, dtype=F64), viterbi=True)
        found.append([stream.update(part).states for part in x.split(40, 1)] + [stream.flush().states])
    for other in found[:2]:
        assert all(torch.equal(one, two) for one, two in zip(found[2], other, strict=True))
    assert torch.equal(torch.cat(found[0], -1), logchain.viterbi(x, bulk, torch.ones(4, dtype=F64)).states)


def test_an_impossible_segment_does_not_spoil_the_one_before():
    lanes = Stream(torch.eye(2)[None], torch.tensor([[0.4, 0.6]]).expand(2, 2), viterbi=True)
    lanes.update(torch.zeros(2, 3, 2))
    lanes.reset(torch.tensor([True, False]))
    first = lanes.update(torch.full((2, 2, 2), 0.0).index_fill(0, torch.tensor([0]), -INF)).states
    found = torch.cat([first, lanes.flush().states], -1)
    assert found.tolist() == [[1, 1, 1, -1, -1], [1] * 5]


@pytest.mark.parametrize("name", ["dense", "detour", "one_dead"])
def test_the_kernels_of_a_gpu(name, device, monkeypatch):
    """The same answers, and lengths that nobody looks at: one out of range makes its sequence NaN."""
    chain = FAMILIES[name](F32, v=4, n=2, t=1, c=3)
    options = {"lag": 1, "viterbi": True, "lengths": [[4], [3]]}
    _, expected = streamed(chain, [(0, 1), (1, 4)], **options)
    monkeypatch.setattr(_device, "on_gpu", lambda tensor: True)
    there = Chain(*(tensor.to(device) for tensor in chain[:3]), chain.log_params)
    _, found = streamed(there, [(0, 1), (1, 4)], **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    stream = Stream(None, there.p0, log_params=chain.log_params)
    norm = stream.update(there.x, each_step(there), lengths=torch.tensor([1, 9], device=device)).log_norm
    assert norm[0].isfinite().all() and norm[1].isnan().all()


def test_wrong_arguments_are_named():
    chain = FAMILIES["dense"](F32)
    into = each_step(chain)
    stream = Stream(None, chain.p0)
    with pytest.raises(RuntimeError, match="expected an update before"):
        _ = stream.log_norm
    wrong = [
        (TypeError, "lag: expected an integer, got True", lambda: Stream(None, chain.p0, lag=True)),
        (ValueError, "lag: expected 0 or more, got -1", lambda: Stream(None, chain.p0, lag=-1)),
        (TypeError, "viterbi: expected True or False", lambda: Stream(None, chain.p0, viterbi=1)),
        (ValueError, r"bulk: expected shape \[..., 1, 6, 6\]", lambda: Stream(chain.bulk, chain.p0)),
        (ValueError, "bulk_piece: expected a torch.Tensor", lambda: stream.update(chain.x)),
        (ValueError, r"bulk_piece: .* got \[1, 1, 16, 6, 6\]", lambda: stream.update(chain.x, into[..., 1:, :, :])),
        (
            ValueError,
            "p0: expected leading axes of 1",
            lambda: Stream(None, chain.p0.expand(5, 1, 6)).update(chain.x, into),
        ),
        (
            ValueError,
            "lengths: expected values from 0 to k = 17, got 18",
            lambda: stream.update(chain.x, into, lengths=[18] * 3),
        ),
        (TypeError, "lengths: expected integers", lambda: stream.update(chain.x, into, lengths=[1.5] * 3)),
        (ValueError, "mask: expected shape None", lambda: stream.reset(torch.tensor([True]))),
        (TypeError, "mask: expected a torch.Tensor of bool", lambda: stream.reset([True])),
        (
            ValueError,
            "state: expected that of a stream",
            lambda: stream.load_state_dict(Stream(None, chain.p0, lag=1).state_dict()),
        ),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    stream.update(chain.x, into)
    with pytest.raises(ValueError, match=r"x_piece: expected shape \[3, 2, k, 6\], got \[2, 17, 6\]"):
        stream.update(chain.x[0], into)
    own = Stream(chain.bulk[..., :1, :, :], chain.p0)
    with pytest.raises(ValueError, match="bulk_piece: expected None"):
        own.update(chain.x, into)


def test_validate():
    chain = FAMILIES["dense"](F32)
    into = each_step(chain)
    stream = Stream(None, chain.p0, validate=True)
    stream.update(chain.x[..., :3, :], into[..., :3, :, :])  # what is not used may be NaN
    with pytest.raises(ValueError, match="bulk: expected non-negative"):
        stream.update(chain.x, -chain.bulk[..., :1, :, :])
    x = chain.x.clone()
    x[..., -1, 0] = NAN
    with pytest.raises(ValueError, match="x: expected no NaN"):
        stream.update(x, chain.bulk[..., :1, :, :])
    stream.update(x, chain.bulk[..., :1, :, :], lengths=[16] * 3)
