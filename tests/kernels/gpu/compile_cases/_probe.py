"""Kernels whose reports are known, which the reports of all others rest on."""

import os

import triton
import triton.language as tl

from tests.kernels.gpu.compiled import Case


@triton.jit
def crowded(a_ptr, b_ptr, SIZE: tl.constexpr):
    """More live numbers than registers: each row is kept until all have been read."""
    square = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + square)
    tl.store(b_ptr + square, a + tl.sum(tl.sum(a, 0), 0))


@triton.jit
def crowded_loop(a_ptr, b_ptr, SIZE: tl.constexpr):
    """More live numbers than registers from turn to turn."""
    square = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + square)
    for _ in tl.range(0, 100):
        a = a * 0.5 + tl.sum(tl.sum(a, 0), 0)
    tl.store(b_ptr + square, a)


@triton.jit
def product(a_ptr, b_ptr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    square = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + square)
    tl.store(b_ptr + square, tl.dot(a, a, input_precision=PRECISION))


class Abort:
    """What a compiler that dies looks like."""

    @property
    def arg_names(self) -> list[str]:
        os.abort()


def cases(target: str) -> list[Case]:
    matrices = {"a_ptr": "*fp32", "b_ptr": "*fp32"}
    exact = {"SIZE": 64, "PRECISION": "ieee"}
    return [
        Case("spills", crowded, matrices, {"SIZE": 128}, warps=1, dot=False),
        Case("spills in a loop", crowded_loop, matrices, {"SIZE": 128}, warps=1, dot=False),
        Case("dies", Abort(), matrices, {}),
        Case("unknown argument", product, matrices | {"c_ptr": "*fp32"}, exact),
        Case("no tensor cores", product, matrices, exact | {"SIZE": 32}),
        Case("fast", product, matrices, exact | {"PRECISION": "tf32"}, ("a_ptr", "b_ptr")),
        Case("too large", product, dict.fromkeys(matrices, "*fp64"), exact | {"SIZE": 128}, warps=8),
    ]
