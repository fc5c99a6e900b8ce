"""The max-plus recursion in the tiles that need most registers."""

from logchain.kernels.gpu import chain_max, launch
from tests.kernels.gpu.compiled import Case

KERNEL = chain_max._max_kernel


def case(c: int, m: int, *, double: bool = False, log_params: bool = False, bulk: str = "", same: bool = False) -> Case:
    kind = "fp64" if double else "fp32"
    pointers = {"x_ptr": f"*{kind}", "bulk_ptr": f"*{bulk or kind}", "start_ptr": "*fp64", "ends_ptr": "*i64"}
    pointers["message_ptr"] = f"*{kind}"
    block_s, block_k, warps = chain_max.tiles(c, m, double)
    constants = {
        "C": c, "LOG_PARAMS": log_params, "HELD": same and c <= 64, "BLOCK_S": block_s, "BLOCK_K": block_k,
        "stride_xc": 1, "stride_bj": 1,
    }  # fmt: skip
    integers = [name for name in KERNEL.arg_names if name not in pointers and name not in constants]
    words = [kind, bulk] + ["log_params"] * log_params + ["held"] * constants["HELD"]
    return Case(
        " ".join([f"max c={c} m={m}", *filter(None, words)]),
        KERNEL, pointers | dict.fromkeys(integers, "i32"), constants, (*pointers,), warps, dot=False,
        registers=launch.all_registers(warps)["maxnreg"],
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    found = [case(c, m) for c in (33, 200, 1025) for m in (1, 500)]
    found += [case(64, m, same=True) for m in (1, 500)] + [case(17, 500, same=True)]
    found += [case(200, 500, double=True), case(64, 500, double=True, same=True), case(2048, 1, double=True)]
    return [*found, case(200, 500, log_params=True), case(200, 500, double=True, bulk="bf16")]
