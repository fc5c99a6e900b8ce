"""What no way to compute the chain can do without: its matrix products, and its bytes through memory once."""

import torch

from logchain import _demo
from tests.benchmarks import cpu
from tests.benchmarks.peers import GRADIENTS, Case, Provider, Run


def gemms(case: Case, mode: str) -> Run:
    """One product of a message and a matrix for each step, two more with the backward pass."""
    steps = case.bulk.expand(-1, case.x.shape[1] - 1, -1, -1)
    chain = _demo.Chain(case.x[:, None], steps[:, None], case.p0[None, None])
    run = (_demo.gemms if len(case.bulk) == 1 else cpu.batched_gemms)(chain, backward=mode == GRADIENTS)

    def without_results():
        run()
        return None, None

    return without_results


def copies(case: Case, mode: str) -> Run:
    """Copies that move as many bytes as the inputs have; with gradients, inputs once more and the gradients."""
    moved = sum(tensor.numel() for tensor in case) * (3 if mode == GRADIENTS else 1)
    source, target = torch.ones(moved // 2), torch.empty(moved // 2)

    def run():
        target.copy_(source)
        return None, None

    return run


PROVIDERS = [
    Provider("GEMMs alone", gemms, "torch", floor=True),
    Provider("bytes copied", copies, "torch", floor=True),
]
