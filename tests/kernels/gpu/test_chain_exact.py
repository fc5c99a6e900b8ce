"""The exact recomputation of marked sequences: within the contract on all families, and no other one is touched."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.contract import Truth, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import poisoned, strange

chain_exact = pytest.importorskip("logchain.kernels.gpu.chain_exact")

from logchain.kernels.gpu import chain_exact_counts, chain_forward  # noqa: E402
from logchain.kernels.gpu.chains import Operands  # noqa: E402

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


def operands(chain: Chain, lengths=None, device: str = "cpu", g: int | None = None) -> Operands:
    """The chain's batch as g sets of matrices, by default as many as there are, with their sequences."""
    *batch, v, c = chain.x.shape
    g = g or int(np.prod(chain.bulk.shape[:-3]))
    x = chain.x.movedim(-2, 0).reshape(v, g, -1, c).to(device)
    bulk = chain.bulk.movedim(-3, 0).reshape(-1, g, c, c).to(device)
    p0 = chain.p0.double() if chain.log_params else chain.p0.double().log()
    start = p0.expand(*batch, c).reshape(g, -1, c).contiguous().to(device)
    ends = None if lengths is None else torch.tensor(lengths, device=device).reshape(g, -1)
    dtype = F64 if F64 in (chain.x.dtype, chain.bulk.dtype) else F32
    return Operands(x, bulk, start, ends, chain.log_params, dtype)


@dataclass
class Found:
    """What the kernels wrote, in the shapes of the kernels."""

    messages: torch.Tensor
    log_norm: torch.Tensor
    grad_x: torch.Tensor
    grad_start: torch.Tensor
    r: torch.Tensor
    exponent: torch.Tensor
    counts: torch.Tensor

    def sequence(self, z: int, y: int) -> list[torch.Tensor]:
        return [
            self.messages[:, z, y],
            self.log_norm[z, y],
            self.grad_x[:, z, y],
            self.grad_start[z, y],
            self.r[1:, z, y],
            self.exponent[1:, z, y],
        ]


def run(chain: Operands, weight, marks=None, *, final=None, by_log=False, before: Found | None = None) -> Found:
    """Forward, backward and counts of marked sequences, by default of all, over what is there before."""
    v, g, m, c = chain.shape
    device, dtype = chain.x.device, chain.dtype
    marks = torch.ones(g, m, dtype=torch.bool, device=device) if marks is None else marks
    with poisoned_memory():
        rows = [torch.empty(v, g, m, c, dtype=dtype, device=device) for _ in range(3)]
        norm, first = torch.empty(g, m, dtype=F64, device=device), torch.empty(g, m, c, dtype=dtype, device=device)
        counts = torch.zeros(len(chain.bulk), g, c, c, dtype=dtype, device=device)
        exponent = torch.empty(v, g, m, dtype=torch.int32, device=device)
        found = before or Found(rows[0], norm, rows[1], first, rows[2], exponent, counts)
        chain_exact.forward(chain, found.messages, found.log_norm, marks)
        back(chain, found, weight, marks, marks, final=final, by_log=by_log)
    return found


def back(chain: Operands, found: Found, weight, redone, marks, *, final=None, by_log=False) -> None:
    r = {"r": found.r, "exponent": found.exponent}
    gradients = {"grad_x": found.grad_x, "grad_start": found.grad_start, "final": final}
    chain_exact.backward(chain, found.messages, redone, marks, found.log_norm, weight, **gradients, **r)
    chain_exact_counts.counts(chain, found.messages, redone, marks, *r.values(), weight, found.counts, by_log=by_log)


def weights(chain: Operands) -> torch.Tensor:
    g, m = chain.shape[1:3]
    return torch.arange(g * m, dtype=chain.dtype, device=chain.x.device).cos().reshape(g, m)


