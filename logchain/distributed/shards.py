"""Where the variables of a chain lie: how many each rank holds, agreed upon before anything else is exchanged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths, as_lengths, batch_sizes, check_flag, check_sizes, check_tensor, is_transformed
from ..operands import Operands, differentiated
from .agreement import agree, check_same, integers_said, marks
from .exchange import Exchange

# lengths are compared with the number of variables when that is known
_UNKNOWN = 2**31


class Shards(NamedTuple):
    """The numbers of variables of all ranks, `sizes`, and what their operands have in common.

    `one_matrix`: whether one serves every step. `needs`: whether some rank needs the gradients of x, bulk and p0.
    `threads`: the number that compute on the first rank.
    """

    rank: int
    sizes: tuple[int, ...]
    one_matrix: bool
    needs: tuple[bool, bool, bool]
    threads: int

    @property
    def starts(self) -> list[int]:
        """The number of the first variable of each rank."""
        return [sum(self.sizes[:rank]) for rank in range(len(self.sizes))]

    @property
    def v(self) -> int:
        """Variables of all ranks together."""
        return sum(self.sizes)

    @property
    def filled(self) -> list[int]:
        """The ranks that hold variables, in order."""
        return [rank for rank, size in enumerate(self.sizes) if size > 0]

    @property
    def place(self) -> int | None:
        """The place of this rank among those that hold variables; None if it holds none."""
        return self.filled.index(self.rank) if self.sizes[self.rank] else None


def agreed_shards(
    exchange: Exchange,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    log_params: bool,
    lengths: Lengths | None,
    options: dict[str, Any],
    check: Callable[[], object],
    one_matrix: bool | None,
) -> tuple[Shards, Operands]:
    """The shards and the checked operands of this rank, with the lengths `[*B]` of whole sequences, if there are any.

    Raises on all ranks for what is wrong on one, of which `check` checks more, and for what differs although it has to
    be the same, as `options` have. `one_matrix`: whether one serves every step, if that is known.
    """
    ends: list[Tensor | None] = []

    def describe() -> tuple[dict[str, Any], Tensor]:
        check()
        check_local(x, bulk, p0)
        check_flag("log_params", log_params)
        ends.append(None if lengths is None else as_lengths(lengths, _as_if_whole(x), x.device))
        needs = sum(2**place * differentiated(operand) for place, operand in enumerate((x, bulk, p0)))
        numbers = [float(x.shape[-2]), float(bulk.shape[-3]), float(needs), float(torch.get_num_threads())]
        fields = {**options, "one_matrix": one_matrix, **_agreed(x, bulk, p0, log_params, ends[0])}
        marked = marks(bulk[..., :1, :, :]), marks(p0)
        return fields, torch.cat([torch.tensor(numbers, dtype=torch.float64, device="cpu"), *marked])

    received = agree(exchange, describe)
    sizes, counts, (needs, threads) = *received[:, :2].T.int().tolist(), received[:, 2:4].T
    shared = _one_matrix(sizes, counts, one_matrix)
    if shared:
        check_same("bulk", "the same matrix", received[:, 4:7], bulk.dtype)
    check_same("p0", "the same weights", received[:, 7:10], p0.dtype)
    whole = sum(sizes)
    if ends[0] is not None and ends[0].numel() and int(ends[0].max()) > whole:
        raise ValueError(f"lengths: expected values from 1 to v = {whole}, got {int(ends[0].max())}")
    needed = [any(int(need) >> place & 1 for need in needs) for place in range(3)]
    shards = Shards(exchange.rank, tuple(sizes), shared, (needed[0], needed[1], needed[2]), int(threads[0]))
    return shards, Operands(x, bulk, p0, ends[0], log_params)


def check_local(x: Tensor, bulk: Tensor, p0: Tensor) -> None:
    """Check kinds and sizes of the operands of one rank, which may hold no variable."""
    if is_transformed():
        raise NotImplementedError("logchain.distributed: expected no transform of torch.func and no forward derivative")
    for name, operand in (("x", x), ("bulk", bulk), ("p0", p0)):
        if type(operand).__name__ == "DTensor":
            raise TypeError(f"{name}: expected a tensor of this rank alone, got a DTensor, see its to_local")
    check_tensor("x", x, 2)
    check_tensor("bulk", bulk, 3, like=x)
    check_tensor("p0", p0, 1, like=x)
    *batch, v, c = x.shape
    if c < 1:
        raise ValueError(f"x: expected at least one state [..., v, c], got {list(x.shape)}")
    lead = batch_sizes(batch, bulk.dim() - 3)
    check_sizes("bulk", bulk, (*lead, (1, v - 1, v) if v else (1, 0), (c,), (c,)), x, steps=len(lead))
    check_sizes("p0", p0, (*batch_sizes(batch, p0.dim() - 1), (c,)), x)


def _one_matrix(sizes: list[int], counts: list[int], known: bool | None) -> bool:
    """Whether one matrix serves every step; raises if ranks hold another number of matrices than goes with that."""
    if sum(sizes) == 0:
        raise ValueError("x: expected at least one variable on some rank, got none")
    shared = all(count == 1 for count in counts) if known is None else known
    first = next(rank for rank, size in enumerate(sizes) if size > 0)
    for rank, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        expected = 1 if shared else size - (rank == first)
        if count != expected:
            own = f"{expected} matrices, which lead into the {size} variables of the rank, or 1 on every rank"
            raise ValueError(f"rank {rank}: bulk: expected {'1 matrix for every step' if shared else own}, got {count}")
    return shared


def _as_if_whole(x: Tensor) -> Tensor:
    """A tensor of the shape of x with more variables than there are."""
    return x.new_empty(()).expand(*x.shape[:-2], _UNKNOWN, x.shape[-1])


def _agreed(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, ends: Tensor | None) -> dict[str, Any]:
    """What has to be the same on all ranks, by name."""
    if ends is not None and ends.numel() and int(ends.min()) < 1:
        raise ValueError(f"lengths: expected values from 1, got {int(ends.min())}")
    return {
        "x": f"shape [{', '.join(map(str, x.shape[:-2]))}{', ' * (x.dim() > 2)}v, {x.shape[-1]}] of {x.dtype}",
        "bulk": f"axes {list(bulk.shape[:-3])} before its steps, of {bulk.dtype}",
        "p0": f"shape {list(p0.shape)} of {p0.dtype}",
        "log_params": log_params,
        "lengths": integers_said(ends),
        "device": x.device.type,
        "gradients": differentiated(x, bulk, p0),
    }
