"""What a stream costs on the CPU, beside the one-shot product of the same steps, and what memory it holds for ever.

Times are this thread's CPU time, medians of runs taken in turns in one process. Memory is what torch's allocator holds
at its peak during an update, without what the update returns.
"""

import time

import torch
from torch import Tensor

import logchain
from logchain.memory import peak_bytes
from logchain.stream import Stream
from tests.benchmarks.results import FORWARD, Row
from tests.benchmarks.timing import median_seconds

PIECE, WIDE, ONE_SHOT, LONG = 10_000, 100_000, 1_000_000, 10_000_000


def stream_rows(c: int = 8, *, rounds: int = 5) -> list[Row]:
    """Time against one shot of a million steps, with and without posteriors; memory after ten million."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ONE_SHOT, c, generator=draw)
    bulk = torch.softmax(torch.randn(1, c, c, generator=draw), -1)
    p0 = torch.full((c,), 1 / c)

    def fed(piece: int, **options: bool) -> Stream:
        stream = Stream(bulk, p0, **options)
        for part in x.split(piece):
            stream.update(part)
        return stream

    one_shot = "product, one shot"
    calls = {
        one_shot: lambda: logchain.product(x, bulk, p0),
        f"pieces of {PIECE:,}": lambda: fed(PIECE),
        f"pieces of {PIECE:,}, filtered=False": lambda: fed(PIECE, filtered=False),
        f"pieces of {WIDE:,}": lambda: fed(WIDE),
        f"pieces of {WIDE:,}, filtered=False": lambda: fed(WIDE, filtered=False),
    }
    seconds = median_seconds(calls, rounds=rounds, clock=time.thread_time)
    workload = f"n=1 v={ONE_SHOT:,} c={c}, one matrix"
    rows = []
    for name, spent in seconds.items():
        row = Row(workload, "logchain" if name == one_shot else "Stream", name, "steps a second", ONE_SHOT / spent, "")
        ratio = seconds[one_shot] / spent
        bar = ">= 1" if name != one_shot else ""
        rows += [row, row._replace(metric="speed over the one-shot product's", value=ratio, unit="x", bar=bar)]
    return rows + _memory(x, bulk, p0)


def _memory(x: Tensor, bulk: Tensor, p0: Tensor) -> list[Row]:
    pieces, stream = x.split(PIECE), Stream(bulk, p0)

    def one() -> list[Tensor]:
        return [tensor for tensor in stream.update(pieces[0]) if tensor is not None]

    one()
    early = peak_bytes(one)
    for i in range(LONG // PIECE):
        stream.update(pieces[i % len(pieces)])
    late = peak_bytes(one)
    workload = f"n=1 v={LONG:,} c={x.shape[-1]}, one matrix, in pieces of {PIECE:,}"
    return [
        Row(workload, "Stream", FORWARD, "memory of the last piece", late / 1e6, "MB"),
        Row(workload, "Stream", FORWARD, "memory of the last piece over the second's", late / early, "x", "<= 1"),
    ]
