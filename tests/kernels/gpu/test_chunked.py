"""Chains cut into segments on the Triton kernels: values alone, gradients, and when the plan cuts."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.schedules import choose
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values, poisoned, poisoned_memory
from tests.families import FAMILIES, dense

pytest.importorskip("triton")

from logchain.kernels.gpu import chain_long, segment_product

F32, F64 = torch.float32, torch.float64
MISALIGNED = {"detour", "left_to_right"}


@pytest.fixture
def cut(kernels, monkeypatch):
    """Cuts chains into so many segments."""

    def into(count):
        monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("chunked", count))
        return kernels

    return into


def assert_values_alone(chain, device):
    """The log-partition within the contract, without gradients; how many sequences were redone."""
    truth = Truth(chain)
    with torch.no_grad(), logchain.rescues() as seen:
        out = logchain.product(*(tensor.to(device) for tensor in chain[:3]), log_params=chain.log_params)
    assert_values(out, truth.log_norm, truth.value_bound(k=K))
    return seen.sequences


@pytest.mark.parametrize(("each", "count"), [(False, 100), (True, 2)], ids=["shared, 100", "each, 2"])
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead", "offsets", "sparse"])
def test_values_alone(name, each, count, cut):
    device = cut(count)
    with poisoned_memory():
        redone = assert_values_alone(FAMILIES[name](F32, each=each, n=2, t=1, v=8, c=5), device)
    assert (redone > 0) == (name in MISALIGNED)


@pytest.mark.parametrize("v", [3, 4, 5, 8, 17])
def test_values_alone_of_any_length(v, cut):
    assert assert_values_alone(dense(F64, n=1, t=1, v=v, c=3), cut(4)) == 0


@pytest.mark.parametrize("n", [1, 2], ids=["one sequence", "sets of two sequences"])
def test_values_alone_with_one_matrix_for_every_step(n, cut):
    chain = dense(F32, n=n, t=2, v=14, c=3, each=True)
    chain = chain._replace(bulk=chain.bulk[:, :1, :1])
    for variant in (chain, chain.logs()):
        assert_values_alone(variant, cut(6))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["abyss", "dense", "detour", "one_dead", "sharp", "sparse"])
def test_gradients(name, count, cut):
    """Also of states that are raised at the end of a segment, for whom the rest of the chain asks."""
    device = cut(count)
    chain = FAMILIES[name](F32, each=True, n=2, t=1, v=9, c=4).logs()
    truth = Truth(chain)
    x, bulk, p0 = (tensor.to(device).requires_grad_() for tensor in chain[:3])
    with poisoned_memory():
        out = logchain.product(x, bulk, p0, log_params=True)
        found = torch.autograd.grad(out.sum(), (x, bulk))
    assert_values(out.detach(), truth.log_norm, truth.value_bound(k=K))
    for gradient, expected in zip(found, (truth.states, truth.transitions), strict=True):
        wrong = np.abs(gradient.cpu().double().numpy() - expected)
        assert (wrong <= truth.gradient_bound(expected, k=K)).all()


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_few_long_chains_are_cut(each, monkeypatch):
    """By the plan, which knows a GPU."""
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)

    def schedule(n, v, c, wanted=False, lengths=False):
        x, p0 = (torch.empty(shape, requires_grad=wanted) for shape in ((n, v, c), (c,)))
        return choose.of(x, torch.empty(n if each else 1, v - 1, c, c), p0, False, lengths, "auto").name

    assert schedule(8, 10_000, 16) == schedule(1, 200, 16) == schedule(1, 10_000, 16, wanted=True) == "chunked"
    assert schedule(8, 10_000, 16, lengths=True) == "chunked" != schedule(8, 8, 16)
    assert schedule(1, 10_000, 16, lengths=True, wanted=True) != "chunked"
    assert (schedule(8, 10_000, 16, wanted=True) == "chunked") == each


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_gpu_is_said_to_hold_what_it_holds(dtype):
    for c in range(1, 130):
        size = choose.Size.of((1, 9, c), (1, c, c), dtype == F64, False, False, False, gpu=True)
        assert size.one_launch == segment_product.fits(c, dtype)
        if size.one_launch:
            assert size.side_by_side == segment_product.resident(c, dtype)


@pytest.mark.parametrize("lengths", [[9, 1], [5, 8], [2, 2]], ids=str)
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right"])
def test_nothing_behind_the_end_of_a_sequence_matters(name, lengths, cut, monkeypatch):
    """Not in values alone, where one kernel cuts."""
    device, lengths = cut(4), torch.tensor(lengths)
    chain = FAMILIES[name](F32, each=True, n=2, t=1, v=9, c=4)
    truth, dirty = Truth(chain, lengths), poisoned(chain, lengths)
    operands, options = [tensor.to(device) for tensor in dirty[:3]], {"log_params": chain.log_params}
    one_launch = Mock(wraps=chain_long.log_norm)
    monkeypatch.setattr(chain_long, "log_norm", one_launch)
    out = logchain.product(*operands, lengths=lengths.to(device), **options)
    assert one_launch.call_count == 1
    assert_values(out, truth.log_norm, truth.value_bound(k=K))
