"""The tiles of the log-semiring product that need most registers: all options on, and with the fastest loads."""

from collections.abc import Iterator
from dataclasses import replace

from logchain.kernels.gpu import log_matmul
from logchain.kernels.gpu.log_matmul_tiles import TILES
from tests.kernels.gpu.compiled import Case

STRIDES = [f"stride_{name}" for name in "ag ap am ak bg bp bk bn og op om on atg atp btg btp otg otp".split()]
WIDTHS = "M N K AM AK BK BN OM ON".split()
TYPES = {"float32": "*fp32", "float64": "*fp64", "bfloat16": "*bf16"}


def cases(target: str) -> list[Case]:
    precisions = ("tf32x3", "tf32") if target.startswith("sm_") else ("ieee", "tf32")
    found = []
    for shape, tile in TILES[target].items():
        double = shape in ("tiny double", "double")
        for precision in ("ieee",) if double else precisions:
            found += _cases(shape, tile, "float64" if double else "float32", precision)
    others = {"aligned": True, "precision": precisions[0]}
    large, rows = TILES[target]["large"], TILES[target]["rows"]
    found.append(_case("large bfloat16", large, "bfloat16", **others))
    found.append(_case("rows bfloat16 transposed", rows, "bfloat16", **others, transposed=True))
    # the narrowest load behind a float64 product
    mixed = _case("double times bfloat16", TILES[target]["double"], "float64", precision="ieee")
    found.append(replace(mixed, arguments=mixed.arguments | {"b_ptr": "*bf16"}))
    found.append(_case("rows transposed", rows, "float32", **others, transposed=True))
    found.append(_case("rows transposed in place", rows, "float32", **others, transposed=True, whole=True))
    found.append(_case("rows transposed in place, walking", rows, "float32", **others, transposed=True, whole=False))
    return [case for case in found if not _has_room(case, precisions[-1], target)]


def _has_room(case: Case, fast: str, target: str) -> bool:
    """Another case of the tile needs more registers; in TF32 only the rows come as close, on AMD none does."""
    precision, amd = case.constants["PRECISION"], target == "gfx942"
    alike = ["odd float32", "double float64", "rows bfloat16 transposed", "rows transposed", "rows transposed in place"]
    if amd:
        alike += ["tiny float32", "small float32", "medium float32", "tiny double float64"]
        alike += [f"{shape} {precision} in place" for shape in ("odd float32", "rows float32", "double float64")]
    another = case.name in alike or case.name.removesuffix(f" {precision}") in alike
    return another or (precision == fast and (amd or not case.name.startswith("rows")))


def _cases(shape, tile, dtype, precision) -> Iterator[Case]:
    name, aligned = f"{shape} {dtype} {precision}", shape in ("medium", "large", "rows")
    if shape != "rows":
        yield _case(name, tile, dtype, precision, aligned=aligned)
    if shape not in ("wide", "tall", "large"):
        yield _case(f"{name} in place", tile, dtype, precision, aligned=aligned, whole=True)
    if shape in ("odd", "rows", "double"):
        yield _case(f"{name} in place, walking", tile, dtype, precision, aligned=aligned, whole=False)


def _case(name, tile, dtype, precision, *, aligned=False, transposed=False, whole=None) -> Case:
    """All options on. `aligned`: loads of 16 bytes. `whole`: in place, with rows of one tile or of several."""
    kernel = log_matmul.forward_kernel if whole is None else log_matmul.in_place_kernel
    result = "*fp64" if dtype == "float64" else "*fp32"
    types = {"a_ptr": TYPES[dtype], "b_ptr": TYPES[dtype], "out_ptr": result, "scratch_ptr": result}
    types |= dict.fromkeys(("a_top_ptr", "b_top_ptr", "out_top_ptr"), result) | {"rescued_ptr": "*i64"}
    types |= dict.fromkeys(("batches", "p", "m", "n", "k", *STRIDES), "i32")
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "UNROLL": tile.unroll}
    constants |= {"DEPTH": tile.depth, "PRECISION": precision, "WHOLE": whole}
    ones = ("AM", "BK", "ON") if transposed else ("AK", "BN", "ON")
    constants |= {f"stride_{name.lower()}": 1 for name in ones}
    constants |= {f"WIDTH_{name}": 4 if aligned and name not in ones else 1 for name in WIDTHS}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    arguments = {name: types[name] for name in kernel.arg_names if name not in constants}
    divisible = tuple(name for name in ("a_ptr", "b_ptr", "out_ptr", "scratch_ptr") if aligned and name in arguments)
    return Case(name, kernel, arguments, constants, divisible, tile.warps, tile.stages)
