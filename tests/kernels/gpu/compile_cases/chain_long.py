"""Long chains in segments: the largest tiles of each number of warps, own and shared matrices, odd strides, float64."""

from logchain.kernels.gpu import chain_long, segment_product
from tests.kernels.gpu.compiled import Case


def cases(target: str) -> list[Case]:
    """Configurations of `chain_long.constants`."""
    fast = "ieee" if target == "gfx942" else "tf32x3"
    return [
        case(16, "ieee"),
        case(16, "ieee", same=True, logs=True, ends=True),
        case(32, fast),
        case(32, fast, same=True),
        case(32, "ieee", kind="fp64", logs=True),
        case(64, fast, ends=True),
        case(64, fast, same=True),
        case(63, fast, logs=True, width=1),
        case(64, "tf32"),
        case(32, "ieee", kind="fp64", same=True),
    ]


def case(
    c: int, precision: str, *, kind: str = "fp32", same: bool = False, logs: bool = False, ends: bool = False,
    width: int = 4,
) -> Case:  # fmt: skip
    """One sequence's kernel; matrices are contiguous by rows."""
    kernel = chain_long._long_kernel
    pointers = {"start": "fp64", "ends": "i64", "taken": "i64", "counters": "i32", "log_norm": "fp64", "doubt": "i1"}
    arguments = {name: "i32" for name in kernel.arg_names if name.islower()}
    arguments |= {name: f"*{pointers.get(name[:-4], kind)}" for name in arguments if name.endswith("_ptr")}
    constants: dict[str, object] = {
        "C": c, "SAME": same, "LOG_PARAMS": logs, "PRECISION": precision, "WIDTH_X": width, "WIDTH": width,
        "STRIDE_BK": c, "STRIDE_BJ": 1, "stride_xc": 1,
    }  # fmt: skip
    if not ends:
        constants["ends_ptr"] = None
    for name in constants:
        arguments.pop(name, None)
    what = f"c={c} {kind} {precision}{' same' * same}{' logs' * logs}{' ends' * ends}{' odd' * (width == 1)}"
    dot = precision.startswith("tf32")
    divisible = tuple(name for name in arguments if name.endswith("_ptr"))
    warps, registers = segment_product.warps(c, kind == "fp64"), segment_product.registers(c)
    return Case(what, kernel, arguments, constants, divisible, warps, 1, dot, registers)
