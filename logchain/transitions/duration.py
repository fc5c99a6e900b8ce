"""Explicit durations: hidden semi-Markov models, as chains of states that count the steps left."""

import math
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths, batch_sizes, check_flag, check_integers, check_sizes, check_tensor, checked_lengths
from ..chain_arguments import ChainArguments
from ..kernels import in_large_pages
from ..kernels.numbers import log_weights
from ..kernels.structured import Durations
from ..kernels.weights import Weights, check_weights
from ..tensors import differentiated, is_plain, is_readable, last_rows
from .semiring import LINEAR, Semiring
from .transition import Transition, Transposed, check_parameter, look_up

if TYPE_CHECKING:
    from ..marginals import Marginals


class Segments(NamedTuple):
    """The segments of paths, or their posterior probabilities, at each step.

    Attributes:
        states: the state, int64 `[..., v]`, or the posterior of each `[*B, v, c]`.
        begins: whether a segment begins, bool `[..., v]`, or the posterior that one of each state does `[*B, v, c]`.
        durations: the duration of the segment that begins, int64 `[..., v]`, 0 where none does; or the posterior that
            a segment of each state and duration begins `[*B, v, c, D]`.
    """

    states: Tensor
    begins: Tensor
    durations: Tensor


class Duration(Transition):
    r"""A chain that stays in each of c states for an explicit duration: a hidden semi-Markov model.

    A segment of state s lasts d steps with weight `durations[s, d - 1]`, and one of state s' follows with weight
    `matrix[s, s']`. The chain has c D counting states: `(s, r)`, number `s D + r`, is state s with r more steps of its
    segment to come, r from 0 to D - 1. It leads from `(s, r)` to `(s, r - 1)` with weight 1, and from `(s, 0)` to
    `(s', r')` with weight `matrix[s, s'] durations[s', r']`.

    `arguments` maps potentials of the c states to arguments of `logchain`'s functions; `path_segments` and
    `marginal_segments` map paths and posteriors of counting states back. The results of `logchain.filtered` are
    posteriors of states after `.unflatten(-1, (c, D)).sum(-1)`.

    `logchain.marginals(..., transitions="sum")` counts the uses of `matrix` and `durations`. Durations of first
    segments are not among these: add `marginals.states[..., 0, :].unflatten(-1, (c, D))` for an EM step.

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

    axes = (2, 2)

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
        return (torch.cat([parameter.expand(*self.lead, -1, -1).flatten(-2) for parameter in parameters], -1),)

    def from_pattern(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of both parameters; see `Transition.from_pattern`."""
        shapes = [parameter.shape for parameter in self.parameters]
        pairs = zip(gradients[0].split([shape[-2:].numel() for shape in shapes], -1), shapes, strict=True)
        return tuple(part.unflatten(-1, shape[-2:]).sum_to_size(shape) for part, shape in pairs)

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
            x: log-potentials of the states `[*B, v, c]` in nats; those of a segment are added up.
            p0: weights `[*B or ones, c]` of the first segment's state.
            first_durations: weights `[*B or ones, c, D]` of the first segment's duration, by default `durations`;
                required where `durations` differ by steps. Where sequences begin within a segment (left truncation),
                weights of the number of steps that remain of it.
            log_params: whether `matrix`, `durations`, `p0` and `first_durations` are logarithms.
            lengths: the lengths of the sequences, as in `logchain.product`.
            cu_seqlens: the offsets of packed sequences, as in `logchain.product`, for x `[total, c]`.
            right_censored: whether the last segment may go on after the last step. Then a path includes its whole
                duration, up to D. By default it ends at the last step.

        Returns:
            `ChainArguments` with x `[*B, v, c D]`, -inf at a sequence's last step where r > 0 unless `right_censored`,
            the structure, p0 `[*B or ones, c D]`, `lengths`, int64 `[*B]`, and `cu_seqlens`. Weights are logarithms, in
            float32 at least, so that no product of p0 and durations underflows: `log_params` is True.

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
        ends = checked_lengths(lengths, x)
        first = self._shared_durations() if first_durations is None else first_durations
        for name, value, sizes in (("p0", p0, [(c,)]), ("first_durations", first, [(c,), (longest,)])):
            check_tensor(name, value, len(sizes), like=x)
            check_sizes(name, value, (*batch_sizes(batch, value.dim() - len(sizes)), *sizes), x)
        if not log_params:
            self._check_signs(p0=p0, first_durations=first)
        start, first, *parameters = (
            log_weights(weights, log_params, torch.promote_types(weights.dtype, torch.float32))
            for weights in (p0, first, *self.parameters)
        )
        potentials = _repeated(x, longest)
        if not right_censored:
            with torch.no_grad():  # the gradient of a potential of -inf is 0
                unfinished = potentials.view(-1, c, longest)[..., 1:]
                unfinished.index_fill_(0, last_rows(x, ends, cu_seqlens), -math.inf)
        weights = (start[..., None] + first).flatten(-2)
        return ChainArguments(potentials, self.with_parameters(*parameters), weights, True, ends, cu_seqlens)

    def _check_signs(self, **weights: Tensor) -> None:
        """Raise on a CPU for a weight below 0 among these, or in parameters that serve all steps."""
        columns = zip(self.names, self.parameters, self.leads, strict=True)
        weights = {name: parameter for name, parameter, lead in columns if lead[-1:] in ((), (1,))} | weights
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
        """Returns the segments of paths of counting states, as of `viterbi`, `topk_paths` and `sample`.

        Args:
            paths: integers `[..., v]`, -1 where there is no state.
            cu_seqlens: the offsets of packed sequences, for paths `[..., total]`.

        Returns:
            `Segments` of paths; states are -1 where `paths` are. The duration of a right-censored last segment includes
            its steps past the end.

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
            `Segments` of posteriors, `[total, ...]` for packed sequences. Summed over sequences and steps, `durations`
            are the expected counts of an EM step, including first segments.

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
            remedy = "pass cu_seqlens too where sequences are packed"
            raise ValueError(f'marginals: expected those of transitions="full", got transitions {got}; {remedy}')
        posteriors, durations = states.unflatten(-1, self.durations.shape[-2:]), counts.durations
        if cu_seqlens is None:
            durations = torch.cat([posteriors[..., :1, :, :], durations], -3)
        else:
            first = cu_seqlens[:-1].to(states.device, torch.int64)
            durations = durations.index_copy(0, first, posteriors[first])
        return Segments(posteriors.sum(-1), durations.sum(-1), durations)

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, a sum of a shift and of a product with the matrix; see `Transition.apply`."""
        counts = message.unflatten(-1, self.durations.shape[-2:])
        entering = semiring.matmul(counts[..., 0], self.matrix)
        entered = semiring.times(entering[..., None], self.durations[..., None, :, :])
        longest = torch.full_like(counts[..., :1], semiring.zero)  # no state counts down to these
        return semiring.plus(entered, torch.cat([counts[..., 1:], longest], -1)).flatten(-2)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        return self.states + self.matrix.shape[-1] ** 2

    @property
    def mT(self) -> Transition:
        """The transposed matrices, at the same cost."""
        return _TransposedDuration(self)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, a product of parameters from r = 0, and otherwise 1 or 0; see `Transition.entries`."""
        longest = self.durations.shape[-1]
        state, count = target // longest, target % longest
        matrix = look_up(self.matrix, source // longest, state)
        entry = semiring.times(matrix, look_up(self.durations, state, count))
        shift = torch.where(source == target + 1, semiring.one, semiring.zero).to(entry.dtype)
        return torch.where(source % longest == 0, entry, shift)


class _TransposedDuration(Transposed):
    """The transposed matrices of a `Duration`."""

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        matrix, durations = self.parameters
        counts = message.unflatten(-1, durations.shape[-2:])
        entered = semiring.sum(semiring.times(counts, durations[..., None, :, :]), -1)  # [*lead, rows, c]
        ended = semiring.matmul(entered, matrix.mT)
        return torch.cat([ended[..., None], counts[..., :-1]], -1).flatten(-2)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Entries (..., c), each repeated, as (..., c times); fast, in new memory, unless they need a gradient."""
    if differentiated(x) or not is_plain((x,)):
        return x.repeat_interleave(times, -1)
    repeated = in_large_pages(x.new_empty(*x.shape[:-1], x.shape[-1] * times))
    repeated.unflatten(-1, (-1, times)).copy_(x[..., None])
    return repeated
