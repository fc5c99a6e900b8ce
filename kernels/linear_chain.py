"""The sum-product recursion in linear space: one matrix product a step.

    U_i = S_{i-1} P_i      W_i = U_i exp(x_i - max x_i)      S_i = W_i / z_i,  z_i = 2^k so that 1 <= max S_i < 2

A scale is a power of two, which loses nothing. The scales are summed as float64 logarithms; `certificate` finds the
sequences that this could not represent.

Backward, with Z the partition function, B_i = d log Z / d S_i and R_i = d log Z / d U_i:

    R_i = B_i exp(x_i - max x_i) / z_i        B_{i-1} = R_i P_i^T        d/dx_i = S_i B_i        d/dP_i = S_{i-1}^T R_i

Where the forward pass was certified these need no certificate: U_i R_i sums to 1, so that R_i is at most 1 / U_i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .certificate import Certificate, doubtful, period_of
from .chain import Chain, Emissions, Matrices
from .exponentials import trusted_sum
from .summation import exact_sum

# float64 scales summed at a time
_PIECE = 2**15

# steps of the backward pass between two normalisations
_REFRESH = 64


# as which integers the bits of a float are read, and all but those of its mantissa
_EXPONENT = {torch.float32: (torch.int32, -(2**23)), torch.float64: (torch.int64, -(2**52))}


@dataclass
class Kept:
    """What the backward pass needs: messages S (v, g, m, c), scales z (v, g, m, 1), the sum of the last S (g, m, 1).

    Where the chain has weights of the last step's states, it is the sum of those times S. A forward pass that is not to
    be differentiated makes do with the messages of two steps.
    """

    messages: Tensor
    scales: Tensor
    total: Tensor


def forward(chain: Chain, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """The log-partition (g, m) in float64, and which of them are not to be trusted (g, m), None for none.

    `kept` is written; where it has two messages only, those of two steps take turns.
    """
    v, c = chain.v, chain.c
    matrices = Matrices(chain)
    initial, log_top = chain.start()
    initial = initial.to(chain.dtype)
    period = period_of(chain, matrices)
    certificate = None if period else Certificate(chain, matrices)
    scales, total = kept.scales.fill_(1.0), kept.total.zero_()
    ending = torch.empty_like(total)
    weighted, room = None, torch.empty(0)
    if chain.final is not None:
        weighted, room = torch.zeros_like(total), torch.empty_like(chain.final)
    tiny = torch.finfo(chain.dtype).tiny
    emissions = Emissions(chain)
    slots, scale_of = kept.messages.unbind(0), scales.unbind(0)
    integer, exponent = _EXPONENT[chain.dtype]
    bits_of = scales.view(integer).unbind(0)
    for start, stop in emissions.blocks:
        block = emissions(start, stop)
        for step in range(start, stop):
            message, z, emission = slots[step % len(slots)], scale_of[step], block[step - start]
            if step == 0:
                torch.mul(initial, emission.view(*chain.lead, c), out=message.view(*chain.lead, c))
            else:
                torch.bmm(slots[(step - 1) % len(slots)], matrices(step), out=message)
                if certificate is not None:
                    certificate.look(step, message, scale_of[step - 1])
                message.mul_(emission)
            if chain.ended is not None:
                message.masked_fill_(chain.ended[step], 0.0)
            if not period or step % period == 0:
                torch.amax(message, -1, keepdim=True, out=z).clamp_(min=tiny)
                bits_of[step].bitwise_and_(exponent)
                message.div_(z)
            if chain.last is not None:
                torch.sum(message, -1, keepdim=True, out=ending)
                torch.where(chain.last[step], ending, total, out=total)
                if weighted is not None and chain.final is not None:
                    torch.sum(torch.mul(message, chain.final, out=room), -1, keepdim=True, out=ending)
                    torch.where(chain.last[step], ending, weighted, out=weighted)
            if certificate is not None:
                certificate.look_at_scale(step, z)
                if certificate.nothing_left:
                    return total[..., 0].double(), certificate.lossy
    if chain.last is None:
        torch.sum(slots[(v - 1) % len(slots)], -1, keepdim=True, out=total)
        if weighted is not None and chain.final is not None:
            torch.mul(slots[(v - 1) % len(slots)], chain.final, out=room)
            torch.sum(room, -1, keepdim=True, out=weighted)
    lossy = certificate.lossy if certificate else doubtful(chain, matrices, scales, total, period)
    if weighted is not None:
        total.copy_(weighted)
        lossy = lossy | ((total < trusted_sum(chain.dtype, c)) & (total > 0))[..., 0]
    log_norm = _log_norm(chain, matrices, log_top, emissions.shift, kept)
    return log_norm, lossy if lossy.any() else None


def _log_norm(chain: Chain, matrices: Matrices, log_top: Tensor, shifts: Tensor, kept: Kept) -> Tensor:
    """The logarithms of all that was taken out of the messages, and of what was left at the end (g, m), in float64."""
    total = log_top.expand(*chain.lead, 1).reshape(chain.g, chain.m) + kept.total[..., 0].double().log()
    lost = torch.zeros_like(total)
    size = max(1, _PIECE // (chain.g * chain.m), -(-chain.v // 8))  # at most eight pieces, however long the chain
    for first in range(0, chain.v, size):
        last = min(first + size, chain.v)
        parts = [kept.scales[first:last, ..., 0].double().log(), shifts[first:last, ..., 0]]
        log_scale = matrices.log_scale(first, last)
        if log_scale is not None:
            parts.append(log_scale.expand(-1, chain.g, chain.m))
        piece = torch.cat(parts)
        if chain.ended is not None:
            piece.masked_fill_(chain.ended[first:last, ..., 0].repeat(len(parts), 1, 1), 0.0)
        if chain.dtype == torch.float64:
            total, more = exact_sum(torch.cat([total[None], piece]))
            lost += more
        else:
            total += piece.sum(0)
    return total + lost


def backward(chain: Chain, kept: Kept, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m); a weight of 0 leaves its sequence out.

    `grad_x` (v, *lead, c) and `grad_bulk` (s, g, c, c) are written where they are wanted; d/dU_0 (*lead, c) is
    returned.
    """
    g, m, c = chain.g, chain.m, chain.c
    matrices, lead = Matrices(chain), (*chain.lead, c)
    period = period_of(chain, matrices)
    unused = (weight[..., None] == 0) | (kept.total == 0)
    final = (weight[..., None] / kept.total).masked_fill_(unused, 0.0)
    if chain.final is not None:
        final = final * chain.final
    adjoint = chain.new(g, m, c).zero_() if chain.ends is not None else final.expand(g, m, c).clone()
    sparse = not matrices.low > 0 or chain.ends is not None
    slots, emissions = kept.messages.unbind(0), Emissions(chain)
    unreached, found = torch.empty_like(adjoint, dtype=torch.bool), chain.new(g, m, 1)
    spare = torch.empty_like(adjoint)
    if grad_bulk is not None and matrices.homogeneous:
        grad_bulk.zero_()
    for start, stop in reversed(emissions.blocks):
        sources = emissions(start, stop)
        for step in reversed(range(start, stop)):
            message, source = slots[step], sources[step - start]
            if chain.ended is not None and chain.last is not None:
                adjoint.masked_fill_(chain.ended[step], 0.0)
                torch.where(chain.last[step], final, adjoint, out=adjoint)
            if grad_x is not None:
                torch.mul(message.view(lead), adjoint.view(lead), out=grad_x[step])
            if step % _REFRESH == 0:  # a step's posteriors sum to the weight, and must not drift from it
                torch.sum(torch.mul(message, adjoint, out=spare), -1, keepdim=True, out=found)
                none = torch.eq(found, 0.0, out=unreached[..., :1])
                adjoint.mul_(torch.div(weight[..., None], found, out=found).masked_fill_(none, 0.0))
            source.mul_(adjoint)
            if not period or step % period == 0:
                source.div_(kept.scales[step])
            if sparse:  # what no path enters has a source of any size, even infinite, and no influence
                source.masked_fill_(torch.eq(message, 0.0, out=unreached), 0.0)
            if step > 0:
                torch.bmm(source, matrices(step).mT, out=adjoint)
        if grad_bulk is not None:
            _transitions(kept.messages, sources, max(start, 1), stop, grad_bulk, matrices)
    if grad_bulk is not None and matrices.homogeneous:
        matrices.gradient_from_linear(1, grad_bulk[0])
    return sources[0].view(lead)


