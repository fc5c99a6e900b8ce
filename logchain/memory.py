"""Memory that a function of tensors allocates, forward and backward."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .internals import tree_leaves

__all__ = ["Memory", "MemoryReport", "peak_bytes", "report"]


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
    """Bytes allocated before, after and at the peak of `fn(*args)`, and of the gradients of the sum of its results.

    Args:
        fn: any function; the tensors that it returns may be nested in tuples, lists and dicts.
        args: arguments of `fn`, nested likewise. Gradients are taken with respect to the tensors among them that
            require one, and are not written to `.grad`.

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
    on_gpu = [tensor for tensor in tensors if kernels.on_gpu(tensor)]
    counter: _OnGPU | _OnCPU = _OnGPU(on_gpu[0].device) if on_gpu else _OnCPU(tensors)
    before = counter.read()
    with counter.phase():
        output = fn(*args)
    forward = counter.read()
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    results = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not leaves or not results:
        return MemoryReport(before, forward, None)
    with counter.phase():
        # gradients stay allocated until the bytes are counted
        gradients = torch.autograd.grad([result.sum() for result in results], leaves, allow_unused=True)
    backward = counter.read()
    del output, results, gradients
    return MemoryReport(before, forward, backward)


def peak_bytes(call: Callable[[], Sequence[Tensor]]) -> int:
    """The largest number of bytes allocated by torch on the CPU during a call, without the tensors that it returns.

    Temporaries inside operators count too; memory allocated before the call, or outside torch, does not.

    >>> peak_bytes(lambda: [torch.ones(1000).exp() + 1])
    8000
    """
    with profiled() as profile:
        results = call()
    allocations = _allocations(profile)
    # addresses are used again once they are free: a result is the last allocation at its address
    last = {event.extra_fields.ptr: i for i, event in enumerate(allocations) if event.extra_fields.alloc_size > 0}
    returned = {last.get(result.untyped_storage().data_ptr()) for result in results}
    return _peak([event for i, event in enumerate(allocations) if i not in returned], {})


class _OnGPU:
    """The bytes of one GPU, by the counters of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def phase(self) -> AbstractContextManager[object]:
        torch.cuda.reset_peak_memory_stats(self._device)
        return nullcontext()

    def read(self) -> Memory:
        torch.cuda.synchronize(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return Memory(allocated, max(allocated, torch.cuda.max_memory_allocated(self._device)))


class _OnCPU:
    """The bytes of the CPU, by the profiler; tensors allocated before count until they are freed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._live = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._profile: Any = None

    @contextmanager
    def phase(self) -> Iterator[None]:
        with profiled() as self._profile:
            yield

    def read(self) -> Memory:
        peak = _peak(_allocations(self._profile) if self._profile else [], self._live)
        return Memory(sum(self._live.values()), peak)


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


def _allocations(profile: Any) -> list[Any]:
    """The profiler's events of CPU memory that was allocated or freed, in order of time."""
    memory = [event for event in events(profile.kineto_results) if event.name == "[memory]"]
    return sorted((e for e in memory if e.extra_fields.device.type == "cpu"), key=lambda e: e.start_time_ns)


def events(results: Any) -> Iterator[Any]:
    """All events in the profiler's tree."""
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        yield event


@contextmanager
def profiled() -> Iterator[Any]:
    """A context with torch's memory profiler, whose native code is kept from writing to stderr (file descriptor 2)."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield profile
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
