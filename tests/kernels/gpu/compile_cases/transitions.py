"""The gradient of the transitions: the tiles that need most registers, with the other choices in pairs."""

from logchain.kernels.gpu import transitions
from tests.kernels.gpu.compiled import Case

OPERANDS = ("messages_ptr", "r_ptr", "weight_ptr")
INTEGERS = ("g", "m", "c", "length", "batches", "stride_bs", "stride_bg", "stride_bk", "stride_bj", "stride_os",
            "stride_og", "stride_ok", "stride_oj")  # fmt: skip

# What `launch.precision` may say.
PRECISIONS = {target: ("tf32x3", "tf32") for target in ("sm_80", "sm_90")} | {"gfx942": ("ieee", "tf32")}


def cases(target: str) -> list[Case]:
    """Linear matrices need as many registers as logarithms of one matrix for all steps, small tiles fewer."""
    found = [product(200, PRECISIONS[target][0], True, "*fp32")]
    found += [product(200, precision, False, "*fp32") for precision in PRECISIONS[target]]
    found += [product(32, PRECISIONS[target][0], False, "*fp32"), product(200, "ieee", False, "*fp64")]
    return found + [few(64, False, "*fp32"), few(64, True, "*fp32"), few(64, False, "*fp64")]


def product(c: int, precision: str, aligned: bool, dtype: str) -> Case:
    tile = transitions.tiles(c, dtype == "*fp64")
    kernel = transitions._product
    constants = {
        "PRECISION": precision, "LIMIT": 60.0, "BLOCK_K": tile.rows, "BLOCK_J": tile.columns, "BLOCK_M": tile.terms,
    }  # fmt: skip
    types = dict.fromkeys((*OPERANDS, "top_ptr"), dtype) | dict.fromkeys(("span", "stride_op"), "i32")
    return _case(kernel, c, aligned, dtype, types, constants, tile, True, f"product {precision}")


def few(c: int, aligned: bool, dtype: str) -> Case:
    tile = transitions.few_tiles(c)
    constants = {"BLOCK_K": tile.rows, "BLOCK_J": tile.columns}
    return _case(transitions._few, c, aligned, dtype, dict.fromkeys(OPERANDS, dtype), constants, tile, False, "few")


def _case(kernel, c, aligned, dtype, types, constants, tile, dot, name) -> Case:
    """Aligned: linear matrices, one for each step. Not: logarithms in half precision, transposed, one for all steps."""
    types |= {"bulk_ptr": dtype if aligned else "*bf16", "out_ptr": dtype} | dict.fromkeys(INTEGERS, "i32")
    constants |= {"SUMMED": not aligned, "LOG_PARAMS": not aligned}
    constants |= dict.fromkeys(("WIDTH", "WIDTH_BULK", "WIDTH_OUT"), 4 if aligned and c > 1 else 1)
    ones = {"stride_bj", "stride_oj"} if aligned else {"stride_bk", "stride_oj"}
    ones |= {"m", "length"} if kernel is transitions._few and aligned else set()
    ones |= {"g"} if kernel is transitions._product and aligned else set()
    ones |= {"c"} if c == 1 else set()
    constants |= dict.fromkeys(ones, 1)
    arguments = {argument: kind for argument, kind in types.items() if argument not in ones}
    pointers = tuple(argument for argument, kind in types.items() if kind.startswith("*"))
    name = f"{name} {dtype} c={c} {'linear' if aligned else 'logs, summed'}"
    return Case(name, kernel, arguments, constants, pointers, tile.warps, tile.stages, dot)
