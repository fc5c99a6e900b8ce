"""The work and the peak memory of each schedule, counted in integers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .cost import Work

# steps for each byte of a number that segments of an overlapped chain are begun early, as far as a plan knows; the part
# of a segment that a chain may take to forget
_EARLY, WARM_PART = 6, 3

# bytes of a matrix that stays in a core's own cache
_CACHE = 2**19

# walks of an overlapped chain, forward alone and with its backward pass, and of an attempt in vain
_WALKS, _PROBES = (5, 8), 6

# float64 numbers for each state of a segment's first message while messages are compared; 5 to 15 were measured
_COMPARED = 16

# what two halves take as much time as: launches, and numbers read for each entry of the matrix between them, which is
# taken in float64, forward alone and with their backward pass
_HALVES, _BETWEEN = (355, 245), (100, 300)

# launches of a walk along a chain, forward alone and with its backward pass; launches of a level of a tree
_LAUNCHES, _LEVEL = (12, 25), 6

# bytes that the leaves of a tree, with all that is computed from them, may take where two messages are smaller
_LEAVES = 2**21


class Schedule(NamedTuple):
    """The name of a schedule, one of `STRATEGIES`, and the number of segments that are computed side by side.

    `warm_up`: the steps that these begin early, 0 if they are to be found out.
    """

    name: str
    segments: int
    warm_up: int = 0


NOTHING = Work(0, 0, 0, 0, 0)
SEQUENTIAL, TREE, MEETING = Schedule("sequential", 1), Schedule("tree", 1), Schedule("meeting", 2)


class Size(NamedTuple):
    """The sizes that decide the work: g sets of matrices, each shared by m sequences of v variables and c states.

    `one_matrix`: whether one serves every step; `item`: bytes of a number of the arithmetic; `gpu`: whether the Triton
    kernels compute.
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
    gpu: bool = False

    @classmethod
    def of(
        cls,
        x: Sequence[int],
        bulk: Sequence[int],
        double: bool,
        log_params: bool,
        lengths: bool,
        gradients: bool,
        gpu: bool = False,
    ) -> "Size":
        """The sizes of operands with these shapes; `double`: in float64."""
        *batch, v, c = x
        g = math.prod(bulk[:-3])
        m = math.prod(batch) // g if g else 0
        return cls(v, g, m, c, bulk[-3] == 1, 8 if double else 4, log_params, lengths, gradients, gpu)

    @property
    def sequences(self) -> int:
        """Number of chains."""
        return self.g * self.m

    @property
    def states(self) -> int:
        """Entries of x, and of the messages."""
        return self.sequences * self.v * self.c

    @property
    def message_bytes(self) -> int:
        """Bytes of one message tensor with its scales."""
        return self.sequences * self.v * (self.c + 1) * self.item


def work(size: Size, schedule: Schedule) -> Work:
    """The work of a product, with its backward pass if there are gradients."""
    if size.states == 0:
        return NOTHING
    if schedule.name == "tree":
        return _tree(size)
    if schedule.name == "overlapped":
        return _overlapped(size, schedule.segments)
    if schedule.name == "meeting":
        return _meeting(size)
    return _chunked(size, schedule.segments) if schedule.name == "chunked" else _sequential(size)


def length_of(size: Size, schedule: Schedule) -> int:
    """The transitions of a segment; what is left over is the head of the chain."""
    return (size.v - 1) // schedule.segments


def _sequential(size: Size) -> Work:
    v, c, gradients = size.v, size.c, size.gradients
    # one matrix for every step is read once where it stays in a cache
    kept = size.one_matrix and not size.gpu and size.item * c**2 <= _CACHE
    matrices = size.g * (1 if kept else v - 1) * c**2
    # exponentials of logarithmic matrices, taken once where one matrix serves all steps
    linear = size.g * (1 if size.one_matrix else v - 1) * c**2 * size.log_params
    return Work(
        multiply_adds=(3 if gradients else 1) * size.sequences * (v - 1) * c**2,
        exponentials=(2 if gradients else 1) * (size.states + linear),
        bytes=size.item * ((10 if gradients else 4) * size.states + (3 if gradients else 1) * matrices),
        steps=(2 if gradients else 1) * v,
        launches=_LAUNCHES[gradients],
    )


def structured(size: Size, multiply_adds: int, parameters: int) -> Work:
    """The work of a chain of structures, of so many multiply-adds a step of one sequence, and so many parameters."""
    passes = 3 if size.gradients else 1
    dense = _sequential(size._replace(log_params=False))
    return dense._replace(
        multiply_adds=passes * size.sequences * (size.v - 1) * multiply_adds,
        exponentials=dense.exponentials + passes * parameters * size.log_params,
        bytes=size.item * ((10 if size.gradients else 4) * size.states + passes * parameters),
    )


