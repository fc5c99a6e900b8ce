"""The log-partition of a chain in pieces; only the forward messages between pieces are stored, the checkpoints.

Forward, each piece maps the message before it to the message after it. Backward, from the last piece to the first, the
forward messages of a piece are computed again from its checkpoint, and its backward message enters the piece before.

The device of p0 computes. Operands on the host are moved there a piece at a time, and their gradients back.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Message
from ..operands import Operands
from ..progress import bar
from ..rescues import report_chains
from .transfers import Gradient, pieces


class Checkpoints:
    """An `Algorithm` of `autograd.log_partition`: pieces of `every` transitions, of which the last may have fewer."""

    def __init__(self, operands: Operands, every: int, progress: bool = False) -> None:
        self._skeleton, self._progress, last = operands.skeleton(), progress, operands.x.shape[-2] - 1
        # ranges of transitions and of variables of each piece; no transition leads into the first variable of all
        stops = [*range(every, last, every), last]
        self._transitions = list(zip([0, *stops], stops, strict=False))
        self._variables = [(start and start + 1, stop + 1) for start, stop in self._transitions]
        self._longest = min(every, last + 1)

    def forward(self, *operands: Tensor, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The log-partition [*B] in float64, and saved: the same, and checkpoints (pieces - 1, g, m, c) if `keep`."""
        chain, p0, last = self._skeleton.of(*operands).dense_chain(), operands[1], len(self._variables) - 1
        checkpoints = p0.new_empty((last if keep else 0, chain.g, chain.m, chain.c), dtype=torch.float64)
        recomputed = torch.zeros(chain.g, chain.m, dtype=torch.bool, device=p0.device)
        message: Message | None = None
        with kernels.arithmetic_on(p0):
            for i, piece in self._pieces(chain, p0.device, range(last + 1), "forward"):
                residuals, message = kernels.forward(piece, message, leave=True)
                recomputed |= residuals.recomputed
                if keep and i < last:
                    checkpoints[i] = message.values
        assert message is not None
        report_chains(recomputed)
        log_norm = message.log_norm
        if chain.ends is not None:  # on a GPU lengths have not been checked
            log_norm = log_norm.masked_fill(((chain.ends < 1) | (chain.ends > chain.v))[..., 0], math.nan)
        value = chain.layout.batched(log_norm)
        return value.clone(), (value, checkpoints)

    def gradients(
        self, operands: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, p0 and bulk of `sum(grad * log_norm)`, None for one that is not needed."""
        (x, p0, bulk), (log_norm, checkpoints) = operands, saved
        chain = self._skeleton.of(*operands).dense_chain()
        layout = chain.layout

        def matrices(bulk: Tensor) -> Tensor:
            return layout.matrices(bulk)[: len(chain.bulk)]

        weight, norms = layout.grouped(grad), layout.grouped(log_norm)
        of_x, of_bulk = (operand if need else None for operand, need in ((x, needs[0]), (bulk, needs[2])))
        into_x = Gradient(of_x, layout.steps_first, self._variables, x.dtype, p0.device)
        into_bulk = Gradient(of_bulk, matrices, self._transitions, chain.dtype, p0.device)
        messages = p0.new_empty(self._longest + 1, chain.g, chain.m, chain.c, dtype=chain.dtype)
        scale, following = torch.zeros(2, *norms.shape, dtype=torch.float64, device=p0.device), None
        with kernels.arithmetic_on(grad):
            for i, piece in self._pieces(chain, p0.device, range(len(self._variables))[::-1], "backward"):
                entering = Message(checkpoints[i - 1], scale) if i > 0 else None
                residuals, _ = kernels.forward(piece, entering, keep=messages, leave=following is not None)
                residuals, into = residuals._replace(log_norm=norms), (into_x.piece(i), into_bulk.piece(i))
                following = kernels.backward(piece, residuals, weight, following, *into)
                into_x.put()
                into_bulk.put()
        assert following is not None
        grad_p0 = layout.states(following).sum_to_size(p0.shape).to(p0.dtype) if needs[1] else None
        return into_x.whole(), grad_p0, into_bulk.whole()

    def log_norm(self, *operands: Tensor) -> Tensor:
        """Raise the error of a second derivative."""
        raise RuntimeError("memory_budget: expected one derivative, got a second; pass None for two")

    def _pieces(
        self, chain: Chain, device: torch.device, order: Sequence[int], title: str
    ) -> Iterator[tuple[int, Chain]]:
        """The number and the chain of each piece, in this order; valid until the next is taken."""
        potentials = pieces(chain.x, [self._variables[i] for i in order], device)
        if len(chain.bulk) == 1:
            matrices: Iterator[Tensor] = repeat(chain.bulk.to(device))
        else:
            matrices = pieces(chain.bulk, [self._transitions[i] for i in order], device)
        for i, x, bulk in zip(bar(order, title, self._progress), potentials, matrices, strict=False):
            start, stop = self._variables[i]
            ends = None if chain.ends is None else (chain.ends - start).clamp(0 if i > 0 else 1, stop - start)
            yield i, replace(chain, x=x, bulk=bulk, ends=ends)
