"""Loops that numba compiles for the CPU, on threads of Python's that hold no lock.

The pools of numba's own parallel loops end a process that has been forked, as those of a data loader are.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2s
from pathlib import Path
from typing import Any

import numba

# for functions that compiled ones alone call: what Python would call them by takes an eighth of a first call's time
INNER: Any = {"fastmath": {"contract"}, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
called, inlined = numba.njit(**INNER), numba.njit(forceinline=True, **INNER)


def compiled(function: Callable[..., Any], signature: Any = None) -> Callable[..., Any]:
    """Machine code, from numba's cache on disk where there is a folder for one.

    A product and a sum may become one operation, nothing else about the arithmetic is left to the compiler. The cache
    goes by a function's own file and name; what it calls may lie in others, and so the name tells their contents.
    """
    function.__qualname__ += f"_{_contents()}"
    options: Any = {"nogil": True, "fastmath": {"contract"}}
    found: Callable[..., Any]
    try:
        found = numba.njit(signature, cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written to
        found = numba.njit(signature, **options)(function)
    return found


@cache
def _contents() -> str:
    """A digest of all files with compiled code."""
    here = Path(__file__).parent
    files = sorted(here.glob("native*.py"))
    return blake2s(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of about the same size."""
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


def spread(function: Callable[..., Any], ranges: Sequence[tuple[Any, ...]], *args: Any) -> list[Any]:
    """What a compiled function returns for each range, run on a thread each; the first on this one."""
    if len(ranges) == 1:
        return [function(*ranges[0], *args)]
    with ThreadPoolExecutor(len(ranges) - 1) as pool:
        others = [pool.submit(function, *some, *args) for some in ranges[1:]]
        first = function(*ranges[0], *args)
    return [first, *(other.result() for other in others)]
