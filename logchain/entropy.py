"""The entropy of the posterior over state paths."""

import torch
from torch import Tensor

from .arguments import Lengths, check_question
from .autograd.chain import along, log_norm
from .autograd.paths import finite_log
from .operands import arithmetic_dtype


def entropy(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    validate: bool = False,
) -> Tensor:
    r"""`-sum_z p(z) log p(z)` over all state paths `z`, with `p(z)` their posterior probability.

    It is the log-partition less the expected log-weight of a path, `log Z - E[log w(z)]`.

    Args:
        x: log-potentials `[*B, v, c]` in nats, as `logchain.product` takes them, and so `bulk`, `p0`, `log_params`,
            `lengths` and `validate`.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`.
        p0: initial weights `[*B or ones, c]`.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: how many variables each sequence has.
        validate: also check the values.

    Returns:
        `[*B]` in nats, in float64 if an operand is and otherwise in float32; 0 where no path is possible: there is
        nothing to be uncertain about. It can be differentiated once, in reverse
        mode.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, or `validate` finds a value.

    Cost: about `4 v c^2` multiply-adds a sequence in `2 v` dependent steps, in float64: the difference of large numbers
    is good to about `2^-50 |log Z|`. Memory: the operands and two messages `[*B, v, c]` in float64.

    Source: the entropy of hidden state paths, D. Hernando, V. Crespi and G. Cybenko, IEEE Trans. Inf. Theory 51 (2005);
    here as a derivative of the log-partition along its own potentials. Definition: `logchain.reference.entropy`.

    >>> entropy(torch.zeros(3, 2), torch.full((1, 2, 2), 0.5), torch.tensor([1.0, 0.0]))  # two fair coins
    tensor(1.3863)
    """
    ends = check_question(x, bulk, p0, log_params, lengths, validate)
    dtype = arithmetic_dtype(x, bulk, p0)
    # a difference of large numbers
    x, bulk, p0 = x.double(), bulk.double(), p0.double()
    norm = log_norm(x, bulk, p0, ends, log_params)
    weights = finite_log(x, True), finite_log(bulk, log_params), finite_log(p0, log_params)
    expected = along(x, bulk, p0, ends, weights, log_params, True)
    return torch.where(norm == -torch.inf, 0.0, norm - expected).to(dtype)
