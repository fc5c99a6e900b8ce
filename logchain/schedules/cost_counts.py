"""What a schedule does and holds, counted in integers: work, steps that wait, calls, and peak memory."""

from typing import NamedTuple

import torch

from ..kernels.chain import AGAIN, FEW
from .cost import Work
from .tree_leaves import Cut

# calls of torch, or kernels of a GPU, for a step and around the steps: forward, and with the backward pass
_CALLS = {"torch": ((6, 95), (17, 210)), "c": ((0, 30), (0, 60)), "triton": ((0, 12), (0, 25))}

# entries of x whose exponentials are taken at a time
_BLOCK = 2**18


class Schedule(NamedTuple):
    """A name of `STRATEGIES`, and how many segments are computed side by side."""

    name: str
    segments: int


SEQUENTIAL, TREE = Schedule("sequential", 1), Schedule("tree", 1)


class Size(NamedTuple):
    """What decides the work of `g` times `m` chains of v variables and c states, of which m share a set of matrices.

    `one_matrix` for every step; `item` bytes to a number of the arithmetic.
    """

    v: int
    g: int
    m: int
    c: int
    one_matrix: bool
    item: int
    log_params: bool
    lengths: bool
    gradients: bool

    @property
    def sequences(self) -> int:
        """How many in all."""
        return self.g * self.m

    @property
    def states(self) -> int:
        """Entries of x, and of the messages."""
        return self.sequences * self.v * self.c

    @property
    def message_bytes(self) -> int:
        """Of one message tensor with its scales."""
        return self.sequences * self.v * (self.c + 1) * self.item


def work(size: Size, schedule: Schedule, backend: str) -> Work:
    """What it does, with the backward pass where gradients are wanted."""
    if size.states == 0:
        return Work(0, 0, 0, 0, 0)
    if schedule.name == "chunked":
        return _chunked(size, schedule.segments, backend)
    return _tree(size, backend) if schedule.name == "tree" else _sequential(size, backend)


def length_of(size: Size, schedule: Schedule) -> int:
    """Transitions in a segment; those that are left over are walked before."""
    return (size.v - 1) // schedule.segments


def _sequential(size: Size, backend: str) -> Work:
    v, c, passes = size.v, size.c, 3 if size.gradients else 1
    matrices = size.g * (v - 1) * c**2
    # logarithms are taken to linear matrices, one matrix for all steps only once
    logs = size.g * (1 if size.one_matrix else v - 1) * c**2 if size.log_params else 0
    walks = 2 if size.gradients else 1
    steps, around = _CALLS[backend][size.gradients]
    return Work(
        multiply_adds=passes * size.sequences * (v - 1) * c**2,
        exponentials=walks * (size.states + logs),
        bytes=size.item * ((10 if size.gradients else 4) * size.states + passes * matrices),
        steps=walks * v,
        launches=around + steps * v * (8 if size.lengths else 5) // 5,
    )


def _chunked(size: Size, segments: int, backend: str) -> Work:
    v, c, s = size.v, size.c, size.sequences
    steps = length_of(size, Schedule("chunked", segments))
    rest = v - 1 - segments * steps
    alone = backend == "triton" and not size.gradients
    if alone:  # no head, but one more segment, of what is left over
        steps, rest = steps + (rest > 0), 0
    rows = s * segments * steps * c**2  # each segment's product has c rows, which every step writes and reads again
    logs = size.g * (1 if size.one_matrix else v - 1) * c**2 if size.log_params else 0
    head = _sequential(size._replace(v=rest + 1), backend)
    waits, again, calls = segments, 0, 420 + 11 * steps + 6 * segments
    if backend == "triton":
        calls = 12 * (1 if alone and 1 in (size.g, size.m) else size.g)
        while alone and waits > FEW:  # products are multiplied again
            waits, again, calls = -(-waits // AGAIN), again + AGAIN, calls + 8
    products = Work(
        multiply_adds=rows * c + s * segments * c**2,
        exponentials=size.states + logs,
        bytes=size.item * (2 * size.states + 2 * rows + size.g * (v - 1) * c**2),
        steps=steps + again + waits,
        launches=calls,
    )
    products += head
    if not size.gradients:
        return products
    # then the segments are chains of their own, side by side, after a vector has gone through all of them backwards
    beside = size._replace(v=steps + 1, m=size.m * segments)
    back = Work(s * segments * c**2, 0, 0, segments, 24 * size.g if backend == "triton" else 200 + 4 * segments)
    return products + _sequential(beside, backend) + back


def _tree(size: Size, backend: str) -> Work:
    v, c, s = size.v, size.c, size.sequences
    cut = _cut(size)
    pieces = len(cut.pieces(v))
    blocks = pieces * sum(len(members) for _, members in cut.blocks(size.g, size.m))
    levels = max(1, cut.steps).bit_length()
    stack = s * (v - 1) * c**2
    passes = 4 if size.gradients else 1  # nodes are found again, and each product has two gradients
    logs = size.g * (1 if size.one_matrix else v - 1) * c**2
    walks = 2 if size.gradients else 1
    return Work(
        multiply_adds=passes * stack * c,
        exponentials=walks * (stack + logs),
        # potentials, their shifts and the sums of these, partly in float64, count where there are few states
        bytes=size.item * 6 * stack * passes + 24 * walks * s * v * (c + 4),
        steps=walks * pieces * levels,
        launches=walks * (150 + blocks * (100 + (6 if backend == "triton" else 95) * levels)),
    )


def _cut(size: Size) -> Cut:
    dtype = torch.float64 if size.item == 8 else torch.float32
    return Cut.of(size.v, size.g, size.m, size.c, dtype)


def peaks(size: Size, schedule: Schedule, backend: str) -> tuple[int, int]:
    """Bytes beyond operands, result and gradients: at most during the forward pass, and during the backward pass."""
    s, v, c, item = size.sequences, size.v, size.c, size.item
    if size.states == 0:
        return 0, 0
    kept = size.message_bytes if size.gradients else 2 * s * c * item
    if schedule.name == "tree":
        cut = _cut(size)
        leaves = min(size.g, cut.sets) * min(size.m, cut.members) * cut.steps * c**2 * item
        return 6 * leaves, 19 * leaves // 2
    if schedule.name == "sequential" and backend != "torch":
        return kept + s * v * item, kept + s * v * item
    # exponentials of a block of steps in two buffers; shifts and scales, and their logarithms in float64
    around = 2 * item * min(size.states, max(_BLOCK, s * c)) + s * v * (2 * item + 18)
    if schedule.name == "sequential":
        return kept + around, kept + around
    k = schedule.segments
    products = 4 * s * k * c * (c + 1) * item
    # expected transitions into the segments in float64, and those of sets that are not in the caller's order
    counts = 32 * size.g * (1 if size.one_matrix else k) * c**2
    if size.g > 1 and not size.one_matrix:
        counts += size.g * (v - 1) * c**2 * item
    return kept + around + products, kept + counts + (around if backend == "torch" else 0)
