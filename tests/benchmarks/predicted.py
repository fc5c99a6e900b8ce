"""Estimates of what our kernels take on an H100, from their machine code: `python -m tests.benchmarks gpu-predict`.

Nothing here is measured, and nothing needs a GPU. A kernel is compiled for sm_90 as its launcher would launch it, and
the instructions of a step, its outermost loop around the hottest one, are turned into clocks by `ASSUMED`:

    step = waiting + message + max(issue, tensor, MUFU, shared, L2)          time = steps rounds step / clock + launch

or the time that the tensors take through memory, where that is longer. `waiting` is for the programs that a step meets,
less the instructions of the step before that; `message` a load that all else depends on, and barriers. The others are
clocks of one multiprocessor for all programs that it has at a time; programs beyond those are another round.

Rows of workloads that are no longer among `workloads` stay as they are: what was before, at their commit.

To be set right by the first measured row: what a step waits for may hide what is counted beside it, and the reverse.
"""

import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from tests.benchmarks import results

TARGET = "sm_90"
# what the estimates rest on; the first four are the first to measure
ASSUMED = {
    "meeting, clocks": 1050.0,  # membar 500, red 200, poll 350
    "HMMA.1688 a quarter, clocks": 6.5,  # 62 % of the rate of wgmma
    "L2, bytes a clock": 3130.0,  # 5.5 TB/s
    "load from L2, clocks": 300.0,
    "clock, GHz": 1.755,
    "multiprocessors": 132.0,
    "issue a clock": 4.0,
    "wgmma TF32, FMA a clock": 1024.0,
    "DMMA, FMA a clock": 128.0,
    "MUFU a clock": 16.0,
    "shared memory, bytes a clock": 128.0,
    "L2 to a multiprocessor, bytes a clock": 64.0,
    "memory, TB/s": 3.0,
    "launch, us": 1.1,  # the node of a graph
}
BARRIER = 30.0  # clocks in which no warp of a program issues


class Predicted(NamedTuple):
    """One launch; clocks are those of a step, empty where no model of the kernel's turns was written."""

    workload: str
    kernel: str
    grid: int
    warps: int
    registers: int
    spills: int
    spills_in_loops: int
    shared_bytes: int
    steps: int
    turns: int
    instructions_a_step: int
    resident: int
    rounds: int
    issue_clocks: float
    tensor_clocks: float
    mufu_clocks: float
    shared_clocks: float
    l2_clocks: float
    waiting_clocks: float
    message_clocks: float
    step_clocks: float
    memory_us: float
    estimate_us: float | None
    assumed: str
    status: str = "estimate, not measured"
    versions: str = ""
    date: str = ""
    commit: str = ""


class Turns(NamedTuple):
    """How often a program goes through a kernel's outermost loop, and each time through the hottest one in it."""

    steps: int
    inner: int = 1


def steps(v: int) -> Callable[..., Turns]:
    """Of kernels that go through a chain's transitions."""
    return lambda constants, grid: Turns(v - 1)


def workloads() -> dict[str, tuple[Callable[[], list], dict[str, Callable[..., Turns]]]]:
    """By name: the cases of a call's launches, and of each kernel that is modelled how it turns.

    A kernel that is not among these is counted, and estimated from the bytes of its tensors alone.
    """
    from tests.kernels.gpu.compile_cases.chain_forward import backward, forward

    def chain(v: int, m: int, c: int) -> tuple[Callable[[], list], dict[str, Callable[..., Turns]]]:
        turns = {"chain_forward_forward": steps(v)}
        return lambda: forward(TARGET, v, m, c), turns

    def gradients(v: int, m: int, c: int) -> tuple[Callable[[], list], dict[str, Callable[..., Turns]]]:
        turns = {"chain_forward_forward": steps(v), "chain_backward_backward": steps(v)}
        return lambda: [*forward(TARGET, v, m, c), *backward(TARGET, v, m, c)], turns

    return {
        "n=500 v=40 c=64, forward": chain(40, 500, 64),
        "n=500 v=40 c=200, forward": chain(40, 500, 200),
        "n=500 v=40 c=256, forward": chain(40, 500, 256),
        "n=500 v=40 c=200, forward and backward": gradients(40, 500, 200),
    }


