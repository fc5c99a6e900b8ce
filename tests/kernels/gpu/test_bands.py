"""Bands on a GPU: within the contract of the dense chain, whatever the offsets, sizes, batch axes and magnitudes."""

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.gpu.sparse_chains import (
    F32,
    F64,
    INF,
    NAN,
    check,
    nan_stays_in_its_sequence,
    nothing_behind_an_end_matters,
    on_device,
    run,
    structured,
    weights,
)

bands = pytest.importorskip("logchain.kernels.gpu.bands")

from logchain.kernels.gpu import sparse, sparse_rows  # noqa: E402


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("log_params", [False, True])
def test_bands_back_and_forth(device, dtype, log_params):
    check(bands, structured((0, 1, -2), (2,), 3, 5, log_params=log_params, dtype=dtype), device)


@pytest.mark.parametrize(("v", "steps", "c"), [(1, 0, 1), (1, 1, 4), (5, 1, 1), (2, 1, 3)])
def test_sizes(device, v, steps, c):
    """Also offsets that no state has, and a parameter for no step."""
    check(bands, structured((7, 0, 1), (2,), v, c, steps=steps), device)


def test_several_blocks_of_states(device, monkeypatch):
    monkeypatch.setattr("triton.next_power_of_2", lambda size: 2)
    check(bands, structured((0, 1, 3), (), 3, 5), device)


@pytest.mark.parametrize(("batch", "shared"), [((), ()), ((2, 2), (1, 2)), ((2, 2), (2, 1)), ((3,), (1,))])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_is_shared_is_summed(device, batch, shared, steps):
    check(bands, structured((0, 1), batch, 3, 3, shared=shared, steps=steps, log_params=steps == 1), device)


