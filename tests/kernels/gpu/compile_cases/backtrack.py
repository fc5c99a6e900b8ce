"""The max-plus recursion in the tiles that need most registers, and the way back along the best path."""

from dataclasses import replace
from itertools import product

import torch

from logchain.kernels.gpu import backtrack
from logchain.kernels.gpu.chain_tiles import Tiles, arithmetic, tiles
from logchain.kernels.gpu.max_step import max_tiles
from tests.kernels.gpu.compile_cases import chain
from tests.kernels.gpu.compile_cases.chain import F32, F64, KIND
from tests.kernels.gpu.compiled import Case


def forward(choice: Tiles, c: int, dtype: torch.dtype, target: str, *, log_params: bool) -> Case:
    choice = max_tiles(choice)
    held = choice.whole and (c <= 32 or target != "gfx942")
    options = {"homogeneous": held, "ends": True, "log_params": log_params, "max": True}
    return replace(chain.forward(choice, c, dtype, "ieee", **options), dot=False)


def way_back(c: int, dtype: torch.dtype, *, log_params: bool) -> Case:
    kernel, (block_s, block_c, warps) = backtrack._backtrack_kernel, backtrack.tiles(c)
    kinds = {"message_ptr": KIND[dtype], "bulk_ptr": KIND[dtype], "ends_ptr": "i64", "state_ptr": "i64"}
    pointers = {name: f"*{kind}" for name, kind in kinds.items()}
    constants = {"LOG_PARAMS": log_params, "DTYPE": arithmetic(dtype), "BLOCK_S": block_s, "BLOCK_C": block_c}
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    return Case(
        f"backtrack c={c} {KIND[dtype]}{' log_params' if log_params else ''}",
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,), warps, dot=False,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    found = [way_back(200, dtype, log_params=False) for dtype in (F32, F64)]
    for dtype in (F32, F64):
        choices = {tiles(c, m, dtype, 4, transposed=False): c for c, m in product((64, 256, 200), (1, 8, 500))}
        for choice, c in choices.items():
            if c == 200 or not choice.dot:
                found.append(forward(choice, c, dtype, target, log_params=False))
    return found
