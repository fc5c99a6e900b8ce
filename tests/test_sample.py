"""`logchain.sample` draws each path with its posterior probability, and never one that is impossible."""

import re

import numpy as np
import pytest
import torch
from scipy import stats

from logchain import kernels as devices
from logchain import reference
from logchain.kernels.plain import sample as sampling
from logchain.kernels.plain.forward import forward as plain_forward
from logchain.log_prob import log_prob
from logchain.operands import chain_of
from logchain.sample import sample
from tests import oracle
from tests.contract import poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import BATCHES, STEPS, STRANGE, broadcast, poisoned, strange

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "numba"], autouse=True)
def backend(request, monkeypatch):
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(devices, "in_numba", lambda tensor: False)
    return request.param


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(chain, count, seed=0, **options):
    return sample(*chain[:3], count, generator=seeded(seed), log_params=chain.log_params, **options)


def arrays(chain):
    return (tensor.detach().double().numpy() for tensor in chain[:3])


def assert_possible(chain, paths, lengths=None):
    """Paths of positive weight, of states until the end and of none behind it; of none where nothing is possible."""
    c, v = chain.x.shape[-1], chain.x.shape[-2]
    log_norm = reference.product(*arrays(chain), log_params=chain.log_params, lengths=lengths)
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
    truth = reference.marginals(*arrays(chain), log_params=chain.log_params, lengths=lengths)
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
def test_each_path_comes_as_often_as_it_should(name, v, c, dtype, log):
    chain = FAMILIES[name](dtype, seed=3, n=2, t=1, v=v, c=c)
    chain = chain.logs() if log else chain
    total = 20000
    paths = drawn(chain, total)
    assert_possible(chain, paths)
    x, bulk, p0 = arrays(chain)
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
            np.append(some[~rare], some[rare].sum()) if expected[rare].sum() >= 1 else some[~rare]
            for some in (counts, expected)
        )
        if len(expected) > 1:
            assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, dtype, each):
    chain = FAMILIES[name](dtype, each=each)
    paths = drawn(chain, 1000 if name != "c301" else 5)
    assert_possible(chain, paths)
    if name != "c301":
        assert_marginals(chain, paths)


@pytest.mark.parametrize("count", [0, 1, 3, 40])
@pytest.mark.parametrize("c", [1, 7, 8, 17, 33])
def test_few_and_many_draws_of_odd_sizes(c, count):
    chain = FAMILIES["sharp"](F32, v=9, c=c)
    paths = drawn(chain, count)
    assert paths.shape == (count, 3, 2, 9)
    assert_possible(chain, paths)


@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_lengths(name, lengths, each):
    chain = FAMILIES[name](F32, v=5, each=each)
    for some in (lengths, torch.tensor(lengths)):
        paths = drawn(chain, 1000, lengths=some)
        assert_possible(chain, paths, lengths)
    assert_marginals(chain, paths, lengths)


@pytest.mark.parametrize("name", ["dense", "detour"])
def test_nan_behind_the_end_has_no_influence(name):
    chain = FAMILIES[name](F32, v=5, each=True)
    clean = drawn(chain, 9, lengths=[3, 5, 1])
    assert torch.equal(drawn(poisoned(chain, [3, 5, 1]), 9, lengths=[3, 5, 1]), clean)


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


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("name", ["sparse", "left_to_right", "bakis_jump", "tiny_transitions", "log_far", "one_hot"])
def test_the_ends_of_the_unit_interval(name, uniform, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, generator=None: self.fill_(uniform))
    for dtype in (F32, F64):
        chain = FAMILIES[name](dtype)
        assert_possible(chain, drawn(chain, 30))


