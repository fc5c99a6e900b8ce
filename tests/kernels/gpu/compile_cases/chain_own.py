"""Chains with matrices of their own: one tile and several, one part and several, forwards and backwards."""

from functools import partial

import torch

from logchain.kernels.gpu import chain_own
from tests.kernels.gpu.calls import F64, chain
from tests.kernels.gpu.compiled import Case
from tests.kernels.gpu.recorded import recorded


def call(
    c: int, parts: int, out: str | None, *, v: int = 3, g: int = 2, final: bool = False, transposed: bool = False,
    bulk: torch.dtype | None = None, **options,
) -> None:  # fmt: skip
    """Forwards, or backwards for `out`: "r", "entries" or "logs" of matrices, or "" without their gradient."""
    operands = chain(v, 1, c, g=g, **options)
    operands = operands._replace(bulk=operands.bulk.to(bulk or operands.bulk.dtype))
    operands = operands._replace(bulk=operands.bulk.mT) if transposed else operands
    messages, log_norm = operands.x.new_empty(v, g, 1, c), torch.empty(g, 1, dtype=F64, device="cuda")
    if out is None:
        chain_own.forward(operands, messages, log_norm, parts=parts)
        return
    r, grad = messages if out == "r" else None, torch.empty_like(operands.bulk) if out in ("entries", "logs") else None
    chain_own.backward(
        operands, messages, log_norm.bool(), log_norm, log_norm.float(), grad_x=torch.empty_like(operands.x),
        grad_start=messages[0], r=r, final=messages[1] if final else None, grad_bulk=grad, by_log=out == "logs",
        parts=parts,
    )  # fmt: skip


def cases(target: str) -> list[Case]:
    """Those that need most registers or memory."""
    most = {"lengths": True, "log_params": True}
    found: list[Case] = []

    def case(c: int, parts: int = 1, out: str | None = None, **options) -> None:
        words = [f"{name}={value}" for name, value in options.items()]
        name = " ".join([f"c={c} parts={parts}", *[f"out={out}"] * (out is not None), *words])
        made = recorded(target, name, partial(call, c, parts, out, **options))
        found.extend(case for case in made if case.name.startswith("own_"))

    case(16)
    case(64)
    case(64, bulk=torch.bfloat16, **most)
    case(61, dtype=F64, **most)
    case(64, same=True)
    case(200, **most)
    case(1024, 64, **most)
    case(1000, 63, dtype=F64, same=True)
    case(4096, 128, **most)
    case(16, out="entries")
    case(64, out="logs", final=True, **most)
    case(61, out="entries", dtype=F64)
    case(64, out="r", same=True)
    case(200, out="logs", **most)
    case(1024, 64, "logs", final=True, **most)
    case(1024, 128, "logs", final=True, **most)
    case(1024, 64, "entries")
    case(1024, 64, "")
    case(200, out="r", dtype=F64, same=True)
    case(200, out="logs", dtype=F64)
    case(1000, 63, "entries", dtype=F64)
    case(1000, 63, "r", same=True, transposed=True)
    return found
