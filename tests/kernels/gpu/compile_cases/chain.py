"""The vector chains: tiles that need most registers, forward, backward and segment products."""

from dataclasses import replace

import torch

from logchain.kernels.gpu import backward_chain, chain_tiles, forward_chain
from logchain.kernels.gpu.chain_tiles import Tiles, arithmetic, tiles
from logchain.kernels.gpu.launch import common_width
from tests.kernels.gpu.compiled import Case

F32, F64 = torch.float32, torch.float64


def precisions(target: str, choice: Tiles, c: int, dtype: torch.dtype) -> list[str]:
    """What the launchers may ask of `tl.dot`."""
    if dtype == F64 or not choice.dot:
        return ["ieee"]
    if target == "gfx942" or c <= 32:
        return ["ieee", "tf32"]
    return ["tf32x3", "tf32"]


KIND = {F32: "fp32", F64: "fp64"}


def forward(choice, c, dtype, precision, **options) -> Case:
    """The options are the constexpr arguments of that name, `ends` whether there are any."""
    pointers = ["x", "message", "bulk", "rescued:i64", "scale:fp64"]
    if options.get("segment"):
        pointers += ["final", "offset:fp64"]
    else:
        pointers += ["start", "log_norm:fp64"]
    absent = {"homogeneous": False, "segment": False, "max": False, "ends": False}
    options = absent | {"keep": not options.get("segment")} | options
    options["joint"] = options["segment"] and choice.whole and choice.block_s >= c
    units = ["stride_xc", "stride_bj"]
    return case(forward_chain._forward_kernel, pointers, units, choice, c, dtype, precision, options)


def backward(choice, c, dtype, precision, **options) -> Case:
    pointers = ["x", "message", "bulk", "log_norm:fp64", "weight", "w", "grad", "start", "r"]
    options = {"homogeneous": False, "ends": False} | options
    units = ["stride_xc", "stride_bk", "stride_dc"]
    return case(backward_chain._backward_kernel, pointers, units, choice, c, dtype, precision, options)


def case(kernel, pointers, units, choice, c, dtype, precision, options) -> Case:
    pointers = pointers + ["top"] * (choice.dot and not choice.whole) + ["ends:i64"] * options.pop("ends")
    kinds = {}
    for pointer in pointers:
        name, _, kind = pointer.partition(":")
        kinds[f"{name}_ptr"] = f"*{kind or KIND[dtype]}"
    width = common_width(c)
    constants = {name.upper(): value for name, value in options.items()} | {
        "DTYPE": arithmetic(dtype), "DOT": choice.dot, "WHOLE": choice.whole, "BLOCK_S": choice.block_s,
        "BLOCK_K": choice.block_k, "BLOCK_C": choice.block_c, "PRECISION": precision, "WIDTH": width, "WIDTH_C": width,
        "WIDTH_K": 1 if "stride_bk" in units else width, "WIDTH_J": 1 if "stride_bj" in units else width,
        "WIDTH_X": width,
    }  # fmt: skip
    constants |= dict.fromkeys(units, 1)
    absent = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in kinds]
    integers = [name for name in kernel.arg_names if name not in kinds and name not in constants and name not in absent]
    divisible = [name for name in integers if name.startswith("stride_") or name == "c"] if c % 16 == 0 else []
    words = [word for word, value in options.items() if value is True]
    return Case(
        " ".join([kernel.__name__.split("_")[1], f"c={c}", *map(str, choice), KIND[dtype], precision, *words]),
        kernel, kinds | dict.fromkeys(integers, "i32"), constants | dict.fromkeys(absent), (*kinds, *divisible),
        choice.warps, choice.stages,
        # float32 "ieee" is done by tensor cores on AMD only
        dot=choice.dot, registers=choice.registers,
    )  # fmt: skip


def column_tops(c: int, log_params: bool) -> Case:
    kernel = chain_tiles._column_tops_kernel
    constants = {"LOG_PARAMS": log_params, "DTYPE": arithmetic(F32), "BLOCK_K": 32, "BLOCK_C": 64, "stride_bj": 1}
    pointers = {"bulk_ptr": "*fp32", "top_ptr": "*fp32"}
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    return Case(
        f"column tops c={c}{' log_params' if log_params else ''}",
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,), dot=False,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    """Those that need most registers in the first precision, linear segments among them."""
    found = [column_tops(200, False), column_tops(200, True)]
    for direction in (forward, backward):  # the narrowest load behind a float64 product
        wide = direction(tiles(16, 500, F64, 4), 16, F64, "ieee", log_params=False)
        found.append(replace(wide, name=f"{wide.name} bfloat16", arguments=wide.arguments | {"bulk_ptr": "*bf16"}))
    amd = target == "gfx942"  # which has twice as many registers
    for c, m in [(60, 1), (200, 1), (32, 500), (200, 500)] + [(60, 500), (128, 500)] * (not amd):
        choice = tiles(c, m, F32, 4)
        precision = precisions(target, choice, c, F32)[0]
        options = {"homogeneous": choice.whole and (c <= 32 or not amd), "ends": True, "log_params": True}
        found += [direction(choice, c, F32, precision, **options) for direction in (forward, backward)]
        if m > 1:
            found.append(forward(choice, c, F32, precision, log_params=False, segment=True))
    return found
