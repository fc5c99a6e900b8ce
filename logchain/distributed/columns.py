"""One large transition matrix whose columns lie on several ranks of a process group."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_tensor
from ..kernels.plain.columns import Matrix
from ..kernels.plain.semiring import shifted
from ..kernels.structured import Shares
from ..operands import differentiated
from ..transitions import LINEAR, LOG, Arithmetic, Transition
from ..transitions.transition import Transposed, look_up
from .agreement import agree
from .exchange import Exchange
from .parts import Parts

# terms of which the largest is found at a time
_TERMS = 2**16


class Columns(Transition):
    r"""A matrix P of c states of which each rank of a process group holds some columns, in place of `bulk`.

    It is a `logchain.transitions.Transition`: all ranks call `logchain.product(x, Columns(columns), p0)`, and likewise
    `marginals`, `forward_backward`, `viterbi`, `topk_paths`, `sample`, `log_prob` and `entropy`, with the same x and
    p0, and get the same results. Each step multiplies the messages by the rank's own columns, and gathers the parts.

    Making one is a collective, and so is each question, and each gradient: all ranks take part, in the same order.

    Args:
        columns: weights `[*B or ones, v-1 or 1, c, c_r]`, or `[c, c_r]`: `P[:, mine]`, logarithms (nats) where a
            question is asked with `log_params`. The first rank holds the first columns; `c_r` may differ, and be 0. Or
            a DTensor of the whole matrix, placed `[Shard(-1)]` on a mesh of one axis, whose group is taken.
        group: a process group of `torch.distributed`, by default that of all processes; gloo or NCCL.

    The gradient of `columns` is that of the rank's own, with the incoming gradient that all ranks have; those of x and
    p0 are whole on every rank. `sample` draws by the numbers of the first rank's generator. `marginals` counts the uses
    of the rank's own columns. `to_dense` gathers the whole matrix.

    Raises:
        TypeError, ValueError: columns are of the wrong kind on some rank, which the message names, differ between ranks
            in more than their number, or are not c in all; or a DTensor is placed otherwise. Questions raise on all
            ranks for operands that are wrong on one, or differ.
        RuntimeError: a rank is gone, or did not answer within the timeout of the group; or there is no group.

    Cost of a step of `product`: `c c_r` multiply-adds a sequence, in the dtype of the arithmetic, columns being read
    where they lie; and a gathering of 8 c bytes a sequence, backward a sum of as many over ranks. Sums that
    underflow are computed again by logarithms (`logchain.rescues`). Best paths take maxima of c c_r sums in float64;
    derivatives of other questions, and second ones, are taken in log space.

    Source: columns of a layer on several ranks as in M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053.

    >>> import tempfile, torch, logchain
    >>> import torch.distributed as dist
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # torchrun starts more
    >>> columns = torch.tensor([[0.9, 0.1], [0.2, 0.8]])  # all, as there is one rank
    >>> logchain.product(torch.zeros(3, 2), Columns(columns), torch.tensor([1.0, 1.0]))
    tensor(0.6931)
    >>> dist.destroy_process_group()
    """

    own = (2,)

    def __init__(self, columns: Tensor, *, group: Any = None) -> None:
        exchange = Exchange(_group_of(columns, group))
        columns, sizes = _agreed(exchange, columns, group)
        super().__init__(columns)
        self.ranks = Parts(exchange, sizes)
        self.states = columns.shape[-2]
        self._ready: tuple[Tensor, int, Matrix] | None = None
        self.pattern = Shares(self.ranks.joined, self.ranks.own, exchange.summed)

    def apply(self, message: Tensor, arithmetic: Arithmetic) -> Tensor:
        """`message @ P`, see `Transition.apply`: each rank multiplies by its columns, and the parts are gathered."""
        (columns,), ranks = self.parameters, self.ranks
        if self._in_log_space(message, arithmetic):
            joined: Tensor = ranks.joined(self._matrix.sums(message)[0])
            return joined
        message = ranks.copied(message)
        if columns.shape[-1]:
            part = arithmetic.matmul(message, columns)
        else:
            part = message[..., :1] * columns[..., :1, :]  # nothing, of the right shape
        gathered: Tensor = ranks.gather(part)
        return gathered

    def _in_log_space(self, message: Tensor, arithmetic: Arithmetic) -> bool:
        """Whether a message of a walk in log space passes, without a derivative."""
        fits = message.dim() == self.parameters[0].dim() == 3 and message.dtype == self.dtype == torch.float64
        return fits and arithmetic is LOG and not differentiated(message, *self.parameters)

    @property
    def _matrix(self) -> Matrix:
        """The columns as they are multiplied, made once."""
        (columns,) = self.parameters
        version = columns._version
        if self._ready is None or self._ready[0] is not columns or self._ready[1] != version:
            self._ready = columns, version, Matrix(columns.detach(), columns.dtype, True)
        return self._ready[2]

    @property
    def mT(self) -> "Transition":
        """The structure of the transposed matrices."""
        return _Rows(self)

    def entries(self, source: Tensor, target: Tensor, arithmetic: Arithmetic = LINEAR) -> Tensor:
        """`P[source, target]`, see `Transition.entries`: the sum over ranks, of which one knows each."""
        columns, column, mine = self._mine(target)
        total: Tensor = self.ranks.total(torch.where(mine, look_up(columns, source, column), 0.0).double())
        return total.to(columns.dtype)

    def best(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The largest weights and the lowest states with them, see `Transition.best`."""
        (columns,) = self.parameters
        found = message.new_empty(2, *message.shape[:-1], columns.shape[-1])
        width = max(1, _TERMS // max(1, message.numel()))
        for some, values in zip(columns.split(width, -1), found.split(width, -1), strict=True):
            if some.shape[-1]:
                values[0], values[1] = (message[..., None] + some[..., None, :, :]).max(-2)
        weight, state = self.ranks.joined(found)
        return weight, state.long()

    def columns(self, target: Tensor) -> Tensor:
        """`P[:, target]` as logarithms, see `Transition.columns`."""
        columns, column, mine = self._mine(target)
        values = look_up(columns.mT[..., None, :, :], column, kept=1)
        total: Tensor = self.ranks.total(torch.where(mine[..., None], values, 0.0))
        return total

    def _mine(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns, at least one, the places of targets among them, and whether they are there."""
        (columns,), place = self.parameters, target - self.ranks.start
        if not self.ranks.size:
            columns = torch.nn.functional.pad(columns, (0, 1))
        last = columns.shape[-1] - 1
        return columns, place.clamp(0, last), (place >= 0) & (place < self.ranks.size)

    def _dense(self, arithmetic: Arithmetic) -> Tensor:
        dense: Tensor = self.ranks.gather(self.parameters[0])
        return dense

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence on this rank."""
        return self.states * int(self.ranks.size)


class _Rows(Transposed):
    """The transposed matrices, of which each rank holds some rows: a message is the sum of what ranks make of it."""

    _of: Columns

    def apply(self, message: Tensor, arithmetic: Arithmetic) -> Tensor:
        (columns,), ranks = self.parameters, self._of.ranks
        if self._of._in_log_space(message, arithmetic):
            mine = ranks.own(message)
            low, top = shifted(mine) if mine.numel() else (mine, 0.0)
            sums, _ = self._of._matrix.mT.sums(low)
            return LOG.sum(ranks.exchange.stacked(sums + top), 0)
        mine = ranks.part(message)
        if columns.shape[-1]:
            part = arithmetic.matmul(mine, columns.mT)
        else:
            part = mine @ columns.mT.to(mine.dtype) + arithmetic.zero
        return arithmetic.sum(ranks.stack(part), 0)


def _group_of(columns: Any, group: Any) -> Any:
    """The group, or that of a DTensor's mesh."""
    is_dtensor = type(columns).__name__ == "DTensor" and columns.device_mesh.ndim == 1
    return columns.device_mesh.get_group() if is_dtensor and group is None else group


def _local(columns: Any, group: Any) -> Any:
    """The part of this rank."""
    if type(columns).__name__ != "DTensor":
        return columns
    if group is not None:
        raise ValueError("group: expected None beside a DTensor, whose device mesh has one")
    placement, *more = columns.placements
    if more or not placement.is_shard(columns.dim() - 1):
        raise ValueError(
            f"columns: expected a DTensor placed [Shard(-1)] on a mesh of one axis, got {columns.placements}; see "
            "DTensor.redistribute(placements=[Shard(-1)])"
        )
    return columns.to_local()


def _agreed(exchange: Exchange, columns: Any, group: Any) -> tuple[Tensor, list[int]]:
    """This rank's columns, and how many each has; raises on all ranks for what is wrong on one."""
    own: list[Tensor] = []

    def describe() -> tuple[dict[str, Any], list[float]]:
        own.append(_local(columns, group))
        check_tensor("columns", own[0], 2)
        sizes = ", ".join(map(str, own[0].shape[:-1]))
        described = f"[{sizes}, c_r] of {own[0].dtype} on {own[0].device.type}"
        return {"question": "Columns", "columns": described}, [float(own[0].shape[-1])]

    counts: list[int] = agree(exchange, describe)[:, 0].int().tolist()
    c = own[0].shape[-2]
    if sum(counts) != c:
        raise ValueError(f"columns: expected {c} columns on all ranks together, as many as rows, got {counts}")
    return own[0], counts
