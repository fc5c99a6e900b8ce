"""The C library in a program of its own, for a CPU that this machine may only emulate: `tests/c/program.c`."""

import ctypes
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logchain.kernels.cpu import build


def compile_program(target: build.Target, level: str, into: Path) -> list[str]:
    """The command that runs the program of a Linux target: under qemu where this machine is another one."""
    emulated = target != build.this_machine()
    qemu = shutil.which(f"qemu-{target.triple.partition('-')[0]}")
    if platform.system() != "Linux" or (emulated and not qemu):
        pytest.skip(f"no {target.triple} here: needs Linux, and qemu-user for another CPU")
    file = into / f"program-{level}"
    source = Path(__file__).parent / "c" / "program.c"
    units = build.compile_units(target, level, into)
    architecture = target.triple.partition("-")[0]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-musl", "-O2", "-static"]
    subprocess.run([*command, source, *units, "-o", file], cwd=into, check=True)
    return [qemu, str(file)] if emulated else [str(file)]


def offset_of(struct: Any, field: str) -> int:
    """The place of a field in a struct, or of a field of a struct in it."""
    name, _, part = field.partition(".")
    inner = dict(struct._fields_).get(name)
    return getattr(struct, name).offset + (offset_of(inner, part) if part else 0)


def run(
    command: list[str], name: str, argument: ctypes.Structure, buffers: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What the function of that name leaves in buffers, to which fields of its struct point, or parts of these."""
    where = [(offset_of(type(argument), field), array.nbytes) for field, array in buffers.items()]
    head = struct.pack("=64sqq", name.encode(), ctypes.sizeof(argument), len(buffers))
    sizes = b"".join(struct.pack("=qq", *pair) for pair in where)
    sent = head + sizes + bytes(argument) + b"".join(array.tobytes() for array in buffers.values())
    done = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=60)
    got, left = {}, done.stdout
    for field, array in buffers.items():
        got[field] = np.frombuffer(left[: array.nbytes], array.dtype).reshape(array.shape)
        left = left[array.nbytes :]
    assert not left
    return got
