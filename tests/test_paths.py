"""State paths: the best ones with all their ties, drawn ones as often as they are probable, and their probabilities."""

import numpy as np
import pytest
import torch
from scipy import stats

import logchain
from logchain import reference
from tests import oracle
from tests.contract import numbers, poisoned_memory
from tests.expected import assert_drawn
from tests.families import F32, F64, FAMILIES, INF, LARGE, NAN, Chain, Draw, dense, small
from tests.layouts import BATCHES, STEPS, broadcast, poisoned
from tests.seeded import seeded

BOTH = pytest.mark.usefixtures("backend")


@BOTH
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ties_go_to_the_lowest_state_from_the_last_variable_back(dtype):
    for v, c in ((1, 5), (4, 3), (7, 1), (9, 17), (3, 33)):
        uniform = Chain(torch.zeros(2, v, c), torch.full((1, c, c), 0.25), torch.ones(c)).to(dtype)
        assert (logchain.viterbi(*uniform[:3]).states == 0).all()
    # integers, whose sums are exact: many ties
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        x, bulk, p0 = (-torch.randint(3, shape, generator=draw) for shape in ((4, 3), (3, 3, 3), (3,)))
        weights = oracle.paths(x, bulk, p0, log_params=True)
        top = max(weights.values()) * (1 - oracle.Decimal(10) ** -20)
        expected = min((path for path, weight in weights.items() if weight >= top), key=lambda path: path[::-1])
        found = logchain.viterbi(x.to(dtype), bulk.to(dtype), p0.to(dtype), log_params=True)
        assert tuple(found.states.tolist()) == expected


@BOTH
@pytest.mark.parametrize("operand", [0, 1, 2], ids=["x", "bulk", "p0"])
@pytest.mark.parametrize("k", [None, 3], ids=["viterbi", "topk_paths"])
def test_an_infinite_weight_leaves_its_sequence_without_a_path(k, operand):
    chain = FAMILIES["left_to_right"](F32, each=True)
    find = logchain.viterbi if k is None else lambda *operands: logchain.topk_paths(*operands, k)
    clean = find(*chain[:3])
    operands = [one.clone() for one in chain[:3]]
    operands[operand][1, 0].flatten()[-1] = INF
    states, score = find(*operands)
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    assert score[1, 0].isnan().all() and (states[1, 0] == -1).all()
    assert torch.equal(states[others], clean[0][others]) and torch.equal(score[others], clean[1][others])


@BOTH
def test_nan_of_a_shared_matrix_reaches_the_sequences_that_get_there():
    chain, lengths = dense(F32, v=5), [2, 5, 3]
    clean = logchain.viterbi(*chain[:3], lengths=lengths)
    chain.bulk[..., 2, 1, 1] = NAN
    found = logchain.viterbi(*chain[:3], lengths=lengths)
    assert found.score[1].isnan().all() and (found.states[1] == -1).all()
    assert torch.equal(found.states[::2], clean.states[::2]) and torch.equal(found.score[::2], clean.score[::2])


@BOTH
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_all_paths_are_listed(zeros, k):
    for seed in range(4):
        chain = small(seed, zeros)
        weights = oracle.paths(*(operand.numpy() for operand in chain[:3]))
        best = sorted((path for path, weight in weights.items() if weight > 0), key=weights.get, reverse=True)[:k]
        found = logchain.topk_paths(*chain[:3], k)
        assert [tuple(path) for path in found.states[: len(best)].tolist()] == best
        assert (found.states[len(best) :] == -1).all() and (found.scores[len(best) :] == -INF).all()
        scores = [float(weights[path].ln()) for path in best]
        np.testing.assert_allclose(found.scores[: len(best)], scores, rtol=1e-14, atol=1e-14)


@BOTH
def test_ties_are_all_listed_and_always_alike():
    operands = torch.zeros(2, 3, 3), torch.ones(1, 3, 3), torch.ones(3)
    found = logchain.topk_paths(*operands, 27)
    assert (found.scores == 0).all()
    assert all(len({tuple(path) for path in paths}) == 27 for paths in found.states.tolist())
    assert torch.equal(found.states, logchain.topk_paths(*operands, 27).states)
    assert torch.equal(found.states[0], found.states[1])


