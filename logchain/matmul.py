"""The matrix product in the log semiring."""

import torch
from torch import Tensor

from .arguments import check_tensor
from .autograd.matmul import broadcast_log_matmul


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    r"""Returns the log-semiring product `log(exp(a) exp(b))`: `out_ij = logsumexp_k (a[..., i, k] + b[..., k, j])`.

    Args:
        a: `[..., m, k]` logarithms (nats); -inf is zero.
        b: `[..., k, n]` logarithms (nats). Leading axes broadcast, and are never expanded in memory.
        out: a tensor `[..., m, n]` to write the result into, if no operand needs a gradient.

    Returns:
        `[..., m, n]`, float64 if an operand is, otherwise float32 (also for bfloat16 and float16, whose arithmetic is
        float32); exactly -inf where no term is finite. The gradient of a term is its share `exp(a_ik + b_kj - out_ij)`,
        exactly 0 where the term is -inf. It can be differentiated twice.

    Each row of `a` and each column of `b` is shifted by its maximum, and the exponentials are multiplied as matrices.
    An output underflows there if its terms are all far below the product of both maxima: it is then computed again with
    the maximum of its own terms (see `logchain.rescues`).

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: the inner sizes differ, the leading axes do not broadcast, or `out` has the wrong shape or dtype.

    Cost: `m k n` multiply-adds and `k (m + n)` exponentials a matrix, `k` more for each output that is computed again.
    Memory beyond results and gradients: on a CPU exponentials of one `b` and of some rows for each thread, forward and
    backward, or of a piece of a larger product: below 2 MB in float32 for a shared `b` `[8, 64, 64]` and any number of
    rows, 20 MB for one product of 1024 x 1024 matrices.

    Source: the shift is that of any log-sum-exp. Definition: `logchain.reference.matmul`.

    >>> matmul(torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0], [0.0]]))
    tensor([[-199.3069]])
    """
    check_tensor("a", a, 2)
    check_tensor("b", b, 2, like=a)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"b: expected [..., {a.shape[-1]}, n] to go with a {list(a.shape)}, got {list(b.shape)}")
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"b: expected leading axes that broadcast with those of a {list(a.shape)}, got {list(b.shape)}"
        ) from None
    shape = (*batch, a.shape[-2], b.shape[-1])
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    if out is not None:
        _check_out(out, a, b, shape, dtype)
    if 0 in a.shape or 0 in b.shape:  # no terms, or no outputs
        result = torch.logsumexp(a.to(dtype)[..., :, :, None] + b.to(dtype)[..., None, :, :], -2)
    else:
        result = broadcast_log_matmul(a.to(dtype), b.to(dtype))
    return result if out is None else out.copy_(result)


def _check_out(out: Tensor, a: Tensor, b: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_tensor("out", out, 0, like=a)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out: expected {str(dtype)[6:]} {list(shape)}, got {str(out.dtype)[6:]} {list(out.shape)}")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(f"out: expected a tensor that is not expanded, got strides {out.stride()}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, out)):
        raise ValueError("out: expected operands that need no gradient, got one that does")
