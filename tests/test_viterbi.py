"""`logchain.viterbi` finds the best path and its weight, compiled and plain alike, whatever the layout."""

import numpy as np
import pytest
import torch

from logchain import kernels as devices
from logchain import reference
from logchain.viterbi import viterbi
from tests import oracle
from tests.best_paths import CHAINS, IDS, numbers, run, small, truth, weigh
from tests.contract import assert_values, poisoned_memory, ulp
from tests.families import FAMILIES, Chain, dense
from tests.layouts import BATCHES, STEPS, STRANGE, broadcast, poisoned, strange

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["compiled", "plain"])
def kernels(request, monkeypatch):
    """The loop that numba compiles, and torch's own operations."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(devices, "in_numba", lambda tensor: False)
    return request.param


def assert_best(name, dtype, each, log, lengths=None):
    chain, states, score, bound = truth(name, dtype, each, log, lengths)
    found = run(chain, None if lengths is None else list(lengths))
    assert found.states.dtype == torch.int64 and found.states.shape == chain.x.shape[:-1]
    assert found.score.dtype == dtype
    np.testing.assert_array_equal(found.states.numpy() < 0, states < 0)
    assert_values(found.score, score, bound)
    # the score is that of just these states
    own, sizes = weigh(chain, found.states.numpy())
    assert_values(found.score, own, ulp(own, dtype) + 2.0**-50 * sizes)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_best_path(name, dtype, kernels):
    for each in (False, True):
        for log in (False, True):
            assert_best(name, dtype, each, log)


@pytest.mark.parametrize("name", ["dense", "sharp", "detour", "left_to_right", "one_dead", "sparse"])
@pytest.mark.parametrize("lengths", [(5, 1, 3), (2, 2, 4), (1, 1, 1)], ids=str)
def test_lengths(name, lengths, kernels):
    for dtype in (F32, F64):
        assert_best(name, dtype, False, False, lengths)
        assert_best(name, dtype, True, True, lengths)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(6))
def test_no_path_is_better(seed, zeros, kernels):
    chain = small(seed, zeros)
    weights = oracle.paths(*numbers(chain))
    best = max(weights, key=weights.get)
    found = run(chain)
    if weights[best] == 0:
        assert found.score == -INF and (found.states == -1).all()
    else:
        assert tuple(found.states.tolist()) == best
        assert found.score.item() == pytest.approx(float(weights[best].ln()), rel=1e-14, abs=1e-14)
    assert tuple(run(chain.to(F32)).states.tolist()) == tuple(found.states.tolist())


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ties_go_to_the_lowest_state_from_the_last_variable_back(dtype, kernels):
    for v, c in ((1, 5), (4, 3), (7, 1), (9, 17), (3, 33)):
        uniform = Chain(torch.zeros(2, v, c), torch.full((1, c, c), 0.25), torch.ones(c)).to(dtype)
        assert (run(uniform).states == 0).all()
    # integers, whose sums are exact: many ties
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, bulk, p0 = (-torch.randint(3, shape, generator=generator) for shape in ((4, 3), (3, 3, 3), (3,)))
        weights = oracle.paths(x, bulk, p0, log_params=True)
        top = max(weights.values()) * (1 - oracle.Decimal(10) ** -20)
        expected = min((path for path, weight in weights.items() if weight >= top), key=lambda path: path[::-1])
        assert tuple(run(Chain(x, bulk, p0, True).to(dtype)).states.tolist()) == expected


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batch_axes_broadcast(batches, steps, kernels):
    chain = broadcast(batches, steps)
    expected, found = reference.viterbi(*chain[:3]), run(chain)
    np.testing.assert_array_equal(found.states, expected.states)
    np.testing.assert_allclose(found.score, expected.score, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "sparse", "bakis_jump"])
def test_dtypes(name, dtype, kernels):
    chain = FAMILIES[name](dtype)
    expected = run(Chain(*(operand.float() for operand in chain[:3])))
    found = run(chain)
    assert found.score.dtype == F32
    assert torch.equal(found.states, expected.states) and torch.equal(found.score, expected.score)
    for operand in ("x", "bulk", "p0"):
        mixed = run(chain._replace(**{operand: getattr(chain, operand).double()}))
        assert mixed.score.dtype == F64
        own, sizes = weigh(chain, mixed.states.numpy())
        assert_values(mixed.score, own, 2.0**-50 * sizes)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_a_sequence_is_as_if_it_were_alone(each, log, kernels):
    lengths = [3, 5, 1]
    chain = dense(F32, v=5, each=each)
    dirty = poisoned(chain, lengths)
    found = run(dirty.logs() if log else dirty, lengths)
    for i, end in enumerate(lengths):
        bulk, p0 = (operand[i] if each else operand[0] for operand in (chain.bulk, chain.p0))
        one = Chain(chain.x[i, :, :end], bulk[:, : end - 1], p0)
        alone = run(one.logs() if log else one)
        assert torch.equal(found.states[i, :, :end], alone.states) and torch.equal(found.score[i], alone.score)
        assert (found.states[i, :, end:] == -1).all()


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "impossible", "v1"])
def test_nan_stays_in_its_sequence(name, operand, kernels):
    chain = FAMILIES[name](F32, each=True)
    clean = run(chain)
    dirty = {key: getattr(chain, key).clone() for key in ("x", "bulk", "p0")}
    if dirty[operand].numel() == 0:
        return
    dirty[operand][1, 0].flatten()[-1] = NAN
    dirty["x"].requires_grad_()
    found = viterbi(**dirty)
    assert found.score[1, 0].isnan() and (found.states[1, 0] == -1).all()
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(found.states[others], clean.states[others])
    assert torch.equal(found.score[others], clean.score[others])
    found.score[others].sum().backward()
    assert dirty["x"].grad.isfinite().all()


def test_nan_of_a_shared_matrix_reaches_who_gets_there(kernels):
    chain = dense(F32, v=5)
    clean = run(chain, [2, 5, 3])
    chain.bulk[..., 2, 1, 1] = NAN
    found = run(chain, [2, 5, 3])
    assert found.score[1].isnan().all() and (found.states[1] == -1).all()
    assert torch.equal(found.states[::2], clean.states[::2]) and torch.equal(found.score[::2], clean.score[::2])


def test_what_is_impossible(kernels):
    chain = FAMILIES["impossible"](F32)
    x = chain.x.clone().requires_grad_()
    found = viterbi(x, chain.bulk, chain.p0)
    assert (found.score == -INF).all() and (found.states == -1).all()
    found.score.sum().backward()
    assert (x.grad == 0).all()
    assert run(Chain(torch.full((2, 3, 4), -INF), torch.ones(1, 4, 4), torch.ones(4))).score.tolist() == [-INF, -INF]
    assert run(Chain(torch.zeros(3, 4), torch.ones(1, 4, 4), torch.zeros(4))).score == -INF
    assert run(Chain(torch.zeros(3, 4), torch.zeros(1, 4, 4), torch.ones(4))).score == -INF


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strange_strides(how, each, kernels):
    for chain in (FAMILIES["dense"](F32, each=each), FAMILIES["detour"](F32, each=each)):
        views = strange(chain, how)
        assert torch.equal(run(views).states, run(chain).states) and torch.equal(run(views).score, run(chain).score)


def test_expanded_operands(kernels):
    one = dense(F32, n=1, t=1)
    expected = run(one)
    many = Chain(one.x.expand(3, 2, -1, -1), one.bulk.expand(3, 2, -1, -1, -1), one.p0.expand(3, 2, -1))
    found = run(many)
    assert (found.states == expected.states).all() and (found.score == expected.score).all()


def test_poisoned_memory(kernels):
    for name in ("dense", "sparse", "one_dead", "v1"):
        chain = FAMILIES[name](F32)
        expected = run(chain), run(chain, [1, chain.x.shape[-2], 1])
        with poisoned_memory():
            found = run(chain), run(chain, [1, chain.x.shape[-2], 1])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.states, other.states) and torch.equal(one.score, other.score)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
def test_the_gradient_counts_what_the_path_passes(log, kernels):
    chain = dense(F64, v=5, c=3)
    chain = chain.logs() if log else chain
    x, bulk, p0 = (operand.clone().requires_grad_() for operand in chain[:3])
    found = viterbi(x, bulk, p0, log_params=log, lengths=[5, 2, 1])
    found.score.sum().backward()
    hot = torch.nn.functional.one_hot(found.states.clamp(min=0), 3) * (found.states >= 0)[..., None]
    assert torch.equal(x.grad, hot.double())
    counts = torch.einsum("ntvi,ntvj->vij", hot[..., :-1, :], hot[..., 1:, :]).double()
    scale = (1.0, 1.0) if log else (bulk.detach(), p0.detach())
    torch.testing.assert_close((bulk.grad * scale[0])[0, 0], counts)
    torch.testing.assert_close((p0.grad * scale[1])[0, 0], hot[..., 0, :].sum((0, 1)).double())


@pytest.mark.parametrize(("name", "chain", "lengths"), CHAINS, ids=IDS)
def test_opcheck(name, chain, lengths, kernels):
    for k in (None, 2):
        arguments = (*chain[:3], lengths, chain.log_params, k)
        torch.library.opcheck(torch.ops.logchain.best_paths.default, arguments)


def test_the_inputs_stay_as_they_are(kernels):
    chain = FAMILIES["sparse"](F32)
    before = [operand.clone() for operand in chain[:3]]
    run(chain, [17, 3, 5])
    assert all(torch.equal(one, other) for one, other in zip(before, chain[:3], strict=True))


def test_wrong_arguments_are_refused():
    chain = dense(F32, v=4, c=3)
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 5 to 5"):
        run(chain, [5, 5, 5])
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 0 to 5"):
        run(chain, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match="bulk: expected shape"):
        viterbi(chain.x, chain.bulk[..., :2], chain.p0)
    with pytest.raises(ValueError, match="x: expected no NaN"):
        viterbi(chain.x * NAN, chain.bulk, chain.p0, validate=True)
