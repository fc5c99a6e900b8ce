"""`logchain.log_prob` is a path's share of all weight: exactly -inf, with gradient 0, where it has none."""

import itertools
import re

import numpy as np
import pytest
import torch

from logchain import reference
from logchain.log_prob import log_prob
from tests import oracle
from tests.best_paths import numbers
from tests.contract import Truth, assert_values, value_bound
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import STRANGE, behind, poisoned, strange

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


def every_path(v, c, *batch):
    """[c**v, *batch, v]."""
    paths = torch.tensor(list(itertools.product(range(c), repeat=v)))
    return paths.view(-1, *(1,) * len(batch), v).expand(-1, *batch, v)


def random_paths(count, chain):
    return torch.randint(chain.x.shape[-1], (count, *chain.x.shape[:-1]), generator=torch.Generator().manual_seed(0))


def assert_log_prob(chain, states, lengths=None, **options):
    truth = Truth(chain, lengths)
    out = log_prob(*chain[:3], states, log_params=chain.log_params, lengths=lengths, **options)
    assert out.dtype == truth.dtype
    options = {"log_params": chain.log_params, "lengths": lengths}
    expected = reference.log_prob(*numbers(chain), states, **options)
    found = out.detach().double().numpy()
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    possible = np.isfinite(expected)
    # the result's own rounding, and that of the float64 sum of the path's weight
    size = np.abs(np.where(possible, expected, 0.0))
    weight = size + np.abs(np.where(possible, truth.log_norm, 0.0))
    allowed = truth.value_bound(F64) + torch.finfo(truth.dtype).eps * size + 2.0**-52 * truth.steps * weight
    assert (np.abs(found[possible] - expected[possible]) <= allowed[possible]).all()


