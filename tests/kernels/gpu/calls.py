"""Calls of the kernels' launchers with tensors of the public layouts, to be recorded, see `recorded`."""

import torch

from logchain.kernels.chain import Chain
from logchain.kernels.gpu import backward as gpu_backward
from logchain.kernels.gpu import (
    chain_backward,
    chain_counts,
    chain_long,
    chains,
    log_matmul,
)
from logchain.kernels.gpu import forward as gpu_forward

F32, F64 = torch.float32, torch.float64


def _new(*sizes: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="cuda")


def chain(
    v: int, m: int, c: int, *, g: int = 1, dtype: torch.dtype = F32, log_params: bool = False, lengths: bool = False,
    half: bool = False, same: bool = False,
) -> chains.Operands:  # fmt: skip
    """A chain of the public layout (n, v, c), with one matrix if `same`; `half`: x and matrices in bfloat16."""
    given = torch.bfloat16 if half else dtype
    x = _new(g, m, v, c, dtype=given).permute(2, 0, 1, 3)
    bulk = _new(1 if same else v - 1, g, c, c, dtype=given)
    ends = _new(g, m, dtype=torch.int64) if lengths else None
    return chains.Operands(x, bulk, _new(g, m, c, dtype=F64), ends, log_params, dtype)


def forward(module, v: int, m: int, c: int, **options) -> None:
    """Messages, all kept, and log-partitions by `chain_forward`, `chain_wide` or `chain_own`."""
    operands = chain(v, m, c, **options)
    module.forward(operands, _new(*operands.x.shape, dtype=operands.dtype), _new(*operands.x.shape[1:3], dtype=F64))


def backward(module, v: int, m: int, c: int, **options) -> None:
    """All gradients but those of matrices, with what counts need, by `chain_backward` or `chain_wide_backward`."""
    operands = chain(v, m, c, **options)
    sizes, sequences, kept = operands.x.shape, operands.x.shape[1:3], {"dtype": operands.dtype}
    found = chains.room(operands, 0)[:2] if module is chain_backward else ()
    module.backward(
        operands, _new(*sizes, **kept), _new(*sequences, dtype=torch.bool), _new(*sequences, dtype=F64),
        _new(*sequences), grad_x=_new(*sequences, v, c, **kept).permute(2, 0, 1, 3),
        grad_start=_new(*sizes[1:], **kept), r=_new(*sizes, **kept), final=None,
        **dict(zip(("bound", "level"), found, strict=False)),
    )  # fmt: skip


def _public(v: int, m: int, c: int) -> Chain:
    return Chain(_new(m, v, c).permute(1, 0, 2), _new(v - 1, c, c), _new(1, c), None, False, F32)


def log_norm(v: int, m: int, c: int) -> None:
    """The log-partitions, by all kernels that `logchain` launches for them."""
    gpu_forward.forward(_public(v, m, c))


def gradients(v: int, m: int, c: int) -> None:
    """Log-partitions and all gradients, likewise."""
    chain = _public(v, m, c)
    kept, _ = gpu_forward.forward(chain, keep=_new(v, 1, m, c))
    gpu_backward.backward(chain, kept, _new(1, m), None, _new(m, v, c).permute(1, 0, 2), _new(v - 1, c, c))


def counts(v: int, m: int, c: int, **options) -> None:
    """The gradient of matrices."""
    operands = chain(v, m, c, **options)
    messages, sequences = (_new(*operands.x.shape, dtype=operands.dtype) for _ in range(2)), operands.x.shape[1:3]
    left_out, out = _new(*sequences, dtype=torch.bool), _new(*operands.bulk.shape, dtype=operands.dtype)
    chain_counts.gradient(operands, *messages, _new(*sequences), left_out, out)


def long(v: int, m: int, c: int, segments: int, **options) -> None:
    """The log-partitions of few long chains."""
    chain_long.log_norm(chain(v, m, c, **options), segments)


def matmul(n: int, c: int) -> None:
    """Products of n pairs of matrices."""
    log_matmul.forward(_new(1, n, c, c), _new(1, n, c, c))


def level(n: int, c: int) -> None:
    """The same on a tree, whose nodes have their maxima."""
    tops, maxima, found = _new(2, 1, n), _new(2, 1, n, c), _new(1, n, 2, c)
    wanted = {"maxima": maxima, "out_top": found[:, :, 0], "out_column": found[:, :, 1]}
    log_matmul.forward(_new(1, n, c, c), _new(1, n, c, c), a_top=tops[0], b_top=tops[1], **wanted)
