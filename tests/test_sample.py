"""`logchain.sample` draws each path with its posterior probability, and never one that is impossible."""

import re

import numpy as np
import pytest
import torch
from scipy import stats

from logchain import kernels as devices
from logchain import reference
from logchain.kernels.plain import sample as plain_sample
from logchain.log_prob import log_prob
from logchain.rescues import rescues
from logchain.sample import sample
from tests import oracle
from tests.best_paths import numbers
from tests.contract import poisoned_memory
from tests.families import FAMILIES, Chain, dense
from tests.layouts import BATCHES, STEPS, broadcast, poisoned
from tests.seeded import seeded

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["cpu", "plain"])
def room(request, monkeypatch):
    """The loops in C, and torch's own operations."""
    if request.param == "plain":
        monkeypatch.setattr(devices, "draw_kernels", lambda tensor: plain_sample)


def drawn(chain, count, seed=0, **options):
    return sample(*chain[:3], count, generator=seeded(seed), log_params=chain.log_params, **options)


def assert_possible(chain, paths, lengths=None):
    """Paths of positive weight, of states until the end and of none behind it; of none where nothing is possible."""
    c, v = chain.x.shape[-1], chain.x.shape[-2]
    log_norm = reference.product(*numbers(chain), log_params=chain.log_params, lengths=lengths)
    possible = torch.from_numpy(np.asarray(log_norm > -np.inf))
    ends = torch.full(possible.shape, v)
    if lengths is not None:
        ends = torch.as_tensor(lengths)
        ends = ends.view(*ends.shape, *(1,) * (possible.dim() - ends.dim())).expand(possible.shape)
    inside = (torch.arange(v) < ends[..., None]) & possible[..., None]
    assert paths.dtype == torch.int64 and paths.shape[1:] == chain.x.shape[:-1]
    assert (paths[:, ~inside] == -1).all()
    assert ((paths >= 0) & (paths < c))[:, inside].all()
    weights = log_prob(*chain[:3], paths, log_params=chain.log_params, lengths=lengths)
    assert torch.isfinite(weights[:, possible]).all()


def assert_frequencies(counts, probabilities, total):
    """Within six standard deviations, and none where the probability is 0."""
    p = probabilities.clip(0.0, 1.0)
    assert (counts[p == 0] == 0).all()
    error = np.abs(counts - total * p)
    allowed = 6 * np.sqrt(total * p * (1 - p)) + 6
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times what chance allows"


def assert_marginals(chain, paths, lengths=None):
    """States and pairs of neighbours."""
    total, c = len(paths), chain.x.shape[-1]
    truth = reference.marginals(*numbers(chain), log_params=chain.log_params, lengths=lengths)
    assert_frequencies(counted(paths, c), truth.states, total)
    before, after = paths[..., :-1], paths[..., 1:]
    pairs = torch.where((before >= 0) & (after >= 0), c * before + after, -1)
    assert_frequencies(counted(pairs, c * c).reshape(truth.transitions.shape), truth.transitions, total)


def counted(values, size):
    """How often each of 0 to size - 1 is found along the first axis [..., size]."""
    places = (size + 1) * torch.arange(values[0].numel()).view(values.shape[1:]) + values + 1
    counts = torch.bincount(places.flatten(), minlength=(size + 1) * values[0].numel())
    return counts.view(*values.shape[1:], size + 1)[..., 1:].numpy()


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "v", "c"),
    [
        ("dense", 4, 3),
        ("sharp", 3, 4),
        ("left_to_right", 5, 3),
        ("detour", 4, 3),
        ("sparse", 3, 5),
        ("bakis_jump", 4, 4),
    ],
)
def test_each_path_comes_as_often_as_it_should(name, v, c, dtype, log, room):
    chain = FAMILIES[name](dtype, seed=3, n=2, t=1, v=v, c=c)
    chain = chain.logs() if log else chain
    total = 20000
    paths = drawn(chain, total)
    assert_possible(chain, paths)
    x, bulk, p0 = numbers(chain)
    for i in range(2):
        weights = oracle.paths(x[i, 0], bulk[0, 0], p0[0, 0], log_params=chain.log_params)
        norm = sum(weights.values())
        if norm == 0:
            continue
        index = sum(paths[:, i, 0, step] * c ** (v - 1 - step) for step in range(v))
        counts = np.bincount(index.numpy(), minlength=c**v)
        expected = total * np.array([float(weight / norm) for weight in weights.values()])
        rare = expected < 5
        counts, expected = (
            np.append(each[~rare], each[rare].sum()) if expected[rare].sum() >= 1 else each[~rare]
            for each in (counts, expected)
        )
        if len(expected) > 1:
            assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, dtype, each):
    given = FAMILIES[name](dtype, each=each)
    one_matrix = given._replace(bulk=given.bulk[..., -1:, :, :])
    for chain in (given, one_matrix) if given.bulk.shape[-3] > 1 else (given,):
        paths = drawn(chain, 1000 if name != "c301" else 5)
        assert_possible(chain, paths)
        if name != "c301":
            assert_marginals(chain, paths)


