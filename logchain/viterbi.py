"""The most probable state path of a chain."""

from typing import NamedTuple

from torch import Tensor

from .arguments import Lengths
from .autograd.best_paths import best_path
from .chain import Chain
from .transitions import Transition


class Path(NamedTuple):
    """State paths int64 `[*B, v]` and their log-weights `[*B]` in nats."""

    states: Tensor
    score: Tensor


def viterbi(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Path:
    r"""Returns the best path `argmax_z log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)`, and its log-weight.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`; with `cu_seqlens`, states are `[total]` and scores `[n]`.

    Returns:
        `Path(states, score)`. `states` `[*B, v]` int64, -1 past a sequence's end. Among paths whose computed weights
        are equal the lowest last state is taken, then the lowest state before it, and so on. `score` `[*B]` is the
        log-weight of exactly these states, summed in float64: float64 if an operand is, otherwise float32. Where every
        path is impossible the score is exactly -inf and all states are -1; where a sequence holds NaN before its end,
        the score is NaN and all states are -1.

    The score can be differentiated: the gradient is 1 where the path passes (`x`, `log bulk`, `log p0`) and exactly 0
    elsewhere, and 0 for impossible sequences. The choice of the path is not differentiated.

    Operands may be float32, float64, bfloat16 or float16; messages are float32 or float64 with their largest entry 0.
    The score is within `ulp + v (c + 8 + 2 D) u` of the largest, as the result of `product` is, for a path that runs D
    nats below a message's maximum.

    Cost: `v c^2` additions and maxima a sequence in `v` dependent steps, then `v c` back along the path. One long
    sequence is cut into segments for all threads of a CPU, with the same result to the last bit. Memory: the messages
    `[*B, v, c]`; on a CPU, if all steps share one matrix, only those of 48 sequences a thread. Of `Banded` and `Sparse`
    on a CPU, `v c` integers of 4 bytes for one sequence a thread; beyond 64 MiB about `2 sqrt(v) c`, for up to twice
    the time, with the same result to the last bit.

    Source: A. J. Viterbi, "Error bounds for convolutional codes", IEEE Trans. Inf. Theory 13 (1967). Definition:
    `logchain.reference.viterbi`.

    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> viterbi(x, bulk, torch.tensor([0.5, 0.5]))
    Path(states=tensor([1, 1, 1]), score=tensor(1.8606))
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens).in_place(one_matrix=True)
    states, score = zip(*chain.map(best_path), strict=True)
    return Path(chain.by_variable(states), chain.by_sequence(score).to(chain.dtype))
