"""Sequences as users have them: arrays, padded batches, lists of sequences of different lengths, concatenated rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import Lengths, as_lengths, check_dense, check_integers, tensor_of
from .checks import check_mask, check_rows
from .parameters import fill, over

Array = np.ndarray[Any, Any]
Data = Tensor | Array | Sequence[Tensor | Array]
Rows = Data | None
Ends = Lengths | None


@dataclass(frozen=True, eq=False)
class Sequences:
    """Checked data of a model: a padded batch; or packed, as lists and concatenated sequences become."""

    data: Tensor  # [*B, v, *event], packed [total, *event]; 0 where nothing is known
    known: Tensor | None  # which entries are observed and before the end; None if all
    covariates: Tensor | None  # in the layout of the data, as states
    states: Tensor | None
    lengths: Tensor | None  # int64 [*B] of a batch; None if all are v
    sizes: list[int] | None  # the n lengths of packed sequences
    batch_axes: int | None  # the number of axes of B; None if it is not known
    is_list: bool  # whether results of steps are lists

    @classmethod
    def of(cls, arguments: dict[str, Rows], lengths: Ends, event_axes: int | None, like: Tensor) -> "Sequences":
        """The arguments of a method by name: data, observed, covariates and states, in this order.

        `event_axes` is None if an emission does not say how many axes an event has. Arrays become tensors on the device
        of `like`, with its dtype of numbers where the modules of users take them.
        """
        is_list = isinstance(arguments["data"], list | tuple)
        if is_list and lengths is not None:
            raise ValueError("lengths: expected None with a list of sequences, which has them")
        parts = {
            name: _parts(name, value, is_list, like, event_axes is None or name == "covariates")
            for name, value in arguments.items()
            if value is not None
        }
        sizes = [len(part) for part in parts["data"]] if is_list else None
        for name, of_argument in parts.items():
            if is_list and [len(part) for part in of_argument] != sizes:
                raise ValueError(f"{name}: expected sequences as long as those of data, got other lengths")
        data, mask, covariates, states = (
            None if name not in parts else torch.cat(parts[name]) if is_list else parts[name][0] for name in arguments
        )
        assert data is not None
        ends = None if lengths is None else tensor_of(lengths)
        if ends is not None and ends.dim() == 1 and data.dim() - 1 == event_axes:
            sizes, lengths, ends = _as_sizes(ends, data), None, None
        axes = data.dim() - event_axes if event_axes is not None else 1 if ends is None else 1 + ends.dim()
        steps = data.shape[: max(axes, 0)]  # (*B, v), or (total)
        if not steps or (is_list and event_axes is not None and len(steps) > 1):
            expected = "sequences [v" if is_list else "shape [..., v"
            raise ValueError(f"data: expected {expected}{', ...' * bool(event_axes)}], got {list(data.shape)}")
        if covariates is not None and event_axes is not None:
            check_rows("covariates", covariates, steps)
        if mask is not None and event_axes is not None:
            check_mask(mask, data.shape, steps, steps[-1:])
            mask = mask.expand(steps) if mask.shape == steps[-1:] else mask
        elif mask is not None:
            # the shape of the mask says how many axes of the data are those of an event
            check_mask(mask, *(data.shape[:end] for end in range(1, data.dim() + 1)))
            steps = mask.shape
        if lengths is not None:
            ends = as_lengths(lengths, data.new_empty(()).expand(*steps, 1), of=("data", data))
            inside = torch.arange(steps[-1], device=data.device) < ends[..., None]  # (*B, v)
            mask = inside if mask is None else mask & over(inside, mask.shape)
            if covariates is not None and covariates.shape[: inside.dim()] == inside.shape:
                covariates = fill(covariates, inside)
        if mask is not None:
            data = fill(data, mask)  # entries that are not observed may be outside the emission's support
            mask = mask if event_axes is None else over(mask, data.shape)
        batch_axes = None if event_axes is None and sizes is None else len(steps) - 1
        return cls(data, mask, covariates, states, ends, sizes, batch_axes, is_list)

    @property
    def cu_seqlens(self) -> Tensor | None:
        """The offsets of packed sequences."""
        return None if self.sizes is None else torch.tensor([0, *accumulate(self.sizes)], device="cpu")

    @property
    def has_one_step_each(self) -> bool:
        """Whether there are several sequences, of one step each."""
        steps = max(self.sizes) if self.sizes else self.data.shape[self.batch_axes] if self.batch_axes else 0
        return len(self) > 1 and steps == 1

    def __len__(self) -> int:
        return len(self.data if self.sizes is None else self.sizes)

    def __getitem__(self, index: Tensor) -> "Sequences":
        """The sequences at these places along the first axis."""
        count, sizes, lengths, rows = len(self.data), None, None, index
        offsets = self.cu_seqlens
        if offsets is not None:
            starts, counts = offsets[index.cpu()], offsets.diff()[index.cpu()]
            shifts = (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
            rows = (torch.arange(len(shifts), device="cpu") + shifts).to(self.data.device)
            sizes = counts.tolist()
        if self.lengths is not None:
            lengths = self.lengths[index]
        picked = self._map(lambda part: part[rows] if part.shape[:1] == (count,) else part)
        return replace(picked, sizes=sizes, lengths=lengths)

    def with_batch(self) -> "Sequences":
        """The same sequences, with a batch axis if there is a single one without."""
        if self.sizes is not None or self.batch_axes != 0:
            return self
        lengths = None if self.lengths is None else self.lengths[None]
        return replace(self._map(lambda part: part[None]), batch_axes=1, lengths=lengths)

    def in_layout(self, rows: Tensor, axis: int = 0) -> Any:
        """Results of each step in the layout of the data: a list for a list."""
        return list(rows.split(self.sizes, axis)) if self.is_list and self.sizes else rows

    def last(self, rows: Tensor) -> Tensor:
        """The results of the last steps, `[*B, k]` or `[n, k]`."""
        if self.sizes is not None:
            return torch.stack([part[-1] for part in rows.split(self.sizes)])
        if self.lengths is None:
            return rows[..., -1, :]
        return rows.take_along_dim(self.lengths[..., None, None] - 1, -2)[..., 0, :]

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Sequences":
        parts = self.known, self.covariates, self.states
        known, covariates, states = (None if part is None else function(part) for part in parts)
        return replace(self, data=function(self.data), known=known, covariates=covariates, states=states)


def as_tensor(name: str, value: object, like: Tensor, cast: bool) -> Tensor:
    """A dense tensor as it is, or a copy of an array on the device of `like`, with `cast` in its dtype of numbers."""
    if isinstance(value, Tensor):
        check_dense(name, value)
        return value
    if not hasattr(value, "__array__"):
        expected = "a torch.Tensor, a numpy array or a list of these"
        remedy = f"pass torch.tensor({name if isinstance(value, list | tuple) else name.partition('[')[0]})"
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}; {remedy}")
    array = np.asarray(value)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biuf":
        raise TypeError(f"{name}: expected numbers, got an array of {array.dtype}")
    # torch has int64 for wide unsigned integers, float64 at most, and native byte order
    dtype: Any = np.int64 if kind == "u" and size > 1 else np.float64 if size > 8 else array.dtype.newbyteorder("=")
    tensor = torch.from_numpy(np.array(array, dtype, order="C")).to(like.device)
    if kind == "u" and bool((tensor < 0).any()):
        raise ValueError(f"{name}: expected numbers that int64 holds, got {array.max()}")
    return tensor.to(like.dtype) if cast and tensor.is_floating_point() else tensor


def _parts(name: str, value: Any, is_list: bool, like: Tensor, cast: bool) -> list[Tensor]:
    if not is_list:
        return [as_tensor(name, value, like, cast)]
    if not isinstance(value, list | tuple) or not value:
        got = "none" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"{name}: expected a list of sequences, at least one, got {got}")
    parts = [as_tensor(f"{name}[{i}]", part, like, cast) for i, part in enumerate(value)]
    for i, part in enumerate(parts):
        if not part.dim() or not len(part) or part.shape[1:] != parts[0].shape[1:]:
            expected = ", ".join(("v", *map(str, parts[0].shape[1:])))
            raise ValueError(f"{name}[{i}]: expected shape [{expected}], at least one step, got {list(part.shape)}")
    return parts


def _as_sizes(lengths: Tensor, rows: Tensor) -> list[int]:
    check_integers("lengths", lengths)
    sizes: list[int] = lengths.tolist()
    if min(sizes, default=0) < 1 or sum(sizes) != len(rows):
        expected = f"positive integers with sum {len(rows)} for concatenated data {list(rows.shape)}"
        raise ValueError(f"lengths: expected {expected}, got {sizes} with sum {sum(sizes)}")
    return sizes
