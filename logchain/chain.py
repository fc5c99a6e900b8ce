"""The arguments of a function of a chain, checked once: a batch of sequences, or packed ones, which are concatenated.

Packed sequences are computed in padded batches of similar lengths; on a CPU, one call of C can take them in place.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import kernels
from .arguments import Lengths, check_flag, check_has_values, check_tensor
from .internals import between_graphs
from .kernels.weights import Weights
from .operands import Operands, check_operands, check_signs, named_weights, transition_of
from .schedules.choose import Size, choose
from .tensors import is_plain, read_steps
from .transitions import Transition
from .transitions.dense import Dense

# how many times its length a sequence may be padded to, of dense matrices and of structures, whose steps take longer
_PADDING, _STRUCTURE_PADDING = 1.25, 8.0

_Result = TypeVar("_Result")


class Chain:
    """The operands of a function of a chain.

    Attributes:
        operands: those of a batch; for packed sequences x [total, c], parameters [*sizes] or [1 or total, *sizes], and
            p0 [c] or [n, c].
        starts, lengths: for packed sequences, the first row and the number of rows of each (n), on the host.
        packed: whether sequences are packed.
        padded: whether packed sequences are computed in padded batches.
    """

    starts: Tensor
    lengths: Tensor

    def __init__(self, operands: Operands, bounds: tuple[Tensor, Tensor] | None, p0: Tensor, bulk: Transition) -> None:
        self.operands, self._p0, self._bulk = operands, p0, bulk
        self.packed = self.padded = bounds is not None
        if bounds is not None:
            self.starts, self.lengths = bounds[0], bounds[1] - bounds[0]

    @classmethod
    def of(
        cls,
        x: Tensor,
        bulk: Tensor | Transition,
        p0: Tensor,
        log_params: bool,
        lengths: Lengths | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        prefix: str = "",
        in_pieces: bool = False,
    ) -> "Chain":
        """The arguments, checked; `prefix` comes before their names in errors, `in_pieces` as in `check_chain`."""
        check = _checked_between_graphs if isinstance(bulk, Transition) else _checked
        return check(x, bulk, p0, log_params, lengths, cu_seqlens, prefix, in_pieces)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return self.operands.dtype

    def of_tensors(self, *tensors: Tensor) -> "Chain":
        """The same sequences with other operands of the same shapes: x, p0 and the parameters."""
        chain = copy(self)
        chain.operands = self.operands.of(*tensors)
        return chain

    def batches(self) -> Iterator[Operands]:
        """The operands of the batch, or of batches of packed sequences, the longest first."""
        return map(self._batch, self._groups) if self.padded else iter([self.operands])

    def map(self, function: Callable[..., _Result], *columns: list[Any]) -> list[_Result]:
        """The results of a function of each batch's operands, and of the batch's entry in each column."""
        compute = _mapped if self.operands.is_dense else _mapped_between_graphs
        return compute(self, function, *columns)

    def by_sequence(self, values: Sequence[Tensor], lead: int = 0) -> Tensor:
        """Values [*B, ...] or [n, ...], from those of the sequences of each batch (k, ...), after `lead` other axes."""
        if not self.padded:
            return values[0]
        place = torch.argsort(torch.cat(self._groups)).to(values[0].device)
        return torch.cat(list(values), lead).index_select(lead, place)

    def by_variable(self, values: Sequence[Tensor], lead: int = 0) -> Tensor:
        """Values [*B, v, ...] or [total, ...], from those of the variables of each batch (k, v, ...).

        `lead`: the number of axes before these.
        """
        if not self.padded:
            return values[0]
        rows, parts = [], []
        for members, value in zip(self._groups, values, strict=True):
            inside = torch.arange(value.shape[lead + 1], device="cpu") < self.lengths[members][:, None]
            # as numbers, since a mask on a device without values has no known number of rows
            inside = inside.flatten().nonzero()[:, 0].to(value.device)
            rows.append(self._rows(members).flatten().to(value.device)[inside])
            parts.append(value.flatten(lead, lead + 1).index_select(lead, inside))
        return torch.cat(parts, lead).index_select(lead, torch.argsort(torch.cat(rows)))

    def counts(self, values: Sequence[Tensor], parameter: int, *, by_step: bool) -> Tensor:
        """Expected counts in the shape of a parameter, from those of each batch; `by_step`: one for each step."""
        shape = self._bulk.parameters[parameter].shape
        if not self.padded:
            return values[0] if by_step else values[0].reshape(shape)
        if not (by_step or self._by_row(parameter)):
            return torch.stack(list(values)).sum(0).reshape(shape)
        # no transition leads into a first row
        first = [value.new_zeros(len(value), 1, *value.shape[2:]) for value in values]
        return self.by_variable([torch.cat(pair, 1) for pair in zip(first, values, strict=True)])

    def paths(self, states: Tensor) -> list[Tensor]:
        """Paths [*S, *B, v] or [*S, total] of the sequences of each batch [*S, k, v]; -1 after a sequence's end."""
        if not self.packed:
            return [_inside(states, self.operands.lengths)]
        if not self.padded:
            return [states]
        return [
            _inside(states[..., self._rows(members).to(states.device)], self.lengths[members].to(states.device))
            for members in self._groups
        ]

    @cached_property
    def _groups(self) -> list[Tensor]:
        """The sequences of each batch, by number."""
        order = torch.argsort(self.lengths, descending=True, stable=True)
        groups, first = [], 0
        padding = _PADDING if self.operands.is_dense else _STRUCTURE_PADDING
        longest = self.lengths[order].tolist()
        for i in range(1, len(order) + 1):
            if i == len(order) or longest[i] * padding < longest[first]:
                groups.append(order[first:i])
                first = i
        return groups

    def _rows(self, members: Tensor) -> Tensor:
        """The rows of each member (k, v), its last one again after its end."""
        lengths = self.lengths[members]
        steps = torch.minimum(torch.arange(int(lengths[0]), device="cpu"), lengths[:, None] - 1)
        return self.starts[members][:, None] + steps

    def _by_row(self, parameter: int) -> bool:
        """Whether a parameter has values for each row."""
        return self._bulk.leads[parameter] not in ((), (1,))

    def _batch(self, members: Tensor) -> Operands:
        x, transition, p0, _, log_params, _ = self.operands
        lengths, rows = self.lengths[members], self._rows(members)
        start, end = int(rows[0, 0]), int(rows[0, -1]) + 1
        rows = rows.to(x.device)
        alone = len(members) == 1  # views
        parameters = []
        for i, (parameter, sizes) in enumerate(zip(transition.parameters, transition.sizes, strict=True)):
            if not self._by_row(i):
                parameters.append(parameter.reshape(1, 1, *sizes))
            else:
                parameters.append(parameter[start + 1 : end][None] if alone else parameter[rows[:, 1:]])
        start_weights = p0[None] if p0.dim() == 1 else p0[members.to(p0.device)]
        x = x[start:end][None] if alone else x[rows]
        alike = bool((lengths == lengths[0]).all())
        structure = transition.with_parameters(*parameters)
        return Operands(x, structure, start_weights, None if alike else lengths.to(x.device), log_params)

    def in_place(self, *, one_matrix: bool = False) -> "Chain":
        """The chain with packed sequences as one batch that kernels read in place, if they can, as the C loops do.

        Few long sequences stay in batches, which are cut into segments. `one_matrix`, for functions without such a
        schedule: read a chain in place if it has one matrix for all steps, and no other.
        """
        operands, tensors = self.operands, self.operands.tensors
        if not (self.packed and operands.is_dense and is_plain(tensors) and operands.x.numel()):
            return self
        if not all(map(kernels.in_c, tensors)) or (self._by_row(0) if one_matrix else self._in_segments):
            return self
        chain = copy(self)
        chain.padded, chain.operands = False, operands._replace(lengths=self.lengths, packed=self)
        return chain

    @cached_property
    def _in_segments(self) -> bool:
        n, v, c = len(self.lengths), int(self.lengths.max()), self.operands.x.shape[-1]
        if self._by_row(0) and len(self._groups) < n:  # matrices would have to be copied
            return False
        size = Size(n, v, c, self.dtype.itemsize, not self._by_row(0), lengths=False)
        return choose(size, False, "auto")[0].segments > 1

    def weights(self, prefix: str = "") -> list[Weights]:
        """The weights as they were passed, of which the transitions into variables are read."""
        return [*named_weights(f"{prefix}bulk", self._bulk, self.reads()), Weights(f"{prefix}p0", self._p0)]

    def reads(self) -> list[Tensor | None]:
        """Which of the leading axes of each parameter, as it was passed, are read: masks, or None for all."""
        reads, x = [], self.operands.x
        for i, lead in enumerate(self._bulk.leads):
            if self.packed:  # no transition leads into a first row
                rows = torch.ones(len(x), dtype=torch.bool, device=self._bulk.device)
                rows[self.starts.to(rows.device)] = False
                read: Tensor | None = rows if self._by_row(i) else rows.any(0, keepdim=bool(lead))
            else:
                read = read_steps(lead or (1,), x.shape[-2], self.operands.lengths)
                read = read if read is None or len(lead) else read[0]
            reads.append(read)
        return reads