@pytest.mark.parametrize("count", [0, 1, 40, 600])
def test_few_and_many_draws_of_odd_sizes(count):
    for c in (1, 7, 8, 17, 33):
        chain = FAMILIES["sharp"](F32, v=9, c=c)
        paths = drawn(chain, count)
        assert paths.shape == (count, 3, 2, 9)
        assert_possible(chain, paths)


@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_lengths(name, lengths, each):
    chain = FAMILIES[name](F32, v=5, each=each)
    paths = drawn(chain, 1000, lengths=lengths)
    assert_possible(chain, paths, lengths)
    assert_marginals(chain, paths, lengths)


@pytest.mark.parametrize("name", ["dense", "detour"])
def test_neither_nan_behind_the_end_nor_what_memory_held_has_an_influence(name):
    chain = FAMILIES[name](F32, v=5, each=True)
    clean = drawn(chain, 9, lengths=[3, 5, 1])
    with poisoned_memory():
        assert torch.equal(drawn(poisoned(chain, [3, 5, 1]), 9, lengths=[3, 5, 1]), clean)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own matrices"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_packed_sequences(dtype, own):
    """Of different lengths; one is impossible, one holds NaN, and one is redone exactly."""
    lengths, generator = [4, 1, 3, 2, 4], torch.Generator().manual_seed(0)
    ends, x = torch.tensor(lengths).cumsum(0), torch.randn(14, 3, generator=generator)
    p0 = torch.rand(5, 3, generator=generator)
    bulk = torch.rand(14 if own else 1, 3, 3, generator=generator)
    x[4], x[9], x[11], x[12] = -INF, NAN, torch.tensor([0.0, 300.0, -4000.0]), torch.tensor([4000.0, 0.0, -300.0])
    chain = Chain(x, bulk, p0).to(dtype)
    with rescues() as seen:
        paths = drawn(chain, 5000, cu_seqlens=torch.cat([ends.new_zeros(1), ends]))
    assert seen.sequences
    assert paths.shape == (5000, 14) and (paths[:, 4] == -1).all() and (paths[:, 8:10] == -1).all()
    for i in (0, 2, 4):
        start, end = int(ends[i]) - lengths[i], int(ends[i])
        alone = Chain(chain.x[start:end], chain.bulk[start + 1 : end] if own else chain.bulk, chain.p0[i])
        assert_possible(alone, paths[:, start:end])
        assert_marginals(alone, paths[:, start:end])


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "bakis_jump"])
def test_nan_stays_in_its_sequence(name, operand):
    chain = FAMILIES[name](F32, each=True)
    getattr(chain, operand)[1, 0].flatten()[-1] = NAN
    paths = drawn(chain, 20)
    assert (paths[:, 1, 0] == -1).all()
    keep = torch.tensor([True, False, True])
    rest = Chain(*(tensor[keep] for tensor in chain[:3]))
    assert_possible(rest, paths[:, keep])


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batch_axes_broadcast(batches, steps):
    """Each sequence has one path only, and its draws are that one."""
    chain = broadcast(batches, steps).to(F32)
    only = torch.randint(4, chain.x.shape[:-1], generator=seeded())
    chain.x.masked_fill_(~torch.nn.functional.one_hot(only, 4).bool(), -INF)
    assert torch.equal(drawn(chain, 3), only.expand(3, *only.shape))
    assert torch.equal(drawn(chain.logs(), 3), only.expand(3, *only.shape))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_far_from_one(scale, room):
    """Products of weights with messages would leave float32."""
    chain = FAMILIES["sharp"](F32, v=9)
    chain = chain._replace(bulk=scale * chain.bulk, p0=scale * chain.p0)
    paths = drawn(chain, 1000)
    assert_possible(chain, paths)
    assert_marginals(chain, paths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "left_to_right", "sharp"])
