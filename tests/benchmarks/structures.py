"""Structures beside what they cannot be faster than: their products alone, the copy of their tensors, or torch's own.

Run again with ATEN_CPU_CAPABILITY=avx2 and MKL_ENABLE_INSTRUCTIONS=AVX2 for the rows of those instructions.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import logchain
from logchain.kernels.cpu.library import in_large_pages
from logchain.transitions import Banded, LowRank, Monarch, Sparse, Transition
from tests.benchmarks import kept, results
from tests.benchmarks.results import FORWARD, GRADIENTS, Row, machine
from tests.benchmarks.timing import median_seconds, on_threads

# steps of a chain of dense products that are timed, and whose time is multiplied
_STEPS = 8

Call = Callable[[], object]


class Goal(NamedTuple):
    """A ratio of two calls: of `over` and ours if it should be large, `>=`, and of ours and `over` otherwise."""

    what: str
    over: str
    bar: str
    times: float = 1.0


class Case(NamedTuple):
    """A workload: calls by mode and name, ours among them, and what is asked of the ratios of their times.

    `arcs`: how many are passed in all steps, where the time of one is asked for, and its goals in nanoseconds.
    """

    name: str
    calls: dict[str, dict[str, Call]]
    goals: dict[str, list[Goal]]
    arcs: int = 0


# nanoseconds an arc and step
_NANOSECONDS = {FORWARD: "<= 0.6", GRADIENTS: "<= 2"}


def both(x: Tensor, structure: Transition, p0: Tensor) -> tuple[Call, Call]:
    """The product without gradients, and with those of all operands."""
    leaves = [operand.clone().requires_grad_() for operand in (x, p0, *structure.parameters)]
    trained = structure.with_parameters(*leaves[2:])

    def gradients() -> None:
        torch.autograd.grad(logchain.product(leaves[0], trained, leaves[1]).sum(), leaves)

    return lambda: logchain.product(x, structure, p0), gradients


def banded(n: int = 8, v: int = 512, c: int = 2048, bands: int = 4) -> Case:
    """A left-to-right chain, beside the products of its dense matrices, and the copy of five tensors like x."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    structure = Banded(torch.rand(bands, c, generator=generator) + 0.1, list(range(bands)))
    forward, gradients = both(x, structure, torch.full((c,), 1 / c))
    dense, rows, out, touched = torch.rand(c, c), torch.rand(n, c), torch.empty(n, c), torch.empty_like(x)

    def products() -> None:
        for _ in range(_STEPS):
            torch.mm(rows, dense, out=out)

    share = (v - 1) / _STEPS
    what = "products of its dense matrices alone, over"
    return Case(
        f"Banded n={n} v={v} c={c}, {bands} bands",
        {
            FORWARD: {"ours": forward, "dense": products},
            GRADIENTS: {
                "ours": gradients,
                "dense": products,
                "copy": lambda: in_large_pages(torch.empty_like(x)).copy_(x),
                "again": lambda: touched.copy_(x),
            },
        },
        {
            FORWARD: [Goal(what, "dense", ">= 25", share)],
            # three products a step; a copy reads and writes, so that five tensors are two and a half copies
            GRADIENTS: [
                Goal(what, "dense", ">= 30", 3 * share),
                Goal("over copies of its five tensors, as fresh as ours", "copy", "<= 3", 2.5),
                Goal("over copies of its five tensors, to memory in use", "again", "", 2.5),
            ],
        },
    )


def sparse(v: int = 1000, c: int = 10_000, arcs: int = 10) -> Case:
    """A graph: nanoseconds an arc and step, and torch's product with the same sparse matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, v, c, generator=generator)
    source = torch.arange(c).repeat_interleave(arcs)
    target = torch.rand(c, c, generator=generator).topk(arcs).indices.flatten()
    structure = Sparse(torch.stack([source, target]), torch.rand(c * arcs, generator=generator) / arcs, c)
    forward, gradients = both(x, structure, torch.full((c,), 1 / c))
    matrix = torch.sparse_coo_tensor(structure.indices.flip(0), structure.values, (c, c)).to_sparse_csr()
    message = torch.rand(c, 1)

    def products() -> None:
        for _ in range(_STEPS):
            matrix @ message

    goal = Goal("torch's sparse products alone, over", "torch", "", (v - 1) / _STEPS)
    return Case(
        f"Sparse n=1 v={v} c={c}, {arcs} arcs a state",
        {mode: {"ours": ours, "torch": products} for mode, ours in ((FORWARD, forward), (GRADIENTS, gradients))},
        {FORWARD: [goal], GRADIENTS: [goal._replace(times=2 * goal.times)]},
        (v - 1) * c * arcs,
    )


def low_rank(n: int = 8, v: int = 100, c: int = 16_384, r: int = 64) -> Case:
    """A matrix of low rank with a diagonal, beside its thin products alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    left, right = (torch.rand(c, r, generator=generator) for _ in range(2))
    structure = LowRank(left / r, right / c, torch.rand(c, generator=generator) / 2)
    forward, gradients = both(x, structure, torch.rand(c, generator=generator))
    rows, middle, out = torch.rand(n, c), torch.empty(n, r), torch.empty(n, c)
    transposed, count = right.mT.contiguous(), 16
    many, middles, sums = torch.rand(count * n, c), torch.rand(count * n, r), torch.empty(c, r)

    def products() -> None:
        for _ in range(v - 1):
            torch.mm(rows, left, out=middle), torch.mm(middle, transposed, out=out)

    def three() -> None:
        products(), products()
        for _ in range(math.ceil((v - 1) / count)):  # both factors' gradients, some steps at once
            torch.mm(many.mT, middles, out=sums), torch.mm(many.mT, middles, out=sums)

    return Case(
        f"LowRank n={n} v={v} c={c} r={r}, with a diagonal",
        {FORWARD: {"ours": forward, "alone": products}, GRADIENTS: {"ours": gradients, "alone": three}},
        {
            FORWARD: [Goal("over its products alone", "alone", "<= 1.5")],
            GRADIENTS: [Goal("over its products alone", "alone", "<= 1.7")],
        },
    )


