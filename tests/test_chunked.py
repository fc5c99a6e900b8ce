"""A chain that is cut into segments keeps the accuracy contract, in values and gradients, however many they are."""

import pytest
import torch

import logchain
from logchain import demo
from logchain.memory import peak_bytes
from logchain.schedules import choose, chunked
from tests.contract import (
    Truth,
    assert_contract,
    assert_values,
)
from tests.families import Chain, Draw
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


def test_float64_of_a_long_chain(cut):
    draw = Draw(0, 2, 1, 2048, 4, True)
    chain = Chain(draw.x(3.0), draw.bulk(), draw.p0())
    truth = Truth(chain)
    for count in (2, 16, 200):
        cut(count)
        assert_contract(chain, truth=truth)
    assert cut.calls


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
    assert peak_bytes(lambda: demo.forward_backward((x, bulk, p0))) <= 2 * x.numel() * x.itemsize
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
