"""Explicit durations: hidden semi-Markov models, as chains of states that count the steps left."""

import math
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..arguments import (
    Lengths,
    as_lengths,
    batch_sizes,
    check_flag,
    check_integers,
    check_lengths,
    check_sizes,
    check_tensor,
)
from ..chain_arguments import ChainArguments
from ..kernels.numbers import log_weights
from ..kernels.structured import Durations
from ..kernels.weights import Weights, check_weights
from ..tensors import is_readable
from .dense import Dense
from .semiring import LINEAR, Semiring
from .transition import Transition, Transposed, check_parameter, look_up

if TYPE_CHECKING:
    from ..marginals import Marginals


class Segments(NamedTuple):
    """The segments of paths, or their posterior probabilities, by steps.

    Attributes:
        states: the state at each step `[..., v]`, or the posteriors of states `[*B, v, c]`.
        begins: whether a segment begins at each step `[..., v]`, or with what posterior one of each state does
            `[*B, v, c]`.
        durations: the duration of the segment that begins at each step `[..., v]`, 0 where none does, or the posterior
            of each state and duration `[*B, v, c, D]`.
    """

    states: Tensor
    begins: Tensor
    durations: Tensor


class Duration(Transition):
    r"""A chain that stays in each of c states for an explicit duration: a hidden semi-Markov model.

    A path is a sequence of segments. A segment of state s lasts d steps with weight `durations[s, d - 1]`, and one of
    state s' follows with weight `matrix[s, s']`. The chain has c D counting states: `(s, r)`, number `s D + r`, is
    state s with r more steps of its segment to come, r from 0 to D - 1. From r > 0 it leads to `(s, r - 1)` with weight
    1, and from `(s, 0)` to `(s', r')` with weight `matrix[s, s'] durations[s', r']`.

    `arguments` maps potentials of the c states to arguments of `logchain`'s functions; `path_segments` and
    `marginal_segments` map paths and posteriors of counting states back. Posteriors that `logchain.filtered` returns
    are those of states after `.unflatten(-1, (c, D)).sum(-1)`.

    `logchain.marginals(..., transitions="sum")` counts how often each entry of `matrix` and `durations` is used. First
    segments, whose durations are drawn with `p0`, are not among these counts: those are the posteriors of the first
    step, `marginals.states[..., 0, :].unflatten(-1, (c, D))`. An EM step adds both; `Segments.durations` holds both.

    Args:
        matrix: weights `[*B or ones, v-1 or 1, c, c]`, or `[c, c]`, with which one segment follows another; logarithms
            with `log_params`. With a diagonal of 0, segments next to each other have different states.
        durations: weights `[..., c, D]` of each state's durations, from 1 to D steps.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost of a step: `c D + c^2` multiply-adds, where arcs between counting states are `c^2 D`.

    Source: S. Z. Yu, "Hidden semi-Markov models", Artificial Intelligence 174 (2010): the residual-time model.

    >>> matrix, durations = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> Duration(matrix, durations).to_dense()  # from and to (0, 0), (0, 1), (1, 0), (1, 1)
    tensor([[0.0000, 0.0000, 1.0000, 0.0000],
            [1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.0000]])
    """

    own = (2, 2)

    def __init__(self, matrix: Tensor, durations: Tensor) -> None:
        check_parameter("matrix", matrix, 2)
        check_parameter("durations", durations, 2, like=matrix)
        c = matrix.shape[-1]
        if matrix.shape[-2] != c:
            raise ValueError(f"matrix: expected [..., c, c], got {list(matrix.shape)}")
        if durations.shape[-2] != c:
            raise ValueError(f"durations: expected [..., {c}, D] to go with matrix, got {list(durations.shape)}")
        super().__init__(matrix, durations)
        self.states = c * durations.shape[-1]

    @property
    def pattern(self) -> Durations:
        """The sizes of both parameters."""
        return Durations(*self.durations.shape[-2:])

    def to_pattern(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One parameter of the entries of both; see `Transition.to_pattern`."""
        return (torch.cat([one.expand(*self.lead, -1, -1).flatten(-2) for one in parameters], -1),)

    def from_pattern(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of both parameters; see `Transition.from_pattern`."""
        (total,) = gradients
        parts = total.split([one.shape[-2:].numel() for one in self.parameters], -1)
        pairs = zip(parts, self.parameters, strict=True)
        return tuple(part.unflatten(-1, one.shape[-2:]).sum_to_size(one.shape) for part, one in pairs)

    @property
    def matrix(self) -> Tensor:
        """The weights with which one segment follows another `[..., c, c]`."""
        return self.parameters[0]

    @property
    def durations(self) -> Tensor:
        """The weights of each state's durations `[..., c, D]`."""
        return self.parameters[1]

    def arguments(
        self,
        x: Tensor,
        p0: Tensor,
        *,
        first_durations: Tensor | None = None,
        log_params: bool = False,
        lengths: Lengths | None = None,
        cu_seqlens: Tensor | None = None,
        right_censored: bool = False,
    ) -> ChainArguments:
        r"""Returns the arguments of `logchain`'s functions for potentials of the c states.

        Args:
            x: log-potentials `[*B, v, c]` in nats, of each state at each step of its segments.
            p0: weights `[*B or ones, c]` of the first segment's state.
            first_durations: weights `[*B or ones, c, D]` of the first segment's duration, by default `durations`; they
                are needed where `durations` differ by steps. Where a sequence begins within a segment (left
                truncation), those of the steps that are left.
            log_params: whether `matrix`, `durations`, `p0` and `first_durations` are logarithms.
            lengths: the lengths of the sequences, as in `logchain.product`.
            cu_seqlens: the offsets of packed sequences, as in `logchain.product`, for x `[total, c]`. Pass them to the
                function too: they are not among the arguments that are returned.
            right_censored: whether the last segment may go on after the last step. By default it ends there; if it may
                go on, a path includes its whole duration, up to D, of which only the steps in the sequence are seen.

        Returns:
            `ChainArguments` with x `[*B, v, c D]`, which is -inf at a sequence's last step in counting states r > 0
            unless `right_censored`, the structure, p0 `[*B or ones, c D]` and `lengths`, int64 `[*B]`. Weights are
            returned as logarithms, in float32 at least, so that no product of p0 and durations underflows:
            `log_params` is True.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: sizes do not go together, a length is out of range, or `first_durations` are missing. On a CPU
                also if a weight is negative; where parameters differ by steps, it makes its sequence NaN.

        Cost: one number read and D written for each state and step.

        >>> geyser = Duration(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> arguments = geyser.arguments(torch.zeros(3, 2), torch.tensor([1.0, 0.0]))
        >>> arguments.x[-1], arguments.p0.exp()
        (tensor([0., -inf, 0., -inf]), tensor([0.5000, 0.5000, 0.0000, 0.0000]))
        >>> from logchain import product
        >>> product(**arguments._asdict()).exp()  # durations 1, 1, 1 and 2, 1
        tensor(0.7500)
        """
        check_tensor("x", x, 2)
        check_tensor("p0", p0, 1, like=x)
        check_flag("log_params", log_params)
        check_flag("right_censored", right_censored)
        c, longest = self.durations.shape[-2:]
        if x.shape[-1] != c:
            raise ValueError(f"x: expected [..., v, {c}] to go with the matrix of {c} states, got {list(x.shape)}")
        if x.shape[-2] < 1:
            raise ValueError(f"x: expected at least one variable [..., v, {c}], got {list(x.shape)}")
        batch = list(x.shape[:-2])
        if cu_seqlens is not None:
            check_integers("cu_seqlens", cu_seqlens)
            if cu_seqlens.dim() != 1 or x.dim() != 2:
                got = f"{list(cu_seqlens.shape)} and {list(x.shape)}"
                raise ValueError(f"cu_seqlens: expected [n + 1] to go with x [total, {c}], got {got}")
            if lengths is not None:
                raise ValueError("lengths: expected None with cu_seqlens, which holds them")
            batch = [len(cu_seqlens) - 1]
        ends = None if lengths is None else as_lengths(lengths, x)
        if ends is not None and is_readable(ends):
            check_lengths(ends, x.shape[-2])
        check_sizes("p0", p0, (*batch_sizes(batch, p0.dim() - 1), (c,)), x)
        first = self._shared_durations() if first_durations is None else first_durations
        check_tensor("first_durations", first, 2, like=x)
        check_sizes("first_durations", first, (*batch_sizes(batch, first.dim() - 2), (c,), (longest,)), x)
        if not log_params:
            self._check_signs(p0=p0, first_durations=first)
        start, first, *parameters = (
            log_weights(weights, log_params, torch.promote_types(weights.dtype, torch.float32))
            for weights in (p0, first, *self.parameters)
        )
        potentials = x.repeat_interleave(longest, -1)
        if not right_censored:
            with torch.no_grad():  # the gradient of a potential of -inf is 0
                going_on = potentials.view(-1, c, longest)[..., 1:]
                going_on.index_fill_(0, _last_rows(x, ends, cu_seqlens), -math.inf)
        weights = (start[..., None] + first).flatten(-2)
        return ChainArguments(potentials, self.with_parameters(*parameters), weights, True, ends)

    def _check_signs(self, **weights: Tensor) -> None:
        """Raise on a CPU for one of these weights below 0, or in parameters that serve all steps."""
        columns = zip(self.names, self.parameters, self.leads, strict=True)
        weights = {name: one for name, one, lead in columns if lead[-1:] in ((), (1,))} | weights
        if is_readable(*weights.values()):
            check_weights(*starmap(Weights, weights.items()))

    def _shared_durations(self) -> Tensor:
        """The durations [*B or ones, c, D] of all steps."""
        if self.durations.dim() == 2:
            return self.durations
        if self.durations.shape[-3] != 1:
            expected = f"[..., c, D] where durations {list(self.durations.shape)} differ by steps"
            remedy = "pass those of segments that begin at the first step"
            raise ValueError(f"first_durations: expected {expected}, got None; {remedy}")
        return self.durations[..., 0, :, :]

    def path_segments(self, paths: Tensor, cu_seqlens: Tensor | None = None) -> Segments:
        """Returns the segments of paths of counting states, which `viterbi`, `topk_paths` and `sample` return.

        Args:
            paths: integers `[..., v]`, -1 where there is no state.
            cu_seqlens: the offsets of packed sequences, for paths `[..., total]`.

        Returns:
            `Segments`: states int64 `[..., v]`, -1 where `paths` are, begins bool `[..., v]`, and durations int64
            `[..., v]`. The duration of a last segment that is right-censored includes its steps past the end.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: a state is c D or above (checked on a CPU).

        Cost: one number read for each step.

        >>> structure = Duration(torch.ones(2, 2), torch.ones(2, 3))
        >>> segments = structure.path_segments(torch.tensor([2, 1, 0, 0, 4, 3, -1]))
        >>> segments.states, segments.durations
        (tensor([ 0,  0,  0,  0,  1,  1, -1]), tensor([3, 0, 0, 1, 2, 0, 0]))
        """
        check_integers("paths", paths)
        if is_readable(paths) and paths.numel() and (high := int(paths.max())) >= self.states:
            raise ValueError(f"paths: expected states from -1 to c D - 1 = {self.states - 1}, got {high}")
        paths, longest = paths.long(), self.durations.shape[-1]
        begins = (paths % longest == 0).roll(1, -1)
        begins[..., 0 if cu_seqlens is None else cu_seqlens[:-1].long()] = True
        begins &= paths >= 0
        return Segments(paths // longest, begins, torch.where(begins, paths % longest + 1, 0))

    def marginal_segments(self, marginals: "Marginals", cu_seqlens: Tensor | None = None) -> Segments:
        """Returns the posteriors of states and segments, from those of counting states.

        Args:
            marginals: the result of `logchain.marginals(..., transitions="full")` for the result of `arguments`.
            cu_seqlens: the offsets of packed sequences, if `marginals` is of these.

        Returns:
            `Segments`: states `[*B, v, c]`, the posterior of each state; begins `[*B, v, c]`, that a segment of it
            begins; durations `[*B, v, c, D]`, that one of so many steps does. For packed sequences, `[total, ...]`.
            Summed over sequences and steps, `durations` are the expected counts of an EM step, of first segments too.

        Raises:
            ValueError: `marginals` has no transition posteriors of each step.

        Cost: some reads of each posterior. Memory: that of `marginals`.

        >>> from logchain import marginals
        >>> structure = Duration(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> arguments = structure.arguments(torch.zeros(3, 2), torch.tensor([1.0, 0.0]))
        >>> structure.marginal_segments(marginals(**arguments._asdict(), transitions="full")).begins
        tensor([[1.0000, 0.0000],
                [0.0000, 0.3333],
                [0.3333, 0.6667]])
        """
        states, counts = marginals.states, marginals.transitions
        *lead, steps, _ = states.shape
        expected = (*lead, steps - (cu_seqlens is None))
        if not isinstance(counts, Duration) or counts.lead != expected:
            got = "none" if counts is None else repr(counts)
            raise ValueError(f'marginals: expected those of transitions="full", got transitions {got}')
        posteriors, durations = states.unflatten(-1, self.durations.shape[-2:]), counts.durations
        if cu_seqlens is None:
            durations = torch.cat([posteriors[..., :1, :, :], durations], -3)
        else:
            first = cu_seqlens[:-1].to(states.device, torch.int64)
            durations = durations.index_copy(0, first, posteriors[first])
        return Segments(posteriors.sum(-1), durations.sum(-1), durations)

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, a shift and an entry through the matrix; see `Transition.apply`."""
        counts = message.unflatten(-1, self.durations.shape[-2:])
        entering = semiring.matmul(counts[..., 0], self.matrix)
        entered = semiring.times(entering[..., None], self.durations[..., None, :, :])
        return semiring.plus(entered, _shifted(counts, semiring.zero)).flatten(-2)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        return self.states + self.matrix.shape[-1] ** 2

    @property
    def mT(self) -> Transition:
        """The transposed matrices, at the same cost."""
        return _TransposedDuration(self)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, through the matrix from r = 0 and a shift from others; see `Transition.entries`."""
        longest = self.durations.shape[-1]
        state, count = target // longest, target % longest
        matrix = look_up(self.matrix, source // longest, state)
        entry = semiring.times(matrix, look_up(self.durations, state, count))
        shift = torch.where(source == target + 1, semiring.one, semiring.zero).to(entry.dtype)
        return torch.where(source % longest == 0, entry, shift)

    def best(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The largest `message(k) + log P(k, j)` and its lowest k, of a shift and an entry; see `Transition.best`."""
        sizes = self.durations.shape[-2:]
        counts = message.unflatten(-1, sizes)
        entering, state = Dense(self.matrix).best(counts[..., 0])
        entered, source = entering[..., None] + self.durations[..., None, :, :], state[..., None] * sizes[1]
        shifted = _shifted(counts, -math.inf)
        following = torch.arange(1, self.states + 1, device=message.device).view(sizes)
        shifts = (shifted > entered) | ((shifted == entered) & (following < source))
        values, before = torch.maximum(entered, shifted), torch.where(shifts, following, source)
        return values.flatten(-2), before.masked_fill(values == -math.inf, 0).flatten(-2)


class _TransposedDuration(Transposed):
    """The transposed matrices of a `Duration`."""

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        matrix, durations = self.parameters
        counts = message.unflatten(-1, durations.shape[-2:])
        entries = semiring.sum(semiring.times(counts, durations[..., None, :, :]), -1)  # [*lead, rows, c]
        ended = semiring.matmul(entries, matrix.mT)
        return torch.cat([ended[..., None], counts[..., :-1]], -1).flatten(-2)


def _last_rows(x: Tensor, ends: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The row of each sequence's last step, among all rows of x; where lengths are out of range, any row."""
    v = x.shape[-2]
    if cu_seqlens is not None:
        return (cu_seqlens[1:].to(x.device, torch.int64) - 1).clamp(0, v - 1)
    first = torch.arange(x.shape[:-2].numel(), device=x.device) * v
    return first + (v - 1 if ends is None else (ends.flatten() - 1).clamp(0, v - 1))


def _shifted(counts: Tensor, zero: float) -> Tensor:
    """Weights (..., c, D) of the counting states that lead to each by a shift."""
    return torch.cat([counts[..., 1:], torch.full_like(counts[..., :1], zero)], -1)