@pytest.mark.parametrize(
    ("dtype", "each", "log"),
    [(F32, False, False), (F32, True, True), (F64, True, False), (F64, False, True)],
    ids=["float32", "float32-each-log_params", "float64-each", "float64-log_params"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, dtype, each, log):
    # decimals take their time
    chain = FAMILIES[name](dtype, each=each, **({"c": 30} if name == "c301" and dtype == F64 else {}))
    chain = chain.logs() if log else chain
    best = chain.x.argmax(-1)
    assert_log_prob(chain, torch.cat([random_paths(3, chain), best[None], torch.zeros_like(best)[None]]))


@pytest.mark.parametrize("name", ["dense", "sparse", "left_to_right", "detour", "one_hot"])
def test_against_all_paths_whose_probabilities_sum_to_one(name):
    chain = FAMILIES[name](F64, n=1, t=1, v=4, c=4)
    weights = oracle.paths(*(array[0, 0] for array in numbers(chain)), log_params=chain.log_params)
    total = sum(weights.values())
    out = log_prob(*chain[:3], every_path(4, 4, 1, 1), log_params=chain.log_params)[:, 0, 0]
    np.testing.assert_allclose(out.exp(), [float(weight / total) for weight in weights.values()], rtol=1e-11, atol=0)
    assert abs(out.exp().sum() - 1) < 1e-12


@pytest.mark.parametrize("batch", [(), (3,), (3, 2), (2, 3, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("paths", [(), (4,), (2, 3), (0,)], ids=str)
def test_axes_of_paths_and_batches(batch, paths):
    draw = Draw(0, 1, 1, 5, 4, False)
    chain = Chain(draw.normal(*batch, 5, 4), 0.1 + draw.uniform(4, 4, 4), 0.1 + draw.uniform(4))
    states = torch.randint(4, (*paths, *batch, 5), generator=draw.generator)
    out = log_prob(*chain[:3], states)
    assert out.shape == (*paths, *batch)
    expected = reference.log_prob(*numbers(chain), states)
    np.testing.assert_allclose(out, expected, rtol=1e-12)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_one_state(v):
    chain = dense(F32, v=v, c=1)
    out = log_prob(*chain[:3], torch.zeros(3, 2, v, dtype=torch.int32))
    assert out.abs().max() < 1e-5


@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]], 4], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_lengths_and_what_lies_behind(lengths, each):
    chain = dense(F32, v=5, each=each)
    states = random_paths(4, chain)
    lengths = [lengths] * 3 if isinstance(lengths, int) else lengths
    after = behind(chain, lengths)
    assert_log_prob(chain, states, lengths)
    clean = log_prob(*chain[:3], states, lengths=lengths)
    for filling in (-1, 77):
        assert torch.equal(log_prob(*chain[:3], states.masked_fill(after, filling), lengths=lengths), clean)
    x, bulk, p0, _ = poisoned(chain, lengths)
    out = log_prob(x.requires_grad_(), bulk, p0, states, lengths=lengths)
    assert torch.equal(out, clean)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.isfinite().all() and (gradient[after] == 0).all()


def test_no_state_within_the_end_is_no_path():
    chain = dense(F32, v=5)
    x = chain.x.clone().requires_grad_()
    states = random_paths(1, chain)
    states[0, 1, 1, 2] = -1
    out = log_prob(x, *chain[1:3], states)
    assert out[0, 1, 1] == -INF and torch.isneginf(out).sum() == 1
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (gradient[1, 1] == 0).all() and (gradient[0] != 0).any() and gradient.isfinite().all()


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize("name", ["impossible", "one_dead", "sparse", "left_to_right", "detour"])
def test_what_is_impossible_has_no_gradient(name, log):
    chain = FAMILIES[name](F32, each=True)
    chain = chain.logs() if log else chain
    leaves = [tensor.clone().requires_grad_() for tensor in chain[:3]]
    states = torch.zeros(chain.x.shape[:-1], dtype=torch.int64)
    states[..., -1] = chain.x[..., -1, :].argmax(-1)
    out = log_prob(*leaves, states, log_params=chain.log_params)
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert gradient.isfinite().all() and gradient.shape == leaf.shape
        assert (gradient[torch.isneginf(out)] == 0).all()
    assert name not in ("impossible", "one_dead") or torch.isneginf(out).any()


def test_gradients_numerically():
    chain = dense(F64, n=2, t=1, v=4, c=3)
    states = random_paths(2, chain)
    operands = [tensor.clone().requires_grad_() for tensor in chain[:3]]
    for log in (False, True):
        leaves = operands if not log else [t.detach().clone().requires_grad_() for t in chain.logs()[:3]]

        def function(*leaves, log=log):
            return log_prob(*leaves, states, log_params=log, lengths=[4, 2])

        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def test_score_function_has_mean_zero():
    chain = dense(F64, n=1, t=1, v=3, c=3)
    x = chain.x.clone().requires_grad_()
    out = log_prob(x, *chain[1:3], every_path(3, 3, 1, 1))
    (gradient,) = torch.autograd.grad((out.detach().exp() * out).sum(), x)
    assert gradient.abs().max() < 1e-14


def test_vmap_and_grad_of_torch_func():
    chain = dense(F64, n=4, t=1, each=True)
    x, bulk, p0 = (tensor[:, 0] for tensor in chain[:3])
    states = torch.randint(6, (4, 17), generator=torch.Generator().manual_seed(0))
    expected = log_prob(x, bulk, p0, states)
    torch.testing.assert_close(torch.func.vmap(log_prob)(x, bulk, p0, states), expected)
    torch.testing.assert_close(
        torch.func.vmap(log_prob, in_dims=(0, None, None, None))(x, bulk[0], p0[0], states[0]),
        log_prob(x, bulk[:1], p0[:1], states[:1].expand(4, -1)),
    )
    each = torch.func.vmap(torch.func.grad(log_prob))(x, bulk, p0, states)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(each, torch.autograd.grad(log_prob(leaf, bulk, p0, states).sum(), leaf)[0])
    with pytest.raises(ValueError, match="^states: expected values"):
        torch.func.vmap(log_prob)(x, bulk, p0, states + 1)


@pytest.mark.parametrize("how", STRANGE)
def test_strange_strides(how):
    chain = dense(F32)
    assert_log_prob(strange(chain, how), random_paths(2, chain).movedim(-1, 0).contiguous().movedim(0, -1))


def test_small_differences_of_large_terms():
    """|log Z| is 5e5, of which a float32 subtraction would lose all that counts."""
    draw = Draw(0, 1, 1, 4096, 4, False)
    chain = Chain(draw.x() - 128.0, draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    states = chain.x.argmax(-1)
    out, truth = log_prob(*chain[:3], states), reference.log_prob(*numbers(chain), states)
    assert_values(out, truth, value_bound(truth, 4096, 4, dtype=F32))


def test_nan_stays_in_its_sequence():
    chain = dense(F32)
    x, states = chain.x.clone(), random_paths(2, chain)
    x[1, 0, 3, 2] = NAN
    states[:, 1, 0, 3] = 1
    x[1, 0, 4, 2], states[0, 1, 0, 4] = -INF, 2  # nor does an impossible path hide it
    out = log_prob(x, *chain[1:3], states)
    assert out[:, 1, 0].isnan().all() and out.isnan().sum() == 2


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        (None, TypeError, "states: expected a torch.Tensor, got NoneType"),
        (torch.zeros(3, 2, 17), TypeError, "states: expected integers, got float32"),
        (torch.zeros(3, 2, 17, dtype=torch.bool), TypeError, "states: expected integers, got bool"),
        (torch.zeros(3, 2, 17, dtype=torch.int64).to_sparse(), TypeError, "states: expected a dense tensor, got"),
        (torch.zeros(2, 17, dtype=torch.int64), ValueError, "states: expected shape [..., 3, 2, 17] to go with x [3,"),
        (torch.zeros(3, 2, 16, dtype=torch.int64), ValueError, "states: expected shape [..., 3, 2, 17] to go with x"),
        (torch.zeros(3, 1, 17, dtype=torch.int64), ValueError, "states: expected shape [..., 3, 2, 17] to go with x"),
        (torch.full((3, 2, 17), 6), ValueError, "states: expected values from -1 to c - 1 = 5, got 6 to 6"),
        (torch.full((3, 2, 17), -2), ValueError, "states: expected values from -1 to c - 1 = 5, got -2 to -2"),
    ],
)
def test_wrong_states_are_refused(states, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        log_prob(*dense(F32)[:3], states)
