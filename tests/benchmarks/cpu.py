"""What the library costs on the CPU, beside the GEMMs alone, a hand-written loop and the forum's code.

All ratios are of medians taken in turns in one process. One thread's times are its CPU time, so that other work on the
machine adds little; with two threads they are wall time. The loop and the forum's code run on a slice of a large batch
and count in proportion: their work is linear in the number of sequences. Only the forum's forward pass runs on the
whole of the main case, once: it takes 8 GB and most of a minute, more than in proportion.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

import logchain
from logchain import _demo, _forum, reference
from logchain._demo import Chain, Product, dense_chain, gemms
from logchain._measure import median_seconds, peak_bytes
from tests.benchmarks import results, streams
from tests.benchmarks.results import FORWARD, GRADIENTS, Row, machine
from tests.families import FAMILIES

MAIN = "n=500 v=40 c=200, shared bulk"
SWEEP = (8, 32, 128, 512)


def loop(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """What one writes by hand: the forward recursion with `torch.logsumexp`."""
    log_bulk = bulk.log()
    message = p0.log() + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        message = (message[..., :, None] + log_bulk[..., i - 1, :, :]).logsumexp(-2) + x[..., i, :]
    return message.logsumexp(-1)


def call(product: Product, chain: Chain, mode: str) -> Callable[[], Sequence[Tensor]]:
    """One run of any provider's product, without or with the gradients of x, bulk and p0."""
    return partial(_demo.forward if mode == FORWARD else _demo.forward_backward, chain, product)


def batched_gemms(chain: Chain, *, backward: bool = False) -> Callable[[], Sequence[Tensor]]:
    """The floor where each sequence has its own matrices."""
    n, _, v, c = chain.x.shape
    message, matrices = chain.x[:, 0, :1].softmax(-1), chain.bulk[:, 0]
    step, counts = torch.empty(n, 1, c), torch.empty(n, c, c)

    def run() -> Sequence[Tensor]:
        for i in range(v - 1):
            torch.bmm(message, matrices[:, i], out=step)
            if backward:
                torch.bmm(message, matrices[:, i].mT, out=step)
                torch.bmm(message.mT, message, out=counts)
        return step, counts

    return run


def part(chain: Chain, n: int) -> tuple[Chain, float]:
    """The first n sequences, and how many times they make the whole."""
    few = Chain(*(tensor[:n] if len(tensor) > 1 else tensor for tensor in chain))
    return few, len(chain.x) / len(few.x)


def costs(
    workload: str,
    chain: Chain,
    mode: str,
    *,
    slices: dict[str, int],
    bars: dict[str, str],
    threads: int = 1,
    slow_rounds: int = 3,
) -> list[Row]:
    """Times of logchain, the GEMMs, the loop and the forum's code, and their ratios."""
    n = len(chain.x)
    floor = gemms if len(chain.bulk) == 1 else batched_gemms
    loop_part, loop_share = part(chain, slices.get("loop", n))
    forum_part, forum_share = part(chain, slices.get("forum", n))
    calls = {
        "logchain": call(logchain.product, chain, mode),
        "GEMMs alone": floor(chain, backward=mode == GRADIENTS),
        "torch loop": call(loop, loop_part, mode),
        "forum": call(_forum.product, forum_part, mode),
    }
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds = median_seconds({name: calls[name] for name in ("logchain", "GEMMs alone")}, rounds=21, clock=clock)
    # The slow ones in turns with logchain again: a ratio never compares two moments of the machine.
    slow = median_seconds(
        {name: calls[name] for name in ("logchain", "torch loop", "forum")}, rounds=slow_rounds, clock=clock
    )
    torch.set_num_threads(1)
    times = seconds | {"torch loop": slow["torch loop"] * loop_share, "forum": slow["forum"] * forum_share}
    mode = mode if threads == 1 else f"{mode}, {threads} threads"
    rows = [Row(workload, name, mode, "time", value * 1e3, "ms") for name, value in times.items()]
    over_floor = seconds["logchain"] / seconds["GEMMs alone"]
    rows.append(Row(workload, "logchain", mode, "time over the GEMMs", over_floor, "x", bars.get("floor", "")))
    for name in ("torch loop", "forum"):
        ratio = times[name] / slow["logchain"]
        rows.append(Row(workload, name, mode, f"{name}'s time over logchain's", ratio, "x", bars.get(name, "")))
    return rows


def main_case() -> list[Row]:
    """The forum's case: time and memory."""
    chain = dense_chain(500, 40, 200)
    slices = {FORWARD: {"loop": 100}, GRADIENTS: {"loop": 20, "forum": 20}}
    bars = {FORWARD: {"floor": "<= 1.3", "forum": ">= 1000"}, GRADIENTS: {"floor": "<= 1.6"}}
    rows = []
    for mode in (FORWARD, GRADIENTS):
        rows += costs(MAIN, chain, mode, slices=slices[mode], bars=bars[mode], slow_rounds=1 if mode == FORWARD else 3)
        used = peak_bytes(call(logchain.product, chain, mode)) / 1e6
        limit = 2 * chain.x.nbytes / 1e6 + 10
        rows.append(Row(MAIN, "logchain", mode, "memory", used, "MB", f"<= {limit:g}"))
    return rows + costs(MAIN, chain, FORWARD, slices=slices[GRADIENTS], bars={}, threads=2)