def assert_right(chain: Chain, truth: Truth, found: Found, weight: torch.Tensor, k: int = 1, by_log=False) -> None:
    """Everything lies within the contract, and is exactly 0 where no path passes."""
    batch = chain.x.shape[:-2]
    assert_values(found.log_norm.reshape(batch), truth.log_norm, truth.value_bound(F64, k))
    scale = weight.double().cpu().reshape(batch).numpy()[..., None, None]
    states, counts = scale * truth.states, scale[..., None] * truth.transitions
    _close(found.grad_x.movedim(0, 2), states, truth.gradient_bound(states, k), truth.reach.states)
    first = states[..., 0, :]
    _close(found.grad_start, first, truth.gradient_bound(first, k), truth.reach.states[..., 0, :])
    out = found.counts.double().cpu().movedim(0, -3)
    if not (chain.log_params or by_log):
        out = out * chain.bulk.double().reshape(out.shape)
    axes = tuple(i for i, size in enumerate(chain.bulk.shape[:-2]) if size != counts.shape[i])
    bound, reach = truth.gradient_bound(counts, k), truth.reach.transitions
    counts, bound, reach = (array.sum(axes, keepdims=True) for array in (counts, bound, reach))
    if counts.size:
        _close(out, counts, bound, reach)


def _close(found: torch.Tensor, expected: np.ndarray, bound: np.ndarray, reach: np.ndarray) -> None:
    array = found.double().cpu().numpy().reshape(expected.shape)
    assert (array[reach == 0] == 0).all(), "the impossible has a gradient"
    error = np.abs(array - expected)
    assert (error <= bound).all(), f"error {np.nanmax(error):.3g}, {np.nanmax(error / bound):.3g} times the bound"


def check(chain: Chain, lengths=None, device: str = "cpu", **options) -> Found:
    ops = operands(chain, lengths, device)
    weight = weights(ops)
    found = run(ops, weight, **options)
    assert_right(chain, Truth(chain, lengths), found, weight, **options)
    return found


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_families(device, name):
    """Sequences that share matrices and those that do not, in turn."""
    sizes = {"n": 2, "t": 1, "each": len(name) % 2 == 0, "v": min(FAMILIES[name](n=1, t=1).x.shape[-2], 6)}
    check(FAMILIES[name](F32, **sizes), device=device)


@pytest.mark.parametrize("name", ["detour_linear", "detour", "tiny_transitions", "left_to_right", "offsets"])
def test_float64(device, name):
    check(FAMILIES[name](F64, n=2, t=1, v=5, c=5), device=device)
    check(FAMILIES[name](F32, n=2, t=1, v=5, c=5).logs(), device=device)


@pytest.mark.parametrize("c", [1, 17, 33, 70])
def test_sizes(device, c):
    """Linear with one matrix for each step, and logarithms with one for all; several tiles of rows and of counts."""
    chain = FAMILIES["sparse" if c > 1 else "dense"](F32, n=2, t=1, v=3, c=c)
    check(chain, device=device)
    check(chain._replace(bulk=chain.bulk[..., :1, :, :]).logs(), device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(device, dtype):
    chain = dense(F32, n=2, t=1, v=3, c=6)
    check(Chain(chain.x.to(dtype), chain.bulk.to(dtype), chain.p0), device=device)


@pytest.mark.parametrize("log", [False, True])
def test_gradients_of_logarithms_of_linear_matrices(device, log):
    chain = FAMILIES["tiny_transitions"](F32, n=3, t=1, v=4, c=5)
    check(chain.logs() if log else chain, device=device, by_log=True)


@pytest.mark.parametrize("scale", [3e38, 1e-38])
def test_matrices_of_any_size(device, scale):
    """Near the largest numbers, and with denormal entries, whose gradient would overflow."""
    chain = dense(F64, n=2, t=1, v=4, c=5)
    check(chain._replace(bulk=chain.bulk * scale).to(F32), device=device, by_log=scale < 1)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("offset", [-1e4, -360.0, 1e4])
def test_what_matrices_or_x_have_in_common_costs_nothing(device, dtype, offset):
    """Gradients are as exact as without it, for the numbers that the offset leaves of the inputs."""
    for c in (1, 3):
        chain = dense(dtype, n=2, t=1, v=2, c=c).logs()
        check(chain._replace(bulk=chain.bulk + offset, p0=chain.p0 - offset), device=device)
        check(chain._replace(x=chain.x + offset, bulk=chain.bulk - offset), device=device)


@pytest.mark.parametrize("by_log", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(F32, 1e-36), (F32, 1e36), (F64, 1e-300), (F64, 1e300)], ids=str)
def test_what_linear_matrices_have_in_common_costs_nothing(device, dtype, scale, by_log):
    """Also where it is all that a path finds in a matrix."""
    for c in (1, 3):
        chain = dense(dtype, n=2, t=1, v=2, c=c)
        check(chain._replace(bulk=chain.bulk * scale), device=device, by_log=by_log)
    chain.x[..., 1, 0] = -INF
    chain.bulk[..., 0, 1:] *= scale if dtype == F32 and scale < 1 else 1.0
    check(chain, device=device, by_log=by_log)


