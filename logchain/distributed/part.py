"""The part of a chain that a rank holds, and its scans, which exchange only boundary messages.

    forward     a_r = a_{r-1} M_r        M_r: the product of the steps of rank r
    backward    b_{r-1} = M_r b_r

All ranks scan at once, from a guess: the neighbor scans a few of its steps from a uniform message and sends the result.
A rank scans again if the neighbor's message, once it arrives, differs by more than rounding (Hilbert's metric).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import arguments, kernels
from ..internals import is_transformed
from ..kernels.chain import Chain
from ..kernels.message import Message, Residuals
from ..kernels.weights import Weights
from ..operands import check_chain, check_signs
from ..rescues import report_boundaries, report_chains
from ..schedules.segments import disagree
from ..tensors import differentiated
from ..transitions.dense import Dense
from .ranks import Ranks

# the steps of a guess: 1 in 32 of a part's, and at least 32
_SHARE, _STEPS = 32, 32

# the arguments of all functions: x, bulk, p0, group, log_params, lengths, one_matrix
Call = tuple[Tensor, Tensor, Tensor, Any, bool, arguments.Lengths | None, bool | None]


class Part:
    """This rank's part of chains, once all ranks agree on the arguments of a function.

    `reached`, `continues`: whether a sequence (g, m) has a variable here, and whether it has one after; `lengths` [*B]
    are the numbers of those here. `entered`: whether variables of another rank precede. `needs`: whether some rank
    needs the gradients of x, bulk and p0. `active`: whether there is anything to scan.
    """

    def __init__(
        self, function: str, call: Call, check: Callable[[], object] = lambda: None, *,
        dtype: Callable[..., torch.dtype] | None = None, by_log: bool = False, full: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """`options` are the same on all ranks; operands get the `dtype`, if any; and each step a matrix, if `full`."""
        x, bulk, p0, group, self.log_params, _, one_matrix = call
        self.ranks = ranks = Ranks(group)
        fields, details = ranks.agree(lambda: _described(function, call, check, options))
        sizes, matrices, needed = zip(*details, strict=True)
        ranks.arrange(sizes)
        self.needs: Sequence[bool] = [any(need) for need in zip(*needed, strict=True)]
        self.one_matrix = all(count == 1 for count in matrices) if one_matrix is None else one_matrix
        for rank, (size, count) in enumerate(zip(sizes, matrices, strict=True)):
            expected = 1 if self.one_matrix else max(0, size - (sum(sizes[:rank]) == 0))
            if count != expected:
                text = "1 for every step" if self.one_matrix else f"{expected} matrices, or 1 on every rank,"
                raise ValueError(f"rank {rank}: bulk: expected {text} to go with v_r = {size}, got {count}")
        start, (*batch, v, c) = sum(sizes[: ranks.rank]), x.shape
        self.entered = bool(ranks.place)
        x, bulk, p0 = (operand.detach().to(dtype(*call[:3]) if dtype else operand.dtype) for operand in (x, bulk, p0))
        if full:
            bulk, self.one_matrix = bulk.expand(*batch, max(0, v - (start == 0)), c, c), False
        self.operands = x, bulk, p0
        whole = None
        if fields["lengths"] is not None:
            whole = arguments.as_lengths(fields["lengths"], x.new_empty(()).expand(*batch, sum(sizes), c))
        self.lengths = None if whole is None else (whole - start).clamp(0, v)
        steps = bulk if v > 1 or self.entered else bulk[..., :0, :, :]
        self.chain = Chain.of(x, steps, p0, self.lengths, self.log_params, by_log=by_log, stretch=True)
        self.layout = self.chain.layout
        self.reached = self.continues = torch.ones(self.layout.grid, dtype=torch.bool, device=x.device)
        if whole is not None:
            left = self.layout.grouped(whole) - start
            self.reached, self.continues = left > 0, left > v
        self.active = ranks.place is not None and self.reached.numel() > 0

    def zeros(self, *sizes: int) -> Tensor:
        """Float64 zeros (g, m, *sizes)."""
        return torch.zeros(*self.layout.grid, *sizes, dtype=torch.float64, device=self.chain.x.device)

    def batched(self, values: Tensor) -> Tensor:
        """Values (g, m) of sequences as [*B], or those (..., g, m, k) of states or variables as [..., *B, k]."""
        if values.dim() == 2:
            return self.layout.batched(values).contiguous()
        return self.layout.states(values.view(*values.shape[:-3], *self.chain.lead, values.shape[-1]))

    def states_after(self, *draws: int) -> Tensor:
        """The states (*draws, g, m) of the variable after this part, once the next rank sends them; -1 for none."""
        states = torch.full((*draws, *self.layout.grid), -1, device=self.chain.x.device)
        self.ranks.exchange(-1, None, states)
        return torch.where(self.continues, states, -1)

    def with_previous(self, x: Tensor, p0: Tensor, potentials: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, p0 and lengths of a chain that begins with the variable before this part, with `potentials` [*B, 1, c]."""
        lengths = None if self.lengths is None else torch.where(self.lengths > 0, self.lengths + 1, 0)
        return torch.cat([potentials, x], -2), torch.full_like(p0, float(not self.log_params)), lengths

    def carry(
        self, scan: Callable[..., Tensor], differ: Callable[..., Tensor], compared: Tensor, step: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The messages (g, m, c) that arrive, 0 if none does, and leave; `step` is 1 forward and -1 backward.

        `scan` maps the message that enters this rank's chain, or a window of it, to the one that leaves; None enters
        at the end of all. `differ` says for which sequences two messages differ, and `compared` where that counts.
        """
        v, c, ranks = self.chain.v, self.chain.c, self.ranks
        guess, arrived = self.zeros(c), self.zeros(c)
        if not self.active:
            return arrived, arrived
        first, count = ranks.neighbor(-step) is None, min(v, max(v // _SHARE, _STEPS))
        with kernels.arithmetic_on(self.chain.x):
            sent = leaving = None
            if first and count == v:
                sent = leaving = scan(self.chain, None)
            elif ranks.neighbor(step) is not None:
                sent = scan(self._window(v - count, v) if step > 0 else self._window(0, count), self.zeros(c))
            ranks.exchange(step, sent, guess)
            leaving = scan(self.chain, None if first else guess) if leaving is None else leaving
            ranks.exchange(step, None, arrived)
            refused = differ(arrived, guess) & compared
            if refused.any():  # the only value that is read on the host
                report_boundaries(refused)
                leaving = scan(self.chain, arrived)
            ranks.exchange(step, leaving)
        return arrived, leaving

    def forward(self, keep: bool) -> tuple[Tensor, Residuals | None]:
        """The log-partitions (g, m), the same on all ranks, and what `backward` reads, to `keep` if there is any."""
        chain, residuals, scale = self.chain, None, self.zeros(2).movedim(-1, 0)
        memory = kernels.messages_of(chain, chain.v + self.entered) if keep and self.active else None

        def scan(chain: Chain, entering: Tensor | None) -> Tensor:
            nonlocal residuals, scale
            message = None if entering is None else Message(entering, self.zeros(2).movedim(-1, 0))
            messages = memory if chain is self.chain else None
            residuals, leaving = kernels.forward(chain, message, keep=messages, leave=True)
            values: Tensor = leaving.values
            scale = leaving.scale
            return values

        self.carry(scan, partial(disagree, chain), self.reached)
        log_norm = self.ranks.exact_total(scale)
        if residuals is not None:
            report_chains(residuals.recomputed)
        return log_norm, residuals._replace(log_norm=log_norm) if residuals is not None and keep else None

    def backward(
        self, log_norm: Tensor, residuals: Residuals | None, weight: Tensor, needs: Sequence[bool] = (False,) * 3
    ) -> tuple[list[Any], Tensor, Tensor]:
        """Gradients of `sum(weight * log_norm)`, and backward messages (g, m, c) before this part and at its end."""
        x, bulk, p0 = self.operands
        # a NaN on one rank is one in the gradients of its sequence on all
        weight = torch.where(log_norm.isnan() & (weight != 0), torch.nan, weight)
        compared = self.continues & (weight != 0) & (log_norm > -torch.inf)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        grad_bulk = torch.zeros(bulk.shape, dtype=self.chain.dtype, device=x.device) if needs[1] else None
        grad_p0 = torch.zeros(p0.shape, dtype=torch.float64, device=x.device) if needs[2] else None
        into_x = None if grad_x is None else self.layout.steps_first(grad_x)
        into_bulk = None if grad_bulk is None or not len(self.chain.bulk) else self.layout.matrices(grad_bulk)

        def scan(chain: Chain, following: Tensor | None) -> Tensor:
            assert residuals is not None
            if chain is not self.chain:
                of_window = residuals._replace(messages=residuals.messages[: chain.v + 1], log_norm=self.zeros())
                return kernels.backward(chain, of_window, self.zeros() + 1, following, None, None)
            before = kernels.backward(chain, residuals, weight, following, into_x, into_bulk)
            if grad_p0 is not None and not self.entered:
                grad_p0.copy_(self.layout.states(before).sum_to_size(p0.shape))
            return before if self.entered else self.zeros(chain.c)

        following, before = self.carry(scan, partial(disagree, self.chain), compared, -1)
        return [grad_x, grad_bulk, grad_p0], before, following

    def _window(self, start: int, stop: int) -> Chain:
        """The steps from `start` to before `stop`, which a message enters; there is no step into the very first."""
        chain, first = self.chain, int(not self.entered)
        start = max(first, start)
        bulk = chain.bulk if self.one_matrix else chain.bulk[start - first : stop - first]
        ends = None if chain.ends is None else (chain.ends - start).clamp(0, stop - start)
        return replace(chain, x=chain.x[start:stop], bulk=bulk, ends=ends)


def _described(
    function: str, call: Call, check: Callable[[], object], options: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """What has to be the same on all ranks, by name, after checks of the arguments, and what may differ."""
    x, bulk, p0, _, log_params, lengths, one_matrix = call
    arguments.check_choice("one_matrix", one_matrix, (None, False, True))
    arguments.check_flag("log_params", log_params)
    if is_transformed():
        raise NotImplementedError("logchain.distributed: expected no transform of torch.func and no forward derivative")
    for name, operand in (("x", x), ("bulk", bulk), ("p0", p0)):
        if hasattr(operand, "to_local"):
            raise TypeError(f"{name}: expected a tensor of this rank alone, got a DTensor; pass its to_local()")
    check_chain(x, bulk, p0, part=True)
    if function not in ("product", "log_prob") and differentiated(x, bulk, p0):
        raise NotImplementedError(f"{function}: expected no gradients, as it has no derivative; use torch.no_grad()")
    ends = None if lengths is None else arguments.tensor_of(lengths)
    if ends is not None and ends.numel():
        arguments.check_integers("lengths", ends)
    if not log_params:
        check_signs(x, Dense(bulk), p0, lambda: [Weights("bulk", bulk), Weights("p0", p0)])
    check()
    return {
        "function": function,
        "x": f"shape {[*x.shape[:-2], 'v', x.shape[-1]]} of {x.dtype} on {x.device.type}".replace("'", ""),
        "bulk": f"axes {list(bulk.shape[:-3])} before its steps, of {bulk.dtype}",
        "p0": f"shape {list(p0.shape)} of {p0.dtype}",
        "log_params": log_params,
        "lengths": None if ends is None else ends.tolist(),
        "one_matrix": one_matrix,
        "gradients": differentiated(x, bulk, p0),
        **options,
    }, (x.shape[-2], bulk.shape[-3], [differentiated(operand) for operand in (x, bulk, p0)])
