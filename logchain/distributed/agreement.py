"""What ranks agree on before they exchange anything else: fields that have to be the same, and numbers of a header.

All headers have one size, so that ranks which ask different questions learn of it. Tensors that have to be the same are
compared by three numbers, their marks.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange

F64 = torch.float64

# numbers of a header beside the digest of its fields
HEADER = 10

# how far marks of one tensor on several ranks may lie apart, as a part of the norm
_ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 1e-3}

# entries of which marks are computed at a time, and the rows of so many that make them up
_PART, _ROW = 2**18, 2**10


def agree(exchange: Exchange, describe: Callable[[], tuple[dict[str, Any], Sequence[float] | Tensor]]) -> Tensor:
    """The numbers of all ranks (ranks, HEADER), filled up with zeros.

    `describe` returns fields by name, the question first, and numbers. What it raises on one rank is raised on all, and
    so is a difference of fields.
    """
    fields: dict[str, Any] = {}

    def header() -> Tensor:
        described, numbers = describe()
        fields.update(described)
        row = torch.zeros(1 + HEADER, dtype=F64, device="cpu")
        row[0] = digest(fields)
        row[1 : 1 + len(numbers)] = torch.as_tensor(numbers, dtype=F64, device="cpu")
        return row

    received = exchange.gather((1 + HEADER,), header)
    _check_fields(exchange, received[:, 0], fields)
    return received[:, 1:]


def _check_fields(exchange: Exchange, digests: Tensor, fields: dict[str, Any]) -> None:
    """Raise ValueError for the first difference of the fields of all ranks."""
    if (digests == digests[0]).all():
        return
    first, *others = map(json.loads, exchange.texts(json.dumps(fields)))
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"rank {rank}: {name}: expected {first.get(name)}, as on rank 0, got {other.get(name)}"
                )


def digest(value: Any) -> int:
    """A number below 2^52 that tells values apart."""
    return int(hashlib.blake2b(json.dumps(value).encode()).hexdigest()[:13], 16)


def integers_said(numbers: Tensor | None) -> str | None:
    """What tells integers apart: their shape, and a sum weighted by place."""
    if numbers is None:
        return None
    flat = numbers.reshape(-1).to(torch.int64)
    places = torch.arange(1, len(flat) + 1, device=flat.device)
    by_place = int((flat * places * places).sum())
    return f"integers {list(numbers.shape)} of sum {int(flat.sum())}, {by_place} by place"


def marks(*tensors: Tensor) -> Tensor:
    """Three numbers that tell tensors apart: a sum weighted by place, the norm, both over the largest, and its log."""
    values = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    top = max((_top(one) for one in values), default=0.0) or 1.0
    mark, size, place = 0.0, 0.0, 0
    for one in values:
        for part in one.split(_PART):
            wide = part if part.dtype == torch.float64 else part.float()
            scaled = (wide / top).nan_to_num_(nan=3.0, posinf=2.0, neginf=-2.0)
            count, rest = divmod(len(scaled), _ROW)
            weights, by_row = _weights(0, scaled.dtype, scaled.device), _weights(1 + place // _ROW, F64, scaled.device)
            of_rows = scaled[: count * _ROW].view(count, _ROW) @ weights
            by_row = by_row[place % _ROW :]
            mark += float(of_rows.double() @ by_row[:count]) if count else 0.0
            mark += float(scaled[count * _ROW :] @ weights[:rest]) * float(by_row[count]) if rest else 0.0
            size += float(scaled.square_().sum())
            place += _PART // _ROW
    return torch.tensor([mark, math.sqrt(size), math.log(top)], dtype=F64, device="cpu")


def _top(values: Tensor) -> float:
    """The largest finite size."""
    top = float(values.abs().amax())
    return top if math.isfinite(top) else float(values.masked_fill(~values.isfinite(), 0.0).abs().amax())


@lru_cache(maxsize=2**6)
def _weights(page: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights from -1 to 1 as if drawn at random, so that no exchange of entries leaves their sum as it is."""
    places = torch.arange(1 + page * _ROW, 1 + (page + 1) * _ROW, dtype=F64, device=device)
    return (1e4 * places.sin()).frac().to(dtype)


def check_same(name: str, expected: str, found: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a rank whose marks (ranks, 3) are others than those of the first."""
    bound = _ROUNDING.get(dtype, 1e-5)
    first, norm, top = found[0].tolist()
    for rank, (mark, _, other) in enumerate(found.tolist()):
        if not (abs(mark - first) <= bound * norm and abs(other - top) <= bound):
            raise ValueError(f"rank {rank}: {name}: expected {expected} as on rank 0, got other values")
