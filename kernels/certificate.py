"""What linear space could not represent: sequences in which something finite underflowed and might have mattered.

Entries of a message S_i may underflow freely: one that mattered feeds an entry of U_{i+1} = S_i P_{i+1} that is small
though some path reaches it, and that is where `Certificate` looks, step by step. Matrices without zeros, and without
entries much too small, need no look at the steps: there the scales of the messages tell, at the end (`least_scale`).
"""

import math

import torch
from torch import Tensor

from .chain import Chain, Matrices
from .numbers import trusted_sum

# by step, a path may run so far (17 nats) below the largest emission: its rounding stays within the contract
_SHALLOW = 2.0**-24


def period_of(chain: Chain, matrices: Matrices) -> int:
    """After how many steps a message is scaled, where no matrix holds a zero or an entry much too small; else 0.

    Then the scales themselves are the certificate, see `least_scale`. The period is one at which a scale of c^-k, or a
    little less, vouches for its steps: random matrices have such scales.
    """
    threshold, period = trusted_sum(chain.dtype, chain.c) * max(1.0, matrices.high) * 2.0**8, 0
    while period < 4 and matrices.low * float(chain.c) ** (-2 * (period + 1)) >= threshold:
        period += 1
    return period


def least_scale(chain: Chain, matrices: Matrices, period: int) -> float:
    """From where on the scale of `period` steps vouches for them, and for the step after them."""
    trusted = trusted_sum(chain.dtype, chain.c) * max(1.0, matrices.high)
    least = trusted * max(1.0, chain.c * matrices.high) ** period / matrices.low
    return max(least, _SHALLOW ** ((period + 1) / 2)) if matrices.low < _SHALLOW else least


class Certificate:
    """Finds the sequences in which something finite underflowed and might have mattered."""

    def __init__(self, chain: Chain, matrices: Matrices) -> None:
        self._chain = chain
        self._end_threshold = trusted_sum(chain.dtype, chain.c)
        self._shallow = _SHALLOW if chain.dtype == torch.float64 else 0.0
        self._reach = Reach(chain, matrices)
        self._threshold = chain.new(1).fill_(self._end_threshold * max(1.0, matrices.high))
        self._floor, self._least = chain.new(chain.g, chain.m, 1), chain.new(2)
        self._small = torch.empty(chain.g, chain.m, chain.c, dtype=torch.bool, device=chain.x.device)
        self._found, self._any = self._small.new_empty(chain.g, chain.m), self._small.new_empty(())
        self.lossy = torch.zeros_like(self._found)
        self.nothing_left = False

    def look(self, step: int, sums: Tensor, z: Tensor) -> None:
        """`sums` U_i (g, m, c), `z` (g, m, 1) the scale of the message they were made from."""
        torch.amin(sums, (0, 1, 2), out=self._least[0])
        torch.amin(z, (0, 1, 2), out=self._least[1])
        least, scale = self._least.tolist()
        if least * scale >= self._threshold.item():
            return
        torch.lt(sums, torch.div(self._threshold, z, out=self._floor), out=self._small)
        if self._chain.ended is not None:
            self._small.masked_fill_(self._chain.ended[step], False)
        self._flag(step)

    def look_at_scale(self, step: int, z: Tensor) -> None:
        """The last message is summed: it must not have lost what it consists of. Nor may float64's run too deep."""
        chain = self._chain
        if not self._shallow and chain.last is None and step < chain.v - 1:
            return
        torch.lt(z, max(self._shallow, self._end_threshold), out=self._small[..., :1])
        if chain.ended is not None and chain.last is not None:
            if self._shallow:
                self._small[..., :1].masked_fill_(chain.ended[step], False)
            else:
                self._small[..., :1].logical_and_(chain.last[step])
        self._small[..., 1:] = self._small[..., :1]
        self._flag(step)

    def _flag(self, step: int) -> None:
        """Of the small entries, those that some path reaches."""
        if torch.amax(self._small, (0, 1, 2), out=self._any).item():
            self._small.logical_and_(self._reach.at(step))
            self.lossy.logical_or_(torch.amax(self._small, -1, out=self._found))
            self.nothing_left = bool(torch.amin(self.lossy, (0, 1), out=self._any).item())


class Reach:
    """Which states a path of finite weight can be in, step by step, computed only as far as it is asked for."""

    def __init__(self, chain: Chain, matrices: Matrices) -> None:
        self._chain, self._matrices = chain, matrices
        self._step, self._alive = -1, torch.empty(0)  # alive: (g, m or 1, c), of ones and zeros

    def at(self, step: int) -> Tensor:
        """Ones and zeros (g, m or 1, c), to be read before another step is asked for."""
        if self._step < 0:
            self._begin()
        while self._step < step:
            torch.gt(self._matrices.raw(self._step + 1), self._chain.zero, out=self._linked)
            torch.bmm(self._alive, self._linked, out=self._next)
            torch.gt(self._next, 0.0, out=self._alive)
            self._advance_to(self._step + 1)
        return self._alive

    def _begin(self) -> None:
        chain, own = self._chain, self._chain.bulk.dim() - 3
        self._holes = not chain.x.amin().item() > -math.inf
        shared = chain.p0.shape[own:-1]
        if self._holes or math.prod(shared) > 1:  # otherwise one row serves all sequences that share their matrices
            shared = chain.lead[own:]
        alive = (chain.p0 > chain.zero).expand(*chain.lead[:own], *shared, chain.c)
        self._alive = alive.reshape(chain.g, -1, chain.c).to(chain.dtype)
        self._next, self._linked = torch.empty_like(self._alive), chain.new(chain.g, chain.c, chain.c)
        self._possible = chain.new(*chain.lead, chain.c) if self._holes else None
        self._advance_to(0)

    def _advance_to(self, step: int) -> None:
        self._step = step
        if self._possible is not None:
            torch.gt(self._chain.x[step], -math.inf, out=self._possible)
            self._alive.mul_(self._possible.view(self._alive.shape))
