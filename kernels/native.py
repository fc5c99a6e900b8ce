"""Loops that numba compiles for the CPU, on threads of Python's that hold no lock.

The pools of numba's own parallel loops end a process that has been forked, as those of a data loader are.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba


def compiled(function: Callable[..., None], signature: Any = None) -> Callable[..., None]:
    """Machine code, from numba's cache on disk where there is a folder for one."""
    found: Callable[..., None]
    try:
        found = numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder that can be written to
        found = numba.njit(signature, nogil=True)(function)
    return found


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of about the same size."""
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


def spread(function: Callable[..., None], ranges: Sequence[tuple[int, ...]], *args: Any) -> None:
    """Run a compiled function on each range, on a thread each; the first on this one."""
    if len(ranges) == 1:
        function(*ranges[0], *args)
        return
    with ThreadPoolExecutor(len(ranges) - 1) as pool:
        others = [pool.submit(function, *some, *args) for some in ranges[1:]]
        function(*ranges[0], *args)
    for other in others:
        other.result()
