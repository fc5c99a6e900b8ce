"""Chains whose transitions are arcs, by the C library and by the definition, against dense chains in log space."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from logchain import reference
from logchain.kernels.cpu import arcs as cpu
from logchain.kernels.cpu import arguments, library, team
from logchain.kernels.plain import arcs as plain
from logchain.kernels.structured import Arcs, Structured
from tests.contract import poisoned_memory, sum_to

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
ALL = True, True, True
ROOMS = pytest.mark.parametrize("room", [cpu, plain], ids=["cpu", "plain"])
WITH_LOGS = pytest.mark.parametrize("log", [False, True], ids=["linear", "logs"])
LEVELS = ["x86_64_v2", "x86_64_v3", "x86_64_v4"]


def made(c, v, batch=(), *, own=None, p0_own=None, steps=1, density=0.4, spread=1.0, log=False, dtype=F32, seed=0):
    """A chain with arcs between random states, of which some have none, and a tenth of what may be 0 is 0."""
    draw = torch.Generator().manual_seed(seed)
    source, target = (torch.rand(c, c, generator=draw) < density).nonzero(as_tuple=True)
    ones = (1,) * len(batch)
    weights = 0.1 + torch.rand(*(ones if own is None else own), steps, len(source), generator=draw)
    p0 = 0.1 + torch.rand(*(ones if p0_own is None else p0_own), c, generator=draw)
    x = spread * torch.randn(*batch, v, c, generator=draw, dtype=F64)
    x[torch.rand(x.shape, generator=draw) < 0.1] = -INF
    weights[torch.rand(weights.shape, generator=draw) < 0.1] = 0.0
    weights, p0 = (weights.log(), p0.log()) if log else (weights, p0)
    return Structured(x.to(dtype), (weights.to(dtype),), p0.to(dtype), Arcs(source, target), None, log, dtype)


def answers(room, chain, weight=None, needs=ALL):
    """Log-partitions and gradients."""
    walk = room.forward(chain, True)
    assert torch.equal(room.forward(chain, False).log_norm.nan_to_num(0.5), walk.log_norm.nan_to_num(0.5))
    weight = torch.ones(chain.batch, dtype=F64) if weight is None else weight
    return walk, room.backward(chain, walk, weight, needs)


def expected(chain, weight=None):
    """The same by dense matrices [*B, s, c, c] of logarithms, in numpy."""
    parameter, c = chain.parameters[0].double(), chain.c
    logs, p0 = (t if chain.log_params else t.double().log() for t in (parameter, chain.p0.double()))
    dense = torch.full((*parameter.shape[:-1], c, c), -INF, dtype=F64)
    dense[..., chain.pattern.source, chain.pattern.target] = logs
    x = chain.x.double().numpy()
    lengths = None if chain.ends is None else chain.ends.numpy()
    found = reference.marginals(x, dense.numpy(), p0.numpy(), log_params=True, lengths=lengths)
    weight = np.ones(chain.batch) if weight is None else weight.numpy()
    uses = found.transitions[..., chain.pattern.source.numpy(), chain.pattern.target.numpy()]
    counts, first = sum_to(weight[..., None, None] * uses, parameter.shape), weight[..., None] * found.states[..., 0, :]
    first = sum_to(first, chain.p0.shape)
    if not (chain.log_params or chain.by_log):
        counts, first = (
            np.where(n == 0, 0, n / np.where(n == 0, 1, t)) for n, t in ((counts, parameter), (first, p0.exp()))
        )
    return found.log_norm, weight[..., None, None] * found.states, counts, first


def check(room, chain, weight=None):
    """The room's answers are those expected, as exactly as the contract says; what `forward` returned."""
    with poisoned_memory():
        walk, gradients = answers(room, chain, weight)
    log_norm, *wanted = expected(chain, weight)
    operands = chain.x, *chain.parameters, chain.p0
    bound = chain.v * (chain.c + 8) * torch.finfo(chain.dtype).eps / 2
    # the reference subtracts logarithms as large as these
    largest = max(operand.double().nan_to_num(0, 0, 0).abs().max().item() for operand in operands if operand.numel())
    bound += 8 * chain.v * largest * 2.0**-53
    np.testing.assert_allclose(walk.log_norm, log_norm, rtol=4e-16, atol=bound)
    for gradient, want, operand in zip(
        (gradients.x, *gradients.parameters, gradients.p0), wanted, operands, strict=True
    ):
        assert gradient.shape == operand.shape and gradient.dtype == chain.dtype and gradient.is_contiguous()
        want = torch.from_numpy(want).to(chain.dtype).double()  # infinite where the dtype has no such number
        np.testing.assert_allclose(gradient.double(), want, rtol=2 * bound + 2.0**-24, atol=2.0**-50)
        zero = -INF if chain.log_params or operand is chain.x else 0.0
        assert not gradient[operand == zero].count_nonzero()
    return walk


