"""Where the variables of a chain lie: how many each rank holds, agreed upon before anything else is exchanged."""

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths, as_lengths, batch_sizes, check_flag, check_sizes, check_tensor
from ..operands import Operands, differentiated
from .exchange import Exchange

# how far norms of one tensor on several ranks may lie apart: those of other numbers differ by more
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}

# lengths are compared with the number of variables when that is known
_UNKNOWN = 2**31

_HEADER = "variables matrices agreed bulk p0 needs threads"


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


def agree(
    exchange: Exchange,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    log_params: bool,
    lengths: Lengths | None,
    options: dict[str, Any],
    check: Callable[[], object],
) -> tuple[Shards, Operands]:
    """The shards and the checked operands of this rank, with the lengths `[*B]` of whole sequences, if there are any.

    Raises on all ranks for what is wrong on one, of which `check` checks more, and for what differs although it has to
    be the same, as `options` have.
    """
    fields: dict[str, Any] = {}
    ends: list[Tensor | None] = []

    def header() -> Tensor:
        check()
        check_local(x, bulk, p0)
        check_flag("log_params", log_params)
        ends.append(None if lengths is None else as_lengths(lengths, _as_if_whole(x), x.device))
        fields.update(_agreed(x, bulk, p0, log_params, ends[0], options))
        needs = sum(2**place * differentiated(operand) for place, operand in enumerate((x, bulk, p0)))
        counts = torch.tensor([x.shape[-2], bulk.shape[-3], digest(fields)], dtype=torch.float64)
        norms = torch.stack([norm_of(bulk[..., :1, :, :]), norm_of(p0)]).cpu()
        return torch.cat([counts, norms, torch.tensor([needs, torch.get_num_threads()])])

    received = exchange.gather((len(_HEADER.split()),), header)
    check_agreed(exchange, received[:, 2], fields)
    variables, matrices, _, bulk_norms, p0_norms, needs, threads = received.T
    sizes, counts = variables.int().tolist(), matrices.int().tolist()
    one_matrix = _one_matrix(sizes, counts)
    if one_matrix:
        check_same("bulk", "the same matrix", bulk_norms, bulk.dtype)
    check_same("p0", "the same weights", p0_norms, p0.dtype)
    whole = sum(sizes)
    if ends[0] is not None and ends[0].numel() and int(ends[0].max()) > whole:
        raise ValueError(f"lengths: expected values from 1 to v = {whole}, got {int(ends[0].max())}")
    needed = [any(int(need) >> place & 1 for need in needs) for place in range(3)]
    shards = Shards(exchange.rank, tuple(sizes), one_matrix, (needed[0], needed[1], needed[2]), int(threads[0]))
    return shards, Operands(x, bulk, p0, ends[0], log_params)


def check_local(x: Tensor, bulk: Tensor, p0: Tensor) -> None:
    """Check kinds and sizes of the operands of one rank, which may hold no variable."""
    check_tensor("x", x, 2)
    check_tensor("bulk", bulk, 3, like=x)
    check_tensor("p0", p0, 1, like=x)
    *batch, v, c = x.shape
    if c < 1:
        raise ValueError(f"x: expected at least one state [..., v, c], got {list(x.shape)}")
    lead = batch_sizes(batch, bulk.dim() - 3)
    check_sizes("bulk", bulk, (*lead, (1, v - 1, v) if v else (1, 0), (c,), (c,)), x, steps=len(lead))
    check_sizes("p0", p0, (*batch_sizes(batch, p0.dim() - 1), (c,)), x)


def _one_matrix(sizes: list[int], counts: list[int]) -> bool:
    """Whether one matrix serves every step; raises if ranks hold another number of matrices than goes with that."""
    if sum(sizes) == 0:
        raise ValueError("x: expected at least one variable on some rank, got none")
    if all(count == 1 for count in counts):
        return True
    first = next(rank for rank, size in enumerate(sizes) if size > 0)
    for rank, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        expected = size - (rank == first)
        if count != expected:
            text = f"{expected} matrices, which lead into the {size} variables of the rank, or 1 on every rank"
            raise ValueError(f"rank {rank}: bulk: expected {text}, got {count}")
    return False


def check_same(name: str, expected: str, norms: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a rank whose norm is another than that of the first."""
    for rank, norm in enumerate(norms.tolist()):
        first = norms[0].item()
        same = norm == first or (norm != norm and first != first)
        if not same and not abs(norm - first) <= _ROUNDING[dtype] * abs(first):
            raise ValueError(f"rank {rank}: {name}: expected {expected} as on rank 0, of norm {first}, got {norm}")


def _as_if_whole(x: Tensor) -> Tensor:
    """A tensor of the shape of x with more variables than there are."""
    return x.new_empty(()).expand(*x.shape[:-2], _UNKNOWN, x.shape[-1])


def _agreed(
    x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, ends: Tensor | None, options: dict[str, Any]
) -> dict[str, Any]:
    """What has to be the same on all ranks, by name."""
    if ends is not None and ends.numel() and int(ends.min()) < 1:
        raise ValueError(f"lengths: expected values from 1, got {int(ends.min())}")
    return {
        "x": f"shape [{', '.join(map(str, x.shape[:-2]))}{', ' * (x.dim() > 2)}v, {x.shape[-1]}] of {x.dtype}",
        "bulk": f"axes {list(bulk.shape[:-3])} before its steps, of {bulk.dtype}",
        "p0": f"shape {list(p0.shape)} of {p0.dtype}",
        "log_params": log_params,
        "lengths": said_of(ends),
        "device": x.device.type,
        "gradients": differentiated(x, bulk, p0),
        **options,
    }


def digest(value: Any) -> int:
    """A number below 2^52 that tells values apart."""
    return int(hashlib.blake2b(json.dumps(value).encode()).hexdigest()[:13], 16)


def norm_of(weights: Tensor) -> Tensor:
    """The norm of the finite entries, which tells apart what should be equal on all ranks."""
    norm: Tensor = torch.linalg.vector_norm(weights.detach(), dtype=torch.float64)
    if norm.isinf():
        norm = torch.linalg.vector_norm(weights.detach().masked_fill(weights.isinf(), 1.0), dtype=torch.float64)
    return norm


def said_of(ends: Tensor | None) -> str | None:
    """What tells the lengths [*B] of sequences apart."""
    return None if ends is None else f"lengths of sum {int(ends.sum())}, {digest(ends.tolist())}"


def check_agreed(exchange: Exchange, digests: Tensor, fields: dict[str, Any]) -> None:
    """Raise ValueError for the first difference of the fields of all ranks, whose `digests` have been gathered."""
    if (digests == digests[0]).all():
        return
    first, *others = map(json.loads, exchange.texts(json.dumps(fields)))
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(f"rank {rank}: {name}: expected {value}, as on rank 0, got {other[name]}")
