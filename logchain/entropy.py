"""The entropy of the posterior over state paths."""

from torch import Tensor

from .arguments import Lengths
from .autograd.entropy import entropy as entropy_of
from .chain import Chain
from .transitions import Transition


def entropy(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""Returns the entropy `-sum_z p(z) log p(z)` of the posterior `p(z)` over all state paths `z`.

    It equals the log-partition minus the expected log-weight of a path, `log Z - E[log w(z)]`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`.

    Returns:
        `[*B]` in nats (`[n]` with `cu_seqlens`), in float64 if an operand is and otherwise in float32; 0 where no path
        is possible. It can be differentiated once, in reverse mode.

    Arithmetic has the dtype of the result, sums over steps are float64. With its unit u, and D as in `logchain.product`
    (how many nats a state that matters lies below the largest of its step), the error is about `2 v (c + 8 + 2 D) u` at
    most. An entropy of float64 operands keeps its digits however large |log Z| is, for no large numbers are subtracted.

    Cost: `3 v c^2` multiply-adds per sequence, `2 v` dependent steps, and a logarithm for each entry of `bulk`. What
    underflows on a CPU is computed again in float64. Memory: two tensors `[*B, v, c]`, and for what underflows float64,
    or is not on a CPU, counts of transitions: at most 2^24 at a time, or those of one sequence. The gradient, a
    covariance, is computed in log space: about `9 v c^2` multiply-adds, each ten times as slow.

    Source: the entropy of hidden state paths, D. Hernando, V. Crespi and G. Cybenko, IEEE Trans. Inf. Theory 51 (2005).
    Definition: `logchain.reference.entropy`.

    >>> import torch
    >>> entropy(torch.zeros(3, 2), torch.full((1, 2, 2), 0.5), torch.tensor([1.0, 0.0]))  # two fair coins
    tensor(1.3863)
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    return chain.by_sequence(chain.map(entropy_of)).to(chain.dtype)
