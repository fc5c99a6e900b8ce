"""What a product will do and what that will cost, before it is computed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from .arguments import Lengths, check_float_dtype, check_question
from .operands import differentiated
from .schedules import budget as budgets
from .schedules import choose, cost_counts
from .schedules.choose import Strategy, Where
from .schedules.cost_counts import SEQUENTIAL, Schedule, Size

# of operands of which only the shape is given
Shape = Sequence[int]


@dataclass(frozen=True)
class Estimate:
    """What one schedule does: `segments` of `segment_size` transitions each, side by side.

    `steps` wait for each other; `launches` are kernels of a GPU, or calls of torch on a CPU; `seconds` are predicted.
    The peaks are bytes beyond operands, result and gradients; `peak_backward` is None where no gradient is wanted.
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
    """The `Estimate` of what `product` will do; `str()` is a table.

    `alternatives` are the other schedules at their best. `why` says what decided, `constants` whose seconds these are,
    and `measured` whether anybody measured them. `checkpoint_every` is the number of transitions between two kept
    messages under a `memory_budget`, None for the messages of all steps.
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
    bulk: Tensor | Shape,
    p0: Tensor | Shape,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    strategy: Strategy = "auto",
    memory_budget: int | None = None,
    gradients: bool | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """What `logchain.product` will do with such operands: schedule, work, memory and predicted time.

    `seconds = sum of (multiply-adds, exponentials, bytes, dependent steps, launches) times constants of the device`

    Args:
        x: log-potentials `[*B, v, c]`, or their shape.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, or their shape.
        p0: initial weights `[*B or ones, c]`, or their shape.
        log_params: `bulk` and `p0` are logarithms.
        lengths: as in `product`; only whether there are some counts.
        strategy: "sequential" carries a vector through the chain, "chunked" multiplies segments side by side, "tree"
            pairs of matrices; "auto" takes the one that is predicted to be fastest.
        memory_budget: bytes that messages may take where gradients are wanted, as in `product`.
        gradients: whether a backward pass follows; by default whether a tensor requires one.
        dtype: of operands that are shapes, float32 by default.
        device: where those would lie, the CPU by default, or where the tensors are; it need not be there.

    Returns:
        The `Plan` that `product` follows. `measured` is False for a device whose constants are a data sheet's.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or the `memory_budget` is too small or goes with "chunked" or "tree".

    Cost: microseconds where the same sizes were asked for before, less than a millisecond otherwise. Nothing is
    computed, and no memory is taken.

    Source: the work of each schedule is `v c^2` multiply-adds (sequential) or `v c^3` (chunked, tree), as in G. E.
    Blelloch, "Prefix sums and their applications" (1990); the constants are fitted to measurements.

    >>> forum = plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200))
    >>> forum.schedule, forum.multiply_adds, forum.steps
    ('sequential', 780000000, 40)
    >>> tree = plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200), strategy="tree")
    >>> tree.multiply_adds // forum.multiply_adds
    200
    """
    choose.check_options(strategy, memory_budget, {})
    check_float_dtype("dtype", dtype)
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"gradients: expected True, False or None, got {gradients!r}")
    operands, place = _operands((x, bulk, p0), dtype, device)
    ends = check_question(*operands, log_params, lengths, False, in_pieces=memory_budget is not None)
    if gradients is None:
        gradients = differentiated(*operands)
    elif gradients and not any(operand.requires_grad for operand in operands):
        x, bulk, p0 = operands
        operands = _like(x).requires_grad_(), _like(bulk).requires_grad_(), _like(p0).requires_grad_()
    size = choose.size_of(*operands, log_params, ends is not None, gradients)
    strategy = "sequential" if memory_budget is not None else strategy
    found = _plan(
        size, place, strategy, _title(operands, place, ends is not None, gradients), memory_budget is not None
    )
    if memory_budget is not None:
        every = budgets.every_within(memory_budget, *operands, gradients)
        if every is not None:
            return _checkpointed(found, size, place, every, budgets.Sizes.of(*operands, gradients))
    return found


def _operands(
    given: tuple[Tensor | Shape, ...], dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Where]:
    """Tensors, those without memory for shapes, and where they are computed with."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    if len(tensors) == 3:
        return (tensors[0], tensors[1], tensors[2]), choose.where(tensors[2])
    if tensors and device is None:
        place = choose.where(tensors[-1])
    else:
        device = torch.device("cpu" if device is None else device)
        # a GPU may be planned for that is not there
        place = choose.where(torch.empty(0)) if device.type == "cpu" else choose.elsewhere(device.type)
    x, bulk, p0 = (
        _like(value) if isinstance(value, Tensor) else _from_shape(name, value, dtype)
        for name, value in zip(("x", "bulk", "p0"), given, strict=True)
    )
    return (x, bulk, p0), place


