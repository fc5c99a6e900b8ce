"""`logchain.matmul` keeps the accuracy contract against pairwise log-sum-exp, in values and in both derivatives."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from logchain.kernels.cpu import arguments
from logchain.kernels.cpu import matmul as cpu_matmul
from logchain.kernels.plain import matmul as plain_matmul
from logchain.memory import peak_bytes
from tests import oracle
from tests.backends import on, parameter
from tests.conftest import ON_GPU
from tests.contract import assert_gradient, assert_values, gradient_bound, k_of, poisoned_memory, value_bound
from tests.families import F32, F64, INF, NAN, Numbers


def dense(draw, m, k, n):
    return draw.normal(m, k), draw.normal(k, n)


def gaps(draw, m, k, n):
    """Entries hundreds of nats apart: few terms matter, and rarely those at both maxima."""
    return 250.0 * draw.normal(m, k), 250.0 * draw.normal(k, n)


def misaligned(draw, m, k, n, depth=200.0):
    """Rows fall by 200 nats where columns climb by 200."""
    slope = -depth * torch.linspace(0, 1, k, dtype=F64)
    return slope + 0.1 * draw.normal(m, k), slope.flip(0)[:, None] + 0.1 * draw.normal(k, n)


def abyss(draw, m, k, n):
    return misaligned(draw, m, k, n, depth=1000.0)


def just_representable(draw, m, k, n):
    """Dominant terms 40 to 130 nats below both maxima: on both sides of what a shifted float32 sum can hold."""
    depth = torch.linspace(40, 130, m, dtype=F64)[:, None]
    a = torch.cat([torch.zeros(m, 1, dtype=F64), draw.normal(m, k - 1) - depth], 1) if k > 1 else draw.normal(m, 1)
    b = torch.cat([torch.full((1, n), -INF, dtype=F64), draw.normal(k - 1, n)], 0) if k > 1 else draw.normal(1, n)
    return a, b


def sparse(draw, m, k, n):
    a, b = 20.0 * draw.normal(m, k), 20.0 * draw.normal(k, n)
    return torch.where(draw.uniform(m, k) < 0.7, -INF, a), torch.where(draw.uniform(k, n) < 0.7, -INF, b)


def dead(draw, m, k, n):
    """A row, a column and an inner index without any finite entry."""
    a, b = draw.normal(m, k), draw.normal(k, n)
    a[0], b[:, -1], a[:, k // 2], b[k // 2] = -INF, -INF, -INF, -INF
    return a, b


def offsets(draw, m, k, n):
    return draw.normal(m, k) + 1e4 * torch.arange(m)[:, None], draw.normal(k, n) - 3e4


CASES = [dense, gaps, misaligned, abyss, just_representable, sparse, dead, offsets]
SIZES = [(7, 5, 3), (1, 17, 1), (17, 1, 4), (33, 20, 17), (1, 33, 40), (1, 1, 1)]


def draw(case, sizes, dtype, seed=0):
    a, b = case(Numbers(seed), *sizes)
    return a.to(dtype), b.to(dtype)


def depth(a, b, truth):
    """How far the terms of a sum [..., m, n] lie below the largest entries of its row and its column, together."""
    with np.errstate(invalid="ignore"):
        below = a.max(-1, initial=-INF)[..., :, None] + b.max(-2, initial=-INF)[..., None, :] - truth
    return np.where(np.isfinite(below), below, 0.0).clip(0.0)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few entries, so that torch operations cut small operands along sets, rows and columns."""
    for name, size in (("_ENTRIES", 40), ("_PART", 1000), ("_KEPT", 2), ("_PASSING", 3), ("_PAIRS", 16)):
        monkeypatch.setattr(plain_matmul, name, size)


