"""The chain that numba compiles: exponential, threads, frames, and the torch code it stands in for."""

import math

import numba
import numpy as np
import pytest
import torch

import logchain
from logchain import _chain_operators, _device, _frames
from logchain.kernels import native_chain, native_exp, native_forward, sum_product
from logchain.kernels.native_vectors import LANES, load, store
from tests.contract import assert_contract
from tests.families import FAMILIES, Chain

DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def no_frame_is_known():
    """What a test changes must not outlast it, nor be kept from it."""
    _frames._known.clear()
    yield
    _frames._known.clear()


@numba.njit
def exponentials(d, out, near):
    for i in range(len(d)):
        out[i] = native_exp.exp_near(d[i]) if near else native_exp.exp64(d[i])


@numba.njit
def exponentials_of_vectors(d, out, near):
    for i in range(0, len(d), LANES):
        some = load(d, i, len(d) - i, 0.0)
        store(out, i, len(d) - i, native_exp.exp_near(some) if near else native_exp.exp64(some))


@numba.njit
def there_and_back(values, keys):
    for i in range(len(values)):
        keys[i] = native_exp.ordered(values[i])
        values[i] = native_exp.from_ordered(keys[i])


def exponential(d, near=False, compute=exponentials):
    d = np.atleast_1d(np.asarray(d, np.float64))
    out = np.full_like(d, np.nan)
    compute(d, out, near)
    return out


@pytest.mark.parametrize("compute", [exponentials, exponentials_of_vectors])
@pytest.mark.parametrize(("near", "bound"), [(False, 4e-16), (True, 1e-11)])
def test_exponential_is_good_to_its_bound(near, bound, compute):
    d = -np.concatenate([np.linspace(0, 1, 10_001), np.linspace(1, 689, 50_001), 2.0 ** -np.arange(60)])
    truth = np.array([math.exp(value) for value in d])
    assert (np.abs(exponential(d, near, compute) - truth) <= bound * truth).all()


@pytest.mark.parametrize("compute", [exponentials, exponentials_of_vectors])
@pytest.mark.parametrize("near", [False, True])
def test_exponential_of_what_is_no_number(near, compute):
    assert exponential([-np.inf, -690.0, -1e308, 0.0], near, compute).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert np.isnan(exponential(np.nan, near, compute)).all()


@pytest.mark.parametrize(("real", "integer"), [(np.float32, np.int32), (np.float64, np.int64)])
def test_integers_are_ordered_as_floats_are(real, integer):
    tiny = np.finfo(real).smallest_subnormal
    values = np.array([-np.inf, -2.0, -1.0, -tiny, 0.0, tiny, 1.0, 2.0, np.inf, np.nan], real)
    found, keys = values.copy(), np.zeros(len(values), integer)
    there_and_back(found, keys)
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_keeps_the_contract_alone(name, each, dtype, monkeypatch):
    monkeypatch.setattr(_device, "_numba", lambda: False)
    assert_contract(FAMILIES[name](dtype=dtype, each=each))


@pytest.mark.parametrize("name", ["dense", "left_to_right", "detour"])
def test_gradients_of_wide_chains_are_torchs(name, monkeypatch):
    monkeypatch.setattr(native_chain, "_WIDE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(native_forward, "forward", None)
        assert_contract(FAMILIES[name](dtype=torch.float32))
    # what is not to be differentiated is the loop's
    monkeypatch.setattr(sum_product, "forward", None)
    x, bulk, p0, _ = FAMILIES[name](dtype=torch.float32)
    logchain.product(x, bulk, p0)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "detour"])
def test_threads_share_the_sequences(name, each, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(native_chain, "_SHARE", 1)
    try:
        torch.set_num_threads(3)
        assert_contract(FAMILIES[name](dtype=torch.float32, each=each))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", FAMILIES)
def test_chains_without_a_frame(name, each, dtype, monkeypatch):
    monkeypatch.setattr(_chain_operators, "_small_frame", lambda *_: None)
    assert_contract(FAMILIES[name](dtype=dtype, each=each))


def frame_of(x, bulk, p0):
    return _chain_operators._small_frame(x, bulk, p0, None, False, 1)


def test_small_chains_have_a_frame():
    x, bulk, p0 = torch.zeros(3, 2, 5, 4), torch.ones(1, 1, 1, 4, 4), torch.ones(4)
    assert frame_of(x, bulk, p0) is not None
    assert frame_of(x, bulk, p0) is frame_of(x.clone(), bulk.clone(), p0.clone())
    assert frame_of(x.transpose(0, 1), bulk, p0) is not frame_of(x, bulk, p0)
    assert frame_of(x, bulk.expand(1, 2, 1, 4, 4), p0) is None, "its sets lie across"
    assert frame_of(x.half(), bulk, p0) is None
    assert frame_of(torch.zeros(100, 1, 1000, 40), torch.ones(1, 1, 1, 40, 40), torch.ones(40)) is not None
    assert frame_of(torch.zeros(400, 1, 4, 64), torch.ones(1, 1, 1, 64, 64), torch.ones(64)) is None, "it is wide"


def test_far_weights_are_left_to_the_whole_path():
    x = torch.zeros(2, 3, 2).requires_grad_()
    out = logchain.product(x, torch.full((1, 2, 2), 0.5), torch.ones(2))
    out.backward(torch.tensor([2.0**100, 1.0]))
    torch.testing.assert_close(x.grad[0], torch.full((3, 2), 2.0**99))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [3, 17, 50])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 299), (7, 1, 299), (7, 1, 1)], ids=str)
