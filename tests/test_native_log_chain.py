"""The log-space chain that numba compiles: within the contract on its own, and the same as the torch code's."""

import math

import numba
import numpy as np
import pytest
import torch

import logchain
from logchain import _chain_operators, reference
from logchain._chain_operators import chain_of
from logchain.kernels import log_chain, native_forward, native_log_chain, native_log_steps
from tests.contract import assert_contract, assert_nan_stays, assert_nothing_behind_matters
from tests.families import FAMILIES, PAIRS, Chain

F32, F64 = torch.float32, torch.float64


@pytest.fixture
def all_redone(monkeypatch):
    """Every sequence counts as lossy, and what the linear recursion has found is NaN."""

    def forward(chain, kept):
        kept.messages.fill_(torch.nan)
        kept.total.fill_(torch.nan)
        found = torch.full((chain.g, chain.m), torch.nan, dtype=F64)
        return found, torch.ones_like(found, dtype=torch.bool)

    monkeypatch.setattr(native_forward, "forward", forward)
    monkeypatch.setattr(_chain_operators, "_small_frame", lambda *_: None)
    monkeypatch.setattr(log_chain, "forward", None)


@numba.njit
def logarithms(s, out):
    for i in range(len(s)):
        out[i] = native_log_steps._log(s[i])


def test_logarithm_is_good_to_rounding():
    s = np.concatenate([1 + 2.0 ** -np.arange(53), np.linspace(1, 2, 10_001), np.geomspace(1, 1e6, 10_001)])
    out = np.full_like(s, np.nan)
    logarithms(s, out)
    truth = np.array([math.log(value) for value in s])
    assert (np.abs(out - truth) <= 4 * np.spacing(truth)).all()


def test_logarithm_of_what_is_no_sum():
    out = np.ones(2)
    logarithms(np.array([0.0, np.nan]), out)
    assert out[0] == -np.inf and np.isnan(out[1])


@PAIRS
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_every_family_is_within_the_contract(name, dtype, each, log, all_redone):
    chain = FAMILIES[name](dtype, each=each)
    assert_contract(chain.logs() if log else chain)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]]], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead"])
def test_lengths_are_within_the_contract(name, lengths, each, all_redone):
    assert_contract(FAMILIES[name](F32, each=each, v=5), lengths)
    assert_nothing_behind_matters(FAMILIES[name](F32, each=True, v=5), lengths)


def homogeneous(**sizes):
    chain = FAMILIES["left_to_right"](F32, **sizes)
    return chain._replace(bulk=chain.bulk[..., :1, :, :])


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_one_matrix_for_all_steps_is_within_the_contract(each, all_redone):
    chain = homogeneous(n=5, t=3, each=each)
    assert_contract(chain)
    assert_contract(chain.logs(), [17, 2, 9, 1, 17])


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "bakis_jump"])
def test_nan_stays_in_its_sequence(name, operand, all_redone):
    assert_nan_stays(name, operand)


@pytest.mark.parametrize("operand", ["x", "bulk"])
def test_nan_that_leads_nowhere_is_seen(operand, all_redone):
    """No path goes on from the state that is NaN."""
    x, bulk, p0 = torch.zeros(2, 3, 2), torch.tensor([[1.0, 1.0], [0.0, 0.0]]).repeat(2, 2, 1, 1), torch.ones(2)
    (x[0, 1] if operand == "x" else bulk[0, 0, 0])[1] = torch.nan
    out = logchain.product(x, bulk, p0)
    assert out[0].isnan() and out[1].isfinite()


def test_what_is_infinite_is_no_number(all_redone):
    x = torch.zeros(2, 3, 2)
    x[0, 1, 1] = torch.inf
    out = logchain.product(x, torch.ones(1, 2, 2), torch.ones(2))
    assert out[0].isnan() and out[1].isfinite()


def test_no_distance_is_too_long(all_redone):
    """Each step, one state is 1e9 nats above the other, to which the only path goes."""
    x = torch.tensor([[1e9, 0.0]] * 40, dtype=F64)[None].requires_grad_()
    bulk, p0 = torch.tensor([[[0.0, 1e-300], [0.0, 1e-300]]], dtype=F64), torch.tensor([0.0, 1e-300], dtype=F64)
    out = logchain.product(x, bulk, p0)
    torch.testing.assert_close(out, torch.tensor([40 * math.log(1e-300)], dtype=F64), rtol=2.0**-50, atol=0)
    out.sum().backward()
    assert (x.grad == torch.tensor([0.0, 1.0])).all()


def redo(kernels, chain, redone, weight=None):
    """The log-partition, the messages and the gradients of the sequences redone; NaN is where nothing was written."""
    g, m = redone.shape
    log_norm, messages = torch.full((g, m), torch.nan, dtype=F64), chain.new(chain.v, g, m, chain.c).fill_(torch.nan)
    grad_x, grad_bulk = chain.new(chain.v, *chain.lead, chain.c), chain.new(len(chain.bulk), g, chain.c, chain.c)
    grad_p0 = torch.zeros(*chain.lead, chain.c, dtype=F64)
    gradients = grad_x.fill_(0.0), grad_bulk.fill_(0.0), grad_p0
    done = kernels.forward(chain, redone, log_norm, messages)
    weight = torch.ones(g, m, dtype=chain.dtype) if weight is None else weight
    kernels.backward(chain, done, log_norm, messages, weight, *gradients)
    return log_norm, messages, *gradients


