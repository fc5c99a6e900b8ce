"""How many operators one call runs, and how often it allocates and calls: `python -m tests.benchmarks run counts`.

The numbers of ordinary calls, as torch's profiler sees them (a dispatch mode would send them another way), once caches
are warm, on one thread. They are the same on every machine with the same release of torch.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

import logchain
from logchain import demo, nn
from logchain.memory import events, profiled
from tests.benchmarks import results
from tests.benchmarks.results import FORWARD, GRADIENTS, Row, machine
from tests.benchmarks.timing import on_threads

# of which a short call's time is mostly Python's: its functions are counted too
SHORT = ("product, v=20", "marginals", "forward_backward")


def calls() -> dict[tuple[str, str], Callable[[], Any]]:
    """One call of each function, by its name with a size and by a mode, with its operands made."""
    generator = torch.Generator().manual_seed(0)
    chain, long = demo.dense_chain(5, 20, 4), demo.dense_chain(5, 200, 4)
    matrices = torch.randn(2, 5, 4, 4, generator=generator).requires_grad_()
    symbols = torch.randint(3, (5, 20), generator=generator)
    tags = torch.randint(4, (5, 20), generator=generator)
    emissions = torch.randn(5, 20, 4, generator=generator).requires_grad_()
    with torch.random.fork_rng():
        crf = nn.LinearChainCRF(4, batch_first=True)
    hmm = nn.HMM(4, "categorical", num_categories=3, generator=generator)
    circuit = nn.ChainCircuit(20, 4, num_categories=3, generator=generator)
    stream = logchain.Stream(chain.bulk[0, :, :1], chain.p0[0])
    piece = chain.x[:, 0]

    def backward(loss: torch.Tensor, module: torch.nn.Module | None = None) -> None:
        if module is not None:
            module.zero_grad(set_to_none=True)
        loss.backward()

    def matmul() -> None:
        torch.autograd.grad(logchain.matmul(*matrices).sum(), matrices)

    return {
        ("product, v=20", FORWARD): lambda: demo.forward(chain),
        ("product, v=20", GRADIENTS): lambda: demo.forward_backward(chain),
        ("product, v=200", FORWARD): lambda: demo.forward(long),
        ("product, v=200", GRADIENTS): lambda: demo.forward_backward(long),
        ("marginals", "states"): lambda: logchain.marginals(*chain),
        ("marginals", "sums of transitions"): lambda: logchain.marginals(*chain, transitions="sum"),
        ("forward_backward", FORWARD): lambda: logchain.forward_backward(*chain),
        ("viterbi", FORWARD): lambda: logchain.viterbi(*chain),
        ("matmul", FORWARD): lambda: logchain.matmul(*matrices.detach()),
        ("matmul", GRADIENTS): matmul,
        ("Stream.update", FORWARD): lambda: stream.update(piece),
        ("nn.LinearChainCRF", "loss, " + GRADIENTS): lambda: backward(-crf(emissions, tags), crf),
        ("nn.HMM", "expectation maximisation"): lambda: nn.em_step(hmm, [lambda: hmm.log_prob(symbols).sum()]),
        ("nn.ChainCircuit", "loss, " + GRADIENTS): lambda: backward(-circuit.log_prob(symbols).mean(), circuit),
    }


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Operators of torch that a call runs, those inside others too, and allocations of tensors."""
    with profiled() as profile:
        call()
    found = {"operators": 0, "allocations": 0}
    for event in events(profile.kineto_results):
        found["operators"] += event.name.startswith("aten::")
        found["allocations"] += event.name == "[memory]" and event.extra_fields.alloc_size > 0
    return found


def frames(call: Callable[[], Any]) -> int:
    """Functions of the library in Python that a call calls."""
    count = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        library = frame.f_globals.get("__name__", "").partition(".")[0] == "logchain"
        # comprehensions are functions in some releases of Python only
        count += event == "call" and library and not frame.f_code.co_name.startswith("<")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def rows() -> Iterator[Row]:
    """The counts of every function."""
    with on_threads(1):  # where counts do not depend on the machine
        for (function, mode), call in calls().items():
            for _ in range(2):  # caches
                call()
            for metric, count in counted(call).items():
                yield Row(function, "logchain", mode, metric, count, "")
            if function in SHORT:
                yield Row(function, "logchain", mode, "frames", frames(call), "")


def main() -> None:
    """Count, and write the results file."""
    place = machine()
    found = [row._replace(**place) for row in rows()]
    results.write(found, results.COUNTS)
    for row in found:
        print(row.workload, row.mode, row.metric, row.text, sep="  ")