@ROOMS
@WITH_LOGS
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("spread", [1.0, 300.0, 1e4])
def test_dense_chains_agree(room, log, dtype, spread):
    for c, v in [(1, 1), (1, 4), (2, 1), (3, 5), (17, 6)]:
        walk = check(room, made(c, v, (2,), spread=spread, log=log, dtype=dtype, density=0.7))
        assert spread > 1 or not walk.redone.any()


@ROOMS
@WITH_LOGS
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    ("own", "p0_own"), [((1, 1), (1, 1)), ((2, 1), (1, 3)), ((1, 3), (2, 1)), ((2, 3), (2, 3))], ids=str
)
def test_batches_and_lengths(room, log, steps, own, p0_own):
    weight = torch.rand(2, 3, dtype=F64, generator=torch.Generator().manual_seed(0)) - 0.3
    for spread in (1.0, 300.0):
        chain = made(7, 6, (2, 3), own=own, p0_own=p0_own, steps=steps, log=log, spread=spread)
        check(room, chain, weight)
        ends = torch.tensor([[6, 1, 4], [2, 6, 3]])
        check(room, replace(chain, ends=ends, by_log=True), weight)


def uniform(arcs, c, v, batch=(), dtype=F32, weight=1.0):
    """A chain of zeros with arcs of one weight."""
    source, target = (torch.tensor(end, dtype=torch.int64) for end in arcs)
    ones = (1,) * len(batch)
    parameter, p0 = torch.full((*ones, 1, len(source)), weight, dtype=dtype), torch.ones(*ones, c, dtype=dtype)
    return Structured(
        torch.zeros(*batch, v, c, dtype=dtype), (parameter,), p0, Arcs(source, target), None, False, dtype
    )


@ROOMS
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_ranges_that_change_from_step_to_step(room, dtype):
    """Emissions that are raised, sums that are too small, and backward messages that underflow on their own."""
    draw, redone, seen = torch.Generator().manual_seed(1), 0, 0
    for seed in range(16):
        chain = made(1 + seed % 6, 1 + seed % 7, (12,), own=(12,), steps=max(seed % 7, 1), log=seed % 2 == 0, seed=seed)
        scales = torch.tensor([1.0, 200.0, 340.0, 600.0, 2000.0, 2e4])[
            torch.randint(6, (12, chain.v, 1), generator=draw)
        ]
        x = (chain.x * scales).to(dtype)
        parameters = tuple(parameter.to(dtype) for parameter in chain.parameters)
        ends = torch.randint(1, chain.v + 1, (12,), generator=draw)
        walk = check(room, replace(chain, x=x, parameters=parameters, p0=chain.p0.to(dtype), ends=ends, dtype=dtype))
        redone, seen = redone + walk.redone.sum(), seen + 12
    assert room is plain or 0 < redone < seen


@ROOMS
@WITH_LOGS
@pytest.mark.parametrize("steps", [1, 4])
def test_a_backward_message_that_underflows_alone(room, log, steps):
    chain = uniform(([0, 1], [0, 1]), 2, 5, weight=0.3)
    parameter = chain.parameters[0].expand(steps, 2).contiguous()
    chain.x[4, 1] = -700.0
    parameters, p0 = (parameter.log(), chain.p0.log()) if log else (parameter, chain.p0)
    assert not check(room, replace(chain, parameters=(parameters,), p0=p0, log_params=log)).redone


# x of two states on their own, weights of the second into each step, and whether `forward` must recompute
RARE = {
    "raised emissions": ([[0, -600], [0, -700], [-INF, 0]], [1, 1], True),
    "a sum that the last raised emission may change": ([[0, -658], [-2000, 0]], [1], True),
    "a product that is 0": ([[0, -620], [0, -664], [0, 0], [-INF, 0]], [1, 2.0**-125, 1], True),
    "a weight that is lost": ([[0, 0], [-INF, 0]], [1e-44], True),
    "the largest that a double holds": ([[0, -620], [-600, 0], [-INF, 0]], [1, 1], False),
}


