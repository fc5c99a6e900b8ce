"""In which order a product multiplies: the schedule that costs least, by a model of the device.

    sequential   a vector times v - 1 matrices
    chunked      k segments of matrix products side by side, then a vector through the k
    tree         pairs of matrices, level by level

With gradients, a chunked chain carries its vectors through all segments side by side, forward and backward.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_alone, check_chain, check_choice
from ..operands import differentiated
from .cost import BOTH, FORWARD, Constants, Work, constants
from .cost_counts import SEQUENTIAL, TREE, Schedule, Size, peaks, work

Strategy = Literal["auto", "sequential", "chunked", "tree"]
STRATEGIES = get_args(Strategy)

# bytes beside two message tensors that a schedule may take before it is left out
_SLACK = 2**23

# a prediction may be off by so much: what is not better by more is left sequential
_SURE = 1.15

# states of which a GPU multiplies segments
_GPU_STATES = 64

# from one number of segments that is tried to the next
_RATIO = 1.25

# where sizes are not known
_UNKNOWN = {"auto": SEQUENTIAL, "chunked": Schedule("chunked", 16), "tree": TREE}


class Where(NamedTuple):
    """A device, what computes there, and on how many threads."""

    device: str
    backend: str
    threads: int

    @property
    def constants(self) -> Constants:
        """What the work costs there."""
        return constants(*self)


def of(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, lengths: bool, strategy: Strategy) -> Schedule:
    """What `product` does with operands; while it is traced with sizes that are not known, the sequential one."""
    if strategy == "sequential":
        return SEQUENTIAL
    given = log_params, lengths, differentiated(x, bulk, p0)
    if not torch.compiler.is_compiling():
        return choose(size_of(x, bulk, p0, *given), where(p0), strategy)
    if not _known(x, bulk):
        return _UNKNOWN[strategy]
    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    name, segments = _traced((*x.shape,), (*bulk.shape,), double, *given, kernels.on_gpu(p0), strategy)
    return Schedule(name, segments)


def is_sequential(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> bool:
    """Whether `product` takes a vector through a chain; checks its operands."""
    check_chain(x, bulk, p0)
    return of(x, bulk, p0, log_params, False, "auto") == SEQUENTIAL


def _known(x: Tensor, bulk: Tensor) -> bool:
    """Whether all sizes are numbers while a graph is traced."""
    from torch.fx.experimental import symbolic_shapes  # takes long to import

    known = getattr(symbolic_shapes, "has_static_value", lambda size: False)
    return all(known(size) for size in (*x.shape, *bulk.shape))


def _traced(
    x: tuple[int, ...],
    bulk: tuple[int, ...],
    double: bool,
    log_params: bool,
    lengths: bool,
    gradients: bool,
    on_gpu: bool,
    strategy: Strategy,
) -> tuple[str, int]:
    size = _size(x, bulk, double, log_params, lengths, gradients)
    name, segments = choose(size, elsewhere("cuda") if on_gpu else where(torch.empty(0)), strategy)
    return name, segments


# what `torch.compiler.assume_constant_result` does, which takes seconds to import
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def where(x: Tensor) -> Where:
    """Where a tensor is computed with."""
    if kernels.on_gpu(x):
        return Where("cuda", "triton", 1)
    if not x.is_cpu:
        return Where(x.device.type, "torch", 1)
    return Where("cpu", "c", torch.get_num_threads())


def elsewhere(device: str) -> Where:
    """A device that may not be there."""
    return Where(device, "triton" if device == "cuda" else "torch", 1)


def check_options(strategy: object, memory_budget: object, others: dict[str, bool]) -> None:
    """Their kinds, and no schedule of matrices where only the sequential one is there: with others that are given."""
    check_choice("strategy", strategy, STRATEGIES)
    if memory_budget is not None and (not isinstance(memory_budget, int) or isinstance(memory_budget, bool)):
        raise TypeError(f"memory_budget: expected a number of bytes or None, got {memory_budget!r}")
    if strategy in ("chunked", "tree"):
        others = {**others, "memory_budget": memory_budget is not None}
        check_alone("strategy", strategy, "'auto' or 'sequential'", others)


def size_of(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, lengths: bool, gradients: bool) -> Size:
    """That of operands."""
    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    return _size(x.shape, bulk.shape, double, log_params, lengths, gradients)


@lru_cache(maxsize=2**12)
def _size(
    x: tuple[int, ...], bulk: tuple[int, ...], double: bool, log_params: bool, lengths: bool, gradients: bool
) -> Size:
    *batch, v, c = x
    g = math.prod(bulk[:-3])
    m = math.prod(batch) // g if g else 0
    return Size(v, g, m, c, bulk[-3] == 1, 8 if double else 4, log_params, lengths, gradients)


@lru_cache(maxsize=2**12)
def choose(size: Size, place: Where, strategy: str) -> Schedule:
    """The schedule that costs least, or the best of its kind."""
    if strategy == "tree":
        return TREE
    found = [SEQUENTIAL]
    if strategy != "sequential" and size.states and size.v > 1:
        every = candidates(size, place.backend)
        within = [schedule for schedule in every if within_contract(size, schedule, place)]
        # what is asked for by name is done, in as little memory as can be
        found = (within or every[:1]) if strategy == "chunked" else [SEQUENTIAL, *within, TREE]
    costs = place.constants

    def price(schedule: Schedule) -> float:
        return seconds(size, schedule, costs) * (1.0 if schedule.name == "sequential" else _SURE)

    return min(found, key=price, default=SEQUENTIAL)


def candidates(size: Size, backend: str) -> list[Schedule]:
    """Chunked ones, of two transitions a segment at the least; their numbers of segments grow by a quarter.

    A GPU has none for sequences with lengths, nor for more states than a program can hold the products of.
    """
    most = (size.v - 1) // 2
    if backend == "triton" and (size.lengths or size.c > _GPU_STATES):
        return []
    powers = range(1, math.ceil(math.log(most, _RATIO)) + 1) if most > 1 else ()
    numbers = {min(most, math.ceil(_RATIO**power)) for power in powers}
    return [Schedule("chunked", number) for number in sorted(numbers)]


def within_contract(size: Size, schedule: Schedule, place: Where) -> bool:
    """Whether it takes no more memory than two messages, and what does not grow with the chain."""
    forward, backward = peaks(size, schedule, place.backend)
    return max(forward, backward if size.gradients else 0) <= 2 * size.message_bytes + _SLACK


def seconds(size: Size, schedule: Schedule, costs: Constants) -> float:
    """How long it will take."""
    return costs.of(schedule.name, BOTH if size.gradients else FORWARD, counted(size, schedule, costs))


def counted(size: Size, schedule: Schedule, costs: Constants) -> Work:
    """Its work, as far as time goes: what idle processors could have done is done, and float64 is twice float32.

    A loop on a CPU walks one sequence after the other, so that each waits. So do sets of matrices whose chains are cut
    on a GPU, where gradients are wanted.
    """
    done = work(size, schedule, costs.backend)
    if schedule.name == "tree":
        return done._replace(multiply_adds=done.multiply_adds * size.item // 4)
    in_turn = size.g if costs.backend == "triton" and schedule.name == "chunked" and size.gradients else 1
    programs = max(1, size.sequences // in_turn * schedule.segments)
    idle = -(-programs // costs.processors) * costs.processors / programs
    steps = done.steps * in_turn
    if costs.backend == "c" and schedule.name == "sequential":
        steps *= size.sequences
    elif costs.backend == "c" and size.gradients:  # the segments' own chains
        steps += 2 * size.sequences * size.v
    return done._replace(multiply_adds=round(done.multiply_adds * idle * size.item / 4), steps=steps)
