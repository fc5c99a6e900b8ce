"""The log-partition of chains whose variables are sharded over ranks, with the gradients of each rank's operands."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..autograd.chain import LogPartition, Once
from ..autograd.operator import call
from ..operands import Operands, arithmetic_dtype, differentiated
from ..schedules.choose import Where, where
from ..schedules.cost_counts import Size
from ..schedules.ranks import Cut, cuts
from .agreement import marks
from .exchange import Exchange
from .overlapped import Overlapped
from .products import Products
from .shards import Shards
from .stretch import F64, Gradients, Stretch
from .vectors import Vectors

Needs = tuple[bool, ...]


class Sharded:
    """The passes over one rank's part of a chain, each of which all ranks make together.

    `by_log`: gradients are those of the logarithms of `bulk` and p0. `keep`: messages are kept, for gradients. `turns`:
    the last rank may walk from the end, so that it has no forward messages.
    """

    def __init__(
        self,
        exchange: Exchange,
        shards: Shards,
        operands: Operands,
        strategy: str,
        *,
        keep: bool,
        by_log: bool = False,
        turns: bool = True,
    ) -> None:
        self.exchange, self.shards, self.operands = exchange, shards, operands
        self._keep, self._turns = keep, turns and operands.lengths is None
        place = where(operands.x.device.type)._replace(threads=shards.threads)
        ranked = _ranked(self._size(), tuple(shards.sizes[rank] for rank in shards.filled), place)
        picked = next((cut for cut in ranked if cut.name == strategy), ranked[0])
        self._slices = _slices(operands.x, picked.blocks)
        start, needs = shards.starts[shards.rank], shards.needs if keep else (False,) * 3
        self._blocks = [
            Stretch(self._operands_of(part), start, needs, begins=shards.place == 0, by_log=by_log)
            for part in self._slices
        ]
        self._passes = self._passes_of(picked, ranked)

    def _size(self) -> Size:
        x, bulk, p0, lengths, log_params = self.operands
        double = arithmetic_dtype(x, bulk, p0) == F64
        shape = [*bulk.shape[:-3], 1 if self.shards.one_matrix else 2, *bulk.shape[-2:]]
        return Size.of(x.shape, shape, double, log_params, lengths is not None, self._keep, kernels.on_gpu(x))

    def _passes_of(self, cut: Cut, ranked: list[Cut]) -> Vectors | Products | Overlapped:
        """The passes of a cut; those of an overlapped one fall back on the fastest of the others."""
        first = self._blocks[0]
        if cut.name == "products":
            return Products(self.exchange, self.shards, first, self._turns, self._keep)
        if cut.name == "vectors":
            return Vectors(self.exchange, self.shards, self._blocks, self._turns)
        other = next(one for one in ranked if one.name == "products" or one[:2] == ("vectors", 1))
        in_turn = self._passes_of(other, ranked)
        assert not isinstance(in_turn, Overlapped)
        return Overlapped(self.exchange, self.shards, first, in_turn)

    def forward(self) -> Tensor:
        """The log-partition [*B] in float64, the same on all ranks."""
        with kernels.arithmetic_on(self.operands.x):
            self._norms = self._passes.forward()
        parts = [block.layout.batched(norm) for block, norm in zip(self._blocks, self._norms, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    @property
    def stretches(self) -> list[tuple[Stretch, Tensor]]:
        """This rank's part of each block of the batch, and the block's log-partitions (g, m)."""
        return list(zip(self._blocks, self._norms, strict=True))

    def gradients(self, weight: Tensor, needs: Needs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `sum(weight * log_norm)` with respect to this rank's x and `bulk`, and to p0.

        `weight` [*B] is the same on all ranks.
        """
        x, bulk, p0, *_ = self.operands
        one_matrix, device = self.shards.one_matrix, x.device
        needs_bulk, needs_p0 = self.shards.needs[1] if one_matrix else needs[1], self.shards.needs[2]
        wide = F64 if one_matrix else arithmetic_dtype(x, bulk, p0)
        into = Gradients(
            torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None,
            torch.zeros(bulk.shape, dtype=wide, device=device) if needs_bulk else None,
            torch.zeros(p0.shape, dtype=F64, device=device) if needs_p0 else None,
        )
        shared = into.bulk if one_matrix else None, into.p0
        summed = [one for one in shared if one is not None]
        with kernels.arithmetic_on(x):
            self._write(weight, into, summed)
        return (
            into.x,
            into.bulk.to(bulk.dtype) if into.bulk is not None and needs[1] else None,
            into.p0.to(p0.dtype) if into.p0 is not None and needs[2] else None,
        )

    def _write(self, weight: Tensor, into: Gradients, summed: list[Tensor]) -> None:
        """Write the gradients, and the sums over ranks of some of them."""
        weights = []
        for block, part, norm in zip(self._blocks, self._slices, self._norms, strict=True):
            each = block.layout.sequences(self._sliced(weight, 0, part))
            # a NaN on one rank is one in the gradients of its sequence on all
            weights.append(torch.where(norm.isnan() & (each != 0), torch.nan, each))
        parts = [self._memory(block, part, into) for block, part in zip(self._blocks, self._slices, strict=True)]
        rest = self._passes.backward(self._norms, weights, parts)
        mark, _, top = marks(weight)
        marked = torch.stack([mark, mark * mark, top, top * top])

        def compute() -> Tensor:
            rest()
            for gradients, part in zip(parts, self._slices, strict=True):
                for own, one, whole in zip((2, 3, 1), gradients, into, strict=True):
                    if one is not None and whole is not None and not _is_part(one, whole):
                        self._sliced(whole, own, part).add_(one)
            return torch.cat([marked, *(one.flatten().cpu() for one in summed)])

        total = self.exchange.total(4 + sum(one.numel() for one in summed), compute)
        sums, squares = total[:4].view(2, 2).T / self.exchange.size
        if not (squares - sums * sums <= 1e-9 * (1 + squares)).all():
            raise RuntimeError("grad: expected the same incoming gradient on every rank, got different ones")
        for one, found in zip(summed, total[4:].split([one.numel() for one in summed]), strict=True):
            one.copy_(found.view(one.shape))

    def _memory(self, block: Stretch, part: slice, into: Gradients) -> Gradients:
        """Memory for the gradients of a block: a view, or memory of its own for what is added up."""
        x, bulk, p0 = (
            None if one is None else self._sliced(one, own, part) for own, one in zip((2, 3, 1), into, strict=True)
        )
        added = self.shards.one_matrix or (len(self._blocks) > 1 and into.bulk is not None and bulk is into.bulk)
        if bulk is not None and added:
            bulk = torch.zeros(bulk.shape, dtype=block.chain.dtype, device=bulk.device)
        return Gradients(x, bulk, None if p0 is None else torch.zeros_like(p0))

    def _operands_of(self, part: slice) -> Operands:
        x, bulk, p0, lengths, log_params = self.operands
        x, bulk, p0 = (self._sliced(one, own, part) for own, one in ((2, x), (3, bulk), (1, p0)))
        return Operands(x, bulk, p0, None if lengths is None else self._sliced(lengths, 0, part), log_params)

    def _sliced(self, operand: Tensor, own: int, part: slice) -> Tensor:
        """The part of an operand along the first batch axis, of which it has all `own` last axes; or all of it."""
        batch = self.operands.x.shape[:-2]
        has_axis = len(batch) > 0 and operand.dim() - own == len(batch) and len(operand) == batch[0]
        return operand[part] if has_axis else operand


