"""Packed sequences with dense matrices on a CPU: one call of C reads all of them where they lie."""

import torch
from torch import Tensor

from .. import kernels
from ..chain import Chain as Query
from ..kernels.chain import Chain
from ..kernels.message import Kept
from ..rescues import report_chains


class PackedChain:
    """Packed sequences on a CPU as one `Chain` with `starts`, and the kernels' results for it."""

    def __init__(self, packed: Query, *, by_log: bool = False) -> None:
        x, bulk, p0, _, log_params = packed.operands.dense
        ends = packed.lengths.view(1, -1, 1) if len(bulk) == 1 else packed.lengths.view(-1, 1, 1)
        p0 = p0 if p0.dim() > 1 else p0[None]
        self.chain = Chain(x, bulk, p0, ends, log_params, packed.dtype, by_log, starts=packed.starts)

    def forward(self, keep: bool) -> Kept:
        """The log-partition of each sequence, and if `keep` what the backward pass needs."""
        chain = self.chain
        with kernels.arithmetic_on(chain.x):
            memory = kernels.messages_of(chain, chain.v) if keep else None
            residuals: Kept = kernels.chain_kernels(chain.x).forward(chain, keep=memory)[0]
        report_chains(residuals.redone)
        return residuals

    def posteriors(self, counted: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Posteriors [total, c], expected transitions in the shape of `bulk` if `counted`, log-partitions [n]."""
        residuals = self.forward(True)
        states, counts, _ = self.backward(residuals, torch.ones_like(residuals.log_norm), (True, counted))
        assert states is not None
        return states, counts, residuals.log_norm.flatten().to(states.dtype)

    def messages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward messages [total, c] as natural logarithms, and log-partitions [n]."""
        forward, backward = (self.chain.new(*self.chain.x.shape) for _ in range(2))
        with kernels.arithmetic_on(self.chain.x):
            log_norm: Tensor = kernels.load("cpu.messages").messages(self.chain, forward, backward)
        return forward, backward, log_norm.flatten().to(forward.dtype)

    def backward(
        self, residuals: Kept, grad: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The gradients of x and bulk, None for one not needed, and of each sequence's initial weights (n, c)."""
        chain, weight = self.chain, grad.reshape(self.chain.g, self.chain.m)
        grad_x, grad_bulk = (
            torch.zeros_like(operand, dtype=chain.dtype, memory_format=torch.contiguous_format) if need else None
            for operand, need in zip((chain.x, chain.bulk), needs, strict=False)
        )
        with kernels.arithmetic_on(chain.x):
            scan = kernels.chain_kernels(chain.x).backward
            start: Tensor = scan(chain, residuals, weight, None, grad_x, grad_bulk)
        return grad_x, grad_bulk, start
