"""`logchain.topk_paths` lists the best paths: different ones, in falling order, and no more than there are."""

import numpy as np
import pytest
import torch

from logchain import reference
from logchain.topk_paths import topk_paths
from logchain.viterbi import viterbi
from tests import oracle
from tests.best_paths import numbers, small, truth, weigh
from tests.contract import assert_values, of_steps, ulp
from tests.families import FAMILIES, Chain, Draw, dense

F32, F64 = torch.float32, torch.float64
INF = float("inf")


def run(chain, k, lengths=None):
    return topk_paths(*chain[:3], k, log_params=chain.log_params, lengths=lengths)


def assert_listed(chain, k, lengths=None, bound=None):
    """Against the reference: the same scores; paths that are different, in falling order and worth their scores."""
    found = run(chain, k, lengths)
    expected = reference.topk_paths(*numbers(chain), k, log_params=chain.log_params, lengths=lengths)
    assert found.states.dtype == torch.int64 and found.states.shape == expected.states.shape
    score, size = np.empty(expected.scores.shape), np.empty(expected.scores.shape)
    for rank in range(k):
        score[..., rank], size[..., rank] = weigh(chain, found.states[..., rank, :].numpy())
    dtype = found.scores.dtype
    assert_values(found.scores, score, ulp(score, dtype) + 2.0**-50 * size)
    slack = 0.0 if bound is None else bound[..., None]
    assert_values(found.scores, expected.scores, slack + ulp(score, dtype) + 2.0**-50 * size)
    assert (found.scores[..., :-1] >= found.scores[..., 1:]).all()
    np.testing.assert_array_equal(found.states < 0, expected.states < 0)
    for paths in found.states.reshape(-1, k, chain.x.shape[-2]).tolist():
        real = [tuple(path) for path in paths if path[0] >= 0]
        assert len(set(real)) == len(real)
    return found


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_every_family(name, dtype):
    for each in (False, True):
        chain, known = truth(name, dtype, each, False)
        assert_listed(chain, 4, bound=2 * known.bound)
    assert_listed(chain.logs(), 2, bound=2 * known.bound)


def test_lengths():
    for name in ("dense", "sparse", "one_dead"):
        assert_listed(FAMILIES[name](F32, v=5), 3, [3, 5, 1], bound=np.full((3, 2), 1e-5))


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2, 7, 100, 300])
def test_all_paths_are_listed(seed, zeros, k):
    chain = small(seed, zeros)
    weights = oracle.paths(*(operand.numpy() for operand in chain[:3]))
    best = sorted((path for path, weight in weights.items() if weight > 0), key=weights.get, reverse=True)[:k]
    found = run(chain, k)
    assert [tuple(path) for path in found.states[: len(best)].tolist()] == best
    assert (found.states[len(best) :] == -1).all() and (found.scores[len(best) :] == -INF).all()
    scores = [float(weights[path].ln()) for path in best]
    np.testing.assert_allclose(found.scores[: len(best)], scores, rtol=1e-14, atol=1e-14)


def test_the_first_path_is_the_best():
    for name in ("dense", "banded", "bakis_jump"):
        chain = FAMILIES[name](F32)
        found, best = run(chain, 3), viterbi(*chain[:3])
        assert torch.equal(found.states[..., 0, :], best.states) and torch.equal(found.scores[..., 0], best.score)


def test_ties_are_all_listed_and_always_alike():
    chain = Chain(torch.zeros(2, 3, 3), torch.ones(1, 3, 3), torch.ones(3))
    found = run(chain, 27)
    assert (found.scores == 0).all()
    assert all(len({tuple(path) for path in paths}) == 27 for paths in found.states.tolist())
    assert torch.equal(found.states, run(chain, 27).states) and torch.equal(found.states[0], found.states[1])


@pytest.mark.parametrize("batch", [(), (0,), (3, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.float16], ids=str)
def test_shapes_and_dtypes(batch, dtype):
    for v, c in ((1, 1), (1, 3), (4, 1), (5, 3)):
        draw = Draw(0, 1, 1, v, c, False)
        bulk, p0 = 0.1 + draw.uniform(v - 1, c, c), 0.1 + draw.uniform(c)
        found = assert_listed(Chain(draw.normal(*batch, v, c), bulk, p0).to(dtype), 2, bound=np.full(batch, 1e-5))
        assert found.scores.dtype == (F64 if dtype == F64 else F32)


def test_the_gradient_counts_what_the_paths_pass():
    chain = dense(F64, v=5, c=3)
    x = chain.x.clone().requires_grad_()
    found = topk_paths(x, chain.bulk, chain.p0, 4, lengths=[5, 2, 1])
    possible = found.scores > -INF
    found.scores.masked_fill(~possible, 0.0).sum().backward()
    hot = torch.nn.functional.one_hot(found.states.clamp(min=0), 3) * (found.states >= 0)[..., None]
    assert torch.equal(x.grad, hot.sum(2).double())


def test_scores_fall_where_messages_are_coarse():
    assert_listed(FAMILIES["abyss"](F32), 32, bound=of_steps(17, 6, np.full((3, 2), 1000.0), dtype=F32))
