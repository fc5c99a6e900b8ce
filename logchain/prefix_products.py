"""All prefix products of a stack of matrices in log space."""

from torch import Tensor

from .arguments import check_stack
from .autograd.products import log_products


def prefix_products(stack: Tensor) -> Tensor:
    r"""Returns the prefix products `log(exp(M_1) ... exp(M_i))`, i from 1 to s, of a stack of matrices of logarithms.

    Args:
        stack: `[..., s, c, c]` logarithms (nats), at least one matrix; -inf is zero. Rows are `from`, columns `to`.

    Returns:
        `[..., s, c, c]`, of which entry i includes matrix i; float64 for float64, otherwise float32 (also for bfloat16
        and float16, whose arithmetic is float32). The last is `matrix_product(stack)` up to rounding.
        Gradients are exactly 0 where the stack is -inf. It can be differentiated twice.

    Raises:
        TypeError: `stack` is not a floating tensor.
        ValueError: the matrices are not square, or there is none.

    Cost: on a CPU `s c^3` multiply-adds and `s c^2` logarithms, one matrix after the other; on a GPU two sweeps over a
    tree, `2 s c^3` in `2 log2 s` dependent steps. Four times that with the backward pass, which multiplies again.
    Memory beyond operands, result and gradients: none of the stack's size; two stacks in the backward pass. Batch axes
    that cannot be joined without a copy (permuted ones) cost that copy.

    Source: R. P. Brent, H. T. Kung, "A regular layout for parallel adders", IEEE Trans. Computers C-31 (1982).
    Definition: `logchain.reference.prefix_products`.

    >>> import torch
    >>> step = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    >>> prefix_products(step.expand(3, 2, 2)).exp()[:, 0]
    tensor([[0.9000, 0.1000],
            [0.8300, 0.1700],
            [0.7810, 0.2190]])
    """
    check_stack(stack)
    return log_products(stack, True)
