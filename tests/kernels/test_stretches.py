"""The recursion in torch's operations keeps the contract, and the rooms find the same: whole chains, and stretches."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from logchain.kernels.chain import Chain
from logchain.kernels.cpu.backward import backward as cpu_backward
from logchain.kernels.cpu.forward import forward as cpu_forward
from logchain.kernels.message import Message
from logchain.kernels.plain.backward import backward as plain_backward
from logchain.kernels.plain.forward import forward as plain_forward

NAN = torch.nan
ROOMS = {"plain": (plain_forward, plain_backward), "cpu": (cpu_forward, cpu_backward)}


class Answers(NamedTuple):
    """The log-partition, the message that leaves, and the gradients; what precedes is that of p0 or a message."""

    log_norm: Tensor
    values: Tensor
    scale: Tensor
    grad_x: Tensor
    grad_bulk: Tensor
    preceding: Tensor


def answers(room, chain, weight, entering=None, following=None, log_norm=None) -> Answers:
    forward, backward = ROOMS[room]
    messages = torch.full((chain.v + (entering is not None), chain.g, chain.m, chain.c), NAN, dtype=chain.dtype)
    kept, leaving = forward(chain, entering, keep=messages, leave=True)
    torch.testing.assert_close(forward(chain, entering)[0].log_norm, kept.log_norm, rtol=2.0**-23, atol=0)
    grad_x, grad_bulk = torch.full_like(chain.x, NAN), torch.full((*chain.bulk.shape,), NAN, dtype=chain.dtype)
    whole = kept if log_norm is None else kept._replace(log_norm=log_norm)
    preceding = backward(chain, whole, weight, following, grad_x, grad_bulk)
    return Answers(kept.log_norm, leaving.values, leaving.scale.sum(0), grad_x, grad_bulk, preceding)


def chain_of(form, dtype, one_matrix, ends):
    """A chain with sequences to be redone, and one that is impossible."""
    v, g, m, c = 6, 2, 3, 5
    draw = torch.Generator().manual_seed(0)
    bulk = torch.rand(1 if one_matrix else v - 1, g, c, c, generator=draw, dtype=dtype)
    bulk *= torch.rand(bulk.shape, generator=draw) < 0.7
    p0, x = torch.rand(g, m, c, generator=draw, dtype=dtype), 9 * torch.randn(v, g, m, c, generator=draw, dtype=dtype)
    x[:, 0, 1] *= 30  # to be redone
    x[1, 1, 1] = -torch.inf  # to be impossible
    lengths = torch.tensor([[6, 3, 1], [2, 5, 6]])[..., None] if ends else None
    if form == "logs":
        bulk, p0 = bulk.log(), p0.log()
    weight = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, 0.0]], dtype=dtype)
    return Chain(x, bulk, p0, lengths, form == "logs", dtype, form == "by_log"), weight


FORMS = pytest.mark.parametrize("form", ["linear", "logs", "by_log"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
ONE = pytest.mark.parametrize("one_matrix", [True, False], ids=["one", "each"])
ENDS = pytest.mark.parametrize("ends", [False, True], ids=["whole", "ends"])


@FORMS
@DTYPES
@ONE
@ENDS
def test_the_rooms_find_the_same(form, dtype, one_matrix, ends):
    chain, weight = chain_of(form, dtype, one_matrix, ends)
    close = dict.fromkeys(("rtol", "atol"), 300 * torch.finfo(dtype).eps)
    plain, cpu = (answers(room, chain, weight) for room in ROOMS)
    for name, one, other in zip(Answers._fields, plain, cpu, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}", **close)


@FORMS
@DTYPES
@ONE
@ENDS
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("cuts", [(3,), (1, 2, 5)], ids=str)
def test_stretches_one_after_the_other_are_the_chain(room, cuts, form, dtype, one_matrix, ends):
    chain, weight = chain_of(form, dtype, one_matrix, ends)
    whole = answers(room, chain, weight)
    bounds = [0, *cuts, chain.v]
    stretches, entered, message = [], [], None
    for first, stop in zip(bounds, bounds[1:], strict=False):
        bulk = chain.bulk if one_matrix else chain.bulk[max(0, first - 1) : stop - 1]
        left = None if chain.ends is None else (chain.ends - first).clamp(0 if first else 1, stop - first)
        stretches.append(replace(chain, x=chain.x[first:stop], bulk=bulk[: stop - 1] if not first else bulk, ends=left))
        entered.append(message)
        message = ROOMS[room][0](stretches[-1], message, leave=True)[1]
    eps = torch.finfo(dtype).eps
    close = {"rtol": 300 * eps, "atol": 300 * eps}
    torch.testing.assert_close(message.scale.sum(0), whole.scale, **close)
    torch.testing.assert_close(message.values.exp(), whole.values.exp(), **close)
    following, grad_x, grad_bulk = None, [], []
    for stretch, entering in zip(stretches[::-1], entered[::-1], strict=True):
        part = answers(room, stretch, weight, entering, following, whole.log_norm)
        following = part.preceding
        grad_x.insert(0, part.grad_x)
        if len(stretch.bulk):
            grad_bulk.insert(0, part.grad_bulk)
    torch.testing.assert_close(torch.cat(grad_x), whole.grad_x, **close)
    counts = sum(grad_bulk) if one_matrix else torch.cat(grad_bulk)
    torch.testing.assert_close(counts, whole.grad_bulk, rtol=300 * eps, atol=3000 * eps)
    torch.testing.assert_close(following, whole.preceding, **close)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("depth", [50, 300, 3000])
def test_what_a_stretch_hides_at_its_end_counts_behind_it(room, depth):
    """The state that wins in the end lies far below the other where one stretch ends and the next begins."""
    x = torch.tensor([[0.0, -depth], [-2.0 * depth, 0.0], [0.0, 0.0]]).view(3, 1, 1, 2)
    chain = Chain(x, torch.eye(2).view(1, 1, 2, 2), torch.ones(1, 1, 2), None, False, torch.float32)
    weight = torch.ones(1, 1)
    head, tail = replace(chain, x=x[:1], bulk=chain.bulk[:0]), replace(chain, x=x[1:])
    entering = ROOMS[room][0](head, leave=True)[1]
    behind = answers(room, tail, weight, entering)
    torch.testing.assert_close(behind.log_norm, torch.full((1, 1), -float(depth), dtype=torch.float64))
    ahead = answers(room, head, weight, None, behind.preceding, behind.log_norm)
    torch.testing.assert_close(ahead.grad_x.flatten(), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(behind.grad_x.view(2, 2), torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


@DTYPES
@pytest.mark.parametrize("room", ROOMS)
def test_a_deep_emission_at_the_end_of_a_stretch_is_exact(room, dtype):
    """Loops raise it: another state, which is likelier given what follows, must not lose against it."""
    far = 1 if dtype == torch.float32 else 8.5
    x = torch.tensor([0.0, -200 * far], dtype=dtype).view(1, 1, 1, 2)
    p0 = torch.tensor([-52 * far, 0.0], dtype=dtype).view(1, 1, 2)
    chain = Chain(x, torch.zeros(0, 1, 2, 2, dtype=dtype), p0, None, True, dtype)
    following = torch.tensor([-50 * far, 0.0], dtype=torch.float64).view(1, 1, 2)
    found = answers(room, chain, torch.ones(1, 1), None, following, torch.zeros(1, 1, dtype=torch.float64))
    torch.testing.assert_close(found.grad_x.flatten(), torch.tensor([1.0, 0.0], dtype=dtype))


@pytest.mark.parametrize("room", ROOMS)
def test_a_message_has_one_meaning(room):
    """Whatever room a message leaves, another goes on from it."""
    chain, weight = chain_of("linear", torch.float64, True, False)
    other = next(name for name in ROOMS if name != room)
    message = ROOMS[other][0](replace(chain, x=chain.x[:2]), leave=True)[1]
    assert isinstance(message, Message)
    after = ROOMS[room][0](replace(chain, x=chain.x[2:]), message, leave=True)[1]
    torch.testing.assert_close(after.scale.sum(0), answers(room, chain, weight).log_norm, rtol=1e-13, atol=1e-13)
