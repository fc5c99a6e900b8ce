"""How many bytes a function of tensors allocates, forward and backward: what one otherwise prints by hand."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import kernels
from ._measure import allocations, profiled


class Memory(NamedTuple):
    """Bytes that are allocated at the end of a phase, and the most that were at once during it."""

    allocated: int
    peak: int


class MemoryReport(NamedTuple):
    """Bytes before the call, after it and after its backward pass, None without one; `str()` is a table."""

    before: Memory
    forward: Memory
    backward: Memory | None

    def __str__(self) -> str:
        lines = [f"{'bytes':<10}{'allocated':>18}{'peak':>18}"]
        for name, row in zip(self._fields, self, strict=True):
            if row is not None:
                lines.append(f"{name:<10}{row.allocated:>18,}{row.peak:>18,}")
        return "\n".join(lines)


def memory_report(fn: Callable[..., object], *args: object) -> MemoryReport:
    """Bytes before, after and at the peak of `fn(*args)` and of the gradients of the sum of all that it returns.

    Args:
        fn: any function; tensors may lie anywhere in what it returns (tuples, lists, dicts).
        args: its arguments. Gradients are taken of the tensors among them that require one, wherever they lie, and are
            not written to `.grad`.

    Returns:
        Three rows of `allocated` and `peak` bytes. After `forward`, what `fn` returned and what it keeps for the
        backward pass are allocated; after `backward`, what it returned and the gradients. `backward` is None where no
        gradient is to be taken. On a GPU, that of the first tensor there, the numbers are torch's own: they hold all
        that lies on it. On a CPU, where torch has no such counter, the profiler's: `before` is the size of the tensors
        in `args`, and what else stood before the call does not count.

    Raises:
        TypeError: `fn` cannot be called.

    Cost: one call and one backward pass. The peak counter of a GPU is reset. On a CPU every allocation is recorded,
    which slows small operators down a few times; what a library allocates past torch (NumPy, BLAS workspaces) is not
    seen.

    Source: `torch.cuda.memory_allocated` and `torch.cuda.max_memory_allocated`; `torch.profiler` on a CPU.

    >>> x = torch.zeros(1_000_000, requires_grad=True)
    >>> print(memory_report(lambda x: x.exp().sin(), x))  # exp x is kept for the backward pass
    bytes              allocated              peak
    before             4,000,000         4,000,000
    forward           12,000,000        12,000,000
    backward          12,000,000        20,000,008
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    tensors = _tensors(args)
    on_gpu = [tensor for tensor in tensors if kernels.on_gpu(tensor)]
    count: _OnGPU | _OnCPU = _OnGPU(on_gpu[0].device) if on_gpu else _OnCPU(tensors)
    before = count.done()
    with count.phase():
        found = fn(*args)
    forward = count.done()
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    results = [tensor for tensor in _tensors(found) if tensor.requires_grad]
    if not leaves or not results:
        return MemoryReport(before, forward, None)
    with count.phase():
        # held until the bytes are counted
        gradients = torch.autograd.grad([result.sum() for result in results], leaves, allow_unused=True)
    backward = count.done()
    del found, results, gradients
    return MemoryReport(before, forward, backward)


class _OnGPU:
    """The counters of torch's allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def phase(self) -> AbstractContextManager[object]:
        torch.cuda.reset_peak_memory_stats(self._device)
        return nullcontext()

    def done(self) -> Memory:
        torch.cuda.synchronize(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return Memory(allocated, max(allocated, torch.cuda.max_memory_allocated(self._device)))


class _OnCPU:
    """What the profiler saw allocated and freed, by address; tensors that stood before count until they are freed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._live = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._profile: Any = None

    @contextmanager
    def phase(self) -> Iterator[None]:
        with profiled() as self._profile:
            yield

    def done(self) -> Memory:
        total = peak = sum(self._live.values())
        if self._profile is not None:
            events = [e for e in allocations(self._profile.kineto_results) if e.extra_fields.device.type == "cpu"]
            for event in sorted(events, key=lambda event: event.start_time_ns):
                address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
                total -= self._live.pop(address, 0)
                if size > 0:
                    self._live[address] = size
                    total += size
                peak = max(peak, total)
        return Memory(total, peak)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
