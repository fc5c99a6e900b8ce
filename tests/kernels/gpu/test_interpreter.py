"""What Triton's interpreter imitates of hardware, each with and without the option."""

import inspect
import math

import pytest
import torch

from tests.conftest import HARDWARE, asked_for

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are not interpreted", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from tests.kernels.gpu import interpreter  # noqa: E402

INF, NAN = float("inf"), float("nan")
SIZE = 32


@pytest.fixture
def imitate(monkeypatch):
    """Gives the interpreter the options asked for, and no other, until the end of a test."""

    def change(**options):
        for name, method in interpreter.methods(**options).items():
            monkeypatch.setattr(InterpreterBuilder, name, method)

    return change


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, K: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """`c += a @ b`."""
    i, k = tl.arange(0, SIZE), tl.arange(0, K)
    a, b = tl.load(a_ptr + i[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * SIZE + i[None, :])
    c_at = c_ptr + i[:, None] * SIZE + i[None, :]
    tl.store(c_at, tl.dot(a, b, tl.load(c_at), input_precision=PRECISION))


def multiply(a, b, precision, start=0.0):
    """`start + a @ b` for a (32, k) and b (k, 32)."""
    out = torch.full((SIZE, SIZE), start)
    _product[(1,)](a.contiguous(), b.contiguous(), out, K=a.shape[1], SIZE=SIZE, PRECISION=precision)
    return out


def one_sum(terms, precision, start=0.0):
    """`start` and the terms, of which the kernel multiplies each by 1."""
    a = torch.zeros(SIZE, 16)
    a[0, : len(terms)] = torch.tensor(terms)
    return multiply(a, torch.ones(16, SIZE), precision, start)[0, 0].item()


@pytest.mark.parametrize(("k", "expected"), [(16, -6.3e-8), (64, -2.5e-7)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_3xtf32_lose_bits_towards_zero(k, expected, sign, imitate):
    generator = torch.Generator().manual_seed(k)
    a, b = sign * torch.rand(SIZE, k, generator=generator), torch.rand(k, SIZE, generator=generator)
    exact = a.double() @ b.double()
    imitate()
    assert (multiply(a, b, "tf32x3") / exact - 1).mean().abs() < 1e-8
    imitate(truncating=True)
    assert (multiply(a, b, "tf32x3") / exact - 1).mean().item() == pytest.approx(expected, rel=0.1)
    assert torch.allclose(multiply(a, b, "ieee").double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_addends_have_two_bits_more_than_their_sum(precision, sign, imitate):
    imitate(truncating=True)

    def total(*terms):
        return sign * one_sum([sign * term for term in terms], precision)

    assert total(1.0, *[2.0**-25] * 4) == total(*[2.0**-25] * 4, 1.0) == 1 + 2.0**-23
    assert total(1.0, *[2.0**-26] * 7) == 1
    assert total(1.0, *[2.0**-25] * 3) == 1
    # the sum of the first eight is 2**-23 before the 1 comes
    assert total(*[2.0**-26] * 8, 1.0) == 1 + 2.0**-23
    assert total(1.0, -(2.0**-25)) == 1 - 2.0**-24
    assert total(1.0, -(2.0**-26)) == 1
    assert total(-(2.0**-26), *[0.0] * 7, 1.0) == 1
    assert total(2.0**127, 2.0**127, 1.0) == INF


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_sums_next_to_zero_are_denormals(precision, imitate):
    imitate(truncating=True)
    a, b = torch.zeros(SIZE, 16), torch.full((16, SIZE), 2.0**-60)
    assert (multiply(a, b, precision) == 0).all()
    a[0, :2], a[1, :2], a[2, :2] = torch.tensor([[2.0**-80, 2.0**-89], [2.0**-80, 2.0**-90], [2.0**-90, 2.0**-90]])
    assert multiply(a, b, precision)[:3, 0].tolist() == [2.0**-140 + 2.0**-149, 2.0**-140, 0]


def test_tensor_cores_add_to_the_accumulator_in_tf32_only(imitate):
    terms = [2.0**-26] * 8
    imitate(truncating=True)
    assert one_sum(terms, "tf32", start=1.0) == 1
    assert one_sum(terms, "tf32x3", start=1.0) == 1 + 2.0**-23
    imitate()
    assert one_sum(terms, "tf32", start=1.0) == 1 + 2.0**-23


@pytest.mark.parametrize("truncating", [False, True])
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_infinities_and_nan_pass_through_a_product(precision, truncating, imitate):
    imitate(truncating=truncating)
    assert one_sum([INF, 1.0], precision) == INF
    assert one_sum([1.0, -INF], precision) == -INF
    assert math.isnan(one_sum([INF, -INF], precision))
    assert one_sum([1.0], precision, start=INF) == INF
    # the NaN that PTX makes, of which rounding alone would make a zero
    for made in (NAN, torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()):
        assert math.isnan(one_sum([1.0, made], precision))
        assert math.isnan(one_sum([1.0], precision, start=made))
    a, b = torch.full((SIZE, 16), INF), torch.zeros(16, SIZE)
    assert multiply(a, b, precision).isnan().all()


@triton.jit
def _choose(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.maximum(x, y))
    tl.store(out_ptr + SIZE + i, tl.minimum(x, y))
    tl.store(out_ptr + 2 * SIZE + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out_ptr + 3 * SIZE + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maxima_and_minima_of_two_ignore_nan(dtype, imitate):
    x, y = torch.tensor([[1, NAN, 3, NAN], [2, 2, NAN, NAN]], dtype=dtype)
    passed = torch.tensor([[2, NAN, NAN, NAN], [1, NAN, NAN, NAN]], dtype=dtype)
    ignored = torch.tensor([[2, 2, 3, NAN], [1, 2, 3, NAN]], dtype=dtype)
    for fmax, expected in ((False, passed), (True, ignored)):
        imitate(fmax=fmax)
        out = torch.empty(4, 4, dtype=dtype)
        _choose[(1,)](x, y, out, SIZE=4)
        torch.testing.assert_close(out, torch.cat([expected, passed]), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _exponential(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.exp2(tl.load(x_ptr + i))
    tl.store(out_ptr + i, x)
    tl.store(out_ptr + SIZE + i, tl.log(x))


def test_exponentials_are_no_denormals(imitate):
    x = torch.tensor([-126.0, -127.0, -149.0, -INF, 0.0, -(2.0**-149), INF, NAN])
    kept, flushed = x.exp2(), torch.tensor([2.0**-126, 0.0, 0.0, 0.0, 1.0, 1.0, INF, NAN])
    assert (kept[:3] > 0).all()
    for ftz, expected in ((False, kept), (True, flushed)):
        imitate(ftz=ftz)
        for dtype, exact in ((torch.float32, expected), (torch.float64, x.double().exp2())):
            out = torch.empty(2, 8, dtype=dtype)
            _exponential[(1,)](x.to(dtype), out, SIZE=8)
            torch.testing.assert_close(out, torch.stack([exact, exact.log()]), rtol=1e-6, atol=0, equal_nan=True)


@triton.jit
def _write_down(count_ptr, order_ptr):
    place = tl.atomic_add(count_ptr, 1)
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(order_ptr + place, program)


def order_of(*grid):
    count, order = torch.zeros((), dtype=torch.int32), torch.full(grid, -1, dtype=torch.int32)
    _write_down[grid](count, order)
    assert count == order.numel()
    return order.flatten().tolist()


@triton.jit
def _widened(a_ptr, out_ptr, SIZE: tl.constexpr):
    """`out = a` in the dtype of `out`."""
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(a_ptr + i).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bfloat16_is_widened_exactly(dtype, imitate):
    """Denormal numbers too, as on a device, where it is a shift of bits."""
    imitate()
    a = torch.tensor([1.5, -124.0, 3e38, 1e-38, -1e-40, 0.0, INF, -INF]).to(torch.bfloat16)
    out = torch.empty(8, dtype=dtype)
    _widened[(1,)](a, out, SIZE=8)
    assert torch.equal(out, a.to(dtype)) and (out != 0).sum() == 7


@pytest.mark.parametrize("grid", [(1,), (2,), (3,), (50,), (4, 5), (3, 1, 2), (2, 3, 4)], ids=str)
def test_programs_run_in_another_order(grid, imitate):
    programs = list(range(math.prod(grid)))
    imitate()
    assert order_of(*grid) == programs
    imitate(shuffled=True)
    order = order_of(*grid)
    assert sorted(order) == programs and order_of(*grid) == order
    assert len(programs) == 1 or all(place != program for place, program in enumerate(order))
    assert len(programs) < 10 or order != programs[::-1]


def test_options_of_the_command_line():
    assert tuple(inspect.signature(interpreter.install).parameters) == HARDWARE
    assert tuple(inspect.signature(interpreter.methods).parameters) == HARDWARE
    assert asked_for("") == () and asked_for("all") == HARDWARE
    assert asked_for("ftz, truncating") == ("truncating", "ftz")
    with pytest.raises(pytest.UsageError, match="all or some of truncating, fmax, ftz, shuffled, found fmin, none"):
        asked_for("none,fmax,fmin")


def test_options_of_the_command_line_are_what_is_installed(request):
    asked = asked_for(request.config.getoption("hardware"))
    found = interpreter.methods(**dict.fromkeys(asked, True))
    for name in ("create_exp2", "set_grid_dim", "set_grid_idx"):
        assert getattr(InterpreterBuilder, name) is found[name]
    assert one_sum([1.0, -(2.0**-25)], "tf32x3") == (1 - 2.0**-24 if "truncating" in asked else 1)
    out = torch.empty(4, 1)
    _choose[(1,)](torch.tensor([NAN]), torch.ones(1), out, SIZE=1)
    assert out[0].isnan().logical_not() == ("fmax" in asked)
