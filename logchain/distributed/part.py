"""The part of a chain that a rank holds, and its scans: ranks meet only at boundary messages.

    forward     a_r = a_{r-1} M_r        M_r: the product of the steps of rank r
    backward    b_{r-1} = M_r b_r

All ranks scan at the same time. Each begins with a guess, which its neighbor computes from a uniform message and a few
of its own steps; then it compares the guess with the message that arrives, and scans again from that if they differ by
more than rounding in Hilbert's metric. That takes no longer than to wait for the message in the first place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import arguments, kernels
from ..kernels.chain import Chain
from ..kernels.message import Kept, Message
from ..kernels.numbers import exact_sum
from ..layout import Layout
from ..operands import arithmetic_dtype, differentiated
from ..rescues import report_boundaries, report_chains
from ..schedules.segments import disagree
from .ranks import Ranks

# a guess takes this share of a part's steps, and at least so many
_SHARE, _STEPS = 32, 32

# the operands of a function as it is called: x, bulk, p0, group, log_params, lengths, one_matrix
Call = tuple[Tensor, Tensor, Tensor, Any, bool, arguments.Lengths | None, bool | None]


class Part:
    """This rank's part of chains, of which `start` variables lie before it, once all ranks agree on their arguments.

    Of each sequence (g, m), `reached` says whether it has a variable here, and `continues` whether it has one after.
    `needs`: whether some rank needs the gradients of x, bulk and p0. `kept` and `entering` are of the last `forward`.
    """

    kept: Kept | None = None
    entering: Tensor | None = None

    def __init__(
        self, function: str, call: Call, check: Callable[[], Any] = lambda: None, *,
        dtype: Callable[..., torch.dtype] | None = None, by_log: bool = False, full: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """`check` checks more arguments and returns details of this rank; `options` are the same on all ranks.

        Operands are converted to `dtype` of them, if there is one; `full`: so that each step has a matrix.
        """
        x, bulk, p0, group, self.log_params, lengths, one_matrix = call
        self.ranks = ranks = Ranks(group)

        def describe() -> tuple[dict[str, Any], Any]:
            fields, needs = _described(function, *call) | options, [differentiated(operand) for operand in call[:3]]
            return fields, (x.shape[-2], bulk.shape[-3], needs, check())

        sizes, matrices, needed, self.details = zip(*ranks.agree(describe), strict=True)
        self.start, v = sum(sizes[: ranks.rank]), x.shape[-2]
        self.needs: Sequence[bool] = [any(need) for need in zip(*needed, strict=True)]
        ranks.arrange(sizes)
        self.entered = bool(ranks.place)
        self.one_matrix = all(count == 1 for count in matrices) if one_matrix is None else one_matrix
        for rank, (size, count) in enumerate(zip(sizes, matrices, strict=True)):
            expected = 1 if self.one_matrix else max(0, size - (sum(sizes[:rank]) == 0))
            if count != expected:
                text = "1 for every step" if self.one_matrix else f"{expected} matrices, or 1 on every rank,"
                raise ValueError(f"rank {rank}: bulk: expected {text} to go with v_r = {size}, got {count}")
        x, bulk, p0 = (operand.detach().to(dtype(*call[:3]) if dtype else operand.dtype) for operand in (x, bulk, p0))
        if full:
            bulk, self.one_matrix = bulk.expand(*x.shape[:-2], max(0, v - (self.start == 0)), *bulk.shape[-2:]), False
        self.operands, self.layout = (x, bulk, p0), Layout.of(x, bulk)
        self.lengths = ends = None
        self.reached = self.continues = torch.ones(self.layout.grid, dtype=torch.bool, device=x.device)
        if lengths is not None:
            whole = arguments.as_lengths(lengths, x.new_empty(()).expand(*x.shape[:-2], sum(sizes), x.shape[-1]))
            arguments.check_lengths(whole, sum(sizes))
            self.lengths = (whole - self.start).clamp(0, v)
            left = self.layout.sequences(whole) - self.start
            ends, self.reached, self.continues = left[..., None].clamp(0, v), left > 0, left > v
        steps = self.layout.matrices(bulk)[: None if v > 1 or self.entered else 0]
        operands = self.layout.steps_first(x), steps, self.layout.weights(p0)
        self.chain = Chain(*operands, ends, self.log_params, arithmetic_dtype(x, bulk, p0), by_log=by_log)
        self.active = ranks.place is not None and self.reached.numel() > 0

    def zeros(self, *sizes: int) -> Tensor:
        """Float64 zeros (g, m, *sizes)."""
        return torch.zeros(*self.layout.grid, *sizes, dtype=torch.float64, device=self.chain.x.device)

    def batched(self, values: Tensor) -> Tensor:
        """Values (g, m) of sequences as [*B], or those (g, m, c) of states as [*B, c]."""
        if values.dim() == 2:
            return self.layout.batched(values).contiguous()
        return self.layout.states(values.view(*self.chain.lead, values.shape[-1]))

    def carry(
        self, scan: Callable[[Chain, Tensor | None], Tensor], differ: Callable[[Tensor, Tensor], Tensor],
        meets: Tensor, step: int = 1,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """The message that arrives at this rank, its values (g, m, c), and the one that leaves it, (g, m, c + 2).

        `scan` returns the latter, with the two terms of its scale, for this rank's chain or a window of it, from the
        values that enter, None at the end of all; `differ` says whether values that arrive refuse a guess (g, m), of
        sequences that it `meets`.
        """
        if not self.active:
            return None, None
        v, c, ranks = self.chain.v, self.chain.c, self.ranks
        first, count = ranks.neighbor(-step) is None, min(v, max(v // _SHARE, _STEPS))
        guess, arrived = self.zeros(c + 2), self.zeros(c + 2)
        sent = leaving = scan(self.chain, None) if first and count == v else None  # of a short part no guess is needed
        if sent is None and ranks.neighbor(step) is not None:
            sent = scan(self._window(v - count, v) if step > 0 else self._window(0, count), self.zeros(c))
        ranks.exchange(step, sent, guess)
        leaving = scan(self.chain, None if first else guess[..., :c]) if leaving is None else leaving
        ranks.exchange(step, None, arrived)
        values = arrived[..., :c]
        if not first:
            refused = differ(values, guess[..., :c]) & meets
            if refused.any():
                report_boundaries(refused)
                leaving = scan(self.chain, values)
            # a sequence that has ended, or is NaN, leaves as it arrives
            passes = values.isnan().any(-1) & meets | (~meets if step > 0 else torch.zeros_like(meets))
            terms = torch.cat([leaving[..., c:], arrived[..., c:]], -1).movedim(-1, 0).contiguous()
            scale = torch.stack(exact_sum(terms), -1)
            leaving = torch.cat([torch.where(passes[..., None], values, leaving[..., :c]), scale], -1)
        ranks.exchange(step, leaving)
        return None if first else values, leaving

    def forward(self, keep: bool) -> Tensor:
        """The log-partitions (g, m), the same on all ranks; messages are kept for `backward` if wanted."""
        memory = kernels.messages_of(self.chain, self.chain.v + self.entered) if keep and self.active else None

        def scan(chain: Chain, entering: Tensor | None) -> Tensor:
            message = None if entering is None else Message(entering, self.zeros(2).movedim(-1, 0))
            keep = memory if chain is self.chain else None
            self.kept, leaving = kernels.chain_kernels(chain.x).forward(chain, message, keep=keep, leave=True)
            return torch.cat([leaving.values, leaving.scale.movedim(0, -1)], -1)

        with kernels.arithmetic_on(self.chain.x):
            self.entering, leaving = self.carry(scan, partial(disagree, self.chain), self.reached)
        if self.kept is not None:
            report_chains(self.kept.redone)
        return self.ranks.from_last(self.zeros() if leaving is None else leaving[..., -2:].sum(-1))

    def backward(
        self, log_norm: Tensor, weight: Tensor, needs: Sequence[bool] = (False, False, False)
    ) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
        """The gradients of `sum(weight * log_norm)` by this rank's x, `bulk` and p0, and two backward messages.

        They are those of the variable before this rank's first, and of its last, (g, m, c).
        """
        x, bulk, p0 = self.operands
        # a NaN on one rank is one in the gradients of its sequence on all
        weight = torch.where(log_norm.isnan() & (weight != 0), torch.nan, weight)
        matters = self.continues & (weight != 0) & (log_norm > -torch.inf)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        grad_bulk = torch.zeros(bulk.shape, dtype=self.chain.dtype, device=x.device) if needs[1] else None
        into_x = None if grad_x is None else self.layout.steps_first(grad_x)
        into_bulk = None if grad_bulk is None or not len(self.chain.bulk) else self.layout.matrices(grad_bulk)
        gradients, kernel = [grad_x, grad_bulk, None], kernels.chain_kernels(x).backward

        def scan(chain: Chain, following: Tensor | None) -> Tensor:
            assert self.kept is not None
            if chain is not self.chain:
                kept = self.kept._replace(messages=self.kept.messages[: chain.v + 1], log_norm=self.zeros())
                return without_scale(kernel(chain, kept, self.zeros() + 1, following, None, None))
            following = None if following is None else following.masked_fill(~self.continues[..., None], 0.0)
            before = kernel(chain, self.kept._replace(log_norm=log_norm), weight, following, into_x, into_bulk)
            if self.entered:
                return without_scale(before)
            gradients[2] = self.layout.states(before).sum_to_size(p0.shape) if needs[2] else None
            return self.zeros(chain.c + 2)

        with kernels.arithmetic_on(x):
            following, leaving = self.carry(scan, partial(disagree, self.chain), matters, -1)
        if following is not None:
            following = following.masked_fill(~self.continues[..., None], 0.0)
        return gradients, None if leaving is None else leaving[..., :-2], following

    def whole(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of x, bulk and p0 in their dtypes, summed over ranks if the operand is shared."""
        for i in (1, 2) if self.one_matrix else (2,):
            if self.needs[i]:
                local = gradients[i]
                gradients[i] = self.ranks.total(torch.zeros_like(self.operands[i]) if local is None else local)
        rows = zip(self.operands, gradients, needs, strict=True)
        return [g.to(operand.dtype) if need and g is not None else None for operand, g, need in rows]

    def _window(self, start: int, stop: int) -> Chain:
        """The steps from `start` to before `stop`, which a message enters; there is no step into the very first."""
        chain, first = self.chain, int(not self.entered)
        start = max(first, start)
        bulk = chain.bulk if self.one_matrix else chain.bulk[start - first : stop - first]
        ends = None if chain.ends is None else (chain.ends - start).clamp(0, stop - start)
        return replace(chain, x=chain.x[start:stop], bulk=bulk, ends=ends)


