"""The one call for a machine with a GPU: compares every kernel with float64, then times all of them. JSON lines.

    python -m tests.benchmarks.gpu_day run --out DIR --minutes 6
    python -m tests.benchmarks.gpu_day dry --out DIR                tiny sizes in Triton's interpreter, on a CPU

It runs from the source tree with torch, Triton, numpy, scipy and pytest; the C library is not needed. Each group is a
process with its own time limit, so that a hang or a lost context ends that group alone. Probes run first, then
correctness groups side by side, then times alone. All rows are in DIR/rows.jsonl, and the last ones say what the times
decide. After a change, `--only GROUP...` reruns groups.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]

# seconds that a group may take: the first runs first, the last alone; those of the second line only if they are named
LIMITS = {
    "probe": 60, "shared": 110, "variants": 120, "separate": 110, "wide": 110, "flagged": 110, "paths": 100,
    "matmul": 110, "tree": 110, "long": 110, "public": 130, "times": 170,
}  # fmt: skip
HIDDEN = {"hang": 20, "wrong": 100}

# correctness groups side by side on a device, where they mostly compile; how much longer a dry run may take
SIDE_BY_SIDE, DRY_PATIENCE = 8, 10


# times, in a process of a device


def measure() -> None:
    """Rows of times: each call alone and in a CUDA graph, and what it is compared with."""
    from tests.kernels.gpu import device_checks as g

    if g.DRY:
        return
    for n, v, c, kind, dtype in (
        (500, 40, 200, g.SHARED, g.F32), (500, 40, 64, g.SHARED, g.F32), (500, 40, 512, g.SHARED, g.F32),
        (8, 128, 64, g.SEPARATE, g.F32), (32, 128, 64, g.SEPARATE, g.F32), (500, 40, 1024, g.SHARED, g.F32),
        (32, 512, 64, g.SHARED, g.F32), (2000, 40, 200, g.SHARED, g.F32), (256, 128, 64, g.SEPARATE, g.F32),
        (66, 12, 200, g.SEPARATE, g.F32), (500, 40, 64, g.SHARED, g.F64), (500, 40, 200, g.SHARED, g.F64),
    ):  # fmt: skip
        measure_chain(n, v, c, kind, dtype)
    measure_long()
    measure_products()
    measure_paths()
    measure_counts()
    measure_steps()


def time_row(case: str, call: Any, others: dict[str, Any] | None = None, plain: Any = None) -> None:
    """Milliseconds of a call, and in graphs also of `others`, which may be pairs of a context and a call."""
    from tests.kernels.gpu import device_checks as g

    row: dict[str, Any] = {"group": "times", "case": case, "ok": True}
    try:
        call()
        row["ms"] = round(g.timed(call), 4)
        row["graph_ms"] = round(g.timed(g.graphed(call)), 4)
    except Exception as problem:
        row |= g.failure(problem)
    for name, other in (others or {}).items():
        context, function = other if isinstance(other, tuple) else (contextlib.nullcontext(), other)
        try:
            with context:
                row[f"{name}_ms"] = round(g.timed(g.graphed(function)), 4)
        except Exception as problem:
            row[f"{name}_problem"] = str(problem)[:200]
    if plain is not None:
        try:
            with g.kernels.use("plain"):
                row["plain_ms"] = round(g.timed(plain, 0.0), 3)
        except Exception as problem:
            row["plain_problem"] = str(problem)[:200]
    g.say(**row)
    torch.cuda.empty_cache()


def recursion(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The sum of log-partitions by a scaled recursion in the operands' dtype, as one would write it in torch."""
    first, *others = x.exp().unbind(1)
    message, total = p0 * first, 0.0
    for emission, matrix in zip(others, bulk.unbind(-3), strict=True):
        product = message @ matrix if bulk.dim() == 3 else (message[:, None] @ matrix)[:, 0]
        message = product * emission
        scale = message.sum(-1, keepdim=True)
        message, total = message / scale, total + scale.log()
    return (message.sum(-1).log() + total[:, 0]).sum()


