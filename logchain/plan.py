"""The schedule of a product and its predicted cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from .arguments import Lengths, check_float_dtype, check_question
from .operands import differentiated
from .schedules import budget as budgets
from .schedules import choose, cost_counts
from .schedules.choose import Strategy, Where
from .schedules.cost import BOTH, FORWARD
from .schedules.cost_counts import MEETING, SEQUENTIAL, Schedule, Size
from .structured.operands import check_operands
from .structured.product import check_options as check_structured_options
from .transitions import Transition

# an operand may be given by its shape alone
Shape = Sequence[int]


@dataclass(frozen=True)
class Estimate:
    """The cost of one schedule, with `segments` of `segment_size` transitions each, side by side.

    `steps` is the number of dependent steps, `launches` that of GPU kernels or of calls on a CPU; `seconds` are
    predicted. The peaks are bytes beyond operands, result and gradients; `peak_backward` is None without gradients.
    """

    schedule: str
    segments: int
    segment_size: int
    multiply_adds: int
    exponentials: int
    bytes: int
    steps: int
    launches: int
    peak_forward: int
    peak_backward: int | None
    seconds: float


@dataclass(frozen=True)
class Plan(Estimate):
    """The `Estimate` of the schedule that `product` follows; `str()` is a table.

    `alternatives` are the other schedules, each with its best number of segments. `why` is the reason for the choice,
    `constants` the machine for which seconds are predicted, and `measured` whether its speed was measured.
    `checkpoint_every` is the number of transitions between kept messages under a `memory_budget`, None if all are kept.
    """

    alternatives: tuple[Estimate, ...]
    why: str
    constants: str
    measured: bool
    checkpoint_every: int | None
    title: str

    def __str__(self) -> str:
        rows = [self, *self.alternatives]
        table = [("", *(f"{'* ' if row is self else ''}{row.schedule}" for row in rows))]
        table.append(("segments", *(f"{row.segments} of {row.segment_size}" for row in rows)))
        for name in ("multiply_adds", "exponentials", "bytes", "steps", "launches", "peak_forward", "peak_backward"):
            values = [getattr(row, name) for row in rows]
            if None not in values:
                label = name.replace("_", "-" if name.startswith("multiply") else " ")
                table.append((label, *map(_short, values)))
        table.append(("predicted time", *(_time(row.seconds) for row in rows)))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
        kept = [] if self.checkpoint_every is None else [f"a message is kept every {self.checkpoint_every} transitions"]
        return "\n".join([self.title, *lines, *kept, self.why, f"constants: {self.constants}"])


def plan(
    x: Tensor | Shape,
    bulk: Tensor | Shape | Transition,
    p0: Tensor | Shape,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    strategy: Strategy | str = "auto",
    memory_budget: int | None = None,
    gradients: bool | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """The schedule of `logchain.product` for given operands or shapes, with its work, memory and predicted time.

    `seconds` is the sum of multiply-adds, exponentials, bytes, dependent steps and launches, each times a constant of
    the device.

    Args:
        x: log-potentials `[*B, v, c]`, or their shape.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, or their shape; or a structure of
            `logchain.transitions`, whose plan stands beside that of its dense matrices.
        p0: initial weights `[*B or ones, c]`, or their shape.
        log_params: `bulk` and `p0` are logarithms.
        lengths: as in `product`; their values do not matter.
        strategy: as in `product`: "auto" takes the schedule that is predicted to be fastest. "meeting" is among the
            alternatives where threads of a CPU have no sequence of their own.
        memory_budget: bytes that messages may take, as in `product`.
        gradients: whether a backward pass follows; by default, whether a tensor requires gradients.
        dtype: dtype of operands given as shapes, by default float32.
        device: device of operands given as shapes, by default that of the tensors, or the CPU; it need not exist here.

    Returns:
        The `Plan` that `product` follows. `measured` is False for a device whose constants are from a data sheet.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together; or the `memory_budget` is too small, or given with another strategy than
            "auto" and "sequential".

    Cost: less than a millisecond; no chain is computed, and no operand allocated.

    Source: the work of each schedule is `v c^2` multiply-adds (sequential) or `v c^3` (chunked, tree), as in G. E.
    Blelloch, "Prefix sums and their applications" (1990); the constants are fitted to measurements.

    >>> forum = plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200))
    >>> forum.schedule, forum.multiply_adds, forum.steps
    ('sequential', 780000000, 40)
    >>> tree = plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200), strategy="tree")
    >>> tree.multiply_adds // forum.multiply_adds
    200
    """
    if isinstance(bulk, Transition):
        options = strategy, memory_budget
        return _structured(x, bulk, p0, log_params, lengths, options, gradients, dtype, device)
    choose.check_options(strategy, memory_budget, {})
    check_float_dtype("dtype", dtype)
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"gradients: expected True, False or None, got {gradients!r}")
    (x, bulk, p0), place = _operands((x, bulk, p0), dtype, device)
    ends = check_question(x, bulk, p0, log_params, lengths, in_pieces=memory_budget is not None)
    if gradients is None:
        gradients = differentiated(x, bulk, p0)
    elif gradients and not (x.requires_grad or bulk.requires_grad or p0.requires_grad):
        x, bulk, p0 = (_without_memory(operand).requires_grad_() for operand in (x, bulk, p0))
    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    size = Size.of(x.shape, bulk.shape, double, log_params, ends is not None, gradients, place.device == "cuda")
    passes = "forward and backward" if gradients else "forward"
    title = f"product of x {list(x.shape)} and bulk {list(bulk.shape)}{', lengths' * (ends is not None)}: {passes}"
    planned = _plan(size, place, "sequential" if memory_budget is not None else strategy, f"{title}, {place.device}")
    if memory_budget is None:
        return planned
    spacing = budgets.every_within(memory_budget, x, bulk, p0, gradients)
    if spacing is None:
        return replace(planned, why="sequential: memory_budget holds all messages")
    return _checkpointed(planned, size, place, spacing, budgets.Sizes.of(x, bulk, p0, gradients).checkpointed(spacing))


def _structured(
    x: Tensor | Shape,
    transition: Transition,
    p0: Tensor | Shape,
    log_params: bool,
    lengths: Lengths | None,
    options: tuple[object, object],
    gradients: bool | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Plan:
    """The plan of a structure, beside that of its dense matrices.

    A multiply-add is predicted to take as long as one of a dense matrix: constants of structures are not measured.
    """
    check_structured_options(*options, False)
    x, p0 = (_without_memory(value, name, dtype) for name, value in (("x", x), ("p0", p0)))
    shapes = transition.map(_without_memory)
    operands = check_operands(x, shapes, p0, log_params, None)
    if gradients is None:
        gradients = differentiated(x, p0, *transition.parameters)
    place = choose.where(torch.device(device or transition.device).type)
    dense = [*operands.transition.lead, *2 * x.shape[-1:]]
    size = Size.of(x.shape, dense, operands.dtype == torch.float64, log_params, lengths is not None, gradients)
    work = cost_counts.structured(size, transition.multiply_adds, sum(one.numel() for one in transition.parameters))
    title = f"product of x {list(x.shape)} and {transition}: {'forward and backward' if gradients else 'forward'}"
    planned = _plan(size, place, "auto", title)
    matrices = replace(
        _estimate(size, Schedule(planned.schedule, planned.segments), place), schedule=f"dense, {planned.schedule}"
    )
    forward, _ = cost_counts.peaks(size, SEQUENTIAL)
    return replace(
        planned,
        **work._asdict(),
        schedule="sequential",
        segments=1,
        segment_size=size.v - 1,
        seconds=place.constants.of("sequential", BOTH if gradients else FORWARD, work),
        # an exponent a state, or a message of float64, is as large as a message
        peak_forward=2 * forward if gradients else forward,
        peak_backward=2 * forward if gradients else None,
        alternatives=(matrices,),
        why=f"sequential: {transition.multiply_adds} multiply-adds a step in place of {x.shape[-1] ** 2}",
        measured=False,
    )


def _operands(
    given: tuple[Tensor | Shape, ...], dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[list[Tensor], Where]:
    """The operands as tensors, without memory where a shape is given, and the device that computes."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    if len(tensors) == 3:
        return tensors, choose.where(tensors[2].device.type)
    device = torch.device(device or (tensors[-1].device if tensors else "cpu"))
    named = zip(("x", "bulk", "p0"), given, strict=True)
    return [_without_memory(value, name, dtype) for name, value in named], choose.where(device.type)


