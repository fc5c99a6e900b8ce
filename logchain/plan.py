"""The schedule of a product, its memory and the reason for the choice."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Lengths, check_float_dtype
from .chain import Chain
from .kernels import on_gpu
from .schedules import budget, choose
from .tensors import differentiated, with_steps
from .transitions import Transition


class Plan(NamedTuple):
    """How `product` computes a chain; `str()` says it in two lines.

    Attributes:
        schedule: "sequential", "segments" or "tree".
        segments: the number of segments that are computed side by side, otherwise 1.
        bytes: an estimate of the peak memory beyond operands, result and gradients.
        checkpoint_every: the number of steps between stored messages under a `memory_budget`; None if all are stored.
        reason: why this schedule was chosen.
    """

    schedule: str
    segments: int
    bytes: int
    checkpoint_every: int | None
    reason: str

    def __str__(self) -> str:
        cut = f", {self.segments} segments" if self.segments > 1 else ""
        stored = "" if self.checkpoint_every is None else f", a message is kept every {self.checkpoint_every} steps"
        return f"{self.schedule}{cut}: {self.reason}\nabout {self.bytes:,} bytes{stored}"


def plan(
    x: Tensor | Sequence[int], bulk: Tensor | Sequence[int] | Transition, p0: Tensor | Sequence[int], *,
    log_params: bool = False, lengths: Lengths | None = None, cu_seqlens: None = None,
    strategy: choose.Strategy | str = "auto", memory_budget: int | None = None, gradients: bool | None = None,
    dtype: torch.dtype | None = None, device: torch.device | str | None = None,
) -> Plan:  # fmt: skip
    """Returns the `Plan` of `logchain.product` for operands or their shapes: its schedule, memory, and the reason.

    Operands are those of `product`, or their shapes `[*B, v, c]`, `[*B or ones, v-1 or 1, c, c]` and `[*B or ones, c]`;
    `bulk` may be a structure of `logchain.transitions`. Options are as in `product`; values of `lengths` do not matter.
    Of packed sequences pass one of the batches of similar lengths in which they are computed, without `cu_seqlens`.
    `gradients`: whether a backward pass follows; by default, whether a tensor requires gradients. `dtype` and `device`
    of shapes are by default float32, and that of the tensors or the CPU; it need not exist here.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; sizes do not go together; the `memory_budget` is too
            small, or given with another strategy than "auto" and "sequential".

    Cost: less than a millisecond; no chain is computed, and no operand allocated.

    Source: G. E. Blelloch, "Prefix sums and their applications" (1990); the rule's constants are measured on a CPU.

    >>> print(plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200)))
    sequential: too short for segments
    about 880,000 bytes
    """
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected None; pass the shapes of a batch of similar lengths")
    name = choose.check_options(strategy, memory_budget, {"a structure as bulk": isinstance(bulk, Transition)})
    check_float_dtype("dtype", dtype)
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"gradients: expected True, False or None, got {gradients!r}")
    tensors = [value for value in (x, bulk, p0) if isinstance(value, Tensor)]
    gpu = bool(tensors) and on_gpu(tensors[-1])
    if len(tensors) < 3:
        gpu = gpu if device is None else torch.device(device).type == "cuda"
        x, bulk, p0 = (_on_meta(*named, dtype, gradients) for named in ((x, "x"), (bulk, "bulk"), (p0, "p0")))
    assert isinstance(x, Tensor) and not isinstance(bulk, Sequence) and isinstance(p0, Tensor)
    Chain.of(x, bulk, p0, log_params, lengths, in_pieces=memory_budget is not None)
    saved = ""
    if isinstance(bulk, Transition):
        saved = f"{bulk.multiply_adds} multiply-adds per step in place of {x.shape[-1] ** 2}"
        # a matrix with the dtype and the gradients of the parameters
        bulk = torch.cat([weights[..., :0].flatten() for weights in bulk.parameters]).sum().expand(1, *2 * x.shape[-1:])
    bulk = with_steps(bulk)
    gradients = differentiated(x, bulk, p0) if gradients is None else gradients
    size = choose.Size.of(x, bulk, p0, lengths is not None)
    peak = size.n * size.item * ((size.v * (size.c + 1) if gradients else 2 * size.c) + size.v)
    if saved:  # an exponent a state, or a message of float64, is as large as a message
        return Plan("sequential", 1, 2 * peak, None, saved)
    if memory_budget is not None:
        every = budget.every_within(memory_budget, x, bulk, p0, gradients)
        if every is None:
            return Plan("sequential", 1, peak, None, "memory_budget holds all messages")
        peak = budget.Sizes(x, bulk, p0, gradients).checkpointed(every)
        return Plan("sequential", 1, peak, every, "memory_budget keeps the messages that fit, and recomputes others")
    if name == "tree" and size.v > 1:
        stack = (32 if gradients else 24) * size.n * (size.v - 1) * size.c**2
        return Plan("tree", 1, stack, None, f"strategy={strategy!r}")
    (segments, _), reason = choose.choose(size, gpu, "sequential" if name == "tree" else name)
    # each message between segments is in memory some times while two are compared
    between = 16 * 8 * size.n * segments * size.c if segments > 1 else 0
    return Plan("segments" if segments > 1 else "sequential", segments, peak + between, None, reason)


def _on_meta(operand: Any, name: str, dtype: torch.dtype | None, gradients: bool | None) -> Any:
    if isinstance(operand, Tensor | Transition):
        return operand.to("meta")
    try:
        return torch.empty(tuple(operand), dtype=dtype or torch.float32, device="meta", requires_grad=gradients is True)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a torch.Tensor or a shape, got {operand!r}") from error
