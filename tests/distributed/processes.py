"""Processes that form one gloo group over loopback, and run functions of tests; nothing waits forever."""

import datetime
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

# the timeout of the group, and of a task, in seconds; not reached unless a rank is missing
GROUP, TASK = 30, 100


class Outcome(NamedTuple):
    """What a rank did: it returned a `value`, raised an `error`, or its process ended with an `exit` code."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit: int | None = None


class Team:
    """A group of processes, one for each rank, that runs one task after the other; a context manager."""

    def __init__(self, size: int, folder: Path, timeout: float = GROUP) -> None:
        context, store = _context(), folder / "store"
        self.size, self.broken, self._pipes, self._processes = size, False, [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, str(store), timeout), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        begun = self._received(TASK)
        assert not self.broken, begun

    def run(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """What `function(rank, *args)` does on each rank; a function of a module, whose results can be pickled."""
        # whoever is still importing would keep the others waiting: all begin together
        for each in (function, args), None:
            for pipe in self._pipes:
                pipe.send(each)
            outcomes = self._received(TASK)
            if self.broken:
                break
        return outcomes

    def values(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank; raises if one raises or dies."""
        outcomes = self.run(function, *args)
        for rank, outcome in enumerate(outcomes):
            assert outcome.exit is None and outcome.error is None, f"rank {rank}: {outcome.exit} {outcome.trace}"
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self, seconds: float) -> list[Outcome]:
        """An outcome of each rank; a team is broken if a process has died, or a collective has failed on some ranks."""
        until = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        waiting: dict[Connection, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        outcomes = [Outcome()] * self.size
        while waiting:
            ready = wait(list(waiting), max(0.0, (until - datetime.datetime.now()).total_seconds()))
            if not ready:
                self.broken = True
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {seconds} seconds")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(seconds)
                    outcomes[rank] = Outcome(exit=self._processes[rank].exitcode)
                self.broken |= outcomes[rank].exit is not None
        errors = {str(outcome.error) for outcome in outcomes}
        self.broken |= len(errors) > 1 and any(isinstance(outcome.error, RuntimeError) for outcome in outcomes)
        return outcomes


def _context() -> Any:
    """How processes start: on Linux as forks of a process that has imported torch, otherwise afresh."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
    return context


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    """Join the group, and run tasks until the pipe is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    pipe.send(Outcome())
    while True:
        try:
            function, args = pipe.recv()
            pipe.send(Outcome())
            pipe.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(tree_map_only(torch.Tensor, torch.Tensor.detach, function(rank, *args)))
        except Exception as error:
            outcome = Outcome(error=error, trace=traceback.format_exc())
        pipe.send(outcome)
