"""The schedule of a product, its memory and the reason for the choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .arguments import Lengths, check_float_dtype, check_question
from .operands import differentiated
from .schedules import budget, choose
from .schedules.choose import Size, Strategy
from .structured.operands import check_operands
from .structured.product import check_options as check_structured_options
from .transitions import Transition

# an operand may be given by its shape alone
Shape = Sequence[int]


@dataclass(frozen=True)
class Plan:
    """How `product` computes a chain; `str()` says it in two lines.

    Attributes:
        schedule: "sequential", "segments" or "tree".
        segments: the number of segments that are computed side by side, otherwise 1.
        bytes: an estimate of the peak memory beyond operands, result and gradients.
        checkpoint_every: the number of steps between kept messages under a `memory_budget`; None if all are kept.
        reason: why this schedule was chosen.
    """

    schedule: str
    segments: int
    bytes: int
    checkpoint_every: int | None
    reason: str

    def __str__(self) -> str:
        cut = f", {self.segments} segments" if self.segments > 1 else ""
        kept = "" if self.checkpoint_every is None else f", a message is kept every {self.checkpoint_every} steps"
        return f"{self.schedule}{cut}: {self.reason}\nabout {self.bytes:,} bytes{kept}"


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
    """The schedule that `logchain.product` follows for operands or their shapes, its memory, and the reason.

    Args:
        x: log-potentials `[*B, v, c]`, or their shape.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, or their shape; or a structure of
            `logchain.transitions`.
        p0: initial weights `[*B or ones, c]`, or their shape.
        log_params: `bulk` and `p0` are logarithms.
        lengths: as in `product`; their values do not matter.
        strategy: as in `product`.
        memory_budget: bytes that messages may take, as in `product`.
        gradients: whether a backward pass follows; by default, whether a tensor requires gradients.
        dtype: dtype of operands given as shapes, by default float32.
        device: device of operands given as shapes, by default that of the tensors, or the CPU; it need not exist here.

    Returns:
        The `Plan`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, the `memory_budget` is too small, or given with another strategy than
            "auto" and "sequential".

    Cost: less than a millisecond; no chain is computed, and no operand allocated.

    Source: the trade of work for dependent steps, G. E. Blelloch, "Prefix sums and their applications" (1990); the
    rule's constants are measurements on a CPU.

    >>> print(plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200)))
    sequential: too short for segments
    about 880,000 bytes
    """
    if isinstance(bulk, Transition):
        check_structured_options(strategy, memory_budget, False)
    name = choose.check_options(strategy, memory_budget, {})
    check_float_dtype("dtype", dtype)
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"gradients: expected True, False or None, got {gradients!r}")
    place = _device(x, bulk, p0, device)
    if isinstance(bulk, Transition):
        x, p0 = _on_meta(x, "x", dtype), _on_meta(p0, "p0", dtype)
        parameters: tuple[Tensor, ...] = bulk.parameters
        check_operands(x, bulk.map(_on_meta), p0, log_params, None)
        matrices = (1, *bulk.lead, *2 * x.shape[-1:])
    else:
        if not all(isinstance(operand, Tensor) for operand in (x, bulk, p0)):
            x, bulk, p0 = (_on_meta(*named, dtype) for named in ((x, "x"), (bulk, "bulk"), (p0, "p0")))
        assert isinstance(x, Tensor) and isinstance(bulk, Tensor) and isinstance(p0, Tensor)
        parameters, matrix = (bulk,), bulk
        lengths = check_question(x, matrix, p0, log_params, lengths, in_pieces=memory_budget is not None)
        matrices = (*matrix.shape,)
    if gradients is None:
        gradients = differentiated(x, p0, *parameters)
    item = 8 if torch.float64 in (x.dtype, p0.dtype, *(one.dtype for one in parameters)) else 4
    size = Size.of(x.shape, matrices, item, lengths is not None)
    if memory_budget is not None:
        return _within(memory_budget, size, (x, parameters[0], p0), gradients)
    if isinstance(bulk, Transition):
        reason = f"{bulk.multiply_adds} multiply-adds per step in place of {size.c**2}"
        # an exponent a state, or a message of float64, is as large as a message
        return Plan("sequential", 1, 2 * _bytes(size, gradients, 1), None, reason)
    if name == "tree" and size.v > 1:
        stack = 8 * size.n * (size.v - 1) * size.c**2
        return Plan("tree", 1, (4 if gradients else 3) * stack, None, f"strategy={strategy!r}")
    schedule, reason = choose.choose(size, place, "sequential" if name == "tree" else name)
    kind = "segments" if schedule.segments > 1 else "sequential"
    return Plan(kind, schedule.segments, _bytes(size, gradients, schedule.segments), None, reason)


def _within(memory_budget: int, size: Size, operands: tuple[Tensor, Tensor, Tensor], gradients: bool) -> Plan:
    if gradients and not any(operand.requires_grad for operand in operands):
        x, bulk, p0 = (_on_meta(operand).requires_grad_() for operand in operands)
        operands = x, bulk, p0
    every = budget.every_within(memory_budget, *operands, gradients)
    if every is None:
        return Plan("sequential", 1, _bytes(size, gradients, 1), None, "memory_budget holds all messages")
    peak = budget.Sizes.of(*operands, gradients).checkpointed(every)
    return Plan("sequential", 1, peak, every, "memory_budget keeps the messages that fit, and recomputes the others")


def _bytes(size: Size, gradients: bool, segments: int) -> int:
    """Messages of all steps or of two, and float64 messages between segments."""
    messages = size.v * (size.c + 1) if gradients else 2 * size.c
    # each message between segments is in memory some times while two are compared
    between = 16 * 8 * segments * size.c if segments > 1 else 0
    return size.n * ((messages + size.v) * size.item + between)


def _device(x: object, bulk: object, p0: object, device: torch.device | str | None) -> str:
    """The kind of device that computes: that of p0, or of the operands that are tensors."""
    tensors = [value for value in (x, bulk, p0) if isinstance(value, Tensor)]
    if len(tensors) == 3 and kernels.on_gpu(tensors[2]):
        return "gpu"
    if device is None or len(tensors) == 3:
        device = tensors[-1].device if tensors else "cpu"
    kind = torch.device(device).type
    return "gpu" if kind == "cuda" else kind


def _on_meta(value: Tensor | Shape, name: str = "", dtype: torch.dtype | None = None) -> Tensor:
    """A tensor without memory, like another one or of a shape."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
    try:
        return torch.empty(tuple(value), dtype=dtype or torch.float32, device="meta")
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a torch.Tensor or a shape, got {value!r}") from error