def without_scale(values: Tensor) -> Tensor:
    """Values (g, m, c) of a message that has no scale (g, m, c + 2)."""
    return torch.nn.functional.pad(values, (0, 2))


def _described(
    function: str, x: Tensor, bulk: Tensor, p0: Tensor, group: Any, log_params: bool, lengths: arguments.Lengths | None,
    one_matrix: bool | None,
) -> dict[str, Any]:  # fmt: skip
    """What has to be the same on all ranks, by name, after checks of this rank's arguments."""
    arguments.check_choice("one_matrix", one_matrix, (None, False, True))
    arguments.check_flag("log_params", log_params)
    if arguments.is_transformed():
        raise NotImplementedError("logchain.distributed: expected no transform of torch.func and no forward derivative")
    for name, operand, axes in (("x", x, 2), ("bulk", bulk, 3), ("p0", p0, 1)):
        if hasattr(operand, "to_local"):
            raise TypeError(f"{name}: expected a tensor of this rank alone, got a DTensor; pass its to_local()")
        arguments.check_tensor(name, operand, axes, like=None if name == "x" else x)
    *batch, v, c = x.shape
    if c < 1:
        raise ValueError(f"x: expected at least one state [..., v, c], got {list(x.shape)}")
    lead, ends = arguments.batch_sizes(batch, bulk.dim() - 3), None
    steps = (1, v - 1, v) if v else (1, 0)
    arguments.check_sizes("bulk", bulk, (*lead, steps, (c,), (c,)), x, steps=len(lead))
    arguments.check_sizes("p0", p0, (*arguments.batch_sizes(batch, p0.dim() - 1), (c,)), x)
    if function not in ("product", "log_prob") and differentiated(x, bulk, p0):
        text = "expected operands without gradients, as it has no derivative; call it under torch.no_grad()"
        raise NotImplementedError(f"{function}: {text}")
    if lengths is not None:
        ends = arguments.tensor_of(lengths)
        arguments.check_integers("lengths", ends)
    arguments.check_signs(bulk, p0, log_params)
    return {
        "function": function,
        "x": f"shape {[*batch, 'v', c]} of {x.dtype} on {x.device.type}".replace("'", ""),
        "bulk": f"axes {list(bulk.shape[:-3])} before its steps, of {bulk.dtype}",
        "p0": f"shape {list(p0.shape)} of {p0.dtype}",
        "log_params": log_params,
        "lengths": None if ends is None else ends.tolist(),
        "one_matrix": one_matrix,
        "gradients": differentiated(x, bulk, p0),
    }
