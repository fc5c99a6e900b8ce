"""Sequences of different lengths that lie one behind the other, as padded batches of similar lengths."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import check_tensor

# a sequence is padded to at most so many times its length
_PADDING = 1.25


class Piece(NamedTuple):
    """Some of the sequences: `x` (k, v, c), `bulk`, `p0`, and the length of each (k)."""

    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor


class Packed:
    """`x` [total, c], `bulk` [1 or total, c, c], `p0` [c] or [n, c]; sequence i has the rows cu_seqlens[i:i + 2].

    Iterating gives `Piece`s in order of length; what is computed of them is put back in the caller's order.
    """

    def __init__(self, x: Tensor, bulk: Tensor, p0: Tensor, cu_seqlens: Tensor, lengths: object) -> None:
        if lengths is not None:
            raise ValueError("lengths: expected None beside cu_seqlens, which holds them")
        self._starts, ends = _bounds(x, cu_seqlens)
        (total, c), n = x.shape, len(self._starts)
        _check_parameters(bulk, p0, total, n, c)
        self._x, self._bulk, self._p0, self._lengths = x, bulk, p0, ends - self._starts
        order = torch.argsort(self._lengths, descending=True, stable=True)
        self._groups, first = [], 0
        longest = self._lengths[order].tolist()
        for i in range(1, n + 1):
            if i == n or longest[i] * _PADDING < longest[first]:
                self._groups.append(order[first:i])
                first = i

    def __iter__(self) -> Iterator[Piece]:
        for members in self._groups:
            rows = self._rows(members)
            bulk = self._bulk if len(self._bulk) == 1 else self._bulk[rows[:, 1:]]
            p0 = self._p0 if self._p0.dim() == 1 else self._p0[members.to(self._p0.device)]
            yield Piece(self._x[rows], bulk, p0, self._lengths[members].to(self._x.device))

    def by_sequence(self, found: list[Tensor]) -> Tensor:
        """What was found for the sequences of each piece (k, ...), as [n, ...]."""
        return torch.cat(found)[torch.argsort(torch.cat(self._groups)).to(self._x.device)]

    def by_row(self, found: list[Tensor]) -> Tensor:
        """What was found for each variable of each piece (k, v, ...), as [total, ...]."""
        rows, values = [], []
        for members, value in zip(self._groups, found, strict=True):
            inside = (torch.arange(value.shape[1]) < self._lengths[members][:, None]).to(value.device)
            rows.append(self._rows(members)[inside])
            values.append(value[inside])
        return torch.cat(values)[torch.argsort(torch.cat(rows))]

    def by_step(self, found: list[Tensor]) -> Tensor:
        """What was found for each transition of each piece (k, v - 1, ...), as [total, ...], 0 where none leads."""
        return self.by_row([torch.cat([value.new_zeros(len(value), 1, *value.shape[2:]), value], 1) for value in found])

    def counts(self, found: list[Tensor]) -> Tensor:
        """Expected counts in the shape of `bulk`, from those in the shape of each piece's."""
        return torch.stack(found).sum(0) if len(self._bulk) == 1 else self.by_step(found)

    def _rows(self, members: Tensor) -> Tensor:
        """The rows of each member (k, v); behind its end, its last one."""
        lengths = self._lengths[members]
        steps = torch.minimum(torch.arange(int(lengths[0])), lengths[:, None] - 1)
        return (self._starts[members][:, None] + steps).to(self._x.device)


def _bounds(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where each sequence starts and ends, on the host."""
    check_tensor("x", x, 2)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {str(cu_seqlens.dtype)[6:]}")
    if x.dim() != 2:
        raise ValueError(f"x: expected shape [total, c] to go with cu_seqlens, got {list(x.shape)}")
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
