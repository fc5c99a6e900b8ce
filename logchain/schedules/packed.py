"""Packed sequences: of different lengths, one behind the other, as `cu_seqlens` says.

On a CPU one call walks all of them where they lie. Other devices, derivatives of gradients, and long sequences that are
too few for the threads take padded batches of sequences of similar lengths.
"""

from collections.abc import Iterator
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_flag, check_has_values, check_signs, check_tensor
from ..kernels.chain import Chain
from ..kernels.message import Kept
from ..kernels.weights import Weights
from ..operands import arithmetic_dtype, is_plain
from ..rescues import report_chains
from .choose import Size, choose

# how many times its length a sequence may be padded to
_PADDING = 1.25


class Piece(NamedTuple):
    """A padded batch of k sequences of similar `lengths` (k), None for the same: `x` (k, v, c), `bulk` and `p0`."""

    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor | None


class Packed:
    """Packed sequences: `x` [total, c], `bulk` [1 or total, c, c], `p0` [c] or [n, c].

    Sequence i has the rows from `cu_seqlens[i]` to before `cu_seqlens[i + 1]`; `starts` and `lengths` (n) lie on the
    host. Iteration gives `Piece`s in order of length; `by_sequence`, `by_row` and `by_step` put what is computed from
    each of them back into the caller's order.
    """

    def __init__(
        self,
        x: Tensor,
        bulk: Tensor,
        p0: Tensor,
        cu_seqlens: Tensor,
        lengths: object,
        log_params: bool,
        prefix: str = "",
    ) -> None:
        check_flag("log_params", log_params)
        if lengths is not None:
            raise ValueError("lengths: expected None beside cu_seqlens, which holds them")
        self.starts, ends = row_bounds(x, cu_seqlens)
        _check_parameters(bulk, p0, len(x), len(self.starts), x.shape[-1])
        self.x, self.bulk, self.p0, self.lengths = x, bulk, p0, ends - self.starts
        check_signs(bulk if len(x) > len(ends) else None, p0, log_params, prefix)

    def of(self, x: Tensor, bulk: Tensor, p0: Tensor) -> "Packed":
        """The same sequences with other operands of the same shapes."""
        packed = copy(self)
        packed.x, packed.bulk, packed.p0 = x, bulk, p0
        return packed

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, bulk and p0."""
        return self.x, self.bulk, self.p0

    def weights(self) -> list[Weights]:
        """The weights that are read: no transition leads into a first row."""
        read = torch.ones(len(self.x), dtype=torch.bool, device=self.bulk.device)
        read[self.starts.to(read.device)] = False
        read = read if len(self.bulk) == len(self.x) else read.any(0, keepdim=True)
        return [Weights("bulk", self.bulk, read), Weights("p0", self.p0)]

    @property
    def in_place(self) -> bool:
        """Whether the kernels can walk the sequences where they lie, as they can on a CPU."""
        return is_plain(self.operands) and self.x.numel() > 0 and all(kernels.in_c(one) for one in self.operands)

    @property
    def stays(self) -> bool:
        """Whether the kernels walk the sequences where they lie: few long ones are cut into segments as batches."""
        return self.in_place and not self._in_segments

    @cached_property
    def _in_segments(self) -> bool:
        n, v, c = len(self.lengths), int(self.lengths.max()), self.x.shape[-1]
        own = len(self.bulk) > 1
        if own and len(self._groups) < n:  # matrices would have to be copied
            return False
        size = Size(n, v, c, arithmetic_dtype(*self.operands).itemsize, not own, lengths=False)
        return choose(size, False, "auto")[0].segments > 1

    def walks_in_place(self, log_params: object) -> bool:
        """Whether kernels for one matrix take the rows where they lie; padded batches check `log_params`."""
        return self.in_place and len(self.bulk) == 1 and isinstance(log_params, bool)

    @cached_property
    def _groups(self) -> list[Tensor]:
        """The sequences of each piece, by number."""
        order = torch.argsort(self.lengths, descending=True, stable=True)
        groups, first = [], 0
        longest = self.lengths[order].tolist()
        for i in range(1, len(order) + 1):
            if i == len(order) or longest[i] * _PADDING < longest[first]:
                groups.append(order[first:i])
                first = i
        return groups

    def __iter__(self) -> Iterator[Piece]:
        return map(self._piece, self._groups)

    def pieces(self, mask: Tensor) -> Iterator[tuple[Tensor, Piece]]:
        """The numbers of sequences, and the piece they make, of all sequences in a mask (n)."""
        for group in self._groups:
            members = group[mask[group]]
            if len(members):
                yield members, self._piece(members)

    def _piece(self, members: Tensor) -> Piece:
        p0 = self.p0 if self.p0.dim() == 1 else self.p0[members.to(self.p0.device)]
        lengths = self.lengths[members]
        if len(members) == 1:  # views
            start = int(self.starts[members])
            end = start + int(lengths)
            bulk = self.bulk if len(self.bulk) == 1 else self.bulk[start + 1 : end].unsqueeze(0)
            return Piece(self.x[start:end].unsqueeze(0), bulk, p0, None)
        rows = self._rows(members)
        bulk = self.bulk if len(self.bulk) == 1 else self.bulk[rows[:, 1:]]
        return Piece(self.x[rows], bulk, p0, None if (lengths == lengths[0]).all() else lengths.to(self.x.device))

    def by_sequence(self, values: list[Tensor]) -> Tensor:
        """Values [n, ...] in the caller's order, from those of the sequences of each piece (k, ...)."""
        return torch.cat(values)[torch.argsort(torch.cat(self._groups)).to(self.x.device)]

    def by_row(self, values: list[Tensor]) -> Tensor:
        """Values [total, ...] in the caller's order, from those of the variables of each piece (k, v, ...)."""
        if len(values) == len(self.lengths):
            return torch.cat([values[i][0] for i in torch.argsort(torch.cat(self._groups)).tolist()])
        rows, unpadded = [], []
        for members, value in zip(self._groups, values, strict=True):
            inside = torch.arange(value.shape[1], device="cpu") < self.lengths[members][:, None]
            # as numbers, since a mask on a device without values has no known number of rows
            inside = inside.flatten().nonzero()[:, 0].to(value.device)
            rows.append(self._rows(members).flatten()[inside])
            unpadded.append(value.flatten(0, 1)[inside])
        return torch.cat(unpadded)[torch.argsort(torch.cat(rows))]

    def by_step(self, values: list[Tensor]) -> Tensor:
        """Values [total, ...], 0 at first variables, from those of the transitions of each piece (k, v - 1, ...)."""
        first = [value.new_zeros(len(value), 1, *value.shape[2:]) for value in values]
        return self.by_row([torch.cat(pair, 1) for pair in zip(first, values, strict=True)])

    def counts(self, values: list[Tensor]) -> Tensor:
        """Expected counts in the shape of `bulk`, from those in the shape of each piece's."""
        return torch.stack(values).sum(0) if len(self.bulk) == 1 else self.by_step(values)

    def _rows(self, members: Tensor) -> Tensor:
        """The rows of each member (k, v), its last one again behind its end."""
        lengths = self.lengths[members]
        steps = torch.minimum(torch.arange(int(lengths[0]), device="cpu"), lengths[:, None] - 1)
        return (self.starts[members][:, None] + steps).to(self.x.device)


