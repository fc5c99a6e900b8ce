"""Launches of scans: of many sequences in one direction, of few in both at once, of many states step by step.

Few sequences are scanned from both ends, half as many dependent steps each, and meet at the middle step. The gradient
then scans on from there, each past the messages of the other. Many sequences fill the device in one direction.

With more than 256 states a step is one stock matrix product and one launch. Nothing is read on the host, and no address
depends on what is computed, so all of it can be captured in a CUDA graph.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chain import Chain
from .scaled import num_processors, precision
from .scan import BACKWARD, BOTH, FORWARD, clear_kernel, prepare_kernel, scan_kernel

# the most states that one program scans alone; with more, tiles of shared float64 matrices spill registers
_WIDE, _WIDE_DOUBLE = 256, 128

# the least steps that are worth a second direction
_SHORT = 8


# the first step of a scan, and the number of its steps
Steps = tuple[int, int]


class Chains(NamedTuple):
    """Operands in the layout of `scan`. `start` (g, m, c): initial weights, or their logarithms if `start_log`.

    `entered`: 1 if `start` is the message of a step before those of x, and 0 if it belongs to x_0. `dtype` is that of
    the arithmetic; `bulk` has at least one matrix.
    """

    x: Tensor
    bulk: Tensor
    start: Tensor
    ends: Tensor | None
    entered: int
    log_params: bool
    start_log: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, chain: Chain, entering: Tensor | None = None) -> "Chains":
        """The chains that begin with p0, or with a message of a step before, whose logarithms are `entering`."""
        v, g, m, c = chain.v, chain.g, chain.m, chain.c
        bulk, entered, ends = chain.bulk.reshape(len(chain.bulk), g, c, c), int(entering is not None), chain.ends
        if not len(bulk):
            bulk = bulk.new_zeros(1, 1, c, c).expand(1, g, c, c)
        if ends is not None:
            ends = (ends.reshape(g, m) + entered).clamp(1, v + entered).contiguous()
        start = chain.p0.expand(*chain.lead, c).reshape(g, m, c) if entering is None else entering.expand(g, m, c)
        x, bulk, start = (tensor.resolve_neg() for tensor in (chain.x.reshape(v, g, m, c), bulk, start))
        log = chain.log_params
        return cls(x, bulk, start, ends, entered, log, log or entering is not None, chain.dtype)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized tensor, by default in the dtype of the arithmetic."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(v, g, m, c), with a step that entered among the v steps."""
        v, g, m, c = self.x.shape
        return v + self.entered, g, m, c

    @property
    def by_program(self) -> bool:
        """Whether one program scans all steps of a sequence; otherwise each step has a launch."""
        return _by_program(self.x.shape[2], self.x.shape[3], self.dtype)

    @property
    def separate(self) -> bool:
        """Whether programs read matrices of one sequence each, as they are."""
        return self.x.shape[2] == 1 and self.by_program

    @property
    def matrix_strides(self) -> tuple[int, int]:
        """From matrix to matrix, and from set to set."""
        return 0 if len(self.bulk) == 1 else self.bulk.stride(0), self.bulk.stride(1)

    @property
    def width(self) -> int:
        """c rounded up to a power of two."""
        return triton.next_power_of_2(self.x.shape[-1])


def _by_program(m: int, c: int, dtype: torch.dtype) -> bool:
    return c <= (_WIDE_DOUBLE if dtype == torch.float64 and m > 1 else _WIDE)