def assert_agree(one, other):
    rounding = 1e-12 if one[1].dtype == F64 else 1e-5
    torch.testing.assert_close(one[0], other[0], rtol=1e-13, atol=1e-11, equal_nan=True)
    for a, b in zip(one[1:], other[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, equal_nan=True)


def prepared(chain, lengths=None):
    lengths = None if lengths is None else torch.as_tensor(lengths)
    return chain_of(*chain[:3], lengths, chain.log_params)[1]


@PAIRS
@pytest.mark.parametrize("name", ["dense", "abyss", "left_to_right", "bakis_jump", "banded", "sparse", "impossible"])
def test_torch_and_numba_agree(name, dtype, each, log):
    chain = FAMILIES[name](dtype, each=each, n=5, t=3)
    chain = prepared(chain.logs() if log else chain)
    redone = torch.ones(chain.g, chain.m, dtype=torch.bool)
    assert_agree(redo(native_log_chain, chain, redone), redo(log_chain, chain, redone))


def test_only_what_is_marked_is_written():
    chain = prepared(FAMILIES["left_to_right"](F32, n=5, t=3))
    redone = torch.zeros(1, 15, dtype=torch.bool)
    redone[0, [1, 4, 14]] = True
    weight = torch.arange(15.0)[None]
    log_norm, messages, grad_x, *gradients = redo(native_log_chain, chain, redone, weight)
    assert (log_norm.isnan() == ~redone).all() and (messages.isnan().all(0).all(-1) == ~redone).all()
    every = redo(log_chain, chain, redone | True, weight)
    torch.testing.assert_close(log_norm[redone], every[0][redone], rtol=1e-13, atol=1e-11)
    assert_agree([log_norm, messages, grad_x, *gradients], redo(log_chain, chain, redone, weight))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)], ids=str)
def test_gradients_that_nobody_wants_are_not_written(wanted):
    chain = prepared(FAMILIES["left_to_right"](F32))
    redone = torch.ones(chain.g, chain.m, dtype=torch.bool)
    log_norm, messages, *every = redo(native_log_chain, chain, redone)
    gradients = [torch.zeros_like(gradient) if want else None for gradient, want in zip(every, wanted, strict=False)]
    start = torch.zeros_like(every[2])
    native_log_chain.backward(chain, redone, log_norm, messages, torch.ones(chain.g, chain.m), *gradients, start)
    for found, expected in zip([*gradients, start], every, strict=True):
        assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize("sizes", [{}, {"each": True}], ids=["shared", "each"])
@pytest.mark.parametrize("steps", ["one", "every"])
def test_threads_find_the_same(sizes, steps, monkeypatch):
    monkeypatch.setattr(native_log_chain, "_SHARE", 1)
    draw = homogeneous if steps == "one" else lambda **given: FAMILIES["left_to_right"](F32, **given)
    chain = prepared(draw(n=7, t=3, **sizes))
    redone = torch.arange(21).view(chain.g, chain.m) % 5 != 3
    before = torch.get_num_threads()
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        found.append(redo(native_log_chain, chain, redone))
    torch.set_num_threads(before)
    assert_agree(*found)


def test_matrices_with_many_entries_are_left_to_products(monkeypatch):
    monkeypatch.setattr(native_log_chain, "_FEW", 5)
    monkeypatch.setattr(native_log_chain, "_walk", None)
    monkeypatch.setattr(native_log_chain, "_walk_back", None)
    chain = prepared(FAMILIES["dense"](F32))
    redone = torch.ones(chain.g, chain.m, dtype=torch.bool)
    assert_agree(redo(native_log_chain, chain, redone), redo(log_chain, chain, redone))


def test_layouts_and_half_types(all_redone):
    chain = FAMILIES["left_to_right"](F32, v=9)
    x = chain.x.to(torch.bfloat16).permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    bulk = chain.bulk.mT.contiguous().mT
    assert_contract(Chain(x, bulk, chain.p0))


def test_second_derivatives_are_covariances(all_redone):
    chain = FAMILIES["left_to_right"](F64, n=1, t=1, v=3, c=3)
    x = (chain.x / 20).requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda x: logchain.product(x, *chain[1:3]).sum(), x)
    step = 1e-4
    for at in range(x.numel()):
        moved = torch.zeros(x.numel(), dtype=F64).index_fill_(0, torch.tensor(at), step).view(x.shape)
        states = [reference.marginals(x.detach() + sign * moved, *chain[1:3]).states for sign in (1, -1)]
        found = hessian.view(9, 9)[at].numpy()
        np.testing.assert_allclose(found, (states[0] - states[1]).flatten() / (2 * step), atol=1e-7)
