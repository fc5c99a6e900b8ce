"""How long calls take beside each other, on how many threads."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Where torch computes on so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_seconds(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median time of each call, taken in turns so that a busy moment of the machine meets all of them.

    Args:
        calls: what to time, by name; each runs once beforehand, untimed.
        rounds: how many times each is timed.
        clock: `time.thread_time` counts this thread's work alone, `time.perf_counter` what a user waits for.
    """
    return {name: statistics.median(times) for name, times in seconds_in_turns(calls, rounds, clock).items()}


def seconds_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The times of each call, round by round, after one that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times