@ROOMS
@WITH_LOGS
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("rare", RARE, ids=str)
def test_paths_far_below_others(room, log, dtype, rare):
    rows, weights, redone = RARE[rare]
    chain = uniform(([0, 1], [0, 1]), 2, len(rows), dtype=dtype)
    parameter = torch.stack([torch.ones(len(weights)), torch.tensor(weights)], -1).to(dtype)
    parameters, p0 = (parameter.log(), chain.p0.log()) if log else (parameter, chain.p0)
    x = torch.tensor(rows, dtype=dtype)
    walk = check(room, replace(chain, x=x, parameters=(parameters,), p0=p0, log_params=log))
    assert room is plain or walk.redone == redone or (rare == "a weight that is lost" and dtype == F64)


@ROOMS
def test_a_message_that_leads_nowhere(room):
    """State 0 has nearly all of each message and no arc that leaves."""
    chain = uniform(([1, 1], [0, 1]), 2, 4)
    parameter, x = torch.tensor([[1.0, 2.0**-120]]), torch.tensor([[0.0, -650.0]]).repeat(4, 1)
    x[3] = torch.tensor([-INF, 0.0])
    assert not check(room, replace(chain, x=x, parameters=(parameter,))).redone


@ROOMS
@WITH_LOGS
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_weights_of_any_size(room, log, dtype):
    chain = made(9, 5, (2,), own=(2,), steps=4, dtype=dtype)
    low, high = (-1e4, 1e4) if log else (1e-44, 1e38) if dtype == F32 else (1e-300, 1e300)
    for sizes in ([low] * 4, [high] * 4, [low, high, 1.0, high], [low, 1.0]):
        parameter = torch.tensor(sizes, dtype=dtype).repeat(2, 4, 40)[..., : chain.parameters[0].shape[-1]]
        p0 = torch.tensor(sizes, dtype=dtype).repeat(9)[:9]
        check(room, replace(chain, parameters=(parameter.clone(),), p0=p0[None].clone(), log_params=log))


@ROOMS
@pytest.mark.parametrize("per_row", [1, 63, 64, 65, 200])
def test_states_with_many_arcs(room, per_row):
    c = 210
    pairs = sorted({(0, j) for j in range(per_row)} | {(j, 0) for j in range(per_row)} | {(5, 5), (5, 6)})
    for spread in (1.0, 300.0):
        chain = uniform(tuple(zip(*pairs, strict=True)), c, 3)
        chain.x[:] = spread * torch.randn(3, c, generator=torch.Generator().manual_seed(0))
        check(room, chain)


@ROOMS
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_no_arcs_and_impossible_chains(room, spread):
    for arcs in (([], []), ([0], [1]), ([1, 2], [0, 0])):
        for c, v in ((1, 1), (1, 3), (3, 1), (3, 2), (40, 3)):
            kept = [pair for pair in zip(*arcs, strict=True) if max(pair) < c]
            chain = uniform(tuple(zip(*kept, strict=True)) or ([], []), c, v, (2,))
            chain.x[1, :, 0] = -spread
            check(room, chain)
            check(room, replace(chain, x=torch.full_like(chain.x, -INF)))
            check(room, replace(chain, p0=torch.zeros_like(chain.p0)))
    none = replace(chain, x=chain.x[:0], parameters=(chain.parameters[0].expand(1, 1, -1),))
    walk, gradients = answers(room, none)
    assert walk.log_norm.shape == (0,) and not gradients.parameters[0].count_nonzero()
    for steps in (0, 1):  # no step has a matrix
        parameter = torch.full((1, steps, 3), NAN)
        one = replace(uniform(([0, 1, 2], [0, 0, 0]), 3, 1, (2,)), parameters=(parameter,))
        walk, gradients = answers(room, one)
        assert torch.allclose(walk.log_norm.exp(), torch.tensor(3.0, dtype=F64))
        assert torch.equal(gradients.parameters[0], torch.zeros(1, steps, 3))


