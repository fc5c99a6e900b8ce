"""The schedule of a product: the one that takes the least time by a model of the device.

    sequential   a vector times v - 1 matrices
    chunked      the matrix products of k segments side by side, then a vector times k matrices
    tree         pairs of matrices, level by level
    overlapped   a vector through each of k segments, side by side, begun some steps early
    meeting      two vectors at once, from the first step on and from the last, to the middle

With gradients, a chunked chain then takes vectors through all segments side by side, forward and backward.
"""

import math
import re
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_alone, check_chain, check_choice
from ..kernels.chain import FEW_STATES, WORTH_A_THREAD, has_idle_threads
from ..operands import differentiated
from . import cost_counts
from .cost import BOTH, FORWARD, Constants, Work, constants
from .cost_counts import MEETING, SEQUENTIAL, TREE, Schedule, Size, peaks, work

Strategy = Literal["auto", "sequential", "chunked", "tree", "overlapped", "meeting"]
STRATEGIES = get_args(Strategy)

# a strategy of so many segments, two or more, which begin so many steps early
_NUMBER = "([2-9]|[1-9][0-9]{1,5})"
_NUMBERED = re.compile(f"chunked:{_NUMBER}|overlapped:{_NUMBER}(:[1-9][0-9]{{0,8}})?")

# the choice between the sequential and the overlapped schedule, for what needs messages, and the meeting one besides,
# for posteriors
WALKS, POSTERIORS = "walks", "posteriors"

# bytes that a schedule may take besides two message tensors
_SLACK = 2**23

# the factor by which a schedule must be predicted faster than the sequential one, as predictions are not exact
_SURE = 1.15

# the part of the sequential time that may be spent on finding out that a chain does not forget
_IN_VAIN = 0.28

# the most states for which a GPU multiplies segments
_GPU_STATES = 64

# rows of overlapped segments that each thread takes where they share a matrix, and the least length of a segment
_ROWS, _LENGTH = (8, 16, 32, 48), 24

# segments of best paths that each thread takes, their least length, and the seconds of a product, which are fewer than
# those of the paths, that are worth it
_PATH_ROWS, _PATH_LENGTH, _WORTH_PATHS = 4, 96, 3e-3

# segments of entropies that each thread takes, and that each sequence has at least, where they share a matrix; the part
# of the time of one walk that may be spent in vain
_ENTROPY_ROWS, _ENTROPY_IN_VAIN = 8, 0.2

# numbers of segments that are tried, each a quarter larger than the one before
_SEGMENTS = sorted({round(1.25**power) for power in range(3, 64)})

# the schedules of chains whose sizes are not known while torch.compile traces
_UNKNOWN = {
    "auto": SEQUENTIAL,
    "chunked": Schedule("chunked", 16),
    "tree": TREE,
    "overlapped": Schedule("overlapped", 16),
    "meeting": MEETING,
    WALKS: SEQUENTIAL,
    POSTERIORS: SEQUENTIAL,
}


class Where(NamedTuple):
    """A kind of device, and the number of threads that compute there."""

    device: str
    threads: int

    @property
    def constants(self) -> Constants:
        """The measured constants of the device."""
        return constants(*self)._replace(available=self.threads if self.device == "cpu" else 0)


def where(device: str) -> Where:
    """The place of a kind of device, which this machine need not have."""
    return Where(device, torch.get_num_threads() if device == "cpu" else 1)


def of(
    x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, lengths: bool, strategy: str, gradients: bool | None = None
) -> Schedule:
    """The schedule of `product` for operands; a fixed one while torch.compile traces with sizes that are not known.

    `gradients`: whether a backward pass follows, by default whether an operand requires one.
    """
    if strategy == "sequential":
        return SEQUENTIAL
    if torch.compiler.is_compiling() and not _known(x, bulk):
        name, *numbers = split(strategy)
        schedule = _UNKNOWN["chunked" if name == "overlapped" and kernels.on_gpu(p0) else name]
        return Schedule(schedule.name, *numbers) if numbers else schedule
    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    device = "cuda" if kernels.on_gpu(p0) else p0.device.type
    gradients = differentiated(x, bulk, p0) if gradients is None else gradients
    options = double, log_params, lengths, gradients, device == "cuda"
    return Schedule(*_picked((*x.shape,), (*bulk.shape,), options, device, strategy))


