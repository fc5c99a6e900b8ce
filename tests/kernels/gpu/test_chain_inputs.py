"""Nothing around a sequence changes what the fused chains find: other rows, strides, old memory, what has no weight."""

import numpy as np
import pytest
import torch

from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values, poisoned_memory
from tests.families import FAMILIES
from tests.kernels.gpu.chains import BOTH, Problem, few

F32 = torch.float32
INF, NAN = float("inf"), float("nan")


@BOTH
@pytest.mark.parametrize("c", [6, 70])
@pytest.mark.parametrize("lengths", [[3, 1], [1, 1], [5, 4]])
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
@pytest.mark.parametrize("c", [5, 70])
@pytest.mark.parametrize("place", ["x", "last x", "bulk"])
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
@pytest.mark.parametrize("c", [6, 68])
def test_strange_strides(device, c, each):
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
def test_expanded_operands(device, each):
    chain = FAMILIES["dense"](dtype=F32, v=4, c=6, **few(each))
    problem, copied = Problem(chain, device), Problem(chain, device)
    problem.x = problem.x[:1, :1, :1].expand_as(problem.x)
    problem.bulk = problem.bulk[:1].expand_as(problem.bulk)
    problem.start = problem.start[:1, :1].expand_as(problem.start)
    copied.x, copied.bulk, copied.start = (t.contiguous() for t in (problem.x, problem.bulk, problem.start))
    assert torch.equal(problem.forward(keep=False)[0], copied.forward(keep=False)[0])


@BOTH
@pytest.mark.parametrize("c", [6, 70])
def test_nothing_is_read_before_it_is_written(device, c, each):
    chain = FAMILIES["sparse" if c > 6 else "detour"](dtype=F32, v=4, c=c, **few(each))
    lengths = torch.tensor([3, 2, 1][: chain.x.shape[0]])
    with poisoned_memory():
        Problem(chain, device, lengths).assert_contract()