def test_gradients_of_logarithms_of_linear_bands(device):
    check(bands, structured((0, 1), (), 4, 4, by_log=True), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(device, dtype):
    check(bands, structured((0, 2), (), 3, 4, dtype=dtype), device)


def test_any_magnitude_at_once(device):
    """States 10,000 nats apart, weights from the least to the largest number, and tiny weights of tiny shares."""
    check(bands, structured((0, 1), (), 5, 5, x_size=1e4, p_size=25.0, seed=3), device)
    check(bands, structured((0, 1), (), 5, 5, x_size=1e4, p_size=1e4, log_params=True, seed=3), device)
    check(bands, structured((0, 1), (), 5, 5, x_size=1e4, p_size=200.0, dtype=F64, seed=4), device)
    tiny = structured((0, 1), (), 4, 4)
    check(bands, replace(tiny, parameters=(1e-42 * tiny.parameters[0],), by_log=True), device)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_offsets_cost_nothing(device, dtype):
    """They cancel exactly where x takes away what parameters add."""
    chain = structured((0, 1), (), 4, 4, log_params=True, dtype=dtype)
    x, p = chain.x + 8192.0, chain.parameters[0] - 8192.0
    check(bands, replace(chain, x=x, parameters=(p,)), device)


def test_lengths(device):
    chain = structured((0, 1), (3,), 4, 4, lengths=[4, 1, 2])
    check(bands, chain, device)
    nothing_behind_an_end_matters(bands, chain, device)


def test_the_impossible(device):
    """A dead end, a step without a state, and a start without a weight; their gradients are 0."""
    chain = structured((1,), (4,), 4, 4, shared=(1,))
    chain.p0.fill_(0.0)[..., 0] = 1.0
    chain.parameters[0].fill_(0.5)
    chain.x[1, 2] = -INF
    chain.x[2, 3, 3] = -INF
    chain.x[3, 0, 0] = -INF
    walk, _ = check(bands, chain, device)
    assert (walk.log_norm == -INF).tolist() == [False, True, True, True]


@pytest.mark.parametrize("place", ["x", "parameter", "p0"])
def test_nan_stays_in_its_sequence(device, place):
    """Even in the last state, out of which no band leads."""
    nan_stays_in_its_sequence(bands, structured((1, 2), (2,), 3, 4), place, device)


def test_bands_outside_of_all_states_are_ignored(device):
    chain = structured((1, -1), (2,), 3, 4)
    chain.parameters[0][..., 0, 0] = NAN
    chain.parameters[0][..., 1, 3] = INF
    check(bands, chain, device)


def test_strange_strides(device):
    chain = structured((0, 1), (2,), 3, 4, shared=(1,))
    x = chain.x.mT.contiguous().mT
    p = torch.stack([chain.parameters[0], chain.parameters[0]], -1)[..., 1].expand(2, -1, -1, -1)
    p0 = chain.p0.flip(-1).contiguous()[..., None].expand(-1, -1, 3)[..., 2]
    check(bands, replace(chain, x=x, parameters=(p,), p0=p0), device)
    check(bands, replace(chain, x=chain.x[:1].expand(3, -1, -1), parameters=(chain.parameters[0][:1],)), device)


@pytest.mark.parametrize("steps", [1, None])
def test_steps_in_several_launches(device, monkeypatch, steps):
    """Parameters' gradients in parts, and sums in chunks."""
    chain = structured((0, 1), (2,), 5, 3, shared=(1,), steps=steps, lengths=[5, 3])
    _, whole = check(bands, chain, device)
    monkeypatch.setattr(sparse, "_LONG", 1)
    _, parts = check(bands, chain, device)
    assert torch.equal(whole.x, parts.x) and torch.equal(whole.p0, parts.p0)
    monkeypatch.setattr("logchain.kernels.gpu.launch.processors", lambda like: 3)
    monkeypatch.setattr("logchain.kernels.gpu.sparse_counts._TERMS", 1)
    check(bands, chain, device)


def test_only_what_is_needed(device):
    chain = structured((0, 1), (2,), 3, 4)
    _, every = run(bands, chain, weights(chain), device)
    there = on_device(chain, device)
    walk = bands.forward(there, True)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = bands.backward(there, walk, weights(chain).to(device), needs)
        for part, other, needed in zip(found, every, needs, strict=True):
            assert (part is not None) == needed
            one, same = (gradient[0] if isinstance(gradient, tuple) else gradient for gradient in (part, other))
            assert part is None or torch.equal(one.cpu(), same)


def test_no_sequence(device):
    chain = structured((0, 1), (0,), 3, 4, shared=(1,))
    walk, found = run(bands, chain, torch.empty(0, dtype=F64), device)
    assert walk.log_norm.shape == (0,) and not found.parameters[0].any() and not found.p0.any()


def test_exponents_do_not_run_out(device, monkeypatch):
    """Two states apart: parameters take out more than exponents hold, in several launches, and x puts it back.

    A logarithm is rounded as its size is: its exponent is taken from it by a multiply-add that is not fused here.
    """
    chain = structured((0,), (), 12, 2, log_params=True, dtype=F64)
    chain.parameters[0].fill_(-9e7 - 0.625)
    chain.x.add_(9e7)
    chain.p0.fill_(-0.5)
    terms = torch.cat([chain.x, chain.parameters[0][:, 0], chain.p0[None]])
    sums = torch.tensor([math.fsum(column) for column in terms.T.tolist()], dtype=F64)
    monkeypatch.setattr(sparse, "_LONG", 1)
    walk, found = run(bands, chain, torch.ones((), dtype=F64), device)
    rounding = 12 * 9e7 * 2.0**-53
    assert abs(walk.log_norm - sums.logsumexp(0)) < rounding
    assert (found.x - sums.softmax(0)).abs().max() < rounding


def test_messages_take_turns(device):
    chain = on_device(structured((0, 1), (3,), 4, 3, lengths=[4, 1, 2]), device)
    kept, others = bands.forward(chain, True), bands.forward(chain, False)
    assert torch.equal(kept.log_norm, others.log_norm) and len(kept.kept) == 2 and others.kept == ()


def test_infinity_is_no_number(device):
    chain = structured((0, 1), (2,), 3, 3)
    chain.x[1, 1, 0] = INF
    walk, found = run(bands, chain, weights(chain), device)
    assert walk.log_norm[0].isfinite() and not walk.log_norm[1].isfinite()
    assert found.x[0].isfinite().all() and not found.x[1].isfinite().any()


def test_offsets_lie_on_the_device(device):
    rows = sparse_rows.banded_rows((3, -1), torch.device(device))
    assert rows.first.tolist() == [3, -1] and rows.first.device.type == device and rows.bands == 2