def _inside(states: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return states
    return torch.where(torch.arange(states.shape[-1], device=states.device) < lengths[..., None], states, -1)


def _mapped(chain: Chain, function: Callable[..., _Result], *columns: list[Any]) -> list[_Result]:
    return [function(*arguments) for arguments in zip(chain.batches(), *columns, strict=True)]


_mapped_between_graphs = between_graphs(_mapped)


def _checked(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    log_params: bool,
    lengths: Lengths | None,
    cu_seqlens: Tensor | None,
    prefix: str,
    in_pieces: bool,
) -> Chain:
    check_flag("log_params", log_params)
    bounds = None
    if cu_seqlens is None:
        operands = check_operands(x, bulk, p0, log_params, lengths, in_pieces=in_pieces)
    else:
        bounds = _bounds(x, lengths, cu_seqlens)
        operands = _packed_operands(x, transition_of(bulk), p0, log_params, len(bounds[0]))
    chain = Chain(operands, bounds, p0, bulk if isinstance(bulk, Transition) else Dense(bulk))
    if not log_params:
        check_signs(x, operands.transition, p0, partial(chain.weights, prefix))
    return chain


_checked_between_graphs = between_graphs(_checked)


def _packed_operands(x: Tensor, transition: Transition, p0: Tensor, log_params: bool, n: int) -> Operands:
    """The operands of n packed sequences, after checks; a structure's other sizes are checked as of one sequence."""
    (total, c), dense = x.shape, isinstance(transition, Dense)
    check_tensor("p0", p0, 1, like=x)
    if p0.shape not in ((c,), (n, c)):
        raise ValueError(f"p0: expected shape [{c}] or [{n}, {c}] to go with cu_seqlens, got {list(p0.shape)}")
    shared = []
    for parameter, axes in zip(transition.parameters, transition.axes, strict=True):
        check_tensor("bulk", parameter, axes, like=x)
        lead, sizes = parameter.shape[: parameter.dim() - axes], parameter.shape[parameter.dim() - axes :]
        expected = torch.Size([c, c]) if dense else sizes
        if lead not in ((), (1,), (total,)) or sizes != expected:
            text = f"[1 or {total}, {', '.join(map(str, expected))}] to go with cu_seqlens"
            raise ValueError(f"bulk: expected shape {text}, got {list(parameter.shape)}")
        shared.append(parameter[None, :1] if lead else parameter)
    if not dense or c == 0:
        check_operands(x[None], transition.with_parameters(*shared), p0[:1] if p0.dim() > 1 else p0, log_params, None)
    return Operands(x, transition, p0, None, log_params)


def _bounds(x: Tensor, lengths: object, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The rows where each sequence starts and ends, on the host."""
    if lengths is not None:
        raise ValueError("lengths: expected None with cu_seqlens, which holds them")
    check_tensor("x", x, 2)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {str(cu_seqlens.dtype)[6:]}")
    if x.dim() != 2:
        raise ValueError(f"x: expected shape [total, c] to go with cu_seqlens, got {list(x.shape)}")
    check_has_values("cu_seqlens", cu_seqlens)
    bounds = cu_seqlens.to("cpu", torch.int64, copy=True)  # the caller may change them before the backward pass
    good = bounds.dim() == 1 and len(bounds) >= 2 and bounds[0] == 0 and bounds[-1] == len(x)
    if not good or not (bounds.diff() > 0).all():
        raise ValueError(f"cu_seqlens: expected rising integers from 0 to {len(x)}, got {cu_seqlens.tolist()}")
    return bounds[:-1], bounds[1:]
