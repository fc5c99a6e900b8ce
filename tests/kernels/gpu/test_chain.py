"""The fused chains: messages and posteriors within the contract, whatever stands around a sequence."""

import numpy as np
import pytest
import torch

from logchain import reference
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain
from tests.kernels.gpu.chains import BOTH, Problem, few

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


@BOTH
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead", "impossible", "offsets"])
def test_messages_and_posteriors(device, name, each):
    Problem(FAMILIES[name](dtype=F32, **few(each), v=5, c=6), device).assert_contract()


@BOTH
@pytest.mark.parametrize("v, c", [(1, 5), (2, 5), (4, 70)])
def test_messages_that_are_not_kept_are_the_same(device, v, c, each):
    problem = Problem(FAMILIES["dense"](dtype=F32, v=v, c=c, **few(each)), device)
    kept, messages = problem.forward(keep=True)
    log_norm, none = problem.forward(keep=False)
    assert messages is not None and none is None
    assert torch.equal(log_norm, kept)


@BOTH
@pytest.mark.parametrize("name, c", [("dense", 33), ("sparse", 65), ("detour", 70)])
def test_more_states(device, name, c, each):
    Problem(FAMILIES[name](dtype=F32, v=3, c=c, **few(each)), device).assert_contract()


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("c, log_params", [(200, True), (300, False)])
def test_many_states(device, c, log_params, each):
    chain = FAMILIES["dense"](dtype=F32, n=1 if each else 2, t=1, v=3, c=c)
    Problem(chain.logs() if log_params else chain, device).assert_contract()


@pytest.mark.parametrize("m, c", [(1, 17), (2, 1), (17, 17), (33, 1), (65, 17)])
def test_blocks_of_sequences(device, m, c):
    Problem(FAMILIES["dense"](dtype=F32, n=m, t=1, v=4, c=c), device).assert_contract()


@BOTH
@pytest.mark.parametrize("name", ["peaked", "detour", "offsets"])
def test_float64(device, name, each):
    Problem(FAMILIES[name](dtype=F64, **few(each), v=6, c=5), device).assert_contract()


@BOTH
def test_arithmetic_in_doubles_for_float_operands(device, each):
    chain = FAMILIES["detour"](dtype=F32, **few(each), v=4, c=5)
    truth = Truth(Chain(chain.x.double(), *chain[1:]))
    log_norm, messages = Problem(chain, device).forward(keep=True, dtype=F64)
    assert messages.dtype == F64
    assert_values(log_norm.reshape(truth.log_norm.shape).cpu(), truth.log_norm, truth.value_bound(F64, K))


def test_a_long_sum_of_scales_is_rounded_once(device):
    chain = FAMILIES["offsets"](dtype=F64, n=3, t=2, v=100, c=2)
    truth = Truth(chain)
    assert_values(Problem(chain, device).value(), truth.log_norm, truth.value_bound(k=K))


@BOTH
def test_rescues_are_counted(device, each):
    rescued = torch.zeros(1, dtype=torch.int64, device=device)
    for name, some in (("dense", False), ("left_to_right", False), ("impossible", False), ("detour", True)):
        problem = Problem(FAMILIES[name](dtype=F32, **few(each) | {"v": 5}), device)
        if name == "left_to_right":  # zeros without misaligned maxima
            problem.x *= 0.05
        _, messages = problem.forward(keep=True, rescued=rescued)
        assert (rescued.item() > 0) == some, name
        rescued.zero_()
        problem.backward(messages, torch.ones(problem.g, problem.m, device=device), rescued=rescued)
        assert (rescued.item() > 0) == some, name


@BOTH
@pytest.mark.parametrize("log_params", [False, True])
def test_columns_of_any_size(device, log_params, each):
    """From denormal numbers to the largest, a column of zeros among them: nothing is rescued that need not be."""
    chain = FAMILIES["dense"](dtype=F64, v=4, c=5, **few(each))
    chain.bulk[:] *= torch.tensor([1e-40, 1e-36, 1.0, 1e30, 0.0], dtype=F64)
    chain = chain.to(F32)
    problem = Problem(chain.logs() if log_params else chain, device)
    problem.assert_contract()
    rescued = torch.zeros(1, dtype=torch.int64, device=device)
    problem.forward(rescued=rescued)
    assert rescued.item() == 0


@BOTH
def test_a_message_from_behind(device, each):
    """A chain cut in two: the second half's backward message is passed to the first."""
    chain = FAMILIES["dense"](dtype=F32, v=6, c=7, **few(each))
    problem, half = Problem(chain, device), Problem(chain, device)
    _, messages = problem.forward(keep=True)
    weight = torch.ones(problem.g, problem.m, device=device)
    grad_x = torch.empty_like(problem.x)
    problem.backward(messages, weight, grad_x=grad_x)
    numpy = reference.forward_backward(*(t.double().numpy() for t in chain[:3])).backward
    final = torch.from_numpy(problem.of_batch(numpy)[2]).to(messages).contiguous()
    half.x, half.bulk = problem.x[:3], problem.bulk[:2]
    found = torch.empty_like(half.x)
    half.backward(messages[:3].contiguous(), weight, grad_x=found, final=final)
    torch.testing.assert_close(found, grad_x[:3], rtol=0, atol=2e-6)


