"""The forward and backward messages of a chain."""

from typing import NamedTuple

from torch import Tensor

from .arguments import Lengths
from .autograd.dense_operators import short_of
from .autograd.messages import messages
from .chain import Chain
from .tensors import differentiated, with_steps
from .transitions import Transition


class Messages(NamedTuple):
    """Forward messages [*B, v, c], backward messages [*B, v, c] and the log-partition [*B], in nats."""

    forward: Tensor
    backward: Tensor
    log_norm: Tensor


def forward_backward(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Messages:
    r"""Returns the forward and backward messages: log-weights of all paths into a state, and of all paths from it.

        forward_0 = log p0 + x_0        forward_i(j) = log sum_k exp(forward_{i-1}(k) + log P_i(k, j)) + x_i(j)
        backward_{v-1} = 0              backward_{i-1}(k) = log sum_j exp(log P_i(k, j) + x_i(j) + backward_i(j))

    A forward message includes the potential of its own variable, a backward message does not: at each variable,
    `logsumexp(forward + backward)` is the log-partition. For posteriors use `logchain.marginals`, and for filtered ones
    `logchain.filtered`, or `logchain.Stream` for pieces: they are faster and lose no digits where the log-partition is
    large. Differences of messages do: at 8 million nats float32 numbers lie 0.5 apart.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`; with `cu_seqlens`, messages are `[total, c]` and log-partitions `[n]`.

    Returns:
        `Messages(forward [*B, v, c], backward [*B, v, c], log_norm [*B])`, natural logarithms, in float64 if an operand
        is and otherwise in float32; exactly -inf where no path is possible, and past a sequence's end. All can be
        differentiated twice, in reverse mode, by a few of torch's operators for each step in float64; entries that are
        -inf have gradient 0.

    Cost: `2 v c^2` multiply-adds a sequence, an exponential and a logarithm for each entry of a message, in `2 v`
    dependent steps, or `v` where a CPU has a thread for each direction; slower, in numbers with an exponent of any
    size, where something may underflow or sequences have lengths. Each entry is as exact as a log-partition, however
    far below the others. Memory: the results, and on other devices than a CPU the messages in float64.

    Source: L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989). Definition:
    `logchain.reference.forward_backward`.

    >>> import torch
    >>> x = torch.zeros(3, 2)  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for both steps
    >>> messages = forward_backward(x, bulk, torch.tensor([1.0, 1.0]))
    >>> messages.forward.exp()
    tensor([[1.0000, 1.0000],
            [1.1000, 0.9000],
            [1.1700, 0.8300]])
    >>> messages.backward.exp().round(decimals=4), messages.log_norm
    (tensor([[1., 1.],
            [1., 1.],
            [1., 1.]]), tensor(0.6931))
    """
    if lengths is None and cu_seqlens is None and not isinstance(bulk, Transition) and not differentiated(x, bulk, p0):
        short = short_of(x, with_steps(bulk), p0, log_params)
        if short is not None:
            return Messages(*short.messages(x, with_steps(bulk), p0))
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    if not differentiated(x, bulk, p0):
        chain = chain.in_place()
    forward, backward, log_norm = zip(*chain.map(messages), strict=True)
    return Messages(chain.by_variable(forward), chain.by_variable(backward), chain.by_sequence(log_norm))