def test_half_types(name, dtype):
    chain = FAMILIES[name](dtype, v=9)
    for given in (chain.logs(), chain._replace(x=chain.x.float())):
        paths = drawn(given, 1000)
        assert_possible(given, paths)
        assert_marginals(given, paths)


def test_a_generator_makes_it_reproducible():
    chain = dense(F32)
    first, again, other = drawn(chain, 5), drawn(chain, 5), drawn(chain, 5, seed=1)
    assert torch.equal(first, again) and not torch.equal(first, other)
    generator = seeded()
    assert not torch.equal(*(sample(*chain[:3], 5, generator=generator) for _ in range(2)))
    torch.manual_seed(0)
    assert torch.equal(sample(*chain[:3], 5), first)


def test_nothing_has_a_gradient_and_the_operands_stay():
    chain = dense(F32)
    leaves = [tensor.clone().requires_grad_() for tensor in chain[:3]]
    assert not sample(*leaves, 2).requires_grad
    for leaf, before in zip(leaves, chain, strict=False):
        assert torch.equal(leaf.detach(), before)


def test_autocast_does_not_reach_in():
    chain = dense(F32)
    with torch.autocast("cpu", torch.bfloat16):
        paths = drawn(chain, 5)
    assert torch.equal(paths, drawn(chain, 5))


def test_compiles_whole_and_two_calls_are_two_draws():
    chain = dense(F32)

    def twice(x, bulk, p0):
        return sample(x, bulk, p0, 5, lengths=torch.tensor([3, 17, 5])), sample(
            x, bulk, p0, 5, lengths=torch.tensor([3, 17, 5])
        )

    one, other = torch.compile(twice, fullgraph=True, backend="aot_eager")(*chain[:3])
    assert_possible(chain, one, [3, 17, 5])
    assert_possible(chain, other, [3, 17, 5])
    assert not torch.equal(one, other)


def test_vmap_of_torch_func():
    chain = FAMILIES["sparse"](F32, n=4, t=1, each=True)
    x, bulk, p0 = (tensor[:, 0] for tensor in chain[:3])

    def draws(x, bulk, p0):
        return sample(x, bulk, p0, 9)

    paths = torch.func.vmap(draws, randomness="different")(x, bulk, p0)
    assert paths.shape == (4, 9, 17)
    assert_possible(Chain(x, bulk, p0), paths.movedim(0, 1))
    paths = torch.func.vmap(draws, in_dims=(0, None, None), randomness="different")(x, bulk[0], p0[0])
    assert_possible(Chain(x, bulk[:1], p0[:1]), paths.movedim(0, 1))
    with pytest.raises(RuntimeError, match="^sample: expected vmap"):
        torch.func.vmap(draws)(x, bulk, p0)


def test_score_function_under_grad_of_torch_func():
    x, bulk, p0, _ = dense(F32)

    def mean_weight(x):
        return log_prob(x, bulk, p0, sample(x, bulk, p0, 3, generator=seeded())).sum()

    gradient = torch.func.grad(mean_weight)(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(mean_weight(leaf), leaf)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_samples": 1.0}, TypeError, "num_samples: expected an int, got float"),
        ({"num_samples": True}, TypeError, "num_samples: expected an int, got bool"),
        ({"num_samples": -1}, ValueError, "num_samples: expected 0 or more, got -1"),
        ({"generator": 7}, TypeError, "generator: expected a torch.Generator or None, got int"),
        ({"lengths": [18, 1, 1]}, ValueError, "lengths: expected values from 1 to v = 17, got 1 to 18"),
        ({"log_params": 1}, TypeError, "log_params: expected True or False, got 1"),
        ({"bulk": torch.ones(2, 6, 6)}, ValueError, "bulk: expected shape [16 or 1, 6, 6] to go with x"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    x, bulk, p0, _ = dense(F32)
    with pytest.raises(error, match="^" + re.escape(message)):
        sample(**{"x": x, "bulk": bulk, "p0": p0, "num_samples": 2} | options)


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(ValueError, match="^generator: expected device meta, got cpu"):
        sample(*(tensor.to("meta") for tensor in dense(F32)[:3]), 2, generator=seeded())