def measure_chain(n: int, v: int, c: int, kind: str, dtype: torch.dtype) -> None:
    """The public product, forward and with gradients, by both schedules, and step by step."""
    from tests.kernels.gpu import device_checks as g

    leaves = g.public_operands(n, v, c, kind, dtype)
    values = [leaf.detach() for leaf in leaves]
    tiles = g.chains._tiles
    for what, operands in (("forward", values), ("with gradients", leaves)):
        call = partial(g.product, operands)
        others: dict[str, Any] = {"recursion": partial(torch_gradients, operands)}
        if c <= 256 and n <= 500:
            others |= {"one_way": (g.schedule(False), call), "halved": (g.schedule(True), call)}
        if what == "forward" and (n, dtype) == (500, g.F32):
            others["stepwise"] = (patch.object(g.chains, "_WIDE", 1), call)
            if c == 64:  # messages through memory instead of registers
                block = {"K": 32, "num_stages": 3}
                through_memory = lambda *size, block=block: tiles(*size) | block  # noqa: E731
                others["memory"] = (patch.object(g.chains, "_tiles", through_memory), call)
        case = f"n={n} v={v} c={c} {kind} {'float64 ' if dtype == g.F64 else ''}{what}"
        time_row(case, call, others, call)


def torch_gradients(leaves: list[Tensor]) -> Any:
    out = recursion(*leaves)
    return torch.autograd.grad(out, leaves) if out.requires_grad else out


def measure_long() -> None:
    from tests.kernels.gpu import device_checks as g

    for v, c in ((100_000, 16), (20_000, 64)):
        leaves = g.public_operands(1, v, c, g.ONE)
        for strategy in ("segments", "sequential"):
            for what, operands in (("forward", [leaf.detach() for leaf in leaves]), ("with gradients", leaves)):
                call = partial(g.product, operands, strategy=strategy)
                time_row(f"n=1 v={v} c={c} one {strategy} {what}", call)


def measure_products() -> None:
    """Log-semiring products compared with exp, a stock product and log; trees."""
    from tests.kernels.gpu import device_checks as g

    for n, c in ((2000, 64), (512, 128), (64, 256), (16, 512), (4, 1024)):
        a, b = g.random(2, n, c, c)
        others = {
            "torch": partial(torch_log_matmul, a, b),
            "gemm": lambda a=a, b=b: a @ b,
            "gemm_tf32": (tf32(), lambda a=a, b=b: a @ b),
        }
        call = partial(g.logchain.matmul, a, b)
        time_row(f"matmul n={n} c={c} forward", call, others, call)
        leaves = [a.requires_grad_(), b.requires_grad_()]
        time_row(f"matmul n={n} c={c} with gradients", partial(g.steps.run, g.logchain.matmul, leaves))
    stack = g.random(8, 256, 64, 64).requires_grad_()
    for function in (g.logchain.matrix_product, g.logchain.prefix_products):
        call = partial(g.steps.run, function, [stack])
        time_row(f"{function.__name__} n=8 s=256 c=64 with gradients", call)


