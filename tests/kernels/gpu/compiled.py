"""Compiles all kernels for a device that is not here: `python -m tests.kernels.gpu.compiled sm_90` prints JSON lines.

With a number after it, those of one call in so many.

Public functions call them through Triton's own JIT on CPU tensors, with a driver that launches nothing: arguments are
specialized and bound as on a device. Compilers are in Triton's wheel.
"""

import json
import sys
from functools import partial
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import logchain
from tests.kernels.gpu.steps import call_chain, call_matrices

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)
}  # fmt: skip


LENGTHS = torch.full((40,), 9)
product, matmul = partial(call_chain, logchain.product), partial(call_matrices, logchain.matmul, 2, 5)
CALLS = {
    "c=16, lengths, pieces": partial(product, 40, 9, 16, lengths=LENGTHS, memory_budget=140_000),
    "c=64, bfloat16, log_params": partial(product, 40, 9, 64, torch.bfloat16, log_params=True),
    "c=64, float64": partial(product, 40, 9, 64, torch.float64),
    "c=200, from both ends": partial(product, 40, 9, 200),
    "c=200, paths": partial(call_chain, logchain.viterbi, 40, 9, 200),
    "c=200, from one end": partial(product, 400, 9, 200),
    "c=300": partial(product, 4, 9, 300),
    "separate, c=64, lengths, log_params": partial(product, 40, 9, 64, separate=True, lengths=LENGTHS, log_params=True),
    "separate, c=200": partial(product, 40, 9, 200, separate=True),
    "matmul, c=64, bfloat16": partial(matmul, 64, 64, dtype=torch.bfloat16),
    "matmul, c=64, float64": partial(matmul, 64, 64, dtype=torch.float64),
    "matmul, c=200": partial(matmul, 200, 200),
    "matrix_product, c=16": partial(call_matrices, logchain.matrix_product, 2, 5, 16, 16),
    "prefix_products, c=16": partial(call_matrices, logchain.prefix_products, 2, 5, 16, 16),
}


def main(target: GPUTarget, every: int = 1) -> None:
    """Make one call in `every`, and print a line for each kernel."""
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0,
        get_device_interface=lambda: torch.cuda,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    torch.version.hip = "6" if target.backend == "hip" else None
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # results that nothing writes are 0
    logchain.kernels.on_gpu = lambda tensor: True
    run, known, current = JITFunction.run, set(), []

    def compile_only(self, *args, grid, warmup, **options):
        assert all(0 < size < 2**31 for size in grid), grid
        row = {"kernel": self.fn.__name__, "call": current[-1]}
        try:
            compiled = run(self, *args, grid=grid, warmup=True, **options)
            if compiled.hash not in known:
                known.add(compiled.hash)
                print(json.dumps(row | {"shared": compiled.metadata.shared}), flush=True)
        except Exception as error:
            print(json.dumps(row | {"error": f"{type(error).__name__}: {error}"[-1000:]}), flush=True)

    JITFunction.run = compile_only
    for name, call in list(CALLS.items())[::every]:
        current.append(name)
        call()


if __name__ == "__main__":
    main(TARGETS[sys.argv[1]], *map(int, sys.argv[2:]))