def _like(tensor: Tensor) -> Tensor:
    """One without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)


def _from_shape(name: str, shape: Shape, dtype: torch.dtype | None) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype or torch.float32, device="meta")
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a torch.Tensor or a shape, got {shape!r}") from error


def _plan(size: Size, place: Where, strategy: Strategy, title: str, budget: bool) -> Plan:
    picked = choose.choose(size, place, strategy)
    kinds = {name: choose.choose(size, place, name) for name in ("sequential", "chunked", "tree")}
    # a chain that is too short for segments has no chunked schedule
    others = [found for name, found in kinds.items() if found.name == name != picked.name]
    alternatives = sorted((_estimate(size, schedule, place) for schedule in others), key=lambda found: found.seconds)
    own, costs = _estimate(size, picked, place), place.constants
    if strategy == "sequential" and budget:
        why = "sequential: memory_budget holds all messages"
    elif strategy != "auto":
        why = f"{picked.name}: strategy={strategy!r}"
    else:
        against = ", ".join(f"{_time(found.seconds)} for {found.schedule}" for found in alternatives)
        why = f"{picked.name}: {_time(own.seconds)} against {against}" if against else picked.name
    return Plan(
        **asdict(own),
        alternatives=tuple(alternatives),
        why=why,
        constants=costs.source,
        measured=costs.measured,
        checkpoint_every=None,
        title=title,
    )


def _estimate(size: Size, schedule: Schedule, place: Where) -> Estimate:
    forward, backward = cost_counts.peaks(size, schedule, place.backend)
    return Estimate(
        schedule=schedule.name,
        segments=schedule.segments,
        segment_size=cost_counts.length_of(size, schedule),
        **cost_counts.work(size, schedule, place.backend)._asdict(),
        peak_forward=forward,
        peak_backward=backward if size.gradients else None,
        seconds=choose.seconds(size, schedule, place.constants),
    )


def _checkpointed(found: Plan, size: Size, place: Where, every: int, sizes: budgets.Sizes) -> Plan:
    """In float64, with one more forward pass before the backward pass, in the memory of a segment."""
    wide, costs = size._replace(item=8), place.constants
    work = cost_counts.work(wide, SEQUENTIAL, place.backend)
    seconds = choose.seconds(wide, SEQUENTIAL, costs)
    if size.gradients:
        again = wide._replace(gradients=False)
        work += cost_counts.work(again, SEQUENTIAL, place.backend)
        seconds += choose.seconds(again, SEQUENTIAL, costs)
    peak = sizes.checkpointed(every)
    return replace(
        found,
        **work._asdict(),
        schedule="sequential",
        segments=1,
        segment_size=cost_counts.length_of(size, SEQUENTIAL),
        seconds=seconds,
        peak_forward=peak,
        peak_backward=peak if size.gradients else None,
        alternatives=(),
        why="sequential: memory_budget keeps few messages and finds the others again",
        checkpoint_every=every,
    )


def _title(operands: tuple[Tensor, ...], place: Where, lengths: bool, gradients: bool) -> str:
    x, bulk, _ = operands
    passes = "forward and backward" if gradients else "forward"
    ends = ", lengths" if lengths else ""
    return f"product of x {list(x.shape)} and bulk {list(bulk.shape)}{ends}: {passes}, {place.device}"


def _short(number: int) -> str:
    """Three digits: 25.6 M."""
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
