"""What only the Triton kernels of chains can get wrong: sizes, scans from both ends, offsets, and parts of a chain."""

import math

import numpy as np
import pytest
import torch

import logchain
from tests.backends import on
from tests.contract import Truth, assert_contract, poisoned_memory
from tests.expected import Expected
from tests.families import FAMILIES, INF, NAN, Chain, Draw, dense
from tests.layouts import relaid
from tests.subjects import SUBJECTS

pytest.importorskip("triton")

from logchain.kernels.gpu import chains

F32, F64, HALF = torch.float32, torch.float64, torch.bfloat16


def drawn(name: str, dtype: torch.dtype = F32, v: int = 7, **sizes) -> Chain:
    sizes = {"n": 2, "t": 1, **({} if name[-1].isdigit() else {"v": v}), **sizes}
    return FAMILIES[name](dtype, **sizes)


# scans, dtype, whether each sequence has matrices, and sizes n, v, c
SIZES = [
    ("kernels", F32, False, 3, 3, 33), ("kernels", F32, True, 3, 3, 70), ("both_ends", F32, False, 3, 3, 70),
    ("both_ends", F32, True, 3, 3, 33), ("both_ends", F32, False, 17, 1, 3), ("both_ends", F32, True, 3, 2, 3),
    ("both_ends", F32, False, 17, 3, 3), ("both_ends", F32, True, 3, 3, 1), ("kernels", F64, False, 2, 5, 9),
    ("kernels", F64, True, 2, 5, 9),
]  # fmt: skip


@pytest.mark.parametrize(("scans", "dtype", "each", "n", "v", "c"), SIZES)
def test_sizes_keep_the_contract(scans, dtype, each, n, v, c, kernels, request):
    request.getfixturevalue(scans)
    assert_contract(dense(dtype, n=n, t=1, v=v, c=c, each=each), device=kernels)


@pytest.mark.parametrize(("name", "each"), [("dense", True), ("detour", False)])
def test_states_beyond_one_program_keep_the_contract(name, each, kernels, monkeypatch):
    monkeypatch.setattr(chains, "_WIDE", 3)
    chain = drawn(name, each=each, v=5)
    assert_contract(chain, device=kernels)
    assert_contract(chain.logs(), [5, 2], device=kernels)
    assert_contract(chain._replace(bulk=chain.bulk.to(HALF)), device=kernels)


def test_nan_of_weight_zero_is_not_counted(kernels, both_ends):
    x, bulk, p0 = (t.to(kernels) for t in dense(F32, n=3, t=1, v=5, c=4)[:3])
    x[1, 0, 2, 1] = NAN
    bulk.requires_grad_()
    logchain.product(x, bulk, p0)[[0, 2]].sum().backward()
    rest = bulk.grad.clone()
    bulk.grad = None
    logchain.product(x[[0, 2]], bulk, p0).sum().backward()
    torch.testing.assert_close(rest, bulk.grad)


def test_gradients_of_denormal_weights_do_not_overflow(kernels):
    bulk = torch.tensor([[[8e-40, 1e-44], [0.0, 1.0]]], device=kernels, requires_grad=True)
    out = logchain.product(torch.zeros(2, 2, device=kernels), bulk, torch.ones(2, device=kernels))
    for weight in (1.0, -1.0):
        (gradient,) = torch.autograd.grad(out, bulk, torch.full_like(out, weight), retain_graph=True)
        torch.testing.assert_close(
            gradient[0] * weight, torch.tensor([[1.0, 1], [0, 1]]).to(kernels), rtol=2e-3, atol=0
        )


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
    x, bulk, p0 = (t.to(kernels) for t in dense(F64, n=2, t=1, v=7)[:3])
    x[..., 0] -= 400.0  # below what float32 holds, far above what float64 does not
    with logchain.rescues() as seen:
        SUBJECTS["memory_budget"](x.requires_grad_(), bulk, p0)
    assert seen.sequences == 0


@pytest.mark.parametrize("far", [1e-36, 3e37])
def test_weights_far_from_one_keep_the_contract(far, kernels, both_ends):
    chain = dense(F32, n=2, t=1, v=4, c=3)
    with poisoned_memory():
        assert_contract(chain._replace(bulk=chain.bulk * far), device=kernels, wanted="x p0")
        assert_contract(chain._replace(p0=chain.p0 * far), device=kernels, wanted="x bulk")


@pytest.mark.parametrize("n", [1, 3], ids=["each", "shared"])
def test_sum_that_underflows_beside_a_large_matrix_entry_is_recomputed(n, kernels):
    x = torch.tensor([[0.0, 0.0], [0.0, -1000.0]], dtype=F64, device=kernels).repeat(n, 1, 1).requires_grad_()
    bulk, p0 = (torch.tensor(one, dtype=F64, device=kernels) for one in ([[[1e95, 0.0], [0.0, 1e-129]]], [0.0, 1.0]))
    (posterior,) = torch.autograd.grad(logchain.product(x, bulk, p0).sum(), x)
    torch.testing.assert_close(posterior, torch.tensor([0.0, 1.0], dtype=F64, device=kernels).expand_as(x))


