"""Chains with matrices of their own: one tile and several, one part and several, forwards and backwards."""

from logchain.kernels.gpu import chain_own
from logchain.kernels.gpu.own_backward import Form, backward_kernel
from logchain.kernels.gpu.own_forward import forward_kernel
from tests.kernels.gpu.compiled import Case


def case(c: int, parts: int = 1, dtype: str = "fp32", bulk: str | None = None, **options) -> Case:
    """Forwards, or backwards if `out` is given; options are `same`, `log_params`, `transposed`, `ends`, `final`."""
    same, log_params, transposed, out = (options.get(name) for name in ("same", "log_params", "transposed", "out"))
    kernel = forward_kernel if out is None else backward_kernel
    block_k, block_j, launched = chain_own.tiles(c, parts, dtype == "fp64", out in ("entries", "logs"))
    kinds = dict.fromkeys(["x", "message", "weight", "grad_x", "grad_start", "out", "w"], dtype)
    kinds |= {"bulk": bulk or dtype, "level": "i32", "start": "fp64", "log_norm": "fp64", "share": "fp64"}
    kinds |= {"redone": "i1", "doubt": "i1", "counters": "i32"}
    kinds |= {"bound": "i32"} if same or parts > 1 else {}
    kinds |= {"ends": "i64"} if options.get("ends") else {}
    kinds |= {"final": dtype} if options.get("final") else {}
    if out == "":
        del kinds["out"]
    pointers = {f"{name}_ptr": f"*{kind}" for name, kind in kinds.items() if f"{name}_ptr" in kernel.arg_names}
    width = 4 if c % 4 == 0 else 1
    constants = {"stride_xc": 1}
    if out is None:
        constants |= {"C": c, "PARTS": parts, "SAME": bool(same), "LOG_PARAMS": bool(log_params), "BLOCK_K": block_k}
        constants |= {"BLOCK_J": block_j, "WIDTH_X": width, "stride_bk" if transposed else "stride_bj": 1}
        constants |= {"WIDTH_K": 1 if transposed else width, "WIDTH_J": width if transposed else 1}
    else:
        strides = (1, c) if transposed else (c, 1)
        tile, widths = (block_k, block_j), (width, width)
        form = Form(c, parts, bool(same), bool(log_params), out, tile, strides, widths)
        constants |= {"FORM": form, "stride_dc": 1}
    absent = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in pointers]
    constants |= dict.fromkeys(absent)
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    words = [name for name, value in options.items() if value is True] + [f"out={out}"] * (out is not None)
    shape = f"{block_k}x{block_j}"
    return Case(
        " ".join([kernel.__name__.split("_")[0], f"c={c}", f"parts={parts}", shape, dtype, bulk or "", *words]),
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, tuple(pointers),
        launched["num_warps"], launched["num_stages"], dot=False,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    """Those that need most registers or memory."""
    most = {"ends": True, "log_params": True}
    found = [case(16), case(64), case(64, bulk="bf16", **most), case(61, dtype="fp64", **most), case(64, same=True)]
    found += [case(200, **most), case(1024, 64, **most), case(1000, 63, "fp64", same=True), case(4096, 128, **most)]
    found += [case(16, out="entries"), case(64, out="logs", final=True, **most), case(61, dtype="fp64", out="entries")]
    found += [
        case(64, same=True, out="r"),
        case(200, out="logs", **most),
        case(1024, 64, out="logs", final=True, **most),
    ]
    found += [case(1024, 128, out="logs", final=True, **most), case(1024, 64, out="entries"), case(1024, 64, out="")]
    found += [case(200, dtype="fp64", same=True, out="r"), case(200, dtype="fp64", out="logs")]
    found += [case(1000, 63, "fp64", out="entries"), case(1000, 63, out="r", same=True, transposed=True)]
    return found
