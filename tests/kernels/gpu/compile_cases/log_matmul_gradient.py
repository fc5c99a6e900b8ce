"""The gradient of the log-semiring product: every tile, for the left operand and for the right one."""

from logchain.kernels.gpu import log_matmul_gradient as gradient
from tests.kernels.gpu.compiled import Case


def cases(target: str) -> list[Case]:
    precisions = ("tf32x3", "tf32") if target.startswith("sm_") else ("ieee", "tf32")
    found = []
    for transposed in (False, True):
        found.append(_case("small", gradient.SMALL, "*fp32", precisions[0], transposed))
        for precision in precisions:
            found.append(_case("medium", gradient.MEDIUM[target], "*fp32", precision, transposed))
        found.append(_case("double", gradient.DOUBLE, "*fp64", "ieee", transposed))
        found.append(_case("medium", gradient.MEDIUM[target], "*fp32", precisions[0], transposed, deep=True))
        found.append(_case("double", gradient.DOUBLE, "*fp64", "ieee", transposed, deep=True))
        found += [_shifted(dtype, transposed) for dtype in ("*fp32", "*fp64", "*bf16")]
    return found


def _case(name, tile, dtype, precision, transposed, *, deep=False) -> Case:
    constants = {"WIDTH": 4, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants |= {"PRECISION": precision, "DEEP": deep, "TRANSPOSED": transposed}
    constants["stride_wm" if transposed else "stride_wn"] = 1
    pointers = ("weight_ptr", "c_ptr", "a_ptr", "b_ptr", "out_ptr")
    types = dict.fromkeys(pointers, dtype) | {"flag_ptr": "*i32"}
    kernel = gradient.gradient_kernel
    title = f"{name} {dtype} {precision} {'right' if transposed else 'left'}{' deep' if deep else ''}"
    return _made(title, kernel, types, constants, pointers, tile.warps, tile.stages, dot=not deep)


def _shifted(dtype, columns) -> Case:
    types = {"matrix_ptr": dtype, "out_ptr": "*fp32" if dtype == "*bf16" else dtype}
    constants = {"COLUMNS": columns, "BLOCK": 32, "BLOCK_K": 64, "stride_line" if columns else "stride_term": 1}
    title = f"shifted {dtype} {'columns' if columns else 'rows'}"
    return _made(title, gradient.shifted_kernel, types, constants, ("matrix_ptr", "out_ptr"), 4, 3, dot=False)


def _made(title, kernel, types, constants, pointers, warps, stages, **options) -> Case:
    arguments = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    return Case(title, kernel, arguments, constants, pointers, warps, stages, **options)
