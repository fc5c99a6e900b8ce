"""The filtered posteriors of a chain: those of each state, conditional on all variables up to it."""

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Lengths, check_lengths
from .autograd.messages import filtered as filtered_messages
from .chain import Chain
from .internals import takes_forward_derivatives
from .kernels.structured import FILTERED
from .operands import Operands
from .stream import Stream, StreamUpdate
from .tensors import differentiated, is_plain
from .transitions import Transition


class Filtered(NamedTuple):
    """Filtered posteriors of states [*B, v, c], and the log-partition [*B] in nats."""

    states: Tensor
    log_norm: Tensor


def filtered(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Filtered:
    r"""Returns the filtered posteriors: `P(z_i = j)` of a chain that ends at variable i.

        states_0 ~ p0 exp(x_0)        states_i(j) ~ sum_k states_{i-1}(k) P_i(k, j) exp(x_i(j))

    They are the forward messages of `logchain.forward_backward` with sum 1, to the same precision however large the
    log-partition is. `logchain.Stream` gives them for a chain that comes in pieces, `logchain.marginals` the posteriors
    conditional on all variables.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`; with `cu_seqlens`, states are `[total, c]` and log-partitions `[n]`.

    Returns:
        `Filtered(states [*B, v, c], log_norm [*B])` in float64 if an operand is, otherwise in float32. States sum to 1
        at each variable; they are exactly 0 past a sequence's end, and from where a sequence is impossible on. Both
        can be differentiated twice, by a few of torch's operators for each step in float64; forward derivatives raise
        NotImplementedError.

    Cost: that of `product` forward, `v c^2` multiply-adds a sequence in `v` dependent steps. Memory: the results.

    Source: L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989), the scaled forward recursion.
    Definition: `logchain.reference.marginals` of the variables up to each.

    >>> x = torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for both steps
    >>> filtered(x, bulk, torch.tensor([0.5, 0.5])).states
    tensor([[0.5000, 0.5000],
            [0.0574, 0.9426],
            [0.2402, 0.7598]])
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    states, log_norms = zip(*chain.map(_of_batch), strict=True)
    return Filtered(chain.by_variable(states), chain.by_sequence(log_norms))


def _of_batch(operands: Operands) -> tuple[Tensor, Tensor]:
    if is_plain(operands.tensors) and not differentiated(*operands.tensors):
        operands = operands.cheapest(FILTERED)
        if operands.is_dense:
            return _by_stream(*operands.dense)
    if not torch.compiler.is_compiling() and takes_forward_derivatives():
        raise NotImplementedError("filtered: expected no forward derivative; take gradients instead")
    return filtered_messages(operands)


def _by_stream(x: Tensor, bulk: Tensor, p0: Tensor, ends: Tensor | None, log_params: bool) -> Filtered:
    """The results of a chain as pieces of a stream, without gradients; ends int64 [*B]."""
    if ends is not None:
        check_lengths(ends, x.shape[-2])
        # in a stream 0 is a length too; one that is negative makes its sequence NaN
        ends = ends.masked_fill(ends < 1, -1)
    steps, c, stream = bulk.shape[-3], x.shape[-1], Stream(None, p0, log_params=log_params)
    if steps == 1:
        return _results(stream.update(x, bulk, lengths=ends))
    # a matrix that leads into the first variable has no influence
    into = bulk[..., :1, :, :] if steps else bulk.new_zeros(1, c, c)
    first = _results(stream.update(x[..., :1, :], into))
    if not steps:
        return first
    rest = _results(stream.update(x[..., 1:, :], bulk, lengths=None if ends is None else ends - 1))
    return Filtered(torch.cat([first.states, rest.states], -2), rest.log_norm)


def _results(update: StreamUpdate) -> Filtered:
    assert update.filtered is not None
    return Filtered(update.filtered, update.log_norm)
