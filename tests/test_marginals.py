"""Posteriors, messages, entropy and divergence: against sums over all paths, and where large numbers cancel."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from logchain.memory import peak_bytes
from logchain.transitions import Banded
from tests import oracle
from tests.contract import depth, gradient_bound, unit, value_bound
from tests.expected import assert_posteriors
from tests.families import F32, F64, INF, small


def probabilities(operands: tuple[torch.Tensor, ...]) -> dict[tuple[int, ...], float]:
    weights = oracle.paths(*(operand.numpy() for operand in operands))
    total = sum(weights.values())
    return {path: float(weight / total) if total else 0.0 for path, weight in weights.items()}


@pytest.mark.parametrize("zeros", [0.0, 0.4], ids=["dense", "zeros"])
@pytest.mark.parametrize("seed", range(4))
def test_entropy_and_divergence_are_sums_over_all_paths(seed, zeros):
    operands = small(seed, zeros, v=4)[:3]
    chances = probabilities(operands)
    entropy = -sum(chance * np.log(chance) for chance in chances.values() if chance)
    np.testing.assert_allclose(logchain.entropy(*operands), entropy, atol=1e-13)
    other = tuple(operand.roll(1, -1) for operand in small(seed + 10, v=4)[:3])
    chances_of_other = probabilities(other)
    divergence = sum(chance * np.log(chance / chances_of_other[path]) for path, chance in chances.items() if chance)
    np.testing.assert_allclose(logchain.kl_divergence(operands, other), divergence, atol=1e-13)


def test_entropy_of_sharp_left_to_right_chains_keeps_no_counts_of_steps():
    generator, v, c = torch.Generator().manual_seed(0), 100, 100
    line = Banded(torch.rand(2, c, generator=generator) + 0.1, [0, 1])
    x, p0 = 30 * torch.randn(2, v, c, generator=generator), torch.rand(c, generator=generator)
    lengths, bulk = torch.tensor([100, 60]), line.to_dense()
    exact = logchain.entropy(x.double(), line.to(F64), p0.double(), lengths=lengths)
    torch.testing.assert_close(logchain.entropy(x, bulk, p0, lengths=lengths).double(), exact, rtol=1e-6, atol=0)
    assert peak_bytes(lambda: [logchain.entropy(x, bulk, p0, lengths=lengths)]) < (v - 1) * c**2 * 4


def test_divergence_where_one_forbids_what_the_other_does():
    p, q = small(0)[:3], small(3, 0.4)[:3]
    assert logchain.kl_divergence(p, q) == INF
    assert logchain.kl_divergence(q, p) < INF
    for index in range(3):  # each operand alone
        assert logchain.kl_divergence(p, (*p[:index], q[index], *p[index + 1 :])) == INF
    assert logchain.kl_divergence(q, q).abs() < 1e-14
    impossible = torch.full_like(p[0], -INF), *p[1:]
    assert logchain.kl_divergence(impossible, p) == 0
    assert logchain.kl_divergence(p, impossible) == INF
    assert logchain.entropy(*impossible) == 0


def test_divergence_rare_forbidden_path_infinite():
    """A path of probability 2^-1154 that the other chain forbids, and none where it forbids what has no probability."""
    x, p0 = torch.zeros(3, 2, dtype=F64), torch.zeros(2, dtype=F64)
    bulk = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [-800.0, -800.0]]], dtype=F64)
    closed = bulk.clone()
    closed[0, :, 1] = -INF
    assert logchain.kl_divergence((x, bulk, p0), (x, closed, p0), log_params=True) == INF
    assert logchain.kl_divergence((x, closed, p0), (x, bulk, p0), log_params=True).abs() < 1e-14
    closed[1, 1] = bulk[1, 1] = -INF
    assert logchain.kl_divergence((x, bulk, p0), (x, closed, p0), log_params=True) == 0


@pytest.mark.parametrize("scale", [3.0, 2000.0], ids=["near", "far"])
@pytest.mark.parametrize(("sets", "steps"), [(1, 1), (3, 1), (1, 6), (3, 6)])
def test_entropy_and_divergence_in_blocks_equal_whole(sets, steps, scale, monkeypatch):
    """However few steps and sequences are computed together, and where potentials of a step lie far apart."""
    generator = torch.Generator().manual_seed(0)
    rand = partial(torch.rand, generator=generator, dtype=F64)
    p, q = ((rand(3, 2, 7, 5) * scale, rand(sets, 1, steps, 5, 5), rand(5)) for _ in range(2))
    p[0][0, 0] *= 1000  # recomputed pair by pair
    p[1][..., 0, 1] = q[1][..., 0, 1] = 0.0
    lengths = torch.tensor([[7, 1], [3, 7], [2, 6]])

    def found() -> list[torch.Tensor]:
        return [f(*chains, lengths=lengths) for f, chains in ((logchain.entropy, p), (logchain.kl_divergence, (p, q)))]

    whole = found()
    for (f, chains), value in zip(((reference.entropy, [p]), (reference.kl_divergence, [p, q])), whole, strict=True):
        arrays = [tuple(operand.numpy() for operand in chain) for chain in chains]
        expected = f(*(arrays[0] if len(arrays) == 1 else arrays), lengths=lengths.numpy())
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10 * scale)
    with logchain.kernels.use("plain", "cpu"):
        torch.testing.assert_close(found(), whole, rtol=1e-10, atol=1e-10 * scale)
    for size in ("_BLOCK", "_COUNTS"):
        monkeypatch.setattr(f"logchain.kernels.plain.entropy.{size}", 1)
        torch.testing.assert_close(found(), whole, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_small_entropies_and_divergences_of_large_partitions(dtype):
    """|log Z| is 5e5, a value 1e-3: what is added to all potentials changes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2000, 4, generator=generator) * 256).round().to(dtype) / 256
    x[:, 0] += 22
    other = x + (torch.randn(2000, 4, generator=generator) * 64).round() / 256
    bulk, p0 = torch.rand(1, 4, 4, generator=generator).to(dtype), torch.ones(4, dtype=dtype)
    for shift in (0.0, 250.0, -250.0):
        found = (
            logchain.entropy(x + shift, bulk, p0),
            logchain.kl_divergence((x + shift, bulk, p0), (other - shift, bulk, p0)),
        )
        if not shift:
            expected = found
            assert 1e-4 < found[0] < 1e-2 and 1e-7 < found[1] < 1e-2
        torch.testing.assert_close(found, expected, rtol=2 * unit(F32), atol=0)
    if dtype == F64:  # the large parts cancel within each step
        exact = oracle.entropy(*(operand.numpy() for operand in (x, bulk.expand(1999, 4, 4), p0)))
        torch.testing.assert_close(expected[0].item(), exact, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("each", [False, True], ids=["one matrix", "each"])
def test_entropy_and_divergence_far_potentials_equal_impossible(dtype, each):
    """Loops raise emissions that are far below the others, and finite potentials may be as low as floats are."""
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 3, 9, 5, generator=generator).to(dtype).unbind()
    bulk, p0 = torch.rand(3, 8 if each else 1, 5, 5, generator=generator).to(dtype), torch.ones(5, dtype=dtype)
    bulk[:, :, 1] = 0.0
    low = torch.rand(3, 9, 5, generator=generator) < 0.3
    expected = None
    for value in (-INF, torch.finfo(dtype).min, -1e9, -800.0):
        p, q = (one.masked_fill(low, value) for one in (x, other))
        found = logchain.entropy(p, bulk, p0), logchain.kl_divergence((p, bulk, p0), (q, bulk.sqrt(), p0))
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=100 * unit(dtype), atol=0)


