"""Triton with a driver that launches nothing and a compiler that compiles nothing, so that it runs without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from logchain.kernels.gpu import held


class Driver:
    """Of two devices, which load and launch nothing."""

    device, stream = 0, 7
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream + 100 * device


class Compiled(held.CompiledKernel):
    """What was compiled, for which arguments, and its launches."""

    packed_metadata = "metadata"

    def __init__(self, source):
        self.source, self.launches = source, []

    def _init_handles(self):
        self.function = f"function {id(self)}"
        self._run = lambda *arguments: self.launches.append(arguments)

    _run, launch_metadata = None, lambda self, *_: "launch metadata"


@contextmanager
def compiled_here() -> Iterator[list[Compiled]]:
    """All that will be compiled, in order; `held` holds nothing."""
    found: list[Compiled] = []

    def compile(source, **_):
        found.append(Compiled(source))
        return found[-1]

    with (
        mock.patch.object(triton.compiler, "compile", compile),
        mock.patch.object(triton.runtime.driver, "_active", Driver()),
        mock.patch.object(held, "_held", {}),
    ):
        yield found