def meets(v: int, g: int, m: int, c: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether scans from both ends fit on the device at once, and are long enough to be worth another launch."""
    programs = g * (1 if m == 1 else triton.cdiv(m, 16))
    return _by_program(m, c, dtype) and v >= _SHORT and 2 * programs <= num_processors(device)


def _tiles(c: int, m: int, dtype: torch.dtype) -> dict[str, int]:
    """The sequences of a program, the states of its tile, those of a block of the matrix, warps and stages."""
    n = max(16, triton.next_power_of_2(c))
    double, small_memory = dtype == torch.float64, torch.version.hip is not None  # 64 KiB
    if m == 1:
        block = n if n <= 64 else (2048 if double else 4096) // n
    else:
        block = n if n <= (32 if double else 64) else 16 if double or small_memory else 32
    stages = 3 if m > 1 and block < n else 1
    warps = 4 if n <= (32 if double else 64) else 8
    return {"M": 1 if m == 1 else 16, "N": n, "K": block, "num_warps": warps, "num_stages": stages}


class Scan:
    """The scans of a batch of chains.

    Attributes:
        flags: (g, m) int8, sequences that `exact` has to recompute.
        bound: (s, g) int32, 4 k + lowness of matrices, 2^k near the largest entry.
    """

    def __init__(self, chains: Chains, flags: Tensor | None = None, bound: Tensor | None = None) -> None:
        """`flags` and `bound` are those of an earlier scan of the same chains."""
        self.chains, (_, g, m, c), count = chains, chains.shape, len(chains.bulk)
        copied = not chains.separate and (
            chains.log_params or (not chains.by_program and chains.bulk.dtype != chains.dtype)
        )
        ready = chains.separate or (bound is not None and not copied)
        # linear matrices, or exponentials divided by 2^k
        self._values = chains.new(count, g, c, c) if copied else chains.bulk
        self._start, self._taken = None, None
        if flags is None:
            self._start, self._taken = chains.new(g, m, c), chains.new(2, g, m, dtype=torch.int64)
        self.flags = chains.new(g, m, dtype=torch.int8) if flags is None else flags
        self.bound = chains.new(count, g, dtype=torch.int32) if bound is None else bound
        if self._start is not None or not ready:
            self._prepare(0 if ready else count * g, chains.start, self._start, start_log=chains.start_log)

    def _prepare(self, matrices: int, start: Tensor, message: Tensor | None, *, start_log: bool) -> None:
        """Write bounds and copies of matrices, and first messages (g, m, c) if there is memory for them."""
        chains, (_, g, m, c), n = self.chains, self.chains.shape, self.chains.width
        copy = None if self._values is chains.bulk else self._values
        prepare_kernel[(matrices + (0 if message is None else g * m),)](
            chains.bulk, self.bound if matrices else None, copy, start, message, self._taken, self.flags, matrices, g,
            m, chains.matrix_strides, start.stride(), *chains.bulk.stride()[2:], C=c, BLOCK=max(1, 8192 // n), N=n,
            LOG=chains.log_params, START_LOG=start_log,
            DTYPE=tl.float64 if chains.dtype == torch.float64 else tl.float32,
            num_warps=8 if matrices else 1 if n <= 256 else 4,
        )  # fmt: skip

    def forward(self, messages: Tensor, log_norm: Tensor, *, halved: bool) -> None:
        """Write log-partitions (2, g, m) with their errors, and forward messages (v, g, m, c), or in 2 slots the last.

        `halved`: after the middle step v // 2 these are backward messages.
        """
        v = self.chains.shape[0]
        middle = v // 2
        if not halved:
            self._launch(messages, (0, v), log_norm=log_norm)
            return
        w = messages if len(messages) == v else torch.empty_like(messages)
        self._launch(messages, (0, middle + 1), (v - 1, v - 1 - middle), w=w, log_norm=log_norm)
        if w is messages:  # which are kept
            w = torch.empty_like(messages[:2])
            w[(middle + 1) % 2] = messages[middle + 1]
        # of which the slot middle % 2 is that of the middle step
        other = messages[(middle - middle % 2) % len(messages) :]
        self._launch(w, backward=(middle, 1), other=other, log_norm=log_norm)

    def backward(
        self, messages: Tensor, weight: Tensor, final: Tensor | None, posterior: Tensor, *, halved: bool
    ) -> Tensor:
        """Write posteriors (v, g, m, c) times weights (g, m), and return the other messages (v + 2, g, m, c).

        Backward messages in the slots of their steps, each divided by nu, up to the last step, or the middle one if the
        chain is `halved`; then, two slots later, forward messages, likewise divided. Those of flagged sequences are 0.
        """
        (v, g, m, c), chains = self.chains.shape, self.chains
        others, middle, forward, backward = chains.new(v + 2, g, m, c), v // 2, None, (v - 1, v)
        if halved:
            others[middle + 1], others[middle + 2] = messages[middle + 1], messages[middle]
            forward, backward = (middle + 1, v - 1 - middle), (middle, middle + 1)
        elif final is not None:
            logs, final = final, chains.new(g, m, c)
            self._prepare(0, logs, final, start_log=True)
        self._launch(others, forward, backward, other=messages, weight=weight, posterior=posterior, final=final)
        clear_kernel[(g * m,)](self.flags, others, v + 2, C=c, N=chains.width, num_warps=1)
        return others

    def _launch(
        self, messages: Tensor, forward: Steps | None = None, backward: Steps | None = None, *,
        w: Tensor | None = None, other: Tensor | None = None, weight: Tensor | None = None,
        posterior: Tensor | None = None, final: Tensor | None = None, log_norm: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Scan in one direction or in both, each from a first step and so many; with many states, step by step.

        `w`: where backward messages are written, if not to `messages`; `other`: messages of the other direction.
        """
        chains, (v, g, m, c), values = self.chains, self.chains.shape, self._values
        shape, directions = _tiles(c, m, chains.dtype), FORWARD if backward is None else BOTH if forward else BACKWARD
        (first, steps), (first_back, steps_back) = forward or (0, 0), backward or (0, 0)
        parts: Any = [(None, 0, max(steps, steps_back))]
        if not chains.by_program:
            shape = {"M": 1, "N": chains.width, "K": 1, "num_warps": 8, "num_stages": 1}
            parts = self._steps(messages, forward, backward)
        for product, done, count in parts:
            scan_kernel[(g * triton.cdiv(m, shape["M"]), 2 if directions is BOTH else 1)](
                chains.x, values, self.bound, product, self._start, final, chains.ends, messages,
                messages if w is None else w, other, weight, posterior, self._taken,
                log_norm if done + count >= max(steps, steps_back) else None, self.flags, first + done,
                min(count, steps), first_back - done, min(count, steps_back), v, g, m, len(messages), len(values),
                chains.x.stride(), (0 if len(values) == 1 else values.stride(0), values.stride(1)),
                None if posterior is None else posterior.stride(), ENTERED=chains.entered, DIRECTIONS=directions,
                SHIFT=0 if weight is None else 2, STRIDE_K=values.stride(2), STRIDE_J=values.stride(3), C=c,
                LOG=chains.log_params and chains.separate, DIVIDED=chains.log_params and values is not chains.bulk,
                PRECISION=precision(chains.dtype, chains.x.device), **shape,
            )  # fmt: skip

    def _steps(
        self, messages: Tensor, forward: Steps | None, backward: Steps | None
    ) -> Iterator[tuple[Tensor, int, int]]:
        """The steps of a scan of many states, each with its product u, which one stock matrix product has written."""
        values, u = self._values, torch.empty_like(messages[0])
        first, steps = forward or backward or (0, 0)
        for t in range(steps):
            if t and forward:
                i = first + t - 1
                torch.matmul(messages[i % len(messages)], values[i % len(values)], out=u)
            elif t:
                i = first - t
                torch.matmul(messages[i + 1], values[i % len(values)].mT, out=u)
            yield u, t, 1
