"""The max-plus recursion in all its tiles, and the way back along the best path."""

from dataclasses import replace
from itertools import product

import torch

from logchain.kernels.gpu import backtrack
from logchain.kernels.gpu.chain_step import Tiles, arithmetic
from logchain.kernels.gpu.max_step import max_tiles
from tests.compile_cases import chain
from tests.compile_cases.chain import F32, F64, KIND
from tests.compiled import Case


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
    """The tiles that need most registers, linear; by hand all of them."""
    found = []
    for dtype, log_params in product((F32, F64), (False, True)):
        for c in [5, 100, 200, 512, 4096]:
            case = way_back(c, dtype, log_params=log_params)
            found.append(replace(case, by_hand=log_params or c != 200))
        for choice, c in chain.choices(dtype, transposed=False):
            case = forward(choice, c, dtype, target, log_params=log_params)
            most = c == 200 or (c in (64, 256) and not choice.dot)
            found.append(replace(case, by_hand=log_params or not most))
    return found
