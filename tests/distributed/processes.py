"""Processes that form one gloo group over loopback, and run functions of tests; nothing waits forever."""

import datetime
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

# the timeout of the group, and of a task, in seconds; not reached unless a rank is missing
GROUP, TASK = 30, 100


class Team(ExitStack):
    """A group of processes, one for each rank, that runs one task after the other."""

    def __init__(self, size: int, folder: Path, timeout: float = GROUP) -> None:
        super().__init__()
        context, self.broken = multiprocessing.get_context("forkserver"), False
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
        joined = [(rank, size, str(folder / "store"), timeout) for rank in range(size)]
        self._ranks = [self.enter_context(ProcessPoolExecutor(1, context, _join, args)) for args in joined]
        self._processes = [begun.result(TASK) for begun in [rank.submit(os.getpid) for rank in self._ranks]]

    def values(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank; raises what one of them raises."""
        return [task.result() for task in self._run(function, *args)]

    def errors(self, function: Callable[..., Any], *args: Any) -> list[BaseException | None]:
        """What `function(rank, *args)` raises on each rank: `BrokenProcessPool` if its process has ended."""
        return [task.exception() for task in self._run(function, *args)]

    def _run(self, function: Callable[..., Any], *args: Any) -> list[Future[Any]]:
        """A function of a module, whose results can be pickled, on each rank."""
        # whoever is still importing its module would keep the others waiting: all begin together
        for imported in [rank.submit(callable, function) for rank in self._ranks]:
            imported.result(TASK)
        tasks = [process.submit(_call, function, rank, args) for rank, process in enumerate(self._ranks)]
        for late in wait(tasks, TASK).not_done:
            os.kill(self._processes[tasks.index(late)], signal.SIGKILL)
        # a process has ended, or a collective has failed on some ranks
        errors = [task.exception() for task in tasks]
        self.broken = len(set(map(str, errors))) > 1 and any(isinstance(error, RuntimeError) for error in errors)
        return tasks


def _join(rank: int, size: int, path: str, timeout: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store, patience = dist.FileStore(path, size), datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)


def _call(function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, function(rank, *args))
