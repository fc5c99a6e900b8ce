"""The Kullback-Leibler divergence between the posteriors of two chains."""

import torch
from torch import Tensor

from .arguments import Lengths, check_tensor
from .autograd.entropy import divergence
from .chain import Chain


def kl_divergence(
    p: tuple[Tensor, Tensor, Tensor],
    q: tuple[Tensor, Tensor, Tensor],
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""Returns the divergence `sum_z p(z) log(p(z) / q(z))` of the posteriors of two chains over all state paths `z`.

    It equals `E_p[log w_p(z) - log w_q(z)] - log Z_p + log Z_q`, with `w` the weight of a path and `Z` their sum.

    `p` and `q` are tuples `(x, bulk, p0)` of the operands of `logchain.product`, `x` of both of one shape; options and
    errors are those of `product`.

    Returns:
        `[*B]` in nats (`[n]` with `cu_seqlens`), in float64 if an operand is and otherwise in float32. It is +inf where
        `q` forbids what is possible under `p`, however improbable, and 0 where no path is possible under `p`. It can be
        differentiated once, in reverse mode, with respect to the operands of both; where it is +inf the gradient is 0.

    Arithmetic has the dtype of the chains, sums over steps are float64. The error is about twice that of `entropy`, and
    grows with how far the log-weights of paths differ. A divergence of float64 operands keeps its digits however large
    |log Z| is.

    Cost: `4 v c^2` multiply-adds per sequence, `3 v` dependent steps, and two logarithms for each entry of `bulk`. If
    `q` alone has weights of 0, forward and backward messages are computed too. What underflows under `p` is computed
    again in float64 on a CPU. Memory: as for `entropy`.

    Source: the chain rule of relative entropy. Definition: `logchain.reference.kl_divergence`.

    >>> x, bulk = torch.zeros(3, 2), torch.full((1, 2, 2), 0.5)
    >>> fair, biased = torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])
    >>> kl_divergence((x, bulk, fair), (x, bulk, biased))
    tensor(0.1438)
    """
    for name, operands in (("p", p), ("q", q)):
        if not isinstance(operands, tuple) or len(operands) != 3:
            got = f"{len(operands)} of them" if isinstance(operands, tuple) else type(operands).__name__
            raise TypeError(f"{name}: expected a tuple (x, bulk, p0), got {got}")
        check_tensor("bulk", operands[1], 2)
    chain_p = Chain.of(*p, log_params, lengths, cu_seqlens, prefix="p: ")
    chain_q = Chain.of(*q, log_params, lengths, cu_seqlens, prefix="q: ")
    x, of_q = p[0], q[0]
    if x.shape != of_q.shape or x.device != of_q.device:
        expected = f"x {list(x.shape)} on {x.device} as in p"
        raise ValueError(f"q: expected {expected}, got {list(of_q.shape)} on {of_q.device}")
    divergences = chain_p.map(
        lambda p, q: divergence(p.dense[:3], q.dense[:3], p.lengths, log_params), list(chain_q.batches())
    )
    return chain_p.by_sequence(divergences).to(torch.promote_types(chain_p.dtype, chain_q.dtype))
