"""What holds for every question of a chain: each sequence as if alone, half types, NaN, zeros, layouts, gradients."""

import numpy as np
import pytest
import torch

import logchain
from tests.contract import poisoned_memory
from tests.families import FAMILIES, dense
from tests.layouts import poisoned
from tests.questions import ALL, floating
from tests.test_marginals import small

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ALL)
def test_lengths_are_each_sequence_alone(name, each):
    question, chain = ALL[name], dense(F64, each=each, v=6, c=4)
    lengths = torch.tensor([[6, 1], [3, 5], [2, 6]])
    x, bulk, p0, _ = poisoned(chain, lengths)
    found = question(x, bulk, p0, lengths=lengths)
    counts = torch.zeros_like(bulk)
    for index in np.ndindex(3, 2):
        end = int(lengths[index])
        set_ = index if each else (0, 0)
        alone = question(x[index][:end], bulk[set_][: end - 1], p0[set_])
        for position, (one, many) in enumerate(zip(alone, found, strict=True)):
            if name == "sum" and position == 1:
                counts[set_][: end - 1] += one
                continue
            many = many[index]
            if one.dim():
                torch.testing.assert_close(many[: len(one)], one, rtol=1e-12, atol=1e-12)
                behind = -1 if one.dtype == torch.int64 else -INF if name == "messages" else 0.0
                assert (many[len(one) :] == behind).all()
            else:
                torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-12)
    if name == "sum":
        torch.testing.assert_close(found[1], counts, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_nan_behind_the_end_is_in_no_gradient(name, steps, log):
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(2, 3, 2, generator=generator, dtype=F64), torch.rand(2, steps, 2, 2, generator=generator)
    p0 = torch.rand(2, generator=generator, dtype=F64)
    lengths = [1, 3]
    grads = []
    for poison in (0.5, NAN):
        x[0, 1:], bulk[0] = poison, poison
        operands = [operand.clone().requires_grad_() for operand in (x, bulk.double(), p0)]
        found = ALL[name](*operands, log_params=log, lengths=lengths)
        total = sum(t.cos().sum() for t in floating(found))
        grads.append(torch.autograd.grad(total, operands))
    for clean, spoilt in zip(*grads, strict=True):
        torch.testing.assert_close(spoilt, clean, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("shared", "log", "lengths"),
    [(False, False, None), (False, True, [2, 3]), (True, False, [2, 3]), (True, True, None)],
    ids=["each", "each-log_params-lengths", "shared-lengths", "shared-log_params"],
)
@pytest.mark.parametrize("name", ALL)
def test_gradients(name, shared, log, lengths):
    generator = torch.Generator().manual_seed(0)
    lead = (1,) if shared else (2,)
    x = torch.randn(2, 3, 2, generator=generator, dtype=F64, requires_grad=True)
    bulk = 0.1 + torch.rand(*lead, 1 if shared else 2, 2, 2, generator=generator, dtype=F64)
    p0 = 0.1 + torch.rand(*lead, 2, generator=generator, dtype=F64)
    bulk, p0 = ((t.log() if log else t).requires_grad_() for t in (bulk, p0))

    def function(*operands):
        return tuple(floating(question(*operands, log_params=log, lengths=lengths)))

    question = ALL[name]
    assert torch.autograd.gradcheck(function, (x, bulk, p0))


@pytest.mark.parametrize("name", ALL)
def test_gradients_beside_zeros(name):
    """What is impossible has gradient 0, and none of its neighbours is disturbed."""
    operands = [operand.requires_grad_() for operand in small(3, True)]
    found = ALL[name](*operands)
    if name == "divergence":
        found = (logchain.kl_divergence(tuple(operands), tuple(small(5, False))),)
    total = sum((t * torch.randn_like(t)).sum() for t in floating(found))
    grads = torch.autograd.grad(total, operands)
    for gradient, operand, zero in zip(grads, operands, (-INF, 0.0, 0.0), strict=True):
        assert gradient.isfinite().all() and (gradient[operand == zero] == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_impossible_sequences_have_no_gradient(name):
    chain = FAMILIES["dense"](F64, v=4, c=3)
    x = chain.x.clone()
    x[0, 0, 2] = -INF
    x.requires_grad_()
    found = ALL[name](x, chain.bulk, chain.p0)
    sum(t[0, 0].sum() for t in floating(found) if t.dim() > 1 and t.shape[0] == 3).backward()
    assert (x.grad == 0).all() if name != "messages" else x.grad.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_a_nan_stays_in_its_sequence(name):
    chain = FAMILIES["dense"](F32, v=4, c=3)
    x = chain.x.clone()
    x[1, 0, 2, 1] = NAN
    found, clean = ALL[name](x, *chain[1:3]), ALL[name](*chain[:3])
    for one, other in zip(found, clean, strict=True):
        if one is None or one.shape[0] != 3:
            continue
        assert one[1, 0].isnan().any() if one.is_floating_point() else (one[1, 0] == -1).all()
        others = torch.ones(3, 2, dtype=torch.bool)
        others[1, 0] = False
        torch.testing.assert_close(one[others], other[others])


SHAPES = [(1, 3), (2, 1), (1, 1), (5, 17)]


@pytest.mark.parametrize("batch", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_sizes_strides_and_dirty_memory(name, sizes, batch):
    v, c = sizes
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(c, v, *batch, generator=generator, dtype=F64).movedim((0, 1), (-1, -2))
    bulk = torch.rand(c, c, generator=generator, dtype=F64).mT.expand(v - 1, c, c)
    p0 = torch.rand(c, generator=generator, dtype=F64)
    expected = ALL[name](x.contiguous(), bulk.contiguous(), p0)
    with poisoned_memory():
        found = ALL[name](x, bulk, p0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_half_types_are_computed_in_float32(name, dtype):
    chain = dense(F32, v=5, c=4)
    halves = [operand.to(dtype).requires_grad_() for operand in chain[:3]]
    wide = [operand.detach().float().requires_grad_() for operand in halves]
    found, expected = ALL[name](*halves), ALL[name](*wide)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype in (F32, torch.int64)
        torch.testing.assert_close(one, other)
    sum(t.sum() for t in floating(found)).backward()
    assert all(operand.grad.dtype == dtype for operand in halves)


@pytest.mark.parametrize("peak", [1.0, 600.0], ids=["plain", "redone"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_messages_are_the_same_bits_on_idle_threads(dtype, each, peak, monkeypatch):
    x, bulk, p0 = (part[0, 0] for part in dense(dtype, each=each, v=2101, c=32)[:3])
    x = x * peak
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        found.append(logchain.forward_backward(x, bulk, p0))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