def torch_log_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product by exp, a stock product and log, which underflows."""
    rows, columns = a.amax(-1, keepdim=True), b.amax(-2, keepdim=True)
    return ((a - rows).exp() @ (b - columns).exp()).log() + rows + columns


def measure_paths() -> None:
    """Best paths, and sequences that are flagged."""
    from tests.kernels.gpu import device_checks as g

    values = [leaf.detach() for leaf in g.public_operands(500, 40, 200, g.SHARED)]
    call = partial(g.logchain.viterbi, *values)
    time_row("n=500 v=40 c=200 shared best paths", call, plain=call)
    leaves = g.public_operands(500, 40, 200, g.SHARED, spread=80.0)
    far = [leaf.detach() for leaf in leaves]
    with g.logchain.rescues() as seen:
        g.product(far)
    time_row(f"n=500 v=40 c=200 shared {seen.sequences} flagged forward", partial(g.product, far))
    time_row(f"n=500 v=40 c=200 shared {seen.sequences} flagged with gradients", partial(g.product, leaves))


def measure_counts() -> None:
    """Counts of separate matrices compared with outer products by torch."""
    from logchain.kernels.gpu import counts
    from tests.kernels.gpu import device_checks as g

    chain = g.operands(256, 128, 64, g.SEPARATE)
    chains, (v, n, m, c) = g.chains.Chains.of(chain), chain.x.shape
    scan, messages, posterior = g.chains.Scan(chains), chain.new(v, n, m, c), torch.empty_like(chain.x)
    scan.forward(messages, chain.new(2, n, m).double(), halved=False)
    others = scan.backward(messages, torch.ones(n, m, dtype=g.F64, device=g.DEVICE), None, posterior, halved=False)
    out, size = torch.empty_like(chain.bulk), chain.new(v, n, m, 2).double()
    call = partial(counts.write, scan, messages, others, posterior, size, v - 1, out, by_log=True)
    outer = lambda: (messages[: v - 1].mT * others[1:v]) * chain.bulk  # noqa: E731
    time_row("n=256 v=128 c=64 separate counts", call, {"torch": outer})


def measure_steps() -> None:
    """The stock product of one step, the least that a launch per step takes."""
    from tests.kernels.gpu import device_checks as g

    for n, c in ((500, 64), (500, 200), (500, 512), (500, 1024)):
        a, p = g.random(n, c), g.random(c, c)
        others = {"three_tf32": (tf32(), partial(three_tf32, a, p)), "tf32": (tf32(), partial(torch.matmul, a, p))}
        time_row(f"({n}, {c}) x ({c}, {c})", partial(torch.matmul, a, p), others)


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def three_tf32(a: Tensor, b: Tensor) -> Tensor:
    """`a b` as one TF32 product of halves, [high | high | low] x [high; low; high], as exact as float32."""
    high_a, high_b = (((t.view(torch.int32) + 0x1000) & -8192).view(torch.float32) for t in (a, b))
    return torch.cat([high_a, high_a, a - high_a], -1) @ torch.cat([high_b, b - high_b, high_b], -2)


# decisions


class Rule(NamedTuple):
    """A piece stays if the time `ours` is at most `most` times the time `other` of the same case."""

    piece: str
    case: str
    ours: str
    other: str
    most: float
    otherwise: str


MAIN = "n=500 v=40 c=200 shared forward"
RULES = (
    Rule("halved scans", MAIN, "halved_ms", "one_way_ms", 0.7, "delete them"),
    Rule("halved scans", MAIN.replace("200", "64"), "halved_ms", "one_way_ms", 0.7, "delete them"),
    Rule("one program for 65 to 256 states", MAIN, "graph_ms", "stepwise_ms", 1 / 1.4, "delete the loop over K"),
    Rule("messages in registers", MAIN.replace("200", "64"), "graph_ms", "memory_ms", 1 / 1.2, "delete HELD"),
    Rule("the main job", MAIN, "graph_ms", "recursion_ms", 1 / 1.4, "torch operations"),
    Rule("the main job", MAIN.replace("forward", "with gradients"), "graph_ms", "recursion_ms", 1 / 1.4, "torch"),
    Rule("many states", MAIN.replace("200", "512"), "graph_ms", "recursion_ms", 1 / 1.4, "torch operations"),
    Rule("log_matmul", "matmul n=512 c=128 forward", "graph_ms", "torch_ms", 1 / 1.4, "torch operations"),
    Rule("log_matmul", "matmul n=16 c=512 forward", "graph_ms", "torch_ms", 1 / 1.4, "torch operations"),
    Rule("outer products of counts", "n=256 v=128 c=64 separate counts", "graph_ms", "torch_ms", 1 / 1.4, "torch"),
    Rule("best paths", "n=500 v=40 c=200 shared best paths", "ms", "plain_ms", 1 / 1.4, "torch operations"),
    Rule("one stock product of TF32 halves", "(500, 1024) x (1024, 1024)", "three_tf32_ms", "graph_ms", 0.8, "out"),
)


def decisions(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rule whose times are there: the ratio, and whether the piece stays."""
    times = {row["case"]: row for row in rows if row["group"] == "times"}
    result = []
    for rule in RULES:
        ours, other = (times.get(rule.case, {}).get(name) for name in (rule.ours, rule.other))
        if ours and other:
            ratio = round(ours / other, 3)
            row = {"group": "decision", "case": f"{rule.piece}: {rule.case}", "ok": True, "ratio": ratio}
            stays = ratio <= rule.most
            result.append(row | {"at_most": round(rule.most, 2), "decision": "stays" if stays else rule.otherwise})
    return result


# the parent, which starts a process for each group


class Running(NamedTuple):
    process: "subprocess.Popen[bytes]"
    start: float
    limit: float


