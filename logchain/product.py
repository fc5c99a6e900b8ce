"""The log-partition of a chain of non-negative matrices."""

from typing import Any

import torch
from torch import Tensor

from .arguments import Lengths, check_alone, check_flag, check_float_dtype, check_question
from .autograd import checkpoints, packed_chain, tree_chain
from .autograd.chain import log_norm, short_log_norm
from .autograd.chain_operators import short_of
from .autograd.semiring import total
from .autograd.viterbi import best_weight
from .operands import arithmetic_dtype, differentiated
from .progress import check_progress
from .schedules import budget, choose
from .schedules.choose import Strategy
from .schedules.packed import Packed
from .semirings import LOG, MAX, Semiring
from .workspace import Workspace


def product(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
    semiring: Semiring = LOG,
    strategy: Strategy = "auto",
    memory_budget: int | None = None,
    progress: bool = False,
    workspace: Workspace | None = None,
    out_dtype: torch.dtype | None = None,
    validate: bool = False,
) -> Tensor:
    r"""`log(p0 D_0 P_1 D_1 P_2 ... P_{v-1} d_{v-1})` with `D_i = diag(exp x_i)` and `d_{v-1} = exp x_{v-1}`.

    This is the log-likelihood of a hidden Markov model, the log-partition of a linear-chain CRF and a chain of sum
    layers of a probabilistic circuit. There is no transition before the first variable, `p0` is not multiplied by one,
    and `bulk` is `[from, to]`.

    Args:
        x: log-potentials `[*B, v, c]` in nats: `v` variables (time steps), `c` states. -inf forbids a state.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, non-negative, not necessarily normalised. Leading axes
            may be of size 1 or left out; a size of 1 on the step axis means one matrix for every step. A zero forbids a
            transition.
        p0: initial weights `[*B or ones, c]`, non-negative. A zero forbids a start.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: integers from 1 to v, of the shape of the first axes of `B` (`[n]` or `[n, t]` for `B = [n, t]`), or
            one for all: how many variables each sequence has. What lies behind has no influence, not even NaN, and gets
            gradient 0.
        cu_seqlens: rising integers `[n + 1]` from 0 to `total`, for sequences that lie one behind the other: sequence i
            has the rows `cu_seqlens[i]` to `cu_seqlens[i + 1]` of `x [total, c]`. Then `bulk` is `[1, c, c]`, or
            `[total, c, c]` with the matrix that leads into each row, `p0` is `[c]` or `[n, c]`, and the result `[n]`.
        semiring: how the weights of paths are added: `logchain.semirings.LOG`, `MAX` for that of the best path alone
            (which `logchain.viterbi` finds), or one of yours, whose gradients are those that torch's autograd takes
            through its sum: `c^2` terms a step are kept for them.
        strategy: "sequential" carries a vector through the chain; "chunked" multiplies the matrices of many segments
            side by side before it; "tree" multiplies pairs of matrices, level by level. "auto" takes the one that a
            model of this device predicts to be fastest: `logchain.plan` says which, and why. "chunked" and "tree" go
            with the semiring `LOG` alone, and with neither `cu_seqlens` nor `memory_budget`; a chain too short for
            segments, or one with `lengths` on a GPU, has none.
        memory_budget: bytes that messages may take. A budget that holds all of them, `v (c + 1)` numbers a sequence,
            changes nothing. With a smaller one the chain is computed a segment at a time, in float64: messages are kept
            between segments, and the others are computed again in the backward pass. That takes `O(sqrt v)` bytes at
            the least, with all that is computed from messages at the worst, but for operands, results and gradients;
            without gradients a smaller budget will do. The result can be differentiated once. Only in the semiring
            `LOG`, and without `cu_seqlens`.

            Operands may then be larger than the memory. On a CPU `x` and `bulk` may be memory maps
            (`torch.from_file`, `torch.from_numpy(numpy.memmap(...))`, safetensors), of which a segment at a time is
            read. Where `p0` is on a GPU, `x` or `bulk` or both may be on the host: a segment at a time is moved
            through pinned buffers while the one before is computed, and gradients return to the host likewise; what
            is being moved counts for the budget, and the result is where `p0` is. A gradient has the size of its
            operand, and is made in memory: of a memory map that exceeds it none can be taken.
        progress: show a bar (tqdm) of the segments that have been passed to the device, forward and then backward; it
            goes with a `memory_budget`. There is none where the budget holds all messages.
        workspace: a `logchain.Workspace` that lends the memory of the messages, where gradients are needed, to one call
            after the other. Where a call is traced or mapped (`torch.compile`, `torch.func`), it has no effect. Only
            for the sequential schedule of the semiring `LOG`, without `cu_seqlens` and `memory_budget`.
        out_dtype: dtype of the result; by default float64 if an operand is float64, otherwise float32.
        validate: also check the values, which costs a pass over the data.

    Returns:
        `[*B]`, natural logarithm; exactly -inf where every path is impossible. Gradients are the state posteriors (`x`)
        and the expected transition counts (`log bulk`, or over `bulk` itself), in each operand's own shape; exactly 0
        for impossible sequences and, by definition, where `x`, `bulk` or `p0` forbid. It can be differentiated twice.

    Operands may be float32, float64, bfloat16 or float16; the arithmetic is at least float32, and scales are kept in
    float64. The result is within `ulp + v (c + 8 + 2 D) u` of the exact value, u being 2^-24 (float64: 2^-53), where
    states that matter lie at most D nats below the largest entries of their messages, of `x` and of matrices that are
    logarithms. What the format cannot hold is found and computed again exactly (see `logchain.rescues`).

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length or a choice is out of range, `validate` finds a value, a strategy
            or a `memory_budget` does not go with another argument, or the budget is too small; the message says the
            smallest that is not.
        ImportError: `progress`, and tqdm is not installed.

    Cost: sequential, `v c^2` multiply-adds a sequence in `v` dependent steps; chunked, `v c^3` in `v / k + k` for k
    segments; tree, `v c^3` in `log2 v`; twice that again for the backward pass. Memory beyond operands, result and
    gradients: the forward messages `[*B, v, c]` (those once more for sequences computed again), without gradients two
    steps of them; at most two such tensors in any schedule. A `memory_budget` that does not hold them costs one more
    forward pass.

    Source: the scaled forward-backward recursion of L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77
    (1989). Definition: `logchain.reference.product`.

    >>> x = torch.zeros(1, 3, 2).requires_grad_()  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> out = product(x, bulk, torch.tensor([1.0, 1.0]))
    >>> out
    tensor([0.6931], grad_fn=<LogPartitionBackward>)
    >>> out.sum().backward()
    >>> x.grad
    tensor([[[0.5000, 0.5000],
             [0.5500, 0.4500],
             [0.5850, 0.4150]]])

    The potentials may lie in a file, of which a segment at a time is read:

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     x = torch.from_file(file.name, shared=True, size=10_000).view(1, 5000, 2)  # zeros
    ...     product(x, bulk, torch.tensor([1.0, 1.0]), memory_budget=50_000)
    tensor([0.6931])
    """
    alone = lengths is None and cu_seqlens is None and memory_budget is None and workspace is None and out_dtype is None
    if alone and semiring is LOG and strategy == "auto" and progress is False and validate is False:
        keep = differentiated(x, bulk, p0)
        short = short_of(x, bulk, p0, log_params, keep, choose.is_sequential)
        if short is not None:
            return short_log_norm(short, x, bulk, p0, log_params, keep)
    others = {"another semiring than LOG": semiring is not LOG, "cu_seqlens": cu_seqlens is not None}
    choose.check_options(strategy, memory_budget, {**others, "a workspace": workspace is not None})
    check_float_dtype("out_dtype", out_dtype)
    if not isinstance(semiring, Semiring):
        raise TypeError(f"semiring: expected a logchain.semirings.Semiring, got {type(semiring).__name__}")
    if memory_budget is not None:
        check_alone("memory_budget", memory_budget, "None", others)
    check_flag("progress", progress)
    if progress:
        if memory_budget is None:
            raise ValueError("progress: expected a memory_budget with it")
        check_progress()
    if workspace is not None:
        if not isinstance(workspace, Workspace):
            raise TypeError(f"workspace: expected a logchain.Workspace or None, got {type(workspace).__name__}")
        check_alone("workspace", workspace, "None", {**others, "a memory_budget": memory_budget is not None})
    if cu_seqlens is not None:
        packed = Packed(x, bulk, p0, cu_seqlens, lengths)
        if semiring is LOG and packed_chain.taken(packed, log_params, validate):
            return packed_chain.log_norm(packed, log_params).to(out_dtype or arithmetic_dtype(x, bulk, p0))
        options: Any = {"log_params": log_params, "semiring": semiring, "validate": validate, "out_dtype": out_dtype}
        return packed.by_sequence([product(*piece[:3], lengths=piece.lengths, **options) for piece in packed])
    ends = check_question(x, bulk, p0, log_params, lengths, validate, in_pieces=memory_budget is not None)
    dtype = out_dtype or arithmetic_dtype(x, bulk, p0)
    if memory_budget is not None:
        keep = differentiated(x, bulk, p0)
        every = budget.every_within(memory_budget, x, bulk, p0, keep)
        if every is not None:
            found: Tensor = checkpoints.log_norm(x, bulk, p0, ends, log_params, every, keep, progress)
            return found.to(dtype)
    if semiring is LOG:
        # the other schedules may take more than the messages, which the budget and the workspace hold
        within = strategy if memory_budget is None and workspace is None else "sequential"
        schedule = choose.of(x, bulk, p0, log_params, ends is not None, within)
        if schedule.name == "tree":
            return tree_chain.log_norm(x, bulk, p0, ends, log_params).to(dtype, copy=True)
        segments = schedule.segments
        return log_norm(x, bulk, p0, ends, log_params, segments=segments, workspace=workspace, dtype=dtype)
    if semiring is MAX:
        return best_weight(x, bulk, p0, ends, log_params)[1].to(dtype)
    return total(x, bulk, p0, ends, log_params, semiring).to(dtype)
