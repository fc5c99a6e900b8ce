"""Estimates of what our kernels take on an H100, from their machine code: `python -m tests.benchmarks gpu-predict`.

Nothing here is measured, and nothing needs a GPU. A kernel is compiled for sm_90 as its launcher would launch it, and
the instructions of a step, its outermost loop around the hottest one, are turned into clocks by `ASSUMED`:

    step = waiting + message + max(issue, tensor, MUFU, shared, L2)   time = rounds (steps step + once) / clock + launch

or the time that the tensors take through memory, where that is longer. `waiting` is for the programs that a step meets,
less the instructions between a program's arrival and its wait; `message` a load that all else depends on, and
barriers; `once` all instructions outside of the loop. The others are clocks of one multiprocessor for all programs that
it has at a time; programs beyond those are another round. What a mask leaves out of tiles is not loaded, see `Turns`.

Rows of workloads that are no longer among `workloads` stay as they are: what was before, at their commit.

To be set right by the first measured row: what a step waits for may hide what is counted beside it, and the reverse.
"""

import math
import os
import re
from collections.abc import Callable
from functools import partial
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


_SHAPE = r"(HGMMA|DMMA)\.(\d+)x(\d+)x(\d+)"


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
    steps: float
    turns: int
    instructions_a_step: int
    resident: int
    rounds: float
    issue_clocks: float
    tensor_clocks: float
    mufu_clocks: float
    shared_clocks: float
    l2_clocks: float
    waiting_clocks: float
    message_clocks: float
    step_clocks: float
    once_clocks: float
    memory_us: float
    estimate_us: float | None
    assumed: str
    status: str = "estimate, not measured"
    versions: str = ""
    date: str = ""
    commit: str = ""


class Turns(NamedTuple):
    """How often a program goes through a kernel's outermost loop, and each time through the hottest one in it.

    `loads`: how many loads of a step wait for each other and for what the last step stored. `tiles`: the bytes that a
    program loads in a step as parts of tiles, if its tiles are larger. No steps: the kernel returns at once, as where
    nothing is to be done again.
    """

    steps: float
    inner: int = 1
    loads: int = 0
    tiles: float = 0.0


Modelled = dict[str, Turns | Callable[[dict], Turns]]


