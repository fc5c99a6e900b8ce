"""`logchain.product` on the Triton kernels, in what is theirs alone: tiles, precision, rescues, unknown lengths."""

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_contract, assert_values
from tests.families import FAMILIES, dense

F32, F64 = torch.float32, torch.float64
EACH = pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])


@pytest.mark.parametrize("name", ["sharp", "bakis_jump", "sparse"])
def test_many_sequences_share_their_matrices(name, kernels):
    assert_contract(FAMILIES[name](F32, 1, n=18, t=1, v=3, c=17), device=kernels, k=K)


@pytest.mark.parametrize("c", [1, 33, 65, pytest.param(130, marks=pytest.mark.slow)])
@EACH
def test_sizes(c, each, kernels):
    assert_contract(dense(F32, each=each, n=2, t=1, v=3, c=c), device=kernels, k=K)


def test_a_length_out_of_range_on_the_device_makes_its_sequence_nan(kernels):
    chain = dense(F32, v=5)
    lengths = torch.tensor([3, 9, 0], device=kernels)
    out = logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), lengths=lengths)
    truth = Truth(chain, [3, 1, 1])
    assert out[1:].isnan().all()
    assert_values(out[:1], truth.log_norm[:1], truth.value_bound(k=K)[:1])


def test_sums_redone_are_counted(kernels):
    def count(name):
        chain = FAMILIES[name](F32, v=9)
        with logchain.rescues() as seen, torch.no_grad():
            logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), log_params=chain.log_params)
        assert seen.sequences == 0
        return seen.outputs

    assert count("dense") == count("peaked") == 0
    assert 0 < count("left_to_right") <= 6 * 9 * 12


def test_second_derivatives(kernels):
    chain = dense(F64, n=1, t=1, v=3, c=2)

    def second(device):
        operands = [tensor.to(device).requires_grad_() for tensor in chain[:3]]
        first = torch.autograd.grad(logchain.product(*operands).sum(), operands, create_graph=True)
        return [t.cpu() for t in torch.autograd.grad(sum(t.square().sum() for t in first), operands)]

    on_kernels = second(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "on_gpu", lambda tensor: tensor.device.type == "cuda")
        torch.testing.assert_close(on_kernels, second("cpu"))


@EACH
def test_tf32_is_used_only_when_asked_for(each, kernels):
    chain = dense(F32, n=2 if each else 16, t=1, v=3, c=40, each=each)
    truth, error = Truth(chain), {}
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        try:
            out = logchain.product(*(tensor.to(kernels) for tensor in chain[:3]))
        finally:
            torch.set_float32_matmul_precision("highest")
        error[precision] = np.abs(out.double().cpu().numpy() - truth.log_norm)
    assert (error["highest"] <= truth.value_bound(k=K)).all()
    assert (error["high"] <= truth.value_bound(k=K) + 2 * 2.0**-10).all()
    assert each or (error["high"] > truth.value_bound(k=K)).any()