def monarch(n: int = 32, v: int = 128, blocks: int = 64) -> Case:
    """Two factors of square blocks, beside their batched products alone, and those of the dense matrices."""
    c, generator = blocks**2, torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    left, right = (torch.rand(blocks, blocks, blocks, generator=generator) / blocks for _ in range(2))
    forward, gradients = both(x, Monarch(left, right), torch.rand(c, generator=generator))
    rows, out, dense = torch.rand(blocks, n, blocks), torch.empty(blocks, n, blocks), torch.rand(c, c)
    flat, flat_out, sums = torch.rand(n, c), torch.empty(n, c), torch.zeros(blocks, blocks, blocks)

    def products() -> None:
        for _ in range(v - 1):
            torch.bmm(rows, left, out=out), torch.bmm(out, right, out=rows)
        rows.fill_(0.5)

    def three() -> None:
        products(), products()
        for _ in range(v - 1):
            sums.baddbmm_(rows.mT, out, beta=0), sums.baddbmm_(out.mT, rows, beta=0)

    def of_dense() -> None:
        for _ in range(2):
            torch.mm(flat, dense, out=flat_out)

    large = Goal("products of its dense matrices alone, over", "dense", ">= 25", (v - 1) / 2)
    return Case(
        f"Monarch n={n} v={v} c={c}",
        {
            FORWARD: {"ours": forward, "alone": products, "dense": of_dense},
            GRADIENTS: {"ours": gradients, "alone": three},
        },
        {
            FORWARD: [Goal("over its products alone", "alone", "<= 1.5"), large],
            GRADIENTS: [Goal("over its products alone", "alone", "<= 1.7")],
        },
    )


def ctc(steps: int = 500, labels: int = 100, n: int = 32, classes: int = 80) -> Case:
    """CTC, beside torch's own."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(steps, n, classes, generator=generator).log_softmax(-1)
    targets = torch.randint(1, classes, (n, labels), generator=generator)
    lengths = torch.full((n,), steps), torch.full((n,), labels)
    leaf = log_probs.clone().requires_grad_()

    def ours(log_probs: Tensor) -> Tensor:
        return -logchain.product(**logchain.adapters.from_ctc(log_probs, targets, *lengths)._asdict()).sum()

    def torchs(log_probs: Tensor) -> Tensor:
        return torch.nn.functional.ctc_loss(log_probs, targets, *lengths, reduction="sum")

    def gradients(loss: Callable[[Tensor], Tensor]) -> Call:
        return lambda: torch.autograd.grad(loss(leaf), leaf)

    goals = [Goal("torch's ctc_loss, over", "torch", ">= 5")]
    return Case(
        f"CTC T={steps} U={labels} n={n}, {classes} classes",
        {
            FORWARD: {"ours": lambda: ours(log_probs), "torch": lambda: torchs(log_probs)},
            GRADIENTS: {"ours": gradients(ours), "torch": gradients(torchs)},
        },
        {FORWARD: goals, GRADIENTS: goals},
    )


def rows_of(case: Case, rounds: int) -> list[Row]:
    """The times and the ratios of a case."""
    rows = []
    for mode, calls in case.calls.items():
        with on_threads(1):
            seconds = median_seconds(calls, rounds=rounds)
        key = case.name, "logchain", mode
        rows.append(Row(*key, "time", seconds["ours"] * 1e3, "ms"))
        if case.arcs:
            rows.append(Row(*key, "an arc and step", seconds["ours"] / case.arcs * 1e9, "ns", _NANOSECONDS[mode]))
        for goal in case.goals[mode]:
            ratio = seconds[goal.over] * goal.times / seconds["ours"]
            rows.append(Row(*key, goal.what, 1 / ratio if goal.what.startswith("over") else ratio, "x", goal.bar))
    return rows


CASES = banded, sparse, low_rank, monarch, ctc


def main(rounds: int = 9) -> None:
    """Measure, and write the rows of this machine's instructions to the results file; two minutes."""
    level = torch.backends.cpu.get_cpu_capability().replace("CAPABILITY ", "")
    rows = []
    for make in CASES:
        case = make()
        rows += rows_of(case._replace(name=f"{case.name}, {level}"), rounds)
    kept.keep(results.STRUCTURES, [row._replace(**machine()) for row in rows], [row.workload for row in rows])
