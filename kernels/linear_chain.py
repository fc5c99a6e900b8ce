"""The sum-product recursion in linear space, and a certificate of what it could not represent.

    U_i = S_{i-1} P_i        W_i = U_i exp(x_i - max x_i)        z_i = max W_i        S_i = W_i / z_i

The forward messages S_i have maximum 1, their scales are summed as float64 logarithms. Entries of S_i may underflow
freely: one that mattered feeds an entry of U_{i+1} that is small though some path reaches it, and that is where one
looks. A chain whose matrices are bounded away from zero cannot have such entries and is not even looked at.

Backward, with Z the partition function, B_i = d log Z / d S_i and R_i = d log Z / d U_i:

    R_i = B_i exp(x_i - max x_i) / z_i        B_{i-1} = R_i P_i^T        d/dx_i = S_i B_i        d/dP_i = S_{i-1}^T R_i

Where the forward pass was certified these need no certificate: U_i R_i sums to 1, so that R_i is at most 1 / U_i.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .chain import Chain, Emissions, Matrices, multiply
from .exponentials import finite, trusted_sum

# float64 scales summed at a time
_PIECE = 2**15

# a path that runs less than this below the largest emissions (17 nats) is known to less roundings than the contract
# allows
_SHALLOW = 2.0**-24


@dataclass
class Kept:
    """What the backward pass needs: messages S (v, g, m, c), scales z (v, g, m, 1), the last message's sum (g, m,
    1)."""

    messages: Tensor
    scales: Tensor
    total: Tensor


def forward(chain: Chain, *, keep: bool) -> tuple[Tensor, Tensor | None, Kept]:
    """The log-partition (g, m) in float64, which of them are not to be trusted (g, m), None for none, and what to keep.

    Without `keep` the messages of two steps take turns.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    matrices = Matrices(chain)
    initial, initial_scale = chain.start()
    period = _period(chain, matrices, initial)
    certificate = None if period else _Certificate(chain, matrices, initial)
    messages = chain.new(v if keep else min(v, 2), g, m, c)
    scales = chain.new(v, g, m, 1).fill_(1.0)
    total = chain.new(g, m, 1).zero_()
    tiny = torch.finfo(chain.dtype).tiny
    slots, scale_of, emissions = messages.unbind(0), scales.unbind(0), Emissions(chain, careful=not period)
    for start, stop in chain.blocks():
        block = emissions(start, stop)
        for step in range(start, stop):
            message, z, emission = slots[step % len(slots)], scale_of[step], block[step - start]
            if step == 0:
                torch.mul(initial, emission.view(*chain.lead, c), out=message.view(*chain.lead, c))
            else:
                multiply(slots[(step - 1) % len(slots)], matrices(step), message)
                if certificate is not None:
                    certificate.look(step, message, scale_of[step - 1])
                message.mul_(emission)
            running, ending = chain.running(step), chain.ending(step)
            if running is not None:
                message.masked_fill_(~running, 0.0)
            if not period or step % period == 0:
                torch.amax(message, -1, keepdim=True, out=z).clamp_(min=tiny)
                message.div_(z)
            if ending is not None:
                torch.where(ending, message.sum(-1, keepdim=True), total, out=total)
            if certificate is not None:
                certificate.look_at_scale(step, z)
                if certificate.nothing_left:
                    return total[..., 0].double(), certificate.lossy, Kept(messages, scales, total)
    if chain.ends is None:
        total = slots[(v - 1) % len(slots)].sum(-1, keepdim=True)
    log_norm = initial_scale.expand(*chain.lead, 1).reshape(g, m) + _log_scales(
        chain, matrices, scales, emissions.shift
    )
    log_norm += total[..., 0].double().log()
    lossy = certificate.lossy if certificate is not None and certificate.lossy.any() else None
    return log_norm, lossy, Kept(messages, scales, total)


