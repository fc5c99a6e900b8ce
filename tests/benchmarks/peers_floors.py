"""What no way to compute the chain can do without: its matrix products, and its bytes through memory once."""

import torch

from tests.benchmarks.cases import Case, Stack
from tests.benchmarks.peers import Provider, Run
from tests.benchmarks.peers_torch import ALL
from tests.benchmarks.results import GRADIENTS


def gemms(case: Case, mode: str) -> Run:
    """One product of a message and a matrix for each step, two more with the backward pass; of a stack, the tree's."""
    if isinstance(case, Stack):
        return products(case, mode)
    message, other, steps = torch.rand_like(case.x[:, 0]), torch.rand_like(case.x[:, 0]), case.x.shape[1] - 1
    matrices = case.bulk.expand(-1, steps, -1, -1).transpose(0, 1)
    if len(case.bulk) == 1:
        multiply, matrices = torch.mm, matrices[:, 0]
    else:
        multiply, message, other = torch.bmm, message[:, None], other[:, None]
    step, counts = (
        torch.empty_like(message),
        torch.empty_like(case.bulk[:, 0] if len(case.bulk) > 1 else case.bulk[0, 0]),
    )

    def run():
        for i in range(steps):
            multiply(message, matrices[i], out=step)
            if mode == GRADIENTS:
                multiply(other, matrices[i].mT, out=step)
                multiply(message.mT, other, out=counts)
        return None, None

    return run


def products(stack: Stack, mode: str) -> Run:
    """All matrix products of a level at once; with the backward pass, two more of each."""
    n, v, c, _ = stack.x.shape
    pairs = [torch.rand(n * count, c, c, device=stack.x.device) for count in halves(v)]
    out = [torch.empty_like(pair) for pair in pairs]

    def run():
        for _ in range(3 if mode == GRADIENTS else 1):
            for pair, into in zip(pairs, out, strict=True):
                torch.bmm(pair, pair, out=into)
        return None, None

    return run


def halves(v: int) -> list[int]:
    """How many pairs each level of a tree over v matrices has."""
    return [v // 2, *halves(v - v // 2)] if v > 1 else []


def copies(case: Case, mode: str) -> Run:
    """Copies that move as many bytes as the inputs have; with gradients, inputs once more and the gradients."""
    moved = sum(tensor.numel() for tensor in case) * (3 if mode == GRADIENTS else 1)
    source = torch.ones(moved // 2, device=case.x.device)
    target = torch.empty_like(source)

    def run():
        target.copy_(source)
        return None, None

    return run


PROVIDERS = [
    Provider("GEMMs alone", gemms, "torch", ALL, floor=True),
    Provider("bytes copied", copies, "torch", ALL, floor=True),
]
