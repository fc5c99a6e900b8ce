"""The way back along the best path."""

import torch

from logchain.kernels.gpu import backtrack
from logchain.kernels.gpu.launch import arithmetic
from tests.kernels.gpu.compiled import Case


def way_back(c: int, dtype: torch.dtype, *, log_params: bool) -> Case:
    kernel, (block_s, block_c, warps) = backtrack._backtrack_kernel, backtrack.tiles(c)
    kind = "fp64" if dtype == torch.float64 else "fp32"
    kinds = {"message_ptr": kind, "bulk_ptr": kind, "ends_ptr": "i64", "state_ptr": "i64"}
    pointers = {name: f"*{kind}" for name, kind in kinds.items()}
    constants = {"LOG_PARAMS": log_params, "DTYPE": arithmetic(dtype), "BLOCK_S": block_s, "BLOCK_C": block_c}
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    return Case(
        f"backtrack c={c} {kind}{' log_params' if log_params else ''}",
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,), warps, dot=False,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    return [way_back(200, dtype, log_params=False) for dtype in (torch.float32, torch.float64)]
