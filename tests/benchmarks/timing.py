"""How long calls take beside each other."""

import statistics
import time
from collections.abc import Callable, Mapping


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
    return {name: statistics.median(values) for name, values in times.items()}