def test_what_is_taken_out_of_messages_is_summed_exactly(device):
    x = 1e8 * Draw(0, 1, 1, 30, 1, False).normal(1, 1, 30, 1)
    x[..., -1, :] = -x[..., :-1, :].sum()
    one = torch.ones(1, 1, 1, 1, dtype=F64)
    chain = operands(Chain(x, one, one[0]), device=device)
    assert run(chain, weights(chain)).log_norm.item() == math.fsum(x.flatten().tolist())


@pytest.mark.parametrize("how", ["transposed", "sliced"])
def test_strange_strides(device, how):
    check(strange(FAMILIES["sparse"](F32, n=3, t=1, v=4, c=6), how), device=device)


def test_nothing_behind_an_end_matters(device):
    chain, lengths = dense(F32, each=True, n=3, t=1, v=4, c=5), [4, 2, 1]
    clean = check(chain, lengths, device=device)
    ops = operands(poisoned(chain, lengths), lengths, device)
    dirty = run(ops, weights(ops))
    assert torch.equal(dirty.grad_x, clean.grad_x) and torch.equal(dirty.counts, clean.counts)
    for z, end in enumerate(lengths):
        assert (dirty.messages[end:, z] == -INF).all() and (dirty.r[end:, z] == -INF).all()


@pytest.mark.parametrize(
    "name", ["dense", "peaked", "left_to_right", "detour", "tiny_transitions", "sparse", "impossible"]
)
def test_after_the_fast_kernel(device, name):
    """Only what it doubts is redone, and its linear messages lead back too."""
    chain = FAMILIES[name](F32, n=3, t=1, v=6)
    ops = operands(chain, device=device)
    weight = weights(ops)
    found = run(ops, weight)
    doubt = chain_forward.forward(ops, found.messages, found.log_norm)
    before = found.messages.clone()
    chain_exact.forward(ops, found.messages, found.log_norm, doubt)
    assert torch.equal(found.messages[:, ~doubt], before[:, ~doubt])
    found.counts.zero_()
    back(ops, found, weight, doubt, torch.ones_like(doubt))
    assert_right(chain, Truth(chain), found, weight, k=4)


def test_two_slots_in_turn(device):
    """The last message of a sequence is its first when it has one step."""
    chain, lengths = FAMILIES["left_to_right"](F32, n=4, t=1, v=5, c=6), [5, 4, 1, 2]
    ops = operands(chain, lengths, device)
    every = torch.ones(1, 4, dtype=torch.bool, device=device)
    kept = run(ops, weights(ops))
    slots, norm = torch.full((2, 1, 4, 6), NAN, device=device), torch.empty(1, 4, dtype=F64, device=device)
    chain_exact.forward(ops, slots, norm, every)
    assert torch.equal(norm, kept.log_norm)
    for y, end in enumerate(lengths):
        assert torch.equal(slots[(end - 1) % 2, 0, y], kept.messages[end - 1, 0, y])