@pytest.fixture(params=["cpu", "plain", pytest.param("gpu", marks=ON_GPU)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device on which loops in C multiply, torch operations in small pieces, or Triton with small tiles."""
    if request.param != "cpu":
        request.getfixturevalue("small_tiles" if request.param == "gpu" else "small_pieces")
    with on(request.param) as device:
        yield device


def rows(names, *, cpu, gpu):
    """Rows of the tests in C and in torch operations, which take turns, and of some of Triton's kernels."""
    found = [parameter(("cpu", "plain")[i % 2], *row) for i, row in enumerate(cpu)]
    found += [parameter("gpu", *row) for row in gpu]
    return pytest.mark.parametrize(f"backend {names}".split(), found, indirect=["backend"])


def assert_matmul(a, b, device="cpu"):
    """Value and both gradients within the contract; the gradients are sums of the terms' shares of their output."""
    dtype = F64 if F64 in (a.dtype, b.dtype) else F32
    wide_a, wide_b = a.detach().double().numpy(), b.detach().double().numpy()
    a, b = (operand.detach().to(device).requires_grad_() for operand in (a, b))
    k = k_of(a)
    exact, shares = oracle.matmul(wide_a, wide_b)
    truth = exact if dtype == F64 else reference.matmul(wide_a, wide_b)
    # as a chain of two matrices
    inner, below = a.shape[-1], depth(wide_a, wide_b, truth)
    out = logchain.matmul(a, b)
    assert out.dtype == dtype
    assert_values(out, truth, value_bound(truth, 2, inner, below, dtype=dtype, k=k))
    upstream = torch.arange(out.numel(), dtype=dtype).cos().reshape(out.shape)
    out.backward(upstream.to(device))
    shares = shares * upstream.double().numpy()[..., :, None, :]
    allowed = gradient_bound(shares, 2, inner, below[..., :, None, :], dtype=dtype, k=k)
    terms = np.isfinite(wide_a[..., :, :, None] + wide_b[..., None, :, :])
    assert_gradient(a, shares.sum(-1), terms.sum(-1), allowed.sum(-1))
    assert_gradient(b, shares.sum(-3), terms.sum(-3), allowed.sum(-3))


# each case and size in one dtype and, by turning the order, on both backends of a CPU
PAIRS = [(case, sizes, (F32, F64)[(i + j) % 2]) for i, case in enumerate(CASES) for j, sizes in enumerate(SIZES)]
SMALL = [((7, 5, 3), F32), ((1, 33, 40), F32), ((1, 1, 1), F32), ((5, 4, 7), F64), ((17, 18, 5), F64)]


@rows(
    "case sizes dtype",
    cpu=PAIRS + PAIRS[::-1],
    gpu=[(case, *SMALL[(i + j) % 5]) for i, case in enumerate(CASES) for j in (0, 2, 3)],
)
def test_every_case_keeps_the_contract(case, sizes, dtype, backend):
    with poisoned_memory():
        assert_matmul(*draw(case, sizes, dtype), backend)


HALVES = [(dense, torch.bfloat16), (misaligned, torch.float16), (sparse, torch.bfloat16), (dense, torch.float16)]


@rows("case dtype", cpu=HALVES + HALVES[::-1], gpu=HALVES[:2])
def test_half_types_are_exact_on_their_rounded_inputs(case, dtype, backend):
    a, b = draw(case, (7, 5, 3), dtype)
    for left, right in ((a, b), (a, b.float()), (a.double(), b)):
        assert_matmul(left, right, backend)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_a_difference_that_overflows_is_no_minus_infinity(dtype, backend):
    far = 2.0 ** (127 if dtype == F32 else 1023)
    a = torch.tensor([[far, -1.5 * far]], dtype=dtype, device=backend, requires_grad=True)
    b = torch.tensor([[-INF], [0.0]], dtype=dtype, device=backend)
    out = logchain.matmul(a, b)
    out.sum().backward()
    assert out.item() == -1.5 * far and a.grad.tolist() == [[0.0, 1.0]]


BATCHES = [((3,), ()), ((), (3,)), ((3, 1), (1, 4)), ((1,), (5,)), ((2, 1, 3), (3,)), ((2, 3), (2, 3)), ((0,), (1,))]
BATCHES += [((4, 1, 3), (1, 2, 3)), ((2, 3, 2), (3, 1))]


@rows(
    "case batches",
    cpu=[(case, batches) for batches in BATCHES for case in (misaligned, sparse, dense)],
    gpu=[(misaligned, batches) for batches in BATCHES[::2]],
)
def test_batch_axes_broadcast(case, batches, backend):
    sizes = 4, 6, 3
    assert_matmul(*(stacked(case, batch, which, sizes, F32) for which, batch in enumerate(batches)), backend)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 3, 0), (0, 3, 0), (2, 0, 3), (0, 0, 0)], ids=str)
def test_empty_sizes(sizes, backend):
    m, k, n = sizes
    a, b = (torch.zeros(shape, device=backend, requires_grad=True) for shape in ((m, k), (k, n)))
    out = logchain.matmul(a, b)
    assert out.shape == (m, n) and (out == -INF).all()
    out.sum().backward()
    assert a.grad.shape == (m, k) and b.grad.shape == (k, n)
    assert (a.grad == 0).all() and (b.grad == 0).all()


EACH_TWICE = [(case,) for case in (*CASES, *CASES[::-1])]


