"""Calls of the C library on several threads: on torch's own, which may still be awake, or otherwise on Python's."""

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from .library import library, struct

# the process with torch's threads; a fork of it has none
_PROCESS = os.getpid()


# `Calls` of c/team.h
Calls = struct("*function *arguments size count *results taken")


@cache
def _parallel() -> Any:
    """The function that runs a `parallel` directive in the OpenMP library that torch has loaded, or None."""
    if not sys.platform.startswith("linux"):
        return None
    torch_cpu = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    parallel = getattr(ctypes.CDLL(str(torch_cpu)), "GOMP_parallel", None) if torch_cpu.is_file() else None
    if parallel is not None:
        parallel.restype, parallel.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel


def calls(function: Any, arguments: "ctypes.Array[Any]") -> Sequence[int]:
    """The integers that a function of the library returns for an array of arguments, on up to torch's threads."""
    count = len(arguments)
    results = (ctypes.c_int64 * count)()
    loop, first, size = ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(arguments), ctypes.sizeof(arguments)
    shared = Calls(loop, first, size // count, count, ctypes.addressof(results))
    share, data = library().logchain_share, ctypes.byref(shared)
    if os.getpid() == _PROCESS and (parallel := _parallel()) is not None:
        # a team of another size than torch's would end threads, which torch would have to start again
        parallel(share, data, torch.get_num_threads(), 0)
        return list(results)
    threads = [Thread(target=share, args=(data,)) for _ in range(1, count)]
    for thread in threads:
        thread.start()
    share(data)
    for thread in threads:
        thread.join()
    return list(results)