def predict(workload: str, case, report, turns: Turns | None) -> Predicted:
    """The row of a launch."""
    of = ASSUMED
    grid = math.prod(case.grid)
    registers = -(-report.registers // 8) * 8 * 32 * report.warps
    fits = min(65536 // registers, 232_448 // max(1, report.shared + 1024), 64 // report.warps)
    places = int(of["multiprocessors"]) * fits
    resident = -(-min(grid, places) // int(of["multiprocessors"]))
    rounds = -(-grid // places)

    def count(pattern: str) -> float:
        """Instructions of a warp and step, those of the hottest loop as often as it turns."""
        outer, inner = report.count(-1, pattern), report.count(0, pattern)
        return outer + (inner * (turns.inner - 1) if turns and len(report.loops) > 1 else 0)

    def moved(pattern: str) -> float:
        """The bytes that a warp moves in a step."""
        wide = rf"{pattern}(?=.*\.128|.*\.M88\.4)", rf"{pattern}(?=.*\.64)"
        sixteen, eight = map(count, wide)
        return 32 * (16 * sixteen + 8 * eight + 4 * (count(pattern) - sixteen - eight))

    threads = report.warps * resident  # warps of a multiprocessor
    tensor = count(r"HMMA\.1688") * of["HMMA.1688 a quarter, clocks"] * threads / 4
    tensor += count(r"DMMA\.16") * 16 * 8 * _depth(report) / of["DMMA, FMA a clock"] * threads
    for width in (8, 16, 32, 64, 128, 256):  # four warps multiply 64 rows
        found = count(rf"HGMMA\.64x{width}x8\b")
        tensor += found * 64 * width * 8 / of["wgmma TF32, FMA a clock"] * threads / 4
    issue = count("") * threads / of["issue a clock"]
    mufu = count("MUFU") * 32 * threads / of["MUFU a clock"]
    shared = moved(r"(?:LDSM?|STSM?|LDGSTS)\b") * threads / of["shared memory, bytes a clock"]
    loaded = moved(r"(?:LDG|LDGSTS)\b") * threads
    together = loaded * min(grid, places) / resident / of["L2, bytes a clock"]
    l2 = max(loaded / of["L2 to a multiprocessor, bytes a clock"], together)

    meets = report.before > 0
    before = report.before * threads / of["issue a clock"] if meets else 0.0
    waiting = max(0.0, of["meeting, clocks"] - before) if meets else 0.0
    message = of["load from L2, clocks"] + BARRIER * report.count(-1, r"BAR\.SYNC") if turns else 0.0
    step = waiting + message + max(issue, tensor, mufu, shared, l2)
    memory = case.bytes / of["memory, TB/s"] / 1e6
    estimate = None
    if turns is not None:
        estimate = max(memory, turns.steps * rounds * step / of["clock, GHz"] / 1e3) + of["launch, us"]
    elif report.loops or not report.tensor:
        estimate = None if report.tensor else memory + of["launch, us"]
    return Predicted(
        workload, case.name.split()[0], grid, report.warps, report.registers, report.spills, report.in_loops,
        report.shared, turns.steps if turns else 0, turns.inner if turns else 0, round(count("")), resident, rounds,
        issue, tensor, mufu, shared, l2, waiting, message, step, memory, estimate,
        "; ".join(f"{name} {value:g}" for name, value in of.items()) if turns else "memory and launch alone",
    )  # fmt: skip


def _depth(report) -> int:
    """The terms that one DMMA adds."""
    found = [name for name in report.loops[0] if name.startswith("DMMA.16")] if report.loops else []
    return int(re.match(r"DMMA\.168(\d+)", found[0])[1]) if found else 0


def main() -> None:
    """Compile, estimate, and write the results file."""
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
    import triton

    from tests.kernels.gpu.compiled import compile_case

    place = results.machine()
    labels = {"versions": f"triton {triton.__version__}, {TARGET}", "date": place["date"], "commit": place["commit"]}
    known = workloads()
    rows, reports = [], {}
    for workload, (cases, modelled) in known.items():
        for case in cases():
            key = (case.kernel, *map(str, (case.arguments, case.constants, case.warps)))
            if key not in reports:
                reports[key] = compile_case(case, TARGET)
            report = reports[key]
            if report.error:
                raise RuntimeError(f"{workload}, {case.name}: {report.error}")
            turns = modelled.get(case.name.split()[0])
            rows.append(predict(workload, case, report, turns and turns(case.constants, case.grid))._replace(**labels))
            row = rows[-1]
            said = "not modelled" if row.estimate_us is None else f"{row.estimate_us:.1f} us (estimate)"
            print(f"{workload:40} {row.kernel:28} {row.instructions_a_step:6} instructions a step  {said}", flush=True)
    before = [row for row in results.read(results.PREDICTED, Predicted) if row.workload not in known]
    results.write([*before, *rows], results.PREDICTED)
    for workload in known:
        parts = [row.estimate_us for row in rows if row.workload == workload]
        if None not in parts:
            print(f"{workload}: {sum(parts):.0f} us in all, an estimate")
