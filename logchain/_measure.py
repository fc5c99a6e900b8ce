"""How long calls take beside each other, and how much memory one holds at its peak."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def median_seconds(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median time of each call, taken in turns so that a busy moment of the machine meets all of them.

    Args:
        calls: what to time, by name; each runs once beforehand, untimed.
        rounds: how many times each is timed.
        clock: `time.thread_time` counts this thread's work alone, `time.perf_counter` what a user waits for.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: float(torch.tensor(values, dtype=torch.float64).quantile(0.5)) for name, values in times.items()}


def peak_bytes(call: Callable[[], Sequence[Tensor]]) -> int:
    """Most bytes that torch's CPU allocator holds at once during `call`, without the tensors that it returns.

    Every allocation counts, temporaries inside operators too: the profiler reports each with its address. What stood
    before the call does not count, and what a library allocates past torch (NumPy, BLAS workspaces) is not seen.

    >>> peak_bytes(lambda: [torch.ones(1000).exp() + 1])
    8000
    """
    with profiled() as profile:
        kept = call()
    found = allocations(profile.kineto_results)
    memory = [(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size) for event in found]
    memory.sort(key=lambda event: event[0])
    # An address is used again once it is free: what is kept is the last allocation there.
    last = {address: i for i, (_, address, size) in enumerate(memory) if size > 0}
    result = {last.get(tensor.untyped_storage().data_ptr(), -1) for tensor in kept}
    live: dict[int, int] = {}
    total = peak = 0
    for i, (_, address, size) in enumerate(memory):
        total -= live.pop(address, 0)
        if size > 0 and i not in result:
            live[address] = size
            total += size
        peak = max(peak, total)
    return peak


def allocations(results: Any) -> Iterator[Any]:
    """The profiler's events of allocations, and of what is freed."""
    return (event for event in events(results) if event.name == "[memory]")


def events(results: Any) -> Iterator[Any]:
    """All events of the profiler, wherever they hang in its tree."""
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        yield event


@contextmanager
def profiled() -> Iterator[Any]:
    """Torch's profiler, with memory; without the line that its native code writes to file descriptor 2 at both ends."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield profile
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