def other_cases() -> list[Row]:
    """Small, long and per-sequence chains, reported without a bar."""
    each = dense_chain(8, 128, 64)
    own = torch.rand(8, 1, 127, 64, 64, generator=torch.Generator().manual_seed(1))
    cases = {
        "n=32 v=512 c=64, shared bulk": (dense_chain(32, 512, 64), {"loop": 8, "forum": 2}),
        "n=8 v=128 c=64, bulk per sequence": (each._replace(bulk=own / own.sum(-1, keepdim=True)), {}),
        "n=10 v=6 c=40, shared bulk": (dense_chain(10, 6, 40), {}),
    }
    return [
        row
        for workload, (chain, slices) in cases.items()
        for mode in (FORWARD, GRADIENTS)
        for row in costs(workload, chain, mode, slices=slices, bars={})
    ]


def matrix_products() -> list[Row]:
    """The product of whole stacks, over the batched products of all levels of the tree alone."""
    stack = torch.randn(8, 256, 64, 64, generator=torch.Generator().manual_seed(2))
    levels = [torch.rand(8 * 128 >> level, 2, 64, 64) for level in range(8)]
    out = [torch.empty(len(level), 64, 64) for level in levels]

    def floor() -> Sequence[Tensor]:
        for level, into in zip(levels, out, strict=True):
            torch.bmm(level[:, 0], level[:, 1], out=into)
        return out

    calls = {"logchain": lambda: [logchain.matrix_product(stack)], "GEMMs alone": floor}
    seconds = median_seconds(calls, rounds=21, clock=time.thread_time)
    workload = "full product n=8 v=256 c=64"
    over = seconds["logchain"] / seconds["GEMMs alone"]
    return [Row(workload, "logchain", FORWARD, "time over the GEMMs", over, "x", "<= 1.5")]


def hard_cases() -> list[Row]:
    """Chains that leave float32's linear range, over the time of a dense one of the same size."""

    def family(name: str, n: int, v: int, c: int) -> Chain:
        return Chain(*FAMILIES[name](dtype=torch.float32, n=n, t=1, v=v, c=c)[:3])

    plain, long_plain = dense_chain(500, 40, 200), family("dense", 64, 200, 12)
    cases = [
        ("dense n=500 v=40 c=200, emissions x20", plain._replace(x=plain.x * 20), plain, "<= 1.2"),
        ("dense n=500 v=40 c=200, emissions x300", plain._replace(x=plain.x * 300), plain, "<= 1.2"),
        ("left-to-right n=64 v=200 c=12, emissions x20", family("left_to_right", 64, 200, 12), long_plain, "<= 3"),
        ("3 superdiagonals n=500 v=40 c=200, emissions x20", family("banded", 500, 40, 200), plain, "<= 25"),
    ]
    rows = []
    for workload, chain, dense, bar in cases:
        for mode in (FORWARD, GRADIENTS):
            calls = {"hard": call(logchain.product, chain, mode), "dense": call(logchain.product, dense, mode)}
            seconds = median_seconds(calls, rounds=9, clock=time.thread_time)
            ratio = seconds["hard"] / seconds["dense"]
            rows.append(Row(workload, "logchain", mode, "time over a dense chain's", ratio, "x", bar))
    return rows


def accuracy() -> list[Row]:
    """Posteriors of a very long chain, and the forum's two wrong values."""
    v = 16384
    long = dense_chain(1, v, 8)
    long = long._replace(x=long.x + 500_000 / v)
    posteriors = _demo.forward_backward(long)[1]
    truth = reference.marginals(*long)
    error = np.abs(posteriors.double().numpy() - truth.states).max()
    workload = f"n=1 v={v} c=8, log Z = {truth.log_norm.item():.0f}"
    rows = [Row(workload, "logchain", GRADIENTS, "largest error of a posterior", error, "", "<= 1e-5")]

    # State 0 is where the first matrix leads, state 1 where the evidence is: the only path pays log(1e-30) once.
    x = torch.tensor([[0.0, 0.0], [-200.0, 0.0], [0.0, 0.0]])
    bulk = torch.tensor([[[1.0, 1e-30], [1.0, 1e-30]], [[0.5, 0.5], [0.5, 0.5]]])
    peaks = Chain(x[None, None], bulk[None, None], torch.tensor([[[0.5, 0.5]]]))
    for name, chain in (("n=10 v=6 c=40, shared bulk", dense_chain(10, 6, 40)), ("two peaks, v=3 c=2", peaks)):
        values = {
            "scipy float64": reference.product(*chain).flat[0],
            "logchain": logchain.product(*chain).flatten()[0].item(),
            "forum": _forum.product(*chain).flatten()[0].item(),
        }
        rows += [Row(name, provider, FORWARD, "value", value, "nats") for provider, value in values.items()]
    return rows


def sweep() -> list[Row]:
    """Time and memory against v, for the plot."""
    rows = []
    for v in SWEEP:
        chain = dense_chain(32, v, 64)
        calls = {
            name: call(product, chain, GRADIENTS)
            for name, product in (("logchain", logchain.product), ("torch loop", loop), ("forum", _forum.product))
        }
        seconds = median_seconds(calls, rounds=3, clock=time.thread_time)
        for name, run in calls.items():
            rows.append(Row(f"sweep n=32 v={v} c=64", name, GRADIENTS, "time", seconds[name] * 1e3, "ms"))
            rows.append(Row(f"sweep n=32 v={v} c=64", name, GRADIENTS, "memory", peak_bytes(run) / 1e6, "MB"))
    return rows


def main() -> None:
    """Measure, and write the results file; a few minutes on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for group in (main_case, other_cases, matrix_products, hard_cases, accuracy, streams.stream_rows, sweep):
        print(f"measuring: {group.__name__}", flush=True)
        rows += group()
    torch.set_num_threads(threads)
    place = machine()
    results.write([row._replace(**place) for row in rows], results.PRODUCT)