def run_group(name: str) -> None:
    """A group, in its process."""
    from tests.kernels.gpu import device_checks

    device_checks.prepare()
    start = time.monotonic()
    (measure if name == "times" else device_checks.GROUPS[name])()
    device_checks.say(group=name, case="seconds", seconds=round(time.monotonic() - start, 1), ok=True)


def launch(name: str, options: argparse.Namespace) -> Running:
    dry = options.command == "dry"
    cache = os.path.join(tempfile.gettempdir(), "gpu-day-triton")
    environment = os.environ | {"TRITON_INTERPRET": "1" if dry else "0", "PYTHONUNBUFFERED": "1"}
    environment |= {"TRITON_CACHE_DIR": cache, "PYTHONFAULTHANDLER": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.benchmarks.gpu_day", "group", name]
    with (options.out / "logs" / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True)
    limit = (LIMITS | HIDDEN)[name] * (DRY_PATIENCE if dry and name not in HIDDEN else 1)
    return Running(process, time.monotonic(), limit)


def end(name: str, running: Running, folder: Path) -> None:
    """Kill what is left of a group, and write the row of its process."""
    code = running.process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(5)
    row = {"group": name, "case": "process", "seconds": round(time.monotonic() - running.start, 1)}
    row |= {"exit_code": code, "killed": code is None, "ok": code == 0}
    with (folder / f"{name}.log").open("a") as log:
        log.write(f"\n{json.dumps(row)}\n")


def run_groups(names: Sequence[str], options: argparse.Namespace, last: float, side_by_side: int = 1) -> None:
    """Run groups; each is killed at its limit, and all at the moment `last`."""
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < side_by_side:
            running[waiting[0]] = launch(waiting[0], options)
            del waiting[0]
        time.sleep(0.1)
        for name, group in list(running.items()):
            if group.process.poll() is not None or time.monotonic() > min(last, group.start + group.limit):
                end(name, running.pop(name), options.out / "logs")
        if time.monotonic() > last:
            waiting.clear()


def collect(options: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of groups, in their order, written to rows.jsonl; other lines of their output go to others.txt."""
    rows, others = [], []
    for name in names:
        path = options.out / "logs" / f"{name}.log"
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                others.append(f"{name}: {line}")
        if not path.exists():
            rows.append({"group": name, "case": "process", "ok": False, "problem": "no time left"})
    rows += decisions(rows)
    (options.out / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (options.out / "others.txt").write_text("\n".join(others)[-100_000:])
    return rows


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print failures, then one row for each correctness group, then probes, times and decisions."""
    for row in rows:
        if not row["ok"]:
            print("NOT OK", json.dumps(row)[:400])
    for name in dict.fromkeys(row["group"] for row in rows):
        group = [row for row in rows if row["group"] == name]
        if name in ("probe", "times", "decision"):
            for row in group:
                print(json.dumps(row)[:400])
        else:
            worst = max((max(row["errors"]) for row in group if row.get("errors")), default=None)
            failures = sum(not row["ok"] for row in group)
            print(json.dumps({"group": name, "rows": len(group), "not_ok": failures, "worst_error": worst}))


def run(options: argparse.Namespace) -> int:
    last, dry = time.monotonic() + 60 * options.minutes - 10, options.command == "dry"
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    names = options.only or list(LIMITS)
    for name in names:
        (options.out / "logs" / f"{name}.log").unlink(missing_ok=True)
    first, final = ([name for name in names if name == chosen] for chosen in ("probe", "times"))
    run_groups(first, options, last)
    run_groups([name for name in names if name not in ("probe", "times")], options, last, 1 if dry else SIDE_BY_SIDE)
    report(collect(options, [name for name in names if name not in final]))
    if final:
        run_groups(final, options, last)
        print("== all groups", flush=True)
        report(collect(options, names))
    return int(any(not row["ok"] for row in collect(options, names)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu_day", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("group").add_argument("name")
    for name in ("run", "dry"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="the folder of the results")
        command.add_argument("--minutes", type=float, default=6.0 if name == "run" else 60.0, help="of all groups")
        command.add_argument("--only", nargs="+", choices=[*LIMITS, *HIDDEN], default=[], metavar="GROUP")
    options = parser.parse_args(argv)
    if options.command == "group":
        run_group(options.name)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
