"""`logchain.product` on the Triton kernels keeps the accuracy contract: on a device, or in the interpreter."""

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_contract, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense

F32, F64 = torch.float32, torch.float64
NAN = float("nan")
SMALL = {"n": 2, "t": 1, "v": 7}


@pytest.mark.parametrize(("each", "log"), [(False, False), (True, True)], ids=["shared", "each, log_params"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_the_contract(name, each, log, kernels):
    sizes = SMALL | {"v": 5} if name[-1] not in "12345" else {"n": 2, "t": 1}
    sizes |= {"c": 130} if name == "c301" else {}
    chain = FAMILIES[name](F32, each=each, **sizes)
    assert_contract(chain.logs() if log else chain, device=kernels, k=K)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "abyss", "left_to_right", "one_dead", "offsets", "log_far"])
def test_float64(name, each, kernels):
    assert_contract(FAMILIES[name](F64, each=each, **SMALL), device=kernels, k=K)


@pytest.mark.parametrize("name", ["sharp", "bakis_jump", "sparse"])
def test_many_sequences_share_their_matrices(name, kernels):
    assert_contract(FAMILIES[name](F32, 1, n=18, t=1, v=5, c=17), device=kernels, k=K)


@pytest.mark.parametrize("c", [1, 33, 65, 130])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_sizes(c, each, kernels):
    assert_contract(dense(F32, each=each, n=3, t=1, v=4, c=c), device=kernels, k=K)


@pytest.mark.parametrize("name", ["sparse", "detour", "dense"])
def test_one_matrix_for_every_step(name, kernels):
    chain = FAMILIES[name](F32, v=9)
    assert_contract(chain._replace(bulk=chain.bulk[..., 1:2, :, :]), device=kernels, k=K)


@pytest.mark.parametrize(("v", "steps"), [(1, "full"), (1, "one"), (3, "full"), (3, "one")])
@pytest.mark.parametrize(
    ("batch", "bulk_batch", "p0_batch"),
    [
        ((3, 2), (3, 1), (1, 2)),
        ((3, 2), (1, 2), (3, 1)),
        ((3, 2), (2,), (1,)),
        ((), (), ()),
        ((2, 3, 2), (2, 1, 1), (1, 1, 2)),
        ((0, 2), (1, 2), (0, 1)),
    ],
    ids=str,
)
def test_batch_axes_broadcast(batch, bulk_batch, p0_batch, v, steps, kernels):
    draw = Draw(0, 1, 1, v, 4, False)
    size = v - 1 if steps == "full" else 1
    bulk, p0 = 0.1 + draw.uniform(*bulk_batch, size, 4, 4), 0.1 + draw.uniform(*p0_batch, 4)
    assert_contract(Chain(draw.normal(*batch, v, 4), bulk, p0).to(F32), device=kernels, k=K)


