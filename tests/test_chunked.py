"""A chain that is cut into segments keeps the accuracy contract, in values and gradients, however many they are."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from logchain.autograd import chain as chain_functions
from logchain.memory import peak_bytes
from logchain.schedules import choose, chunked
from tests.contract import (
    Truth,
    assert_contract,
    assert_values,
    value_bound,
)
from tests.families import FAMILIES, Chain, Draw, dense
from tests.test_memory import allocations, variants

F32, F64 = torch.float32, torch.float64
COUNTS = (2, 3, 7, 100)


@pytest.fixture
def cut(monkeypatch):
    """Makes `product` cut its chains into so many segments; `cut.calls` counts the forward passes that did."""

    def into(count):
        monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("chunked", count))

    def counted(*args, **options):
        into.calls += 1
        return forward(*args, **options)

    forward, into.calls = chunked.forward, 0
    monkeypatch.setattr(chunked, "forward", counted)
    into(3)
    return into


@pytest.mark.parametrize("name", ["left_to_right", "sparse", "sharp", "one_dead", "dense"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_other_draws_and_many_steps(name, each, cut):
    for seed, count in ((1, 5), (2, 8)):
        cut(count)
        assert_contract(FAMILIES[name](F32, seed, each=each, n=3, t=1, v=50, c=9))


def test_posteriors_of_a_long_chain(cut):
    cut(64)
    draw = Draw(0, 1, 1, 16384, 8, False)
    chain = Chain(draw.x() - 32.0, draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    truth = reference.marginals(*(tensor.numpy() for tensor in chain[:3]))
    x = chain.x.requires_grad_()
    out = logchain.product(*chain[:3])
    assert_values(out, truth.log_norm, value_bound(truth.log_norm, 16384, 8, dtype=F32))
    out.backward()
    assert np.abs(x.grad.double().numpy() - truth.states).max() < 1e-5
    assert cut.calls


def test_float64_of_a_long_chain(cut):
    draw = Draw(0, 2, 1, 2048, 4, True)
    chain = Chain(draw.x(3.0), draw.bulk(), draw.p0())
    truth = Truth(chain)
    for count in (2, 16, 200):
        cut(count)
        assert_contract(chain, truth=truth)
    assert cut.calls


def second(chain, **options):
    operands = [tensor.clone().requires_grad_() for tensor in chain[:3]]
    out = logchain.product(*operands, **options)
    first = torch.autograd.grad(out.sum(), operands, create_graph=True)
    return out, *first, *torch.autograd.grad(sum(gradient.square().sum() for gradient in first), operands)


@pytest.mark.parametrize("lengths", [None, [6, 2, 4]])
def test_second_derivatives_and_maps_are_those_of_the_sequential_schedule(lengths, cut):
    chain = dense(F64, v=6, c=3)
    stacked = torch.stack([chain.x, chain.x.flip(-1)])
    found = [
        (
            *second(chain, lengths=lengths),
            torch.vmap(lambda x: logchain.product(x, *chain[1:3], lengths=lengths))(stacked),
            torch.vmap(torch.func.grad(lambda x: logchain.product(x, *chain[1:3], lengths=lengths).sum()))(stacked),
        )
        for count in (1, 3)
        if cut(count) is None
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert cut.calls


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_compiles_into_one_graph(dynamic, cut):
    torch._dynamo.reset()

    def function(x, bulk, p0):
        return chain_functions.log_norm(x + 1, bulk * 2, p0, None, False, segments=3) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for v in (6, 9):
        found = []
        for call in (function, compiled):
            operands = [tensor.clone().requires_grad_() for tensor in dense(F64, v=v, c=3)[:3]]
            out = call(*operands)
            found.append((out, *torch.autograd.grad(out.cos().sum(), operands)))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["dense", "left_to_right"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([[6, 6], [1, 2], [3, 1]])], ids=["all", "lengths"])
def test_opcheck(name, lengths, cut):
    chain = FAMILIES[name](F64, v=6, c=3)
    x, bulk, p0 = (tensor.clone().requires_grad_() for tensor in chain[:3])
    torch.library.opcheck(torch.ops.logchain.log_norm.default, (x, bulk, p0, lengths, False, True, 3))
    torch.library.opcheck(torch.ops.logchain.log_norm.default, (*chain[:3], lengths, False, False, 3))
    with torch.no_grad():
        kept = torch.ops.logchain.log_norm(x, bulk, p0, lengths, False, True, 3)
    grad = torch.randn_like(kept[0]).requires_grad_()
    arguments = (grad, x, bulk, p0, lengths, *kept, False, False, True, True, True, 3)
    torch.library.opcheck(torch.ops.logchain.log_norm_backward.default, arguments)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", variants(3, F32))
def test_allocations_do_not_grow_with_v(name, dtype, cut):
    cut(4)
    short, long = (variants(v, dtype)[name] for v in (21, 81))
    assert allocations(short) == allocations(long)
    lengths = torch.tensor([1, 5, 20, 10, 4])
    assert allocations(short, lengths=lengths) == allocations(long, lengths=lengths * 4)


def test_it_takes_two_messages(cut):
    cut(64)
    x, bulk, p0 = torch.randn(4, 40001, 16), torch.rand(1, 16, 16), torch.rand(16)

    def gradients():
        operands = [tensor.detach().requires_grad_() for tensor in (x, bulk, p0)]
        logchain.product(*operands).sum().backward()
        return [operand.grad for operand in operands]

    assert peak_bytes(gradients) <= 2 * x.numel() * x.itemsize
    assert cut.calls


def apart(*x: list[float]) -> Chain:
    """Two states that never meet."""
    steps = torch.tensor(x, dtype=F32)[None, None]
    return Chain(steps, torch.eye(2).expand(1, 1, 1, 2, 2).clone(), torch.ones(1, 1, 2))


@pytest.mark.parametrize("depth", [300, 800])
def test_what_underflows_between_segments_is_found(depth, cut):
    """The path that wins in the end runs so far below at first, while each product holds one step."""
    cut(100)
    chain = apart([0, 0], [0, -depth], [0, 0], [-2 * depth, 0], [0, 0])
    truth = Truth(chain)
    assert_contract(chain, truth=truth)
    with torch.no_grad():
        out = logchain.product(*chain[:3])
    assert_values(out, truth.log_norm, truth.value_bound())
    assert cut.calls == 2


def test_scales_that_vouch_for_too_little(cut):
    """Without a look at the steps, which paths of many small transitions would need."""
    flips = torch.full((2, 2), 1e-20).fill_diagonal_(1.0)[None, None, None]
    x = torch.tensor([[0.0, -1000.0], [-1000.0, 0.0]]).repeat(11, 1)[None, None, :21]
    chain = Chain(x, flips, torch.ones(1, 1, 2))
    truth = Truth(chain)
    for count in (2, 4):
        cut(count)
        assert_contract(chain, truth=truth)
        with torch.no_grad():
            out = logchain.product(*chain[:3])
        assert_values(out, truth.log_norm, truth.value_bound())
