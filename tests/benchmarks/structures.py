"""Chains of structures, compared with dense matrices, with torch, and durations with torch-struct."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import logchain
from logchain.transitions import Banded, Duration, LowRank, Monarch, Sparse, Transition
from tests.benchmarks.cases import FORWARD, GRADIENTS, Call, Comparison, Part, agree, with_gradients

# steps that represent all of them
FEW = 16

Floors = dict[str, Part]


def few_steps(v: int, *counts: tuple[int, Call]) -> Part:
    """Calls, each so many times per step, for a few steps of v - 1."""
    return Part(lambda: [call() for count, call in counts for _ in range(count * FEW)], FEW / (v - 1))


def structured(case: str, x: Tensor, structure: Transition, once: Floors, thrice: Floors) -> Iterator[Comparison]:
    """The product with a structure compared with floors, forward and with gradients."""
    p0 = torch.full(x.shape[-1:], 1 / x.shape[-1])

    def product(x: Tensor, p0: Tensor, *parameters: Tensor) -> Tensor:
        return logchain.product(x, structure.with_parameters(*parameters), p0)

    ours = partial(logchain.product, x, structure, p0)
    yield Comparison(f"structures/{case}/{FORWARD}", {"logchain": ours, **once})
    ours = with_gradients(product, x, p0, *structure.parameters)
    yield Comparison(f"structures/{case}/{GRADIENTS}", {"logchain": ours, **thrice})


def banded(n: int = 8, v: int = 512, c: int = 2048, bands: int = 4) -> Iterator[Comparison]:
    """A left-to-right chain, compared with products of its dense matrices and copies of five tensors like x."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    structure = Banded(torch.rand(bands, c, generator=generator) + 0.1, list(range(bands)))
    product = partial(torch.matmul, torch.rand(n, c), torch.rand(c, c))
    once, thrice = ({"dense products": few_steps(v, (times, product))} for times in (1, 3))
    thrice["copies of five tensors"] = Part(partial(torch.empty_like(x).copy_, x), 1 / 2.5)  # a copy reads and writes
    yield from structured(f"Banded n={n} v={v} c={c}, {bands} bands", x, structure, once, thrice)


def sparse(v: int = 1000, c: int = 10_000, arcs: int = 10) -> Iterator[Comparison]:
    """A graph, compared with torch's products with the same sparse matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, v, c, generator=generator)
    source = torch.arange(c).repeat_interleave(arcs)
    target = torch.rand(c, c, generator=generator).topk(arcs).indices.flatten()
    structure = Sparse(torch.stack([source, target]), torch.rand(c * arcs, generator=generator) / arcs, c)
    matrix = torch.sparse_coo_tensor(structure.indices.flip(0), structure.values, (c, c)).to_sparse_csr()
    product = partial(torch.matmul, matrix, torch.rand(c, 1))
    floors = ({"torch's sparse products": few_steps(v, (times, product))} for times in (1, 2))
    yield from structured(f"Sparse n=1 v={v} c={c}, {arcs} arcs a state", x, structure, *floors)


def low_rank(n: int = 8, v: int = 100, c: int = 16_384, r: int = 64) -> Iterator[Comparison]:
    """A matrix of low rank with a diagonal, compared with its thin products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    left, right = (torch.rand(c, r, generator=generator) for _ in range(2))
    structure = LowRank(left / r, right / c, torch.rand(c, generator=generator) / 2)
    rows, middles, transposed = torch.rand(FEW * n, c), torch.rand(FEW * n, r), right.mT.contiguous()
    once, share = few_steps(v, (1, lambda: rows[:n] @ left @ transposed))

    def thrice() -> None:
        """The messages' products, and gradients of both factors, for which a few steps are together."""
        _ = [once() for _ in range(3)], rows.mT @ middles, rows.mT @ middles

    floors = ({"its products alone": Part(call, share)} for call in (once, thrice))
    yield from structured(f"LowRank n={n} v={v} c={c} r={r}, with a diagonal", x, structure, *floors)


def monarch(n: int = 32, v: int = 128, blocks: int = 64) -> Iterator[Comparison]:
    """Two factors of square blocks, compared with their batched products and with those of dense matrices."""
    c, generator = blocks**2, torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    left, right = (torch.rand(blocks, blocks, blocks, generator=generator) / blocks for _ in range(2))
    rows, dense = torch.rand(blocks, n, blocks), partial(torch.matmul, torch.rand(n, c), torch.rand(c, c))
    products, gradients = lambda: rows @ left @ right, lambda: rows.mT @ rows
    once = {"its products alone": few_steps(v, (1, products)), "dense products": few_steps(v, (1, dense))}
    thrice = {"its products alone": few_steps(v, (3, products), (2, gradients))}
    yield from structured(f"Monarch n={n} v={v} c={c}", x, Monarch(left, right), once, thrice)