@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead"])
@pytest.mark.parametrize("lengths", [[5, 1, 3], [[5, 5], [1, 2], [4, 3]]], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_lengths_keep_the_contract(name, lengths, each, kernels):
    assert_contract(FAMILIES[name](F32, each=each, v=5), lengths, device=kernels, k=K)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_nan_behind_the_end_has_no_influence(each, kernels):
    lengths = [3, 5, 1]
    chain = dense(F32, v=5, each=each)
    clean = Truth(chain, lengths)
    for i, end in enumerate(lengths):
        chain.x[i, :, end:] = NAN
        if each:
            chain.bulk[i, :, end - 1 :] = NAN
    x, bulk, p0 = (tensor.clone().to(kernels).requires_grad_() for tensor in chain[:3])
    out = logchain.product(x, bulk, p0, lengths=lengths)
    assert_values(out, clean.log_norm, clean.value_bound(k=K))
    out.sum().backward()
    for i, end in enumerate(lengths):
        assert (x.grad[i, :, end:] == 0).all()
        assert not each or (bulk.grad[i, :, end - 1 :] == 0).all()
        error = np.abs(x.grad[i].double().cpu().numpy() - clean.states[i])
        assert error.max() <= clean.gradient_bound(clean.states, K)[i].max()
    assert p0.grad.isfinite().all() and bulk.grad.isfinite().all()


def test_a_length_out_of_range_on_the_device_makes_its_sequence_nan(kernels):
    chain = dense(F32, v=5)
    lengths = torch.tensor([3, 9, 0], device=kernels)
    out = logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), lengths=lengths)
    truth = Truth(chain, [3, 1, 1])
    assert out[1:].isnan().all()
    assert_values(out[:1], truth.log_norm[:1], truth.value_bound(k=K)[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_half_types_are_exact_on_their_rounded_inputs(dtype, each, kernels):
    assert_contract(dense(dtype, each=each, **SMALL), device=kernels, k=K)
    assert_contract(dense(dtype, each=each, **SMALL).logs(), device=kernels, k=K)


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_nan_stays_in_its_sequence(name, operand, kernels):
    chain = FAMILIES[name](F32, each=True, v=5)
    truth = Truth(chain)
    dirty = {key: getattr(chain, key).to(kernels).clone().requires_grad_() for key in ("x", "bulk", "p0")}
    with torch.no_grad():
        dirty[operand][1, 0].flatten()[-1] = NAN
    out = logchain.product(**dirty)
    assert out[1, 0].isnan() and out.isnan().sum() == 1
    clean = torch.ones(3, 2, dtype=torch.bool)
    clean[1, 0] = False
    assert_values(out[clean.to(kernels)], truth.log_norm[clean], truth.value_bound(k=K)[clean])
    out.sum().backward()
    error = np.abs(dirty["x"].grad[clean.to(kernels)].double().cpu().numpy() - truth.states[clean])
    assert (error <= truth.gradient_bound(truth.states, K)[clean]).all()


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "sparse", "one_dead"])
def test_poisoned_memory(name, each, kernels):
    with poisoned_memory():
        assert_contract(FAMILIES[name](F32, each=each, v=5), device=kernels, k=K)
        assert_contract(FAMILIES[name](F32, each=each, n=2, v=5), [1, 5], device=kernels, k=K)


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0", "x p0"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_only_wanted_gradients(wanted, each, kernels):
    assert_contract(dense(F32, each=each, **SMALL), wanted=wanted, device=kernels, k=K)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strange_strides(each, kernels):
    chain = FAMILIES["sparse"](F32, each=each, v=5)
    views = [t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))) for t in chain[:3]]
    assert_contract(Chain(*views), device=kernels, k=K)


def test_sums_redone_are_counted(kernels):
    def count(name):
        chain = FAMILIES[name](F32, v=9)
        with logchain.rescues() as seen, torch.no_grad():
            logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), log_params=chain.log_params)
        assert seen.sequences == 0
        return seen.outputs

    assert count("dense") == count("peaked") == 0
    assert 0 < count("left_to_right") <= 6 * 9 * 12


def test_a_wide_p0_makes_the_arithmetic_wide(kernels):
    chain = dense(F32, **SMALL)
    assert_contract(chain._replace(p0=chain.p0.double()), wanted="p0", device=kernels, k=K)


def test_second_derivatives(kernels):
    chain = dense(F64, n=2, t=1, v=3, c=3)

    def second(device):
        operands = [tensor.to(device).requires_grad_() for tensor in chain[:3]]
        first = torch.autograd.grad(logchain.product(*operands).sum(), operands, create_graph=True)
        return [t.cpu() for t in torch.autograd.grad(sum(t.square().sum() for t in first), operands)]

    found = second(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "on_gpu", lambda tensor: tensor.device.type == "cuda")
        for one, other in zip(found, second("cpu"), strict=True):
            torch.testing.assert_close(one, other)


def test_tf32_is_used_only_when_asked_for(kernels):
    chain = dense(F32, n=16, t=1, v=3, c=40)
    truth = Truth(chain)
    torch.set_float32_matmul_precision("high")
    try:
        out = logchain.product(*(tensor.to(kernels) for tensor in chain[:3]))
    finally:
        torch.set_float32_matmul_precision("highest")
    error = np.abs(out.double().cpu().numpy() - truth.log_norm)
    assert (error <= truth.value_bound(k=K) + 2 * 2.0**-10).all() and (error > truth.value_bound(k=K)).any()
