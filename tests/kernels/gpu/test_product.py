"""`logchain.product` on the Triton kernels, in what is theirs alone: tiles, precision, rescues, unknown lengths."""

import functools

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.schedules import budget
from tests import contract
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values, poisoned_memory
from tests.families import FAMILIES, FAR, Chain, dense, far_from_one
from tests.layouts import strange

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
EACH = pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])

assert_contract = functools.partial(contract.assert_contract, k=K)


def few(each: bool) -> dict:
    """Three sequences that share their matrices, or two that do not."""
    return {"each": each, "n": 2 if each else 3, "t": 1}


MANY_STATES = [pytest.param("dense", c, marks=pytest.mark.slow) for c in (130, 200, 300)]


@pytest.mark.parametrize(
    ("name", "c"), [("dense", 1), ("detour", 6), ("dense", 33), ("sparse", 65), ("detour", 70), *MANY_STATES]
)
@EACH
def test_sizes(name, c, each, kernels):
    chain = FAMILIES[name](F32, v=5 if c < 10 else 3, c=c, **few(each))
    assert_contract(chain.logs() if c == 200 else chain, device=kernels)


@pytest.mark.parametrize("n, c", [(1, 17), (2, 1), (17, 17), (33, 1), (65, 17)])
def test_blocks_of_sequences(n, c, kernels):
    for name in ["dense", "sparse", "sharp"] if n == 17 else ["dense"]:
        assert_contract(FAMILIES[name](F32, 1, n=n, t=1, v=3, c=c), device=kernels)


@EACH
@pytest.mark.parametrize("name", ["peaked", "detour", "offsets"])
def test_float64(name, each, kernels):
    assert_contract(FAMILIES[name](F64, v=5, c=5, **few(each)), device=kernels)


@EACH
def test_offsets_beyond_the_integers_of_float32(each, kernels):
    """Their levels could not be added to shifts; even then what is left of the inputs counts."""
    chain = dense(F32, v=4, c=3, **few(each))
    offset = 1e8 * (1 - 2 * (torch.arange(4.0) % 2))[:, None]
    assert_contract(chain._replace(x=chain.x + offset), device=kernels)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@EACH
def test_where_forward_and_backward_messages_hardly_meet(each, log, kernels):
    """Factors of counts, divided by what they have in common, would overflow though their product does not."""
    chain = dense(F32, v=3, c=2, **few(each))
    x = torch.tensor([[0.0, -55.0], [0.0, 0.0], [-60.0, 0.0]]) + 0.1 * chain.x
    chain = Chain(x, 1e-37 * torch.eye(2) * chain.bulk, chain.p0)
    assert_contract(chain.logs() if log else chain, device=kernels)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_what_matrices_have_in_common_where_a_message_enters(offset, kernels, monkeypatch):
    """From checkpoint to checkpoint, in float64."""
    monkeypatch.setattr(budget, "every_within", lambda *_: 2)
    chain = dense(F64, v=5, c=3, n=2, t=1).logs()
    assert_contract(chain._replace(bulk=chain.bulk + offset), device=kernels, memory_budget=1)


@FAR
@pytest.mark.parametrize("c", [3, 17])
@EACH
def test_gradients_have_the_digits_of_weights_that_are_far_from_1(each, c, far, log, kernels):
    assert_contract(far_from_one("p0", far, log, v=4, c=c, **few(each)), device=kernels)


def test_a_long_sum_of_scales_is_rounded_once(kernels):
    assert_contract(FAMILIES["offsets"](F64, n=2, t=1, v=100, c=2), wanted="x", device=kernels)


@EACH
@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
def test_columns_of_any_size(log, each, kernels):
    """From denormal numbers to the largest, a column of zeros among them: more than a message spans is redone."""
    chain = dense(F64, v=4, c=5, **few(each))
    chain.bulk[:] *= torch.tensor([1e-40, 1e-36, 1.0, 1e30, 0.0], dtype=F64)
    chain = chain.to(F32).logs() if log else chain.to(F32)
    with logchain.rescues() as seen:
        out = logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), log_params=log)
    truth = Truth(chain)
    assert_values(out, truth.log_norm, truth.value_bound(k=K))
    assert seen.sequences == out.numel()


