"""Products of factors: plain and on the CPU against dense log-sum-exp in float64, with gradients by autograd."""

import itertools
from typing import NamedTuple

import pytest
import torch

from logchain.kernels.cpu import products as cpu
from logchain.kernels.plain import products as plain
from logchain.kernels.structured import Factors, Stage, Structured, Walk

INF = float("inf")
ROOMS = pytest.mark.parametrize("room", [cpu, plain], ids=["cpu", "plain"])


class Kind(NamedTuple):
    """A structure of c states: the own sizes of its parameters, and its pattern."""

    c: int
    own: list[tuple[int, ...]]
    pattern: Factors


def low_rank(c: int, r: int, diagonal: bool = True) -> Kind:
    stages = Stage((c,), None, 0), Stage((r,), None, 0, transposed=True)
    return Kind(c, [(c, r), (c, r), *([(c,)] if diagonal else [])], Factors(stages, diagonal))


def block_diagonal(a: int, b: int) -> Kind:
    return Kind(a * b, [(a, b, b)], Factors((Stage((a, b), 0, 1, order=(0, 1)),)))


def monarch(a: int, b: int, middle: int) -> Kind:
    last = a * b // middle
    stages = Stage((a, b), 0, 1, order=(1, 0)), Stage((middle, a), 0, 1, order=(0, 1))
    return Kind(a * b, [(a, b, middle), (middle, a, last)], Factors(stages))


def kronecker(*sizes: int) -> Kind:
    order = tuple(range(len(sizes)))
    stages = tuple(Stage(sizes, None, axis, order=order) for axis in order)
    return Kind(torch.Size(sizes).numel(), [(size, size) for size in sizes], Factors(stages))


KINDS = {
    "low_rank": low_rank(11, 3),
    "low_rank_only": low_rank(9, 2, False),
    "block_diagonal": block_diagonal(3, 5),
    "monarch": monarch(4, 6, 8),
    "kronecker": kronecker(3, 2),
    "kronecker3": kronecker(2, 3, 2),
    "one_state": low_rank(1, 1),
}


# every kind on a CPU, and those that differ most in log space
CASES = pytest.mark.parametrize(
    ("room", "kind"),
    [
        *(pytest.param(cpu, kind, id=f"cpu-{name}") for name, kind in KINDS.items()),
        *(pytest.param(plain, KINDS[name], id=f"plain-{name}") for name in ("low_rank", "monarch", "kronecker3")),
    ],
)


def total(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """log of the sum of exp, with gradient 0 where nothing is summed."""
    top = terms.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top == -INF, 0.0)
    sums = (terms - top).exp().sum(dim)
    none = sums == 0
    return (sums.masked_fill(none, 1.0).log() + top.squeeze(dim)).masked_fill(none, -INF)


def dense(pattern: Factors, logs: list[torch.Tensor], c: int) -> torch.Tensor:
    """The logarithms of the matrices (n, c, c), written out for each kind."""
    first, n = pattern.stages[0], len(logs[0])
    if first.block is None and len(first.axes) == 1:
        matrix = total(logs[0][:, :, None] + logs[1][:, None], 3)
        if not pattern.diagonal:
            return matrix
        stays = torch.full((n, c, c), -INF, dtype=torch.float64).diagonal_scatter(logs[2], 0, 1, 2)
        return total(torch.stack([matrix, stays]), 0)
    if len(pattern.stages) == 1:
        matrix = torch.full((n, c, c), -INF, dtype=torch.float64)
        a, b = logs[0].shape[1:3]
        places = torch.arange(c).view(a, b)
        return matrix.index_put((torch.arange(n)[:, None, None, None], places[:, :, None], places[:, None]), logs[0])
    if first.block == 0:
        return (logs[0][..., None] + logs[1].transpose(1, 2)[:, :, None]).reshape(n, c, c)
    matrix = logs[0]
    for factor in logs[1:]:
        size = matrix.shape[1] * factor.shape[1]
        matrix = (matrix[:, :, None, :, None] + factor[:, None, :, None, :]).reshape(n, size, size)
    return matrix


class Truth(NamedTuple):
    log_norm: torch.Tensor
    x: torch.Tensor
    parameters: list[torch.Tensor]
    p0: torch.Tensor


