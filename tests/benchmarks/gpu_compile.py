"""Launches that compile: each kernel that tests and figures launch is put into Triton's cache, and nothing runs.

The launchers are called with CPU tensors, on a machine with a device or without one, and give Triton the arguments
that they would launch with; memory that kernels would have written is 0. One process compiles a kernel, the others go
on without it.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.gpu_shared import Line, Shared

# bytes of a figure's operands, of which several may not fit into a machine's memory
LARGE = 1e9


class Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass


def install(shared: Shared, target: str, processors: int, sources: str) -> None:
    """Change this process: kernels are compiled for a target like "sm_90", and tests do not stop at wrong numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from logchain import kernels as devices
    from logchain.kernels.gpu import launch

    cuda = target.startswith("sm_")
    triton.runtime.driver.set_active(
        Driver(GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64))
    )
    devices.on_gpu = lambda tensor: True
    # as `launch` has them on a device
    launch.chip = lambda like: "gfx942" if not cuda else "sm_90" if target[3:] in ("90", "100") else "sm_80"
    launch.processors = lambda like: processors
    for module, checks in ((torch.testing, ["close"]), (np.testing, ["array_equal", "allclose"])):
        for check in checks:
            setattr(module, f"assert_{check}", lambda *_, **__: None)
    for place, make in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(place, make, _zeroed(getattr(place, make)))
    compiling: list[tuple[str, str]] = []

    def is_taken(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton compiles where a hook says no."""
        name = f"{fn.module.rpartition('.')[2]}.{fn.name} {hashlib.sha256(key.encode()).hexdigest()[:8]}"
        if not shared.take(name):
            return True
        compiling.append((name, f"{compile['signature']} {compile['constants']} {compile['num_warps']} warps"))
        return False

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        start, outcome, text = time.monotonic(), "compiled", ""
        try:
            run(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            outcome, text = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"
        if compiling or text:
            name, arguments = compiling.pop() if compiling else (f"{self.__name__} before it was compiled", str(kwargs))
            text = f"{text} of {arguments}" if text else ""
            shared.tell(f"kernels-{target}", Line(name, outcome, time.monotonic() - start, text, sources))

    triton.knobs.runtime.jit_cache_hook = is_taken
    JITFunction.run = compile_only


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return make(*args, **kwargs).zero_()

    return zeros


def figures(folder: Path) -> Iterator[tuple[str, AbstractContextManager[None], Callable[[], tuple[str, str]]]]:
    """Every figure's name, its turn, and what launches its kernels."""
    from tests.benchmarks import gpu_figures

    for name, size, launch in gpu_figures.launched():
        turn = _turn(folder) if size > LARGE else contextlib.nullcontext()
        yield name, turn, functools.partial(_outcome, launch)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """For large figures: no more of them at a time than there is memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    slot = os.getpid() % max(1, int(memory / (40 * LARGE)))
    with (folder / f"large-{slot}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _outcome(launch: Callable[[str], Any]) -> tuple[str, str]:
    try:
        launch("cpu")
    except Exception as error:
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"
    return "passed", ""
