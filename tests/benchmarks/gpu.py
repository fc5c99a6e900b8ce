"""What the library costs on a GPU, after its tests have passed there: times, floors, memory, peers, tile shapes.

One command, `python -m tests.benchmarks gpu`, of a few minutes: what matters most is measured first, and what does not
fit into the time is left out and said so. Times are medians and quartiles of CUDA events over several sets of inputs,
which together do not fit into a cache; short calls are captured as a CUDA graph too, so that they are counted without
the host's launching. A floor is the larger of bytes over the bandwidth of a copy and of multiply-adds over the rate of
`torch.mm`, both measured here: 3xTF32 counts as a third of TF32's. `--dry` runs everything on a CPU and tiny sizes, in
Triton's interpreter, and writes nothing but where it is told to.
"""

import importlib.util
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import logchain
from tests.benchmarks import cases, launchers, peers_gpu, predictions, wheels, workloads
from tests.benchmarks.launchers import Kernel
from tests.benchmarks.results import FORWARD, GRADIENTS
from tests.benchmarks.session import ROOT, Row, Session, precision_of, stamp
from tests.benchmarks.workloads import FLOAT, Work

PRECISIONS = ("highest", "high")

# seconds: a call below this is also timed as a graph
SHORT = 2e-3


def correctness(session: Session) -> None:
    """The tests marked gpu, in another process and within half of the time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--maxfail=10", "-p", "no:cacheprovider"]
    if session.dry:
        command += ["--collect-only", "tests/test_gpu_transitions.py"]
    elif importlib.util.find_spec("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1))]  # most of the time goes into compiling
    try:
        limit = max(60.0, session.left / 2)
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
        text = run.stdout or run.stderr
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace") + "\ntimed out"
    failures = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    for line in failures:
        print(line[:300], flush=True)
    last = ([line for line in text.splitlines() if line.strip()] or [""])[-1]
    for word in ("passed", "failed", "error", "tests collected"):
        count = re.search(rf"(\d+)(?:/\d+)? {word}", last)
        if count:
            session.add(Row("test", "pytest -m gpu", "", "", "", word, float(count[1]), "tests", note=last[:80]))
    if not re.search(r"\d+ (?:passed|tests collected)|/\d+ tests", last):
        session.add(
            Row("test", "pytest -m gpu", "", "", "", "unfinished", 1.0, "", note=text[-300:].replace("\n", " "))
        )


def floors(session: Session) -> None:
    """What this device does at best: a copy, and products of large matrices."""
    session.bandwidth = _copy_bandwidth(session)
    for name, batch, m, k, n in (
        ("4096**3", 1, 4096, 4096, 4096),
        ("(500, 200) (200, 200)", 1, 500, 200, 200),
        ("512 x 256**3", 512, 256, 256, 256),
        ("8 x 512**3", 8, 512, 512, 512),
    ):
        if session.dry:
            batch, m, k, n = min(batch, 2), 8, 8, 8
        a, b = torch.randn(batch, m, k, device=session.device), torch.randn(batch, k, n, device=session.device)
        for precision in PRECISIONS:
            with precision_of(precision):
                torch.bmm(a, b)
                rate = batch * m * k * n / session.seconds([lambda a=a, b=b: torch.bmm(a, b)], graph=True)[0]
            if name == "4096**3":
                session.rates["ieee" if precision == "highest" else "high"] = rate
            session.add(Row("floor", f"GEMM {name}", "torch", "", precision, "rate", 2 * rate / 1e12, "TFLOP/s"))
    # a third of TF32's where that is more than IEEE's
    session.rates["highest"] = max(session.rates["high"] / 3, session.rates["ieee"])
    session.add(Row("floor", "GEMM 4096**3, a third of TF32", "computed", "", "highest", "rate",
                    2 * session.rates["highest"] / 1e12, "TFLOP/s"))  # fmt: skip


def _copy_bandwidth(session: Session) -> float:
    """Bytes read and written in a second."""
    size = 2**12 if session.dry else 2**30
    source = torch.randn(size, device=session.device)
    target = torch.empty_like(source)
    moved = 2 * size * FLOAT
    rates = [moved / seconds / 1e9 for seconds in session.seconds([lambda: target.copy_(source)] * 2)]
    workload = f"copy {size * FLOAT:.3g} bytes"
    session.add(Row("floor", workload, "torch", "", "", "bandwidth", rates[0], "GB/s", rates[2], rates[1]))
    return rates[0] * 1e9


def public(session: Session) -> None:
    """Every public function: time eagerly and as a graph, and memory."""
    for work in workloads.public(tiny=session.dry):
        for precision in PRECISIONS if work.provider == "logchain" else PRECISIONS[:1]:
            _guarded(session, work.name, lambda work=work, precision=precision: _public(session, work, precision))
        _free()


def _public(session: Session, work: Work, precision: str) -> None:
    if not session.enough(30, f"{work.name}, {work.mode}, {precision}"):
        return
    with precision_of(precision):
        calls = session.calls(work.make, work.floor_bytes)
        floor = session.floor(work.floor_bytes, work.multiply_adds, precision)
        floor = floor if work.provider == "logchain" else session.floor(work.floor_bytes, 0, precision)
        here = ("public", work.name, work.provider, work.mode, precision)

        def add(metric: str, times: tuple[float, float, float], note: str = "") -> None:
            middle, low, high = (1e3 * value for value in times)
            session.add(Row(*here, metric, middle, "ms", low, high, floor * 1e3, note))

        times = session.seconds(calls)
        share = work.floor_bytes / times[0] / session.bandwidth
        predicted = predictions.seconds(work, precision)[0] * 1e3
        note = f"predicted {predicted:.3g} ms, {share:.0%} of copy" if work.provider == "logchain" else ""
        add("time", times, note)
        if precision == "highest":
            session.add(Row(*here, "memory", session.peak(calls[0]) / 1e6, "MB", note="beyond inputs and results"))
        if times[0] < SHORT and work.provider == "logchain":
            try:
                add("graph", session.seconds(calls, graph=True))
            except RuntimeError as error:
                session.add(Row(*here, "graph", float("nan"), "ms", note=f"not captured: {str(error)[:200]}"))
                torch.cuda.synchronize()


def _guarded(session: Session, name: str, measure: Callable[[], None]) -> None:
    """A failure is a row, and the rest is measured all the same."""
    try:
        measure()
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        traceback.print_exc(limit=-3, file=sys.stdout)
        session.add(Row("failure", name, "", "", "", "failed", 1.0, "", note=text))
        if session.dry:
            raise


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def accuracy(session: Session) -> None:
    """Errors against float64 sums, on the device: values and posteriors of a few sequences."""
    tiny = session.dry
    sizes = ((4, 4, 5, 2),) if tiny else ((500, 40, 200, 4), (1, 20_000, 16, 1), (32, 512, 64, 2))
    for n, v, c, few in sizes:
        chain = workloads.random_chain(n, v, c, False, session.device, 0)
        truth, posteriors = cases.posteriors(cases.Chain(chain.x[:few, 0], chain.bulk[0], chain.p0[0, 0]))
        for precision in PRECISIONS:
            with precision_of(precision):
                x = chain.x.detach().requires_grad_()
                value = logchain.product(x, chain.bulk, chain.p0)
                value.sum().backward()
            error = (value[:few, 0].detach().double().cpu().numpy() - truth).__abs__().max()
            name = f"product n={n} v={v} c={c}, shared bulk"
            bound = float(np.spacing(np.float32(np.abs(truth).max()))) + 2.0**-20 * v**0.5
            promised = bound if precision == "highest" else float("nan")
            session.add(Row("accuracy", name, "logchain", FORWARD, precision, "error", error, "nats", floor=promised))
            error = np.abs(x.grad[:few, 0].double().cpu().numpy() - posteriors).max()
            promised = 1e-5 if precision == "highest" else float("nan")
            session.add(Row("accuracy", name, "logchain", GRADIENTS, precision, "error", error, "", floor=promised))
        _free()
    n, v, c = (2, 3, 4) if tiny else (2, 256, 64)
    stack = torch.randn(n, v, c, c, device=session.device)
    wanted = torch.from_numpy(cases.product(cases.Stack(stack))[0])
    for precision in PRECISIONS:
        with precision_of(precision):
            error = (logchain.matrix_product(stack).double().cpu() - wanted).abs().max().item()
        bound = float(np.spacing(np.float32(wanted.abs().max().item()))) + 2.0**-20 * v**0.5
        session.add(Row("accuracy", f"matrix_product n={n} v={v} c={c}", "logchain", FORWARD, precision, "error", error,
                        "nats", floor=bound if precision == "highest" else float("nan")))  # fmt: skip


def kernels(session: Session) -> None:
    """Every kernel alone."""
    _each_kernel(session, _kernel)


def _each_kernel(session: Session, measure: Callable[[Session, Kernel, str], None]) -> None:
    for kernel in launchers.kernels(tiny=session.dry):
        for precision in PRECISIONS[: 1 if session.dry else None]:
            if session.enough(20, f"{kernel.name}, {precision}"):
                _guarded(session, kernel.name, lambda k=kernel, p=precision: measure(session, k, p))
        _free()


def _kernel(session: Session, kernel: Kernel, precision: str) -> None:
    with precision_of(precision):
        calls = session.calls(kernel.make, kernel.floor_bytes)
        floor = session.floor(kernel.floor_bytes, kernel.multiply_adds, precision)
        middle, low, high = (1e3 * value for value in session.seconds(calls, graph=not session.dry))
        session.add(
            Row("kernel", kernel.name, "logchain", "", precision, "graph", middle, "ms", low, high, floor * 1e3)
        )


def tuning(session: Session) -> None:
    """Tiles beside the chosen ones, each field halved and doubled; the best of them by chip, size and precision."""
    _each_kernel(session, _tune)


def _tune(session: Session, kernel: Kernel, precision: str) -> None:
    chosen: list[Any] = []
    plain = getattr(kernel.module, kernel.choose)

    def note(*arguments: Any, **options: Any) -> Any:
        chosen.append(plain(*arguments, **options))
        return chosen[-1]

    with precision_of(precision):
        with mock.patch.object(kernel.module, kernel.choose, note):
            calls = session.calls(kernel.make, kernel.floor_bytes)
        expected = [result.clone() for result in calls[0]()]
        times = {chosen[0]: session.seconds(calls, graph=not session.dry)[0]}
        for tile in neighbours(chosen[0])[: 1 if session.dry else None]:
            if not session.enough(10, f"{tile} of {kernel.name}"):
                break
            with mock.patch.object(kernel.module, kernel.choose, lambda *_, tile=tile, **__: tile):
                try:
                    if _same(calls[0], expected):
                        times[tile] = session.seconds(calls, graph=not session.dry)[0]
                    else:
                        print(f"  {tuple(tile)}: computes something else", flush=True)
                except Exception as error:  # too large, or not to be compiled
                    print(f"  {tuple(tile)}: {type(error).__name__} {' '.join(str(error).split())[:80]}", flush=True)
    best = min(times, key=times.__getitem__)
    gain = times[chosen[0]] / times[best]
    shown = "the chosen" if best == chosen[0] else str(tuple(best))
    session.add(Row("tile", kernel.name, "logchain", "", precision, "best", times[best] * 1e3, "ms",
                    floor=session.floor(kernel.floor_bytes, kernel.multiply_adds, precision) * 1e3,
                    note=f"{gain:.2f} x faster than {tuple(chosen[0])}: {shown}"))  # fmt: skip


def _same(call: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> bool:
    """Whether a call still gives what it should; what it leaves unwritten is NaN."""
    for result in call():
        result.fill_(math.nan)
    pairs = zip(call(), expected, strict=True)
    return all(torch.allclose(found, wanted, rtol=1e-2, atol=1e-3) for found, wanted in pairs)


def neighbours(tile: Any) -> list[Any]:
    """A tile with one of its numbers halved or doubled; choices of yes or no stay."""
    found = []
    for field, value in tile._asdict().items():
        if isinstance(value, bool):
            continue
        nearby = (value - 1, value + 1) if field == "stages" else (value // 2, value * 2)
        found += [tile._replace(**{field: other}) for other in nearby if other >= 1]
    return found


GROUPS = {
    "tests": correctness,
    "floors": floors,
    "public": public,
    "accuracy": accuracy,
    "peers": peers_gpu.measure,
    "kernels": kernels,
    "tiles": tuning,
}  # rows are of a group of this name, without the s


def summary(session: Session) -> str:
    """The figures once more, the most important last: what a caller far away sees of a long output."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for group in reversed(GROUPS):
        lines |= peers_gpu.table(session.peers) if group == "peers" else {}
        for row in session.rows:
            if row.group == group.rstrip("s"):
                over = f" ({row.value / row.floor:.2f}x)" if row.floor > 0 else ""
                text = f"{row.precision} {row.metric} {row.value:.4g} {row.unit}{over} {row.note[:60]}".strip()
                lines.setdefault((row.workload, row.provider, row.mode), []).append(text)
    found = [f"{' '.join(filter(None, name))}: {'; '.join(texts)}" for name, texts in lines.items()]
    found += [f"FAILED {row.workload}: {row.note[:160]}" for row in session.rows if row.group == "failure"]
    found.append("in brackets: over the floor or over the promised error")
    found.append(", ".join(f"{name} {value}" for name, value in stamp(session.device).items()))
    return "\n".join(found)[-11_500:]


def main(
    *,
    dry: bool = False,
    minutes: float = 7.5,
    out: Path | None = None,
    only: Sequence[str] = (),
    carried: Path | None = None,
) -> None:
    """Measure, write `results/gpu.csv`, `peers.csv` and copies to `out`, and print a summary.

    Args:
        dry: on a CPU and tiny sizes; written to `out` alone.
        minutes: what does not fit into them is left out.
        out: a folder.
        only: groups of measurements, or all.
        carried: a folder of peers' wheels.
    """
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU here: --dry runs the same on a CPU, without meaning")
    session = Session(dry=dry, minutes=minutes, out=out)
    with wheels.installed(carried):
        _measure(session, only)
    print("\n" + summary(session))


def _measure(session: Session, only: Sequence[str]) -> None:
    for name in only or GROUPS:
        print(f"measuring: {name}, {session.left:.0f} s left", flush=True)
        _guarded(session, name, lambda name=name: GROUPS[name](session))
        session.write()
