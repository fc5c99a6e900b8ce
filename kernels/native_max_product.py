"""`kernels.plain.viterbi` compiled by numba: one loop over steps, sequences, states before and states after.

    t(j) = max_k(a(k) + log P(k, j)),  a(j) = t(j) + (x(j) - max x),  less its largest entry

Shapes: messages (v, g, m, c), matrices (s, g, c, c) with `[from, to]`. Numerics: float32 or float64 additions and
maxima as in `kernels.plain.viterbi`, with which it agrees exactly; logarithms are torch's, of a block of steps
at a time for all sequences that share them. Two vectors of t at a time stay in registers while k runs. Sequences are
divided among `torch.get_num_threads()` threads.
Cost: v c^2 additions and maxima a sequence; back, v c more. Tested against `kernels.plain.viterbi`.
"""

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .native import compiled, cut, spread
from .native_vectors import LANES, entry, everywhere, larger, largest, load, store
from .plain.semiring import log_weights, start

# logarithms and emissions of a block of steps: what a second-level cache holds
_BLOCK = 2**18

# additions in a block, from which on another thread is worth its start
_SHARE = 2**22


def paths(chain: Chain, steps: int) -> Tensor:
    """The states (g, m, steps) int64 of the best paths: see `kernels.plain.viterbi`."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    messages = chain.new(v, g, m, c)
    messages[0] = start(chain)[0]
    ends = torch.full((g, m), v, device="cpu") if chain.ends is None else chain.ends[..., 0].contiguous()
    states = torch.full((g, m, steps), -1, device="cpu")
    nan = messages[0].isnan().any(-1)
    shared = ends.numpy(), messages.numpy(), states.numpy(), nan.numpy()
    forward, back = _compiled(chain.dtype)
    matrices = _Logarithms(chain)
    parts = max(1, min(torch.get_num_threads(), g * m, min(v, matrices.steps) * g * m * c * c // _SHARE))
    ranges = cut(g * m, parts)
    for first in range(1, v, matrices.steps):
        stop = min(first + matrices.steps, v)
        x = chain.x[first:stop].to(chain.dtype).resolve_neg().reshape(-1, g, m, c)
        x = x if x.stride(-1) == 1 else x.contiguous()
        logs = matrices(first, stop)
        bad = logs.flatten(-2).amax(-1).isnan()  # (k, g)
        spread(forward, ranges, first, stop, x.numpy(), bad.numpy(), logs.numpy(), *shared)
    last = messages.gather(0, (ends - 1).view(1, g, m, 1).expand(1, g, m, c))[0]  # (g, m, c)
    state = last.argmax(-1).masked_fill_(nan | (last == -torch.inf).all(-1), -1)
    states.scatter_(-1, ends[..., None] - 1, state[..., None])
    for first in reversed(range(1, v, matrices.steps)):
        stop = min(first + matrices.steps, v)
        spread(back, ranges, first, stop, matrices(first, stop).numpy(), *shared)
    return states


class _Logarithms:
    """The logarithms of the matrices that lead into a block of steps; the block asked for last is held."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._held, self._logs = (0, 0), chain.new(0)
        sequences, matrices = chain.g * chain.m * chain.c, chain.g * chain.c * chain.c
        self.one = chain.bulk.shape[0] == 1
        self.steps = max(1, _BLOCK // (sequences if self.one else max(sequences, matrices)))

    def __call__(self, first: int, stop: int) -> Tensor:
        """(k, g, c, c); k = 1 where all steps have one matrix."""
        chain = self._chain
        if self.one:
            first, stop = 1, 2
        if self._held != (first, stop):
            self._held = first, stop
            bulk = chain.bulk[first - 1 : stop - 1].reshape(-1, chain.g, chain.c, chain.c)
            self._logs = log_weights(bulk, chain.log_params, chain.dtype).contiguous()
        return self._logs


def _forward(low, high, first, stop, x, bad, logs, ends, messages, states, nan):
    """The messages of the steps from `first` to before `stop` of the sequences from `low` to before `high`."""
    m, c = messages.shape[2:]
    best = np.empty(c + 2 * LANES, messages.dtype)
    for step in range(first, stop):
        index = (step - first) % logs.shape[0]
        for q in range(low, high):
            g, r = q // m, q % m
            if step >= ends[g, r]:
                continue
            message, matrix, potential = messages[step - 1, g, r], logs[index, g], x[step - first, g, r]
            shift, missing = everywhere(messages, -np.inf), bad[index, g]
            for j in range(0, c, 2 * LANES):
                best0 = best1 = everywhere(messages, -np.inf)
                n, rest = c - j, c - j - LANES
                for k in range(c):
                    at, a = k * c + j, entry(message, k)
                    best0 = larger(best0, load(matrix, at, n, -np.inf) + a)
                    if rest > 0:
                        best1 = larger(best1, load(matrix, at + LANES, rest, -np.inf) + a)
                store(best, j, LANES, best0)
                store(best, j + LANES, LANES, best1)
            for j in range(0, c, LANES):
                shift = larger(shift, load(potential, j, c - j, -np.inf))
            for j in range(c):
                missing |= entry(potential, j) != entry(potential, j)
            away, top = largest(shift), everywhere(messages, -np.inf)
            if away == -np.inf:
                away = messages.dtype.type(0)
            for j in range(0, c, LANES):
                found = load(best, j, LANES, 0.0) + (load(potential, j, c - j, -np.inf) - away)
                store(best, j, LANES, found)
                top = larger(top, found)
            away = largest(top)
            if away == -np.inf:
                away = messages.dtype.type(0)
            for j in range(0, c, LANES):
                store(messages[step, g, r], j, c - j, load(best, j, LANES, 0.0) - away)
            nan[g, r] |= missing


def _back(low, high, first, stop, logs, ends, messages, states, nan):
    """The states before the same steps, given that of each sequence's last step."""
    m, c = messages.shape[2:]
    for step in range(stop - 1, first - 1, -1):
        index = (step - first) % logs.shape[0]
        for q in range(low, high):
            g, r = q // m, q % m
            j = states[g, r, step]
            if j < 0:
                continue
            message, matrix = messages[step - 1, g, r], logs[index, g]
            state, best = 0, message[0] + matrix[0, j]
            for k in range(1, c):
                t = message[k] + matrix[k, j]
                if t > best:
                    state, best = k, t
            states[g, r, step - 1] = state


@cache
def _compiled(dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Both loops for float32 or float64, from numba's cache on disk where there is one."""
    real = numba.float64 if dtype == torch.float64 else numba.float32
    shared = (
        real[:, :, :, ::1],
        numba.int64[:, ::1],
        real[:, :, :, ::1],
        numba.int64[:, :, ::1],
        numba.boolean[:, ::1],
    )
    numbers = (numba.int64,) * 4
    forward = numba.void(*numbers, real[:, :, :, :], numba.boolean[:, ::1], *shared)
    back = numba.void(*numbers, *shared)
    return compiled(_forward, forward), compiled(_back, back)