def _chunked(size: Size, segments: int) -> Work:
    """The work of the head, the segments' products, and a vector through these; gradients: all segments again."""
    s, c, length = size.sequences, size.c, length_of(size, Schedule("chunked", segments))
    # the product of a segment is walked as c sequences, one for each row
    rows = size._replace(v=length + 1, m=size.m * segments * c, gradients=False)
    through = Work(s * segments * c**2, 0, 0, segments, _LAUNCHES[0])
    head = _sequential(size._replace(v=size.v - segments * length))
    total = head + _sequential(rows)._replace(exponentials=size.states) + through
    if size.gradients:
        total += _sequential(size._replace(v=length + 1, m=size.m * segments)) + through
    return total


def _overlapped(size: Size, segments: int) -> Work:
    """The work of the head, and of segments that begin early in either direction."""
    length = length_of(size, Schedule("overlapped", segments))
    head, rows = _sequential(size._replace(v=size.v - segments * length)), size.m * segments
    early = _EARLY * size.item
    total = head + _sequential(size._replace(v=length + 1 + early, m=rows))
    return total._replace(launches=_WALKS[size.gradients] * _LAUNCHES[0])


def _meeting(size: Size) -> Work:
    """The work of two halves, as of two sets of matrices, and of the step between them."""
    halves = _sequential(size._replace(v=-(-size.v // 2), g=2 * size.g))
    between = _BETWEEN[size.gradients] * size.g * size.c**2 * size.item
    return halves._replace(bytes=halves.bytes + between, launches=_HALVES[size.gradients])


def first_warm_up(v: int, item: int) -> int:
    """The number of steps after which a chain of v variables is first asked whether it has forgotten.

    Messages in numbers of twice as many bytes take twice as long to become the same.
    """
    return min(4 * item, max(item, item * v // 512))


def in_vain(size: Size) -> Work:
    """The work of finding out that a chain does not forget, see `schedules.overlapped`."""
    walks = _sequential(size._replace(v=max(1, size.v // 48), m=8 * size.m, gradients=False))
    return walks._replace(launches=_PROBES * _LAUNCHES[0])


def _tree(size: Size) -> Work:
    v, c, walks = size.v, size.c, 2 if size.gradients else 1
    stack = size.sequences * (v - 1) * c**2
    passes = 4 if size.gradients else 1  # backward, the products again and two gradients of each
    levels = (v - 1).bit_length() * -(-4 * size.item * stack // _leaf_bytes(size))
    return Work(
        multiply_adds=passes * stack * c,
        exponentials=walks * (stack + size.g * (1 if size.one_matrix else v - 1) * c**2),
        bytes=size.item * 6 * stack * passes,
        steps=walks * levels,
        launches=walks * (_LAUNCHES[0] + _LEVEL * levels),
    )


def _leaf_bytes(size: Size) -> int:
    """The bytes that a piece of a tree's leaves may take, with all that is computed from them."""
    return max(_LEAVES, 2 * size.states * size.item)


def peaks(size: Size, schedule: Schedule) -> tuple[int, int]:
    """The peak bytes of the forward pass and of the backward pass, beyond operands, result and gradients."""
    s, v, c, item = size.sequences, size.v, size.c, size.item
    if size.states == 0:
        return 0, 0
    if schedule.name == "tree":
        leaves = min(4 * s * max(1, v - 1) * c**2 * item, _leaf_bytes(size))
        return leaves, 2 * leaves
    messages = (size.message_bytes if size.gradients else 2 * s * c * item) + s * v * item
    if schedule.name == "sequential":
        return messages, messages
    if schedule.name == "overlapped":
        return _overlapped_peaks(size, schedule.segments, messages)
    if schedule.name == "meeting":  # a gradient and counts of the matrices more than one walk has
        return messages, messages + 12 * size.g * c**2
    # unit rows, the products in float64 and a copy of them in order; messages between segments, and what enters these
    products = s * schedule.segments * c * (c + 1) * (item + 2 * 8)
    between = s * schedule.segments * c * (item + 3 * 8)
    counts = 32 * size.g * (1 if size.one_matrix else schedule.segments) * c**2
    return messages + between + products, messages + between + counts


def _overlapped_peaks(size: Size, segments: int, messages: int) -> tuple[int, int]:
    """Peaks with the messages that enter, leave and are compared, in float64."""
    s, c = size.sequences, size.c
    compared = _COMPARED * 8 * s * segments * c
    return messages + compared, messages + compared
