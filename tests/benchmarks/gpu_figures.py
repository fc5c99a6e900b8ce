"""What is measured on a GPU, group by group, the most wanted first: items of each, and how an item becomes rows.

Times are of several sets of inputs, which together do not fit into a cache; short calls are captured as a CUDA graph
too, so that they are counted without the host's launching. A floor is the larger of bytes over the bandwidth of a copy
and of multiply-adds over the rate of `torch.mm`, both measured on the device: 3xTF32 counts as a third of TF32's.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import logchain
from tests import contract
from tests.benchmarks import cases, launchers, peers, predictions, workloads
from tests.benchmarks.aside import Item
from tests.benchmarks.peers_gpu_case import moved
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
        "kernels": Group(_kernel_items, _kernel),
        "tiles": Group(lambda dry: _kernel_items(dry)[: 2 if dry else None], _tiles),
    }


def launched() -> Iterator[tuple[str, int, Callable[[str], Any]]]:
    """Every figure of ours: name, bytes, and a call that launches its kernels on tensors of a device."""
    every = [work for group in workloads.groups().values() for work in group if work.provider == "logchain"]
    found = [(f"{work.name}, {work.mode}", work.floor_bytes, work.make) for work in every]
    found += [(kernel.name, kernel.floor_bytes, kernel.make) for kernel in launchers.kernels(tiny=False)]
    for (name, size, make), precision in itertools.product(found, PRECISIONS):
        yield f"{name}, {precision}", size, functools.partial(_launch, make, precision)
    ours = peers.every()["logchain"]
    for item in peers.items(ours, cases.WORKLOADS):  # none of them large
        make = functools.partial(_peer, ours, item)
        yield f"{item.workload}, {item.mode}", 0, functools.partial(_launch, make, "highest")
    from tests.benchmarks import gpu_arithmetic

    for item in gpu_arithmetic.items(False):
        yield item.workload, 0, functools.partial(_numbers, gpu_arithmetic.measured, item)


def _numbers(measured: Callable[[Session, Item], Iterable[OnGpu]], item: Item, device: str) -> list[OnGpu]:
    session = Session(dry=False, end=math.inf)
    session.device = device
    return list(measured(session, item))


def _peer(provider: peers.Provider, item: Item, device: str, seed: int) -> Callable[[], Any]:
    return provider.make(moved(cases.draw(item.workload), device), item.mode)


def _launch(make: Callable[[str, int], Callable[[], Any]], precision: str, device: str) -> Any:
    with precision_of(precision):
        return make(device, 0)()


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
        predicted = predictions.seconds(work, precision)[0] * 1e3
        yield _timed(row, times, f"predicted {predicted:.3g} ms, {share:.0%} of copy" if ours else "")
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


def _kernel_items(dry: bool) -> list[Item]:
    return [
        Item(kernel.name, "logchain", precision)
        for kernel in launchers.kernels(tiny=dry)
        for precision in PRECISIONS[: 1 if dry else None]
    ]


def _kernel_of(session: Session, item: Item) -> tuple[launchers.Kernel, OnGpu]:
    """A kernel, and its row without a value."""
    kernel = next(one for one in launchers.kernels(tiny=session.dry) if one.name == item.workload)
    floor = session.floor(kernel.floor_bytes, kernel.multiply_adds, item.mode) * 1e3
    return kernel, OnGpu("kernels", kernel.name, "logchain", "", item.mode, "graph", 0.0, "ms", floor=floor)


def _kernel(session: Session, item: Item) -> Iterator[OnGpu]:
    """A kernel alone."""
    kernel, row = _kernel_of(session, item)
    with precision_of(item.mode):
        calls = session.calls(kernel.make, kernel.floor_bytes)
        yield _timed(row, session.seconds(calls, graph=True))


def _tiles(session: Session, item: Item) -> Iterator[OnGpu]:
    """Tiles beside the chosen ones, each field halved and doubled: the best of them."""
    kernel, row = _kernel_of(session, item)
    chosen: list[Any] = []
    plain = getattr(kernel.module, kernel.choose)

    def note(*arguments: Any, **options: Any) -> Any:
        chosen.append(plain(*arguments, **options))
        return chosen[-1]

    with precision_of(item.mode):
        with mock.patch.object(kernel.module, kernel.choose, note):
            calls = session.calls(kernel.make, kernel.floor_bytes)
        expected = [result.clone() for result in calls[0]()]
        times = {chosen[0]: session.seconds(calls, graph=True)[0]}
        for tile in neighbours(chosen[0])[: 1 if session.dry else None]:
            with mock.patch.object(kernel.module, kernel.choose, lambda *_, tile=tile, **__: tile):
                try:
                    if _same(calls[0], expected):
                        times[tile] = session.seconds(calls, graph=True)[0]
                    else:
                        print(f"  {tuple(tile)}: computes something else", flush=True)
                except Exception as error:  # too large, or not to be compiled
                    if not session.answers():
                        raise
                    print(f"  {tuple(tile)}: {type(error).__name__} {' '.join(str(error).split())[:80]}", flush=True)
    fastest = min(times, key=times.__getitem__)
    gain = times[chosen[0]] / times[fastest]
    shown = "the chosen" if fastest == chosen[0] else str(tuple(fastest))
    note_of = f"{gain:.2f} x faster than {tuple(chosen[0])}: {shown}"
    yield row._replace(group="tiles", metric="best", value=times[fastest] * 1e3, note=note_of)


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