@pytest.mark.parametrize("lengths", [None, [300, 1, 128, 300, 129, 2, 299]], ids=["whole", "ends"])
def test_many_blocks_of_steps_agree_with_torch(shape, lengths, c, dtype, monkeypatch):
    """Sequences in fours and alone, that end in different blocks, one of them without a weight."""
    generator = torch.Generator().manual_seed(c)
    x = 3 * torch.randn(7, 300, c, generator=generator, dtype=dtype)
    x[1, 0, : c - 1] = x[4, 100, 1:] = -torch.inf
    bulk = torch.rand(shape[0], shape[2], c, c, generator=generator, dtype=dtype)
    bulk[..., 0, 1:] *= 1e-5
    p0 = torch.rand(c, generator=generator, dtype=dtype)
    weight = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0, 3.0, 1.0], dtype=dtype)

    def found():
        leaves = [operand.clone().requires_grad_() for operand in (x, bulk, p0)]
        out = logchain.product(*leaves, lengths=None if lengths is None else torch.tensor(lengths))
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]

    compiled = found()
    monkeypatch.setattr(_device, "_numba", lambda: False)
    _frames._known.clear()
    bound = 2e-5 if dtype == torch.float32 else 1e-11
    for one, other in zip(compiled, found(), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * other.abs().max().item())


@pytest.mark.parametrize("m", [1, 2])
def test_an_entry_far_below_the_others_has_its_gradient(m):
    """It underflows where a matrix is brought to 1, and is no zero."""
    bulk = torch.tensor([[2.0**70, 2.0**-100], [2.0**70, 2.0**70]]).expand(2, 2, 2).clone()
    x, p0 = torch.zeros(m, 3, 2), torch.ones(2)
    leaf, truth = bulk.clone().requires_grad_(), bulk.double().requires_grad_()
    (found,) = torch.autograd.grad(logchain.product(x, leaf, p0).sum(), leaf)
    (expected,) = torch.autograd.grad(m * (p0.double() @ truth[0] @ truth[1]).sum().log(), truth)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [1, 699], ids=["shared", "each"])
@pytest.mark.parametrize("c", [1, 2, 4, 5, 8])
def test_few_states_keep_the_contract_where_steps_are_not_ordinary(c, steps, dtype):
    """A message that runs far off, either way; a state that only itself leads to; evidence against all but one."""
    generator = torch.Generator().manual_seed(c)
    x = 3 * torch.randn(3, 1, 700, c, generator=generator, dtype=dtype)
    x[0, :, 130, 1:] = x[1, :, 300, : c - 1] = -torch.inf
    x[2, :, 400:410] *= 5
    bulk = torch.rand(1, 1, steps, c, c, generator=generator, dtype=dtype) + 0.1
    bulk[..., : c - 1, c - 1] = 0.0
    if steps > 1:
        bulk[..., 100:300, :, :] *= 2.0**-40
        bulk[..., 300:500, :, :] *= 2.0**40
        bulk[..., 200, :, :] *= 2.0**-30
    assert_contract(Chain(x, bulk, torch.rand(c, generator=generator, dtype=dtype), False))


@pytest.mark.parametrize("skipped", ["ended", "unweighted"])
def test_a_steps_matrix_is_turned_for_those_that_come_later(skipped):
    """Sequences are walked in groups; that the first one is done must not leave the others with another matrix."""
    chain = FAMILIES["dense"](torch.float32, n=9, t=1, v=5, c=12)
    lengths = torch.tensor([2] * 4 + [5] * 5)[:, None] if skipped == "ended" else None
    weight = torch.ones(9, 1)
    if skipped == "unweighted":
        weight[:4] = 0
    assert chain.bulk.shape == (1, 1, 4, 12, 12)

    def gradient(rows):
        x, some = chain.x[rows].requires_grad_(), None if lengths is None else lengths[rows]
        value = logchain.product(x, chain.bulk, chain.p0, lengths=some, strategy="sequential")
        return torch.autograd.grad(value, x, weight[rows])[0]

    alone = [gradient(slice(i, i + 1)) for i in range(9)]
    torch.testing.assert_close(gradient(slice(None)), torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("log_params", [False, True], ids=["linear", "logarithms"])
@pytest.mark.parametrize("faint", [False, True], ids=["sound", "faint"])
def test_groups_of_a_set_return_to_the_steps_of_a_block(faint, log_params):
    """A matrix, and what its zeros leave to be reached, are those of the step, whichever group asks for them."""
    n, v, c, generator = 11, 50, 12, torch.Generator().manual_seed(0)
    phase, step = torch.arange(c) % 3, torch.arange(v - 1)[:, None]
    leads = (phase == step % 3)[:, :, None] & (phase == (step + 1) % 3)[:, None, :]
    bulk = (torch.rand(v - 1, c, c, generator=generator) + 0.1) * leads
    if faint:  # and not to be reached in the first step of the block
        bulk[29, :, 3] *= 1e-30
    chain = Chain(torch.randn(n, v, c, generator=generator), bulk, torch.eye(c)[0])
    chain = chain.logs() if log_params else chain
    with logchain.rescues() as seen:
        logchain.product(*chain[:3], log_params=log_params, strategy="sequential")
    assert seen.sequences == (n if faint else 0)
    assert_contract(chain)