class PackedChain:
    """Packed sequences on a CPU as one `Chain` with `starts`, for kernels that walk sequences where they lie."""

    def __init__(self, packed: Packed, log_params: bool, *, by_log: bool = False) -> None:
        x, bulk, p0 = packed.x, packed.bulk, packed.p0
        p0 = p0 if p0.dim() > 1 else p0[None]
        ends = packed.lengths.view(1, -1, 1) if len(bulk) == 1 else packed.lengths.view(-1, 1, 1)
        dtype = arithmetic_dtype(x, bulk, p0)
        self.chain = Chain(x, bulk, p0, ends, log_params, dtype, by_log, starts=packed.starts)
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
            log_norm: Tensor = kernels.message_kernels(chain.x).messages(chain, ahead, behind)
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


def row_bounds(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The rows where each sequence starts and ends, on the host."""
    check_tensor("x", x, 2)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {str(cu_seqlens.dtype)[6:]}")
    if x.dim() != 2:
        raise ValueError(f"x: expected shape [total, c] to go with cu_seqlens, got {list(x.shape)}")
    check_has_values("cu_seqlens", cu_seqlens)
    bounds = cu_seqlens.to("cpu", torch.int64)
    good = bounds.dim() == 1 and len(bounds) >= 2 and bounds[0] == 0 and bounds[-1] == len(x)
    if not good or not (bounds.diff() > 0).all():
        raise ValueError(f"cu_seqlens: expected rising integers from 0 to {len(x)}, got {cu_seqlens.tolist()}")
    return bounds[:-1], bounds[1:]


def _check_parameters(bulk: Tensor, p0: Tensor, total: int, n: int, c: int) -> None:
    check_tensor("bulk", bulk, 3)
    check_tensor("p0", p0, 1)
    if bulk.shape not in ((1, c, c), (total, c, c)):
        expected = f"[1 or {total}, {c}, {c}]"
        raise ValueError(f"bulk: expected shape {expected} to go with cu_seqlens, got {list(bulk.shape)}")
    if p0.shape not in ((c,), (n, c)):
        raise ValueError(f"p0: expected shape [{c}] or [{n}, {c}] to go with cu_seqlens, got {list(p0.shape)}")
