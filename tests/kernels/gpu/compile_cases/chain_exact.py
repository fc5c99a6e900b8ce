"""The exact recomputation of chains: wide rows, and every kind of entry."""

from logchain.kernels.gpu import chain_exact, chain_exact_counts, launch
from tests.kernels.gpu.compiled import Case

POINTERS = {
    "start": "fp64", "ends": "i64", "log_norm": "fp64", "weight": "fp64", "doubt": "i1", "redone": "i1", "marked": "i1",
    "exponent": "i32",
}  # fmt: skip


def case(kernel, c: int, *, double: bool = False, log_params: bool = False, bulk: str = "") -> Case:
    kind = "fp64" if double else "fp32"
    names = [name[:-4] for name in kernel.arg_names if name.endswith("_ptr")]
    pointers = {f"{name}_ptr": f"*{bulk if bulk and name == 'bulk' else POINTERS.get(name, kind)}" for name in names}
    form = chain_exact.Form(c, log_params)
    constants = {
        "C": c,
        "LOG_PARAMS": log_params,
        "FORM": form,
        "stride_xc": 1,
        "stride_bj": 1,
        "stride_dc": 1,
        "stride_oj": 1,
    }
    constants |= {"SUMMED": True, "BY_LOG": log_params}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    words = [kernel.__name__.split("_")[1], f"c={c}", kind, bulk] + ["log_params"] * log_params
    warps = 4 if "counts" in words else chain_exact.warps(c)
    return Case(
        " ".join(filter(None, words)), kernel, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,),
        warps, dot=False, registers=launch.all_registers(warps)["maxnreg"],
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    found = []
    for kernel in (chain_exact._forward_kernel, chain_exact._backward_kernel):
        found += [case(kernel, c) for c in (33, 200, 4096)] + [case(kernel, c, double=True) for c in (17, 200, 2048)]
        found += [case(kernel, 200, log_params=True), case(kernel, 64, double=True, bulk="bf16")]
    counts = chain_exact_counts._counts_kernel
    return [*found, case(counts, 200), case(counts, 33, double=True), case(counts, 200, log_params=True)]
