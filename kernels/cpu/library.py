"""The C library for this machine, loaded by ctypes."""

import ctypes
import mmap
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# bytes of two large pages
_LARGE = 2**22

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def level() -> str:
    """The highest level of CPU whose instructions this machine has, according to torch."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "aarch64"
    levels = {"AVX512": "x86_64_v4", "AVX2": "x86_64_v3"}
    return levels.get(torch.backends.cpu.get_cpu_capability(), "x86_64_v2")


@cache
def load(level: str) -> ctypes.CDLL:
    """The library of a level, whether this machine has its instructions or not."""
    file = Path(__file__).with_name(f"logchain-{level}{SUFFIX}")
    if not file.is_file():
        raise ImportError(
            f"{file.name}: expected next to {Path(__file__).name}, got nothing; in a checkout, compile it by: "
            "pip install setuptools ziglang && python kernels/cpu/build.py"
        )
    return ctypes.CDLL(str(file))


def library() -> ctypes.CDLL:
    """The library that this machine computes with."""
    return load(level())


def fields(names: str) -> list[tuple[str, Any]]:
    """The fields of a struct of integers and, with a star before their names, of pointers."""
    return [(name.lstrip("*"), ctypes.c_void_p if name.startswith("*") else ctypes.c_int64) for name in names.split()]


def struct(names: str) -> Any:
    """A struct of C with these `fields`."""
    return type("Struct", (ctypes.Structure,), {"_fields_": fields(names)})


@cache
def _advise() -> Any:
    return ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same new tensor, its memory backed by large pages if both exist, since their first touch is faster."""
    if tensor.nbytes >= _LARGE and (advise := _advise()) is not None:
        storage = tensor.untyped_storage()
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = storage.data_ptr() + storage.nbytes() - begin
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor
