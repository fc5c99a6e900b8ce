"""Chains that share wide matrices: the tiles that a launcher chooses, forward and backward."""

from logchain.kernels.gpu import chain_wide, chain_wide_backward
from logchain.kernels.gpu.chain_wide_tiles import DOUBLE, FEW, ODD, WIDE, WIDER, Layout, Tile, early
from tests.kernels.gpu.compiled import Case


def case(
    backward: bool, c: int, tile: Tile, precision: str, *, kind: str = "fp32", bulk: str = "", log_params: bool = False,
    together: bool = True, transposed: bool = False,
) -> Case:  # fmt: skip
    """Contiguous operands with lengths and all gradients; `transposed`: matrices that lie by columns."""
    module = chain_wide_backward if backward else chain_wide
    width = 4 if c % 4 == 0 else 1
    widths = (width, 1, width, width) if transposed else (width, width, 1, width)
    fixed = Layout(
        c, tile.rows, tile.columns, tile.depth, tile.stages, -(-c // tile.columns), together,
        early(tile, width, together), log_params, precision,
        *widths,
    )  # fmt: skip
    numbers = ["x", "message", *(["w", "work", "final", "grad"] if backward else ["top"])]
    pointers = dict.fromkeys((f"{name}_ptr" for name in numbers), f"*{kind}")
    pointers |= {"bulk_ptr": f"*{bulk or kind}", "bound_ptr": "*i32", "level_ptr": "*i32", "ends_ptr": "*i64"}
    pointers |= {"doubt_ptr": "*i1", "counters_ptr": "*i32"} | (
        {} if backward else {"taken_ptr": "*i64", "leaving_ptr": f"*{kind}"}
    )
    constants = {"L": fixed, "stride_xc": 1, "stride_bk" if transposed else "stride_bj": 1}
    constants |= {"stride_dc": 1} if backward else {}
    kernel = module._step_kernel
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    words = ["log_params"] * log_params + ["transposed"] * transposed + ["apart"] * (not together)
    return Case(
        " ".join(["backward" if backward else "forward", f"c={c}", *map(str, tile), bulk or kind, precision, *words]),
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, tuple(pointers), tile.warps, tile.stages,
        dot=kind == "fp64" or precision != "ieee",
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    """Those that need most registers, scalar loads among them."""
    precision, wider = ("ieee", WIDE) if target == "gfx942" else ("tf32x3", WIDER)
    found = []
    for backward in (False, True):
        found += [
            case(backward, 512, WIDE, precision, log_params=True),
            case(backward, 1024, wider, precision, transposed=True),
            case(backward, 1001, ODD, precision, log_params=True, together=False),
            case(backward, 4095, ODD, precision, together=False),
            case(backward, 4096, wider, precision, together=False),
            case(backward, 512, FEW, precision),
            case(backward, 512, DOUBLE, "ieee", kind="fp64"),
            case(backward, 301, ODD, "ieee", kind="fp64", bulk="bf16", together=False),
        ]
    return found + [case(backward, 1024, wider, "tf32") for backward in (False, True)]
