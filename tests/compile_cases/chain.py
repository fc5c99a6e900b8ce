"""Every configuration of the vector chains that their launchers choose, forward, backward and segment products."""

from dataclasses import replace
from itertools import product

import torch

from logchain.kernels.gpu import backward_chain, chain_step, forward_chain
from logchain.kernels.gpu.chain_step import Tiles, arithmetic, tiles
from logchain.kernels.gpu.launch import common_width
from tests.compiled import Case

F32, F64 = torch.float32, torch.float64

# states: the largest of each tile, those that 16 does not divide, and odd ones
STATES = [16, 17, 32, 33, 60, 64, 100, 101, 128, 200, 201, 256, 512, 1024, 2048, 4096]
MEMBERS = [1, 8, 500]


def choices(dtype: torch.dtype, transposed: bool) -> list[tuple[Tiles, int]]:
    """The configurations that can be chosen, each with the states of a chain that gets it, aligned and not."""
    found = {}
    for c, m in product(STATES, MEMBERS):
        if dtype == F64 and c > 2048:
            continue  # works, with 16 spills: no tile is smaller
        alignment = 16 if c % 16 == 0 else common_width(c)
        choice = tiles(c, m, dtype, min(alignment, 4), transposed=transposed)
        if choice.dot or alignment == 16:
            found[choice, alignment] = c
    return [(choice, c) for (choice, _), c in found.items()]


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
    pointers = ["x", "message", "bulk", "rescued:i64", "log_norm:fp64", "weight", "ahead", "grad", "start", "r"]
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
    kernel = chain_step._column_tops_kernel
    constants = {"LOG_PARAMS": log_params, "DTYPE": arithmetic(F32), "BLOCK_K": 32, "BLOCK_C": 64, "stride_bj": 1}
    pointers = {"bulk_ptr": "*fp32", "top_ptr": "*fp32"}
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    return Case(
        f"column tops c={c}{' log_params' if log_params else ''}",
        kernel, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,), dot=False,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    """Every tile in every precision, linear and logarithmic in turn, by hand; in the tests, those that need most."""
    found = []
    for direction, dtype in product((forward, backward), (F32, F64)):
        for choice, c in choices(dtype, direction is backward):
            for log_params, precision in enumerate(precisions(target, choice, c, dtype), direction is forward):
                case = direction(choice, c, dtype, precision, log_params=bool(log_params % 2))
                found.append(replace(case, by_hand=True))
    for direction in (forward, backward):  # the narrowest load behind a float64 product
        wide = direction(tiles(16, 500, F64, 4), 16, F64, "ieee", log_params=False)
        found.append(replace(wide, name=f"{wide.name} bfloat16", arguments=wide.arguments | {"bulk_ptr": "*bf16"}))
    found += [column_tops(200, False), column_tops(200, True)]
    for c, m in product([16, 32, 60, 128, 200], [1, 500]):
        choice = tiles(c, m, F32, 4)
        precision = precisions(target, choice, c, F32)[0]
        held = choice.whole and (c <= 32 or target != "gfx942")
        options = {"homogeneous": held, "ends": True, "log_params": True}
        some = [forward(choice, c, F32, precision, **options), backward(choice, c, F32, precision, **options)]
        if m > 1:
            some.append(forward(choice, c, F32, precision, log_params=False, segment=True))
        # the others take their way with more registers, of which AMD has twice as many
        room = c == 16 or (m == 1 and c in (32, 128)) or (target == "gfx942" and c in (60, 128) and m > 1)
        found += [replace(case, by_hand=room) for case in some]
    return found
