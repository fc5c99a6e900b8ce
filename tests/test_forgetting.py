"""A search for a chain whose messages are accepted although they are wrong: many small chains, of which few forget."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import logchain
from logchain.schedules import choose, overlapped

# chains of one batch, each with matrices of its own
TOGETHER = 64

Draw = Callable[[torch.Generator, int], Tensor]


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(TOGETHER, *shape, generator=generator)


def rare(generator: torch.Generator) -> Tensor:
    """A weight from 1 down to 1e-12 for each chain (n, 1, 1)."""
    return 10 ** (-12 * rand(generator, 1, 1))


def dense(generator: torch.Generator, c: int) -> Tensor:
    return (3 * rand(generator, c, c)).exp()


def sticky(generator: torch.Generator, c: int) -> Tensor:
    return torch.eye(c) + rare(generator) * rand(generator, c, c)


def permutation(generator: torch.Generator, c: int) -> Tensor:
    return torch.eye(c).roll(1, 1) + rare(generator) * rand(generator, c, c)


def blocks(generator: torch.Generator, c: int) -> Tensor:
    """Two parts of the states that hardly meet, or never."""
    part = torch.arange(c) < c // 2
    apart = part[:, None] != part
    meet = rare(generator) * (rand(generator, 1, 1) < 0.7)
    return torch.where(apart, meet, 1.0) * (rand(generator, c, c) + 0.1)


def one_way(generator: torch.Generator, c: int) -> Tensor:
    """From left to right, with a rare way back, or none."""
    back = rare(generator) * (rand(generator, 1, 1) < 0.7)
    return torch.where(torch.ones(c, c).triu() > 0, 1.0, back) * (rand(generator, c, c) + 0.1)


def holes(generator: torch.Generator, c: int) -> Tensor:
    return rand(generator, c, c) * (rand(generator, c, c) < 0.6) + 0.5 * torch.eye(c).roll(1, 1)


def trap(generator: torch.Generator, c: int) -> Tensor:
    """A state that is hardly reached, and never left."""
    matrix = rand(generator, c, c) + 0.1
    matrix[:, :, -1:] *= rare(generator)
    matrix[:, -1] = torch.eye(c)[-1]
    return matrix


KINDS: list[Draw] = [dense, sticky, permutation, blocks, one_way, holes, trap]


def gradients(operands: list[Tensor], **options) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, posteriors and expected transitions."""
    x, log_bulk, log_p0 = (operand.detach().requires_grad_() for operand in operands)
    value = logchain.product(x, log_bulk, log_p0, log_params=True, **options)
    return (value.detach(), *torch.autograd.grad(value.sum(), (x, log_bulk)))


def wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many chains of a batch are outside of the contract, and how many boundaries were refused."""
    generator = torch.Generator().manual_seed(seed)
    c, v, count, early = (
        int(torch.randint(low, high, (), generator=generator)) for low, high in ((2, 7), (9, 60), (2, 5), (1, 9))
    )
    each, kind = seed % 2 > 0, KINDS[seed % len(KINDS)]
    bulk = torch.stack([kind(generator, c) for _ in range(v - 1 if each else 1)], 1)
    scale = torch.tensor([0.0, 0.1, 1.0, 5.0])[seed // len(KINDS) % 4]
    x = scale * torch.randn(TOGETHER, v, c, generator=generator)
    operands = [x, bulk.log(), (rand(generator, c) ** 8).log()]
    truth = gradients([operand.double() for operand in operands], strategy="sequential")
    with monkeypatch.context() as patch, logchain.rescues() as seen:
        patch.setattr(choose, "of", lambda *_: choose.Schedule("overlapped", count))
        patch.setattr(overlapped, "steps_to_forget", lambda *_: early)
        found = gradients(operands)
    # entries of matrices lie up to log(1e13) below the largest, potentials up to 10 scales
    steps = v * (c + 8 + 2 * (30 + 10 * float(scale))) * 2.0**-24
    bounds = [steps + 2.0**-22 * truth[0].abs(), *(2 * steps * part + c * 2.0**-26 for part in truth[1:])]
    off = [
        (((a - b).abs() <= bound) | (a == b)).logical_not().view(TOGETHER, -1).any(-1)
        for a, b, bound in zip(found, truth, bounds, strict=True)
    ]
    return int((off[0] | off[1] | off[2]).sum()), seen.boundaries


def search(first: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The chains that are wrong, and the boundaries that were refused, in batches of `TOGETHER` chains."""
    found = [wrong(seed, monkeypatch) for seed in range(first, first + batches)]
    return sum(one for one, _ in found), sum(other for _, other in found)


def test_no_wrong_chain_is_accepted(monkeypatch):
    assert (found := search(0, 56, monkeypatch))[0] == 0
    assert found[1] > 1000


@pytest.mark.slow
def test_nor_is_one_in_a_hundred_thousand(monkeypatch):
    assert search(1000, 100_000 // TOGETHER + 1, monkeypatch)[0] == 0


def test_the_search_sees_what_a_looser_test_lets_pass(monkeypatch):
    monkeypatch.setattr(overlapped, "tolerance", lambda *_: 0.1)
    loose, _ = search(0, 56, monkeypatch)
    monkeypatch.setattr(overlapped, "tolerance", lambda *_: math.inf)
    assert 0 < loose < search(0, 56, monkeypatch)[0]
