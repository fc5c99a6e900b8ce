"""Chains of explicit durations, compared with torch-struct and with a recursion over segments in torch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import logchain
from logchain.transitions import Duration
from tests.benchmarks.cases import FORWARD, GRADIENTS, Comparison, Part, agree, with_gradients

# states and largest durations
SIZES = [(c, longest) for c in (8, 24) for longest in (20, 100)]
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


def compared(c: int, longest: int, n: int, v: int) -> Iterator[Comparison]:
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
