"""The collectives of one call: every one carries a status, so that an error on one rank is raised on all of them.

An exception that another rank raises, in its checks or while it computes, arrives with its text as `rank 1: ...`. A
rank that is gone, or that takes longer than the group's timeout, makes the collective itself raise RuntimeError. The
number of the call, which the first rank gives, travels with every status: ranks that take the backward passes of two
calls in different orders learn of it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.weights import NegativeWeights
from ..operands import Operands, Weights, named

# bytes of a text that ranks exchange
_TEXT = 2048

# numbers of calls: small, so that their squares add up exactly over thousands of ranks
_calls = itertools.cycle(range(1, 2**10))

_OTHER_CALL = "expected the collectives of one call on all ranks, got those of another: passes in different orders"

# errors that are raised again as what they, or a class that they derive from, were on the other rank
_KINDS = {kind.__name__: kind for kind in (TypeError, ValueError, NotImplementedError, MemoryError)}


class Exchange:
    """The exchange of small float64 tensors between the ranks of a process group, by collectives alone."""

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group: expected torch.distributed to be initialised, see init_process_group")
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: expected a process group that this process belongs to")
        # a group of NCCL alone takes no tensors on the host
        self._backends = dist.get_backend_config(group)
        on_host = "cpu:" in self._backends
        self._device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
        self._number = 0.0  # of the call, once the ranks have agreed on it
        self.operands: Operands | None = None  # of the call, by which errors name a negative weight

    def gather(self, shape: Sequence[int], compute: Callable[[], Tensor | None]) -> Tensor:
        """What each rank computes, in float64 on the host (ranks, *shape); None stands for zeros."""
        sent, error = torch.zeros(2 + math.prod(shape), dtype=torch.float64, device="cpu"), None
        sent[1] = self._number or next(_calls)
        try:
            value = compute()
            if value is not None:
                sent[2:] = value.detach().reshape(-1)
        except Exception as raised:
            error = self._named(raised)
            sent[0] = 1
        received = self._gathered(sent)
        if self._number and (received[:, 1] != self._number).any():
            raise RuntimeError(_OTHER_CALL)
        self._number = float(received[0, 1])
        self._raise(received[:, 0], error)
        return received[:, 2:].view(self.size, *shape)

    def total(self, size: int, compute: Callable[[], Tensor]) -> Tensor:
        """The sum over ranks of what they compute, in float64 on the host (size)."""
        first = 2 + self.size
        sent, error = torch.zeros(first + size, dtype=torch.float64, device="cpu"), None
        sent[0], sent[1] = self._number, self._number**2
        try:
            sent[first:] = compute().detach().reshape(-1)
        except Exception as raised:
            error = self._named(raised)
            sent[2 + self.rank] = 1
        sums = sent.to(self._device)
        dist.all_reduce(sums, group=self._group)
        sums = sums.cpu()
        if sums[0] ** 2 != self.size * sums[1]:
            raise RuntimeError(_OTHER_CALL)
        self._raise(sums[2:first], error)
        return sums[first:]

    def texts(self, text: str) -> list[str]:
        """The text of each rank, up to the size that is exchanged."""
        data = text.encode()[:_TEXT]
        sent = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in self._gathered(sent)]

    def _gathered(self, sent: Tensor) -> Tensor:
        sent = sent.to(self._device)
        received = sent.new_empty(self.size, len(sent))
        dist.all_gather(list(received.unbind()), sent, group=self._group)
        return received.cpu()

    def _named(self, error: Exception) -> Exception:
        """The error, which says of a negative weight where it stands in this rank's operands."""
        if not isinstance(error, NegativeWeights) or self.operands is None:
            return error
        _, bulk, p0, *_ = self.operands
        return named(error, Weights("bulk", bulk), Weights("p0", p0))

    def _raise(self, status: Tensor, error: Exception | None) -> None:
        """Raise the error of the first rank whose status is not 0, on all ranks alike."""
        if not status.any():
            return
        kinds = [base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS]
        texts = self.texts("" if error is None else f"{(*kinds, '')[0]}\n{error}")
        rank = int(status.nonzero()[0])
        kind, _, text = texts[rank].partition("\n")
        raise _KINDS.get(kind, RuntimeError)(f"rank {rank}: {text}") from error
