"""The functions of a chain whose variables are divided among ranks, each of which calls them with its part."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .. import entropy as entropy_of
from .. import kernels
from ..arguments import Lengths, check_choice
from ..autograd.operator import Final
from ..autograd.paths import log_weight
from ..kernels.chain import Chain, arithmetic_dtype
from ..kernels.message import Residuals
from ..log_prob import as_paths
from ..marginals import Marginals
from ..operands import checked
from ..sample import check_draws
from ..viterbi import Path
from .part import Part


def product(
    x: Tensor, bulk: Tensor, p0: Tensor, *, group: Any = None, log_params: bool = False, lengths: Lengths | None = None,
    one_matrix: bool | None = None,
) -> Tensor:  # fmt: skip
    r"""Returns the log-partition of chains whose variables are divided among ranks, as `logchain.product` defines it.

    Args:
        x: log-potentials `[*B, v_r, c]` in nats of this rank's `v_r` variables, the first rank's first; 0 is allowed.
        bulk: transition weights, `[from, to]`: `[*B or ones, 1, c, c]`, one matrix for every step, the same on every
            rank; or `[*B or ones, v_r, c, c]`, those into this rank's variables, one less on the rank with the first.
        p0: initial weights `[*B or ones, c]`, the same on every rank.
        group: a process group of `torch.distributed`: gloo for a CPU, NCCL for GPUs. None: that of all processes.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the numbers of variables of whole sequences, the same on every rank; they may end on any.
        one_matrix: whether `bulk` is one matrix for every step. None: it is if every rank holds a single matrix.

    Returns:
        `[*B]` in nats, the same on every rank; NaN where a sum of weights is infinite. It can be differentiated once,
        by all ranks with the same incoming gradient: each gets the gradient of its x and its matrices, and the whole
        gradient of one matrix for every step and of p0.

    Raises:
        TypeError, ValueError: an argument is invalid on a rank, which the message names, or differs between ranks.
            Values of x, `bulk` and p0 are not compared.
        RuntimeError: there is no group, or a rank did not answer within the timeout of the group: if a rank raises an
            error before it calls this function, the others wait that long.

    Cost: `v_r c^2` multiply-adds a sequence, on all ranks at the same time, and `c^2 v_r / 32` to warm up; if the chain
    does not mix within that, ranks scan one after the other. The backward pass costs twice as much. A rank sends two
    messages of `8 c` bytes a sequence to its neighbor. Memory: that of `logchain.product` for the rank's part.

    Source: messages of a mixing chain contract in Hilbert's metric, G. Birkhoff, Trans. AMS 85 (1957).

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more
    >>> x, bulk = torch.zeros(3, 2), torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
    >>> product(x, bulk, torch.tensor([1.0, 1.0]))
    tensor(0.6931)
    >>> dist.destroy_process_group()
    """
    part = Part("product", (x, bulk, p0, group, log_params, lengths, one_matrix))
    return _Value.apply(part, None, x, bulk, p0)  # type: ignore[no-any-return, no-untyped-call]


def marginals(
    x: Tensor, bulk: Tensor, p0: Tensor, *, transitions: Literal["sum", "full"] | None = None, group: Any = None,
    log_params: bool = False, lengths: Lengths | None = None, one_matrix: bool | None = None,
) -> Marginals:  # fmt: skip
    """Returns the posterior marginals of this rank's variables, as `logchain.marginals` defines them.

    Arguments, errors and cost are as of `distributed.product` and its gradients. `transitions`: "sum" for expected
    counts in the shape of `bulk`, those of one matrix summed over all ranks; "full" for those into each of this rank's
    variables but the very first, `[*B, v_r, c, c]`. There are no derivatives.
    """
    call = x, bulk, p0, group, log_params, lengths, one_matrix
    check, full = partial(check_choice, "transitions", transitions, (None, "sum", "full")), transitions == "full"
    part = Part("marginals", call, check, dtype=arithmetic_dtype, by_log=True, full=full, transitions=transitions)
    log_norm, residuals = part.forward(keep=True)
    needs = True, transitions is not None, False
    (states, counts, _), *_ = part.backward(log_norm, residuals, part.zeros() + 1, needs)
    if counts is not None and part.one_matrix:
        counts = part.ranks.total(counts).to(states.dtype)
    return Marginals(states, counts, part.batched(log_norm).to(states.dtype))


def entropy(
    x: Tensor, bulk: Tensor, p0: Tensor, *, group: Any = None, log_params: bool = False, lengths: Lengths | None = None,
    one_matrix: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns the entropy `[*B]` in nats of the posterior over paths, as `logchain.entropy` defines it.

    Arguments and errors are as of `distributed.product`; the cost is that of its gradients and of `logchain.entropy`,
    in float64. There are no derivatives.
    """
    part = Part("entropy", (x, bulk, p0, group, log_params, lengths, one_matrix), dtype=lambda *_: torch.float64)
    dtype, previous = arithmetic_dtype(x, bulk, p0), part.zeros()
    log_norm, residuals = part.forward(keep=True)
    _, before, following = part.backward(log_norm, residuals, torch.ones_like(log_norm))
    value = part.batched(previous)
    if residuals is not None:
        (x, bulk, p0), lengths = part.operands, part.lengths
        x = torch.cat([x[..., :-1, :], x[..., -1:, :] + part.batched(following)[..., None, :]], -2)
        if part.entered:
            entering = residuals.logs(0)
            x, p0, lengths = part.with_previous(x, p0, part.batched(entering)[..., None, :])
            shares = torch.softmax(entering + before, -1)
            previous = -torch.special.xlogy(shares, shares).sum(-1)
        lengths = None if lengths is None else lengths.clamp(min=1)
        value = entropy_of(x, bulk, p0, log_params=part.log_params, lengths=lengths)
        value = torch.where(part.batched(part.reached), value - part.batched(previous), 0.0)
    return torch.where(part.batched(log_norm) == -torch.inf, 0.0, part.ranks.total(value)).to(dtype)


