"""Chains of bands on the CPU, in C and plain, against dense chains in float64 log space and against closed forms."""

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from logchain.kernels.cpu import bands as in_c
from logchain.kernels.plain import bands as plain
from logchain.kernels.structured import Gradients, Structured, Walk

INF = math.inf
ROOMS = pytest.mark.parametrize("room", [in_c, plain], ids=["cpu", "plain"])
ALL = True, True, True


def chain_of(
    offsets: tuple[int, ...],
    c: int,
    v: int,
    batch: tuple[int, ...] = (2,),
    own: tuple[int, ...] = (1,),
    steps: int = 1,
    *,
    spread: float = 1.0,
    log: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Structured:
    """A chain with zeros among its values and -inf in x."""
    generator = torch.Generator().manual_seed(v * c + len(offsets))
    x = spread * torch.randn(*batch, v, c, generator=generator, dtype=dtype)
    x[..., 1:, :].masked_fill_(torch.rand(*batch, max(v - 1, 0), c, generator=generator) < 0.1, -INF)
    values = torch.rand(*own, steps, len(offsets), c, generator=generator, dtype=dtype) + 0.05
    values.masked_fill_(torch.rand(values.shape, generator=generator) < 0.1, 0.0)
    p0 = torch.rand(*own, c, generator=generator, dtype=dtype)
    if log:
        values, p0 = values.log() * spread, p0.log()
    return Structured(x, (values,), p0, offsets, None, log, dtype)


def computed(room: ModuleType, chain: Structured, weight: Tensor | None = None) -> tuple[Walk, Gradients]:
    weight = torch.ones(chain.batch, dtype=torch.float64) if weight is None else weight
    walk = room.forward(chain, True)
    assert torch.equal(room.forward(chain, False).log_norm.nan_to_num(7.0), walk.log_norm.nan_to_num(7.0))
    return walk, room.backward(chain, walk, weight, ALL)


def log_sum(logs: Tensor, axis: int) -> Tensor:
    """log sum exp, with a gradient of 0 where the sum is 0."""
    top = logs.detach().amax(axis, keepdim=True)
    total = (logs - top.masked_fill(top == -INF, 0.0)).exp().sum(axis)
    return torch.where(total > 0, total, 1.0).log().masked_fill(total == 0, -INF) + top.squeeze(axis)


def expected(chain: Structured, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """log Z and its gradients, by autograd through dense matrices; a gradient is 0 where its operand is."""
    inputs = [operand.detach().double().requires_grad_() for operand in (chain.x, *chain.parameters, chain.p0)]
    x, values, p0 = inputs
    if not chain.log_params:
        values, p0 = (torch.where(t > 0, t, 1.0).log().masked_fill(t == 0, -INF) for t in (values, p0))
    dense = values.new_full((*values.shape[:-2], chain.c, chain.c), -INF)
    for d, offset in enumerate(chain.pattern):
        to = torch.arange(max(0, offset), chain.c + min(0, offset))
        dense[..., to - offset, to] = values[..., d, to]
    ends = torch.full(chain.batch, chain.v) if chain.ends is None else chain.ends
    x = x.masked_fill(torch.arange(chain.v)[:, None] >= ends[..., None, None], 0.0)
    message = p0 + x[..., 0, :]
    for step in range(1, chain.v):
        matrix = dense[..., step - 1 if dense.shape[-3] > 1 else 0, :, :]
        after = log_sum(message[..., :, None] + matrix, -2) + x[..., step, :]
        message = torch.where((ends > step)[..., None], after, message)
    log_norm = log_sum(message, -1)
    gradients = torch.autograd.grad((log_norm * weight).sum(), inputs, allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, inputs, strict=True)]
    if chain.by_log and not chain.log_params:
        filled[1:] = [g * t.detach() for g, t in zip(filled[1:], inputs[1:], strict=True)]
    return log_norm.detach(), filled


def check(room: ModuleType, chain: Structured, rtol: float = 4e-6) -> None:
    weight = torch.linspace(-0.5, 2.0, chain.batch.numel(), dtype=torch.float64).view(chain.batch)
    walk, got = computed(room, chain, weight)
    log_norm, gradients = expected(chain, weight)
    assert not walk.redone.any()
    torch.testing.assert_close(walk.log_norm, log_norm, rtol=1e-15, atol=rtol / 2)
    assert got.parameters is not None
    for gradient, truth in zip((got.x, *got.parameters, got.p0), gradients, strict=True):
        assert gradient is not None and gradient.dtype == chain.dtype and gradient.is_contiguous()
        # gradients of shared operands may be sums of both signs
        torch.testing.assert_close(gradient.double(), truth, rtol=rtol, atol=rtol * 1e-2)
        assert not gradient[truth == 0].any()


@ROOMS
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "chain",
    [
        dict(offsets=(0,), c=1, v=1),
        dict(offsets=(0, 1), c=2, v=1, steps=0, batch=(), own=()),
        dict(offsets=(0, 1, 2), c=19, v=9, batch=(3,), own=(3,)),
        dict(offsets=(0, 1, 2, 3), c=33, v=7, steps=6),
        dict(offsets=(-2, 0, 40), c=41, v=5, spread=300.0),
        dict(offsets=(1, -1, 0, 16, -16), c=17, v=6, batch=(2, 3), own=(2, 1), spread=20.0),
        dict(offsets=(0, 1, 2, -1, -2, 3), c=21, v=6, batch=(2, 3), own=(1, 3), steps=5),
        dict(offsets=(0, 1, 2, -1, -2, 3, 4), c=16, v=5, spread=1e4),
        dict(offsets=(0, 1, 2, -1, -2, 3, 4, 5), c=32, v=5, spread=9.0),
        dict(offsets=tuple(range(-9, 10)), c=35, v=5, batch=(2,), own=(2,), steps=4, spread=50.0),
    ],
    ids=lambda chain: f"{len(chain['offsets'])}",
)
def test_like_dense_chains(room: ModuleType, chain: dict, log: bool) -> None:
    check(room, chain_of(**chain, log=log))


