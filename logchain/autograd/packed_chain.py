"""Sequences that lie one behind the other, walked in one call where the loops in C compute: nothing is padded.

That is so for one matrix for all steps. Derivatives of gradients, and weights too large for the arithmetic, take the
padded pieces of `Packed`.
"""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..operands import arithmetic_dtype, differentiated, exceeds, is_plain
from ..rescues import report_chains
from ..schedules.packed import Packed
from . import chain as chain_functions
from .chain import if_needed
from .operator import call


def taken(packed: Packed, log_params: object, validate: object = False) -> bool:
    """Whether all sequences are walked in one call; otherwise the pieces say what is wrong with an option, too."""
    operands = packed.x, packed.bulk, packed.p0
    in_c = all(kernels.in_c(operand) for operand in operands) and packed.x.numel() > 0
    return in_c and len(packed.bulk) == 1 and is_plain(operands) and isinstance(log_params, bool) and validate is False


def log_norm(packed: Packed, log_params: bool) -> Tensor:
    """The log-partition [n], in float64."""
    operands = packed.x, packed.bulk, packed.p0
    if differentiated(*operands):
        found: Tensor = call(_LogPartition, *operands, packed, log_params)
        return found
    return _forward(chain_of(packed, log_params), keep=False)[0].view(-1)


def posteriors(packed: Packed, log_params: bool, counted: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Posteriors of the states [total, c], expected counts [1, c, c] if they are wanted, the log-partition [n]."""
    chain = chain_of(packed, log_params, by_log=True)
    kept = _forward(chain, keep=True)
    states, counts, _ = _backward(chain, kept, torch.ones_like(kept[0]), (True, counted))
    assert states is not None
    return states, counts, kept[0].view(-1)


class _LogPartition(torch.autograd.Function):
    """x, bulk, p0, packed, log_params -> the log-partition [n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bulk: Tensor, p0: Tensor, packed: Packed, log_params: bool) -> Tensor:
        kept = _forward(chain_of(packed, log_params), keep=True)
        ctx.packed, ctx.log_params = packed, log_params
        ctx.save_for_backward(x, bulk, p0, *kept)
        return kept[0].view(-1).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bulk, p0, *kept = ctx.saved_tensors
        packed, log_params, needs = ctx.packed.of(x, bulk, p0), ctx.log_params, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or exceeds(grad, arithmetic_dtype(x, bulk, p0)):
            return *_through_pieces(packed, log_params, grad, needs), None, None
        chain = chain_of(packed, log_params)
        grad_x, grad_bulk, start = _backward(chain, kept, grad, needs)
        grad_p0 = start if p0.dim() > 1 else start.sum(0)
        grad_x = None if grad_x is None else grad_x.to(x.dtype)
        grad_bulk = None if grad_bulk is None else grad_bulk.to(bulk.dtype)
        return *if_needed((grad_x, grad_bulk, grad_p0.to(p0.dtype)), needs), None, None


def _through_pieces(packed: Packed, log_params: bool, grad: Tensor, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        operands = [tensor if create else tensor.detach().requires_grad_(need) for tensor, need in
                    zip((packed.x, packed.bulk, packed.p0), needs, strict=True)]  # fmt: skip
        pieces = packed.of(*operands)
        found = pieces.by_sequence([chain_functions.log_norm(*piece, log_params) for piece in pieces])
        wanted = [operand for operand, need in zip(operands, needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(found, wanted, grad, create_graph=create))
    return tuple(next(gradients) if need else None for need in needs)


def chain_of(packed: Packed, log_params: bool, *, by_log: bool = False) -> Chain:
    """The chain of sequences that are walked where they lie."""
    operands = packed.x, packed.bulk, packed.p0
    ends, dtype = packed.lengths.view(1, -1, 1), arithmetic_dtype(*operands)
    p0 = packed.p0 if packed.p0.dim() > 1 else packed.p0[None]
    return Chain(packed.x, packed.bulk, p0, ends, log_params, dtype, by_log, starts=packed.starts)


def _forward(chain: Chain, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with kernels.arithmetic_on(chain.x):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.chain_kernels(chain.x).forward(chain, keep=keep, steps=0)
    report_chains(found[-1])
    return found


def _backward(
    chain: Chain, kept: Any, grad: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The gradients of x, of the matrix (1, c, c), and of the initial weights of each sequence (n, c)."""
    need_x, need_bulk, *_ = needs
    grad_x = torch.zeros(chain.x.shape, dtype=chain.dtype, device="cpu") if need_x else None
    grad_bulk = chain.new(1, 1, chain.c, chain.c) if need_bulk else None
    with kernels.arithmetic_on(chain.x):
        start: Tensor = kernels.chain_kernels(chain.x).backward(chain, *kept, grad.view(1, -1), grad_x, grad_bulk)
    return grad_x, None if grad_bulk is None else grad_bulk[0], start
