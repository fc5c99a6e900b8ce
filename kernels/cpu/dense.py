"""The functions of `kernels.plain` for chains of dense matrices, by the C library.

States of packed sequences are (rows), or (k, rows) for k paths.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import messages_of
from ..chain import Chain, has_idle_threads
from ..message import Message, Residuals, leaving_message
from .arguments import Call, function, thread_spans
from .library import in_large_pages

# draws of one sequence that one call of the library computes at a time: DRAWS of c/sample.h
_DRAWS = 512


def _per_sequence(chain: Chain, *states: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(chain.g, chain.m, *states, dtype=dtype, device="cpu")


def forward(
    chain: Chain, entering: Message | None = None, *, keep: Tensor | None = None, leave: bool = False
) -> tuple[Residuals, Message | None]:
    """The log-partitions and kept messages, and the last forward message; see `kernels.plain.forward`."""
    log_norm, error = scale = torch.empty(2, chain.g, chain.m, dtype=torch.float64, device="cpu")
    flagged = torch.zeros(chain.g, chain.m, dtype=torch.bool, device="cpu")
    values = _per_sequence(chain, chain.c) if leave else None
    call = Call(chain, entered=entering is not None)
    call.set(messages=keep, log_norm=log_norm, flagged=flagged, leaving=values, log_norm_error=error)
    if entering is not None:
        before = entering.scale.expand(2, chain.g, chain.m).contiguous()
        call.set(entering=entering.values.to(chain.dtype).contiguous())
        call.set(entering_log_norm=before[0], entering_error=before[1])
    call.run("value", call.spans())
    residuals = Residuals(log_norm, chain.new(0) if keep is None else keep, flagged, entering is not None)
    return residuals, None if values is None else leaving_message(chain.ends, Message(values, scale), entering)


def backward(
    chain: Chain,
    residuals: Residuals,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0, or the backward message of the step that entered; see `kernels.plain.backward`."""
    preceding = _per_sequence(chain, chain.c)
    flagged = residuals.recomputed.to(torch.uint8, copy=True, memory_format=torch.contiguous_format)
    call = Call(chain, entered=residuals.entered)
    call.set(messages=residuals.messages, log_norm=residuals.log_norm.contiguous(), flagged=flagged)
    call.set(weight=weight.double().resolve_neg().contiguous(), uncounted=_per_sequence(chain, dtype=torch.int64))
    if residuals.entered:  # the first of the kept messages is the one that entered
        call.set(entering=residuals.messages, leaving=preceding)
    else:
        call.set(grad_p0=preceding)
    call.set(following=None if following is None else following.contiguous())
    written = grad_x
    if grad_x is not None:  # written in place, or in a copy of another dtype or with contiguous states
        plain = grad_x.dtype == chain.dtype and (grad_x.stride(-1) == 1 or chain.c == 1)
        written = in_large_pages(grad_x) if plain else chain.new(*grad_x.shape)
        call.rows("out", written)
        call.set(grad_x=written)
    spans, counts = _counts(call, grad_bulk)
    field = "counts" if len(chain.bulk) == 1 else "grad_bulk"
    by_thread = [{field: counts[i % len(counts)]} for i in range(len(spans))] if counts else []
    if call.run("backward", spans, by_thread):
        call.run("recompute_backward", spans, by_thread)
    for more in counts[1:]:
        counts[0].add_(more)
    if grad_bulk is not None and not counts:
        grad_bulk.zero_()
    elif grad_bulk is not None and len(chain.bulk) == 1:
        grad_bulk[0].copy_(counts[0].reshape(grad_bulk[0].shape))
    if grad_x is not None and written is not None and written is not grad_x:
        grad_x.copy_(written)
    return preceding if residuals.entered else preceding.view(*chain.lead, chain.c)


