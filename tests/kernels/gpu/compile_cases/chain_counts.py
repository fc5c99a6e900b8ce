"""The gradient of matrices from linear messages: products over sequences, and sums of few terms."""

import torch

from logchain.kernels.gpu import chain_counts
from tests.kernels.gpu.compiled import Case

KIND = {torch.float32: "fp32", torch.float64: "fp64"}


def case(c, target, dtype=torch.float32, kind="linear", rows="together", *, odd=False, few=False) -> Case:
    """`few` terms or a product; `odd`: entries are loaded one by one."""
    kernel = chain_counts._few_kernel if few else chain_counts._product_kernel
    double = dtype == torch.float64
    tile = chain_counts.few_tiles(c) if few else chain_counts.tiles(c, double)
    precision = "ieee" if double or target == "gfx942" else "tf32x3"
    width = 1 if odd else 4
    constants = {
        "KIND": kind, "C": c, "WIDTH_BULK": width, "WIDTH_OUT": width, "BLOCK_K": tile.rows, "BLOCK_J": tile.columns,
        "stride_bj": 1, "stride_oj": 1,
    }  # fmt: skip
    constants |= {} if few else {"PRECISION": precision, "ROWS": rows, "BLOCK_M": tile.terms}
    pointers = {name: f"*{KIND[dtype]}" for name in kernel.arg_names if name.endswith("_ptr")} | {"bound_ptr": "*i32"}
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    return Case(
        " ".join([f"c={c}", *map(str, tile), KIND[dtype], precision, kind, rows, "odd" * odd, "few" * few]).strip(),
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,),
        tile.warps, tile.stages, dot=False if few else None,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    """Each tile, in the kind that needs most."""
    return [
        case(200, target),
        case(200, target, rows="nested", kind="log"),
        case(199, target, rows="apart", kind="log", odd=True),
        case(4096, target, kind="counts"),
        case(32, target, kind="log"),
        case(16, target, kind="log"),
        case(200, target, torch.float64, kind="log"),
        case(199, target, torch.float64, odd=True),
        case(200, target, few=True),
        case(199, target, few=True, odd=True, kind="log"),
        case(199, target, torch.float64, few=True, odd=True, kind="log"),
    ]