def is_sequential(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> bool:
    """Whether the sequential schedule is the choice for operands, which are checked."""
    check_chain(x, bulk, p0)
    return of(x, bulk, p0, log_params, False, "auto") == SEQUENTIAL


def is_one_walk(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> bool:
    """Whether the posteriors of operands, which are checked, take the sequential schedule."""
    check_chain(x, bulk, p0)
    return of(x, bulk, p0, log_params, False, POSTERIORS, True) == SEQUENTIAL


def is_on_one_thread(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> bool:
    """Whether forward and backward messages of operands, which are checked, are found one after the other."""
    check_chain(x, bulk, p0)
    *batch, v, c = x.shape
    return not has_idle_threads(where(x.device.type).threads, math.prod(batch), v, c)


def _known(x: Tensor, bulk: Tensor) -> bool:
    """Whether all sizes are numbers while torch.compile traces."""
    from torch.fx.experimental import symbolic_shapes  # takes long to import

    known = getattr(symbolic_shapes, "has_static_value", lambda size: False)
    return all(known(size) for size in (*x.shape, *bulk.shape))


def _picked(
    x: tuple[int, ...], bulk: tuple[int, ...], options: tuple[bool, ...], device: str, strategy: str
) -> tuple[str, int, int]:
    name, segments, warm_up = choose(Size.of(x, bulk, *options), where(device), strategy)
    return name, segments, warm_up


# what `torch.compiler.assume_constant_result` does; importing that takes seconds
_picked._dynamo_marked_constant = True  # type: ignore[attr-defined]


def split(strategy: str) -> Schedule | tuple[str]:
    """The schedule that a strategy with numbers asks for, such as "overlapped:4:20", or its name alone."""
    name, *numbers = strategy.split(":")
    return Schedule(name, *map(int, numbers)) if numbers else (name,)


def check_options(strategy: object, memory_budget: object, options: dict[str, bool]) -> None:
    """Raise for arguments of a wrong kind, and for a strategy beside an option that needs sequential."""
    if not isinstance(strategy, str) or not _NUMBERED.fullmatch(strategy):
        check_choice("strategy", strategy, STRATEGIES)
    if memory_budget is not None and (not isinstance(memory_budget, int) or isinstance(memory_budget, bool)):
        raise TypeError(f"memory_budget: expected a number of bytes or None, got {memory_budget!r}")
    if strategy not in ("auto", "sequential"):
        options = {**options, "memory_budget": memory_budget is not None}
        check_alone("strategy", strategy, "'auto' or 'sequential'", options)


@lru_cache(maxsize=2**12)
def choose(size: Size, place: Where, strategy: str) -> Schedule:
    """The schedule that takes the least time, among all or, by name, among those of one kind."""
    if strategy == "tree":
        return TREE
    if strategy == "sequential" or size.states == 0 or size.v == 1:
        return SEQUENTIAL
    if strategy == "meeting":
        return MEETING if place.device == "cpu" and not size.lengths else SEQUENTIAL
    name, *numbers = split(strategy)
    if numbers:
        return Schedule(name, *numbers) if place.device == "cpu" else Schedule("chunked", numbers[0])
    costs = place.constants

    def quickest(schedules: list[Schedule]) -> Schedule:
        return min(schedules, key=lambda schedule: seconds(size, schedule, costs), default=SEQUENTIAL)

    if strategy == "overlapped" and place.device == "cpu":
        return quickest(overlapped(size, place))
    walks = strategy in (WALKS, POSTERIORS)
    cuts = candidates(size, place) if not walks else []
    within = [schedule for schedule in cuts if within_contract(size, schedule)]
    if strategy in ("chunked", "overlapped"):  # a GPU takes segments without a warm-up, which it would have to verify
        # if all take more memory than the contract, the one with the fewest segments; a short chain has none
        return quickest(within or cuts[:1])
    others = [*worthwhile(size, place), *(meeting(size, place) if strategy != WALKS else [])]
    best = quickest([*within, *others, *([TREE] if not walks else [])])
    return best if _SURE * seconds(size, best, costs) < seconds(size, SEQUENTIAL, costs) else SEQUENTIAL


def overlapped(size: Size, place: Where) -> list[Schedule]:
    """The overlapped schedules of a chain: so many segments that each thread has enough rows.

    One row for each is enough where rows cannot share the reading of a matrix. There are none where they take too much
    memory.
    """
    rows_each = _ROWS if shares_matrices(size) else (1,)
    segments = {max(2, -(-rows * place.threads // size.sequences)) for rows in rows_each}
    overlaps = [Schedule("overlapped", k) for k in sorted(segments) if shortest(size) * k < size.v]
    return [overlap for overlap in overlaps if within_contract(size, overlap)]


def meeting(size: Size, place: Where) -> list[Schedule]:
    """The schedule of two halves, where there are twice as many threads as sequences, and one matrix for all steps.

    There is none for lengths. Matrices of each step are read by columns from the end, in which nothing is gained.
    """
    idle = place.device == "cpu" and has_idle_threads(place.threads, size.sequences, size.v, size.c)
    fits = idle and size.one_matrix and not size.lengths and size.v > 1
    return [MEETING] if fits and within_contract(size, MEETING) else []


def path_segments(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> int:
    """The number of segments whose best paths are found side by side; 1 for a chain that is walked as one.

    They have nothing in common but their threads: there is more than one where threads have no sequence of their own.
    """
    size = Size.of((*x.shape,), (*bulk.shape,), False, log_params, False, False)
    place = where(x.device.type)
    if not kernels.in_c(x) or size.states == 0 or not has_idle_threads(place.threads, size.sequences, size.v, size.c):
        return 1
    segments = _PATH_ROWS * place.threads // size.sequences
    long = size.v > max(segments * _PATH_LENGTH, 2 * size.c)
    return segments if long and seconds(size, SEQUENTIAL, place.constants) > _WORTH_PATHS else 1


def entropy_segments(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> int:
    """The number of segments in which the entropy of paths is found on a CPU; 1 for a chain that is walked as one.

    A step takes about as long as one of a product with its backward pass in float64.
    """
    if x.numel() * x.shape[-1] < WORTH_A_THREAD:
        return 1
    size, place = Size.of((*x.shape,), (*bulk.shape,), True, log_params, False, True), where(x.device.type)
    rows, least = (_ENTROPY_ROWS, _ENTROPY_ROWS) if size.one_matrix else (1, 2)
    segments = rows * place.threads // size.sequences
    if segments < least or size.v <= segments * shortest(size):
        return 1
    in_time = in_vain(size, place.constants) <= _ENTROPY_IN_VAIN * seconds(size, SEQUENTIAL, place.constants)
    return segments if in_time else 1


def shortest(size: Size) -> int:
    """The fewest steps of a segment that begins early."""
    return max(_LENGTH, cost_counts.WARM_PART * cost_counts.first_warm_up(size.v, size.item))


def candidates(size: Size, place: Where) -> list[Schedule]:
    """The chunked schedules of a chain, whose segments have at least two transitions.

    On a GPU there are none for many states, for sequences with lengths, and where rows of products would need copies of
    x.
    """
    if place.device != "cpu":
        copies = size.m > 1 or size.one_matrix and size.g > 1
        if size.c > _GPU_STATES or size.lengths or copies:
            return []
    return [Schedule("chunked", segments) for segments in _SEGMENTS if 2 * segments < size.v]


def within_contract(size: Size, schedule: Schedule) -> bool:
    """Whether a schedule takes no more memory than two message tensors and a constant."""
    forward, backward = peaks(size, schedule)
    return max(forward, backward if size.gradients else 0) <= 2 * size.message_bytes + _SLACK


def seconds(size: Size, schedule: Schedule, costs: Constants) -> float:
    """The predicted time of a product by a schedule."""
    which, counts = BOTH if size.gradients else FORWARD, counted(size, schedule, costs)
    walks = Work(0, 0, 0, 0, counts.launches)
    alike = constants_for(size, schedule)
    inside = costs.of(alike, which, counts._replace(launches=0))
    return inside + costs.of(alike if schedule == MEETING else schedule.name, which, walks)


def constants_for(size: Size, schedule: Schedule) -> str:
    """The schedule whose constants hold: segments of which each thread has one, and halves, are as many sequences."""
    alone = schedule.name == "overlapped" and not shares_matrices(size)
    return "sequential" if alone or schedule == MEETING else schedule.name


def shares_matrices(size: Size) -> bool:
    """Whether a CPU takes the segments of an overlapped chain as rows of one product."""
    return size.one_matrix and size.c > FEW_STATES


def worthwhile(size: Size, place: Where) -> list[Schedule]:
    """The overlapped schedules, if there is something to gain, and a chain that does not forget is found out in time.

    There are none on a GPU, where none has run.
    """
    costs = place.constants
    idle = shares_matrices(size) or 2 * size.sequences <= place.threads
    if place.device != "cpu" or size.states == 0 or not idle:
        return []
    in_time = in_vain(size, costs) <= _IN_VAIN * seconds(size, SEQUENTIAL, costs)
    return overlapped(size, place) if in_time else []


def in_vain(size: Size, costs: Constants) -> float:
    """The predicted time of finding out that a chain cannot be overlapped."""
    return costs.of("overlapped", FORWARD, cost_counts.in_vain(size))


def counted(size: Size, schedule: Schedule, costs: Constants) -> Work:
    """The work in units of the cost model: as if all processors were busy, and float64 counted twice.

    A CPU walks one sequence after the other, so that the steps of all are dependent, and threads without a sequence
    idle.
    """
    counts, in_turn, times = work(size, schedule), 1, 1.0
    if costs.device == "cpu" and schedule.name in ("sequential", "overlapped", "meeting"):
        in_turn = size.sequences * schedule.segments
        worth = counts.multiply_adds // (3 if size.gradients else 1) // WORTH_A_THREAD
        times = costs.threads / max(1, min(costs.available or costs.threads, in_turn, worth))
    programs = max(1, size.sequences * schedule.segments // max(1, in_turn))
    idle = 1.0 if schedule.name == "tree" else -(-programs // costs.processors) * costs.processors / programs
    return Work(
        multiply_adds=round(counts.multiply_adds * idle * times * size.item / 4),
        exponentials=round(counts.exponentials * times),
        bytes=round(counts.bytes * times),
        steps=round(counts.steps * in_turn * times),
        launches=counts.launches,
    )