@EACH
def test_tiny_entries_of_doubles(each, kernels):
    """Their logarithms are as exact as others', where a sum of them is redone."""
    chain = FAMILIES["detour"](F64, v=4, c=4, **few(each))
    linear = Chain(chain.x, chain.bulk.exp(), chain.p0.exp())
    assert linear.bulk.min() < 1e-80
    assert_contract(linear, device=kernels)


@EACH
@pytest.mark.parametrize("c, lengths", [(6, [5, 4]), (70, [3, 1]), (70, [1, 1])])
def test_nothing_behind_an_end_matters(lengths, c, each, kernels):
    """The last length is that of the whole tensor or not: blocks stop at their own largest end."""
    contract.assert_nothing_behind_matters(dense(F32, v=5, c=c, each=each, n=2, t=1), lengths, device=kernels, k=K)


@pytest.mark.parametrize(("operand", "step", "c"), [("x", 1, 70), ("x", -1, 5), ("bulk", 1, 70)])
@EACH
def test_nan_stays_in_its_sequence(operand, step, c, each, kernels):
    if operand == "bulk" and not each:  # which all sequences share
        return
    chain = FAMILIES["sparse"](F32, v=4, c=c, each=each, n=2, t=1)
    chain.x[:] = chain.x.nan_to_num(neginf=-1.0)  # every state is possible somewhere
    contract.assert_nan_stays((chain, Truth(chain)), operand, step, device=kernels, k=K)


@EACH
def test_no_weight_no_gradient(each, kernels):
    """Also where the numbers are not finite."""
    chain = dense(F32, v=4, c=5, each=each, n=2, t=1)
    chain.x[1, 0, 2] = NAN
    x, bulk, p0 = (tensor.to(kernels).requires_grad_() for tensor in chain[:3])
    logchain.product(x, bulk, p0).backward(torch.tensor([[INF], [0.0]], device=kernels))
    assert (x.grad[1] == 0).all() and x.grad[0].isinf().all()
    assert not each or ((bulk.grad[1] == 0).all() and (p0.grad[1] == 0).all())


@EACH
@pytest.mark.parametrize("how", ["transposed", "sliced"])
def test_strange_strides(how, each, kernels):
    assert_contract(strange(dense(F32, v=3, c=68, **few(each)), how), device=kernels)


@EACH
def test_nothing_is_read_before_it_is_written(each, kernels):
    chain = FAMILIES["sparse"](F32, v=4, c=70, **few(each))
    with poisoned_memory():
        assert_contract(chain, torch.tensor([3, 2, 1][: len(chain.x)]), device=kernels)


def test_lengths_of_sets_whose_members_do_not_lie_together(kernels):
    """The last batch axis has matrices of its own: lengths are read in another order than they have in memory."""
    chain = dense(F32, n=3, t=2, v=4, c=5)
    bulk = torch.stack([chain.bulk[0, 0], chain.bulk[0, 0].flip(-1)])[None]
    assert_contract(chain._replace(bulk=bulk), torch.tensor([[1, 4], [2, 1], [4, 3]]), device=kernels)


def test_a_length_out_of_range_on_the_device_makes_its_sequence_nan(kernels):
    chain = dense(F32, v=5)
    lengths = torch.tensor([3, 9, 0], device=kernels)
    out = logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), lengths=lengths)
    truth = Truth(chain, [3, 1, 1])
    assert out[1:].isnan().all()
    assert_values(out[:1], truth.log_norm[:1], truth.value_bound(k=K)[:1])


def test_sequences_redone_are_counted(kernels):
    def count(name):
        chain = FAMILIES[name](F32, v=6, n=2, t=1)
        with logchain.rescues() as seen, torch.no_grad():
            logchain.product(*(tensor.to(kernels) for tensor in chain[:3]), log_params=chain.log_params)
        assert seen.outputs == 0
        return seen.sequences

    assert count("dense") == count("peaked") == count("impossible") == 0
    assert 0 < count("left_to_right") <= 2 == count("detour")


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