def test_a_threshold_below_all_numbers(monkeypatch):
    """u times the total is no float32: still no state of weight zero is drawn."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, generator=None: self.fill_(1 - 2.0**-53))
    _, chain = chain_of(torch.zeros(2, 1, 3), torch.ones(1, 3, 3), torch.ones(3), None, False)
    messages = torch.tensor([[[0.0, 2.0**-100, 0.0], [0.0, 0.0, 1.0]]])[:, None]
    states = torch.empty(1, 2, 4, dtype=torch.int64)
    sampling.draw(
        chain,
        messages,
        torch.zeros(1, 2, dtype=torch.bool),
        states,
        None,
        devices.draw_kernels(messages).draw_block,
    )
    assert states.tolist() == [[[1] * 4, [2] * 4]]


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batch_axes_broadcast(batches, steps):
    """Each sequence has one path only, and its draws are that one."""
    chain = broadcast(batches, steps).to(F32)
    only = torch.randint(4, chain.x.shape[:-1], generator=seeded())
    chain.x.masked_fill_(~torch.nn.functional.one_hot(only, 4).bool(), -INF)
    assert torch.equal(drawn(chain, 3), only.expand(3, *only.shape))
    assert torch.equal(drawn(chain.logs(), 3), only.expand(3, *only.shape))


@pytest.mark.parametrize(("bulk_batch", "p0_batch"), [((1, 1), (3, 2)), ((3, 1), (1, 2)), ((1, 2), ()), ((3, 2), (1,))])
def test_matrices_and_starts_of_some_axes(bulk_batch, p0_batch):
    draw = Draw(0, 1, 1, 4, 3, False)
    chain = Chain(draw.normal(3, 2, 4, 3), draw.uniform(*bulk_batch, 3, 3, 3), draw.uniform(*p0_batch, 3)).to(F32)
    assert_marginals(chain, drawn(chain, 3000))


def test_one_matrix_for_every_step():
    for name in ("sparse", "banded", "detour", "bakis_jump"):
        chain = FAMILIES[name](F32, v=9, c=6)
        chain = chain._replace(bulk=chain.bulk[..., 1:2, :, :])
        paths = drawn(chain, 1000)
        assert_possible(chain, paths)
        assert_marginals(chain, paths)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_far_from_one(scale):
    """Products of weights with messages would leave float32."""
    chain = FAMILIES["sharp"](F32, v=9)
    chain = chain._replace(bulk=scale * chain.bulk, p0=scale * chain.p0)
    assert_possible(chain, drawn(chain, 100))
    assert torch.equal(drawn(chain, 1), drawn(chain, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "left_to_right", "sharp"])
def test_half_types(name, dtype):
    chain = FAMILIES[name](dtype, v=9)
    for some in (chain, chain.logs(), chain._replace(x=chain.x.float())):
        paths = drawn(some, 1000)
        assert_possible(some, paths)
        assert_marginals(some, paths)


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("name", ["dense", "bakis_jump"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strange_strides(name, how, each):
    chain = FAMILIES[name](F32, each=each)
    paths = drawn(strange(chain, how), 300)
    assert_possible(chain, paths)
    assert_marginals(chain, paths)


@pytest.mark.parametrize("name", ["dense", "detour", "bakis_jump", "one_dead", "v1"])
def test_poisoned_memory(name):
    chain = FAMILIES[name](F32)
    clean = drawn(chain, 7)
    with poisoned_memory():
        assert torch.equal(drawn(chain, 7), clean)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_small_blocks_give_the_same_kind_of_draws(each, monkeypatch):
    """Blocks of a few steps and, without numba, of a few draws."""
    for name in ("_WEIGHTS", "_NUMBERS", "_MATRICES"):
        monkeypatch.setattr(sampling, name, 700)
    for name in ("dense", "bakis_jump"):
        chain = FAMILIES[name](F32, each=each, v=9, c=5)
        for some in (chain, chain.logs()):
            paths = drawn(some, 500)
            assert_possible(some, paths)
            assert_marginals(some, paths)


def test_a_generator_makes_it_reproducible():
    chain = dense(F32)
    first, again, other = drawn(chain, 5), drawn(chain, 5), drawn(chain, 5, seed=1)
    assert torch.equal(first, again) and not torch.equal(first, other)
    generator = seeded()
    assert not torch.equal(*(sample(*chain[:3], 5, generator=generator) for _ in range(2)))
    torch.manual_seed(0)
    assert torch.equal(sample(*chain[:3], 5), first)


@pytest.mark.parametrize("name", ["dense", "sparse", "bakis_jump", "one_dead", "detour"])
def test_numba_and_torch_draw_the_same_of_the_same_numbers(name, backend, monkeypatch):
    chain = FAMILIES[name](F64, n=4)
    lengths = [3, chain.x.shape[-2], 5, 1]
    one = [drawn(chain, 50, lengths=lengths), drawn(chain, 1)]
    monkeypatch.setattr(devices, "in_numba", lambda tensor: False)
    for paths, others in zip(one, (drawn(chain, 50, lengths=lengths), drawn(chain, 1)), strict=True):
        assert torch.equal(paths, others)


@pytest.mark.parametrize("count", [2, 100])
def test_threads(count, backend, monkeypatch):
    if backend == "numba":
        monkeypatch.setattr("logchain.kernels.native_sampling._SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for chain in (dense(F32, n=5), dense(F32, n=1, t=1)):
        paths = drawn(chain, count)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert torch.equal(paths, drawn(chain, count))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize("lengths", [None, [5, 1, 3]], ids=["whole", "lengths"])
@pytest.mark.parametrize("name", ["dense", "sparse", "left_to_right"])
def test_messages_that_are_logarithms_all_of_them(name, lengths):
    """What a GPU keeps."""
    given = FAMILIES[name](F32, v=5, c=4)
    for some in (given, given.logs()):
        ends = None if lengths is None else torch.tensor(lengths)[:, None].expand(3, 2)
        _, chain = chain_of(*some[:3], ends, some.log_params)
        _, messages, redone, _ = plain_forward(chain, keep=chain.new(chain.v, chain.g, chain.m, chain.c))[0]
        messages = torch.where(redone[..., None], messages, messages.log())
        paths = torch.zeros(3, 2, 5, 1000, dtype=torch.int64)
        sampling.draw(chain, messages, None, paths.permute(2, 0, 1, 3), seeded(), sampling.draw_block)
        paths = paths.permute(3, 0, 1, 2)
        possible = reference.product(*arrays(some), log_params=some.log_params, lengths=lengths) > -np.inf
        assert possible.any()
        assert_marginals(some, torch.where(torch.from_numpy(possible)[..., None], paths, -1), lengths)


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


def test_values_are_checked_on_demand():
    chain = dense(F32)
    chain.p0[0, 0, 0] = -1.0
    with pytest.raises(ValueError, match="^p0: expected non-negative values"):
        drawn(chain, 1, validate=True)