@ROOMS
def test_dtypes_lengths_and_logarithms(room: ModuleType) -> None:
    chain = chain_of((0, 1, -3), 18, 7, (5,), dtype=torch.float64)
    ends = torch.tensor([7, 1, 3, 2, 6])
    check(room, chain, rtol=1e-13)
    check(room, replace(chain, ends=ends), rtol=1e-13)
    chain = replace(chain, x=chain.x.float(), parameters=(chain.parameters[0].float(),), dtype=torch.float32)
    check(room, replace(chain, ends=ends, by_log=True))
    check(room, replace(chain, x=chain.x.bfloat16(), p0=chain.p0.half()))


@ROOMS
def test_layouts(room: ModuleType) -> None:
    chain = chain_of((0, 2, -1), 21, 6, (2, 3), (2, 3), 5)
    (values,), x, p0 = chain.parameters, chain.x, chain.p0
    moved = replace(
        chain,
        x=x.movedim((0, 1, 2, 3), (3, 1, 0, 2)).contiguous().movedim((3, 1, 0, 2), (0, 1, 2, 3)),
        parameters=(values.mT.contiguous().mT[:],),
        p0=torch.stack([p0, p0], -1)[..., 0],
    )
    shared = replace(chain, x=x[:1, :1, :1].expand(x.shape), parameters=(values[:1, :, :1].expand(values.shape),))
    for one, other in ((chain, moved), (replace(shared, x=shared.x.contiguous()), shared)):
        (a, b), (c, d) = computed(room, one), computed(room, other)
        assert torch.equal(a.log_norm, c.log_norm)
        for first, second in zip((b.x, *b.parameters, b.p0), (d.x, *d.parameters, d.p0), strict=True):
            assert torch.equal(first, second)


def test_threads() -> None:
    chain = chain_of((0, 1, 2), 201, 30, (7,))
    one = computed(in_c, chain)
    by_step = replace(chain, parameters=(chain.parameters[0].expand(1, 29, 3, 201),))
    own = replace(chain, parameters=(chain.parameters[0].expand(7, 1, 3, 201).contiguous(),))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = [computed(in_c, other) for other in (chain, by_step, own)]
    finally:
        torch.set_num_threads(before)
    counts = [gradients.parameters[0] for _, gradients in results]
    totals = counts[0], counts[1].sum(1, True), counts[2].sum(0, True)
    for (walk, gradients), total in zip(results, totals, strict=True):
        assert torch.equal(walk.log_norm, one[0].log_norm) and torch.equal(gradients.x, one[1].x)
        torch.testing.assert_close(total, one[1].parameters[0], rtol=2e-6, atol=1e-6)


