"""One recursion adds weights in whatever way it is told, and differentiates through it."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from logchain.semirings import LOG, MAX, Semiring, total
from logchain.viterbi import viterbi
from tests import oracle
from tests.best_paths import small, truth
from tests.contract import Truth, assert_gradient, assert_values
from tests.families import FAMILIES, LARGE, Chain, dense

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


def tempered(terms, dim):
    """A sum that is NaN on terms of -inf alone."""
    top = terms.amax(dim, keepdim=True)
    return (4 * (terms - top)).exp().sum(dim).log() / 4 + top.squeeze(dim)


SOFT = Semiring("soft maximum", tempered)


def run(chain, semiring, lengths=None):
    return total(*chain[:3], semiring, log_params=chain.log_params, lengths=lengths)


@pytest.mark.parametrize(("dtype", "lengths"), [(F32, (5, 2, 1)), (F64, None)], ids=["float32-lengths", "float64"])
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in LARGE and name not in ("v1", "v2", "v3", "far_start1")]
)
def test_log_is_the_product(name, dtype, lengths):
    if lengths and FAMILIES[name](F64).x.shape[-2] < 5:
        return
    for each in (False, True):
        chain = FAMILIES[name](dtype, each=each)
        known = Truth(chain, lengths, by_logs=not chain.log_params)
        leaves = chain._replace(**{key: getattr(chain, key).clone().requires_grad_() for key in ("x", "bulk", "p0")})
        out = run(leaves, LOG, lengths and list(lengths))
        assert out.dtype == dtype
        assert_values(out, known.log_norm, known.value_bound(dtype))
        out.sum().backward()
        assert_gradient(leaves.x, known.states, known.reach.states, known.gradient_bound(known.states))
        counts, reach = known.transitions, known.reach.transitions
        assert_gradient(leaves.bulk, counts, reach, known.gradient_bound(counts), chain.log_params)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LARGE])
def test_max_is_the_best_path(name, dtype):
    for each in (False, True):
        chain, known = truth(name, dtype, each, False)
        assert_values(run(chain, MAX), known.score, known.bound)


def test_the_gradient_of_max_is_the_best_path():
    for name in ("dense", "sparse", "one_dead", "left_to_right"):
        chain = FAMILIES[name](F64)
        x = chain.x.clone().requires_grad_()
        run(chain._replace(x=x), MAX).sum().backward()
        states = viterbi(*chain[:3], log_params=chain.log_params).states
        hot = torch.nn.functional.one_hot(states.clamp(min=0), x.shape[-1]) * (states >= 0)[..., None]
        assert torch.equal(x.grad, hot.double())


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_an_own_semiring_adds_all_paths(seed, zeros):
    chain = small(seed, zeros)
    weights = oracle.paths(*(operand.numpy() for operand in chain[:3]))
    x = chain.x.clone().requires_grad_()
    out = run(chain._replace(x=x), SOFT)
    expected = sum(weight**4 for weight in weights.values())
    out.backward()
    if expected == 0:
        assert out == -INF and (x.grad == 0).all()
        return
    assert out.item() == pytest.approx(float(expected.ln()) / 4, rel=1e-13, abs=1e-13)
    share = np.zeros(x.shape)
    for path, weight in weights.items():
        share[range(len(path)), path] += float(weight**4 / expected)
    np.testing.assert_allclose(x.grad, share, atol=1e-13)


def test_it_is_differentiated_twice():
    chain = dense(F64, v=4, c=3, n=2, t=1)
    operands = [operand.clone().requires_grad_() for operand in chain[:3]]
    for semiring in (LOG, SOFT):
        assert torch.autograd.gradgradcheck(lambda *o, s=semiring: total(*o, s), operands)


@pytest.mark.parametrize("semiring", [LOG, MAX], ids=lambda semiring: semiring.name)
def test_nan_stays_in_its_sequence(semiring):
    chain = dense(F32, v=5)
    clean = run(chain, semiring, [2, 5, 3])
    bulk = chain.bulk.clone()
    bulk[..., 2, 1, 1] = NAN
    x = chain.x.clone().requires_grad_()
    found = run(Chain(x, bulk, chain.p0), semiring, [2, 5, 3])
    assert found[1].isnan().all() and torch.equal(found[::2], clean[::2])
    found[::2].sum().backward()
    assert x.grad[::2].isfinite().all()


@pytest.mark.parametrize("batch", [(), (0,), (3, 2), (2, 0)], ids=str)
def test_shapes(batch):
    for v, c in ((1, 1), (1, 3), (4, 1), (5, 3)):
        chain = Chain(torch.randn(*batch, v, c, dtype=F64), torch.rand(1, c, c, dtype=F64), torch.rand(c, dtype=F64))
        torch.testing.assert_close(run(chain, LOG), logchain.product(*chain[:3]))
        assert torch.equal(run(chain, MAX), run(chain.logs(), MAX))
        leaves = [operand.clone().requires_grad_() for operand in chain[:3]]
        total(*leaves, LOG).sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


def test_compiles_and_maps():
    chain = dense(F64, v=4, c=3)
    x, bulk, p0 = chain[:3]
    lengths = torch.tensor([[4, 1, 2], [3, 4, 1]])

    def function(x, ends):
        return total(x + 1, bulk, p0, LOG, lengths=ends)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    rows = torch.stack([function(x, ends) for ends in lengths])
    torch.testing.assert_close(compiled(x, lengths[0]), rows[0])
    torch.testing.assert_close(torch.vmap(function, (None, 0))(x, lengths), rows)
    slope = torch.func.grad(lambda x: function(x, lengths[0]).sum())(x)
    torch.testing.assert_close(slope[0].numpy(), reference.marginals(x + 1, bulk, p0).states[0])
    torch.library.opcheck(torch.ops.logchain.checked_lengths.default, (lengths, 4))
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 1 to 5"):
        run(chain, LOG, torch.tensor([1, 5, 2]))


def test_zeros_have_no_gradient_under_torch_func():
    chain = FAMILIES["sparse"](F64)
    slope = torch.func.grad(lambda bulk: run(chain._replace(bulk=bulk), LOG)[1, 1])(chain.bulk)
    assert slope.isfinite().all() and (slope[chain.bulk == 0] == 0).all()


@pytest.mark.parametrize("name", ["dense", "sparse", "one_dead"])
def test_total_takes_a_semiring(name):
    chain = FAMILIES[name](F64)
    lengths = [4, 1, 3]
    options = {"log_params": chain.log_params, "lengths": lengths}
    best = viterbi(*chain[:3], **options).score
    assert torch.equal(total(*chain[:3], MAX, **options), best)
    assert torch.equal(total(*chain[:3], SOFT, **options), run(chain, SOFT, lengths))
    packed = torch.cat([row[:end] for row, end in zip(chain.x[:, 0], lengths, strict=True)])
    found = total(packed, chain.bulk[0, 0, :1], chain.p0[0, 0], MAX, cu_seqlens=torch.tensor([0, 4, 5, 8]))
    expected = total(chain.x[:, :1], chain.bulk[:, :, :1], chain.p0, MAX, lengths=lengths)[:, 0]
    torch.testing.assert_close(found, expected)


def test_a_semiring_that_is_none_is_named():
    with pytest.raises(TypeError, match="semiring: expected a logchain.semirings.Semiring, got str"):
        total(*dense(F32)[:3], "max")


@pytest.mark.parametrize("sets", [0, 1])
def test_an_empty_batch(sets):
    out = total(torch.zeros(0, 3, 2), torch.ones(sets, 1, 2, 2), torch.ones(2), LOG)
    assert out.shape == (0,)