@ROOMS
@WITH_LOGS
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_nan_is_seen_by_its_sequence_alone(room, log, spread):
    good = made(6, 5, (4,), own=(4,), p0_own=(4,), steps=4, log=log, spread=spread)
    ends = torch.tensor([5, 3, 5, 4])
    good = replace(good, ends=ends)
    wanted = answers(room, good)
    for place, value in (("x", NAN), ("x", INF), ("parameters", NAN), ("p0", NAN)):
        x, parameter, p0 = good.x.clone(), good.parameters[0].clone(), good.p0.clone()
        x[1, 3:], parameter[1, 2:] = NAN, NAN  # behind the end
        if place == "x":
            x[2, 4, 3] = value
        elif place == "p0":
            p0[2, 1] = value
        else:
            parameter[2, 3, 4] = value
        walk, gradients = answers(room, replace(good, x=x, parameters=(parameter,), p0=p0))
        assert walk.log_norm[2].isnan() or value == INF
        assert gradients.x[2].isnan().all() or value == INF
        for one, other in zip(
            (walk.log_norm, gradients.x, gradients.parameters[0], gradients.p0),
            (wanted[0].log_norm, wanted[1].x, wanted[1].parameters[0], wanted[1].p0),
            strict=True,
        ):
            others = [0, 1, 3]
            assert torch.equal(one[others], other[others])
        assert not gradients.x[1, 3:].count_nonzero() and not gradients.parameters[0][1, 2:].count_nonzero()
        weight = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=F64)
        gradients = answers(room, replace(good, x=x, parameters=(parameter,), p0=p0), weight)[1]
        assert not any(t[2].count_nonzero() for t in (gradients.x, *gradients.parameters, gradients.p0))


@ROOMS
def test_any_layout_and_any_dtype(room):
    chain = made(6, 5, (2, 3), own=(2, 1), steps=4, p0_own=(1, 3))
    wanted = answers(room, chain)
    x, (parameter,), p0 = chain.x, chain.parameters, chain.p0
    turned = [
        t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))) for t in (x, parameter, p0)
    ]
    negative = [torch.complex(torch.zeros_like(t), -t).conj().imag for t in (x, parameter, p0)]
    for x, parameter, p0 in (turned, negative):
        found = answers(room, replace(chain, x=x, parameters=(parameter,), p0=p0))
        assert torch.equal(found[0].log_norm, wanted[0].log_norm)
        for one, other in zip(found[1], wanted[1], strict=True):
            pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
            assert all(torch.equal(a, b) and a.is_contiguous() for a, b in pairs)
    same = replace(chain, x=chain.x[:1, :1].expand(2, 3, 5, 6))
    check(room, same)
    half = [t.bfloat16() for t in (chain.x, *chain.parameters, chain.p0)]
    check(room, replace(chain, x=half[0], parameters=(half[1],), p0=half[2]))
    needs = answers(room, chain, needs=(False, True, False))[1]
    assert needs.x is None and needs.p0 is None and torch.equal(needs.parameters[0], wanted[1].parameters[0])
    assert answers(room, chain, needs=(True, False, False))[1].parameters is None


def test_long_chains():
    v = 50_000
    for spread in (0.0, 300.0):
        chain = uniform(([0, 0, 1, 1], [0, 1, 0, 1]), 2, v, weight=0.25)
        chain.x[:] = spread * torch.tensor([1.0, -1.0])[torch.arange(2 * v).view(v, 2) % 2]
        walk, gradients = answers(cpu, chain)
        torch.testing.assert_close(
            walk.log_norm.item(), v * spread + (v - 1) * np.log(0.25) + np.log(2) * v * (spread == 0)
        )
        torch.testing.assert_close(gradients.x.sum(-1), torch.ones(v))
        torch.testing.assert_close(gradients.parameters[0].sum() * 0.25, torch.tensor(v - 1.0))


def test_arcs_that_change_are_arranged_again():
    chain = uniform(([0, 1], [1, 0]), 2, 3)
    check(cpu, chain)
    chain.pattern.target[:] = 1
    check(cpu, chain)
    check(cpu, replace(chain, pattern=Arcs(chain.pattern.source, torch.tensor([0, 0]))))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level(level, monkeypatch):
    if library.level() not in LEVELS or library.level() < level:
        pytest.skip(f"this machine has no {level}")
    arguments.function.cache_clear()
    cpu._arranged.clear()
    monkeypatch.setattr(arguments, "library", lambda: library.load(level))
    try:
        for spread in (1.0, 300.0):
            check(cpu, made(37, 4, (2,), spread=spread))
            check(cpu, made(37, 4, (2,), spread=spread, dtype=F64))
    finally:
        arguments.function.cache_clear()
        cpu._arranged.clear()


def test_threads_share_sequences(monkeypatch):
    chain = made(20, 10, (4,), steps=9)
    wanted = answers(cpu, chain)[1].parameters[0]
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(team, "_parallel", lambda: None)
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        one = replace(chain, parameters=(chain.parameters[0][:, :1],))
        own = replace(chain, parameters=(chain.parameters[0].expand(4, -1, -1),))
        for some in (chain, one, own):
            check(cpu, some)
            assert torch.equal(*(answers(cpu, some)[1].parameters[0] for _ in range(2)))
        torch.testing.assert_close(answers(cpu, chain)[1].parameters[0], wanted, rtol=1e-5, atol=0)