def drawn(chain: Chain, count: int, seed: int = 0, **options) -> torch.Tensor:
    return logchain.sample(*chain[:3], count, generator=seeded(seed), log_params=chain.log_params, **options)


@BOTH
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LARGE])
def test_drawn_paths_have_the_posterior(name):
    for dtype, each in ((F32, False), (F64, True)):
        chain = FAMILIES[name](dtype, each=each, n=2, t=1)
        one_matrix = chain._replace(bulk=chain.bulk[..., -1:, :, :])
        for some in (chain, one_matrix) if chain.bulk.shape[-3] > 1 else (chain,):
            assert_drawn(some, drawn(some, 500))


@BOTH
@pytest.mark.parametrize(
    ("scale", "c", "count"), [(1e-30, 6, 1000), (1e30, 6, 1000), (1, 33, 600), (1, 8, 1), (1, 1, 0)]
)
def test_draws_of_any_number_and_scale_have_the_posterior(scale, c, count):
    chain = FAMILIES["sharp"](F32, v=9, c=c)
    chain = chain._replace(bulk=scale * chain.bulk)
    assert_drawn(chain, drawn(chain, count))


@BOTH
@pytest.mark.parametrize(("name", "v", "c"), [("dense", 4, 3), ("left_to_right", 5, 3), ("detour", 4, 3)])
def test_each_path_is_drawn_as_often_as_it_should(name, v, c):
    chain, total = FAMILIES[name](F32, seed=3, n=1, t=1, v=v, c=c), 20000
    paths = drawn(chain, total)
    weights = oracle.paths(*(part[0, 0] for part in numbers(chain)), log_params=chain.log_params)
    index = sum(paths[:, 0, 0, step] * c ** (v - 1 - step) for step in range(v))
    counts = np.bincount(index.numpy(), minlength=c**v)
    expected = total * np.array([float(weight / sum(weights.values())) for weight in weights.values()])
    rare = expected < 5
    counts, expected = (np.append(each[~rare], each[rare].sum()) for each in (counts, expected))
    some = expected > 0
    assert stats.chisquare(counts[some], expected[some] * counts.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]]], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "one_dead"])
def test_drawn_paths_end_with_their_sequence(name, lengths):
    chain = FAMILIES[name](F32, v=5, each=True)
    paths = drawn(chain, 600, lengths=lengths)
    assert_drawn(chain, paths, lengths)
    with poisoned_memory():
        assert torch.equal(drawn(poisoned(chain, lengths), 600, lengths=lengths), paths)


@BOTH
@pytest.mark.parametrize("operand", [0, 1, 2], ids=["x", "bulk", "p0"])
def test_nan_leaves_its_sequence_without_draws(operand):
    chain = FAMILIES["bakis_jump"](F32, each=True)
    chain[operand][1, 0].flatten()[-1] = NAN
    paths, rest = drawn(chain, 20), torch.tensor([True, False, True])
    assert (paths[:, 1, 0] == -1).all() and (paths[:, rest] >= 0).all()


@BOTH
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_the_only_path_is_drawn_whatever_the_layout(steps):
    for batches in BATCHES:
        chain = broadcast(batches, steps).to(F32)
        only = torch.randint(4, chain.x.shape[:-1], generator=seeded())
        chain.x.masked_fill_(~torch.nn.functional.one_hot(only, 4).bool(), -INF)
        for some in (chain, chain.logs()):
            assert torch.equal(drawn(some, 3), only.expand(3, *only.shape))


def test_draws_by_a_generator_are_reproducible():
    chain, generator = dense(F32), seeded()
    assert torch.equal(drawn(chain, 5), drawn(chain, 5)) and not torch.equal(drawn(chain, 5), drawn(chain, 5, seed=1))
    assert not torch.equal(*(logchain.sample(*chain[:3], 5, generator=generator) for _ in range(2)))
    torch.manual_seed(0)
    assert torch.equal(logchain.sample(*chain[:3], 5), drawn(chain, 5))


