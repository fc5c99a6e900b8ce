"""The tiles of the log-semiring product: all options on, and with the fastest loads."""

from logchain.kernels.gpu import line_maxima, log_matmul
from logchain.kernels.gpu.log_matmul_tiles import TILES
from tests.kernels.gpu.compiled import Case

REGISTERS, WALK, MEMORY = range(3)
TYPES = {"float32": "*fp32", "float64": "*fp64", "bfloat16": "*bf16"}


def cases(target: str) -> list[Case]:
    exact = "tf32x3" if target.startswith("sm_") else "ieee"
    found = []
    for shape, tile in TILES[target].items():
        dtype, precision = ("float64", "ieee") if "double" in shape else ("float32", exact)
        aligned = shape in ("short", "medium", "middle", "large")
        options = {"aligned": aligned, "precision": precision}
        maxima = {"short": REGISTERS, "large": MEMORY}.get(shape, WALK)
        found.append(_case(shape, tile, dtype, maxima=maxima, **options))
        if shape != "large":
            found.append(_case(f"{shape} in place", tile, dtype, maxima=maxima, in_place=True, **options))
        if shape in ("tiny", "small", "tiny double", "double"):
            found.append(_case(f"{shape} in registers", tile, dtype, maxima=REGISTERS, **options))
    large = TILES[target]["large"]
    options = {"aligned": True, "maxima": MEMORY}
    if target.startswith("sm_"):  # kernels for AMD take another logarithm, where torch is for AMD
        found.append(_case("large fast", large, "float32", precision="tf32", **options))
    found.append(_case("large bfloat16", large, "bfloat16", precision=exact, **options))
    found.append(_case("large transposed", large, "float32", precision=exact, transposed=True, **options))
    # on a tree: maxima are given and handed on
    for shape in ("odd", "middle", "large", "double"):
        dtype, precision = ("float64", "ieee") if "double" in shape else ("float32", exact)
        tree = {"maxima": MEMORY, "aligned": shape in ("middle", "large"), "precision": precision, "lines": True}
        found.append(_case(f"{shape} of a tree", TILES[target][shape], dtype, **tree))
        if shape == "middle":
            found.append(_case(f"{shape} of a tree in place", TILES[target][shape], dtype, in_place=True, **tree))
    for in_place in (False, True):
        name = "redone in place" if in_place else "redone"
        found.append(_case(name, large, "float32", precision=exact, in_place=in_place, redo=True))
        found.append(_case(name, TILES[target]["double"], "float64", precision="ieee", in_place=in_place, redo=True))
        name = f"{name} of a tree"
        found.append(_case(name, large, "float32", precision=exact, in_place=in_place, redo=True, lines=True))
    # the narrowest load behind a float64 product
    double = TILES[target]["double"]
    found.append(_case("double times bfloat16", double, "float64", precision="ieee", maxima=WALK, b_type="*bf16"))
    found += [_maxima(dtype, aligned) for dtype, aligned in (("float32", True), ("float32", False), ("float64", True))]
    return found


def _case(
    name,
    tile,
    dtype,
    *,
    precision,
    maxima=None,
    aligned=False,
    transposed=False,
    in_place=False,
    redo=False,
    lines=False,
    b_type=None,
) -> Case:
    """All options on. `aligned`: loads of four entries. `redo`: the kernel that comes after. `lines`: on a tree."""
    kernel = log_matmul.redo_kernel if redo else log_matmul.product_kernel
    result = "*fp64" if dtype == "float64" else "*fp32"
    types = {"a_ptr": result if in_place else TYPES[dtype], "b_ptr": b_type or TYPES[dtype], "rescued_ptr": "*i64"}
    pointers = ("out_ptr", "room_ptr", "maxima_ptr", "a_top_ptr", "b_top_ptr", "out_top_ptr", "out_column_ptr")
    types |= dict.fromkeys(pointers, result)
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TILE": tile, "PRECISION": precision}
    constants |= {"MAXIMA": maxima} | _layout(aligned, transposed) | ({"out_ptr": None} if in_place else {})
    constants |= {} if lines else {"out_column_ptr": None}
    title = f"{name} {dtype} {precision}"
    warps, stages = (4, 1) if redo else (tile.warps, tile.stages)
    return _made(title, kernel, types, constants, aligned, warps, stages)


def _maxima(dtype, aligned) -> Case:
    types = {"a_ptr": TYPES[dtype], "b_ptr": TYPES[dtype], "top_ptr": TYPES[dtype]}
    kept = dict(line_maxima._MAXIMA)
    warps = kept.pop("num_warps")
    name = f"maxima {dtype}{' aligned' if aligned else ''}"
    constants = kept | _layout(aligned, transposed=False)
    return _made(name, line_maxima.maxima_kernel, types, constants, aligned, warps, 3, dot=False)


def _layout(aligned, transposed) -> dict[str, object]:
    ones = ("am", "bk") if transposed else ("ak", "bn")
    return {"LAYOUT": " ".join(ones) if aligned else ""} | {f"stride_{axis}": 1 for axis in ones}


def _made(name, kernel, types, constants, aligned, warps, stages, **options) -> Case:
    """Arguments that are left are integers."""
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    if kernel is log_matmul.redo_kernel:  # which is made for any strides
        constants = {key: value for key, value in constants.items() if not key.startswith("stride")}
    arguments = {key: types.get(key, "i32") for key in kernel.arg_names if key not in constants}
    pointers = tuple(key for key in ("a_ptr", "b_ptr", "out_ptr") if aligned and key in arguments)
    return Case(name, kernel, arguments, constants, pointers, warps, stages, **options)