def ctc(steps: int = 500, labels: int = 100, n: int = 32, classes: int = 80) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(steps, n, classes, generator=generator).log_softmax(-1)
    targets = torch.randint(1, classes, (n, labels), generator=generator)
    lengths = torch.full((n,), steps), torch.full((n,), labels)

    def ours(log_probs: Tensor) -> Tensor:
        return logchain.alignment.ctc_loss(log_probs, targets, *lengths, reduction="sum")

    def theirs(log_probs: Tensor) -> Tensor:
        return torch.nn.functional.ctc_loss(log_probs, targets, *lengths, reduction="sum")

    agree(ours(log_probs), theirs(log_probs))
    for mode, make in (FORWARD, partial), (GRADIENTS, with_gradients):
        calls = {"logchain": make(ours, log_probs), "torch's ctc_loss": make(theirs, log_probs)}
        yield Comparison(f"structures/CTC T={steps} U={labels} n={n}, {classes} classes/{mode}", calls)


# states and largest durations
DURATIONS = [(c, longest) for c in (8, 24) for longest in (20, 100)]
# steps of one sequence that torch-struct computes, and the most bytes of its first products of pairs of matrices
STEPS, MOST_BYTES = 4, 2_000_000_000


def product(x: Tensor, matrix: Tensor, durations: Tensor, p0: Tensor) -> Tensor:
    return logchain.product(**Duration(matrix, durations).arguments(x, p0)._asdict())


def recursion(x: Tensor, matrix: Tensor, durations: Tensor, p0: Tensor) -> Tensor:
    """Log-partitions [n] by the log-weights of segments that end at each step, for all durations at once."""
    v, longest = x.shape[1], durations.shape[1]
    log_matrix, log_durations = matrix.log(), durations.log()
    sums = torch.nn.functional.pad(x, (0, 0, 1, 0)).cumsum(1)  # (n, v + 1, c)
    begins, ends = [p0.log().expand(len(x), -1)], x
    for end in range(1, v + 1):
        count = min(longest, end)
        before = torch.stack(begins[end - count :][::-1], -1)  # (n, c, count)
        emitted = (sums[:, end, None] - sums[:, end - count : end].flip(1)).mT
        ends = torch.logsumexp(before + emitted + log_durations[:, :count], -1)
        begins.append(torch.logsumexp(ends[..., None] + log_matrix, 1))
    return ends.logsumexp(-1)


def torch_struct(x: Tensor, matrix: Tensor, durations: Tensor, p0: Tensor) -> Tensor:
    from torch_struct import SemiMarkovCRF

    (n, v, c), longest = x.shape, durations.shape[1]
    sums = torch.nn.functional.pad(x, (0, 0, 1, 0)).cumsum(1)
    edges = x.new_full((n, v, longest + 1, c, c), -1e5)  # first step, duration, next state, state
    for first in range(v):
        count = min(longest, v - first)
        weights = sums[:, first + 1 : first + 1 + count] - sums[:, first, None] + durations.log().mT[:count]
        weights = weights + (p0.log() if first == 0 else 0.0)
        edges[:, first, 1 : count + 1] = weights[:, :, None] + matrix.log().mT
        if first + count == v:  # the state after the end is 0
            edges[:, first, count, 0], edges[:, first, count, 1:] = weights[:, -1], -1e5
    return SemiMarkovCRF(edges).partition


def durations(c: int, longest: int, n: int, v: int) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    matrix = torch.rand(c, c, generator=generator).fill_diagonal_(0)
    durations = torch.rand(c, longest, generator=generator)
    operands = matrix / matrix.sum(-1, keepdim=True), durations / durations.sum(-1, keepdim=True), torch.ones(c) / c
    few = x[:1, :STEPS]
    agree(product(x, *operands), recursion(x, *operands))
    modes: dict[str, Callable[..., Callable[[], object]]] = {FORWARD: partial, GRADIENTS: with_gradients}
    for mode, make in modes.items():
        calls = {"logchain": make(product, x, *operands), "torch segment recursion": make(recursion, x, *operands)}
        if STEPS // 2 * 4 * (c * longest) ** 3 <= MOST_BYTES:
            agree(product(few, *operands), torch_struct(few, *operands))
            calls["torch-struct"] = Part(make(torch_struct, few, *operands), STEPS / (n * v))
        yield Comparison(f"durations/n={n} v={v} c={c}, up to {longest} steps/{mode}", calls)


STRUCTURES = banded, sparse, low_rank, monarch, ctc