def test_exponents_of_long_chains() -> None:
    """Independent states whose weights differ by millions of nats on the way, and by nothing in the end."""
    v = 100_000
    x = (1e4 * torch.randn(v, generator=torch.Generator().manual_seed(0))).round()
    x = torch.stack([x, x.flip(0), x.roll(v // 2)], -1)[None]
    values, p0 = torch.full((1, 1, 1, 3), 0.5), torch.tensor([[0.125, 0.25, 0.5]])
    chain = Structured(x, (values,), p0, (0,), None, False, torch.float32)
    walk, gradients = computed(in_c, chain)
    truth = x[0, :, 0].double().sum() + math.log(0.875) + (v - 1) * math.log(0.5)
    torch.testing.assert_close(walk.log_norm, truth[None], rtol=1e-15, atol=2e-3)
    assert not walk.redone.any()
    for step in (0, v // 2, v - 1):
        torch.testing.assert_close(gradients.x[0, step], torch.tensor([1, 2, 4]) / 7, rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_beyond_exponents(dtype: torch.dtype) -> None:
    """Potentials of -1e30 matter only where all paths have them, which is computed again by logarithms."""
    x = torch.randn(4, 9, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x[0, 3:5, 1:] = x[1, 4] = -1e30
    x[2, :, 0], x[3, 2] = -1e30, torch.tensor([0.0, -1e30, -1e30, -1e30, -1e30])
    values, p0 = torch.full((1, 1, 2, 5), 0.5, dtype=dtype), torch.zeros(1, 5, dtype=dtype)
    values[..., 0, 0], p0[..., 0] = 0.5, 1.0
    values[..., 0, 0] = 0.0  # the first state is left at once
    chain = Structured(x, (values,), p0, (0, 1), None, False, dtype)
    walk, gradients = computed(in_c, chain)
    other, truth = computed(plain, chain)
    assert walk.redone.tolist() == [True, False, True, True]
    torch.testing.assert_close(walk.log_norm, other.log_norm, rtol=1e-7, atol=1e-5)
    torch.testing.assert_close(gradients.x, truth.x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients.parameters[0], truth.parameters[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients.p0, truth.p0, rtol=1e-5, atol=1e-5)


@ROOMS
def test_gradients_of_tiny_values(room: ModuleType) -> None:
    chain = chain_of((0, 1), 20, 5)
    values = chain.parameters[0].clone()
    values[..., 1, ::2], p0 = 1e-40, chain.p0.clone()
    p0[..., 3:] = 1e-42
    check(room, replace(chain, parameters=(values,), p0=p0))


@ROOMS
@pytest.mark.parametrize("log", [False, True])
def test_no_path_and_no_weight(room: ModuleType, log: bool) -> None:
    chain = chain_of((0, 1), 18, 6, (4,), (4,), log=log)
    chain.x[0, 2], chain.x[1, 5, 3] = -INF, torch.nan
    chain.p0[3] = -INF if log else 0.0
    walk, gradients = computed(room, chain, torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    assert walk.log_norm[0] == walk.log_norm[3] == -INF and walk.log_norm[1].isnan() and walk.log_norm[2].isfinite()
    for gradient in (gradients.x, *gradients.parameters, gradients.p0):
        assert not gradient[[0, 1, 3]].any() and gradient[2].any()


@ROOMS
@pytest.mark.parametrize("where", ["x", "values", "p0"])
def test_nan_stays_in_its_sequence(room: ModuleType, where: str) -> None:
    chain = chain_of((0, 1), 18, 6, (3,), (3,), 5)
    before, _ = computed(room, chain)
    {"x": chain.x[1, 4], "values": chain.parameters[0][1, 3, 0], "p0": chain.p0[1]}[where][7] = torch.nan
    walk, gradients = computed(room, chain)
    assert walk.log_norm.isnan().tolist() == [False, True, False]
    assert torch.equal(walk.log_norm[::2], before.log_norm[::2])
    for gradient in (gradients.x, *gradients.parameters, gradients.p0):
        assert gradient[1].isnan().any() and gradient[::2].isfinite().all()


@ROOMS
def test_what_is_not_read(room: ModuleType) -> None:
    """Behind the end, and values that lead nowhere, may be anything."""
    chain = replace(chain_of((0, 3), 18, 6, (2,), (2,), 5), ends=torch.tensor([4, 6]))
    walk, gradients = computed(room, chain)
    chain.x[0, 4:], chain.parameters[0][0, 3:], chain.parameters[0][..., 1, :3] = torch.nan, torch.nan, torch.nan
    other, same = computed(room, chain)
    assert torch.equal(walk.log_norm, other.log_norm) and torch.equal(gradients.x, same.x)
    assert torch.equal(gradients.parameters[0], same.parameters[0]) and not same.x[0, 4:].any()
    chain.x[1, 2, 5] = INF
    assert not computed(room, chain)[0].log_norm[1].isfinite()
