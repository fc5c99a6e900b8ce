"""Both tiles of the max-plus product, for both dtypes of its arithmetic."""

from logchain.kernels.gpu import max_matmul
from tests.kernels.gpu.compiled import Case

STRIDES = [f"stride_{name}" for name in "ag ap am ak bg bp bk bn og op om on".split()]


def cases(target: str) -> list[Case]:
    return [
        Case(
            f"{block_m} x {block_n} {dtype}",
            max_matmul.forward_kernel,
            dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), dtype)
            | {"argmax_ptr": "*i32"}
            | dict.fromkeys(("p", "m", "n", "k", *STRIDES), "i32"),
            {"BLOCK_M": block_m, "BLOCK_N": block_n},
            warps=warps,
            dot=False,
        )
        for block_m, block_n, warps in (max_matmul.SMALL, max_matmul.LARGE)
        for dtype in ("*fp32", "*fp64")
    ]