def viterbi(
    x: Tensor, bulk: Tensor, p0: Tensor, *, group: Any = None, log_params: bool = False, lengths: Lengths | None = None,
    one_matrix: bool | None = None,
) -> Path:  # fmt: skip
    """Returns the best path, as `logchain.viterbi` defines it: this rank's states, and the whole path's log-weight.

    Arguments and errors are as of `distributed.product`. The cost is that of `logchain.viterbi` for the rank's part, on
    all ranks at the same time if the best paths into all states soon merge, otherwise one after the other. There are no
    derivatives.
    """
    part = Part("viterbi", (x, bulk, p0, group, log_params, lengths, one_matrix))
    messages: Any = None

    def scan(chain: Chain, entering: Tensor | None) -> Tensor:
        nonlocal messages
        viterbi = kernels.load("cpu.dense" if kernels.in_c(x) else "plain.viterbi")
        messages = viterbi.Messages(chain, None if entering is None else entering.contiguous())
        leaving: Tensor = messages.leaving.masked_fill(messages.unknown[..., None], torch.nan)
        return leaving

    with kernels.arithmetic_on(x):
        _, last = part.carry(scan, lambda arrived, guess: (arrived != guess).any(-1), part.reached)
        best = part.ranks.total(last.amax(-1))  # 0, -inf for no path, or NaN
        states = torch.full((*part.layout.grid, x.shape[-2] + part.entered), -1, device=x.device)
        if part.active:
            states[..., -1] = part.states_after()
            messages.follow(states)
            states.masked_fill_(~(best > -torch.inf)[..., None], -1)
            part.ranks.exchange(-1, states[..., 0])
    paths = part.batched(states)
    score = part.ranks.total(_path_weight(part, paths, *part.operands))
    score = torch.where(part.batched(best).isnan(), torch.nan, score).to(part.chain.dtype)
    return Path(paths[..., part.entered :].contiguous(), score)


