"""Packed sequences with dense matrices on a CPU: one call of C takes all of them where they lie."""

import torch
from torch import Tensor

from .. import kernels
from ..chain import Chain as Query
from ..kernels.chain import Chain
from ..kernels.message import Kept
from ..rescues import report_chains


class PackedChain:
    """Packed sequences on a CPU as one `Chain` with `starts`, for kernels that walk sequences where they lie."""

    def __init__(self, packed: Query, *, by_log: bool = False) -> None:
        x, bulk, p0, _, log_params = packed.operands.dense
        p0 = p0 if p0.dim() > 1 else p0[None]
        ends = packed.lengths.view(1, -1, 1) if len(bulk) == 1 else packed.lengths.view(-1, 1, 1)
        self.chain = Chain(x, bulk, p0, ends, log_params, packed.dtype, by_log, starts=packed.starts)
        self._kernels = kernels.chain_kernels(x)

    def forward(self, keep: bool) -> Kept:
        """The log-partition of each sequence, and what the backward pass needs if it is to be kept."""
        chain = self.chain
        with kernels.arithmetic_on(chain.x):
            memory = kernels.messages_of(chain, chain.v) if keep else None
            residuals: Kept = self._kernels.forward(chain, keep=memory)[0]
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
        chain = self.chain
        ahead, behind = (chain.new(*chain.x.shape) for _ in range(2))
        with kernels.arithmetic_on(chain.x):
            log_norm: Tensor = kernels.load("cpu.messages").messages(chain, ahead, behind)
        return ahead, behind, log_norm.flatten().to(ahead.dtype)

    def backward(
        self, residuals: Kept, grad: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The gradients of x and bulk, None for one not needed, and of each sequence's initial weights (n, c)."""
        chain = self.chain
        grad_x = torch.zeros(chain.x.shape, dtype=chain.dtype, device="cpu") if needs[0] else None
        grad_bulk = torch.zeros(chain.bulk.shape, dtype=chain.dtype, device="cpu") if needs[1] else None
        weight = grad.reshape(chain.g, chain.m)
        with kernels.arithmetic_on(chain.x):
            start: Tensor = self._kernels.backward(chain, residuals, weight, None, grad_x, grad_bulk)
        return grad_x, grad_bulk, start
