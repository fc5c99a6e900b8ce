"""Chains cut into segments on the Triton kernels keep the accuracy contract: on a device, or in the interpreter."""

import functools

import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.schedules import choose
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_contract, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense

F32, F64 = torch.float32, torch.float64
SMALL = {"n": 2, "t": 1, "v": 8, "c": 3}
MISALIGNED = {"detour", "detour2", "abyss", "left_to_right", "bakis_jump", "banded", "tiny_transitions"}


@pytest.fixture
def cut(device, monkeypatch):
    """Makes `product` cut its chains into so many segments; returns the device."""

    def into(count):
        monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("chunked", count))
        return device

    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    return into


assert_kept = functools.partial(assert_contract, k=K)


@pytest.mark.parametrize(("each", "log", "count"), [(False, False, 3), (True, True, 2)], ids=["shared", "each, log"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name[-1] not in "12345" and name != "c301"])
def test_families_keep_the_contract(name, each, log, count, cut):
    chain = FAMILIES[name](F32, each=each, **SMALL)
    assert_kept(chain.logs() if log else chain, device=cut(count))


@pytest.mark.parametrize("count", [2, 5, 100])
@pytest.mark.parametrize("name", ["dense", "one_dead", "sparse"])
def test_one_matrix_for_every_step(name, count, cut):
    chain = FAMILIES[name](F64, **SMALL)
    for variant in (chain, chain.logs()):
        assert_kept(variant._replace(bulk=variant.bulk[..., 1:2, :, :]), device=cut(count))


@pytest.mark.parametrize("steps", ["full", "one"])
@pytest.mark.parametrize(
    ("batch", "bulk_batch", "p0_batch"), [((3, 2), (3, 1), (1, 2)), ((3, 2), (1, 2), (3, 1)), ((), (), ())], ids=str
)
def test_batch_axes_broadcast(batch, bulk_batch, p0_batch, steps, cut):
    draw = Draw(0, 1, 1, 6, 3, False)
    bulk, p0 = 0.1 + draw.uniform(*bulk_batch, 5 if steps == "full" else 1, 3, 3), 0.1 + draw.uniform(*p0_batch, 3)
    assert_kept(Chain(draw.normal(*batch, 6, 3), bulk, p0).to(F32), device=cut(2))


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0"])
def test_only_wanted_gradients(wanted, cut):
    assert_kept(dense(F32, **SMALL), device=cut(3), wanted=wanted)


def test_half_and_poisoned_memory(cut):
    assert_kept(dense(torch.bfloat16, **SMALL), device=cut(3))
    with poisoned_memory():
        assert_kept(FAMILIES["sparse"](F32, **SMALL), device=cut(3))


@pytest.fixture
def again(cut, monkeypatch):
    """As `cut`; and products are multiplied two at a time until there are three."""
    pytest.importorskip("triton")
    from logchain.kernels.gpu import chunked

    monkeypatch.setattr(chunked, "FEW", 3)
    monkeypatch.setattr(chunked, "AGAIN", 2)
    return cut


def assert_values_alone(chain, device):
    """The log-partition within the contract, without gradients; how many sums were redone."""
    truth = Truth(chain)
    with torch.no_grad(), logchain.rescues() as seen:
        out = logchain.product(*(tensor.to(device) for tensor in chain[:3]), log_params=chain.log_params)
    assert_values(out, truth.log_norm, truth.value_bound(k=K))
    return seen.outputs


@pytest.mark.parametrize("count", [2, 100])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead", "offsets", "sparse"])
def test_values_alone(name, each, count, again):
    device = again(count)
    with poisoned_memory():
        redone = assert_values_alone(FAMILIES[name](F32, each=each, n=2, t=1, v=12), device)
    assert (redone > 0) == (name in MISALIGNED)


@pytest.mark.parametrize("v", [3, 4, 5, 8, 17])
def test_values_alone_of_any_length(v, again):
    assert assert_values_alone(dense(F64, n=1, t=1, v=v, c=3), again(4)) == 0


@pytest.mark.parametrize("n", [1, 2], ids=["one sequence", "sets of two sequences"])
def test_values_alone_with_one_matrix_for_every_step(n, again):
    chain = dense(F32, n=n, t=2, v=20, c=5, each=True)
    chain = chain._replace(bulk=chain.bulk[:, :1, :1])
    for variant in (chain, chain.logs()):
        assert_values_alone(variant, again(6))


def test_a_wide_p0_makes_the_arithmetic_wide(cut):
    device, chain = cut(3), dense(F32, **SMALL)
    wide = chain._replace(p0=chain.p0.double())
    truth = Truth(wide)
    for wanted in (False, True):
        out = logchain.product(*(tensor.to(device).requires_grad_(wanted) for tensor in wide[:3]))
        assert_values(out, truth.log_norm, truth.value_bound(k=K))


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_few_long_chains_are_cut(each, monkeypatch):
    """By the plan, which knows a GPU."""
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)

    def schedule(n, v, c, wanted=False, lengths=False):
        x, p0 = (torch.empty(shape, requires_grad=wanted) for shape in ((n, v, c), (c,)))
        return choose.of(x, torch.empty(n if each else 1, v - 1, c, c), p0, False, lengths, "auto").name

    assert schedule(8, 10_000, 16) == schedule(1, 200, 16) == schedule(1, 10_000, 16, wanted=True) == "chunked"
    assert schedule(8, 10_000, 16, lengths=True) != "chunked" != schedule(8, 8, 16)
    # with gradients, sets of matrices wait for each other
    assert (schedule(8, 2000, 4, wanted=True) == "chunked") == (not each)


def test_with_lengths_the_schedule_is_sequential(cut):
    assert_contract(dense(F32, v=5), [5, 1, 3], device=cut(2), k=K)


def test_nan_stays_in_its_sequence(cut):
    device = cut(3)
    chain = dense(F32, **SMALL)
    x = chain.x.to(device).clone()
    x[1, 0, 4, 1] = torch.nan
    x.requires_grad_()
    out = logchain.product(x, chain.bulk.to(device), chain.p0.to(device))
    assert out[1, 0].isnan() and out[0, 0].isfinite()
    out.sum().backward()
    clean = chain.x[:1].to(device).requires_grad_()
    logchain.product(clean, chain.bulk.to(device), chain.p0.to(device)).sum().backward()
    torch.testing.assert_close(x.grad[:1], clean.grad)
    assert x.grad[1].isnan().any()
