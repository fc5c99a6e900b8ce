"""The Triton log-semiring product in place, relative to tops, over several tiles; `test_matmul` asks it the rest."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from logchain import reference
from logchain.kernels.gpu import line_maxima, log_matmul
from logchain.kernels.gpu.log_matmul_tiles import Tiles
from tests import oracle
from tests.contract import TENSOR_CORES, assert_values, of_steps, poisoned_memory, value_bound
from tests.test_matmul import CASES, F32, F64, INF, NAN, dead, dense, depth, draw, misaligned, offsets, sparse


def batch(case, shape, sizes, dtype, device):
    """Different matrices for every batch index: (*shape, m, k) and (*shape, k, n)."""
    drawn = [draw(case, sizes, dtype, seed) for seed in range(int(np.prod(shape)))]
    return tuple(torch.stack(each).unflatten(0, shape).to(device) for each in zip(*drawn, strict=True))


def stack(case, shape, c, dtype, device):
    """Square matrices (g, s, c, c): left operands of a case at the even places of a stack, right ones at the odd."""
    g, s = shape
    a, b = batch(case, (g, (s + 1) // 2), (c, c, c), dtype, device)
    return torch.stack([a, b], 2).flatten(1, 2)[:, :s].contiguous()


def truth(a, b, dtype):
    a, b = a.double().cpu().numpy(), b.double().cpu().numpy()
    return oracle.matmul(a, b)[0] if dtype == F64 else reference.matmul(a, b)


def bound(a, b, expected, dtype):
    """As of a chain of two matrices."""
    return value_bound(expected, 2, a.shape[-1], depth(a, b, expected), dtype=dtype, k=TENSOR_CORES)


def assert_product(out, a, b, *, factors=0.0):
    """`out` is within the contract; `factors` is the relative error that the precision allows for each factor."""
    dtype = F64 if F64 in (a.dtype, b.dtype) else F32
    assert out.dtype == dtype
    expected = truth(a, b, dtype)
    value = bound(a.double().cpu().numpy(), b.double().cpu().numpy(), expected, dtype)
    assert_values(out.cpu(), expected, value + 2 * factors)


@pytest.mark.parametrize("case", [dense, misaligned, sparse])
@pytest.mark.parametrize("c", [63, pytest.param(132, marks=pytest.mark.slow)])
def test_results_of_several_tiles(device, case, c):
    a, b = batch(case, (1, 1), (c, 20, c), F32, device)
    if case is not dense:  # a part of it: what is redone takes long where kernels are interpreted
        a[..., 2:-2, :], b[..., 2:-2] = a[..., 2:-2, :1], b[..., :1, 2:-2]
    assert_product(log_matmul.forward(a, b), a, b)


@pytest.fixture
def small_tiles(monkeypatch):
    """Results of a few dozen rows and columns have several tiles."""
    monkeypatch.setattr(log_matmul, "tiles", lambda *args, **options: Tiles(16, 16, 16, 1, 2))


@pytest.mark.parametrize("case", [dense, misaligned, offsets])
@pytest.mark.parametrize("sizes", [(5, 20, 36), (1, 17, 19)], ids=str)
def test_maxima_in_memory(device, case, sizes, small_tiles):
    """Where results are wider than a tile: of loads of four entries, and of one."""
    a, b = batch(case, (2, 1), sizes, F32, device)
    assert_product(log_matmul.forward(a, b), a, b)
    assert_product(log_matmul.forward(b.mT, a.mT), b.mT, a.mT)


@pytest.mark.parametrize("case", CASES)
def test_tf32_rounds_each_factor_once(device, case):
    a, b = batch(case, (1, 1), (33, 20, 17), F32, device)
    torch.set_float32_matmul_precision("high")
    try:
        out = log_matmul.forward(a, b)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_product(out, a, b, factors=2.0**-11)
    if case is dense:
        assert (out != log_matmul.forward(a, b)).any()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_nan_stays_in_its_row_and_column(device, precision):
    a, b = batch(misaligned, (1, 2), (18, 5, 3), F32, device)
    a[0, 0, 1, 2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)  # as devices write it
    b[0, 1, 2, 1] = NAN
    torch.set_float32_matmul_precision(precision)
    try:
        out = log_matmul.forward(a, b)
    finally:
        torch.set_float32_matmul_precision("highest")
    wrong = torch.zeros_like(out, dtype=torch.bool)
    wrong[0, 0, 1] = wrong[0, 1, :, 1] = True
    assert torch.equal(out.isnan(), wrong)


@pytest.mark.parametrize("case", [dense, misaligned])
def test_strange_strides(device, case):
    a, b = batch(case, (2, 2), (7, 5, 9), F32, device)
    expected = log_matmul.forward(a, b)
    columns = [tensor.mT.contiguous().mT for tensor in (a, b)]
    spread = a.repeat_interleave(2, 2)[:, :, ::2], b.repeat_interleave(3, 3)[..., ::3]
    inside_out = [tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for tensor in (a, b)]
    for left, right in (columns, spread, inside_out):
        assert torch.equal(log_matmul.forward(left, right), expected)
    out = expected.new_full((9, 14, 2, 2), NAN)
    assert log_matmul.forward(a, b, out[:, ::2].permute(3, 2, 1, 0)).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, ::2].permute(3, 2, 1, 0), expected) and out[:, 1::2].isnan().all()
    shared = a[:1, :1].expand(2, 2, 7, 5), b[:, :, :, :1].expand(2, 2, 5, 9)
    assert torch.equal(log_matmul.forward(*shared), log_matmul.forward(*(tensor.contiguous() for tensor in shared)))


IN_PLACE = [
    *itertools.product([dense, misaligned, sparse, dead, offsets], [((2, 5), 5), ((1, 3), 17)], [F32, F64]),
    (dense, ((1, 4), 1), F32),
    (misaligned, ((1, 2), 33), F32),
    pytest.param(dense, ((1, 2), 68), F32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "sizes", "dtype"), IN_PLACE)
def test_in_place_is_the_same_to_the_last_bit(device, case, sizes, dtype, monkeypatch):
    """Over the left or the right operands of a stack, whose other matrices are not touched."""
    shape, c = sizes
    nodes = stack(case, shape, c, dtype, device)
    pairs = shape[1] // 2
    expected = log_matmul.forward(nodes[:, 0 : 2 * pairs : 2], nodes[:, 1::2])
    for side in (0, 1):
        work = nodes.clone()
        operands = [work[:, place : 2 * pairs : 2] for place in (0, 1)]
        with poisoned_memory():
            assert log_matmul.forward(*operands, operands[side]) is operands[side]
        assert_product(operands[side], nodes[:, 0 : 2 * pairs : 2], nodes[:, 1::2])
        rest = [place for place in range(shape[1]) if place % 2 != side or place == 2 * pairs]
        assert torch.equal(work[:, rest], nodes[:, rest])
        if side == 0 or c <= 16:  # the transposed product adds in another order
            torch.testing.assert_close(operands[side], expected, rtol=0, atol=0)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("case", [dense, misaligned])
def test_in_place_over_rows_longer_than_a_tile(device, case, by_rows, small_tiles, monkeypatch):
    """Some rows of some matrices are copied at a time."""
    monkeypatch.setattr(log_matmul, "_HELD", 1)
    a, b = batch(case, (1, 2), (70, 17, 17), F32, device)
    room = a.new_full((1, 2, 70, 34), NAN)
    work = (a.clone() if by_rows else room[..., ::2]).copy_(a)
    tops = torch.zeros(1, 2, device=device), b.amax((2, 3))
    out_top = torch.full((1, 2), -INF, device=device)
    assert log_matmul.forward(work, b, work, a_top=tops[0], b_top=tops[1], out_top=out_top) is work
    assert_product(work, a, b - tops[1][..., None, None])
    assert torch.equal(out_top, work.amax((2, 3))) and (by_rows or room[..., 1::2].isnan().all())


def test_in_place_walks_over_more_blocks_than_programs(device):
    a, b = batch(misaligned, (5, 5), (2, 2, 2), F32, device)
    expected = log_matmul.forward(a, b)
    assert torch.equal(log_matmul.forward(a, b, a), expected)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [dense, misaligned, sparse, dead, offsets])
@pytest.mark.parametrize("place", ["new", "left", "right"])
def test_relative_to_tops(device, case, place, dtype):
    a, b = batch(case, (3, 1), (17, 17, 17), dtype, device)
    a[1], b[2] = -INF, -INF  # with nothing to be relative to
    tops = [tensor.amax((2, 3)) for tensor in (a, b)]
    out_top = torch.full((3, 1), -INF, dtype=dtype, device=device)
    shifts = [torch.where(top == -INF, 0.0, top).double().cpu()[..., None, None] for top in tops]
    relative = [tensor.double().cpu() - shift for tensor, shift in zip((a, b), shifts, strict=True)]
    left, right = a.clone(), b.clone()
    out = {"new": None, "left": left, "right": right}[place]
    found = log_matmul.forward(left, right, out, a_top=tops[0], b_top=tops[1], out_top=out_top)
    expected = truth(*relative, dtype)
    value = bound(*(tensor.numpy() for tensor in relative), expected, dtype)
    below = np.where(np.isfinite(expected), np.abs(expected), 0.0)  # the top
    assert_values(found.cpu(), expected, value + of_steps(1, 0, below, dtype=dtype))
    assert torch.equal(out_top, found.amax((2, 3)))


@pytest.mark.parametrize("block", [16, 32], ids=["several tiles", "one tile"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [dense, misaligned, sparse, dead, offsets])
@pytest.mark.parametrize("place", ["new", "left", "right"])
def test_maxima_are_handed_on(device, case, place, dtype, block, monkeypatch):
    """A product with given maxima is the same, and those of its own rows and columns are what it says they are."""
    monkeypatch.setattr(log_matmul, "tiles", lambda *args, **options: Tiles(block, block, 16, 1, 2))
    monkeypatch.setattr(log_matmul, "_HELD", 1)
    a, b = batch(case, (2, 2), (17, 17, 17), dtype, device)
    a[1, 0], b[1, 1] = -INF, -INF
    a[0, 1, :, 1], b[0, 1, 1] = 300.0, -INF  # what is redone is not all of a matrix
    tops = [tensor.amax((2, 3)) for tensor in (a, b)]
    maxima = torch.stack([a.amax(3), b.amax(2)])
    found = []
    for given in (False, True):
        left, right = a.clone(), b.clone()
        out = {"new": None, "left": left, "right": right}[place]
        lines = torch.full((2, 2, 2, 17), -INF, dtype=dtype, device=device)
        wanted = {"maxima": maxima, "out_top": lines[:, :, 0], "out_column": lines[:, :, 1]}
        options = wanted if given else {"out_top": torch.full((2, 2), -INF, dtype=dtype, device=device)}
        found.append(log_matmul.forward(left, right, out, a_top=tops[0], b_top=tops[1], **options))
    assert torch.equal(*found)
    assert torch.equal(lines, torch.stack([found[1].amax(3), found[1].amax(2)], 2))


def test_maxima_of_some_rows_at_a_time(device, monkeypatch):
    monkeypatch.setattr(log_matmul, "tiles", lambda *args, **options: Tiles(32, 32, 16, 1, 2))
    monkeypatch.setattr(log_matmul, "_HELD", 1)
    a, b = batch(dense, (1, 2), (70, 70, 70), F32, device)
    a -= 200.0 * torch.arange(70, device=device)[:, None]
    top, lines = torch.zeros(1, 2, device=device), torch.full((1, 2, 2, 70), -INF, device=device)
    wanted = {"maxima": torch.stack([a.amax(3), b.amax(2)]), "out_top": lines[:, :, 0], "out_column": lines[:, :, 1]}
    expected, rescued = log_matmul.forward(a, b), torch.zeros(1, dtype=torch.int64, device=device)
    log_matmul.forward(a, b, a, a_top=top, b_top=top, rescued=rescued, **wanted)
    assert torch.equal(a, expected) and not rescued
    assert torch.equal(lines, torch.stack([a.amax(3), a.amax(2)], 2))


def test_maxima_of_rows_that_are_computed_again(device, monkeypatch):
    """In place all rows of a tile with a mark are, and sums in another order."""
    monkeypatch.setattr(log_matmul, "tiles", lambda *args, **options: Tiles(64, 64, 32, 4, 2))
    a, b = (part[..., :50, :50] for part in batch(dense, (1, 4), (64, 64, 64), F32, device))
    a[..., 0, :], b[..., 0, 1:], b[..., 1:, 0] = -200.0, -INF, -200.0
    a[..., 0, 0] = 0.0
    top, lines = torch.zeros(1, 4, device=device), torch.full((1, 4, 2, 50), -INF, device=device)
    wanted = {"maxima": torch.stack([a.amax(3), b.amax(2)]), "out_top": lines[:, :, 0], "out_column": lines[:, :, 1]}
    rescued = torch.zeros(1, dtype=torch.int64, device=device)
    log_matmul.forward(a, b, a, a_top=top, b_top=top, rescued=rescued, **wanted)
    assert 0 < rescued < a.numel() / 2
    assert torch.equal(lines, torch.stack([a.amax(3), a.amax(2)], 2))


def test_a_nan_has_no_part_in_the_maxima(device, small_tiles):
    a, b = batch(dense, (1, 1), (17, 17, 17), F32, device)
    a[0, 0, 1] = NAN
    top, lines = torch.zeros(1, 1, device=device), torch.full((1, 1, 2, 17), -INF, device=device)
    maxima = torch.stack([line_maxima.maxima_of(a)[:, :, 0], line_maxima.maxima_of(b)[:, :, 1]])
    wanted = {"maxima": maxima, "out_top": lines[:, :, 0], "out_column": lines[:, :, 1]}
    out = log_matmul.forward(a, b, a_top=top, b_top=top, **wanted)
    assert torch.equal(out.isnan(), a.isnan())
    possible = out.nan_to_num(nan=-INF)
    assert torch.equal(lines, torch.stack([possible.amax(3), possible.amax(2)], 2))


@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16], ids=str)
def test_maxima_of_matrices(device, dtype):
    stack = torch.randn(2, 3, 70, 70, dtype=F64).to(device, dtype)
    stack[0, 1, 2], stack[0, 1, :, 3], stack[1, 0] = -INF, -INF, -INF
    wide = torch.randn(2, 3, 70, 140, dtype=F64).to(device, dtype)[..., ::2]
    for matrices in (stack, stack.mT, wide, stack[:, 1:2].expand(2, 4, 70, 70), stack[..., :68, :68]):
        expected = torch.stack([matrices.amax(3), matrices.amax(2)], 2)
        found = line_maxima.maxima_of(matrices)
        assert found.dtype == torch.promote_types(dtype, F32) and torch.equal(found, expected.to(found.dtype))


def test_a_nan_has_no_part_in_the_top(device):
    a, b = batch(dense, (1, 1), (4, 4, 4), F32, device)
    a[0, 0, 1] = NAN
    top, out_top = torch.zeros(1, 1, device=device), torch.full((1, 1), -INF, device=device)
    out = log_matmul.forward(a, b, a_top=top, b_top=top, out_top=out_top)
    assert out[0, 0, 1].isnan().all() and out_top.item() == out.nan_to_num(nan=-INF).amax().item()


def count(a, b):
    rescued = torch.full((1,), 5, dtype=torch.int64, device=a.device)
    log_matmul.forward(a, b, rescued=rescued)
    return rescued.item() - 5


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_the_counter_says_what_was_redone(device, dtype):
    a, b = batch(dense, (1, 2), (33, 5, 17), dtype, device)
    assert count(a, b) == 0
    assert count(*batch(misaligned, (1, 2), (33, 5, 17), dtype, device)) == 2 * 33 * 17
    assert count(*batch(dead, (1, 2), (33, 5, 17), dtype, device)) == 0
    a[..., 0], b[..., 0, :] = 0.0, -INF  # a large entry that meets nothing
    a[..., 1:] -= 40.0
    assert count(a, b) == 0
    a[0, 1, 7, 1:] -= 40.0  # one row below what a shifted sum holds
    assert count(a, b) == 17
    band = torch.ones(40, 40, dtype=dtype, device=device).triu(-1).tril(1).log()[None, None]
    assert count(band, band) == 0


def test_the_left_to_right_zeros_stay_zeros(device):
    band = torch.ones(20, 20, device=device).triu().tril(1).log()[None, None]
    a = band + 60.0 * torch.arange(20, device=device)[:, None]
    b = band - 60.0 * torch.arange(20, device=device)
    assert_product(log_matmul.forward(a, b), a, b)


def test_shifts_are_added_without_loss(device):
    """The sum of the maxima has a coarser grain than what is left of it."""
    a = torch.tensor([2.0**17, 2.0**17 - 3], device=device).view(1, 1, 1, 2)
    for offset in (0.0077, 0.005, -0.0077):
        b = torch.tensor([offset - 3, offset], device=device).view(1, 1, 2, 1)
        exact = truth(a, b, F64).item()
        assert abs(log_matmul.forward(a, b).item() - exact) <= 2.0**-8 + 1e-5  # half of its own grain


@pytest.mark.parametrize("offset", [3e5, 1e8, 1e10, -1e10, 1e30, 3e38, -3e38])
def test_a_shift_in_bits_is_not_the_maximum(device, offset):
    """What rounding it gains is taken out again; where that is too much, sums are redone."""
    a = torch.full((1, 1, 2, 3), offset, device=device)
    b = torch.tensor([0.0, -INF, 0.0], device=device).view(1, 1, 3, 1)
    tops = torch.full((1, 1), offset, device=device), torch.zeros(1, 1, device=device)
    for left, right, top in ((a, b, tops), (b.mT, a.mT, tops[::-1])):
        out_top = torch.full((1, 1), -INF, device=device)
        out = log_matmul.forward(left, right, a_top=top[0], b_top=top[1], out_top=out_top)
        torch.testing.assert_close(out, torch.full_like(out, np.log(2.0)), rtol=0, atol=2e-6)