def _counts(call: Call, grad_bulk: Tensor | None) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """The sequences of each thread, and the memory for expected counts of transitions: one tensor, or one per thread.

    If all steps share a matrix, each tensor holds float64 counts. Otherwise each holds gradients: the first is
    `grad_bulk`, to which the others are added.
    """
    chain = call.chain
    g, m, c, shared = chain.g, chain.m, chain.c, len(chain.bulk) == 1
    if grad_bulk is None or call.arguments.steps == 1:
        return call.spans(), []
    if g > 1:  # each set of matrices belongs to one thread
        spans, copies = call.spans(whole_sets=True), 1
    else:  # so few threads that their copies of the gradient take no more memory than the messages
        spans = call.spans(most=None if shared else max(1, m // c))
        copies = len(spans)
    if shared:
        return spans, [torch.zeros(g, c, c, dtype=torch.float64, device="cpu") for _ in range(copies)]
    call.matrices("grad_bulk", in_large_pages(grad_bulk))
    return spans, [grad_bulk, *(torch.empty_like(grad_bulk) for _ in range(1, copies))]


def messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m); writes messages (v, *lead, c), of equal strides and the chain's dtype.

    Forward and backward messages are computed in parallel if there are more threads than sequences.
    """
    log_norm, call = _per_sequence(chain), Call(chain)
    call.rows("out", in_large_pages(forward))
    in_large_pages(backward)
    spans, name = call.spans(), "messages"
    if chain.ends is None and has_idle_threads(torch.get_num_threads(), chain.g * chain.m, chain.v, chain.c):
        flagged = torch.empty(2, chain.g, chain.m, dtype=torch.uint8, device="cpu")
        onward = {"log_forward": forward, "log_norm": log_norm, "flagged": flagged[0]}
        reverse = {"log_backward": backward, "log_norm": _per_sequence(chain), "flagged": flagged[1]}
        call.run("messages_one_way", spans + spans, [onward] * len(spans) + [reverse] * len(spans))
        if not flagged.any():
            return log_norm
        call.set(flagged=flagged.amax(0))
        name = "recompute_messages"
    call.set(log_norm=log_norm, log_forward=forward, log_backward=backward)
    call.run(name, spans)
    return log_norm


def means(chains: Sequence[Chain]) -> tuple[Tensor, Tensor, Tensor]:
    """The log-partition of a chain, its mean log-weight, less a second chain's if there is one, and underflows (g, m).

    The mean is NaN where loops underflow.
    """
    p = replace(chains[0], by_log=True)
    log_norm, mean = torch.zeros(2, p.g, p.m, dtype=torch.float64, device="cpu")
    flagged = torch.zeros(p.g, p.m, dtype=torch.uint8, device="cpu")
    states, call, second = messages_of(p, p.v).view(p.v, *p.lead, p.c), Call(p), None
    call.set(log_norm=log_norm, means=mean, weight=torch.ones_like(mean), messages=messages_of(p, p.v))
    call.set(flagged=flagged, uncounted=torch.full((p.g, p.m), p.v, device="cpu"), grad_x=states)
    call.rows("out", states)
    if len(chains) > 1:
        second = Call(replace(chains[1], dtype=p.dtype))
        call.arguments.means.second = ctypes.addressof(second.arguments)
    call.run("means", call.spans())
    return log_norm, mean, flagged == 1  # forward


def draw(chain: Chain, residuals: Residuals, states: Tensor) -> None:
    """Write the states of drawn paths, see `kernels.plain.sample`."""
    count, places = len(states), chain.g * chain.m * -(-len(states) // _DRAWS)
    call = Call(chain)
    call.set(messages=residuals.messages, log_norm=residuals.log_norm.contiguous())
    call.set(flagged=residuals.recomputed.to(torch.uint8))
    call.paths(states, count, states.shape[-1], rank=states.stride(0), sequence=states.stride(-2))
    # the columns of a step's matrix that are read: one for every draw, at most all
    work = chain.v * chain.g * chain.m * chain.c * min(chain.c, count)
    call.run("sample", thread_spans(places, work))


def paths(chain: Chain, k: int | None = None, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The states (g, m, v) of the best paths, or (g, m, k, v) of the k best, and `unknown` sequences (g, m).

    Log-weights of best paths, NaN for unknown sequences, are written to `weights` (g, m). See `kernels.plain.viterbi`.
    """
    ranks, steps = 1 if k is None else k, len(chain.x)
    grid = (chain.g, chain.m) if chain.starts is None else ()
    unknown = _per_sequence(chain, dtype=torch.uint8)
    states = torch.empty(*grid, ranks, steps, dtype=torch.int64, device="cpu")
    call = Call(chain)
    call.set(flagged=unknown, log_norm=weights)
    call.paths(states, ranks, steps, rank=steps, sequence=ranks * steps)
    call.run("viterbi" if k is None else "topk_paths", call.spans())
    return states[..., 0, :] if k is None else states, unknown.view(torch.bool)


class Messages:
    """The max-plus messages of a chain, or of a stretch that a message enters, and the best paths through them.

    `leaving` (g, m, c), float64: the last message of each sequence, less its largest entry. `unknown` (g, m): whether a
    sequence holds NaN or +inf, so that no path is known to be the best. `entering` (g, m, c): such a message, which is
    then step 0 of a path, or None.
    """

    def __init__(self, chain: Chain, entering: Tensor | None) -> None:
        self._call = call = Call(chain, entered=entering is not None)
        self.leaving, flagged = _per_sequence(chain, chain.c), _per_sequence(chain, dtype=torch.uint8)
        self.unknown = flagged.view(torch.bool)
        width = max(chain.c, function("lanes", chain.dtype)())
        messages = in_large_pages(chain.new(call.arguments.steps, chain.g * chain.m, width))
        before = None if entering is None else entering.to(chain.dtype).contiguous()
        call.set(entering=before, leaving=self.leaving, messages=messages, flagged=flagged)
        call.run("viterbi_forward", call.spans())

    def follow(self, states: Tensor) -> None:
        """Write into `states` (g, m, steps) the best paths, each to a sequence's end or over its first `steps` steps.

        On entry, the last entry of each is the state in which the path has to end, or negative for any state. States
        are -1 past a sequence's end, and everywhere if it is unknown or there is no path.
        """
        call, steps = self._call, states.shape[-1]
        call.paths(states, 1, steps, rank=steps, sequence=steps)
        call.set(steps=steps)
        if call.ends is not None:
            ends, paths = call.ends.clamp(max=steps), states.flatten(0, 1)
            paths[torch.arange(len(paths), device="cpu"), ends.flatten() - 1] = paths[:, -1].clone()
            call.set(ends=ends)
        call.run("viterbi_backward", call.spans())