def sample(
    x: Tensor, bulk: Tensor, p0: Tensor, num_samples: int, *, generator: torch.Generator | None = None,
    group: Any = None, log_params: bool = False, lengths: Lengths | None = None, one_matrix: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns paths drawn from the posterior, as `logchain.sample` draws them: states `[num_samples, *B, v_r]`.

    Arguments and errors are as of `distributed.product`. All ranks draw from a seed that the `generator` of the first
    one gives; generators of the others are not read. Equal states of it give equal paths for equal parts. The cost is
    that of `distributed.product`; then ranks draw one after the other, the last first. A GPU waits for the seed.
    """
    call = x, bulk, p0, group, log_params, lengths, one_matrix
    part = Part("sample", call, partial(check_draws, num_samples, generator, x), num_samples=num_samples)
    _, residuals = part.forward(keep=True)
    seed, chain = torch.zeros((), dtype=torch.float64, device=x.device), part.chain
    if part.ranks.rank == 0:
        seed.random_(2**52, generator=generator)
    seed = part.ranks.total(seed)
    states = torch.empty(num_samples, *part.layout.grid, chain.v + part.entered, dtype=torch.int64, device=x.device)
    if residuals is not None:
        after = part.states_after(num_samples)
        source = torch.Generator(x.device).manual_seed(int(seed) + part.ranks.rank)
        numbers = states.view(torch.float64).uniform_(generator=source)
        numbers[..., -1] = torch.where(after >= 0, -1.0 - after, numbers[..., -1])
        if part.entered:  # the message that entered is that of a variable
            ends = None if chain.ends is None else chain.ends + 1
            chain = replace(chain, x=chain.x[:1].expand(chain.v + 1, *chain.x.shape[1:]), ends=ends)
        with kernels.arithmetic_on(x):
            kernels.module("sample", x).draw(chain, residuals, states)
        part.ranks.exchange(-1, states[..., 0])
    return part.batched(states)[..., part.entered :].contiguous()


def log_prob(
    x: Tensor, bulk: Tensor, p0: Tensor, states: Tensor, *, group: Any = None, log_params: bool = False,
    lengths: Lengths | None = None, one_matrix: bool | None = None,
) -> Tensor:  # fmt: skip
    """Returns the log posterior `[*S, *B]` in nats of paths, as `logchain.log_prob` defines it.

    `states` are integers `[*S, *B, v_r]`, those of this rank's variables. All other arguments, the gradients, errors
    and the cost are as of `distributed.product`.
    """
    part = Part("log_prob", (x, bulk, p0, group, log_params, lengths, one_matrix), lambda: as_paths(states, x))
    paths = states.to(torch.int64)
    if part.lengths is not None:
        paths = torch.where(torch.arange(x.shape[-2], device=x.device) < part.lengths[..., None], paths, -1)
    axes = f"axes {list(paths.shape[:-1])} before its variables"
    part.ranks.agree(lambda: ({"states": axes}, checked(paths, x.shape[-1], "states").shape))
    if part.ranks.place is not None:
        part.ranks.exchange(1, paths[..., -1], before := paths.new_empty(paths.shape[:-1]))
        paths = torch.cat([before[..., None], paths], -1) if part.entered else paths
    return _Value.apply(part, paths, x, bulk, p0)  # type: ignore[no-any-return, no-untyped-call]


class _Value(torch.autograd.Function):
    """part, states, x, bulk, p0 -> the log-partition [*B], or of `states`, the log-probability [*S, *B]."""

    @staticmethod
    def forward(ctx: Any, part: Part, states: Tensor | None, *operands: Tensor) -> Tensor:
        log_norm, residuals = part.forward(keep=any(part.needs))
        value, impossible = part.batched(log_norm), None
        if states is not None:
            weight = part.ranks.total(_path_weight(part, states, *operands))
            impossible = (weight == -torch.inf) & ~value.isnan()  # where -inf - (-inf) would be NaN
            value = torch.where(impossible, -torch.inf, weight - value)
        ctx.part = part  # saved tensors are freed after the backward pass
        messages = (None,) * 3 if residuals is None else (residuals.messages, residuals.recomputed, residuals.bound)
        ctx.save_for_backward(*operands, states, impossible, log_norm, *messages)
        return value.to(part.chain.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_Gradients.apply(ctx.part, ctx.needs_input_grad[2:], grad.double(), *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Gradients(Final):
    """part, needs, grad, *saved by `_Value` -> the gradients of x, bulk and p0, None for one that is not needed."""

    refusal = "logchain.distributed: expected one derivative, got a second; it needs the chain on one rank"

    @staticmethod
    def forward(part: Part, needs: Sequence[bool], grad: Tensor, *saved: Any) -> Any:
        *operands, states, impossible, log_norm, messages, recomputed, bound = saved
        weight = grad
        if states is not None:
            grad = grad.masked_fill(impossible, 0.0)
            weight = -grad.sum_to_size(operands[0].shape[:-2])
        residuals = None if messages is None else Residuals(log_norm, messages, recomputed, part.entered, bound)
        # of what ranks share, each computes its share if any of them needs the gradient
        computed = needs[0], part.needs[1] if part.one_matrix else needs[1], part.needs[2]
        gradients, *_ = part.backward(log_norm, residuals, part.layout.grouped(weight), computed)
        if states is not None:
            leaves = [operand.detach().requires_grad_() for operand in operands]
            with torch.enable_grad():
                weight = _path_weight(part, states, *leaves)
            of_paths = torch.autograd.grad(weight, leaves, grad, allow_unused=True, materialize_grads=True)
            gradients = [None if a is None else a + b for a, b in zip(gradients, of_paths, strict=True)]
        rows = zip(operands, gradients, needs, (False, part.one_matrix, True), strict=True)
        wholes = [(x, g if g is None or not shared else part.ranks.total(g), need) for x, g, need, shared in rows]
        return tuple(g.to(x.dtype) if need and g is not None else None for x, g, need in wholes)


def _path_weight(part: Part, states: Tensor, x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The log-weight [*S, *B] of this rank's steps of paths, which begin with the variable before, if there is one."""
    lengths = part.lengths
    if part.entered:
        x, p0, lengths = part.with_previous(x, p0, torch.zeros_like(x[..., :1, :]))
    return log_weight(x, bulk, p0, states, lengths, part.log_params)