@rows("case", cpu=EACH_TWICE, gpu=[(misaligned,), (dead,)])
def test_strange_strides(case, backend):
    a, b = draw(case, (7, 5, 9), F32)
    assert_matmul(a.T.contiguous().T, b.T.contiguous().T, backend)
    assert_matmul(a.repeat_interleave(2, 0)[::2], b.repeat_interleave(3, 1)[:, ::3], backend)
    assert_matmul(a.expand(3, 7, 5), b.expand(3, 5, 9), backend)
    assert_matmul(a[:, :1].expand(7, 5), b[:1].expand(5, 9), backend)
    many, few = (stacked(case, batch, which, (7, 5, 6), F32) for which, batch in enumerate(((4, 3), (3,))))
    assert_matmul(many.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), few, backend)


@pytest.mark.parametrize("case", [dense, misaligned, sparse, dead])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_out_is_written_and_returned(case, dtype):
    a, b = draw(case, (7, 5, 9), dtype)
    expected = logchain.matmul(a, b)
    for out in (torch.full((7, 9), NAN, dtype=dtype), torch.full((9, 14), NAN, dtype=dtype)[:, ::2].T):
        assert logchain.matmul(a, b, out=out) is out
        assert torch.equal(out, expected)


def test_nan_stays_in_its_row_and_column(backend):
    a, b = (operand.to(backend) for operand in draw(dense, (4, 5, 3), F32))
    clean = logchain.matmul(a, b)
    a[1, 2] = NAN
    a.requires_grad_(), b.requires_grad_()
    out = logchain.matmul(a, b)
    assert out[1].isnan().all() and torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])
    out.sum().backward()
    assert a.grad.isnan().any(-1).tolist() == [False, True, False, False] and b.grad.isnan().all()


def test_only_wanted_gradients(backend):
    a, b = (operand.to(backend) for operand in draw(misaligned, (4, 5, 3), F32))
    for wants_a, wants_b in itertools.product([False, True], repeat=2):
        left, right = a.clone().requires_grad_(wants_a), b.clone().requires_grad_(wants_b)
        out = logchain.matmul(left, right)
        assert out.requires_grad == (wants_a or wants_b)
        if out.requires_grad:
            out.sum().backward()
        assert (left.grad is not None, right.grad is not None) == (wants_a, wants_b)


DEPTHS = [(depth, weight) for depth in (30.0, 55.0, 60.0, 64.0) for weight in (1e-30, 1e14, 1e30, 3e38)]


@rows("depth weight", cpu=DEPTHS + DEPTHS[::-1], gpu=DEPTHS[4:8])
def test_gradients_scale_with_the_weight(weight, depth, backend):
    """A large weight over a small sum is no overflow: the gradient is the weight times a share."""
    a = torch.tensor([[0.0, -depth]], device=backend, requires_grad=True)
    b = torch.tensor([[-depth], [0.0]], device=backend, requires_grad=True)
    for gradient in torch.autograd.grad(logchain.matmul(a, b), (a, b), torch.full_like(a[:, :1], weight)):
        torch.testing.assert_close(gradient / weight, torch.full_like(gradient, 0.5), rtol=0, atol=4e-5)


@pytest.mark.parametrize(("dtype", "offset"), [(F64, 5e5), (F64, 1e17), (F32, 1e13)], ids=str)
def test_shares_of_what_underflowed_have_the_digits_of_their_differences(dtype, offset, backend):
    a = torch.tensor([[0.0, -60.3, -60.7]], dtype=dtype, device=backend, requires_grad=True)
    logchain.matmul(a, torch.tensor([[-INF], [offset], [offset]], dtype=dtype, device=backend)).sum().backward()
    share = 1 / (1 + np.exp(float((a[0, 2] - a[0, 1]).detach())))
    np.testing.assert_allclose(a.grad[0, 1].item(), share, rtol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("depth", [0.0, 60.0], ids=["fast", "recomputed"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_is_a_precise_sum_over_many_rows(transposed, depth):
    a = torch.tensor([[0.0, -depth]]).expand(100_000, 2)
    b = torch.tensor([[-depth] * 3, [0.0] * 3], requires_grad=True)
    out = logchain.matmul(b.mT, a.mT) if transposed else logchain.matmul(a, b)
    out.sum().backward()
    torch.testing.assert_close(b.grad, torch.full_like(b, 50_000.0), rtol=5e-6, atol=0)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=ON_GPU)], indirect=True)