def truth(chain: Structured, weight: torch.Tensor) -> Truth:
    """The log-partition, and gradients with respect to logarithms, through dense matrices."""
    logs = [one.double() if chain.log_params else one.double().log() for one in (*chain.parameters, chain.p0)]
    leaves = [one.detach().clone().requires_grad_() for one in (chain.x.double(), *logs)]
    axes = len(chain.batch)
    n = chain.batch.numel()
    rows = [one.expand(*chain.batch, *one.shape[axes:]).reshape(n, *one.shape[axes:]) for one in leaves]
    x, *factors, p0 = rows
    ends = torch.full((n,), chain.v) if chain.ends is None else chain.ends.reshape(-1)
    message = p0 + x[:, 0]
    for step in range(1, chain.v):
        here = [one[:, step - 1 if one.shape[1] > 1 else 0] for one in factors]
        after = total(message[:, :, None] + dense(chain.pattern, here, chain.c), 1) + x[:, step]
        message = torch.where((ends > step)[:, None], after, message)
    value = total(message, 1).view(chain.batch)
    possible = torch.where((value > -INF) & (weight != 0), value * weight, 0.0)
    grads = torch.autograd.grad(possible.sum(), leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    return Truth(value.detach(), grads[0], grads[1:-1], grads[-1])


def draw(
    kind: Kind,
    batch=(3,),
    own=None,
    v=5,
    steps=1,
    dtype=torch.float32,
    log=False,
    ends=False,
    scale=1.0,
    seed=0,
    **more,
) -> Structured:
    """A random chain; `own`: the batch sizes of all parameters, or ones."""
    generator = torch.Generator().manual_seed(seed)
    own = tuple(1 for _ in batch) if own is None else own
    x = (torch.randn(*batch, v, kind.c, generator=generator, dtype=torch.float64) * scale).to(dtype)
    sizes = [(*own, steps, *one) for one in kind.own] + [(*batch, kind.c)]
    weights = [torch.rand(one, generator=generator, dtype=torch.float64) + 0.01 for one in sizes]
    *parameters, p0 = ((one.log() if log else one).to(dtype) for one in weights)
    last = torch.randint(1, v + 1, batch, generator=generator) if ends else None
    return Structured(x, tuple(parameters), p0, kind.pattern, last, log, dtype, **more)


def replaced(chain: Structured, **fields) -> Structured:
    return Structured(**{**vars(chain), **fields})


def weights_of(chain: Structured) -> torch.Tensor:
    return torch.linspace(-0.5, 2.0, max(1, chain.batch.numel()), dtype=torch.float64).view(chain.batch)


def close(ours: torch.Tensor, true: torch.Tensor, near: float) -> bool:
    """Whether all differ by at most `near` of the largest, or by what flushed posteriors may."""
    size = max(float(true.abs().max()), 1e-4) if true.numel() else 1.0
    return bool(((ours.double() - true).abs() <= near * size).all())


def check(room, chain: Structured, near: float | None = None) -> Walk:
    """Compare values and all gradients with the truth."""
    weight = weights_of(chain)
    near = near or (2e-6 if chain.dtype == torch.float32 else 1e-12)
    true, walk = truth(chain, weight), room.forward(chain, True)
    assert walk.log_norm.dtype == torch.float64 and walk.log_norm.shape == chain.batch
    assert torch.equal(walk.log_norm == -INF, true.log_norm == -INF)
    finite = true.log_norm > -INF
    ulp = float(true.log_norm[finite].abs().max()) * 2e-15 if finite.any() else 0.0
    for value in (walk.log_norm, room.forward(chain, False).log_norm):
        assert ((value - true.log_norm)[finite].abs() <= near + ulp).all()
    grads = room.backward(chain, walk, weight, (True, True, True))
    assert close(grads.x, true.x, 2 * near) and grads.x.shape == chain.x.shape and grads.x.is_contiguous()
    logs = chain.log_params or chain.by_log
    given = (chain.p0, *chain.parameters)
    for one, counts, operand in zip((grads.p0, *grads.parameters), (true.p0, *true.parameters), given, strict=True):
        assert one.shape == operand.shape and one.dtype == chain.dtype and one.is_contiguous()
        assert (one[operand == (-INF if chain.log_params else 0)] == 0).all()
        assert close(one if logs else one.double() * operand.double(), counts, 2 * near)
    return walk


@CASES
@pytest.mark.parametrize(
    ("batch", "own", "steps", "log"),
    [
        ((2, 3), (2, 1), 1, True),
        ((3, 2), (1, 2), 4, False),
        ((3,), (3,), 1, True),
        ((), (), 4, True),
    ],
    ids=["sets", "steps", "own", "no_batch"],
)
def test_kinds(room, kind, batch, own, steps, log):
    dtype = torch.float64 if steps > 1 else torch.float32
    walk = check(room, draw(kind, batch, own, steps=steps, log=log, dtype=dtype, ends=bool(batch)))
    assert not walk.redone.any()


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("log", [False, True])
def test_parameters_of_some_are_own(kind, log):
    chain = draw(kind, (2, 3), (2, 1), log=log, ends=True)
    first, *rest = draw(kind, (2, 3), (1, 3), log=log, seed=1).parameters
    check(cpu, replaced(chain, parameters=(first, *(one[:, :1] for one in rest))))
    check(cpu, replaced(chain, parameters=(chain.parameters[0], *rest)))
    steps = draw(kind, (2, 3), (2, 1), log=log, steps=4, seed=2).parameters
    check(cpu, replaced(chain, parameters=(steps[0], *rest)))
    far = chain.parameters[0] - 200 if log else chain.parameters[0] * 1e-30
    check(cpu, replaced(chain, parameters=(far, *(one[:, :1] for one in rest))), near=1e-4)


@ROOMS
@pytest.mark.parametrize("kind", [KINDS["low_rank"], KINDS["monarch"]], ids=["low_rank", "monarch"])
@pytest.mark.parametrize("log", [False, True])
def test_one_step_and_by_log(room, kind, log):
    check(room, draw(kind, v=1, log=log, ends=True))
    check(room, draw(kind, v=1, steps=0, log=log))
    check(room, draw(kind, log=log, by_log=True))


def test_many_steps_are_counted_in_blocks():
    check(cpu, draw(KINDS["low_rank"], (2,), v=300, ends=True), near=3e-5)
    check(cpu, draw(KINDS["monarch"], (3,), (3,), v=40, ends=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_states_use_all_paths_of_vectors(dtype):
    for kind in (low_rank(70, 5), monarch(20, 36, 18), block_diagonal(2, 33), kronecker(33, 5)):
        check(cpu, draw(kind, (2,), v=3, dtype=dtype), near=5e-6 if dtype == torch.float32 else None)


@ROOMS
def test_layouts(room):
    kind = KINDS["monarch"]
    chain = draw(kind, (2, 3), (2, 1))
    expected = room.forward(chain, False).log_norm
    x = torch.empty(chain.v, kind.c, 2, 3).permute(2, 3, 0, 1).copy_(chain.x)
    p0 = chain.p0.new_full((2, 3, 2 * kind.c), torch.nan)[..., ::2].copy_(chain.p0)
    turned = tuple(one.mT.contiguous().mT for one in chain.parameters)
    assert torch.allclose(room.forward(replaced(chain, x=x, p0=p0, parameters=turned), False).log_norm, expected)
    check(room, replaced(chain, x=chain.x[:1].expand(2, -1, -1, -1), p0=chain.p0[:1, :1]))
    apart = tuple(torch.stack([one, one], -1)[..., 0] for one in chain.parameters)
    check(room, replaced(chain, parameters=apart))


@ROOMS
def test_half_operands_are_computed_in_float32(room):
    chain = draw(KINDS["low_rank"])
    half = [one.bfloat16() for one in (chain.x, chain.p0, *chain.parameters)]
    check(room, replaced(chain, x=half[0], p0=half[1], parameters=tuple(half[2:])))


@CASES
@pytest.mark.parametrize("far", [1e-30, 1e25])
def test_parameters_far_from_one(room, kind, far):
    chain = draw(kind)
    walk = check(room, replaced(chain, parameters=(chain.parameters[0] * far, *chain.parameters[1:])), near=2e-5)
    assert not walk.redone.any() or kind.pattern.diagonal
    logs = draw(kind, log=True)
    shifted = [one + shift for one, shift in zip(logs.parameters, (-1e4, 9e3, 10), strict=False)]
    check(room, replaced(logs, parameters=tuple(shifted)), near=3e-3)


@CASES
@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_emissions_of_any_size(room, kind, scale):
    check(room, draw(kind, scale=scale, seed=2), near=1e-3 if scale > 1e3 else 1e-5)
    check(room, draw(kind, scale=scale, dtype=torch.float64, log=True), near=1e-9)


def sparse(chain: Structured, share: float, seed: int) -> Structured:
    """The chain with zeros in all parameters and -inf in x."""
    generator = torch.Generator().manual_seed(seed)

    def with_zeros(one: torch.Tensor, zero: float, least: float) -> torch.Tensor:
        return one.masked_fill(torch.rand(one.shape, generator=generator) < least, zero)

    zero = -INF if chain.log_params else 0.0
    parameters = tuple(with_zeros(one, zero, share) for one in chain.parameters)
    return replaced(
        chain, x=with_zeros(chain.x, -INF, share), parameters=parameters, p0=with_zeros(chain.p0, zero, share)
    )


@CASES
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_zeros_are_exact(room, kind, share):
    for seed in range(2):
        chain = sparse(draw(kind, (3, 2), (3, 1), seed=seed, log=seed > 0, ends=seed > 0), share, seed)
        check(room, chain)


def spread(chain: Structured, by: float, seed: int) -> Structured:
    """The chain with some entries of all parameters e^-by smaller."""
    generator = torch.Generator().manual_seed(seed)

    def smaller(one: torch.Tensor) -> torch.Tensor:
        less = (torch.rand(one.shape, generator=generator) < 0.5).double() * by
        return (one.double() - less if chain.log_params else one.double() * (-less).exp()).to(one.dtype)

    return replaced(chain, parameters=tuple(map(smaller, chain.parameters)))


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_what_underflows_is_found(kind):
    redone = 0
    for seed in range(6):
        log, by = seed % 2 > 0, (20.0, 60.0, 75.0)[seed % 3]
        chain = draw(kind, scale=(1.0, 40.0)[seed // 3], log=log, seed=seed)
        chain = spread(chain, by * (50 if log else 1), seed)
        chain = sparse(chain, 0.3, seed) if seed % 4 > 1 else chain
        redone += int(check(cpu, chain, near=3e-3 if log else 1e-4).redone.sum())
    assert redone or kind.c == 1


def given(kind: Kind, parameters: list[list], x: list[list[float]], p0: list[float]) -> Structured:
    tensors = tuple(torch.tensor(one)[None, None] for one in parameters)
    return Structured(torch.tensor(x)[None], tensors, torch.tensor(p0)[None], kind.pattern, None, False, torch.float32)


def test_a_sum_that_underflows_to_zero():
    """State 2 is left with a weight of 1e-60, and all others die."""
    left, right = [[1.0, 0], [1.0, 0], [0, 1e-30]], [[1.0, 0], [1.0, 0], [0, 1e-30]]
    x = [[0.0, 0, -60], [-INF, -INF, 0]]
    assert check(cpu, given(low_rank(3, 2, False), [left, right], x, [1.0, 1, 1]), near=1e-5).redone.all()
    # zeros that are no path are no reason to compute again
    x = [[0.0, 0, -INF], [0.0, 0, 0], [0.0, -1, 0]]
    assert not check(cpu, given(low_rank(3, 2, False), [left, right], x, [1.0, 1, 1])).redone.any()


def test_emissions_far_below_others_that_matter_later():
    x = [[0.0, -200], [-INF, 0], [0.0, 0]]
    assert check(cpu, given(block_diagonal(2, 1), [[[[1.0]], [[1.0]]]], x, [1.0, 1]), near=1e-5).redone.all()


def test_last_emissions_far_below_that_of_a_state_without_path():
    x = [[0.0, 0], [-200.0, 0]]
    assert check(cpu, given(block_diagonal(2, 1), [[[[1.0]], [[1.0]]]], x, [1.0, 0]), near=1e-5).redone.all()


def test_states_without_path_do_not_overflow_backward(monkeypatch):
    chain = given(block_diagonal(2, 1), [[[[1.0]], [[1.0]]]], [*[[0.0, 45]] * 12, [0.0, 0]], [1.0, 0])
    walk = check(cpu, chain, near=1e-5)
    assert not walk.redone.any()
    monkeypatch.setattr(plain, "forward", None)
    cpu.backward(chain, walk, weights_of(chain), (True, True, True))


@ROOMS
def test_nan_stays_in_its_sequence(room):
    kind = KINDS["monarch"]
    chain = draw(kind, (3, 2), (3, 1), ends=True, v=5)
    ends = torch.tensor([[5, 2], [3, 1], [1, 1]])
    chain = replaced(chain, ends=ends)
    clean = room.forward(chain, True)
    grads = room.backward(chain, clean, weights_of(chain), (True, True, True))
    x = chain.x.clone()
    x[0, 1, 2:] = torch.nan  # behind the end
    x[1, 0, 1, 3] = torch.nan
    first = chain.parameters[0].clone()
    first[2] = torch.nan  # of a set whose sequences have one step
    dirty = replaced(chain, x=x, parameters=(first, *chain.parameters[1:]))
    walk = room.forward(dirty, True)
    hit = torch.zeros(3, 2, dtype=torch.bool)
    hit[1, 0] = True
    assert torch.equal(walk.log_norm.isnan(), hit)
    assert torch.allclose(walk.log_norm[~hit], clean.log_norm[~hit])
    after = room.backward(dirty, walk, weights_of(chain), (True, True, True))
    assert after.x[1, 0, :3].isnan().all() and torch.allclose(after.x[~hit], grads.x[~hit])
    assert (after.x[0, 1, 2:] == 0).all()
    for one, before in zip(after.parameters, grads.parameters, strict=True):
        assert one[1].isnan().any() and torch.allclose(one[0], before[0]) and (one[2] == 0).all()
    weight = weights_of(chain).masked_fill(hit, 0.0)
    ignored = room.backward(dirty, walk, weight, (True, True, True))
    assert (ignored.x[1, 0] == 0).all() and all(one.isfinite().all() for one in (ignored.p0, *ignored.parameters))


@ROOMS
def test_impossible_sequences_have_no_gradient(room):
    chain = draw(KINDS["low_rank"], (2,))
    x = chain.x.clone()
    x[0, 3] = -INF
    chain = replaced(chain, x=x)
    walk = check(room, chain)
    assert walk.log_norm[0] == -INF and walk.log_norm[1] > -INF
    grads = room.backward(chain, walk, torch.tensor([1.0, 0.0], dtype=torch.float64), (True, True, True))
    assert all((one == 0).all() for one in (grads.x, grads.p0, *grads.parameters))


def test_only_what_is_needed():
    chain = draw(KINDS["kronecker3"], ends=True)
    walk, weight = cpu.forward(chain, True), weights_of(chain)
    full = cpu.backward(chain, walk, weight, (True, True, True))
    for needs in itertools.product([False, True], repeat=3):
        some = cpu.backward(chain, walk, weight, needs)
        assert [some.x is not None, some.parameters is not None, some.p0 is not None] == list(needs)
        assert some.x is None or torch.equal(some.x, full.x)
        assert some.p0 is None or torch.equal(some.p0, full.p0)


def test_kept_memory():
    for kind in (low_rank(64, 8), monarch(8, 8, 8), kronecker(4, 4, 4)):
        chain = draw(kind, (4,), v=30)
        kept = cpu.forward(chain, True).kept
        assert sum(one.numel() for one in kept) <= 2.1 * chain.x.numel()


def test_a_long_chain_overflows_nothing():
    chain = draw(low_rank(3, 2), (1,), v=2000)
    more = replaced(chain, x=chain.x + 3000.0)
    ours = cpu.forward(more, False).log_norm - cpu.forward(chain, False).log_norm
    assert torch.allclose(ours, torch.full_like(ours, 6e6), rtol=1e-9)


def test_threads_agree():
    chain = draw(low_rank(3000, 8), (24,), v=4, ends=True)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            walk = cpu.forward(chain, True)
            results.append((walk.log_norm, cpu.backward(chain, walk, weights_of(chain), (True, True, True))))
    finally:
        torch.set_num_threads(threads)
    (value, grads), (other_value, other_grads) = results
    assert torch.allclose(value, other_value, rtol=1e-7) and torch.allclose(grads.x, other_grads.x, rtol=1e-5)
    for one, other in zip(grads.parameters, other_grads.parameters, strict=True):
        assert torch.allclose(one, other, rtol=1e-4)