def _without_memory(value: Tensor | Shape, name: str = "", dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on the meta device, like a given one or of a given shape."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
    try:
        return torch.empty(tuple(value), dtype=dtype or torch.float32, device="meta")
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a torch.Tensor or a shape, got {value!r}") from error


def _plan(size: Size, place: Where, strategy: str, title: str) -> Plan:
    """The plan without a memory budget, and its alternatives in order of predicted time."""
    picked, costs = choose.choose(size, place, strategy), place.constants
    kinds = [choose.choose(size, place, name) for name in choose.STRATEGIES[1:]]
    # halves gain nothing where no thread is idle
    kinds = [kind for kind in kinds if kind != MEETING or choose.meeting(size, place)]
    # a chain that is too short for segments has no chunked and no overlapped schedule
    others = {kind.name: _estimate(size, kind, place) for kind in kinds if kind.name != picked.name}
    own, alternatives = _estimate(size, picked, place), sorted(others.values(), key=lambda other: other.seconds)
    against = ", ".join(f"{_time(other.seconds)} for {other.schedule}" for other in alternatives)
    why = f"{_time(own.seconds)} against {against}" if strategy == "auto" else f"strategy={strategy!r}"
    return Plan(
        **asdict(own),
        alternatives=tuple(alternatives),
        why=f"{picked.name}: {why}",
        constants=costs.source,
        measured=costs.measured,
        checkpoint_every=None,
        title=title,
    )


def _estimate(size: Size, schedule: Schedule, place: Where) -> Estimate:
    forward, backward = cost_counts.peaks(size, schedule)
    return Estimate(
        schedule=schedule.name,
        segments=schedule.segments,
        segment_size=cost_counts.length_of(size, schedule),
        **cost_counts.work(size, schedule)._asdict(),
        peak_forward=forward,
        peak_backward=backward if size.gradients else None,
        seconds=choose.seconds(size, schedule, place.constants),
    )


def _checkpointed(planned: Plan, size: Size, place: Where, spacing: int, peak: int) -> Plan:
    """The plan within a memory budget: with gradients one more forward pass, and the peak memory of segments."""
    passes = [size, *([size._replace(gradients=False)] if size.gradients else [])]
    work = sum((cost_counts.work(walk, SEQUENTIAL) for walk in passes), cost_counts.NOTHING)
    return replace(
        planned,
        **work._asdict(),
        seconds=sum(choose.seconds(walk, SEQUENTIAL, place.constants) for walk in passes),
        peak_forward=peak,
        peak_backward=peak if size.gradients else None,
        alternatives=(),
        why="sequential: memory_budget keeps the messages that fit, and recomputes the rest",
        checkpoint_every=spacing,
    )


def _short(number: int) -> str:
    """A number with three digits, such as 25.6 M."""
    value, unit = float(number), ""
    for larger in ("k", "M", "G", "T", "P"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}".rstrip()


def _time(seconds: float) -> str:
    for unit in ("s", "ms"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} us"