@pytest.mark.parametrize("same", [False, True])
def test_only_marked_sequences_are_touched(device, same):
    """Two sets of three sequences, some of them, and a set without any; counts are added."""
    chain = dense(F32, n=3, t=3, v=3, c=5)
    draw = Draw(1, 3, 1, 3, 5, True)
    chain = chain._replace(bulk=draw.bulk().float()[:, :, :1] if same else draw.bulk().float())
    ops = operands(chain, device=device)
    weight = weights(ops)
    marks = torch.tensor([[True, False, True], [False, False, False], [False, True, False]], device=device)
    every, shape = run(ops, weight), ops.shape
    filled = Found(
        *(torch.full(size, 7, device=device, dtype=dtype) for size, dtype in [
            (shape, F32), (shape[1:3], F64), (shape, F32), (shape[1:], F32), (shape, F32), (shape[:3], torch.int32),
            (ops.bulk.shape, F32),
        ])
    )  # fmt: skip
    some = run(ops, weight, marks, before=filled)
    for z, y in np.ndindex(3, 3):
        for one, other in zip(some.sequence(z, y), every.sequence(z, y), strict=True):
            assert torch.equal(one, other if marks[z, y] else torch.full_like(one, 7))
    assert (some.counts[:, 1] == 7.0).all()
    alone = run(ops, torch.where(marks, weight, 0.0))
    torch.testing.assert_close(some.counts, 7.0 + alone.counts, rtol=1e-6, atol=1e-6)
    again = run(ops, weight, marks)
    assert torch.equal(again.counts, alone.counts)


@pytest.mark.parametrize("place", ["x", "bulk", "p0"])
def test_nan_stays_in_its_sequence(device, place):
    """Also where no path could go anyway."""
    chain = dense(F32, each=True, n=2, t=1, v=4, c=5)
    clean = check(chain, device=device)
    chain.p0[1, 0, 2] = 0.0
    tensor = getattr(chain, place)
    tensor[1, 0].view(-1)[2 if place == "p0" else -1 if place == "x" else 10] = NAN
    ops = operands(chain, device=device)
    dirty = run(ops, weights(ops))
    for one, other in zip(dirty.sequence(0, 0), clean.sequence(0, 0), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(dirty.counts[:, 0], clean.counts[:, 0])
    assert dirty.log_norm[1, 0].isnan() and dirty.grad_x[:, 1].isnan().all() and dirty.counts[:, 1].isnan().all()
    dirty = run(ops, torch.zeros(2, 1, device=device))
    assert (dirty.grad_x == 0).all() and (dirty.grad_start == 0).all() and (dirty.counts == 0).all()


def test_a_path_that_is_impossible_elsewhere(device):
    """A log-partition of -inf says that another stretch is; nothing is counted, even where a weight is not finite."""
    chain = dense(F32, n=2, t=1, v=3, c=5)
    ops = operands(chain, device=device)
    found = run(ops, weights(ops))
    found.log_norm[0, 1] = -INF
    found.counts.zero_()
    every = torch.ones(1, 2, dtype=torch.bool, device=device)
    back(ops, found, torch.tensor([[0.0, INF]], device=device), every, every)
    assert (found.grad_x == 0).all() and (found.grad_start == 0).all() and (found.counts == 0).all()
    assert (found.r[1:, :, 1] == -INF).all()


def test_a_message_that_follows(device):
    """`final` is the backward message of the last step, as one more step's sum would be."""
    chain = FAMILIES["left_to_right"](F32, n=2, t=1, v=5, c=6)
    ops = operands(chain, device=device)
    weight = weights(ops)
    final = torch.logsumexp(ops.bulk[-1, 0].log().double() + ops.x[-1, 0, :, None].double(), -1).float()[None]
    shorter = ops._replace(x=ops.x[:-1], bulk=ops.bulk[:-1])
    found, whole = run(shorter, weight, final=final.contiguous()), run(ops, weight)
    torch.testing.assert_close(found.grad_x, whole.grad_x[:-1], rtol=1e-5, atol=1e-6)
    scale = ops.bulk[:-1]
    torch.testing.assert_close(found.counts * scale, whole.counts[:-1] * scale, rtol=1e-5, atol=1e-6)


def test_only_what_is_wanted_is_written(device):
    ops = operands(dense(F32, n=2, t=1, v=3, c=5), device=device)
    weight = weights(ops)
    found = run(ops, weight)
    every, first = torch.ones(1, 2, dtype=torch.bool, device=device), torch.empty_like(found.grad_start)
    gradients = {"grad_x": None, "grad_start": first, "r": None, "exponent": None, "final": None}
    chain_exact.backward(ops, found.messages, every, every, found.log_norm, weight, **gradients)
    assert torch.equal(first, found.grad_start)
