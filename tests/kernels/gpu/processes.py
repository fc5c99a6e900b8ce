"""Programs of one launch that wait for each other, in the interpreter: each is a process, on shared memory.

The interpreter runs programs one after the other, and one that waits for a later one would wait for ever. Tickets make
it simple: every process launches a grid of one program.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def shared(tensors: Iterable[Tensor | None]) -> None:
    """Move tensors into memory that processes share."""
    for tensor in tensors:
        if tensor is not None:
            tensor.share_memory_()


def together(count: int, launch: Callable[[], object], patience: float = 120.0) -> None:
    """Call `launch` in so many processes at a time; raise if one of them fails or they wait for each other."""
    children = [_forked(launch) for _ in range(count)]
    end, failed = time.monotonic() + patience, False
    while children and not failed and time.monotonic() < end:
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.remove(child)
                failed |= status != 0
        time.sleep(0.005)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if failed or children:
        raise RuntimeError("a program failed" if failed else "programs wait for each other")


def _forked(launch: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        launch()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
