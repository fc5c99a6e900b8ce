"""The operands of a batch of chains: their checks, and their conversion to arguments of kernels."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .arguments import (
    Lengths,
    as_lengths,
    batch_sizes,
    check_lengths,
    check_sizes,
    check_tensor,
    has_values,
)
from .autograd.operator import operator
from .autograd.scan import Steps
from .internals import is_exported, is_transformed
from .kernels import arithmetic_on
from .kernels.chain import Chain
from .kernels.numbers import log_weights
from .kernels.structured import POSTERIORS, Arcs, Cost, Durations, Factors, Structured
from .kernels.weights import Weights, check_weights, has_negative
from .tensors import is_plain, with_axes, with_steps
from .transitions import Transition
from .transitions.dense import Dense

# the fewest states of a structure that is computed as a dense matrix, and how often each entry is read then, at least
_STATES, _READS = 32, 4


class Operands(Structured):
    """Checked operands, those of structures with all batch axes."""

    transition: Transition

    @property
    def is_dense(self) -> bool:
        """Whether the transition is dense."""
        return isinstance(self.transition, Dense)

    @property
    def is_blocks(self) -> bool:
        """Whether matrices are blocks along the diagonal."""
        pattern = self.transition.pattern
        return isinstance(pattern, Factors) and len(pattern.factors) == 1 and pattern.factors[0].blocks > 0

    @property
    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """The arguments of operators, with matrices in place of a dense transition."""
        return self.x, self.transition.parameters[0], self.p0, self.lengths, self.log_params

    def of(self, x: Tensor, p0: Tensor, *parameters: Tensor) -> "Operands":
        """The operands with other tensors of the same shapes."""
        return self._replace(x=x, p0=p0, transition=self.transition.with_parameters(*parameters))

    def detached(self) -> "Operands":
        """The operands without gradients."""
        return self.of(*(tensor.detach() for tensor in self.tensors))

    def skeleton(self) -> "Operands":
        """The operands without tensors, which `of` restores, with a copy of lengths, which the caller may change."""
        no_tensor: Any = None
        lengths = None if self.lengths is None else self.lengths.clone()
        return self._replace(x=no_tensor, transition=self.transition.with_parameters(), p0=no_tensor, lengths=lengths)

    def dense_chain(self, *, by_log: bool = False) -> Chain:
        """The operands with dense matrices as kernels take them; see `kernels.chain.Chain.of`."""
        starts = self.packed.starts if self.packed else None
        return Chain.of(*self.dense, starts, by_log=by_log)

    def with_checked_lengths(self) -> "Operands":
        """The operands for torch's operations, which do not check lengths, also where torch traces or maps these."""
        if self.lengths is None:
            return self
        return self._replace(lengths=checked(self.lengths, self.x.shape[-2], "lengths"))

    def steps(self, *, entered: bool = False) -> Steps:
        """The operands as the differentiable scan takes them."""
        return Steps(*self[:5], entered=entered)

    def part(self, start: int, stop: int) -> "Operands":
        """The variables from `start` to before `stop`, and the matrices that lead into these."""
        transition = self.transition.between(max(0, start - 1), stop - 1)
        lengths = None if self.lengths is None else (self.lengths - start).clamp(0, stop - start)
        return self._replace(x=self.x[..., start:stop, :], transition=transition, lengths=lengths)

    def batch_index(self, tensor: Tensor, chosen: Tensor) -> tuple[Tensor, ...] | None:
        """The indices of chosen sequences along the batch axes of an operand; None if all sequences share it."""
        batch = self.x.shape[:-2]
        sizes = tensor.shape[: len(batch)]
        if all(size == 1 for size in sizes):
            return None
        places = torch.unravel_index(chosen, batch)
        return tuple(place if size > 1 else torch.zeros_like(place) for place, size in zip(places, sizes, strict=True))

    def selected(self, chosen: Tensor) -> "Operands":
        """The operands of chosen sequences, indices of the flattened batch, with one batch axis."""

        def of(tensor: Tensor) -> Tensor:
            index = self.batch_index(tensor, chosen)
            return tensor[index] if index else tensor[(0,) * (self.x.dim() - 2)][None]

        x, *parameters = map(of, self.detached().tensors)
        lengths = None if self.lengths is None else self.lengths.reshape(-1)[chosen]
        return self.of(x.expand(len(chosen), -1, -1), *parameters)._replace(lengths=lengths)

    def cheapest(self, cost: Cost = POSTERIORS) -> "Operands":
        """The operands, with dense matrices in place of a structure that takes longer on a CPU than they do."""
        return self.with_matrices() if self.takes_longer(cost) else self

    def takes_longer(self, cost: Cost) -> bool:
        """Whether a structure takes longer on a CPU than its dense matrices, which are small next to x."""
        # gradients of entries of durations would not be 0 for NaN past a sequence's end
        if self.is_dense or isinstance(self.transition.pattern, Durations):
            return False
        if not self.has_matrices or self.transition.states < _STATES:
            return False
        unit = cost.of_arc if isinstance(self.transition.pattern, Arcs) else cost.of_band
        if unit * self.transition.multiply_adds < self.transition.states**2:
            return False
        return self.matrices_fit(self.x.numel() // _READS)

    @property
    def has_matrices(self) -> bool:
        """Whether values of bands, arcs or durations on a CPU are entries of matrices, and no product underflows."""
        pattern = self.transition.pattern
        if not has_values(self.x) or not kernels.in_c(self.x) or pattern is None:
            return False
        return not isinstance(pattern, Factors) and (self.log_params or not isinstance(pattern, Durations))

    def matrices_fit(self, most: int) -> bool:
        """Whether all matrices together have at most `most` entries."""
        return self.transition.lead.numel() * self.transition.states**2 <= most

    def with_matrices(self) -> "Operands":
        """The operands with dense matrices in place of a structure, whose entries may be sums: in float32 at least."""
        wide = self.transition.map(lambda parameter: parameter.to(self.dtype))
        return self._replace(transition=Dense(wide.to_dense(log_params=self.log_params)))

    def in_c(self, name: str, *arguments: Any) -> Any:
        """The result of a function in C of structures where values are on a CPU; None for structures without it."""
        module = kernels.structured_kernels(self.x, self.transition.pattern) if has_values(self.x) else None
        function = getattr(module, name, None)
        if function is None:
            return None
        with arithmetic_on(self.x):
            return function(self.detached(), *arguments)


def transition_of(bulk: Tensor | Transition, name: str = "bulk") -> Transition:
    """The argument `bulk` as a transition, after a check of its kind; a single matrix [c, c] gets an axis of steps."""
    if isinstance(bulk, Transition):
        return bulk
    check_tensor(name, with_steps(bulk), 3)
    return Dense(with_steps(bulk))


def check_chain(
    x: Tensor, bulk: Tensor | Transition, p0: Tensor, *, in_pieces: bool = False, part: bool = False
) -> Transition:
    """The transition of a chain, after checks of kinds and sizes of the operands.

    `in_pieces`: x and bulk may be on the host with p0 on a GPU. `part`: there may be no variable, and a matrix into
    each.
    """
    transition, like = transition_of(bulk), None if in_pieces else x
    columns = list(zip(transition.parameters, transition.axes, strict=True))
    check_tensor("x", x, 2)
    for parameter, axes in columns:
        check_tensor("bulk", parameter, axes, like=like)
    check_tensor("p0", p0, 1, like=like)
    if in_pieces:
        host = ("cpu",) if kernels.on_gpu(p0) else ()
        for name, value in (("x", x), *(("bulk", parameter) for parameter, _ in columns)):
            if value.device != p0.device and value.device.type not in host:
                raise ValueError(f"{name}: expected device {' or '.join((str(p0.device), *host))}, got {value.device}")
    *batch, v, c = x.shape
    if c < 1 or (v < 1 and not part):
        expected = "one state" if part else "one variable and one state"
        raise ValueError(f"x: expected at least {expected} [..., v, c], got {list(x.shape)}")
    dense, steps = isinstance(transition, Dense), (1, max(0, v - 1), v) if part else (1, v - 1)
    if transition.states != c and not dense:
        raise ValueError(f"bulk: expected {c} states to go with x {list(x.shape)}, got {transition.states}")
    for parameter, axes in columns:
        sizes = [(c,), (c,)] if dense else [(size,) for size in parameter.shape[-axes:]]
        lead = batch_sizes(batch, parameter.dim() - axes - 1)
        check_sizes("bulk", parameter, (*lead, steps, *sizes)[-parameter.dim() :], x, steps=len(lead))
    check_sizes("p0", p0, (*batch_sizes(batch, p0.dim() - 1), (c,)), x)
    return transition


def check_operands(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    log_params: bool,
    lengths: Lengths | None,
    *,
    in_pieces: bool = False,
) -> Operands:
    """The operands, after checks of their kinds and sizes; `in_pieces` as in `check_chain`."""
    structure = isinstance(bulk, Transition) and not isinstance(bulk, Dense)
    if structure and is_transformed():
        raise NotImplementedError("bulk: expected a tensor inside transforms of torch.func, got a structure")
    if structure and is_exported():  # by torch.export or make_fx, whose graph would hold memory without values
        raise NotImplementedError("bulk: expected a tensor inside torch.export, got a structure; pass bulk.to_dense()")
    transition = check_chain(x, bulk, p0, in_pieces=in_pieces)
    ends = None if lengths is None else as_lengths(lengths, x, p0.device)
    # those of dense chains are checked by operators, since values cannot be read where torch traces or maps a call
    if structure and ends is not None:
        check_lengths(ends, x.shape[-2])
    if structure or not is_plain((x, p0, *transition.parameters)):  # as rules for vmap and structures need them
        transition, p0 = transition.with_lead(x.dim() - 1), with_axes(p0, x.dim() - 1)
    return Operands(x, transition, p0, ends, log_params)


def named_weights(name: str, transition: Transition, reads: Sequence[Tensor | None]) -> list[Weights]:
    """The parameters by the names of arguments, of which the steps `reads` [*lead], or all, are read."""
    names = [name] if isinstance(transition, Dense) else [f"{name}.{parameter}" for parameter in transition.names]
    weights = []
    for argument, parameter, read, used in zip(names, transition.parameters, reads, transition.used, strict=True):
        if used is not None:
            every = torch.ones((), dtype=torch.bool, device=used.device) if read is None else read
            read = every[(..., *(None,) * used.dim())] & used
            read = read[(None,) * (parameter.dim() - read.dim())]
        weights.append(Weights(argument, parameter, read))
    return weights


def check_signs(x: Tensor, transition: Transition, p0: Tensor, weights: Callable[[], list[Weights]]) -> None:
    """Raise on a CPU for a weight below 0 in p0, or in parameters that serve all steps."""
    if not kernels.in_c(p0) or not is_plain((x, p0, *transition.parameters)):
        return
    shared = [lead[-1:] in ((), (1,)) for lead in transition.leads]
    below = [has_negative(values) for values in (*compress(transition.parameters, shared), p0)]
    if any(below):
        check_weights(*compress(weights(), (*shared, True)))


def as_dense(operands: Operands) -> Operands:
    """The operands in float64, with dense matrices of logarithms in place of a structure."""
    x, transition, p0, lengths, log_params, _ = operands
    logs = transition.map(lambda weight: log_weights(weight, log_params, torch.float64))
    matrices = Dense(logs.to_dense(log_params=True))
    return Operands(x.double(), matrices, log_weights(p0, log_params, torch.float64), lengths, True)


def check_products(transition: Transition, argument: str = "bulk") -> None:
    """Raise TypeError for a structure whose entries are sums."""
    if transition.sums:
        name = type(transition).__name__
        raise TypeError(
            f"{argument}: expected a structure whose entries are products, got {name}: its entries are sums, through "
            f"which there is no best path. Pass {name}.to_dense(), of c^2 numbers, for the best path of states"
        )


def _checked(values: Tensor, size: int, name: str) -> Tensor:
    if name == "lengths":
        check_lengths(values, size)
    elif not kernels.on_gpu(values) and values.numel():
        low, high = (int(bound) for bound in torch.aminmax(values))
        if low < -1 or high >= size:
            raise ValueError(f"states: expected values from -1 to c - 1 = {size - 1}, got {low} to {high}")
    return values.clone()


# a copy of `lengths` of at most v = `size`, or of `states` below c = `size`; raises ValueError for others, except on a
# GPU. It is an operator since values cannot be read where torch traces or maps a call.
checked = operator(
    "checked(Tensor values, SymInt size, str name) -> Tensor", _checked, lambda values, *_: torch.empty_like(values)
)