def test_draws_inside_compile_vmap_and_autocast():
    chain, lengths = FAMILIES["sparse"](F32, n=4, t=1, each=True), torch.tensor([3, 17, 5, 1])
    x, bulk, p0 = operands = [operand[:, 0] for operand in chain[:3]]

    def twice(x, bulk, p0):
        return [logchain.sample(x, bulk, p0, 300, lengths=lengths) for _ in range(2)]

    one, other = torch.compile(twice, fullgraph=True, backend="aot_eager")(*operands)
    assert not torch.equal(one, other)
    for paths in (one, other):
        assert_drawn(Chain(*operands), paths, lengths)
    draw = lambda x, bulk, p0: logchain.sample(x, bulk, p0, 300)  # noqa: E731
    assert_drawn(Chain(*operands), torch.func.vmap(draw, randomness="different")(*operands).movedim(0, 1))
    paths = torch.func.vmap(draw, in_dims=(0, None, None), randomness="different")(x, bulk[0], p0[0])
    assert_drawn(Chain(x, bulk[:1], p0[:1]), paths.movedim(0, 1))
    with pytest.raises(RuntimeError, match="^sample: expected vmap"):
        torch.func.vmap(draw)(*operands)
    with torch.autocast("cpu", torch.bfloat16):
        inside = drawn(chain, 5)
    assert torch.equal(inside, drawn(chain, 5))


@pytest.mark.parametrize("name", ["dense", "sparse", "left_to_right", "detour", "one_hot"])
def test_probabilities_are_those_of_all_paths_and_sum_to_one(name):
    chain = FAMILIES[name](F64, n=1, t=1, v=4, c=4)
    weights = oracle.paths(*(array[0, 0] for array in numbers(chain)), log_params=chain.log_params)
    total = sum(weights.values())
    operands = [operand[0, 0] for operand in chain[:3]]
    x = operands[0].requires_grad_()
    every = torch.tensor(list(weights))
    out = logchain.log_prob(*operands, every, log_params=chain.log_params)
    found = out.detach().exp()
    np.testing.assert_allclose(found, [float(weight / total) for weight in weights.values()], rtol=1e-11, atol=0)
    assert abs(found.sum() - 1) < 1e-12
    (gradient,) = torch.autograd.grad((found * out.masked_fill(out == -INF, 0.0)).sum(), x)
    assert gradient.abs().max() < 1e-13, "the score function has a mean of 0"


@pytest.mark.parametrize("batch", [(), (3,), (2, 3, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("paths", [(), (4,), (2, 3), (0,)], ids=str)
def test_paths_have_axes_of_their_own(batch, paths):
    draw = Draw(0, 1, 1, 5, 4, False)
    chain = Chain(draw.normal(*batch, 5, 4), 0.1 + draw.uniform(4, 4, 4), 0.1 + draw.uniform(4))
    states = torch.randint(4, (*paths, *batch, 5), generator=draw.generator)
    out = logchain.log_prob(*chain[:3], states)
    np.testing.assert_allclose(out, reference.log_prob(*numbers(chain), states), rtol=1e-12)
    assert out.shape == (*paths, *batch)


def test_a_path_without_a_state_has_no_probability():
    chain = dense(F32, v=5)
    x, states = chain.x.clone().requires_grad_(), torch.zeros(1, 3, 2, 5, dtype=torch.int64)
    states[0, 1, 1, 2] = -1
    out = logchain.log_prob(x, *chain[1:3], states)
    assert out[0, 1, 1] == -INF and torch.isneginf(out).sum() == 1
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (gradient[1, 1] == 0).all() and (gradient[0] != 0).any() and gradient.isfinite().all()
    lengths = [2, 2, 2]
    for padding in (-1, 77):
        ended = states[0].masked_fill(torch.arange(5) >= 2, padding)
        assert logchain.log_prob(x, *chain[1:3], ended, lengths=lengths).isfinite().all()
