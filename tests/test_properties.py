"""Properties that `logchain.product` must have whatever the chain: drawn by hypothesis from all the families."""

import math

import numpy as np
import pytest
import torch

import logchain
from tests.contract import Truth, assert_values, ulp
from tests.families import FAMILIES, Chain

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

F32, F64 = torch.float32, torch.float64
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
FREE = [name for name in FAMILIES if name not in ("v1", "v2", "v3", "v5", "c1", "c301", "detour2", "far_start1")]


@st.composite
def chains(draw, shortest: int = 1, log: bool | None = None):
    """A chain of any family with small odd sizes; x is a multiple of 1/16, so that whole numbers are added exactly."""
    sizes = {"v": draw(st.integers(shortest, 9)), "c": draw(st.integers(1, 7)), "n": draw(st.integers(1, 3)), "t": 2}
    make = FAMILIES[draw(st.sampled_from(FREE))]
    chain = make(draw(st.sampled_from([F32, F64])), draw(st.integers(0, 99)), each=draw(st.booleans()), **sizes)
    chain = chain.logs() if log or (log is None and draw(st.booleans())) else chain
    return chain._replace(x=(chain.x * 16).round() / 16)


def value(chain: Chain) -> torch.Tensor:
    return logchain.product(*chain[:3], log_params=chain.log_params)


def assert_equal_values(found: torch.Tensor, expected: torch.Tensor, *near: Chain, largest: float = 0.0) -> None:
    """Both keep the contract, so they differ by at most the sum of the chains' bounds and the rounding of a shift."""
    bound = sum(Truth(chain).value_bound() for chain in near) + ulp(np.array(largest), expected.dtype)
    assert_values(found, expected.double().numpy(), bound)


@EXAMPLES
@given(chains(), st.integers(-1000, 1000), st.integers(0, 8))
def test_adding_to_a_step_adds_to_the_result(chain, shift, step):
    moved = chain._replace(x=chain.x.clone())
    moved.x[..., step % chain.x.shape[-2], :] += shift
    assert_equal_values(value(moved).double() - shift, value(chain), chain, moved)


@EXAMPLES
@given(chains(), st.integers(0, 20))
def test_scaling_bulk_scales_the_product(chain, power):
    """By powers of two where bulk is linear, by whole nats where it is logarithmic: both are exact."""
    steps = chain.x.shape[-2] - 1
    if chain.log_params:
        chain = chain._replace(bulk=(chain.bulk * 16).round() / 16)
        scaled, shift = chain._replace(bulk=chain.bulk + power), float(steps * power)
    else:
        scaled, shift = chain._replace(bulk=chain.bulk * 2.0**power), steps * power * math.log(2)
    assert_equal_values(value(scaled).double() - shift, value(chain), chain, scaled, largest=shift)


@EXAMPLES
@given(chains(shortest=2), st.integers(0, 7))
def test_a_chain_splits_at_any_step(chain, cut):
    """Up to the cut once for every state there, from the cut once for every state: `matmul` joins the two halves."""
    cut %= chain.x.shape[-2]
    c = chain.x.shape[-1]
    only = torch.where(torch.eye(c, dtype=torch.bool), 0.0, -torch.inf).to(chain.x.dtype)  # (state at the cut, c)
    x, bulk, p0 = chain.x, chain.bulk, chain.p0

    # One more leading axis: the state at the cut.
    head_x = x[..., : cut + 1, :].expand(c, *x.shape[:-2], cut + 1, c).clone()
    head_x[..., -1, :] += only[:, None, None]
    head = Chain(head_x, bulk[..., :cut, :, :], p0, chain.log_params)
    tail_x = x[..., cut:, :].expand(c, *x.shape[:-2], -1, c).clone()
    tail_x[..., 0, :] = 0.0
    start = (only if chain.log_params else only.exp())[:, None, None]
    tail = Chain(tail_x, bulk[..., cut:, :, :], start, chain.log_params)
    joined = logchain.matmul(value(head).movedim(0, -1)[..., None, :], value(tail).movedim(0, -1)[..., None])
    bound = 2 * Truth(chain).value_bound() + sum(Truth(part).value_bound().max(0) for part in (head, tail))
    assert_values(joined[..., 0, 0], value(chain).double().numpy(), bound)


@EXAMPLES
@given(chains(), st.randoms(use_true_random=False))
def test_renaming_the_states_changes_nothing(chain, random):
    order = list(range(chain.x.shape[-1]))
    random.shuffle(order)
    renamed = Chain(chain.x[..., order], chain.bulk[..., order, :][..., order], chain.p0[..., order], chain.log_params)
    assert_equal_values(value(renamed), value(chain), chain, renamed)


@EXAMPLES
@given(chains(log=True))
def test_a_chain_read_backwards_is_the_same(chain):
    """From the last step with transposed matrices, the initial weights arriving with the last factor."""
    chain = chain.to(F64)
    x = chain.x.flip(-2).clone()
    bulk = chain.bulk.flip(-3).transpose(-1, -2)
    backwards = Chain(x, bulk, torch.zeros_like(chain.p0), True)
    into_p0 = torch.eye(chain.x.shape[-1], dtype=F64)[0].log().expand_as(chain.p0)
    # One more step whose only state is reached from state s with weight p0[s].
    last = torch.cat([bulk, (chain.p0[..., :, None] + into_p0[..., None, :])[..., None, :, :]], dim=-3)
    longer = Chain(torch.cat([x, torch.zeros_like(x[..., :1, :])], dim=-2), last, backwards.p0, True)
    assert_equal_values(value(longer), value(chain), chain, longer)
