"""The gradient of the log-semiring product: every tile, for the left operand and for the right one."""

from logchain.kernels.gpu import log_matmul_gradient as gradient
from tests.kernels.gpu.compiled import Case

POINTERS = ("weight_ptr", "c_ptr", "a_ptr", "b_ptr", "out_ptr")
STRIDES = [f"stride_{name}" for name in "wg wp wm wn cg cp cm cn ag ap am ak bg bp bk bn og op om ok part".split()]


def cases(target: str) -> list[Case]:
    precisions = ("tf32x3", "tf32") if target.startswith("sm_") else ("ieee", "tf32")
    found = []
    for transposed in (False, True):
        found.append(_case("small", gradient.SMALL, "*fp32", precisions[0], transposed))
        for precision in precisions:
            found.append(_case("medium", gradient.MEDIUM[target], "*fp32", precision, transposed))
        found.append(_case("double", gradient.DOUBLE, "*fp64", "ieee", transposed))
    return found


def _case(name, tile, dtype, precision, transposed) -> Case:
    # the loads of 16 bytes are those of sizes that 16 divides
    ones = (
        ("stride_wm", "stride_cm", "stride_am", "stride_bk") if transposed else ("stride_cn", "stride_ak", "stride_bn")
    )
    constants = {"WIDTH": 4, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants |= {"PRECISION": precision} | dict.fromkeys((*ones, "stride_ok"), 1)
    arguments = dict.fromkeys(POINTERS, dtype) | dict.fromkeys(("p", "m", "n", "k", "span", "parts", *STRIDES), "i32")
    arguments = {name: kind for name, kind in arguments.items() if name not in constants}
    title = f"{name} {dtype} {precision} {'right' if transposed else 'left'}"
    return Case(title, gradient.gradient_kernel, arguments, constants, POINTERS, tile.warps, tile.stages)