def test_results_can_be_changed_in_place():
    """None of them is what its gradient is computed from."""
    operands = [operand.requires_grad_() for operand in small(0)[:3]]
    gradients = []
    for shift in (0.0, 1.0):
        for found in (logchain.product(*operands), *logchain.marginals(*operands, transitions="sum")):
            found -= shift
            weights = torch.arange(found.numel(), dtype=F64).sin().view(found.shape) + 1
            gradients.append(torch.autograd.grad(found, operands[0], weights, retain_graph=True)[0])
    assert len(gradients) == 8
    for one, other in zip(gradients[:4], gradients[4:], strict=True):
        assert torch.equal(one, other) and one.ne(0).any()


def test_a_third_derivative_is_refused():
    x, *weights = operands = [operand.requires_grad_() for operand in small(0)[:3]]
    by_gradient = torch.autograd.grad(logchain.product(x, *weights), x, create_graph=True)[0]
    for states in by_gradient, logchain.marginals(*operands).states:
        (second,) = torch.autograd.grad(states[0, 0], x, create_graph=True)
        with pytest.raises(RuntimeError, match="expected at most two derivatives, got a third"):
            second.square().sum().backward()


@pytest.mark.parametrize("each", [False, True], ids=["one matrix", "each"])
def test_a_filter_of_millions_of_nats(each):
    """Every tenth state is known, so that what follows depends on ten variables, whatever log Z is."""
    draw = torch.Generator().manual_seed(0)
    v, c = 20_000, 4
    x = torch.randn(v, c, generator=draw) + 400
    x[::10, 1:] = -torch.inf
    bulk = torch.softmax(torch.randn(v - 1 if each else 1, c, c, generator=draw), -1)
    found = logchain.filtered(x, bulk, torch.full((c,), 1 / c))
    weights = np.exp(x.double().numpy() - 400).reshape(-1, 10, c)
    matrices = bulk.double().expand(v - 1, c, c).numpy()
    matrices = np.concatenate([matrices, matrices[:1]]).reshape(-1, 10, c, c)
    exact = np.zeros_like(weights)
    exact[:, 0, 0] = 1.0
    for i in range(1, 10):
        ahead = np.einsum("nk,nkj->nj", exact[:, i - 1], matrices[:, i - 1]) * weights[:, i]
        exact[:, i] = ahead / ahead.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        deep = max(depth(np.log(levels), exact).max() for levels in (exact, weights))
    assert found.log_norm > 7e6
    assert_posteriors(found.states.view(-1, 10, c), exact, exact, gradient_bound(exact, 10, c, deep, dtype=F32))
    # which differences of messages miss
    messages = logchain.forward_backward(x, bulk, torch.full((c,), 1 / c)).forward.softmax(-1)
    assert np.abs(messages.view(-1, 10, c).double().numpy() - exact).max() > 0.05


