"""The log-partition of a chain of non-negative matrices."""

from functools import partial

from torch import Tensor

from .arguments import Lengths, check_flag
from .autograd.dense_operators import short_of
from .autograd.log_partition import log_norm, log_norm_in_pieces, short_log_norm
from .autograd.tree import log_norm_by_tree
from .chain import Chain
from .operands import Operands
from .progress import check_progress
from .schedules import budget, choose
from .schedules.choose import Strategy
from .tensors import differentiated, with_steps
from .transitions import Transition


def product(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
    strategy: Strategy | str = "auto",
    memory_budget: int | None = None,
    progress: bool = False,
) -> Tensor:
    r"""Returns the log-partition `log(p0 D_0 P_1 D_1 P_2 ... P_{v-1} d_{v-1})` of each sequence.

    Here `D_i = diag(exp x_i)` and `d_{v-1} = exp x_{v-1}`: no transition precedes the first variable. This is the
    log-likelihood of a hidden Markov model, the log-partition of a linear-chain CRF, and the value of a chain of sum
    layers in a probabilistic circuit.

    Args:
        x: log-potentials `[*B, v, c]` in nats: `v` variables (time steps), `c` states. -inf forbids a state.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`, non-negative, not necessarily normalized.
            Leading axes may be of size 1 or left out; a size of 1 on the step axis, or a matrix `[c, c]`, serves every
            step. A zero forbids a transition and has gradient 0: a trained weight that reaches 0, by a step or a clamp,
            stays there. Train logits instead, of which `log_softmax` (with `log_params`) is never -inf. Or a structure
            of `logchain.transitions`, whose parameters have the same leading axes; it excludes `memory_budget` and the
            strategies "segments" and "tree".
        p0: initial weights `[*B or ones, c]`, non-negative. A zero forbids a start.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the number of variables of each sequence: integers from 1 to v, of the shape of the first axes of `B`
            (`[n]` or `[n, t]` for `B = [n, t]`), or one for all. Entries past the end have no influence, not even NaN,
            and have gradient 0.
        cu_seqlens: the offsets of concatenated sequences, rising integers `[n + 1]` from 0 to `total`: sequence i has
            the rows `cu_seqlens[i]` to `cu_seqlens[i + 1]` of `x [total, c]`. Then `bulk` is `[1, c, c]`, or
            `[total, c, c]` with the matrix that leads into each row, `p0` is `[c]` or `[n, c]`, and the result `[n]`.
        strategy: "sequential" carries a vector through the chain; "segments" carries vectors through segments of the
            chain side by side, each after a warm-up that is verified, or on a GPU multiplies the matrices of each
            segment first; "tree" multiplies the matrices in pairs, level by level, in float64. "auto" is "sequential"
            or, for few long sequences, "segments": `logchain.plan` says which, and why. A number of segments may
            follow, "segments:8", and the steps of their warm-up, "segments:8:20". "segments" and "tree" exclude
            `cu_seqlens` and `memory_budget`; a chain too short for segments is not cut, nor on a GPU one with
            `lengths`.
        memory_budget: bytes that messages may take. A budget that holds all of them, `v (c + 1)` numbers a sequence,
            changes nothing. With a smaller one the chain is computed a segment at a time, in float64: only the messages
            between segments are kept, and the backward pass computes the others again. The budget covers everything but
            operands, results and gradients; the smallest possible one is `O(sqrt v)` bytes, less without gradients. The
            result can be differentiated once. It excludes `cu_seqlens`.

            Operands may then be larger than the memory. On a CPU `x` and `bulk` may be memory maps
            (`torch.from_file`, `torch.from_numpy(numpy.memmap(...))`, safetensors), of which a segment at a time is
            read. If `p0` is on a GPU, `x` or `bulk` or both may be on the host: a segment at a time is moved through
            pinned buffers while the one before is computed, and gradients return to the host likewise; the buffers
            count for the budget, and the result is on the device of `p0`. A gradient has the size of its operand and is
            held in memory, so that an operand larger than the memory can have none.
        progress: show a progress bar (tqdm) of the segments, forward and then backward; only with a `memory_budget`,
            and only if that does not hold all messages.

    Returns:
        `[*B]`, natural logarithm; float64 if an operand is, otherwise float32. Exactly -inf where every path is
        impossible. Gradients are the state posteriors (for `x`) and the expected transition counts (for `log bulk`;
        divided by `bulk` for `bulk` itself), in each operand's own shape; exactly 0 for impossible sequences and, by
        definition, where `x` is -inf or `bulk` or `p0` are zero. It can be differentiated twice.

    Operands may be float32, float64, bfloat16 or float16; the arithmetic is at least float32, and scales are kept in
    float64. The result is within `ulp + v (c + 8 + 2 D) u` of the exact value, u being 2^-24 (float64: 2^-53), where
    states that matter lie at most D nats below the largest entries of their messages, of `x` and of matrices that are
    logarithms. Sequences that would underflow are detected and computed again exactly (see `logchain.rescues`).

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length or a choice is out of range, arguments exclude each other, or the
            budget is too small (the message says the smallest possible). On a CPU also if a weight is negative in `p0`,
            or in `bulk` where one matrix serves all steps: with its value and place; -0.0 is zero. Elsewhere a sum that
            is negative makes its sequence NaN, and a negative weight that no sum shows may pass: `logchain.check` looks
            at all values.
        ImportError: `progress` is given, and tqdm is not installed.

    Cost: sequential, `v c^2` multiply-adds per sequence in `v` dependent steps; k segments with a warm-up of m steps,
    `(v + k m) c^2` in `v / k + m`, or by products `v c^3` in `v / k + k`; tree, `v c^3` in `log2 v`; the backward pass
    costs twice as much. Memory beyond operands, result and gradients: the forward messages `[*B, v, c]` (twice for
    sequences computed again), without gradients two steps of them; for the tree, the matrices `[*B, v-1, c, c]` in
    float64. A `memory_budget` that does not hold the messages costs one more forward pass.

    Source: the scaled forward-backward recursion of L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77
    (1989). Definition: `logchain.reference.product`.

    >>> import torch
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
    bulk = with_steps(bulk)
    alone = lengths is None and cu_seqlens is None and memory_budget is None
    if isinstance(bulk, Tensor) and alone and strategy == "auto" and progress is False:
        # a chain that one thread of a CPU computes is one call of C, whose arguments are cached by shapes
        keep = differentiated(x, bulk, p0)
        short = short_of(x, bulk, p0, log_params)
        if short is not None:
            return short_log_norm(short, x, bulk, p0, log_params, keep)
    excluded = {"cu_seqlens": cu_seqlens is not None, "a structure as bulk": isinstance(bulk, Transition)}
    strategy = choose.check_options(strategy, memory_budget, excluded)
    check_flag("progress", progress)
    if progress:
        if memory_budget is None:
            raise ValueError("progress: expected a memory_budget with it, got None; pass one")
        check_progress()
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens, in_pieces=memory_budget is not None).in_place()
    query = partial(_of_batch, strategy=strategy, memory_budget=memory_budget, progress=progress)
    return chain.by_sequence(chain.map(query)).to(chain.dtype)


def _of_batch(operands: Operands, strategy: str, memory_budget: int | None, progress: bool) -> Tensor:
    if operands.packed or not operands.is_dense:
        return log_norm(operands)
    x, bulk, p0, lengths, _ = dense = operands.dense
    if memory_budget is not None:
        keep = differentiated(x, bulk, p0)
        steps_between_checkpoints = budget.every_within(memory_budget, x, bulk, p0, keep)
        if steps_between_checkpoints is not None:
            return log_norm_in_pieces(operands, steps_between_checkpoints, keep, progress)
        strategy = "sequential"  # the other schedules may take more than the messages, which the budget holds
    if strategy == "tree" and x.numel() > 0 and x.shape[-2] > 1:
        return log_norm_by_tree(*dense)
    schedule = choose.of(x, bulk, p0, lengths is not None, "sequential" if strategy == "tree" else strategy)
    return log_norm(operands, schedule)
