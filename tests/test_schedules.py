"""Schedules keep the contract where segments remember, underflow or disagree, and as numbers make them rare."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from tests import families
from tests.backends import on, parameter
from tests.contract import assert_contract, assert_values, value_bound
from tests.families import F32, F64, Chain, Draw
from tests.kernels.cpu import adversary
from tests.subjects import STRATEGIES


def dense(c: int) -> torch.Tensor:
    return torch.randn(c, c, generator=torch.Generator().manual_seed(c)).softmax(-1)


def memories(v: int, c: int, *spans: tuple[int, int]) -> Chain:
    """A chain that forgets but in some spans of steps, where states stay what they are."""
    matrices = dense(c).expand(v - 1, c, c).clone()
    for start, stop in spans:
        matrices[start:stop] = torch.eye(c)
    x = torch.randn(1, 1, v, c, generator=torch.Generator().manual_seed(v))
    start = torch.arange(1.0, c + 1).pow(3)  # far from uniform
    return Chain(x, matrices[None, None], start[None, None])


@pytest.mark.parametrize("number", [4, 5, 7])
@pytest.mark.parametrize("span", [(150, 350), (700, 1000), (900, 1200)], ids=str)
def test_a_boundary_that_is_remembered_is_refused(span, number):
    with logchain.rescues() as seen:
        assert_contract(memories(1201, 4, span), strategy=f"segments:{number}:32")
    assert seen.boundaries > 0


def test_chains_that_forget_need_no_second_scan():
    for each, dtype in ((False, F32), (True, F64)):
        draw = Draw(0, 2, 1, 2001, 5, each)
        operands = Chain(draw.x(0.1), 1 + draw.bulk(), draw.p0()).to(dtype)
        with logchain.rescues() as seen:
            logchain.product(*operands[:3], strategy="segments:4")
        assert (seen.sequences, seen.boundaries) == (0, 0)


def test_sequences_that_are_recomputed_leave_the_others():
    one, other = memories(601, 4), memories(601, 4, (100, 400))
    chain = Chain(*(torch.cat(pair) for pair in zip(one[:3], other[:3], strict=True)))
    for lengths in (None, torch.tensor([[601], [203]])):
        assert_contract(chain, lengths, strategy="segments:4:32")


# chains of one batch, each with separate matrices
TOGETHER = 64


def matrices(kind: str, generator: torch.Generator, c: int) -> torch.Tensor:
    """A matrix [c, c] that mixes its states well, hardly or never."""
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    rare, state = 10 ** (-12 * float(rand(1))) * (float(rand(1)) < 0.8), torch.arange(c)
    if kind == "dense":
        return (3 * rand(c, c)).exp()
    if kind == "sticky":
        return torch.eye(c) + rare * rand(c, c)
    if kind == "cycle":
        return torch.eye(c).roll(1, 1) + rare * rand(c, c)
    if kind == "blocks":
        apart = (state < c // 2)[:, None] != (state < c // 2)
        return torch.where(apart, rare, 1.0) * (rand(c, c) + 0.1)
    if kind == "one way":
        return torch.where(torch.ones(c, c).triu() > 0, 1.0, rare) * (rand(c, c) + 0.1)
    if kind == "holes":
        return rand(c, c) * (rand(c, c) < 0.6) + 0.5 * torch.eye(c).roll(1, 1)
    trap = rand(c, c) + 0.1  # a state that is hardly reached, and never left
    trap[:, -1] *= rare
    trap[-1] = torch.eye(c)[-1]
    return trap


def judge_boundaries(seed: int) -> int:
    """Judge a batch of chains in segments; how many boundaries were refused."""
    generator = torch.Generator().manual_seed(seed)
    ends = (2, 7), (9, 60), (2, 5), (1, 9)
    c, v, number, early = (int(torch.randint(*some, (), generator=generator)) for some in ends)
    kinds = ["dense", "sticky", "cycle", "blocks", "one way", "holes", "trap"]
    each, kind = seed % 2 > 0, kinds[seed % len(kinds)]
    steps = [[matrices(kind, generator, c) for _ in range(v - 1 if each else 1)] for _ in range(TOGETHER)]
    scale = (0.0, 0.1, 1.0, 5.0)[seed // len(kinds) % 4]
    x = scale * torch.randn(TOGETHER, v, c, generator=generator)
    bulk, p0 = torch.stack([torch.stack(some) for some in steps]), torch.rand(TOGETHER, c, generator=generator) ** 8
    drawn = adversary.Drawn(Chain(x, bulk, p0).logs(), None)
    with logchain.rescues() as count:
        adversary.assert_within_bounds(drawn, f"{seed}", strategy=f"segments:{number}:{early}")
    return count.boundaries


@pytest.mark.parametrize("first", [0, pytest.param(100, marks=pytest.mark.slow)])
def test_no_wrong_boundary_is_accepted(first):
    seeds = range(first, first + (56 if first == 0 else 100))
    assert sum(map(judge_boundaries, seeds)) > 1000


@pytest.mark.parametrize("strategy", ["sequential", "segments:64:20", "tree"])
def test_posteriors_of_a_long_chain(strategy):
    v, draw = 4096, Draw(0, 1, 1, 4096, 8, False)
    chain = Chain(draw.x() - 128.0, draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    truth = reference.marginals(*chain[:3])
    x = chain.x.requires_grad_()
    out = logchain.product(*chain[:3], strategy=strategy)
    assert_values(out, truth.log_norm, value_bound(truth.log_norm, v, 8, dtype=F32))
    out.backward()
    assert np.abs(x.grad.double().numpy() - truth.states).max() < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("far", "log"), [(1e-300, False), (1e307, False), (-1e4, True), (1e5, True)])
@pytest.mark.parametrize("part", ["bulk", "p0"])
def test_weights_far_from_one(part, far, log, strategy):
    """So far that a logarithm is rounded by more than the contract allows; all weights of one operand are."""
    chain = families.dense(F64, n=1, t=1, v=9, c=4, log=log)
    weights = getattr(chain, part)
    assert_contract(chain._replace(**{part: weights + far if log else weights * far}), strategy=strategy)


def apart(depth: float) -> Chain:
    """Two states that never meet, of which the one that wins in the end is far below the other at first."""
    x = torch.zeros(1, 1, 40, 2, dtype=F32)
    x[..., :20, 0], x[..., 20:, 1] = -depth / 20, -2 * depth / 20
    return Chain(x, torch.eye(2).expand(1, 1, 1, 2, 2).contiguous(), torch.ones(1, 1, 2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("depth", [60.0, 200.0, 2000.0])
def test_what_underflows_between_segments_is_found(depth, strategy):
    assert_contract(apart(depth), strategy=strategy)


# what each backend may be asked for many times; the search of `sequential` in C has a file of its own
SEARCHED = [("cpu", name) for name in STRATEGIES[1:]]
SEARCHED += [("plain", name) for name in ("sequential", "segments:3:2", "tree")] + [("gpu", "sequential")]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize(("backend", "strategy"), [parameter(*pair) for pair in SEARCHED])
def test_no_random_chain_is_wrong(backend, strategy, dtype, monkeypatch, request):
    monkeypatch.setattr(adversary, "BATCHES", [(4,), (2, 2)])
    if backend == "gpu":
        request.getfixturevalue("both_ends")
    with on(backend) as device:
        for number in range({"cpu": 24, "plain": 10, "gpu": 3}[backend]):
            drawn = adversary.draw(np.random.default_rng((7, number)), dtype)
            adversary.assert_within_bounds(drawn, f"7 {number}", device=device, strategy=strategy)
