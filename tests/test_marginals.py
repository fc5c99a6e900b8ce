"""Posteriors, messages, entropy and divergence: against sums over all paths, the reference, and each sequence alone."""

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels, reference
from tests import oracle
from tests.best_paths import numbers
from tests.contract import assert_values, drawn, of_steps, sum_to, ulp, unit
from tests.families import FAMILIES, PAIRS, Chain, Draw, dense

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


def assert_posteriors(found: torch.Tensor, truth: np.ndarray, reach: np.ndarray, bound: np.ndarray) -> None:
    """Within the bound, and exactly 0 where nothing can be."""
    found = found.detach().double().numpy()
    assert found.shape == truth.shape
    assert (found[reach == 0] == 0).all(), "the impossible has a posterior"
    error = np.abs(found - truth)
    assert (error <= bound).all(), f"error {error.max():.3g}, {np.nanmax(error / bound):.3g} times the bound"


@PAIRS
@pytest.mark.parametrize("name", FAMILIES)
def test_marginals_of_every_family(name, dtype, each, log):
    chain, truth = drawn(name, dtype, each, log)
    for transitions in (None, "sum", "full"):
        found = logchain.marginals(*chain[:3], transitions=transitions, log_params=chain.log_params)
        assert found.states.dtype == found.log_norm.dtype == dtype
        assert_values(found.log_norm, truth.log_norm, truth.value_bound(dtype))
        assert_posteriors(found.states, truth.states, truth.reach.states, truth.gradient_bound(truth.states))
        if transitions is None:
            assert found.transitions is None
            continue
        counts, reach = truth.transitions, truth.reach.transitions
        allowed = truth.gradient_bound(counts)
        if transitions == "sum":
            shape = tuple(chain.bulk.shape)
            counts, reach, allowed = (sum_to(array, shape) for array in (counts, reach, allowed))
        assert_posteriors(found.transitions, counts, reach, allowed)


def sequences(chain: Chain):
    """Each index of the batch, with its operands."""
    x, bulk, p0 = numbers(chain)
    batch = x.shape[:-2]
    bulk, p0 = np.broadcast_to(bulk, (*batch, *bulk.shape[-3:])), np.broadcast_to(p0, (*batch, p0.shape[-1]))
    for index in np.ndindex(batch):
        yield index, (x[index], bulk[index], p0[index])


