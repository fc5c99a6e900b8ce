"""The chain of torch-struct's linear chain CRF."""

from typing import Any

from ..arguments import check_tensor
from .chain_arguments import ChainArguments


def from_torch_struct(crf: Any) -> ChainArguments:
    r"""The chain of a CRF of torch-struct: `log Z = log sum_z exp(sum_i log_potentials[i, z_{i+1}, z_i])`.

    torch-struct's v - 1 edges are `[to, from]` and include the potentials of single variables: `bulk` is their
    transpose, `x` and `p0` are zeros.

    Args:
        crf: a `torch_struct.LinearChainCRF` with its lengths, or its log-potentials alone `[*B, v-1, c, c]` in nats.

    Returns:
        Logarithms, with gradients for the log-potentials; the gradient of `product` is torch-struct's marginals.

    Raises:
        TypeError: `crf` is neither, or its log-potentials are no floating tensor.
        ValueError: the log-potentials are not square or have less than three axes.

    Cost: none; `bulk` is a view, `x` is `v c` zeros a sequence.

    Source: A. Rush, "Torch-Struct: deep structured prediction library" (arXiv:2002.00876).

    >>> import torch
    >>> from logchain import product
    >>> edges = torch.tensor([[[[1.0, 5.0], [2.0, 3.0]]]])  # two variables; from state 1 to state 0 is 5
    >>> arguments = from_torch_struct(edges)
    >>> arguments.bulk[0, 0]
    tensor([[1., 2.],
            [5., 3.]])
    >>> product(**arguments._asdict()), edges.logsumexp((1, 2, 3))
    (tensor([5.1852]), tensor([5.1852]))
    """
    edges = getattr(crf, "log_potentials", crf)
    lengths = getattr(crf, "lengths", None)
    check_tensor("crf", edges, 3)
    *batch, steps, c, origins = edges.shape
    if c != origins:
        raise ValueError(f"crf: expected log-potentials [..., v-1, c, c], got {list(edges.shape)}")
    zeros = edges.new_zeros(*batch, steps + 1, c)
    return ChainArguments(zeros, edges.mT, zeros.new_zeros(c), True, lengths)
