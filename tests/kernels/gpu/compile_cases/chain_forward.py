"""The forward recursion with shared matrices: the widest tiles, odd sizes, logarithms, lengths and float64."""

import torch

from logchain.kernels.gpu import chain_backward, chain_forward, chains
from tests.kernels.gpu.compiled import Case
from tests.kernels.gpu.recorded import recorded


def chain(v, m, c, *, g=1, dtype=torch.float32, log_params=False, lengths=False, half=False) -> chains.Operands:
    """A chain of the public layout (m, v, c), with a matrix a step; `half`: x and matrices in bfloat16."""
    given = torch.bfloat16 if half else dtype
    x = torch.empty(g, m, v, c, dtype=given, device="cuda").permute(2, 0, 1, 3)
    bulk = torch.empty(v - 1, g, c, c, dtype=given, device="cuda")
    start = torch.empty(g, m, c, dtype=torch.float64, device="cuda")
    ends = torch.empty(g, m, dtype=torch.int64, device="cuda") if lengths else None
    return chains.Operands(x, bulk, start, ends, log_params, dtype)


def forward(target: str, v: int, m: int, c: int, **options) -> list[Case]:
    """The launches of one call that keeps messages."""

    def call() -> None:
        operands = chain(v, m, c, **options)
        messages = torch.empty(v, 1, m, c, dtype=operands.dtype, device="cuda")
        chain_forward.forward(operands, messages, torch.empty(1, m, dtype=torch.float64, device="cuda"))

    return recorded(target, " ".join([f"c={c}", *(f"{name}={value}" for name, value in options.items())]), call)


def backward(target: str, v: int, m: int, c: int, **options) -> list[Case]:
    """The launches of one call for all gradients but those of matrices, with what counts need."""

    def call() -> None:
        operands = chain(v, m, c, **options)

        def new(*sizes, dtype=operands.dtype):
            return torch.empty(*sizes, dtype=dtype, device="cuda")

        chain_backward.backward(
            operands, new(v, 1, m, c), new(1, m, dtype=torch.bool), new(1, m, dtype=torch.float64), new(1, m),
            grad_x=new(1, m, v, c).permute(2, 0, 1, 3), grad_start=new(1, m, c), r=new(v, 1, m, c), final=None,
        )  # fmt: skip

    return recorded(target, " ".join([f"c={c}", *(f"{name}={value}" for name, value in options.items())]), call)


def cases(target: str) -> list[Case]:
    found = forward(target, 40, 500, 200)
    options = [{"log_params": True, "lengths": True}, {"dtype": torch.float64}, {"half": True}]
    for c, some in [(64, {}), (199, {}), (256, {}), *((200, some) for some in options)]:
        found += [case for case in forward(target, 40, 500, c, **some) if "prepare" not in case.name]
    return found
