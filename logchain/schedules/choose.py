"""The schedule of a chain: one scan, or segments side by side, by a rule of measured constants.

A CPU scans one sequence on one thread, so that threads are idle where sequences are few; and a vector times a matrix
reads the matrix once a step, where segments that share it read it together. Segments cost a fixed time and a warm-up,
so that only long chains gain. The constants are near where both schedules take the same time on two cores of an x86-64
CPU: `python -m tests.benchmarks run schedules` measures that. Those of a GPU have not been measured.
"""

import math
import re
import warnings
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_alone, check_choice
from ..internals import constant_in_graphs, is_static
from ..kernels.chain import FEW_STATES, arithmetic_dtype, has_idle_threads

Strategy = Literal["auto", "sequential", "segments", "tree"]

# the number of segments, two or more, and the steps of their warm-up
_NUMBERED = re.compile(r"segments:(?:[2-9]|[1-9][0-9]{1,5})(?::[1-9][0-9]{0,8})?")
# names of former strategies, and what they mean now
_FORMER = {"chunked": "segments", "overlapped": "segments", "meeting": "auto"}
# the multiply-adds of a sequence from which segments pay, and those that a state takes per step in addition to c; a
# quarter of that pays with a matrix per step, each of which is read from memory
_WORTH, _PER_STATE = 9 * 2**23, 32
# states from which segments that share a matrix pay without idle threads, and such segments for each thread
_SHARED_STATES, _ROWS = 128, 8
# the fewest steps of a segment for each byte of a number, and segments of chains whose sizes are not known
_STEPS, _UNKNOWN = 12, 16
# states up to which a GPU multiplies segments of one sequence, and their number of variables from which it does
_GPU_STATES, _GPU_LONG = 64, 1024


class Schedule(NamedTuple):
    """The number of segments that are computed side by side, 1 for one scan, and the steps of their warm-up.

    `warm_up` 0: the length is searched. On a GPU it has no meaning.
    """

    segments: int = 1
    warm_up: int = 0


SEQUENTIAL = Schedule()


class Size(NamedTuple):
    """The sizes that decide: n sequences of v variables and c states, in numbers of `item` bytes.

    `shared`: one matrix serves all steps. `lengths`: sequences have lengths.
    """

    n: int
    v: int
    c: int
    item: int
    shared: bool
    lengths: bool

    @classmethod
    def of(cls, x: Tensor, bulk: Tensor, p0: Tensor, lengths: bool) -> "Size":
        """The sizes of checked operands."""
        *batch, v, c = x.shape
        return cls(math.prod(batch), v, c, arithmetic_dtype(x, bulk, p0).itemsize, bulk.shape[-3] == 1, lengths)

    @property
    def idle(self) -> bool:
        """Whether threads of a CPU are idle while one has each sequence."""
        return has_idle_threads(_threads(), self.n, self.v, self.c)


def of(x: Tensor, bulk: Tensor, p0: Tensor, lengths: bool, strategy: str = "auto") -> Schedule:
    """The schedule of checked operands, a fixed one while torch.compile traces sizes that are not known."""
    if torch.compiler.is_compiling() and not all(map(is_static, (*x.shape, *bulk.shape))):
        name, *numbers = strategy.split(":")
        cut = name == "segments" and not (lengths and kernels.on_gpu(p0))
        return Schedule(*(map(int, numbers) if numbers else [_UNKNOWN])) if cut else SEQUENTIAL
    return choose(Size.of(x, bulk, p0, lengths), kernels.on_gpu(p0), strategy)[0]


@constant_in_graphs
def _threads() -> int:
    return torch.get_num_threads()


def choose(size: Size, gpu: bool, strategy: str) -> tuple[Schedule, str]:
    """The schedule, and the reason for it."""
    name, *numbers = strategy.split(":")
    if name == "sequential":
        return SEQUENTIAL, f"strategy={strategy!r}"
    if size.v < 3 or size.n * size.c == 0:
        return SEQUENTIAL, "a chain of one or two variables" if size.v < 3 else "no entries"
    if gpu and size.lengths:
        return SEQUENTIAL, "lengths on a GPU"
    if numbers:
        segments, warm_up = (*map(int, numbers), 0)[:2]
        return Schedule(min(segments, size.v - 1), warm_up), f"strategy={strategy!r}"
    wanted, longest, gains, reason = _on_gpu(size) if gpu else _on_cpu(size)
    if longest < 2:
        return SEQUENTIAL, "too short for segments"
    if name == "segments":
        return Schedule(min(max(2, wanted), longest)), f"strategy={strategy!r}"
    return Schedule(min(wanted, longest)) if gains else SEQUENTIAL, reason


def _on_cpu(size: Size) -> tuple[int, int, bool, str]:
    """The number of segments that keeps threads busy, the most that are long enough, whether they gain, and why."""
    rows = _ROWS if size.shared and size.c > FEW_STATES else 1
    number = rows * _threads() // size.n, size.v // (_STEPS * size.item)
    if number[0] < 2 or not (size.idle or (size.shared and size.c >= _SHARED_STATES)):
        return *number, False, "no thread is idle"
    if size.v * size.c * (size.c + _PER_STATE) < (_WORTH if size.shared else _WORTH // 4):
        return *number, False, "a chain too short to gain from segments"
    return *number, True, "threads are idle" if size.idle else f"segments share a matrix of {size.c} states"


def _on_gpu(size: Size) -> tuple[int, int, bool, str]:
    """As `_on_cpu`: as many segments as steps in each, and products of c rows that are smaller than two messages."""
    number = math.isqrt(size.v), size.v // (4 * size.c)
    if size.n > 1 or size.c > _GPU_STATES or size.v < _GPU_LONG:
        return *number, False, "many sequences or states, or few steps"
    return *number, True, "one long sequence of few states"


def check_options(strategy: object, memory_budget: object, excluded: dict[str, bool]) -> str:
    """The strategy by its present name, after checks of both options and of arguments that are not for either."""
    former, *numbers = strategy.split(":") if isinstance(strategy, str) else [""]
    if former in _FORMER:
        name = _FORMER[former]
        warnings.warn(f"strategy: {former!r} is now {name!r}; pass {name!r} or 'auto'", FutureWarning, stacklevel=3)
        strategy = ":".join([name, *numbers])
    if not (isinstance(strategy, str) and _NUMBERED.fullmatch(strategy)):
        check_choice("strategy", strategy, get_args(Strategy))
    if memory_budget is not None and (not isinstance(memory_budget, int) or isinstance(memory_budget, bool)):
        raise TypeError(f"memory_budget: expected a number of bytes or None, got {memory_budget!r}")
    if memory_budget is not None:
        check_alone("memory_budget", memory_budget, "None", excluded)
    if strategy not in ("auto", "sequential"):
        excluded = {**excluded, "memory_budget": memory_budget is not None}
        check_alone("strategy", strategy, "'auto' or 'sequential'", excluded)
    return str(strategy)
