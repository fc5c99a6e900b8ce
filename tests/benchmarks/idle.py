"""Questions of one long sequence on one thread, and on two, of which one would have no sequence of its own."""

from collections.abc import Callable, Sequence

import logchain
from logchain.demo import Chain
from tests.benchmarks import results
from tests.benchmarks.overlapped import dense
from tests.benchmarks.results import Row, machine
from tests.benchmarks.timing import median_seconds, on_threads

SIZES = (200_000, 16), (20_000, 64), (4000, 256)

QUESTIONS: dict[str, Callable[..., object]] = {
    "marginals": logchain.marginals,
    "forward_backward": logchain.forward_backward,
    "viterbi": logchain.viterbi,
    "entropy": logchain.entropy,
    "sample": lambda *chain: logchain.sample(*chain, 1),
    "Stream": lambda x, bulk, p0: logchain.Stream(bulk, p0).update(x),
}


def on(threads: int, question: Callable[..., object], chain: Chain) -> Callable[[], None]:
    """A call on so many threads."""

    def run() -> None:
        with on_threads(threads):
            question(*chain)

    return run


def main(sizes: Sequence[tuple[int, int]] = SIZES, rounds: int = 31) -> None:
    """Measure, and write the results file; a minute."""
    rows = []
    for v, c in sizes:
        chain = Chain(*(operand[0, 0] for operand in dense(v, c)))
        for name, question in QUESTIONS.items():
            seconds = median_seconds({str(count): on(count, question, chain) for count in (1, 2)}, rounds=rounds)
            case = f"v={v} c={c}", "logchain", name
            rows += [Row(*case, f"time on {count}", found * 1e3, "ms") for count, found in seconds.items()]
            rows.append(Row(*case, "one thread's time over that of two", seconds["1"] / seconds["2"], "x"))
    results.write([row._replace(**machine()) for row in rows], results.IDLE)
