"""Chains cut into segments on the Triton kernels keep the accuracy contract: on a device, or in the interpreter."""

import pytest
import torch

import logchain
from logchain import _device, _schedule
from tests.contract import Truth, assert_contract, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense

F32, F64 = torch.float32, torch.float64
SMALL = {"n": 2, "t": 1, "v": 8, "c": 3}
MISALIGNED = {"detour", "detour2", "abyss", "left_to_right", "bakis_jump", "banded", "tiny_transitions"}


@pytest.fixture
def cut(device, monkeypatch):
    """Makes `product` cut its chains into so many segments; returns the device."""

    def into(count):
        monkeypatch.setattr(_schedule, "of", lambda *_: _schedule.Schedule("chunked", count))
        return device

    monkeypatch.setattr(_device, "on_gpu", lambda tensor: True)
    return into


def assert_kept(chain, device, **options):
    """The contract, with the rounding that matrices have where maxima are misaligned."""
    truth = Truth(chain)
    bound = truth.value_bound
    truth.value_bound = lambda dtype=None: bound(dtype) + 4 * 2.0**-17 * (truth.dtype == F32)
    assert_contract(chain, truth=truth, device=device, **options)


@pytest.mark.parametrize(("each", "log", "count"), [(False, False, 3), (True, True, 2)], ids=["shared", "each, log"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name[-1] not in "12345" and name != "c301"])
def test_families_keep_the_contract(name, each, log, count, cut):
    chain = FAMILIES[name](F32, each=each, **SMALL)
    assert_kept(chain.logs() if log else chain, cut(count))


@pytest.mark.parametrize("count", [2, 5, 100])
@pytest.mark.parametrize("name", ["dense", "one_dead", "sparse"])
def test_one_matrix_for_every_step(name, count, cut):
    chain = FAMILIES[name](F64, **SMALL)
    for variant in (chain, chain.logs()):
        assert_kept(variant._replace(bulk=variant.bulk[..., 1:2, :, :]), cut(count))


@pytest.mark.parametrize("steps", ["full", "one"])
@pytest.mark.parametrize(
    ("batch", "bulk_batch", "p0_batch"), [((3, 2), (3, 1), (1, 2)), ((3, 2), (1, 2), (3, 1)), ((), (), ())], ids=str
)
def test_batch_axes_broadcast(batch, bulk_batch, p0_batch, steps, cut):
    draw = Draw(0, 1, 1, 6, 3, False)
    bulk, p0 = 0.1 + draw.uniform(*bulk_batch, 5 if steps == "full" else 1, 3, 3), 0.1 + draw.uniform(*p0_batch, 3)
    assert_kept(Chain(draw.normal(*batch, 6, 3), bulk, p0).to(F32), cut(2))


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0"])
def test_only_wanted_gradients(wanted, cut):
    assert_kept(dense(F32, **SMALL), cut(3), wanted=wanted)


def test_half_poisoned_memory_and_values_alone(cut):
    assert_kept(dense(torch.bfloat16, **SMALL), cut(3))
    chain = FAMILIES["sparse"](F32, **SMALL)
    with poisoned_memory():
        assert_kept(chain, cut(3))
        out = logchain.product(*(tensor.to(cut(3)) for tensor in chain[:3]))
    truth = Truth(chain)
    assert_values(out, truth.log_norm, truth.value_bound())


def test_with_lengths_the_schedule_is_sequential(cut):
    assert_contract(dense(F32, v=5), [5, 1, 3], device=cut(2))


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
