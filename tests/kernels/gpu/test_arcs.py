"""Arcs on a GPU: within the contract of the dense chain, for patterns with hubs, dead ends and nothing at all."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from logchain.kernels.structured import Arcs
from tests.kernels.gpu.sparse_chains import (
    F32,
    F64,
    INF,
    check,
    nan_stays_in_its_sequence,
    nothing_behind_an_end_matters,
    run,
    structured,
    weights,
)

arcs = pytest.importorskip("logchain.kernels.gpu.arcs")

from logchain.kernels.gpu import sparse, sparse_rows  # noqa: E402


def pattern(*pairs: tuple[int, int]) -> Arcs:
    return Arcs(*torch.tensor(sorted(pairs), dtype=torch.int64).reshape(-1, 2).T.contiguous())


def drawn(c: int, arcs: int, seed: int = 0) -> Arcs:
    """Arcs between any states, some of which have none."""
    pairs = np.random.default_rng(seed).choice(c * c, arcs, replace=False)
    return pattern(*((int(pair) // c, int(pair) % c) for pair in pairs))


# a state from which all others are reached, and which all reach; nothing leads on from state 3
HUB = pattern((0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (2, 0), (4, 0), (1, 2))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("log_params", [False, True])
def test_any_arcs(device, dtype, log_params):
    check(arcs, structured(drawn(5, 12), (2,), 3, 5, log_params=log_params, dtype=dtype), device)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_hub(device, steps):
    check(arcs, structured(HUB, (2,), 4, 5, shared=(1,), steps=steps), device)


def test_several_blocks_of_states(device, monkeypatch):
    monkeypatch.setattr("triton.next_power_of_2", lambda size: 2)
    check(arcs, structured(HUB, (), 3, 5), device)


@pytest.mark.parametrize(("v", "steps"), [(1, 0), (1, 1), (2, 1)])
def test_few_steps(device, v, steps):
    check(arcs, structured(HUB, (2,), v, 5, steps=steps), device)


def test_one_state(device):
    check(arcs, structured(pattern((0, 0)), (2,), 3, 1), device)


def test_no_arc(device):
    walk, _ = check(arcs, structured(pattern(), (2,), 2, 3), device)
    assert (walk.log_norm == -INF).all()


def test_a_parameter_for_some_batch_axes(device):
    check(arcs, structured(drawn(3, 5), (2, 2), 3, 3, shared=(1, 2), by_log=True), device)


def test_any_magnitude_at_once(device):
    """States 10,000 nats apart, and weights from the least to the largest number."""
    check(arcs, structured(HUB, (), 4, 5, x_size=1e4, p_size=25.0), device)
    check(arcs, structured(HUB, (), 4, 5, x_size=1e4, p_size=1e4, log_params=True), device)
    check(arcs, structured(HUB, (), 4, 5, x_size=1e4, p_size=200.0, dtype=F64), device)


def test_lengths(device):
    chain = structured(drawn(4, 8), (3,), 4, 4, lengths=[4, 1, 2])
    check(arcs, chain, device)
    nothing_behind_an_end_matters(arcs, chain, device)


@pytest.mark.parametrize("place", ["x", "parameter", "p0"])
def test_nan_stays_in_its_sequence(device, place):
    """Even in the last state, which no arc leaves; the last one leads there."""
    chain = structured(pattern((0, 0), (0, 1), (1, 0), (1, 2)), (2,), 3, 3)
    nan_stays_in_its_sequence(arcs, chain, place, device)


def test_strange_strides(device):
    chain = structured(HUB, (2,), 3, 5, shared=(1,), dtype=torch.bfloat16)
    x = chain.x.mT.contiguous().mT
    p = torch.stack([chain.parameters[0]] * 2, -1)[..., 1].expand(2, -1, -1)
    check(arcs, replace(chain, x=x, parameters=(p,)), device)


def test_steps_in_several_launches(device, monkeypatch):
    """And the same bits every time."""
    chain = structured(HUB, (2,), 5, 5, shared=(1,), steps=1, lengths=[5, 3])
    _, whole = check(arcs, chain, device)
    monkeypatch.setattr(sparse, "_LONG", 1)
    _, parts = check(arcs, chain, device)
    again = run(arcs, chain, weights(chain), device)[1]
    assert torch.equal(whole.x, parts.x) and torch.equal(parts.parameters[0], again.parameters[0])


def test_rows_are_sorted_by_their_arcs(device):
    """Each row has the arcs of its state, in their order; neighbours have like numbers of them."""
    source, target = (end.to(device) for end in HUB)
    rows = sparse_rows.arc_rows(target, source, 5, is_sorted=False)
    assert rows.order.tolist() == [0, 2, 1, 3, 4] and rows.degree.tolist() == [4, 2, 1, 1, 1]
    for state, first, degree in zip(rows.order, rows.first, rows.degree, strict=True):
        of_row = rows.entry[first : first + degree]
        assert of_row.tolist() == (target == state).nonzero().flatten().tolist()
        assert torch.equal(rows.other[first : first + degree].long(), source[of_row.long()])
