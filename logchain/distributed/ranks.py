"""What the ranks of a process group exchange: one agreement on the arguments of a call, and messages to a neighbor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.numbers import exact_sum

# an error is raised on the other ranks as the first of these that it is an instance of, or as a RuntimeError
_KINDS = TypeError, ValueError, NotImplementedError, MemoryError


class Ranks:
    """The ranks of a process group."""

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group: expected torch.distributed to be initialized; call init_process_group")
        self._group, self.rank = group, dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: expected a process group that contains this process; pass one that does")

    def agree(self, describe: Callable[[], tuple[dict[str, Any], Any]]) -> tuple[dict[str, Any], list[Any]]:
        """The fields and details of each rank; raises on all what `describe` raises on one, or if fields differ."""
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            sent: tuple[Any, ...] = None, *describe()
        except Exception as error:
            sent = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError), str(error), None
        dist.all_gather_object(gathered, sent, group=self._group)
        for rank, (kind, fields, _) in enumerate(gathered):
            if kind is not None:
                raise kind(f"rank {rank}: {fields}")
            for name, value in gathered[0][1].items():
                if fields.get(name) != value:
                    raise ValueError(f"rank {rank}: {name}: expected {value}, as on rank 0, got {fields.get(name)}")
        return gathered[0][1], [details for *_, details in gathered]

    def arrange(self, sizes: Sequence[int]) -> None:
        """Order the ranks that have variables, of which there are `sizes`; `place` is this one's, None without any."""
        if not sum(sizes):
            raise ValueError("x: expected at least one variable on some rank, got none")
        filled = [rank for rank, size in enumerate(sizes) if size > 0]
        self._filled = [rank if self._group is None else dist.get_global_rank(self._group, rank) for rank in filled]
        self.place: int | None = filled.index(self.rank) if sizes[self.rank] else None

    def neighbor(self, step: int) -> int | None:
        """The rank with the next variables, or for step -1 with the previous ones; None if there is none."""
        place = -1 if self.place is None else self.place + step
        return self._filled[place] if 0 <= place < len(self._filled) else None

    def exchange(self, step: int, sent: Tensor | None, received: Tensor | None = None) -> None:
        """Send to the neighbor in a direction and receive from the opposite one; None, or no neighbor: nothing."""
        sides: Any = (dist.isend, sent, self.neighbor(step)), (dist.irecv, received, self.neighbor(-step))
        used = [side for side in sides if side[1] is not None and side[2] is not None and side[1].numel()]
        operations = [dist.P2POp(operation, tensor.contiguous(), rank, self._group) for operation, tensor, rank in used]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of float64 values."""
        value = value.double().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value, group=self._group)
        return value

    def exact_total(self, terms: Tensor) -> Tensor:
        """The sum of float64 terms over the first axis and over ranks, rounded once."""
        terms = terms.contiguous()
        gathered = [torch.empty_like(terms) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, terms, group=self._group)
        return torch.stack(exact_sum(torch.cat(gathered))).sum(0)
