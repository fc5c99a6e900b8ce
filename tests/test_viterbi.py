"""`logchain.viterbi` and `logchain.topk_paths` find the best paths and their weights, whatever the layout."""

import itertools

import numpy as np
import pytest
import torch

from logchain import kernels as devices
from logchain import reference
from logchain.kernels.plain import topk_paths as plain_topk
from logchain.kernels.plain import viterbi as plain_viterbi
from logchain.topk_paths import topk_paths
from logchain.viterbi import viterbi
from tests import oracle
from tests.best_paths import BOTH, assert_best, ranked, run, truth, weigh
from tests.contract import assert_values
from tests.families import FAMILIES, Chain, dense
from tests.layouts import BATCHES, STEPS, broadcast

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["cpu", "plain"])
def room(request, monkeypatch):
    """The loops in C, and torch's own operations."""
    if request.param == "plain":
        monkeypatch.setattr(devices, "path_kernels", lambda tensor: plain_viterbi)
        monkeypatch.setattr(devices, "topk_kernels", lambda tensor: plain_topk)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_best_path(name, dtype, room):
    for each in (False, True):
        for log in (False, True):
            chain, known = truth(name, dtype, each, log)
            assert assert_best(chain, known=known).score.dtype == dtype


@pytest.mark.parametrize("name", ["dense", "sharp", "detour", "left_to_right", "one_dead", "sparse"])
@pytest.mark.parametrize("lengths", [(5, 1, 3), (2, 2, 4), (1, 1, 1)], ids=str)
def test_lengths(name, lengths, room):
    for dtype, own in itertools.product((F32, F64), (False, True)):
        chain, known = truth(name, dtype, own, own, lengths)
        assert_best(chain, list(lengths), known)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ties_go_to_the_lowest_state_from_the_last_variable_back(dtype, room):
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
def test_batch_axes_broadcast(batches, steps):
    chain = broadcast(batches, steps)
    expected, found = reference.viterbi(*chain[:3]), run(chain)
    np.testing.assert_array_equal(found.states, expected.states)
    np.testing.assert_allclose(found.score, expected.score, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "sparse", "bakis_jump"])
def test_dtypes(name, dtype):
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


@BOTH
@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "impossible", "v1"])
def test_nan_stays_in_its_sequence(name, value, operand, question, room):
    chain = FAMILIES[name](F32, each=True)
    clean = question(chain)
    dirty = {key: getattr(chain, key).clone() for key in ("x", "bulk", "p0")}
    if dirty[operand].numel() == 0:
        return
    dirty[operand][1, 0].flatten()[-1] = value
    dirty["x"].requires_grad_()
    states, score = question(Chain(**dirty))
    assert score[1, 0].isnan().all() and (states[1, 0] == -1).all()
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(states[others], clean[0][others]) and torch.equal(score[others], clean[1][others])
    score[others].sum().backward()
    assert dirty["x"].grad.isfinite().all()


def test_nan_of_a_shared_matrix_reaches_who_gets_there(room):
    chain = dense(F32, v=5)
    clean = run(chain, [2, 5, 3])
    chain.bulk[..., 2, 1, 1] = NAN
    found = run(chain, [2, 5, 3])
    assert found.score[1].isnan().all() and (found.states[1] == -1).all()
    assert torch.equal(found.states[::2], clean.states[::2]) and torch.equal(found.score[::2], clean.score[::2])


def test_what_is_impossible(room):
    chain = FAMILIES["impossible"](F32)
    x = chain.x.clone().requires_grad_()
    found = viterbi(x, chain.bulk, chain.p0)
    assert (found.score == -INF).all() and (found.states == -1).all()
    found.score.sum().backward()
    assert (x.grad == 0).all()
    assert run(Chain(torch.full((2, 3, 4), -INF), torch.ones(1, 4, 4), torch.ones(4))).score.tolist() == [-INF, -INF]
    assert run(Chain(torch.zeros(3, 4), torch.ones(1, 4, 4), torch.zeros(4))).score == -INF
    assert run(Chain(torch.zeros(3, 4), torch.zeros(1, 4, 4), torch.ones(4))).score == -INF


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
def test_the_gradient_counts_what_the_path_passes(log):
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


@BOTH
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("own", ["", "bulk", "p0"])
def test_packed_sequences_are_as_if_alone(own, dtype, question):
    """Values and gradients; one is impossible, one holds NaN, and sums of large terms cancel."""
    lengths, generator = [3, 1, 9, 4, 30, 1], torch.Generator().manual_seed(0)
    x, bulk = torch.randn(48, 4, generator=generator), torch.rand(48, 4, 4, generator=generator)
    p0, ends = 0.1 + torch.rand(6, 4, generator=generator), torch.tensor(lengths).cumsum(0)
    x[13:17], x[5], x[44] = x[13:17] * 1e6, -INF, NAN
    chain = Chain(x, bulk if own == "bulk" else bulk[:1], p0 if own == "p0" else p0[0]).to(dtype)
    x, bulk, p0 = leaves = [operand.requires_grad_() for operand in chain[:3]]
    states, score = question(chain, cu_seqlens=torch.cat([ends.new_zeros(1), ends]))
    alone = [
        question(Chain(x[start:end], bulk[start + 1 : end] if own == "bulk" else bulk, p0[i] if own == "p0" else p0))
        for i, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False))
    ]
    assert torch.equal(states, torch.cat([one[0] for one in alone], -1)) and score.dtype == dtype
    expected = torch.stack([one[1] for one in alone])
    assert (expected[2] == -INF).all() and expected[4].isnan().all()
    torch.testing.assert_close(score, expected, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    sums = (value.nan_to_num(0.0, neginf=0.0).cos().sum() for value in (score, expected))
    for one, other in zip(*(torch.autograd.grad(total, leaves) for total in sums), strict=True):
        torch.testing.assert_close(one, other)


def test_wrong_arguments_are_refused():
    chain = dense(F32, v=4, c=3)
    for question in (run, ranked):
        with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 5 to 5"):
            question(chain, [5, 5, 5])
        with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 0 to 5"):
            question(chain, torch.tensor([0, 5, 1]))
        with pytest.raises(ValueError, match="bulk: expected shape"):
            question(chain._replace(bulk=chain.bulk[..., :2]))
        with pytest.raises(ValueError, match="lengths: expected None beside cu_seqlens"):
            question(Chain(chain.x[0, 0], chain.bulk[0, 0, :1], chain.p0[0, 0]), 3, cu_seqlens=torch.tensor([0, 4]))
    for k, error, message in (
        (0, ValueError, "k: expected at least 1, got 0"),
        (True, TypeError, "k: expected an integer, got True"),
        (2.0, TypeError, "k: expected an integer, got 2.0"),
    ):
        with pytest.raises(error, match=message):
            topk_paths(*chain[:3], k)
