"""One recursion adds weights in whatever way it is told, and differentiates through it."""

import numpy as np
import pytest
import torch

from logchain import reference
from logchain.semirings import LOG, MAX, Semiring, total
from logchain.viterbi import viterbi
from tests import oracle
from tests.families import F32, F64, FAMILIES, INF, dense, small


def tempered(terms, dim):
    """A sum that is NaN on terms of -inf alone."""
    top = terms.amax(dim, keepdim=True)
    return (4 * (terms - top)).exp().sum(dim).log() / 4 + top.squeeze(dim)


SOFT = Semiring("soft maximum", tempered)


def run(chain, semiring, lengths=None):
    return total(*chain[:3], semiring, log_params=chain.log_params, lengths=lengths)


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
    torch.library.opcheck(torch.ops.logchain.checked.default, (lengths, 4, "lengths"))
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 1 to 5"):
        run(chain, LOG, torch.tensor([1, 5, 2]))


def test_a_semiring_that_is_none_is_named():
    with pytest.raises(TypeError, match="semiring: expected a logchain.semirings.Semiring, got str"):
        total(*dense(F32)[:3], "max")