def test_weights_that_cancel_are_added_before_they_are_scaled(backend):
    a = torch.tensor([[0.0, -200.0]], device=backend, requires_grad=True)
    b = torch.tensor([[-INF], [0.0]], device=backend).repeat(1, 80)
    weight = torch.tensor([1e37, -1e37], device=backend).repeat_interleave(40)[None]
    (grad_a,) = torch.autograd.grad(logchain.matmul(a, b), a, weight)
    assert grad_a[0, 0] == 0 and grad_a[0, 1].abs() <= 80 * 1e37 * torch.finfo(F32).eps


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=ON_GPU)], indirect=True)
def test_small_weights_keep_their_digits_beside_large_ones(backend):
    a, b = torch.zeros(2, 2, device=backend, requires_grad=True), torch.zeros(2, 1, device=backend)
    (grad_a,) = torch.autograd.grad(logchain.matmul(a, b), a, torch.tensor([[1e5], [1e-38]], device=backend))
    expected = torch.tensor([[5e4], [5e-39]]).expand(2, 2)
    torch.testing.assert_close(grad_a.cpu(), expected, rtol=0 if k_of(a) == 1 else 2e-6, atol=0)


@pytest.mark.parametrize("other", [INF, NAN])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=ON_GPU)], indirect=True)
def test_a_weight_that_is_not_finite_stays_in_its_row(other, backend):
    a = torch.tensor([[0.0, -50.0]], device=backend).repeat(2, 1).requires_grad_()
    b = torch.tensor([[-INF], [0.0]], device=backend)
    weight = torch.tensor([[1e30], [other]], device=backend)
    (grad_a,) = torch.autograd.grad(logchain.matmul(a, b), a, weight)
    torch.testing.assert_close(grad_a[0].cpu(), torch.tensor([0.0, 1e30]))


def stacked(case, batch, which, sizes, dtype):
    """One operand of a case, of other numbers for each of the batch, which may be empty."""
    drawn = [draw(case, sizes, dtype, seed)[which] for seed in range(int(np.prod(batch)))]
    matrix = draw(case, sizes, dtype)[which]
    return torch.stack(drawn).reshape(*batch, *matrix.shape) if drawn else matrix.new_zeros(*batch, *matrix.shape)


@pytest.mark.parametrize(
    ("case", "threads", "sizes", "batches"),
    [
        (dense, 1, (70, 33, 65), ((5,), ())),
        (dense, 3, (100, 20, 35), ((), ())),
        (dense, 3, (5, 37, 70), ((2,), (2,))),
        (misaligned, 3, (70, 33, 65), ((), ())),
        (sparse, 3, (5, 37, 70), ((5,), ())),
        (dead, 3, (100, 20, 35), ((2,), (2,))),
    ],
)
def test_many_rows_or_columns_on_several_threads(case, sizes, batches, threads, monkeypatch):
    """More than 64 columns are rows of the transposed product; of more on both sides torch takes care."""
    monkeypatch.setattr(cpu_matmul, "_MOST", 64)
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_matmul(*(stacked(case, batch, which, sizes, F32) for which, batch in enumerate(batches)))


LAYOUTS = ["contiguous", "transposed", "expanded", "rows"]
NEEDS = [(False, False), (True, True), (True, False), (False, True)]
# each layout and each choice of gradients with every one of the others, and on both sides
SHARED = [
    (needs, layout, ("left", "right")[(i + j) % 2]) for i, needs in enumerate(NEEDS) for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(
    ("name", "needs", "layout", "side"),
    [(("cpu", "plain")[i % 2], *row) for i, row in enumerate(SHARED + SHARED[::-1])],
)
def test_a_shared_weight_takes_no_more_than_results_and_gradients(name, needs, layout, side):
    """2 MB of workspace where each of operand, result and gradient has 4 MB."""
    rows = {
        "contiguous": lambda: torch.randn(2048, 8, 1, 64),
        "transposed": lambda: torch.randn(64, 1, 8, 2048).permute(3, 2, 1, 0),
        "expanded": lambda: torch.randn(2048, 1, 1, 64).expand(2048, 8, 1, 64),
        "rows": lambda: torch.randn(256, 8, 8, 64),
    }[layout]()
    weight = torch.randn(8, 64, 64)
    operands = (rows, weight) if side == "right" else (weight, rows.mT)
    leaves = [t.detach().requires_grad_(need) for t, need in zip(operands, needs, strict=True)]
    upstream = torch.ones(()).expand(torch.matmul(*operands).shape)

    def call():
        out = logchain.matmul(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return [out, *(torch.autograd.grad(out, wanted, upstream) if wanted else ())]

    with on(name):
        assert peak_bytes(call) <= 2_000_000
