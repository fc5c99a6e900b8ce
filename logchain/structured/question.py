"""The operands of a question, and where its answers go: sequences of a batch, or packed ones, which are padded."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..arguments import Lengths, check_flag, check_tensor
from ..kernels import in_c
from ..kernels.weights import Weights, check_weights, has_negative
from ..operands import at_hand, read_steps
from ..schedules.packed import row_bounds
from ..transitions import Transition
from .eager import between_graphs
from .operands import Operands, check_operands


class Question:
    """The operands of a chain function: `operands` are those of a batch; packed sequences are padded to one.

    `mask` (n, v) is where packed sequences have rows, None for a batch.
    """

    operands: Operands
    mask: Tensor | None = None

    @between_graphs
    def __init__(
        self,
        x: Tensor,
        transition: Transition,
        p0: Tensor,
        log_params: bool,
        lengths: Lengths | None,
        cu_seqlens: Tensor | None,
        name: str,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._given, self._p0 = transition, p0
        self.operands = operands = self._checked(x, transition, p0, log_params, lengths, cu_seqlens)
        check()
        if not log_params and in_c(x) and at_hand(*operands.tensors):
            shared = [len(lead) == 0 or lead[-1] == 1 for lead in transition.leads]
            for weights, is_shared in zip(self._weights(operands), (*shared, True), strict=True):
                if is_shared and has_negative(weights.values):
                    check_weights(weights)

    def _checked(
        self,
        x: Tensor,
        transition: Transition,
        p0: Tensor,
        log_params: bool,
        lengths: Lengths | None,
        cu_seqlens: Tensor | None,
    ) -> Operands:
        """The operands, after checks of kinds and sizes."""
        if cu_seqlens is None:
            return check_operands(x, transition, p0, log_params, lengths)
        if lengths is not None:
            raise ValueError("lengths: expected None beside cu_seqlens, which holds them")
        check_flag("log_params", log_params)
        check_tensor("p0", p0, 1, like=x)
        starts, ends = row_bounds(x, cu_seqlens)
        counts = ends - starts
        steps = torch.arange(int(counts.max()))
        self.mask = (steps < counts[:, None]).to(x.device)
        # the last row of a sequence again behind its end
        self._rows = (starts[:, None] + torch.minimum(steps, counts[:, None] - 1)).to(x.device)
        self._total, self._per_row = len(x), [lead != (1,) and len(lead) > 0 for lead in transition.leads]
        parameters = [self._padded(*each, x) for each in zip(transition.parameters, transition.leads, strict=True)]
        if p0.dim() > 1 and p0.shape[0] != len(counts):
            raise ValueError(f"p0: expected [c] or [{len(counts)}, c] to go with cu_seqlens, got {list(p0.shape)}")
        structure = transition.with_parameters(*parameters)
        return check_operands(x[self._rows], structure, p0, log_params, counts.to(x.device))

    def check_weights(self) -> None:
        """Raise for a negative weight that is read."""
        if not self.operands.log_params:
            check_weights(*self._weights(self.operands))

    def _weights(self, operands: Operands) -> list[Weights]:
        """The weights as they were given, of which the transitions into variables are read."""
        weights, v = [], operands.x.shape[-2]
        given = self._given
        parts = zip(given.names, given.parameters, given.leads, given.used, strict=True)
        for i, (name, parameter, lead, used) in enumerate(parts):
            if self.mask is not None and self._per_row[i]:  # no transition leads into a first row
                read: Tensor | None = self.by_row(self.mask & (torch.arange(v, device=self.mask.device) > 0))
            else:
                read = read_steps(lead or (1,), v, operands.lengths)
                read = read if read is None or len(lead) else read[0]
            if used is not None:
                every = torch.ones(lead, dtype=torch.bool, device=used.device) if read is None else read
                read = every.view(*every.shape, *(1,) * used.dim()) & used
            weights.append(Weights(f"bulk.{name}", parameter, read))
        return [*weights, Weights("p0", self._p0)]

    def _padded(self, parameter: Tensor, lead: torch.Size, x: Tensor) -> Tensor:
        """A parameter [total, *own] as [n, v - 1, *own], each for the step into its row; a shared one as it is."""
        if lead in ((), (1,)):
            return parameter
        check_tensor("bulk", parameter, 1, like=x)
        if lead != (self._total,):
            own = list(parameter.shape[len(lead) :])
            expected = f"leading axes [] or [1] or [{self._total}] before {own}"
            raise ValueError(f"bulk: expected {expected} to go with cu_seqlens, got {list(parameter.shape)}")
        return parameter[self._rows[:, 1:]]

    def by_row(self, values: Tensor, kept: int = 0) -> Tensor:
        """Values [..., n, v, *kept] of packed sequences as [..., total, *kept]; those of a batch as they are."""
        if self.mask is None:
            return values
        return values.flatten(-2 - kept, -1 - kept).index_select(-1 - kept, self.mask.flatten().nonzero()[:, 0])

    def padded(self, states: Tensor) -> Tensor:
        """Paths [..., total] of packed rows as [..., n, v], and those of a batch; -1 behind a sequence's end."""
        states = states if self.mask is None else states[..., self._rows]
        lengths = self.operands.lengths
        if lengths is None:
            return states
        return torch.where(torch.arange(states.shape[-1], device=states.device) < lengths[..., None], states, -1)

    def counts(self, parameters: tuple[Tensor, ...], *, each: bool = False) -> tuple[Tensor, ...]:
        """Counts of the operands' parameters, in the shapes of those that were given; `each`: one for each step."""
        counts = []
        for i, count in enumerate(parameters):
            if self.mask is not None and (each or self._per_row[i]):  # no transition leads into a first row
                first = count.new_zeros(len(count), 1, *count.shape[2:])
                count = self.by_row(torch.cat([first, count], 1), self.operands.transition.own_axes[i])
            counts.append(count if each else count.reshape(self._given.parameters[i].shape))
        return tuple(counts)
