"""The log-partition of a chain whose variables are sharded over the ranks of a process group."""

from typing import Any

from torch import Tensor

from ..arguments import Lengths
from ..operands import arithmetic_dtype, differentiated
from ..schedules.ranks import Strategy
from .questions import begin
from .sharded import Sharded, log_norm


def product(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    group: Any = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    one_matrix: bool | None = None,
    strategy: Strategy = "auto",
) -> Tensor:
    r"""`logchain.product` of chains whose variables are sharded: each rank holds some of them, one behind the other.

    Every rank of the group calls it with its own shard and gets the same result. Ranks exchange only messages of c
    numbers, or products of c x c, never operands; a sum over ranks follows in the backward pass.

    Args:
        x: log-potentials `[*B, v_r, c]` in nats of this rank's `v_r` variables; 0 is allowed. The first rank holds the
            first variables. Batch axes are the same on all ranks.
        bulk: transition weights, `[from, to]`: `[*B or ones, 1, c, c]`, one matrix for every step, the same on every
            rank; or `[*B or ones, v_r, c, c]`, the matrices that lead into this rank's variables, of which the rank
            with the very first variable has one less. Where every rank holds a single matrix, it is that of all steps.
        p0: initial weights `[*B or ones, c]`, the same on every rank.
        group: a process group of `torch.distributed`, by default that of all processes; gloo or NCCL.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the numbers of variables of whole sequences, the same on every rank; they may end on any.
        one_matrix: whether `bulk` is one matrix for every step. None takes it for that where every rank holds a single
            matrix, which with two variables on the first rank and one on each other may be those of their own steps.
        strategy: "vectors" carries messages through the ranks in turn, the last from the end on, so that two ranks meet
            in the middle and each does half of the work; blocks of the batch follow each other as in a pipeline.
            "products" does so on the outer ranks, while those between multiply their matrices. "overlapped" begins
            each rank some steps early, and verifies that the chain has forgotten by then how it began, as
            `logchain.product` does in segments; if it has not, the ranks walk again in turn. "auto" takes the one that
            a cost model predicts to be fastest. So do chains that cannot be cut as asked for: "products" needs three
            ranks with variables, "overlapped" 2,000 variables on each.

    Returns:
        `[*B]`, the same on all ranks, as of `logchain.product`. Gradients are those of this rank's x and matrices; of
        one matrix for all steps, and of p0, every rank has the whole gradient. All ranks have to take it, with the same
        incoming gradient. It can be differentiated once. Where a sum of weights is infinite, the sequence is NaN.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or on another, which the message names, or differs
            between ranks.
        RuntimeError: a rank is gone, or did not answer within the timeout of the group; or there is no group.
        NotImplementedError: a second derivative is taken.

    Cost: "vectors" for two ranks, half of one process's work each; "products", `v_r c^3` for ranks between;
    "overlapped", `v_r c^2` and some steps more. A rank sends a header of 104 bytes; for each sequence a message of
    8 (c + 2) bytes, or 8 (c^2 + 1) for a product, with a status of 16; and backward the gradients that are summed, in
    float64, with 8 a rank and 48. Memory: that of `logchain.product` for the rank's own shard.

    Where there are at least as many sequences as ranks, and each fits on one, shard by sequences instead: then
    `logchain.product` needs no exchange at all.

    Source: the two-filter recursion of D. C. Fraser and J. E. Potter, IEEE Trans. Autom. Control 14 (1969), met in the
    middle; products of segments as in G. E. Blelloch, "Prefix sums and their applications" (1990).

    >>> import tempfile, torch
    >>> import torch.distributed as dist
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # torchrun starts more
    >>> x, bulk = torch.zeros(3, 2), torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
    >>> product(x, bulk, torch.tensor([1.0, 1.0]))
    tensor(0.6931)
    >>> dist.destroy_process_group()
    """
    exchange, shards, operands = begin("product", x, bulk, p0, group, log_params, lengths, one_matrix, strategy)
    sharded = Sharded(exchange, shards, operands, strategy, keep=differentiated(x, bulk, p0))
    return log_norm(sharded).to(arithmetic_dtype(x, bulk, p0))
