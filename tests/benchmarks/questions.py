"""What the questions of a chain cost on the CPU, beside the product they come from and the peers that answer them.

All ratios are of medians of wall time taken in turns in one process, one thread each. torch-struct's draws cost one
backward pass each: a few sequences, draws and variables stand for the rest, in proportion, which flatters it.
hmmlearn's compiled decoder is called itself, without the Python around it.
"""

from collections.abc import Callable
from functools import partial

import torch

import logchain
from logchain import demo
from logchain.demo import Chain, dense_chain
from logchain.memory import peak_bytes
from tests.benchmarks import results
from tests.benchmarks.results import FORWARD, Row, machine
from tests.benchmarks.timing import median_seconds, on_threads

DRAWS = 100


def over(workload: str, question: str, ours: Callable[[], object], peers: dict, shares: dict, bars: dict) -> list[Row]:
    """Our time, and each peer's, times its share, over it."""
    rows = []
    for name, peer in peers.items():  # each beside logchain alone: a slow one leaves a cold cache behind
        seconds = median_seconds({"logchain": ours, name: peer}, rounds=31 if name == "hmmlearn" else 5)
        if not rows:
            rows.append(Row(workload, "logchain", question, "time", seconds["logchain"] * 1e3, "ms"))
        ratio = seconds[name] * shares.get(name, 1.0) / seconds["logchain"]
        rows.append(Row(workload, name, question, f"{name}'s time over logchain's", ratio, "x", bars.get(name, "")))
    return rows


def posteriors() -> list[Row]:
    """Marginals beside the product whose gradient they are."""
    chain, workload = dense_chain(32, 512, 64), "n=32 v=512 c=64, shared bulk"
    calls = {
        "states": lambda: logchain.marginals(*chain),
        "sum": lambda: logchain.marginals(*chain, transitions="sum"),
        "messages": lambda: logchain.forward_backward(*chain),
        "entropy": lambda: logchain.entropy(*chain),
        "product": partial(demo.forward_backward, chain),
    }
    seconds = median_seconds(calls, rounds=11)
    names = {"states": "marginals", "sum": 'marginals, "sum"', "messages": "forward_backward", "entropy": "entropy"}
    bars = {"states": "<= 1.5", "sum": "<= 1.5"}
    metric = "time over product's, forward and backward"
    rows = [
        Row(workload, "logchain", name, metric, seconds[key] / seconds["product"], "x", bars.get(key, ""))
        for key, name in names.items()
    ]
    used = peak_bytes(lambda: [t for t in logchain.marginals(*chain, transitions="sum") if t is not None]) / 1e6
    limit = 2 * chain.x.nbytes / 1e6 + 10
    return [*rows, Row(workload, "logchain", names["sum"], "memory", used, "MB", f"<= {limit:g}")]


def edges(chain: Chain, n: int) -> torch.Tensor:
    """The first n sequences as torch-struct has them: [n, v - 1, to, from]."""
    x, bulk, p0 = (tensor[:n, 0] for tensor in chain)
    logs = bulk.log() + x[:, 1:, None, :]
    logs[:, 0] += (p0.log() + x[:, 0])[:, :, None]
    return logs.mT.contiguous()


def paths(n: int, v: int, c: int) -> list[Row]:
    """The best path of each sequence, one matrix for all steps."""
    from hmmlearn import _hmmc
    from torch_struct import LinearChainCRF

    dense = dense_chain(n, v, c)
    chain = dense._replace(bulk=dense.bulk[:, :, :1])
    start, transitions = chain.p0.flatten().double().numpy(), chain.bulk[0, 0, 0].double().numpy()
    frames = [sequence.double().numpy() for sequence in chain.x[:, 0]]
    few = min(n, 2)
    chart = edges(chain._replace(bulk=chain.bulk.expand(-1, -1, v - 1, -1, -1)), few)
    return over(
        f"n={n} v={v} c={c}, one matrix",
        "viterbi",
        lambda: logchain.viterbi(*chain),
        {
            "hmmlearn": lambda: [_hmmc.viterbi(start, transitions, frame) for frame in frames],
            "torch-struct": lambda: LinearChainCRF(chart).argmax,
        },
        {"torch-struct": n / few},
        {"hmmlearn": ">= 1", "torch-struct": ">= 5"},
    )


def draws() -> list[Row]:
    """Paths drawn from the posterior."""
    from torch_struct import LinearChainCRF

    n, v, c = 32, 512, 64
    chain, part = dense_chain(n, v, c), 64
    chart = edges(Chain(chain.x[:, :, :part], chain.bulk[:, :, : part - 1], chain.p0), 1)
    return over(
        f"n={n} v={v} c={c}, shared bulk",
        f"sample, {DRAWS} draws",
        lambda: logchain.sample(*chain, DRAWS),
        {"torch-struct": lambda: LinearChainCRF(chart).sample((1,))},
        {"torch-struct": n * DRAWS * v / part},
        {"torch-struct": ">= 5"},
    )


def against_forward() -> list[Row]:
    """Draws beside the forward pass they begin with."""
    chain, workload = dense_chain(32, 512, 64), "n=32 v=512 c=64, shared bulk"
    calls = {"sample": lambda: logchain.sample(*chain, DRAWS), "product": partial(demo.forward, chain)}
    seconds = median_seconds(calls, rounds=11)
    ratio = seconds["sample"] / seconds["product"]
    return [Row(workload, "logchain", f"sample, {DRAWS} draws", f"time over product's, {FORWARD}", ratio, "x")]


def main() -> None:
    """Measure, and write the results file; a few minutes."""
    rows = []
    for group in (
        posteriors, partial(paths, 32, 512, 16), partial(paths, 32, 512, 64), partial(paths, 1, 10_000, 16),
        draws, against_forward,
    ):  # fmt: skip
        print(f"measuring: {getattr(group, '__name__', group)}", flush=True)
        with on_threads(1):
            rows += group()
    results.write([row._replace(**machine()) for row in rows], results.QUESTIONS)
