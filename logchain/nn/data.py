"""Sequences as users have them: arrays, padded batches, lists of sequences of different lengths, concatenated rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import Lengths, as_lengths, check_dense, check_integers, tensor_of
from .checks import check_mask, mask_of
from .parameters import fill, over

Data = Tensor | np.ndarray | Sequence[Tensor | np.ndarray]
Rows = Data | None
Ends = Lengths | None


@dataclass(frozen=True, eq=False)
class Sequences:
    """Checked data of a model; the sequences of a list, and concatenated ones, are packed.

    Attributes:
        data: `[*B, v, *event]`, packed `[total, *event]`; 0 where `known` is False.
        known: which entries are observed and before the end; None if all.
        covariates, states: in the layout of the data.
        lengths: int64 `[*B]`, None if all are v; of packed sequences `[n]`, on the host.
        batch_axes: the number of axes of B; None if it is not known.
        packed, is_list: whether sequences are packed, and whether users have a list of them.
    """

    data: Tensor
    known: Tensor | None
    covariates: Tensor | None
    states: Tensor | None
    lengths: Tensor | None
    batch_axes: int | None
    packed: bool
    is_list: bool

    @classmethod
    def of(
        cls,
        data: Data,
        observed: Rows,
        lengths: Ends,
        covariates: Rows,
        states: Rows,
        event_axes: int | None,
        device: torch.device,
    ) -> "Sequences":
        """The arguments of a method; `event_axes` is None if an emission does not say the number of those axes."""
        is_list, sizes = isinstance(data, list | tuple), None
        if is_list:
            if lengths is not None:
                raise ValueError("lengths: expected None with a list of sequences, which has them")
            sizes = [len(as_tensor(f"data[{i}]", part, device, least=1)) for i, part in enumerate(data)]
            lengths = torch.tensor(sizes, dtype=torch.int64)
        rows = as_rows("data", data, sizes, device)
        observed, covariates, states = (
            None if value is None else as_rows(name, value, sizes, device)
            for name, value in (("observed", observed), ("covariates", covariates), ("states", states))
        )
        ends = None if lengths is None else tensor_of(lengths)
        packed = is_list or (event_axes == rows.dim() - 1 and ends is not None and ends.dim() == 1)
        if event_axes is not None:
            steps = rows.shape[: max(rows.dim() - event_axes, 0)]  # (*B, v), or (total)
        else:
            steps = rows.shape[: 1 + (0 if ends is None or packed else ends.dim())]
        if not steps:
            raise ValueError(f"data: expected shape [..., v{', ...' * bool(event_axes)}], got {list(rows.shape)}")
        known = observed
        if observed is not None and event_axes is not None:
            known = mask_of(observed, rows.shape, steps)
        elif observed is not None:
            # the shape of the mask says how many axes of the data are those of an event
            check_mask(observed, *(rows.shape[:end] for end in range(1, rows.dim() + 1)))
            steps = observed.shape
        if packed:
            ends = _checked_sizes(ends, rows)
        elif ends is not None:
            ends = as_lengths(lengths, rows.new_empty(()).expand(*steps, 1), given=("data", rows))
            inside = torch.arange(steps[-1], device=rows.device) < ends[..., None]  # (*B, v)
            known = inside if known is None else known & over(inside, known.shape)
            if covariates is not None and covariates.shape[: inside.dim()] == inside.shape:
                covariates = fill(covariates, inside)
        if known is not None:
            rows = fill(rows, known)  # entries that are not observed may be outside the emission's support
            known = known if event_axes is None else over(known, rows.shape)
        batch_axes = None if event_axes is None and not packed else len(steps) - 1
        return cls(rows, known, covariates, states, ends, batch_axes, packed, is_list)

    @property
    def cu_seqlens(self) -> Tensor | None:
        """The offsets of packed sequences."""
        return offsets(self.lengths) if self.packed else None

    @property
    def has_one_step_each(self) -> bool:
        """Whether there are several sequences, of one step each."""
        steps = len(self.data) // len(self) if self.packed else self.data.shape[self.batch_axes or 0]
        return bool(self.batch_axes or self.packed) and len(self) > 1 and steps == 1

    def __len__(self) -> int:
        return len(self.lengths if self.packed else self.data)

    def __getitem__(self, index: Tensor) -> "Sequences":
        """The sequences at these places along the first axis."""
        rows = index
        if self.packed:
            places = torch.arange(len(self.data)).split(self.lengths.tolist())
            rows = torch.cat([places[i] for i in index.tolist()]).to(self.data.device)
        parts = {name: part[rows] for name, part in self._tensors().items() if part.shape[:1] == self.data.shape[:1]}
        lengths = None if self.lengths is None else self.lengths[index.to(self.lengths.device)]
        return replace(self, lengths=lengths, **parts)

    def with_batch(self) -> "Sequences":
        """The same with a batch axis, which a single sequence lacks."""
        if self.packed or self.batch_axes != 0:
            return self
        lengths = None if self.lengths is None else self.lengths[None]
        parts = {name: part[None] for name, part in self._tensors().items()}
        return replace(self, batch_axes=1, lengths=lengths, **parts)

    def in_layout(self, rows: Tensor, axis: int = 0) -> Any:
        """Results of each step in the layout of the data: of a list, a list."""
        return list(rows.split(self.lengths.tolist(), axis)) if self.is_list else rows

    def split(self, rows: Tensor, batch_axes: int) -> list[Tensor]:
        """The rows `[v_i, ...]` of each sequence."""
        if self.packed:
            return list(rows.split(self.lengths.tolist()))
        each = list(rows.flatten(0, batch_axes - 1)) if batch_axes else [rows]
        ends = [None] * len(each) if self.lengths is None else self.lengths.flatten().tolist()
        return [part[:end] for part, end in zip(each, ends, strict=True)]

    def _tensors(self) -> dict[str, Tensor]:
        parts = {"data": self.data, "known": self.known, "covariates": self.covariates, "states": self.states}
        return {name: part for name, part in parts.items() if part is not None}


def as_tensor(name: str, value: object, device: torch.device, least: int = 0) -> Tensor:
    """A dense tensor as it is, or a copy of an array on the device, of at least so many axes."""
    if isinstance(value, Tensor):
        check_dense(name, value)
        tensor = value
    elif hasattr(value, "__array__"):
        array = np.array(value, order="C")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name}: expected numbers, got an array of {array.dtype}")
        tensor = torch.from_numpy(array).to(device)
    else:
        expected = "a torch.Tensor, a numpy array or a list of these"
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}; pass torch.tensor({name})")
    if tensor.dim() < least:
        raise ValueError(f"{name}: expected shape [v, ...], got []")
    return tensor


def as_rows(name: str, value: Any, sizes: list[int] | None, device: torch.device) -> Tensor:
    """A tensor or array; or, with sizes, the rows of a list of sequences."""
    if sizes is None:
        return as_tensor(name, value, device)
    if not isinstance(value, list | tuple) or len(value) != len(sizes):
        got = len(value) if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"{name}: expected a list of {len(sizes)} sequences, as data, got {got}")
    if not sizes:
        raise ValueError("data: expected at least one sequence, got an empty list")
    parts = [as_tensor(f"{name}[{i}]", part, device, least=1) for i, part in enumerate(value)]
    for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if (len(part), *part.shape[1:]) != (size, *parts[0].shape[1:]):
            expected = [size, *parts[0].shape[1:]]
            raise ValueError(f"{name}[{i}]: expected shape {expected} to go with the others, got {list(part.shape)}")
    return torch.cat(parts)


def offsets(lengths: Tensor) -> Tensor:
    """Offsets `[n + 1]` of sequences of these lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _checked_sizes(lengths: Tensor, rows: Tensor) -> Tensor:
    check_integers("lengths", lengths)
    lengths = lengths.to("cpu", torch.int64)
    if not len(lengths) or int(lengths.min()) < 1 or int(lengths.sum()) != len(rows):
        expected = f"positive integers with sum {len(rows)} to go with concatenated data {list(rows.shape)}"
        raise ValueError(f"lengths: expected {expected}, got {lengths.tolist()[:9]} with sum {int(lengths.sum())}")
    return lengths
