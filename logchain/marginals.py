"""Posterior marginals: probabilities of states and of transitions."""

from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .arguments import Lengths, check_choice, check_question
from .autograd.chain import posteriors
from .autograd.chain_operators import short_of
from .operands import Operands, arithmetic_dtype, differentiated
from .rescues import report_chains
from .schedules import choose
from .schedules.packed import Packed, PackedChain
from .structured import answers
from .structured.question import Question
from .transitions import Transition


class Marginals(NamedTuple):
    """State posteriors [*B, v, c], transition posteriors or None, and the log-partition [*B] in nats."""

    states: Tensor
    transitions: Tensor | Transition | None
    log_norm: Tensor


def marginals(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    transitions: Literal["sum", "full"] | None = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Marginals:
    r"""The posterior marginals `P(z_i = j)` and `P(z_{i-1} = k, z_i = j)` of state paths `z`.

    These are the gradients of `logchain.product` with respect to `x` and to `log bulk`.

    Args:
        x: log-potentials `[*B, v, c]` in nats. All arguments that `logchain.product` has too are those.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`.
        p0: initial weights `[*B or ones, c]`.
        transitions: None for state posteriors alone; "sum" for expected counts in the shape of `bulk`, summed over the
            axes along which `bulk` is broadcast (for expectation maximisation); "full" for `[*B, v-1, c, c]`. If `bulk`
            is a structure, the result is one whose parameters are the expected counts of their uses.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the number of variables of each sequence.
        cu_seqlens: the offsets of concatenated sequences; states are `[total, c]`, transitions those into each row
            `[total, c, c]`, 0 into first rows ("full", or "sum" if `bulk` has a matrix for each row).

    Returns:
        `Marginals(states [*B, v, c], transitions, log_norm [*B])` in float64 if an operand is, otherwise in float32.
        State posteriors sum to 1 at each variable; all are exactly 0 behind a sequence's end and for an impossible
        sequence. All can be differentiated once: gradients are covariances of states and transitions.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or a length or a choice is out of range. `logchain.check` checks values.

    Cost: that of `product` forward and backward, `3 v c^2` multiply-adds a sequence, and `v c^2` more for "sum". Memory
    beyond operands and results: the forward messages `[*B, v, c]`. The gradient of "full" takes about ten times the
    memory of its result.

    Source: L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989). Definition:
    `logchain.reference.marginals`.

    >>> import torch
    >>> x = torch.zeros(3, 2)  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for both steps
    >>> posterior = marginals(x, bulk, torch.tensor([1.0, 1.0]), transitions="sum")
    >>> posterior.states
    tensor([[0.5000, 0.5000],
            [0.5500, 0.4500],
            [0.5850, 0.4150]])
    >>> posterior.transitions
    tensor([[[0.9450, 0.1050],
             [0.1900, 0.7600]]])
    """
    if isinstance(bulk, Transition):
        check = partial(check_choice, "transitions", transitions, (None, "sum", "full"))
        question = Question(x, bulk, p0, log_params, lengths, cu_seqlens, "marginals", check)
        return Marginals(*answers.marginals(question, transitions))
    alone = lengths is None and cu_seqlens is None
    if alone and (transitions is None or transitions == "sum") and not differentiated(x, bulk, p0):
        short = short_of(x, bulk, p0, log_params, wanted=choose.is_sequential)
        if short is not None:
            log_norm, (states, expected), redone = short.posteriors(x, bulk, p0, transitions is not None)
            report_chains(redone)
            return Marginals(states, expected, log_norm)
    check_choice("transitions", transitions, (None, "sum", "full"))
    if cu_seqlens is not None:
        packed = Packed(x, bulk, p0, cu_seqlens, lengths, log_params)
        plain = isinstance(log_params, bool) and not differentiated(x, bulk, p0)
        if transitions != "full" and plain and packed.stays:
            return Marginals(*PackedChain(packed, log_params, by_log=True).posteriors(transitions == "sum"))
        options: Any = {"transitions": transitions, "log_params": log_params}
        pieces = [marginals(*piece[:3], lengths=piece.lengths, **options) for piece in packed]
        counted = None
        if transitions is not None:
            put_back = packed.counts if transitions == "sum" else packed.by_step
            counted = put_back([part.transitions for part in pieces if isinstance(part.transitions, Tensor)])
        states = packed.by_row([part.states for part in pieces])
        return Marginals(states, counted, packed.by_sequence([part.log_norm for part in pieces]))
    ends = check_question(x, bulk, p0, log_params, lengths)
    dtype = arithmetic_dtype(x, bulk, p0)
    x, bulk, p0 = x.to(dtype), bulk.to(dtype), p0.to(dtype)
    if transitions == "full":
        *batch, v, c = x.shape
        bulk = bulk.expand(*batch, v - 1, c, c)
    needs = True, transitions is not None, False
    log_norm, (states, counts, _) = posteriors(Operands(x, bulk, p0, ends, log_params), needs)
    return Marginals(states, counts if transitions else None, log_norm.to(dtype, copy=True))