def test_offsets_are_summed_exactly(kernels):
    x = 1e8 * Draw(0, 1, 1, 30, 1, False).normal(1, 1, 30, 1)
    x[..., -1, :] = -x[..., :-1, :].sum()
    one = torch.ones(1, 1, 1, 1, dtype=F64, device=kernels)
    out = logchain.product(x.to(kernels), one, one[0])
    assert abs(out.item() - math.fsum(x.flatten().tolist())) <= 30 * 9 * 2.0**-53


@pytest.mark.parametrize(("each", "offset"), [(False, 2.0**40), (True, 2.0**24)], ids=["shared", "each"])
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


@pytest.mark.parametrize(("name", "each"), [("dense", True), ("detour", False), ("peaked", True)])
def test_pieces_of_any_length_keep_the_contract(name, each, kernels):
    """A leaving message enters the next piece, past the end as it is, and a following message comes back from it."""
    chain = drawn(name, each=each, n=4)
    with poisoned_memory():
        assert_contract(
            chain, [7, 2, 5, 4], device=kernels, call=lambda **k: SUBJECTS["memory_budget"](**k)["log_norm"]
        )


def test_counts_of_the_smallest_weights(kernels):
    """The gradient of such a weight would overflow; its logarithm's does not."""
    x, bulk, p0 = (t.to(kernels) for t in dense(F32, n=2, t=1, v=4, c=3)[:3])
    found = logchain.marginals(x, bulk * 1e-38, p0, transitions="sum")
    torch.testing.assert_close(found.transitions.sum((-1, -2)).cpu(), torch.full((1, 1, 3), 2.0))


@pytest.mark.parametrize(("name", "lengths"), [("dense", [3, 1]), ("detour", None)])
def test_messages_entropy_and_covariances_are_those_of_the_cpu(name, lengths, device):
    chain = FAMILIES[name](F32, v=3, c=4, n=2, t=1)

    def answers(device):
        operands = [operand.to(device).requires_grad_() for operand in chain[:3]]
        options = {"log_params": chain.log_params, "lengths": lengths}
        messages, entropy = logchain.forward_backward(*operands, **options), logchain.entropy(*operands, **options)
        total = entropy.sum() + torch.where(messages.backward == -torch.inf, 0.0, messages.backward).sum()
        return [t.detach().cpu() for t in (*messages, entropy, *torch.autograd.grad(total, operands))]

    expected = answers("cpu")
    with on("gpu"):
        found = answers(device)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("name", "each"), [("dense", True), ("detour", False)])
def test_samples_are_those_of_a_cpu(name, each, device):
    if device != "cpu":
        pytest.skip("draws of two devices differ")
    chain, draws = drawn(name, each=each, n=3), []
    for backend in ("cpu", "gpu"):
        with on(backend):
            generator = torch.Generator().manual_seed(0)
            draws.append(logchain.sample(*chain[:3], 20, generator=generator, log_params=chain.log_params))
    assert np.mean((draws[0] != draws[1]).numpy()) < 0.01


def test_length_out_of_range_makes_its_sequence_nan(kernels):
    operands = [t.to(kernels) for t in dense(F32, v=5)[:3]]
    lengths = torch.tensor([3, 9, 0], device=kernels)
    found = logchain.forward_backward(*operands, lengths=lengths)
    entropy = logchain.entropy(*operands, lengths=lengths)
    for value in (*found, entropy, logchain.marginals(*operands, lengths=lengths).states):
        assert value[1:].isnan().any() and not value[0].isnan().any()
    assert found.log_norm[1:].isnan().all() and entropy[1:].isnan().all()


@pytest.mark.parametrize(
    ("name", "dtype", "log", "each"),
    [("dense", F32, False, True), ("detour", F32, True, False), ("sparse", F64, True, True)],
)
def test_viterbi_of_any_length_keeps_the_contract(name, dtype, log, each, kernels):
    chain, lengths = FAMILIES[name](dtype, n=2, t=1, v=5, c=6, each=each, log=log), [3, 5]
    operands = [operand.to(kernels) for operand in chain[:3]]
    found = SUBJECTS["viterbi"](*operands, log_params=chain.log_params, lengths=lengths)
    Expected(chain, Truth(chain, lengths), lengths=lengths).check(found)


def test_viterbi_takes_the_lowest_of_equal_states_and_no_path_of_nan(kernels):
    states = logchain.viterbi(*(torch.ones(size, device=kernels) for size in ((2, 4, 5), (1, 5, 5), (5,)))).states
    assert (states == 0).all()
    x, bulk, p0 = (t.to(kernels) for t in dense(F32, n=3, t=1, v=4, c=3)[:3])
    x[1, 0, 2, 1] = NAN
    best = logchain.viterbi(x, bulk, p0)
    assert (best.states[1] == -1).all() and (best.states[[0, 2]] >= 0).all() and best.score[1].isnan()
