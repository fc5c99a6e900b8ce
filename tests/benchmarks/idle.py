"""Questions of one long sequence on one thread, and on two, of which one would have no sequence of its own."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import logchain
from logchain.demo import Chain
from tests.benchmarks import results
from tests.benchmarks.cpu import call
from tests.benchmarks.overlapped import dense
from tests.benchmarks.results import MEETING, MODES, Row, machine
from tests.benchmarks.timing import median_seconds, on_threads

SIZES = (200_000, 16), (20_000, 64), (4000, 256)

# sequences that are walked from both ends
LONG = (1_000_000, 16), *SIZES

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


def halves(mode: str) -> Callable[..., object]:
    """A product in halves, which one thread walks as one."""

    def run(*chain: Tensor) -> object:
        strategy = "meeting" if torch.get_num_threads() > 1 else "sequential"
        return call(lambda *operands: logchain.product(*operands, strategy=strategy), Chain(*chain), mode)()

    return run


def rows(v: int, c: int, questions: Mapping[str, Callable[..., object]], rounds: int) -> list[Row]:
    """The times of questions of one sequence on one thread and on two, and their ratios."""
    chain, found = Chain(*(operand[0, 0] for operand in dense(v, c))), []
    for name, question in questions.items():
        seconds = median_seconds({str(count): on(count, question, chain) for count in (1, 2)}, rounds=rounds)
        case = f"v={v} c={c}", "logchain", name
        found += [Row(*case, f"time on {count}", one * 1e3, "ms") for count, one in seconds.items()]
        found.append(Row(*case, "one thread's time over that of two", seconds["1"] / seconds["2"], "x"))
    return found


def main(
    sizes: Sequence[tuple[int, int]] = SIZES, long: Sequence[tuple[int, int]] = LONG, rounds_of_each: int = 31
) -> None:
    """Measure, and write the results file; a minute."""
    products = {f"{MEETING}{mode}": halves(mode) for mode in MODES}
    measured = [row for v, c in sizes for row in rows(v, c, QUESTIONS, rounds_of_each)]
    measured += [row for v, c in long for row in rows(v, c, products, rounds_of_each)]
    results.write([row._replace(**machine()) for row in measured], results.IDLE)