@BOTH
@pytest.mark.parametrize("c, lengths", [(6, [5, 4]), (70, [3, 1]), (70, [1, 1])])
def test_nothing_behind_an_end_matters(device, lengths, c, each):
    """The last length is that of the whole tensor or not: blocks stop at their own largest end."""
    chain = FAMILIES["dense"](dtype=F32, v=5, c=c, each=each, n=2, t=1)
    lengths = torch.tensor(lengths)
    for n, length in enumerate(lengths):
        chain.x[n, :, length:] = NAN
        if each:
            chain.bulk[n, :, max(length - 1, 0) :] = NAN
    with np.errstate(invalid="ignore"):
        clean = chain._replace(x=chain.x.nan_to_num(), bulk=chain.bulk.nan_to_num())
    problem = Problem(chain, device, lengths)
    log_norm, messages = problem.forward(keep=True)
    truth = Truth(clean, lengths)
    assert_values(log_norm.reshape(2, 1).cpu(), truth.log_norm, truth.value_bound(k=K))
    assert_values(problem.value(), truth.log_norm, truth.value_bound(k=K))
    Problem(clean, device, lengths).assert_messages(messages)
    problem.chain = clean
    problem.bulk = Problem(clean, device).bulk
    problem.assert_gradients(messages, truth)


@BOTH
@pytest.mark.parametrize("place, c", [("x", 70), ("last x", 5), ("bulk", 70)])
def test_nan_stays_in_its_sequence(device, place, c, each):
    chain = FAMILIES["sparse"](dtype=F32, v=4, c=c, each=each, n=2, t=1)
    chain.x[:] = chain.x.nan_to_num(neginf=-1.0)  # every state is possible somewhere
    clean = chain._replace(x=chain.x.clone(), bulk=chain.bulk.clone())
    if place == "bulk":
        chain.bulk[-1, 0, 1, c // 2, 0] = NAN
    else:
        chain.x[1, 0, -1 if place == "last x" else 1, c // 2] = NAN
    problem, other = Problem(chain, device), Problem(clean, device)
    spoilt = torch.tensor([place == "bulk" and not each, True], device=device)
    found, expected = [], []
    for one, out in ((problem, found), (other, expected)):
        log_norm, messages = one.forward(keep=True)
        grad_x = torch.empty_like(one.x)
        start, r = one.backward(messages, torch.ones_like(log_norm), log_norm, grad_x=grad_x, want_r=True)
        out += [
            log_norm.view(-1),
            start.view(2, -1),
            grad_x.view(4, 2, c)[1].view(2, -1),
            r.view(4, 2, c)[1].view(2, -1),
        ]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[~spoilt], theirs[~spoilt])
        assert ours[spoilt].isnan().flatten(1).any(1).all() if ours.dim() > 1 else ours[spoilt].isnan().all()


@BOTH
def test_no_weight_no_gradient(device, each):
    """Also where the numbers are not finite."""
    chain = FAMILIES["dense"](dtype=F32, v=4, c=5, each=each, n=2, t=1)
    chain.x[1, 0, 2] = NAN
    problem = Problem(chain, device)
    _, messages = problem.forward(keep=True)
    grad_x = torch.full_like(problem.x, NAN)
    weight = torch.tensor([INF, 0.0], device=device).view(problem.g, problem.m)
    start, _ = problem.backward(messages, weight, grad_x=grad_x)
    grad_x, start = grad_x.view(4, 2, 5), start.view(2, 5)
    assert (grad_x[:, 1] == 0).all() and (start[1] == 0).all()
    assert grad_x[:, 0].isinf().all() and start[0].isinf().all()


@BOTH
def test_strange_strides(device, each, c=68):
    """Transposed, expanded, sliced and offset operands and gradients."""
    chain = FAMILIES["dense"](dtype=F32, v=4, c=c, **few(each))
    plain = Problem(chain, device)
    log_norm, messages = plain.forward(keep=True)
    weight = torch.ones_like(log_norm)
    expected = torch.empty_like(plain.x)
    start, r = plain.backward(messages, weight, grad_x=expected, want_r=True)

    strange = Problem(chain, device)
    strange.x = plain.x.movedim(0, -1).contiguous().movedim(-1, 0)
    wide = torch.full((*plain.bulk.shape[:2], c + 3, c + 1), NAN, device=device)
    wide[..., 1 : c + 1, 1 : c + 1] = plain.bulk.mT
    strange.bulk = wide[..., 1 : c + 1, 1 : c + 1].mT
    strange.start = plain.start.mT.contiguous().mT
    again, kept = strange.forward(keep=True)
    torch.testing.assert_close(again, log_norm, rtol=0, atol=1e-5)
    grad_x = torch.full((2 * c, *plain.x.shape[:3]), NAN, device=device)[::2].movedim(0, -1)
    first, ratio = strange.backward(kept, weight.mT.contiguous().mT, grad_x=grad_x, want_r=True)
    for ours, theirs in ((grad_x, expected), (first, start), (ratio[1:], r[1:])):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@BOTH
def test_nothing_is_read_before_it_is_written(device, each):
    chain = FAMILIES["sparse"](dtype=F32, v=4, c=70, **few(each))
    lengths = torch.tensor([3, 2, 1][: chain.x.shape[0]])
    with poisoned_memory():
        Problem(chain, device, lengths).assert_contract()


@BOTH
def test_tiny_entries_of_doubles(device, each):
    """Their logarithms are as exact as others', where a sum of them is redone."""
    chain = FAMILIES["detour"](dtype=F64, v=4, c=4, **few(each))
    linear = Chain(chain.x, chain.bulk.exp(), chain.p0.exp())
    assert linear.bulk.min() < 1e-80
    Problem(linear, device).assert_contract()