def _log_scales(chain: Chain, matrices: Matrices, scales: Tensor, shifts: Tensor) -> Tensor:
    """The sum of the logarithms of all that was taken out of the messages (g, m), in float64, a piece at a time."""
    result = torch.zeros(chain.g, chain.m, dtype=torch.float64, device=scales.device)
    size = max(1, _PIECE // (chain.g * chain.m))
    for start in range(0, chain.v, size):
        stop = min(start + size, chain.v)
        piece = scales[start:stop].double().log().add_(shifts[start:stop])[..., 0].add_(matrices.log_scale(start, stop))
        if chain.ends is not None:
            steps = torch.arange(start, stop, device=piece.device).view(-1, 1, 1)
            piece.masked_fill_(steps >= chain.ends[..., 0], 0.0)
        result += piece.sum(0)
    return result


def backward(chain: Chain, kept: Kept, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m); a weight of 0 leaves its sequence out.

    `grad_x` (v, *lead, c) and `grad_bulk` (s, g, c, c) are written where they are wanted; d/dU_0 (*lead, c) is
    returned.
    """
    g, m, c = chain.g, chain.m, chain.c
    matrices, lead = Matrices(chain), (*chain.lead, c)
    period = _period(chain, matrices, chain.start()[0])
    unused = (weight[..., None] == 0) | (kept.total == 0)
    final = (weight[..., None] / kept.total).masked_fill_(unused, 0.0)
    adjoint = chain.new(g, m, c).zero_() if chain.ends is not None else final.expand(g, m, c).clone()
    sparse = not matrices.low > 0 or chain.ends is not None
    slots, emissions = kept.messages.unbind(0), Emissions(chain, careful=not period)
    if grad_bulk is not None and matrices.homogeneous:
        grad_bulk.zero_()
    for start, stop in reversed(chain.blocks()):
        sources = emissions(start, stop)
        for step in reversed(range(start, stop)):
            message, source = slots[step], sources[step - start]
            running, ending = chain.running(step), chain.ending(step)
            if running is not None and ending is not None:
                adjoint.masked_fill_(~running, 0.0)
                torch.where(ending, final, adjoint, out=adjoint)
            if grad_x is not None:
                torch.mul(message.view(lead), adjoint.view(lead), out=grad_x[step])
            source.mul_(adjoint)
            if not period or step % period == 0:
                source.div_(kept.scales[step])
            if sparse:  # what no path enters has a source of any size, even infinite, and no influence
                source.masked_fill_(message == 0, 0.0)
            if step > 0:
                multiply(source, matrices(step).mT, adjoint)
        if grad_bulk is not None:
            _transitions(kept.messages, sources, max(start, 1), stop, grad_bulk, matrices)
    if grad_bulk is not None and matrices.homogeneous:
        matrices.gradient_from_linear(1, grad_bulk[0])
    return sources[0].view(lead)


def start_gradient(chain: Chain, source: Tensor) -> Tensor:
    """The gradient of `p0`, one per sequence (*lead, c), from d/dU_0; exactly 0 at an exact zero."""
    initial, log_top = chain.start()
    if chain.log_params:
        return source * initial
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


def _period(chain: Chain, matrices: Matrices, initial: Tensor) -> int:
    """After how many steps a message must be scaled, if no entry of U can be too small meanwhile; 0 if one can.

    U_{i+1} is at least `low` times the largest entry of S_i, hence so is z_{i+1}: after k steps without a scale the
    largest entry is at least low^k and the next sums at least low^(k+1).
    """
    low, high = matrices.low, max(1.0, matrices.high)
    if low >= _SHALLOW:
        low = min(low, _first_scale(chain, initial))
    if not low >= _SHALLOW:
        return 0
    threshold = trusted_sum(chain.dtype, chain.c) * high
    period = 0
    while period < 8 and low ** (period + 2) >= threshold and (chain.c * high) ** (period + 1) * threshold <= 1.0:
        period += 1
    return period


def _first_scale(chain: Chain, initial: Tensor) -> float:
    """A bound of the first message's largest entry; where `p0` has zeros, that of the worst sequence."""
    low = initial.amin().item()
    if low < _SHALLOW:
        x = chain.x[0].to(chain.dtype)
        low = (x - finite(x.amax(-1, keepdim=True))).exp_().mul_(initial).amax(-1).amin().item()
    return low


class _Certificate:
    """Finds the sequences in which something finite underflowed and might have mattered."""

    def __init__(self, chain: Chain, matrices: Matrices, initial: Tensor) -> None:
        self._chain = chain
        self._end_threshold = trusted_sum(chain.dtype, chain.c)
        self._threshold = self._end_threshold * max(1.0, matrices.high)
        self._reach = _Reach(chain, matrices, initial)
        self._shallow = _SHALLOW if chain.dtype == torch.float64 else 0.0
        self.lossy = torch.zeros(chain.g, chain.m, dtype=torch.bool, device=chain.x.device)
        self.nothing_left = False

    def look(self, step: int, sums: Tensor, z: Tensor) -> None:
        """`sums` U_i (g, m, c), `z` (g, m, 1) the scale of the message they were made from."""
        if sums.amin().item() * z.amin().item() >= self._threshold:
            return
        small = (sums < self._threshold / z).logical_and_(self._reach.at(step))
        running = self._chain.running(step)
        if running is not None:
            small.logical_and_(running)
        self._flag(small.any(-1))

    def look_at_scale(self, step: int, z: Tensor) -> None:
        """The last message is summed: it must not have lost what it consists of. Nor may float64's run too deep."""
        running, ending = self._chain.running(step), self._chain.ending(step)
        if not self._shallow and ending is None and step < self._chain.v - 1:
            return
        small = z < max(self._shallow, self._end_threshold)
        if running is not None and ending is not None:
            small.logical_and_(running if self._shallow else ending)
        if small.any():
            self._flag((small & self._reach.at(step)).any(-1))

    def _flag(self, found: Tensor) -> None:
        if found.any():
            self.lossy.logical_or_(found)
            self.nothing_left = bool(self.lossy.all())


class _Reach:
    """Which states a path of finite weight can be in, step by step, computed only as far as it is asked for."""

    def __init__(self, chain: Chain, matrices: Matrices, initial: Tensor) -> None:
        self._chain, self._matrices, self._initial = chain, matrices, initial
        self._step, self._alive = -1, initial  # alive: (g, m or 1, c)
        self._holes = False

    def at(self, step: int) -> Tensor:
        chain = self._chain
        if self._step < 0:
            self._holes = chain.x.amin().item() == -math.inf
            own = chain.bulk.dim() - 3
            shared = self._initial.shape[own:-1]
            if self._holes or math.prod(shared) > 1:  # otherwise one row serves all sequences that share their matrices
                shared = chain.lead[own:]
            self._alive = (self._initial > 0).expand(*chain.lead[:own], *shared, chain.c).reshape(chain.g, -1, chain.c)
            self._advance_to(0)
        while self._step < step:
            linked = self._matrices.raw(self._step + 1) > (-math.inf if chain.log_params else 0)
            self._alive = torch.matmul(self._alive.to(chain.dtype), linked.to(chain.dtype)) > 0
            self._advance_to(self._step + 1)
        return self._alive

    def _advance_to(self, step: int) -> None:
        self._step = step
        if self._holes:
            chain = self._chain
            self._alive = self._alive & (chain.x[step] > -math.inf).reshape(chain.g, chain.m, chain.c)