def workloads() -> dict[str, tuple[list[Callable[[], None]], Modelled]]:
    """By name: calls, and how kernels turn, which may depend on their constexprs.

    A kernel that is not among these, and has no product, takes as long as its tensors take through memory.
    """
    from logchain.kernels.gpu import chain_own, chain_wide
    from tests.kernels.gpu import calls

    v, m = 40, 500
    wide = lambda known: Turns(v - 1, -(-known["L"].c // known["L"].depth), 1)  # noqa: E731
    meeting: Modelled = {"chain_wide_step": wide}

    def part(c: int, parts: int, own: int) -> Turns:
        """Steps that load a part of a matrix, whole messages, and so many tiles of the part's columns."""
        return Turns(v - 1, 1, 1, 4 * (c * c / parts + 16 * c + own * 16 * c / parts))

    def counts(known: dict) -> Turns:
        c, terms = known["C"], known["BLOCK_M"]
        return Turns(-(-m // terms), 1, 0, 4 * terms * sum(c / -(-c // known[f"BLOCK_{axis}"]) for axis in "KJ"))

    meeting["chain_forward_forward"] = lambda known: part(known["C"], known["PARTS"], 1)
    meeting["chain_backward_backward"] = lambda known: part(known["FORM"].c, known["FORM"].parts, 2)
    meeting["chain_counts_product"] = counts
    meeting |= {"chain_wide_first": Turns(0), "chain_wide_last": Turns(0)}  # which read and write one step
    # which find nothing to do
    meeting |= dict.fromkeys(["chain_exact_forward", "chain_exact_backward", "chain_exact_counts_counts"], Turns(0))
    found = {}
    for c in (64, 200, 256):
        found[f"n=500 v=40 c={c}, forward"] = [partial(calls.log_norm, v, m, c)], meeting
    found["n=500 v=40 c=200, forward, backward and counts"] = [partial(calls.gradients, v, m, 200)], meeting
    for c in (512, 1024):
        found[f"n=500 v=40 c={c}, forward"] = [partial(calls.forward, chain_wide, v, m, c)], meeting
    own: Modelled = {"own_forward_forward": Turns(v - 1)}
    found["n=500 v=40 c=64, own matrices, forward"] = [partial(calls.forward, chain_own, v, 1, 64, g=m)], own
    # 16 segments a multiprocessor; products of 46 segments and of 46 groups follow, by few programs
    long: Modelled = {"chain_long_long": Turns(48 + (46 + 46) / 4)}
    found["n=1 v=100,000 c=16, forward"] = [partial(calls.long, 100_000, 1, 16, 16 * 132)], long
    for c, n in ((128, 1024), (256, 512), (512, 128)):
        product: Modelled = {"log_matmul_product": lambda known, c=c: Turns(-(-c // known["TILE"].block_k))}
        product["log_matmul_redo"] = Turns(0)
        found[f"log_matmul {n} x c={c}"] = [partial(calls.matmul, n, c)], product
        found[f"level of a tree, {n} x c={c}"] = [partial(calls.level, n, c)], product
    return found


def predict(workload: str, case, report, turns: Turns | None) -> Predicted:
    """The row of a launch."""
    of = ASSUMED
    grid = math.prod(case.grid)
    registers = -(-report.registers // 8) * 8 * 32 * report.warps
    fits = min(65536 // registers, 232_448 // max(1, report.shared + 1024), 64 // report.warps)
    places = int(of["multiprocessors"]) * fits
    resident = -(-min(grid, places) // int(of["multiprocessors"]))
    # where the last round is not full, its programs have more of a multiprocessor
    rounds = -(-grid // int(of["multiprocessors"])) / resident

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
    names = report.loops[0] if report.loops else {}
    tensor = count(r"HMMA\.1688") * of["HMMA.1688 a quarter, clocks"] * threads / 4
    for kind, *sizes in {re.match(_SHAPE, name).groups() for name in names if re.match(_SHAPE, name)}:
        rate = "wgmma TF32, FMA a clock" if kind == "HGMMA" else "DMMA, FMA a clock"
        together = 4 if kind == "HGMMA" else 1  # warps of one product
        products = count(rf"{kind}\.{'x'.join(sizes)}\b") * threads / together
        tensor += products * math.prod(map(int, sizes)) / of[rate]
    issue = count("") * threads / of["issue a clock"]
    mufu = count("MUFU") * 32 * threads / of["MUFU a clock"]
    shared = moved(r"(?:LDSM?|STSM?|LDGSTS)\b") * threads / of["shared memory, bytes a clock"]
    loaded = moved(r"(?:LDG|LDGSTS)\b") * threads
    if turns and turns.tiles:
        loaded = turns.tiles * resident + moved(r"(?:LDG|LDGSTS)\b(?!.*\.128)") * threads
    everywhere = loaded * min(grid, places) / resident / of["L2, bytes a clock"]
    l2 = max(loaded / of["L2 to a multiprocessor, bytes a clock"], everywhere)

    meets = report.before > 0
    before = report.before * threads / of["issue a clock"] if meets else 0.0
    waiting = max(0.0, of["meeting, clocks"] - before) if meets else 0.0
    message = BARRIER * report.count(-1, r"BAR\.SYNC") + of["load from L2, clocks"] if turns and turns.loads else 0.0
    step = waiting + message + max(issue, tensor, mufu, shared, l2)
    once = (report.instructions - report.count(-1)) * threads / of["issue a clock"]
    memory = case.bytes / of["memory, TB/s"] / 1e6
    estimate = None
    if turns is not None:
        clocks = rounds * (turns.steps * step + once) if turns.steps else 0.0
        estimate = max(memory if turns.steps else 0.0, clocks / of["clock, GHz"] / 1e3) + of["launch, us"]
    elif not report.tensor:
        estimate = memory + of["launch, us"]
    return Predicted(
        workload, case.name.split()[0], grid, report.warps, report.registers, report.spills, report.in_loops,
        report.shared, turns.steps if turns else 0, turns.inner if turns else 0, round(count("")), resident, rounds,
        issue, tensor, mufu, shared, l2, waiting, message, step, once, memory, estimate,
        "; ".join(f"{name} {value:g}" for name, value in of.items()) if turns else "memory and launch alone",
    )  # fmt: skip


def main() -> None:
    """Compile, estimate, and write the results file."""
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
    import triton

    from tests.kernels.gpu.compiled import Report, compile_case
    from tests.kernels.gpu.recorded import recorded

    place = results.machine()
    labels = {"versions": f"triton {triton.__version__}, {TARGET}", "date": place["date"], "commit": place["commit"]}
    known = workloads()
    rows: list[Predicted] = []
    reports: dict[tuple, Report] = {}
    for workload, (made, modelled) in known.items():
        for case in (case for call in made for case in recorded(TARGET, "", call)):
            key = (case.kernel, *map(str, (case.arguments, case.constants, case.divisible, case.warps)))
            if key not in reports:
                reports[key] = compile_case(case, TARGET)
            if reports[key].error:
                raise RuntimeError(f"{workload}, {case.name}: {reports[key].error}")
            turns = modelled.get(case.name.split()[0])
            turns = turns(case.constants) if callable(turns) else turns
            row = predict(workload, case, reports[key], turns)._replace(**labels)
            rows.append(row)
            said = "not modelled" if row.estimate_us is None else f"{row.estimate_us:.1f} us (estimate)"
            print(f"{workload:46} {row.kernel:26} {row.instructions_a_step:6} instructions a step  {said}", flush=True)
    before = [row for row in results.read(results.PREDICTED, Predicted) if row.workload not in known]
    results.write([*before, *rows], results.PREDICTED)
    for workload in known:
        parts = [row.estimate_us for row in rows if row.workload == workload]
        if None not in parts:
            print(f"{workload}: {sum(parts):.0f} us in all, an estimate")
