"""Products of messages and matrices whose entries come in the order in which tensor cores hold them."""

import pytest
import torch

triton = pytest.importorskip("triton")
fragments = pytest.importorskip("logchain.kernels.gpu.fragments")

from triton import language as tl  # noqa: E402

from logchain.kernels.gpu.scaled import halves  # noqa: E402
from tests.kernels.gpu.compiled import reports  # noqa: E402

F32, F64 = torch.float32, torch.float64
NAN = float("nan")


@triton.jit
def _kernel(
    a_ptr, p_ptr, out_ptr, top_ptr, rows, end, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = fragments.sharing(C, PRECISION)
    a = fragments.load_message(a_ptr, rows, C, W)
    p = fragments.load_matrix(p_ptr, end, STRIDE_K, STRIDE_J, WIDTH, C, N, W, 0.0, a_ptr.dtype.element_ty)
    high, low = halves(p, PRECISION)
    members, columns = tl.arange(0, 16), tl.arange(0, N)
    tl.store(out_ptr + members[:, None] * N + columns[None, :], fragments.product(a, high, low, PRECISION))
    tl.store(top_ptr + members, fragments.largest(a))


@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "ieee"])
@pytest.mark.parametrize(
    ("c", "n", "rows", "end"), [(200, 64, 16, 50), (37, 16, 3, 9), (64, 64, 16, 64), (129, 32, 1, 5), (20, 32, 16, 17)]
)
@pytest.mark.parametrize("order", ["rows", "columns", "neither"])
def test_products(device, c, n, rows, end, order, precision):
    given = torch.randint(1, 2**10, (16, c)).float().to(device)  # which TF32 holds, as sums of them float32 does
    a = given.new_full((16 * c,), NAN)
    a[: rows * c] = given[:rows].flatten()
    p = torch.randint(0, 2, (c, n)).float().to(device)
    held = p.new_full((2 * c, 2 * n), NAN)
    view = {"rows": held[:c, :n], "columns": held[:c, :n].contiguous().mT.contiguous().mT, "neither": held[::2, ::2]}
    view = view[order]
    view[:, :end] = p[:, :end]
    width = 4 if order == "rows" or order == "columns" and c % 4 == 0 else 1
    out, top = a.new_full((16, n), NAN), a.new_full((16,), NAN)
    _kernel[1,](a, view, out, top, rows, end, *view.stride(), width, c, n, precision, num_warps=8)
    expected = torch.zeros(16, n, dtype=F64, device=device)
    expected[:rows, :end] = given[:rows].double() @ p[:, :end].double()
    assert out.double().equal(expected)
    assert top[:rows].equal(given[:rows].amax(1)) and not top[rows:].any()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["chain_forward", "chain_backward"])
def test_no_operand_passes_through_shared_memory(tmp_path, module):
    """Only the sums of eight warps do."""
    found = reports(module, "sm_90", str(tmp_path))
    main = next(report for report in found if "c=200" in report.name and report.tensor)
    assert main.shared == 8 * 16 * 64 * 4, main
