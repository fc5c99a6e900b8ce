"""The log-probability of state paths."""

import torch
from torch import Tensor

from .arguments import Lengths, check_device, check_integers
from .autograd.log_partition import log_norm
from .autograd.paths import weight_of
from .chain import Chain
from .operands import Operands, checked
from .transitions import Transition


def log_prob(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    states: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""Returns the log posterior of paths z: `log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i) - log Z`.

    This is a linear-chain CRF's log-likelihood of a labeling, and the function to differentiate for score-function
    gradients of paths drawn by `logchain.sample`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]` and the options are those of
    `logchain.product`; with `cu_seqlens`, paths are `[*S, total]` and the result is `[*S, n]`.

    `states`: integers `[*S, *B, v]`, one path of each sequence, or several. A path with -1, no state, is impossible.
    Entries after a sequence's end are ignored.

    Returns:
        `[*S, *B]`, natural logarithm; float64 if an operand is, otherwise float32. Exactly -inf, with gradient 0, where
        the path is impossible, also where all are. The gradient is that of the path's log-weight, 1 at the entries
        that it visits, minus the posterior marginals. It can be differentiated twice.

    Log-weight and log-partition may be far larger than their difference: both are float64, so that the result has no
    other error than that of the log-partition.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, or a state is not in -1..c-1. States on a GPU
            are not checked: one that is out of range is the device's error.

    Cost: that of `logchain.product`, once for any number of paths, and `v` look-ups a path. Memory: a few tensors
    `[*S, *B, v]`.

    Source: J. Lafferty, A. McCallum and F. Pereira, "Conditional random fields", ICML (2001). Definition:
    `logchain.reference.log_prob`.

    >>> x = torch.zeros(3, 2)  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.0, 1.0]]])  # one matrix for every step
    >>> paths = torch.tensor([[0, 0, 0], [0, 0, 1], [1, 0, 1]])
    >>> log_prob(x, bulk, torch.tensor([0.5, 0.5]), paths).exp()
    tensor([0.4050, 0.0450, 0.0000])
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens).in_place()
    states = as_paths(states, x)
    result = chain.by_sequence(chain.map(_of_batch, chain.paths(states)), states.dim() + 1 - x.dim())
    return result.to(chain.dtype)


def _of_batch(operands: Operands, states: Tensor) -> Tensor:
    states = checked(states, operands.x.shape[-1], "states")
    # gradients of both terms nearly cancel: they are added before they are rounded to half precision
    wide = (t.to(operands.dtype) if t.numel() <= operands.x.numel() else t for t in operands.tensors)
    operands = operands.of(*wide)
    weight, norm = weight_of(operands, states), log_norm(operands)
    # a path may be impossible because the whole sequence is: -inf - (-inf) must not become NaN
    impossible = (weight == -torch.inf) & ~norm.isnan()
    return torch.where(impossible, -torch.inf, weight - norm)


def as_paths(states: Tensor, x: Tensor) -> Tensor:
    """Paths [*S, *B, v] as int64, after checks of their kind and shape."""
    check_integers("states", states)
    check_device("states", states, x)
    shape = x.shape[:-1]
    if states.shape[max(0, states.dim() - len(shape)) :] != shape:
        text = ", ".join(map(str, ("...", *shape)))
        raise ValueError(f"states: expected shape [{text}] to go with x {list(x.shape)}, got {list(states.shape)}")
    return states.to(torch.int64)
