"""What is measured on a GPU, group by group, the most wanted first: items of each, and how an item becomes rows.

Times are of several sets of inputs, which together do not fit into a cache; short calls are captured as a CUDA graph
too, so that they are counted without the host's launching. A floor is the larger of bytes over the bandwidth of a copy
and of multiply-adds over the rate of `torch.mm`, both measured on the device: 3xTF32 counts as a third of TF32's.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

import logchain
from tests import contract
from tests.benchmarks import cases, workloads
from tests.benchmarks.aside import Item
from tests.benchmarks.results import FORWARD, GRADIENTS, OnGpu
from tests.benchmarks.session import Session, precision_of

PRECISIONS = ("highest", "high")
FLOORS = "floors"

# seconds: a call below this is also timed as a graph
SHORT = 2e-3


class Group(NamedTuple):
    """Items, tiny ones for a dry run, and the rows of one of them."""

    items: Callable[[bool], list[Item]]
    measured: Callable[[Session, Item], Iterable[OnGpu]]


def every() -> dict[str, Group]:
    """All groups in their order; the peers of `peers_gpu` come after those that are asked for."""
    from tests.benchmarks import gpu_arithmetic  # triton is imported when it is known whether to interpret

    asked = {
        name: Group(functools.partial(_works, name), functools.partial(_public, name)) for name in workloads.groups()
    }
    others = asked.pop("others")
    return {
        gpu_arithmetic.GROUP: Group(gpu_arithmetic.items, gpu_arithmetic.measured),
        FLOORS: Group(_floor_items, _floors),
        **asked,
        "accuracy": Group(_accuracy_items, _accuracy),
        "others": others,
    }


# batch, rows, terms, columns; the largest one's rate is the device's
GEMMS = ("1 x 4096 x 4096 x 4096", "1 x 500 x 200 x 200", "512 x 256 x 256 x 256", "8 x 512 x 512 x 512")
LARGEST = f"GEMM {GEMMS[0]}"


def _floor_items(dry: bool) -> list[Item]:
    return [Item(name, "torch", FORWARD) for name in ("copy", *(f"GEMM {shape}" for shape in GEMMS))]


def _floors(session: Session, item: Item) -> Iterator[OnGpu]:
    """What this device does at best: a copy, and products of large matrices."""
    row = OnGpu(FLOORS, item.workload, "torch", FORWARD, "", "bandwidth", 0.0, "GB/s")
    if item.workload == "copy":
        source = torch.randn(2**12 if session.dry else 2**30, device=session.device)
        target = torch.empty_like(source)
        times = session.seconds([lambda: target.copy_(source)] * 2)
        middle, upper, lower = (2 * source.nbytes / spent / 1e9 for spent in times)
        yield row._replace(value=middle, lower=lower, upper=upper)
        return
    shape = [int(size) for size in item.workload.removeprefix("GEMM ").split(" x ")]
    batch, m, k, n = [min(shape[0], 2), 8, 8, 8] if session.dry else shape
    a, b = torch.randn(batch, m, k, device=session.device), torch.randn(batch, k, n, device=session.device)
    for precision in PRECISIONS:
        with precision_of(precision):
            torch.bmm(a, b)
            spent = session.seconds([lambda: torch.bmm(a, b)], graph=True)[0]
        yield row._replace(
            precision=precision, metric="rate", value=2 * batch * m * k * n / spent / 1e12, unit="TFLOP/s"
        )


def best(rows: Iterable[OnGpu]) -> tuple[float, dict[str, float]]:
    """Bytes a second of a copy, and multiply-adds a second by precision, as far as there are rows of them."""
    found = {(row.workload, row.precision): row.value for row in rows if row.group == FLOORS}
    ieee, tf32 = (found.get((LARGEST, precision), 0.0) * 1e12 / 2 for precision in PRECISIONS)
    rates = {"ieee": ieee, "high": tf32, "highest": max(tf32 / 3, ieee)}
    return found.get(("copy", ""), 0.0) * 1e9, {name: rate for name, rate in rates.items() if rate}


def _works(group: str, dry: bool) -> list[Item]:
    return [
        Item(work.name, work.provider, f"{work.mode}, {precision}")
        for work in workloads.groups(tiny=dry)[group]
        for precision in PRECISIONS[: None if work.provider == "logchain" else 1]
    ]


def _public(group: str, session: Session, item: Item) -> Iterator[OnGpu]:
    """A public function: its time eagerly and as a graph, and its memory."""
    mode, precision = item.mode.rsplit(", ", 1)
    work = next(
        work
        for work in workloads.groups(tiny=session.dry)[group]
        if (work.name, work.provider, work.mode) == (item.workload, item.provider, mode)
    )
    ours = work.provider == "logchain"
    floor = session.floor(work.floor_bytes, work.multiply_adds if ours else 0, precision) * 1e3
    row = OnGpu(group, work.name, work.provider, mode, precision, "time", 0.0, "ms", floor=floor)
    with precision_of(precision):
        calls = session.calls(work.make, work.floor_bytes)
        times = session.seconds(calls)
        share = work.floor_bytes / times[0] / session.bandwidth
        yield _timed(row, times, f"{share:.0%} of copy" if ours else "")
        if precision == "highest":
            peak = session.peak(calls[0]) / 1e6
            yield row._replace(metric="memory", value=peak, unit="MB", floor=None, note="beyond inputs and results")
        if times[0] < SHORT and ours:
            yield _timed(row._replace(metric="graph"), session.seconds(calls, graph=True))


def _timed(row: OnGpu, times: tuple[float, float, float], note: str = "") -> OnGpu:
    middle, lower, upper = (1e3 * spent for spent in times)
    return row._replace(value=middle, lower=lower, upper=upper, note=note)


def _accuracy_items(dry: bool) -> list[Item]:
    sizes = ((4, 4, 5, 2),) if dry else ((500, 40, 200, 4), (1, 20_000, 16, 1), (32, 512, 64, 2))
    names = [f"product n={n} v={v} c={c}, shared bulk, {few} compared" for n, v, c, few in sizes]
    n, v, c = (2, 3, 4) if dry else (2, 256, 64)
    return [Item(name, "logchain", GRADIENTS) for name in names] + [
        Item(f"matrix_product n={n} v={v} c={c}", "logchain", FORWARD)
    ]


def _accuracy(session: Session, item: Item) -> Iterator[OnGpu]:
    """Errors against float64 sums, on the device: values and posteriors of a few sequences, or a product."""
    sizes = [int(part.strip("nvc=,")) for part in item.workload.split() if part.strip("nvc=,").isdigit()]
    row = OnGpu("accuracy", item.workload, "logchain", FORWARD, "", "error", 0.0, "nats")
    for precision in PRECISIONS:
        with precision_of(precision):
            errors = _chain_errors(session, *sizes) if item.mode == GRADIENTS else _product_errors(session, *sizes)
        for (error, promised), mode in zip(errors, (FORWARD, GRADIENTS), strict=False):
            promised = promised if precision == "highest" else None
            yield row._replace(
                mode=mode, precision=precision, value=error, floor=promised, unit="nats" * (mode == FORWARD)
            )


def _chain_errors(session: Session, n: int, v: int, c: int, few: int) -> list[tuple[float, float]]:
    """Of values and of posteriors, each with what is promised."""
    chain = workloads.random_chain(n, v, c, False, session.device, 0)
    truth, posteriors = cases.posteriors(cases.Chain(chain.x[:few, 0], chain.bulk[0], chain.p0[0, 0]))
    x = chain.x.detach().requires_grad_()
    value = logchain.product(x, chain.bulk, chain.p0)
    value.sum().backward()
    error = np.abs(value[:few, 0].detach().double().cpu().numpy() - truth).max()
    of_gradient = np.abs(x.grad[:few, 0].double().cpu().numpy() - posteriors).max()
    of_posteriors = contract.gradient_bound(posteriors, v, c, dtype=torch.float32, k=contract.TENSOR_CORES)
    return [(error, _promised(truth, v, c)), (of_gradient, of_posteriors.max())]


def _product_errors(session: Session, n: int, v: int, c: int) -> list[tuple[float, float]]:
    stack = torch.randn(n, v, c, c, device=session.device)
    truth = cases.product(cases.Stack(stack))[0]
    error = np.abs(logchain.matrix_product(stack).double().cpu().numpy() - truth).max()
    return [(error, _promised(truth, v, c))]


def _promised(truth: np.ndarray, v: int, c: int) -> float:
    return float(contract.value_bound(truth, v, c, dtype=torch.float32, k=contract.TENSOR_CORES).max())