def start_gradient(chain: Chain, source: Tensor) -> Tensor:
    """The gradient of `p0`, one per sequence (*lead, c), from d/dU_0, in float64; exactly 0 at an exact zero."""
    initial, log_top = chain.start()
    if chain.log_params or chain.by_log:
        return source.double() * initial
    return (source / log_top.exp()).masked_fill_(initial == 0, 0.0)


def _transitions(
    messages: Tensor, sources: Tensor, start: int, stop: int, grad_bulk: Tensor, matrices: Matrices
) -> None:
    """Add or write `S_{i-1}^T R_i` for the steps of a block; `sources` ends with `stop`."""
    if start == stop:
        return
    _, g, m, c = messages.shape
    before, sources = messages[start - 1 : stop - 1], sources[len(sources) - (stop - start) :]
    if matrices.homogeneous and g == 1:
        grad_bulk[0, 0].addmm_(before.reshape(-1, c).T, sources.reshape(-1, c))
        return
    if matrices.homogeneous:
        for message, source in zip(before, sources, strict=True):
            grad_bulk[0].baddbmm_(message.mT, source)
        return
    out = grad_bulk[start - 1 : stop - 1]
    if g == 1:
        torch.bmm(before[:, 0].mT, sources[:, 0], out=out[:, 0])
    elif m == 1:
        torch.mul(before.mT, sources, out=out)
    else:
        for message, source, gradient in zip(before, sources, out, strict=True):
            torch.bmm(message.mT, source, out=gradient)
    for step in range(start, stop):
        matrices.gradient_from_linear(step, grad_bulk[step - 1])
