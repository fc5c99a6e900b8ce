"""The ordered product of a stack of matrices in log space."""

import torch
from torch import Tensor

from .arguments import check_flag, check_stack
from .autograd.products import log_product


def matrix_product(stack: Tensor, *, inplace: bool = False) -> Tensor:
    r"""Returns the ordered product `log(exp(M_1) exp(M_2) ... exp(M_s))` of a stack of matrices of logarithms.

    Args:
        stack: `[..., s, c, c]` logarithms (nats), at least one matrix; -inf is zero. Rows are `from`, columns `to`.
        inplace: compute in the memory of `stack`, whose content is unspecified afterwards; only allowed if `stack`
            requires no gradient.

    Returns:
        `[..., c, c]`, float64 for float64, otherwise float32 (also for bfloat16 and float16, whose arithmetic is
        float32); exactly -inf where every path is impossible. The gradient with respect to an entry is the expected
        number of times that paths use it, exactly 0 where it is -inf. It can be differentiated twice.

    Neighbors are multiplied in pairs, then their products in pairs, and so on; an odd last one is carried up. Scales
    are added in float64. Entries that underflow are computed again in logarithms, on a CPU with their whole stack (see
    `logchain.rescues`). For one number per sequence, `logchain.product` takes `c` times less work.

    Raises:
        TypeError: `stack` is not a floating tensor, or `inplace` no bool.
        ValueError: the matrices are not square, there is none, or `stack` cannot be overwritten (`inplace`).

    Cost: `s c^3` multiply-adds and `s c^2` exponentials in `log2 s` dependent steps; four times that with the backward
    pass, which multiplies again. Memory beyond operands, result and gradients: at most half a stack, on a CPU only of
    stacks that are computed again, none with `inplace`; one stack in the backward pass, and on a CPU its exponents,
    `2 / c` of one. Batch axes that cannot be joined without a copy (permuted ones) cost that copy.

    Source: S. S. Hassan, S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of inference in hidden Markov
    models" (arXiv:2102.05743). Definition: `logchain.reference.matrix_product`.

    >>> step = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    >>> matrix_product(step.expand(10, 2, 2)).exp()
    tensor([[0.6761, 0.3239],
            [0.6478, 0.3522]])
    """
    check_stack(stack)
    check_flag("inplace", inplace)
    if inplace:
        _check_inplace(stack)
    return log_product(stack, inplace=inplace)


def _check_inplace(stack: Tensor) -> None:
    """Check that the memory of a stack may be overwritten."""
    if torch.is_grad_enabled() and stack.requires_grad:
        raise ValueError("inplace: expected a stack that needs no gradient, got one that does; pass inplace=False")
    if stack.dtype not in (torch.float32, torch.float64):
        got = str(stack.dtype)[6:]
        raise ValueError(f"inplace: expected a float32 or float64 stack, got {got}; pass inplace=False")
    if _overlaps(stack):
        raise ValueError(
            f"inplace: expected a stack of its own memory, got shape {list(stack.shape)} with strides "
            f"{stack.stride()}; pass inplace=False"
        )
    try:
        stack.view(-1, *stack.shape[-3:]) if stack.numel() else None
    except RuntimeError:
        raise ValueError(
            f"inplace: expected batch axes that can be joined without a copy, got shape {list(stack.shape)} with "
            f"strides {stack.stride()}; pass a contiguous stack or inplace=False"
        ) from None


def _overlaps(stack: Tensor) -> bool:
    """Whether entries may share memory: some axis has a stride that the axes of smaller strides reach or exceed."""
    reach = 0
    for stride, size in sorted(zip(stack.stride(), stack.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
