"""The log-partition, posteriors and best path of a chain that comes in pieces and need not end."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Lengths, check_flag, check_float_dtype, check_integer, check_tensor, checked_lengths
from .autograd.scan import ScaledMessage
from .kernels.numbers import probabilities
from .rescues import report_chains
from .streams.filter import filtered, passed, smoothed
from .streams.paths import extended, first_states, settled
from .streams.piece import State, as_transition, checked_transition, in_logs, log_norm
from .streams.stretch import plain_stretch
from .tensors import differentiated, is_plain
from .transitions import Transition
from .transitions.dense import Dense


class StreamUpdate(NamedTuple):
    """The results of `Stream.update` after a piece of k variables.

    Attributes:
        log_norm: the log-partition `[*B]` of all so far, nats.
        filtered: the filtered posteriors `[*B, k, c]` of the states of the piece; None with `filtered=False`.
        smoothed: the posteriors `[*B, m, c]` of the next m states, which `lag` more variables follow; None without one.
        states: int64 `[*B, m]`, the next m states of the best path; None without `viterbi`.
    """

    log_norm: Tensor
    filtered: Tensor | None
    smoothed: Tensor | None
    states: Tensor | None


class Stream:
    r"""`logchain.product` of a chain that comes in pieces, in constant memory, with posteriors as they become known.

    After each piece `log_norm` is the log-partition of the whole chain so far, however it is divided. Between pieces
    one forward message is stored, in float64. `logchain.filtered` is one call for a whole chain.

    Args:
        bulk: one transition matrix `[*B or ones, 1, c, c]` or `[c, c]`, `[from, to]`, or structure of
            `logchain.transitions` for every step; None where each update brings its own. Leading axes may be of size 1
            or left out.
        p0: initial weights `[*B or ones, c]`.
        log_params: `bulk` and `p0` are logarithms (nats).
        lag: L: return the posterior of each state conditional on L more variables (fixed-lag smoothing).
        viterbi: return the states of the best path once later data cannot change them.
        filtered: return the posterior of each state conditional on all variables up to it; False saves the time.
        detach: gradients stop at the start of the present piece; with False they, and memory, reach to the first one.
        dtype: dtype of the results; by default float64 if an operand so far is float64, otherwise float32.
        validate: also check the values of each piece, which costs a pass over the data.

    Operands may be float32, float64, bfloat16 or float16. A NaN in one sequence does not reach the others. Inside
    `torch.compile` there are graph breaks; `torch.vmap` and forward derivatives raise NotImplementedError.

    Raises:
        TypeError: an argument is of the wrong kind, or `viterbi` meets a structure whose entries are sums.
        ValueError: sizes do not go together, a length is out of range, or `validate` finds a value.

    Cost of a piece of k variables: `k c^2` multiply-adds a sequence in k dependent steps, and a fraction of a
    millisecond; with a lag `k L c^2` more in L dependent steps; with `viterbi` `k c^2` additions and maxima, `c` times
    that for up to 32 states. Structures, gradients, and best paths of more states take several of torch's operators a
    step, in float64. Memory: posteriors, some megabytes that pieces share, one message, L variables and their matrices,
    and c 4-byte states for each variable whose best state later data can change, in any of the sequences. A lag,
    `viterbi` and gradients copy the piece in float64.

    Source: the scaled forward recursion of L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989);
    paths that merge, of R. Sramek, B. Brejova and T. Vinar, "On-line Viterbi algorithm for analysis of long biological
    sequences", WABI 2007. Definitions: `logchain.reference.product`, `marginals` and `viterbi` of all pieces together.

    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> stream = Stream(bulk, torch.tensor([0.5, 0.5]), lag=1)
    >>> first = stream.update(torch.tensor([[0.0, 0.0], [0.0, 3.0]]))  # two variables, two states
    >>> first.filtered
    tensor([[0.5000, 0.5000],
            [0.0574, 0.9426]])
    >>> first.smoothed  # the first state, conditional on the second variable too
    tensor([[0.1517, 0.8483]])
    >>> stream.update(torch.zeros(1, 2)).filtered
    tensor([[0.2402, 0.7598]])
    >>> stream.log_norm
    tensor(2.2606)
    """

    def __init__(
        self,
        bulk: Tensor | Transition | None,
        p0: Tensor,
        *,
        log_params: bool = False,
        lag: int = 0,
        viterbi: bool = False,
        filtered: bool = True,
        detach: bool = True,
        dtype: torch.dtype | None = None,
        validate: bool = False,
    ) -> None:
        check_tensor("p0", p0, 1)
        if p0.shape[-1] < 1:
            raise ValueError(f"p0: expected at least one state [..., c], got {list(p0.shape)}")
        check_integer("lag", lag, 0)
        check_float_dtype("dtype", dtype)
        flags = dict(log_params=log_params, viterbi=viterbi, filtered=filtered, detach=detach, validate=validate)
        for name, flag in flags.items():
            check_flag(name, flag)
        self._bulk, self._p0 = None if bulk is None else as_transition("bulk", bulk, 1, p0, viterbi), p0
        self._log_params, self._lag, self._viterbi = log_params, lag, viterbi
        self._filtered, self._detach, self._dtype, self._validate = filtered, detach, dtype, validate
        # what the state depends on
        self._options = dict(c=p0.shape[-1], log_params=log_params, lag=lag, viterbi=viterbi, bulk=bulk is not None)
        self._state: State | None = None

    @property
    def log_norm(self) -> Tensor:
        """The log-partition `[*B]` of all so far, in nats; 0 for a sequence without a variable."""
        state = self._begun()
        return log_norm(state.message).to(self._result_dtype(state))

    @property
    def filtered(self) -> Tensor:
        """The filtered posterior `[*B, c]` of each sequence's newest state; 0 where there is none."""
        state = self._begun()
        return probabilities(state.message.values).to(self._result_dtype(state))

    def update(
        self, x_piece: Tensor, bulk_piece: Tensor | Transition | None = None, *, lengths: Lengths | None = None
    ) -> StreamUpdate:
        """Returns the log-partition, posteriors and best states after the next k variables.

        Args:
            x_piece: log-potentials `[*B, k, c]` in nats; k may differ between updates and be 0, `B` may not differ.
            bulk_piece: transition weights `[*B or ones, k or 1, c, c]` or a structure of as many steps, which lead
                *into* each variable of the piece, if the stream has no `bulk`; with a lag, all updates bring the same
                structure, with other parameters. What leads into a sequence's first variable has no influence.
            lengths: integers from 0 to k of the shape of the first axes of `B`, or one for all: how many variables of
                the piece each sequence has. One that has less than k has ended, until `reset` starts it again.

        Returns:
            `StreamUpdate`. Posteriors are 0, and states -1, where a sequence has no variable and where it is
            impossible. A lag takes no variable past a sequence's end. States of the best path are returned once later
            data cannot change them in any sequence; one that is impossible or NaN has state -1 from the first variable
            that had not been returned before. All results but the states can be differentiated twice, with respect to
            earlier pieces as `detach` says.
        """
        update = self._by_one_call(x_piece, bulk_piece, lengths)
        if update is not None:
            return update
        batch = None if self._state is None else self._state.fresh.shape
        name, transition = checked_transition(x_piece, bulk_piece, self._bulk, self._p0, batch, self._viterbi)
        ends = checked_lengths(lengths, x_piece, least=0)
        state = self._state or State.before(x_piece, self._viterbi)
        piece = state.piece(x_piece, name, transition, self._p0, ends, self._log_params)
        if self._validate:
            piece.check_values()
        double = state.double or torch.float64 in (x_piece.dtype, self._p0.dtype, transition.dtype)
        state = (state.detached() if self._detach else state)._replace(double=double)
        dtype = self._result_dtype(state) if self._filtered else None
        message, posteriors, messages = filtered(piece, state.message, dtype, self._lag > 0)
        state, ready, states = state.after(piece, message, ends), None, None
        if self._lag and messages is not None:
            ready, window = passed(state.window, piece.logs, messages, self._lag)
            state = state._replace(window=window)
        if state.survivors is not None:
            with torch.no_grad():
                states, survivors = settled(extended(state.survivors, piece.logs))
            state = state._replace(survivors=survivors)
        return self._to(state, posteriors, ready, states)

    def _by_one_call(self, x: Tensor, bulk_piece: object, lengths: Lengths | None) -> StreamUpdate | None:
        """The results of `update` by one call of the C library, or None.

        That takes sequences that all go on, no gradients, and no results but log-partition and filtered posteriors.
        """
        state = self._state
        if self._lag or self._viterbi or self._validate or bulk_piece is not None or lengths is not None:
            return None
        if state is None or not state.running or not isinstance(self._bulk, Dense):
            return None
        if not isinstance(x, Tensor) or not is_plain((x,)):
            return None
        bulk, message = self._bulk.parameters[0], state.message
        if self._result_dtype(state) != x.dtype or differentiated(x, bulk, self._p0, *message):
            return None
        plain = plain_stretch(x, bulk, self._p0, self._log_params, message.values)
        if plain is None:
            return None
        shares = torch.empty_like(x, memory_format=torch.contiguous_format) if self._filtered else None
        stretch, log_norm = plain[0], torch.empty_like(plain[1])
        leaving, recomputed = stretch.forward(x, bulk, message, shares=shares, value=log_norm)
        report_chains(recomputed)
        self._state = state._replace(message=ScaledMessage(*leaving))
        return StreamUpdate(log_norm, shares, None, None)

    def flush(self) -> StreamUpdate:
        """Ends all sequences, and returns the posteriors and states that waited for more variables.

        `reset` starts sequences again.

        Returns:
            `StreamUpdate`, whose filtered posterior is empty.

        Raises:
            RuntimeError: there was no update before.

        >>> stream = Stream(torch.eye(2)[None], torch.tensor([0.5, 0.5]), viterbi=True)
        >>> stream.update(torch.tensor([[0.0, 0.0], [0.0, 1.0]])).states  # later data can change both
        tensor([], dtype=torch.int64)
        >>> stream.flush().states
        tensor([1, 1])
        """
        state = self._begun()
        message, ready, states = state.message.values, None, None
        empty = message[..., None, :][..., :0, :]
        if self._lag:
            bulk = self._bulk and in_logs(self._bulk, message.dim(), self._log_params)
            ready = smoothed(state.window, bulk, state.window.x.shape[-2], self._lag) if state.window else empty
        if state.survivors is not None:
            states, survivors = first_states(state.survivors, state.survivors.paths.shape[-2])
            state = state._replace(survivors=survivors)
        state = state._replace(over=torch.ones_like(state.over), running=False, window=None)
        return self._to(state, empty if self._filtered else None, ready, states)

    def reset(self, mask: Tensor | None = None) -> None:
        """Start sequences again at `p0`, with the next piece.

        Args:
            mask: bool `[*B]`, True for the sequences to start; None for all.

        Raises:
            TypeError: `mask` is no tensor of bool.
            ValueError: its shape is not `B`.

        >>> stream = Stream(torch.eye(2)[None], torch.tensor([0.5, 0.5]))
        >>> _ = stream.update(torch.tensor([[3.0, 3.0]]))
        >>> stream.reset()
        >>> stream.update(torch.tensor([[2.5, 2.5]])).log_norm
        tensor(2.5000)
        """
        state = self._state
        if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
            got = str(mask.dtype)[6:] if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask: expected a torch.Tensor of bool, got {got}")
        if mask is not None and (state is None or mask.shape != state.fresh.shape):
            expected = "None before the first update" if state is None else list(state.fresh.shape)
            raise ValueError(f"mask: expected shape {expected}, got {list(mask.shape)}")
        if state is not None:
            self._state = state.restarted(torch.ones_like(state.fresh) if mask is None else mask.to(state.fresh.device))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that later updates depend on in addition to the stream's arguments: see `load_state_dict`.

        It holds tensors without gradients, numbers and flags; and a structure, where updates bring one and there is a
        lag, which `torch.load` takes without `weights_only`.
        """
        return {"options": self._options, "state": None if self._state is None else self._state.plain()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of another stream of the same arguments, with the same bits.

        Args:
            state: the result of `state_dict()` of that stream.

        Raises:
            ValueError: `state` is no such result, or that of a stream of other arguments.

        >>> bulk, p0 = torch.eye(2)[None], torch.tensor([0.5, 0.5])
        >>> stream, other = Stream(bulk, p0), Stream(bulk, p0)
        >>> _ = stream.update(torch.tensor([[3.0, 3.0]]))
        >>> other.load_state_dict(stream.state_dict())
        >>> other.update(torch.tensor([[2.5, 2.5]])).log_norm
        tensor(5.5000)
        """
        if not isinstance(state, dict) or set(state) != {"options", "state"}:
            raise ValueError("state: expected the result of state_dict() of a stream")
        if state["options"] != self._options:
            raise ValueError(f"state: expected that of a stream with {self._options}, got {state['options']}")
        fields = state["state"]
        if fields is not None and set(fields) != set(State._fields):
            raise ValueError("state: expected the result of state_dict() of a stream of this version")
        self._state = None if fields is None else State.of_plain(fields)

    def _begun(self) -> State:
        if self._state is None:
            raise RuntimeError("stream: expected an update before, which sets the shape of the batch; call update")
        return self._state

    def _result_dtype(self, state: State) -> torch.dtype:
        return self._dtype or (torch.float64 if state.double else torch.float32)

    def _to(self, state: State, posteriors: Tensor | None, ready: Tensor | None, states: Tensor | None) -> StreamUpdate:
        """The results of `update`, with `state` as the stream's new state."""
        self._state, dtype = state, self._result_dtype(state)
        posteriors, ready = (value if value is None else value.to(dtype) for value in (posteriors, ready))
        return StreamUpdate(self.log_norm, posteriors, ready, states)