@lru_cache(maxsize=2**10)
def _ranked(size: Size, sizes: tuple[int, ...], place: Where) -> list[Cut]:
    """The ways to cut a chain over ranks that hold so many variables, the fastest first."""
    return cuts(size, sizes, place.constants)


def _slices(x: Tensor, count: int) -> list[slice]:
    """The parts along the first batch axis of x `[*B, v, c]` of about so many blocks."""
    size = len(x) if x.dim() > 2 else 1
    count = max(1, min(count, size))
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


def _is_part(one: Tensor, whole: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


class _OnRanks(Once):
    """The gradients on all ranks, which cannot be differentiated again."""

    refusal = "logchain.distributed: expected one derivative, got a second; it needs the chain on one rank"


class _ByRanks:
    """The schedule of `autograd.chain.LogPartition` that all ranks follow together."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded

    def forward(self, operands: Operands) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._sharded.forward(), ()

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        def compute(grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
            return self._sharded.gradients(grad, needs)

        gradients: tuple[Any, ...] = call(_OnRanks, compute, grad, *operands[:3])
        return gradients


def log_norm(sharded: Sharded) -> Tensor:
    """The log-partition [*B] in float64, which can be differentiated once."""
    x, bulk, p0, lengths, log_params = sharded.operands
    if not differentiated(x, bulk, p0):
        return sharded.forward()
    value: Tensor = call(LogPartition, x, bulk, p0, lengths, log_params, _ByRanks(sharded))
    return value
