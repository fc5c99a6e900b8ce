"""The backward recursion in linear messages: the parts of many states, with lengths, which need most registers."""

import torch

from logchain.kernels.gpu import chain_backward, launch
from logchain.kernels.gpu.chain_backward import Form
from logchain.kernels.gpu.chain_forward import warps_of
from tests.kernels.gpu.compiled import Case

KIND = {torch.float32: "fp32", torch.float64: "fp64"}


def case(c, wide, target, dtype=torch.float32, **options) -> Case:
    """Parts of so many states; the options: `log_params`, `final` messages, `ends`, `odd` strides."""
    kernel, kind = chain_backward._backward_kernel, f"*{KIND[dtype]}"
    double, odd = dtype == torch.float64, options.get("odd", False)
    integers = {
        "bound_ptr": "*i32",
        "level_ptr": "*i32",
        "counters_ptr": "*i32",
        "doubt_ptr": "*i1",
        "ends_ptr": "*i64",
    }
    absent = [name for name in ("final_ptr", "ends_ptr") if not options.get(name[:-4])]
    kinds = {
        name: integers.get(name, kind) for name in kernel.arg_names if name.endswith("_ptr") and name not in absent
    }
    width = 1 if odd else 4
    precision = "ieee" if double or target == "gfx942" else "tf32x3"
    form = Form(c, -(-c // wide), options.get("log_params", False), precision, (c, 1), (width, width, width))
    constants = {"FORM": form, "stride_xc": 1, "stride_dc": 1} | dict.fromkeys(absent)
    others = [name for name in kernel.arg_names if name not in kinds and name not in constants]
    words = [word for word, value in options.items() if value]
    warps = 4 if target == "gfx942" else warps_of(c, precision)
    return Case(
        " ".join([f"c={c} parts of {wide}", KIND[dtype], precision, *words]),
        kernel, kinds | dict.fromkeys(others, "i32"), constants, (*kinds,),
        warps, 1, dot=None, registers=launch.all_registers(warps)["maxnreg"],
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    return [
        case(200, 64, target),
        case(200, 64, target, ends=True),
        case(200, 64, target, log_params=True, final=True, ends=True),
        case(199, 32, target, odd=True, ends=True),
        case(128, 64, target, ends=True),
        case(64, 64, target, ends=True, log_params=True),
        case(16, 64, target, ends=True, final=True),
        case(200, 32, target, torch.float64, ends=True),
        case(199, 32, target, torch.float64, odd=True),
    ]
