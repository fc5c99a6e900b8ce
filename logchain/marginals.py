"""Posterior marginals: probabilities of states and of transitions."""

from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from .arguments import Lengths, check_choice
from .autograd.dense_operators import short_of
from .autograd.log_partition import posteriors
from .chain import Chain
from .operands import Operands
from .rescues import report_chains
from .tensors import differentiated, with_steps
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
    r"""Returns the posterior marginals `P(z_i = j)` and `P(z_{i-1} = k, z_i = j)` of state paths `z`.

    These are the gradients of `logchain.product` with respect to `x` and to `log bulk`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`; with `cu_seqlens`, states are `[total, c]` and transitions those into each row
    `[total, c, c]`, 0 into first rows ("full", or "sum" if `bulk` has a matrix for each row).

    `transitions`: None for state posteriors alone; "sum" for expected counts in the shape of `bulk`, summed over the
    axes along which `bulk` is broadcast (for expectation maximization); "full" for `[*B, v-1, c, c]`. If `bulk` is a
    structure, the result is one whose parameters are the expected counts of their uses.

    Returns:
        `Marginals(states [*B, v, c], transitions, log_norm [*B])` in float64 if an operand is, otherwise in float32.
        State posteriors sum to 1 at each variable; all are exactly 0 past a sequence's end and for an impossible
        sequence. All can be differentiated once: gradients are covariances of states and transitions.

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
    plain, alone = not differentiated(x, bulk, p0), lengths is None and cu_seqlens is None
    if isinstance(bulk, Tensor) and plain and alone and (transitions is None or transitions == "sum"):
        matrices = with_steps(bulk)
        short = short_of(x, matrices, p0, log_params)
        if short is not None:
            log_norm, (states, expected), recomputed = short.posteriors(x, matrices, p0, transitions is not None)
            report_chains(recomputed)
            return Marginals(states, None if expected is None else expected.view(bulk.shape), log_norm)
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    check_choice("transitions", transitions, (None, "sum", "full"))
    if plain and transitions != "full":
        chain = chain.in_place()
    values, states_of, counts_of = zip(*chain.map(partial(_of_batch, transitions=transitions)), strict=True)
    counted: Tensor | Transition | None = None
    if transitions is not None:
        counts = [
            chain.counts(parameter, i, by_step=transitions == "full")
            for i, parameter in enumerate(zip(*counts_of, strict=True))
        ]
        counted = bulk.with_parameters(*counts) if isinstance(bulk, Transition) else counts[0]
    return Marginals(chain.by_variable(states_of), counted, chain.by_sequence(values))


def _of_batch(
    operands: Operands, transitions: Literal["sum", "full"] | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The log-partition, state posteriors, and expected counts of each parameter, none if they are not wanted."""
    if transitions == "full":
        *batch, v, _ = operands.x.shape
        structure = operands.transition
        pairs = zip(structure.parameters, structure.sizes, strict=True)
        parameters = [parameter.expand(*batch, v - 1, *sizes) for parameter, sizes in pairs]
        operands = operands.of(operands.x, operands.p0, *parameters)
    needs = True, False, *(transitions is not None for _ in operands.transition.parameters)
    value, (states, _, *counts) = posteriors(operands, needs)
    return value.to(operands.dtype, copy=True), states, tuple(counts) if transitions else ()
