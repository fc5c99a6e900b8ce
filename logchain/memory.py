"""Memory that a function of tensors allocates, forward and backward."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import kernels
from .internals import tree_leaves

__all__ = ["Memory", "MemoryReport", "peak_bytes", "report"]

_Result = TypeVar("_Result")


class Memory(NamedTuple):
    """Bytes allocated at the end of a phase, and the most allocated at any time during it."""

    allocated: int
    peak: int


class MemoryReport(NamedTuple):
    """Bytes before a call, after it, and after its backward pass (None without one); `str()` is a table."""

    before: Memory
    forward: Memory
    backward: Memory | None

    def __str__(self) -> str:
        lines = [f"{'bytes':<10}{'allocated':>18}{'peak':>18}"]
        for name, row in zip(self._fields, self, strict=True):
            if row is not None:
                lines.append(f"{name:<10}{row.allocated:>18,}{row.peak:>18,}")
        return "\n".join(lines)


def report(fn: Callable[..., object], *args: object) -> MemoryReport:
    """Returns the bytes allocated before, after and at the peak of `fn(*args)`, and of its backward pass.

    Args:
        fn: any function; the tensors that it returns may be nested in tuples, lists and dicts.
        args: arguments of `fn`, nested likewise. Gradients of the sum of the results are taken with respect to the
            tensors among them that require one, and are not written to `.grad`.

    Returns:
        Three rows of `allocated` and `peak` bytes. After `forward`, the results and all that is kept for the backward
        pass are allocated; after `backward`, the results and the gradients. `backward` is None where no gradient is to
        be taken. If a tensor is on a GPU the numbers are those of torch for that device. On a CPU, where torch has no
        such counter, they are the profiler's: `before` is the size of the tensors in `args`, and other memory that was
        allocated before the call does not count.

    Raises:
        TypeError: `fn` cannot be called.

    Cost: one call and one backward pass. The peak counter of a GPU is reset. On a CPU every allocation is recorded,
    which slows small operators down a few times; allocations outside torch (NumPy, BLAS workspaces) are not seen.

    Source: `torch.cuda.memory_allocated` and `torch.cuda.max_memory_allocated`; `torch.profiler` on a CPU.

    >>> x = torch.zeros(1_000_000, requires_grad=True)
    >>> print(report(lambda x: x.exp().sin(), x))  # exp x is kept for the backward pass
    bytes              allocated              peak
    before             4,000,000         4,000,000
    forward           12,000,000        12,000,000
    backward          12,000,000        20,000,008
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    tensors = _tensors(args)
    device = next((tensor.device for tensor in tensors if kernels.on_gpu(tensor)), None)
    storages = [tensor.untyped_storage() for tensor in tensors]
    live = {storage.data_ptr(): storage.nbytes() for storage in storages}
    _, before = _phase(lambda: None, device, live)
    output, forward = _phase(lambda: fn(*args), device, live)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    results = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not leaves or not results:
        return MemoryReport(before, forward, None)

    def gradients() -> Sequence[Tensor | None]:
        return torch.autograd.grad([result.sum() for result in results], leaves, allow_unused=True)

    return MemoryReport(before, forward, _phase(gradients, device, live)[1])


def peak_bytes(call: Callable[[], Sequence[Tensor]]) -> int:
    """Returns the most bytes allocated by torch on the CPU during a call, without the tensors that it returns.

    Temporaries inside operators count too; memory allocated before the call, or outside torch, does not.

    >>> peak_bytes(lambda: [torch.ones(1000).exp() + 1])
    8000
    """
    results, allocations = _profiled(call)
    # addresses are used again once they are free: a result is the last allocation at its address
    last = {event.extra_fields.ptr: i for i, event in enumerate(allocations) if event.extra_fields.alloc_size > 0}
    returned = {last.get(result.untyped_storage().data_ptr()) for result in results}
    return _peak([event for i, event in enumerate(allocations) if i not in returned], {})


def _phase(call: Callable[[], _Result], device: torch.device | None, live: dict[int, int]) -> tuple[_Result, Memory]:
    """The result of a call, and the bytes of a GPU by torch's counters, or of the CPU by the profiler.

    `live`: the sizes of CPU memory by address, updated.
    """
    if device is None:
        result, allocations = _profiled(call)
        peak = _peak(allocations, live)
        return result, Memory(sum(live.values()), peak)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


def _peak(allocations: list[Any], live: dict[int, int]) -> int:
    """The most bytes allocated at once in a series of events; `live`, sizes by address, is updated to its end."""
    total = peak = sum(live.values())
    for event in allocations:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        peak = max(peak, total)
    return peak


def _profiled(call: Callable[[], _Result]) -> tuple[_Result, list[Any]]:
    """The result of a call, and the profiler's events of CPU memory allocated or freed meanwhile, in order of time."""
    # the profiler's native code writes to stderr, file descriptor 2
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            result = call()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
    events = list(profile.kineto_results.experimental_event_tree())
    for event in events:  # of a tree, which becomes a list
        events.extend(event.children)
    memory = [event for event in events if event.name == "[memory]" and event.extra_fields.device.type == "cpu"]
    return result, sorted(memory, key=lambda event: event.start_time_ns)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
