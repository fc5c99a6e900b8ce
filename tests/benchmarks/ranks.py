"""One sequence on two ranks beside one process, a thread each; and what the cost model says of more ranks."""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import logchain
from logchain import distributed
from logchain.distributed.exchange import Exchange
from logchain.schedules import choose
from logchain.schedules.cost import constants
from logchain.schedules.cost_counts import SEQUENTIAL, Size
from logchain.schedules.ranks import Link, cuts
from tests.benchmarks import results
from tests.benchmarks.results import GRADIENTS, MODES, Row, machine
from tests.distributed.processes import Team

SIZES = (1_000_000, 16), (20_000, 64), (4000, 256), (400, 1024)

# chains of one matrix whose columns are sharded
COLUMNS = (30, 2048), (30, 4096)

# what two ranks should gain at least, with gradients: by wall time, and by the slower rank's CPU time
_WALL, _CPU = ">= 1.6", ">= 1.7"
_BARRED = (1_000_000, 16), (4000, 256)

# chains for the model, (n, v, c), and a link of a cluster
CHAINS = (1, 1_000_000, 4), (1, 1_000_000, 16), (1, 100_000, 64), (1, 100_000, 256), (64, 10_000, 256)
RANKS = tuple(2**power for power in range(1, 11))
CLUSTER = Link(latency=5e-6, bandwidth=1e10)


def timed(rank: int, v: int, c: int, mode: str, columns: bool, rounds: int) -> list[tuple[float, ...]]:
    """Wall and CPU seconds of one process and of this rank's part, variables or columns, round by round."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(v, c, generator=generator), torch.randn(1, c, c, generator=generator).softmax(-1)
    p0, gradients = torch.rand(c, generator=generator), mode == GRADIENTS
    size = c if columns else v
    some = slice(size * rank // 2, size * (rank + 1) // 2)
    part = bulk[..., some].contiguous() if columns else x[some].clone()
    x, bulk, p0, part = (operand.requires_grad_(gradients) for operand in (x, bulk, p0, part))

    def one() -> None:
        if rank == 0:
            value = logchain.product(x, bulk, p0, strategy="sequential")
            if gradients:
                torch.autograd.grad(value, (x, bulk, p0))

    def two() -> None:
        if columns:
            value = logchain.product(x, distributed.Columns(part), p0)
        else:
            value = distributed.product(part, bulk, p0)
        if gradients:
            torch.autograd.grad(value, (x, part, p0) if columns else (part, bulk, p0))

    found = []
    for _ in range(rounds + 1):
        row: tuple[float, ...] = ()
        for call in (one, two):
            dist.barrier()
            wall, used = time.perf_counter(), time.process_time()
            call()
            row += time.perf_counter() - wall, time.process_time() - used
        found.append(row)
    return found[1:]


def measured(team: Team, v: int, c: int, mode: str, columns: bool, rounds: int) -> list[Row]:
    """Times, and the ratios of minima of one process and of two ranks, of which the slower counts."""
    each = torch.tensor(team.values(timed, v, c, mode, columns, rounds), dtype=torch.float64)  # (rank, round, 4)
    wall, used, wall_of_two, used_of_two = each.amax(0).amin(0).tolist()
    case = f"v={v} c={c}, {'columns on ' if columns else ''}two ranks", "logchain", mode
    bars = (_WALL, _CPU) if mode == GRADIENTS and (v, c) in _BARRED and not columns else ("", "")
    return [
        Row(*case, "time of one process", wall * 1e3, "ms"),
        Row(*case, "time of two ranks", wall_of_two * 1e3, "ms"),
        Row(*case, "one process's time over that of two ranks", wall / wall_of_two, "x", bars[0]),
        Row(*case, "one process's CPU time over that of the slower rank", used / used_of_two, "x", bars[1]),
    ]


def exchanged(rank: int, rounds: int) -> float:
    """The least seconds in which two ranks gather a message of 16 states."""
    exchange, message = Exchange(None), torch.zeros(18, dtype=torch.float64)
    found = []
    for _ in range(10 * rounds):
        begin = time.perf_counter()
        exchange.gather((18,), lambda: message)
        found.append(time.perf_counter() - begin)
    return min(found)


def predicted(n: int, v: int, c: int, ranks: int) -> Row:
    """The speed-up of the fastest way to cut a chain, with gradients, over one process with one thread."""
    size = Size.of((n, v, c), (1, c, c), False, False, False, True)
    costs = constants("cpu", 1)
    sizes = [v * (rank + 1) // ranks - v * rank // ranks for rank in range(ranks)]
    best = cuts(size, sizes, costs, CLUSTER)[0]
    alone = choose.seconds(size, SEQUENTIAL, costs)
    return Row(f"n={n} v={v} c={c}", best.name, f"{ranks} ranks", "predicted speed-up", alone / best.seconds, "x")


def main(
    sizes: Sequence[tuple[int, int]] = SIZES, columns: Sequence[tuple[int, int]] = COLUMNS, rounds: int = 15
) -> None:
    """Measure, and write the results file; a minute."""
    cases = [(*size, mode, kind) for kind in (False, True) for size in (columns if kind else sizes) for mode in MODES]
    with tempfile.TemporaryDirectory() as folder, Team(2, Path(folder), timeout=60) as team:
        rows = [row for case in cases for row in measured(team, *case, rounds)]
        seconds = max(team.values(exchanged, rounds))
        rows.append(Row("18 numbers, two ranks", "logchain", "gather", "time of an exchange", seconds * 1e3, "ms"))
    rows += [predicted(*chain, ranks) for chain in CHAINS for ranks in RANKS]
    results.write([row._replace(**machine()) for row in rows], results.RANKS)
