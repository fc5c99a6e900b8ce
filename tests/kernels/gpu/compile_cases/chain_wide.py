"""Chains that share wide matrices, forward and backward: each tile, one launch a chain and one a step."""

import torch

from logchain.kernels.gpu import chain_wide
from tests.kernels.gpu.calls import chain
from tests.kernels.gpu.compiled import Case
from tests.kernels.gpu.recorded import recorded


def both(target: str, c: int, *, v: int = 2, m: int = 500, transposed: bool = False, **options) -> list[Case]:
    """The launches of both directions, with all results; `transposed`: matrices that lie by columns."""

    def call() -> None:
        operands = chain(v, m, c, lengths=True, **options)
        operands = operands._replace(bulk=operands.bulk.mT) if transposed else operands
        messages = torch.empty(v, 1, m, c, dtype=operands.dtype, device="cuda")
        leaving, log_norm = torch.empty_like(messages[0]), torch.empty(1, m, dtype=torch.float64, device="cuda")
        chain_wide.forward(operands, messages, log_norm, leaving)
        chain_wide.backward(
            operands, messages, log_norm.bool(), log_norm, log_norm, grad_x=torch.empty_like(operands.x),
            grad_start=leaving, r=messages, final=leaving,
        )  # fmt: skip

    words = ["transposed"] * transposed + [f"{name}={value}" for name, value in options.items()]
    return list({case.name: case for case in recorded(target, " ".join([f"c={c} m={m}", *words]), call)}.values())


def cases(target: str) -> list[Case]:
    """Those that need most registers, scalar loads among them."""
    found = [case for case in both(target, 512, log_params=True) if "prepare" not in case.name]
    for c, some in [
        (1024, {"transposed": True}), (1024, {"half": True}), (2048, {}), (1001, {"log_params": True}),
        (512, {"m": 9}), (512, {"dtype": torch.float64}), (301, {"dtype": torch.float64}),
    ]:  # fmt: skip
        found += [case for case in both(target, c, **some) if "_step" in case.name]
    return found
