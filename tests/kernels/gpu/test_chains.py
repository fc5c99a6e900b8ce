"""Chains on the Triton kernels keep the accuracy contract, and parts of them; `tests.test_backends` has more."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.kernels.chain import Chain as Operands
from logchain.kernels.message import Message
from logchain.kernels.plain import backward as plain_backward
from logchain.kernels.plain import forward as plain_forward
from logchain.schedules import budget
from tests.contract import TENSOR_CORES as K
from tests.contract import (
    assert_contract,
    poisoned_memory,
)
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import STRANGE, relaid, strange

pytest.importorskip("triton")

from logchain.kernels.gpu import backward as gpu_backward
from logchain.kernels.gpu import chains
from logchain.kernels.gpu import forward as gpu_forward

F32, F64, HALF = torch.float32, torch.float64, torch.bfloat16
INF, NAN = float("inf"), float("nan")

check = partial(assert_contract, k=K)


def drawn(name: str, dtype: torch.dtype = F32, v: int = 7, **sizes) -> Chain:
    sizes = {"n": 2, "t": 1, **({} if name[-1].isdigit() else {"v": v}), **sizes}
    return FAMILIES[name](dtype, **sizes)


@pytest.mark.parametrize("name", ["dense", "detour"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_float64_keeps_the_contract(name, each, kernels):
    check(drawn(name, F64, each=each, v=5), device=kernels)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("c", [1, 33, 70])
@pytest.mark.parametrize("scans", ["kernels", "both_ends"])
def test_number_of_states_keeps_the_contract(scans, c, each, kernels, request):
    request.getfixturevalue(scans)
    check(dense(F32, n=3, t=1, v=3, c=c, each=each), device=kernels)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_short_chain_keeps_the_contract(v, each, kernels, both_ends):
    check(dense(F32, n=17, t=1, v=v, c=3, each=each), device=kernels)


@pytest.mark.parametrize("name", ["dense", "detour"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_states_beyond_one_program_keep_the_contract(name, each, kernels, monkeypatch):
    monkeypatch.setattr(chains, "_WIDE", 3)
    chain = drawn(name, each=each, v=5)
    check(chain, device=kernels)
    check(chain.logs(), [5, 2], device=kernels)
    check(chain._replace(bulk=chain.bulk.to(HALF)), device=kernels)


def test_nan_of_weight_zero_is_not_counted(kernels, both_ends):
    x, bulk, p0 = (t.to(kernels) for t in dense(F32, n=3, t=1, v=5, c=4)[:3])
    x[1, 0, 2, 1] = NAN
    bulk.requires_grad_()
    logchain.product(x, bulk, p0)[[0, 2]].sum().backward()
    rest = bulk.grad.clone()
    bulk.grad = None
    logchain.product(x[[0, 2]], bulk, p0).sum().backward()
    torch.testing.assert_close(rest, bulk.grad)


@pytest.mark.parametrize("how", STRANGE[1:])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strides_keep_the_contract(how, each, kernels):
    check(strange(drawn("sparse", each=each, v=4), how), device=kernels)


@pytest.mark.parametrize("far", [1e-36, 3e37])
def test_weights_far_from_one_keep_the_contract(far, kernels, both_ends):
    chain = dense(F32, n=2, t=1, v=4, c=3)
    with poisoned_memory():
        check(chain._replace(bulk=chain.bulk * far), device=kernels, wanted="x p0")
        check(chain._replace(p0=chain.p0 * far), device=kernels, wanted="x bulk")
        check(chain._replace(x=chain.x + math.log(far)), device=kernels)


def test_negative_weight_makes_its_sequence_nan(kernels):
    x, bulk, p0 = (t.to(kernels) for t in dense(F32, n=3, t=1, v=4, c=4, each=True)[:3])
    p0 = p0.clone()
    p0[0, 0, 1] = -1.0
    bulk[1, 0, 1] = -1.0
    out = logchain.product(x, bulk, p0)
    assert out[:2].isnan().all() and out[2].isfinite()


def test_gradients_of_denormal_weights_do_not_overflow(kernels):
    bulk = torch.tensor([[[8e-40, 1e-44], [0.0, 1.0]]], device=kernels, requires_grad=True)
    out = logchain.product(torch.zeros(2, 2, device=kernels), bulk, torch.ones(2, device=kernels))
    for weight in (1.0, -1.0):
        (gradient,) = torch.autograd.grad(out, bulk, torch.full_like(out, weight), retain_graph=True)
        torch.testing.assert_close(
            gradient[0] * weight, torch.tensor([[1.0, 1], [0, 1]]).to(kernels), rtol=2e-3, atol=0
        )


@pytest.mark.parametrize("n", [1, 3], ids=["each", "shared"])
def test_sum_that_underflows_beside_a_large_matrix_entry_is_recomputed(n, kernels):
    x = torch.tensor([[0.0, 0.0], [0.0, -1000.0]], dtype=F64, device=kernels).repeat(n, 1, 1).requires_grad_()
    bulk, p0 = (torch.tensor(one, dtype=F64, device=kernels) for one in ([[[1e95, 0.0], [0.0, 1e-129]]], [0.0, 1.0]))
    (posterior,) = torch.autograd.grad(logchain.product(x, bulk, p0).sum(), x)
    torch.testing.assert_close(posterior, torch.tensor([0.0, 1.0], dtype=F64, device=kernels).expand_as(x))


def test_gradients_can_be_taken_twice(kernels, both_ends):
    x, bulk, p0 = (t.to(kernels).requires_grad_() for t in drawn("detour")[:3])
    out = logchain.product(x, bulk, p0, log_params=True)
    weights = torch.ones_like(out), relaid(torch.ones_like(out), "negative view")
    first, second = (torch.autograd.grad(out, (x, bulk, p0), weight, retain_graph=True) for weight in weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_recomputed_sequences_are_counted(kernels, both_ends):
    x, bulk, p0 = (t.to(kernels) for t in drawn("detour", n=5)[:3])
    with logchain.rescues() as seen:
        logchain.product(x, bulk, p0, log_params=True)
    assert seen.sequences == 5
    with logchain.rescues() as seen:
        logchain.product(*(t.to(kernels) for t in dense(F32, v=9)[:3]))
    assert seen.sequences == 0


@pytest.mark.parametrize("options", [{}, {"memory_budget": 1}], ids=["whole", "checkpoints"])
def test_offsets_are_summed_exactly(options, kernels, monkeypatch):
    monkeypatch.setattr(budget, "every_within", lambda *_: 2)
    x = 1e8 * Draw(0, 1, 1, 30, 1, False).normal(1, 1, 30, 1)
    x[..., -1, :] = -x[..., :-1, :].sum()
    one = torch.ones(1, 1, 1, 1, dtype=F64)
    out = logchain.product(x.to(kernels).requires_grad_(), one.to(kernels), one[0].to(kernels), **options)
    assert abs(out.item() - math.fsum(x.flatten().tolist())) <= 30 * 9 * 2.0**-53


@pytest.mark.parametrize("offset", [2.0**24, 2.0**40])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_float64_keeps_what_offsets_leave(each, offset, kernels, both_ends):
    x, bulk, p0 = (t.to(kernels).requires_grad_() for t in drawn("dense", F64, each=each, v=5)[:3])
    x = (x * 2**8).round() / 2**8  # with the offsets it is exact
    steps = offset * torch.tensor([0.0, 1.0, -1.0, 0.5, 0.25], dtype=F64, device=kernels)
    results = []
    for potentials in (x, x + steps[:, None]):
        out = logchain.product(potentials, bulk, p0)
        results.append((out, *torch.autograd.grad(out.sum(), (potentials, bulk, p0))))
    (out, *gradients), (far, *others) = results
    torch.testing.assert_close(far - steps.sum(), out, rtol=0, atol=2.0**-52 * offset)
    torch.testing.assert_close(others, gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("log", [-3e38, -INF])
def test_lowest_float_is_not_impossible(log, kernels):
    x = torch.zeros(1, 4, 2)
    x[0, 1, 0] = log
    x[0, 2, 1] = -INF
    bulk = torch.eye(2)[None]
    out = logchain.product(x.to(kernels), bulk.to(kernels), torch.ones(2, device=kernels))
    assert out.item() == pytest.approx(log) if log > -INF else out.item() == -INF


# parts of a chain ----------------------------------------------------------------------------------------------------


def parts(name: str, each: bool, dtype: torch.dtype, device: str) -> tuple[Operands, Operands, Operands]:
    """The first 3 of 7 steps of a chain, the last 4, and the whole, with lengths on either side."""
    n, v, c = 4, 7, 5
    chain = FAMILIES[name](dtype, n=n, t=1, v=v, c=c, each=each).to(dtype)
    x = chain.x[:, 0].transpose(0, 1).to(device)
    bulk = chain.bulk[:, 0].transpose(0, 1) if each else chain.bulk[0, 0]
    p0, ends = chain.p0[:, 0].to(device), torch.tensor([7, 2, 5, 4], device=device)
    bulk, ends = bulk.to(device), ends.view(*((n, 1) if each else (1, n)), 1)
    whole = Operands(x, bulk, p0, ends, chain.log_params, dtype)
    head = Operands(x[:3], bulk[:2], p0, ends.clamp(max=3), chain.log_params, dtype)
    tail = Operands(x[3:], bulk[2:], p0, (ends - 3).clamp(min=0), chain.log_params, dtype)
    return head, tail, whole


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "peaked"])
def test_parts_give_what_torch_gives_for_the_whole(name, each, device):
    """A leaving message enters the next part, and a following message comes back from it."""
    head, tail, whole = parts(name, each, F32, device)
    v, g, m, c = whole.v, whole.g, whole.m, whole.c
    expected, _ = plain_forward.forward(whole, keep=whole.new(v, g, m, c))
    weight = torch.rand(g, m, dtype=F64, device=device, generator=torch.Generator(device).manual_seed(0)) + 0.5
    grad_x, grad_bulk = whole.new(*whole.x.shape), whole.new(*whole.bulk.shape)
    start = plain_backward.backward(whole, expected, weight, None, grad_x, grad_bulk)
    with poisoned_memory():
        kept_head, between = gpu_forward.forward(head, keep=head.new(3, g, m, c), leave=True)
        kept_tail, last = gpu_forward.forward(tail, between, keep=tail.new(5, g, m, c), leave=True)
        assert between is not None and last is not None
        torch.testing.assert_close(last.scale.sum(0), expected.log_norm, rtol=1e-6, atol=1e-5)
        x, bulk = whole.new(*whole.x.shape), whole.new(*whole.bulk.shape)
        norm = {"log_norm": last.scale.sum(0)}
        following = gpu_backward.backward(tail, kept_tail._replace(**norm), weight, None, x[3:], bulk[2:])
        got = gpu_backward.backward(head, kept_head._replace(**norm), weight, following, x[:3], bulk[:2])
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(x, grad_x, **near)
    weights = 1.0 if whole.log_params else whole.bulk
    torch.testing.assert_close(bulk * weights, grad_bulk * weights, **near)
    torch.testing.assert_close(
        got * (1.0 if whole.log_params else whole.p0), start * (1.0 if whole.log_params else whole.p0), **near
    )


def test_leaving_message_is_exact_where_messages_are_raised(device):
    head = parts("peaked", False, F32, device)[0]
    expected, got = (module.forward(head, leave=True)[1] for module in (plain_forward, gpu_forward))
    assert expected.values.min() < -200
    torch.testing.assert_close(got.values, expected.values, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["dense", "detour"])
def test_kept_messages_are_logarithms_of_filtered_posteriors(name, device):
    whole = parts(name, False, F32, device)[2]
    logs = []
    for module in (plain_forward, gpu_forward):
        kept, _ = module.forward(whole, keep=whole.new(7, 1, 4, 5))
        logs.append(kept.logs(slice(None)).softmax(-1))
    torch.testing.assert_close(logs[1], logs[0], rtol=0, atol=1e-5, equal_nan=True)
    assert (kept.redone.any(), kept.halved) == (name == "detour", False) and kept.messages.isfinite().all()


def test_message_of_a_sequence_that_has_ended_passes_unchanged(device):
    head, tail, _ = parts("dense", False, F32, device)
    between = gpu_forward.forward(head, leave=True)[1]
    after = gpu_forward.forward(tail, between, leave=True)[1]
    assert torch.equal(after.values[0, 1], between.values[0, 1])
    assert torch.equal(after.scale[:, 0, 1], between.scale[:, 0, 1])
    assert isinstance(after, Message)


@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right"])
def test_checkpoints_keep_the_contract(name, kernels, monkeypatch):
    monkeypatch.setattr(budget, "every_within", lambda *_: 2)
    check(drawn(name, v=9, n=3), device=kernels, memory_budget=1)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour"])
def test_samples_are_those_of_a_cpu(name, each, device, monkeypatch):
    chain = drawn(name, each=each, n=3)

    def draws() -> torch.Tensor:
        operands = [t.to(device) for t in chain[:3]]
        generator = torch.Generator(device).manual_seed(0)
        return logchain.sample(*operands, 20, generator=generator, log_params=chain.log_params)

    if device != "cpu":
        pytest.skip("draws of two devices differ")
    expected = draws()
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    assert np.mean((draws() != expected).numpy()) < 0.01
