"""Products of stacks: the largest tiles of each number of warps, and what computes segments again."""

from logchain.kernels.gpu import segment_product, segments
from tests.kernels.gpu.compiled import Case


def cases(target: str) -> list[Case]:
    """Configurations of `segments.products`."""
    fast = "ieee" if target == "gfx942" else "tf32x3"
    products = [(16, "fp32", "ieee"), (32, "fp32", fast), (64, "fp32", fast), (63, "fp32", fast), (32, "fp64", "ieee")]
    return [product(*each) for each in products] + [again(64, "fp32"), again(63, "fp64")]


def product(c: int, kind: str, precision: str) -> Case:
    """Matrices that are contiguous by rows."""
    kernel = segments._products_kernel
    warps, registers = segment_product.warps(c, kind == "fp64"), segment_product.registers(c)
    constants = {"STRIDE_K": c, "STRIDE_J": 1, "C": c, "PRECISION": precision, "WIDTH": 4 if c % 4 == 0 else 1}
    arguments = _arguments(kernel.arg_names, constants, kind)
    divisible = tuple(name for name in arguments if name.endswith("_ptr"))
    dot = precision.startswith("tf32")
    return Case(f"products c={c} {kind}", kernel, arguments, constants, divisible, warps, 1, dot, registers)


def again(c: int, kind: str) -> Case:
    """Rows of such matrices' products, again."""
    kernel, constants = segments._again_kernel, {"STRIDE_K": c, "STRIDE_J": 1, "C": c}
    arguments = _arguments(kernel.arg_names, constants, kind)
    divisible = tuple(name for name in arguments if name.endswith("_ptr"))
    return Case(f"again c={c} {kind}", kernel, arguments, constants, divisible, 1 if c <= 16 else 8, 1, dot=False)


def _arguments(names: list[str], constants: dict[str, object], kind: str) -> dict[str, str]:
    pointers = {"matrix": f"*{kind}", "out": f"*{kind}", "arrived": "*i32", "rescued": "*i64"}
    return {
        name: pointers.get(name[:-4], "*fp64") if name.endswith("_ptr") else "i32"
        for name in names
        if name not in constants
    }