# what has 301 states is too much for decimals
@pytest.mark.parametrize(("dtype", "each"), [(F32, False), (F64, True)], ids=["float32 shared", "float64 each"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_messages_and_entropy_of_every_family(name, dtype, each):
    """Each entry of a message is a log-partition of its own: as exact as one, however far below the others."""
    chain = FAMILIES[name](dtype, each=each, n=2, t=1)
    options = {"log_params": chain.log_params}
    found = logchain.forward_backward(*chain[:3], **options)
    entropies = logchain.entropy(*chain[:3], **options)
    assert {message.dtype for message in found} == {entropies.dtype} == {dtype}
    v, c = chain.x.shape[-2:]
    for index, operands in sequences(chain):
        for one, truth in zip(found, oracle.messages(*operands, **options), strict=False):
            deep = truth.max(-1, keepdims=True) - np.where(np.isfinite(truth), truth, np.inf)
            deep = max(0.0, np.where(np.isfinite(deep), deep, 0.0).max(initial=0.0))
            assert_values(one[index], truth, ulp(truth, dtype) + of_steps(v, c, deep, dtype=F64))
        truth, size = np.array(oracle.entropy(*operands, **options)), abs(float(found.log_norm[index]))
        size = size if np.isfinite(size) else 0.0
        assert_values(entropies[index], truth, ulp(truth, dtype) + 2.0**-49 * max(1.0, size))


@pytest.mark.parametrize("lengths", [None, [[5, 1], [2, 4]]], ids=["whole", "lengths"])
@pytest.mark.parametrize("broken", [None, 0, 1, 2], ids=["good", "x", "bulk", "p0"])
@pytest.mark.parametrize(("dtype", "each"), [(F32, False), (F64, True)], ids=["float32 shared", "float64 each"])
def test_messages_in_c_are_those_in_torch(dtype, each, broken, lengths, monkeypatch):
    """Entries far below the others, axes in any order, and a NaN, after which nothing is possible."""
    chain = FAMILIES["dense"](dtype, each=each, n=2, t=2)
    operands = [chain.x[..., :5, :].clone(), chain.bulk[..., :4, :, :].clone(), chain.p0.clone()]
    operands[0][..., ::2] -= 3000
    operands[0][0, 0, 3] = -INF
    operands[1] = operands[1].mT.contiguous().mT
    if broken is not None:
        operands[broken][(0,) * operands[broken].dim()] = torch.nan
    found = logchain.forward_backward(*operands, lengths=lengths)  # without lengths, a short call
    monkeypatch.setattr(kernels, "in_c", lambda x: False)
    for one, truth in zip(found, logchain.forward_backward(*operands, lengths=lengths or 5), strict=True):
        torch.testing.assert_close(
            one, truth, rtol=2 * unit(dtype), atol=of_steps(5, 6, 0.0, dtype=F64), equal_nan=True
        )
    bad = found.log_norm.isnan()
    assert bad.any() == (broken is not None)
    assert not bad.all() or (not each and broken != 0)


def small(seed: int, zeros: bool, v: int = 4, c: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(v, c, generator=generator, dtype=F64)
    bulk = torch.rand(v - 1, c, c, generator=generator, dtype=F64)
    p0 = torch.rand(c, generator=generator, dtype=F64)
    if zeros:
        bulk[torch.rand(bulk.shape, generator=generator, dtype=F64) < 0.4] = 0.0
        x[1, 0], p0[2] = -INF, 0.0
    return [x, bulk, p0]


def probabilities(operands: list[torch.Tensor]) -> dict[tuple[int, ...], float]:
    weights = oracle.paths(*(operand.numpy() for operand in operands))
    total = sum(weights.values())
    return {path: float(weight / total) if total else 0.0 for path, weight in weights.items()}


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("seed", range(4))
def test_every_question_against_the_sum_over_all_paths(seed, zeros):
    operands = small(seed, zeros)
    chances = probabilities(operands)
    states, pairs = np.zeros((4, 3)), np.zeros((3, 3, 3))
    for path, chance in chances.items():
        for i, state in enumerate(path):
            states[i, state] += chance
        for i in range(3):
            pairs[i, path[i], path[i + 1]] += chance
    found = logchain.marginals(*operands, transitions="full")
    np.testing.assert_allclose(found.states, states, atol=1e-14)
    np.testing.assert_allclose(found.transitions, pairs, atol=1e-14)
    entropy = -sum(chance * np.log(chance) for chance in chances.values() if chance)
    np.testing.assert_allclose(logchain.entropy(*operands), entropy, atol=1e-13)
    other = [operand.roll(1, -1) for operand in small(seed + 10, False)]
    chances_of_other = probabilities(other)
    divergence = sum(chance * np.log(chance / chances_of_other[path]) for path, chance in chances.items() if chance)
    np.testing.assert_allclose(logchain.kl_divergence(tuple(operands), tuple(other)), divergence, atol=1e-13)
    messages = logchain.forward_backward(*operands)
    joint = torch.logsumexp(messages.forward + messages.backward, -1)
    torch.testing.assert_close(joint, messages.log_norm.expand(4), rtol=1e-14, atol=1e-14)


def test_divergence_where_one_forbids_what_the_other_does():
    p, q = small(0, False), small(1, True)
    assert logchain.kl_divergence(tuple(p), tuple(q)) == INF
    assert logchain.kl_divergence(tuple(q), tuple(p)) < INF
    for index in range(3):  # each operand alone
        assert logchain.kl_divergence(tuple(p), (*p[:index], q[index], *p[index + 1 :])) == INF
    assert logchain.kl_divergence(tuple(q), tuple(q)).abs() < 1e-14
    impossible = [torch.full_like(p[0], -INF), *p[1:]]
    assert logchain.kl_divergence(tuple(impossible), tuple(p)) == 0
    assert logchain.kl_divergence(tuple(p), tuple(impossible)) == INF
    assert logchain.entropy(*impossible) == 0


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("each", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(("n", "v", "c"), [(1, 70, 1), (1, 6, 5), (60, 5, 9), (3, 4, 33)])
def test_entropy_and_divergence_in_c_are_those_in_torch(n, v, c, each, log, monkeypatch):
    """Rows in groups, panels that overlap, sequences of several lengths, and zeros of q that p has too."""
    generator = torch.Generator().manual_seed(0)
    p, q = (
        [torch.randn(n, v, c, generator=generator) - 100 * k, torch.rand(*own, c, c, generator=generator) * 1e6**k]
        for k, own in enumerate((n, v - 1) if one else (1, 1) for one in each)
    )
    for x, bulk in (p, q):
        x[..., 1, 1:2] = -INF
        bulk[..., 2:3, 3:4] = 0.0
    p, q = ((x, bulk.log() if log else bulk, torch.ones(c)) for x, bulk in (p, q))
    for lengths in (None, torch.arange(n) % v + 1):
        options = {"log_params": log, "lengths": lengths}
        found = logchain.entropy(*p, **options), logchain.kl_divergence(p, q, **options)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "in_c", lambda x: False)
            expected = logchain.entropy(*p, **options), logchain.kl_divergence(p, q, **options)
        for one, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(one, truth, rtol=2 * unit(F32), atol=1e-11)


def test_small_entropies_and_divergences_of_large_partitions():
    """|log Z| is 5e5, a value 1e-3: what is added to all potentials changes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2000, 4, generator=generator) * 256).round() / 256
    x[:, 0] += 22
    other = x + (torch.randn(2000, 4, generator=generator) * 64).round() / 256
    bulk, p0 = torch.rand(1, 4, 4, generator=generator), torch.ones(4)
    for shift in (0.0, 250.0, -250.0):
        found = (
            logchain.entropy(x + shift, bulk, p0),
            logchain.kl_divergence((x + shift, bulk, p0), (other - shift, bulk, p0)),
        )
        if not shift:
            expected = found
            assert 1e-4 < found[0] < 1e-2 and 1e-7 < found[1] < 1e-2
        torch.testing.assert_close(found, expected, rtol=2 * unit(F32), atol=0)


def test_divergence_of_every_family_from_a_dense_chain():
    for name in FAMILIES:
        chain = FAMILIES[name](F64)
        options = {"log_params": chain.log_params}
        sizes = dict(zip("ntvc", chain.x.shape, strict=True))
        other = dense(F64, 5, **sizes)
        other = other.logs() if chain.log_params else other
        for p, q in ((chain, other), (other, chain)):
            found = logchain.kl_divergence(p[:3], q[:3], **options).numpy()
            expected = reference.kl_divergence(numbers(p), numbers(q), **options)
            # the reference's own rounding: posteriors to |log Z| spacings, times potentials as large
            size = max(float(tensor[tensor.isfinite()].abs().max()) for tensor in (chain.x, other.x))
            truth = reference.product(*numbers(p), **options), reference.product(*numbers(q), **options)
            size = max(1.0, size, *(np.abs(norm[np.isfinite(norm)]).max(initial=0.0) for norm in truth))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-50 * size**2)


def test_posteriors_sum_to_one_however_large_the_partition():
    draw = Draw(0, 1, 1, 2000, 8, False)
    x = (250.0 + draw.x(3.0)).float()
    found = logchain.marginals(x, draw.bulk().float(), draw.p0().float())
    assert found.log_norm > 5e5 - 1e4
    assert (found.states.sum(-1) - 1).abs().max() < 1e-5


def test_results_can_be_changed_in_place():
    """None of them is what its gradient is computed from."""
    operands = [operand.requires_grad_() for operand in small(0, False)]
    gradients = []
    for shift in (0.0, 1.0):
        for found in (logchain.product(*operands), *logchain.marginals(*operands, transitions="sum")):
            found -= shift
            weights = torch.arange(found.numel(), dtype=F64).sin().view(found.shape) + 1
            gradients.append(torch.autograd.grad(found, operands[0], weights, retain_graph=True)[0])
    assert len(gradients) == 8
    for one, other in zip(gradients[:4], gradients[4:], strict=True):
        assert torch.equal(one, other) and one.ne(0).any()


def test_entropy_does_not_lose_digits_to_an_offset():
    """Nor does its definition."""
    draw = Draw(0, 1, 1, 60, 4, False)
    x, bulk, p0 = draw.x(3.0) + 1e4, draw.bulk(), draw.p0()
    expected = oracle.entropy(x[0, 0].numpy(), bulk[0, 0].numpy(), p0[0, 0].numpy())
    assert abs(float(logchain.entropy(x, bulk, p0)) - expected) < 1e-8
    assert abs(float(reference.entropy(x, bulk, p0)[0, 0]) - expected) < 1e-10


def test_wrong_arguments():
    chain = dense(F32, v=3, c=2)
    with pytest.raises(ValueError, match="transitions: expected None or 'sum' or 'full', got 'all'"):
        logchain.marginals(*chain[:3], transitions="all")
    with pytest.raises(TypeError, match="p: expected a tuple"):
        logchain.kl_divergence(chain.x, chain[:3])
    with pytest.raises(TypeError, match=r"q: expected a tuple \(x, bulk, p0\), got 2 of them$"):
        logchain.kl_divergence(chain[:3], chain[:2])
    with pytest.raises(ValueError, match="q: expected x"):
        logchain.kl_divergence(chain[:3], dense(F32, v=4, c=2)[:3])
    for question in (logchain.forward_backward, logchain.entropy, logchain.marginals):
        with pytest.raises(ValueError, match="bulk: expected shape"):
            question(chain.x, chain.bulk[..., :1], chain.p0)


def test_float64_is_good_to_its_own_rounding():
    chain, truth = drawn("dense", F64, False, False)
    assert unit(F64) < 1e-8
    found = logchain.marginals(*chain[:3])
    assert np.abs(found.states.numpy() - truth.states).max() < 1e-13


def test_a_third_derivative_is_refused():
    operands = [operand.requires_grad_() for operand in small(0, False)]
    states = logchain.marginals(*operands).states
    (first,) = torch.autograd.grad(states[0, 0], operands[0], create_graph=True)
    with pytest.raises(RuntimeError, match="expected at most two derivatives, got a third"):
        first.sum().backward()