def test_messages_through_masks_and_a_step_without_states():
    """Potentials of -1e30 leave the range in which exponents are exact, and a step after that has no possible state."""
    x = torch.zeros(2, 6, 3)
    x[:, 1, 0], x[:, 2, 1], x[0, 4] = -1e30, -2e30, -math.inf
    found = logchain.forward_backward(x, torch.ones(1, 3, 3), torch.ones(3), lengths=torch.tensor([6, 5]))
    assert (found[0][0, 4:] == -math.inf).all() and (found[1][0, :4] == -math.inf).all()
    assert not any(part.isnan().any() for part in found)
    torch.testing.assert_close(found[2], torch.tensor([-math.inf, math.log(2 * 2 * 3**3)]))


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("c", [1, 3, 4, 7, 8, 11, 16])
def test_messages_of_few_states_and_of_weights_far_from_one(c, dtype):
    """One sequence of at most 16 states has separate loops; a matrix is far larger than 1, and x far smaller."""
    generator = torch.Generator().manual_seed(c)
    x = torch.randn(50, c, generator=generator, dtype=dtype) * 10 - 45
    bulk = torch.randn(1, c, c, generator=generator, dtype=dtype) * 3 + 40
    x[20, : c // 2], bulk[0, -1, : c // 2] = -math.inf, -math.inf
    found = logchain.forward_backward(x, bulk, x[0] / 10, log_params=True)
    exact = reference.forward_backward(*(each.double().numpy() for each in (x, bulk, x[0] / 10)), log_params=True)
    for part, truth in zip(found, exact, strict=True):
        finite = np.isfinite(truth)
        np.testing.assert_array_equal(np.isfinite(part.numpy()), finite)
        rounded = 50 * np.spacing(np.abs(truth[finite]).max())  # as the definition adds logarithms
        bound = rounded + value_bound(truth, 50, c, 60, dtype=dtype)
        assert (np.abs(part.double().numpy()[finite] - truth[finite]) <= bound[finite]).all()
