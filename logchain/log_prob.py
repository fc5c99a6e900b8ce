"""The log-probability of given state paths."""

import torch
from torch import Tensor

from .arguments import Lengths, check_dense, check_device, check_integers, check_is_tensor
from .autograd.chain import packed_log_norm
from .autograd.paths import log_weight, packed_log_weight
from .chain import Chain
from .queries.operands import Operands, checked
from .queries.product import log_norm
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
    r"""The log posterior of given paths z: `log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i) - log Z`.

    This is a linear-chain CRF's log-likelihood of a labelling, and the function to differentiate for score-function
    gradients of paths drawn by `logchain.sample`.

    Args:
        x: log-potentials `[*B, v, c]` in nats. All arguments that `logchain.product` has too are those.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`.
        p0: initial weights `[*B or ones, c]`; there is no transition before the first variable.
        states: integers `[*S, *B, v]`: one path of each sequence, or several. A path with -1, which stands for no
            state, is impossible. Entries behind a sequence's end are ignored.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the number of variables of each sequence.
        cu_seqlens: the offsets of concatenated sequences; paths are `[*S, total]`, the result is `[*S, n]`.

    Returns:
        `[*S, *B]`, natural logarithm; float64 if an operand is, otherwise float32. Exactly -inf, with gradient 0, where
        the path is impossible, also where all are. The gradient is that of the path's own log-weight, 1 at the entries
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
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    states = as_paths(states, x)
    if chain.in_place():
        states = checked(states, x.shape[-1], "states")
        result = _less(packed_log_weight(chain, states), packed_log_norm(chain))
    else:
        result = chain.by_sequence(chain.map(_of_batch, chain.paths(states)), states.dim() + 1 - x.dim())
    return result.to(chain.dtype)


def _of_batch(operands: Operands, states: Tensor) -> Tensor:
    x, transition, p0, lengths, log_params = operands
    states = checked(states, x.shape[-1], "states")
    return _less(log_weight(x, transition, p0, states, lengths, log_params), log_norm(operands))


def _less(weight: Tensor, norm: Tensor) -> Tensor:
    # a path may be impossible because the whole sequence is: -inf - (-inf) must not become NaN
    impossible = (weight == -torch.inf) & ~norm.isnan()
    return torch.where(impossible, -torch.inf, weight - norm)


def as_paths(states: Tensor, x: Tensor) -> Tensor:
    """Paths [*S, *B, v] as int64, after checks of their kind and shape."""
    check_is_tensor("states", states)
    check_integers("states", states)
    check_dense("states", states)
    check_device("states", states, x)
    shape = x.shape[:-1]
    if states.shape[max(0, states.dim() - len(shape)) :] != shape:
        text = ", ".join(map(str, ("...", *shape)))
        raise ValueError(f"states: expected shape [{text}] to go with x {list(x.shape)}, got {list(states.shape)}")
    return states.to(torch.int64)
