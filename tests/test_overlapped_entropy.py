"""Entropies and divergences of paths in segments that begin early: those of the walk through the whole chain."""

import math

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels
from logchain.operands import chain_of
from logchain.schedules import choose, overlapped_entropy
from logchain.schedules import overlapped as schedule
from tests import oracle
from tests.few_sequences import drawn

pytestmark = pytest.mark.skipif(not kernels.in_c(torch.empty(0)), reason="the C loops alone know segments of entropies")

F64 = torch.float64
KINDS = "plain", "sparse", "sticky", "peaked", "impossible", "never", "unknown", "left-to-right", "permutation"


def other(x, bulk, p0):
    """Operands of a chain that forbids nothing that these allow."""
    return 0.5 * x.roll(1, -1).clamp(min=-100), bulk.roll(1, -1), p0.flip(-1)


def same(found, expected, chain, segments: int) -> None:
    """Fails unless the same values are known, and they are the same.

    They differ by twice what the contract allows for an entropy, and by what boundaries are accepted with.
    """
    (values, unknown), (truth, also) = found, expected
    log_norm = kernels.chain_kernels(chain.x).forward(chain)[0].log_norm
    size = torch.where(log_norm.isfinite(), log_norm.abs(), 0.0).clamp(min=1)
    room = 2.0**-48 * torch.maximum(size, truth.abs()) + segments * schedule.tolerance(chain.c, F64) * (1 + truth.abs())
    assert torch.equal(unknown, also)
    gap = torch.where(values == truth, 0.0, (values - truth).abs())
    assert (unknown | (gap <= room) | (values.isnan() & truth.isnan())).all(), gap


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("log_params", [False, True], ids=["linear", "logs"])
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_one_walk(kind, each, log_params, lengths, dtype, monkeypatch):
    for seed in range(9):
        x, bulk, p0, ends = drawn(kind, seed, each=each, log_params=log_params, lengths=lengths, dtype=dtype)
        q = other(x, bulk, p0)
        chains = [chain_of(*one, ends, log_params)[1] for one in ((x, bulk, p0), q)]
        for some in (chains[:1], chains):
            expected = kernels.entropies().expected(some)[:2]
            for segments, early in ((2, None), (2, 20), (3, 1), (7, 4), (200, 1)):
                with monkeypatch.context() as patch:
                    if early is not None:
                        patch.setattr(schedule, "steps_to_forget", lambda *_, early=early: early)
                    found = overlapped_entropy.entropies(some, segments)
                same(found, expected, chains[0], segments)


def forced(monkeypatch, segments: int, early: int) -> None:
    """Entropies are found in so many segments, which begin so many steps early."""
    monkeypatch.setattr(choose, "entropy_segments", lambda *_: segments)
    monkeypatch.setattr(schedule, "steps_to_forget", lambda *_: early)


@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
def test_what_forgets_is_walked_once_and_is_right(dtype, each, monkeypatch):
    generator = torch.Generator().manual_seed(7)
    v, c = 600, 6
    x = torch.randn(v, c, generator=generator, dtype=dtype)
    bulk = torch.rand(v - 1 if each else 1, c, c, generator=generator, dtype=dtype)
    p0 = torch.rand(c, generator=generator, dtype=dtype)
    forced(monkeypatch, 5, 40)
    walked, expected = [], kernels.entropies().expected

    def counted(chains, *args, **options):
        walked.append(chains[0].v)
        return expected(chains, *args, **options)

    monkeypatch.setattr(kernels.entropies(), "expected", counted)
    with logchain.rescues() as seen:
        found = logchain.entropy(x, bulk, p0)
    assert walked == [(v - 1) % 5 + 1, (v - 1) // 5]
    assert seen.boundaries == seen.sequences == 0
    truth = oracle.entropy(x.numpy(), bulk.numpy(), p0.numpy())
    assert abs(float(found) - truth) <= np.spacing(np.float32(truth) if dtype == torch.float32 else 8 * truth)


def test_terms_that_depend_on_a_later_state_are_refused(monkeypatch):
    """All messages are uniform, but a path stays in one state or goes on choosing one of two."""
    v = 200
    bulk = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]])
    forced(monkeypatch, 4, 20)
    with logchain.rescues() as seen:
        found = logchain.entropy(torch.zeros(v, 3), bulk, torch.full((3,), 1 / 3), lengths=torch.tensor(v))
    assert seen.boundaries == 4
    torch.testing.assert_close(found, torch.tensor(math.log(3) + 2 / 3 * (v - 1) * math.log(2)))


def test_what_ends_before_terms_are_forgotten_needs_no_later_state(monkeypatch):
    bulk = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]])
    forced(monkeypatch, 4, 20)
    x, p0 = torch.zeros(4, 200, 3), torch.full((4, 3), 1 / 3)
    for last, refused in ((34, 4), (35, 5)):  # a head of 4 steps, and 30 of the first segment
        lengths = torch.tensor([1, 5, last, 200])
        with logchain.rescues() as seen:
            found = logchain.entropy(x, bulk[None], p0, lengths=lengths)
        assert seen.boundaries == refused
        torch.testing.assert_close(found, math.log(3) + 2 / 3 * (lengths - 1) * math.log(2))


def test_rare_states_of_extreme_terms_do_not_spoil_the_others(monkeypatch):
    """A state that is left at once, with a weight of e-200, whose ratio to that of the other chain is e+400."""
    generator = torch.Generator().manual_seed(1)
    v, c = 300, 3
    bulk = torch.rand(1, c, c, generator=generator, dtype=F64).log()
    x = torch.randn(v, c, generator=generator, dtype=F64)
    other_x = x + 1e-4 * torch.randn(v, c, generator=generator, dtype=F64)
    x[:, 2] -= 200
    other_x[:, 2] -= 600
    p, q = (x, bulk, torch.zeros(c, dtype=F64)), (other_x, bulk, torch.zeros(c, dtype=F64))
    one_walk = logchain.kl_divergence(p, q, log_params=True)
    forced(monkeypatch, 4, 40)
    with logchain.rescues() as seen:
        found = logchain.kl_divergence(p, q, log_params=True)
    assert seen.boundaries == 0 < one_walk < 1e-4
    torch.testing.assert_close(found, one_walk, rtol=0, atol=1e-14)


def test_large_scales_do_not_take_digits(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=generator, dtype=F64)
    x[:200] -= 1e6
    x[200:] += 1e6
    chain = x, torch.rand(1, 5, 5, generator=generator, dtype=F64), torch.ones(5, dtype=F64)
    one_walk = logchain.entropy(*chain)
    forced(monkeypatch, 4, 30)
    with logchain.rescues() as seen:
        torch.testing.assert_close(logchain.entropy(*chain), one_walk, rtol=2.0**-49, atol=0)
    assert seen.boundaries == 0


@pytest.mark.parametrize("divergence", [False, True], ids=["entropy", "divergence"])
def test_a_message_that_underflows_beside_large_terms_is_refused(divergence, monkeypatch):
    """A rare state is deeper in a message that the large terms of the others weigh; the sequence ends on its way."""
    block = torch.eye(4, dtype=F64)
    block[1:3, 1:3] = 0.5
    count, v = 400, 400 * 31  # a head of 400 steps, and segments of 30
    x, lengths = torch.zeros(1, 2, v, 4, dtype=F64), torch.tensor([[405, v]])
    monkeypatch.setattr(schedule, "steps_to_forget", lambda *_: 20)
    for depth in torch.arange(615.0, 630.0, 1.0):
        p0 = torch.tensor([0.0, 0.0, 0.0, -depth], dtype=F64)
        starts = p0, p0 - torch.tensor([500.0, 0.0, 0.0, 0.0], dtype=F64)
        chains = [chain_of(x, block.log()[None, None, None], start[None, None], lengths, True)[1] for start in starts]
        some = chains if divergence else chains[:1]
        same(overlapped_entropy.entropies(some, count), kernels.entropies().expected(some)[:2], chains[0], 1)


def test_what_would_underflow_behind_the_end_of_a_sequence_does_not_matter(monkeypatch):
    """A sequence ends within the warm-up of a segment that it does not reach, where a uniform message underflows."""
    c, v = 3, 204  # a head of 4 steps, and segments of 50
    x = torch.zeros(2, 1, v, c, dtype=F64)
    bulk = torch.full((2, 1, v - 1, c, c), 0.1, dtype=F64) + torch.eye(c, dtype=F64)
    bulk[0, 0, :, 1:, 0] = bulk[0, 0, :, 0, 1:] = 0.0
    bulk[0, 0, :48, 0, 0] = 1e20  # a state that the sequence never takes
    bulk[0, 0, 48, 0, 0] = 0.0
    p0 = torch.tensor([[[0.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]]], dtype=F64)
    chain = chain_of(x, bulk, p0, torch.tensor([[50], [v]]), False)[1]
    monkeypatch.setattr(schedule, "steps_to_forget", lambda *_: 20)
    expected = kernels.entropies().expected([chain])[:2]
    with logchain.rescues() as seen:
        same(overlapped_entropy.entropies([chain], 4), expected, chain, 4)
    assert seen.boundaries == 0
    assert not expected[1].any()


def test_one_sequence_that_does_not_forget_leaves_all_to_one_walk():
    """It would be refused, and all of them walked again."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 20_000, 6, generator=generator)
    x[0] = 0
    bulk, p0 = 1e-7 * torch.rand(1, 1, 6, 6, generator=generator) + torch.eye(6), torch.ones(4, 6)
    chain = chain_of(10 * x, bulk, p0, None, False)[1]
    with logchain.rescues() as seen:
        found = overlapped_entropy.entropies([chain], 4)[0]
    assert seen.boundaries == 0
    assert torch.equal(found, kernels.entropies().expected([chain]).values)


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("at", [20, 100, 190])
def test_ratios_of_weights_that_overflow_are_left_to_logarithms(at, segments, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator, dtype=F64)
    bulk, p0 = torch.rand(1, 2, 2, generator=generator, dtype=F64), torch.ones(2, dtype=F64)
    other_x = x.clone()
    other_x[at] -= torch.tensor([1e100, 3e100], dtype=F64)
    p, q = (x, bulk, p0), (other_x, bulk, p0)
    forced(monkeypatch, segments, 30)
    found = logchain.kl_divergence(p, q)
    expected = logchain.reference.kl_divergence(*(tuple(t.numpy() for t in operands) for operands in (p, q)))
    assert 1e95 < found < 3e100
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "threads", "segments"),
    [((200_000, 8), 1, 8), ((200_000, 8), 2, 16), ((2, 200_000, 8), 2, 8), ((2, 200_000, 8), 1, 1), ((400, 8), 2, 1)],
)
def test_few_long_sequences_are_cut(shape, threads, segments, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, bulk = torch.empty(1).expand(shape), torch.empty(1).expand(*[1] * len(shape[:-2]), 1, 8, 8)
    assert choose.entropy_segments(x, bulk, torch.empty(8), False) == segments


def test_sequences_with_matrices_of_their_own_are_cut_on_idle_threads_alone(monkeypatch):
    x, bulk = torch.empty(1).expand(100_000, 16), torch.empty(1).expand(99_999, 16, 16)
    found = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        found.append(choose.entropy_segments(x, bulk, torch.empty(16), False))
    assert found == [1, 2, 4]


def test_both_questions_take_them(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, bulk, p0 = torch.randn(200_000, 4, generator=generator), torch.rand(1, 4, 4, generator=generator), torch.ones(4)
    q = x.flip(-1), bulk.mT, p0
    taken, entropies = [], overlapped_entropy.entropies
    monkeypatch.setattr(
        overlapped_entropy, "entropies", lambda chains, segments: taken.append(segments) or entropies(chains, segments)
    )
    side_by_side = logchain.entropy(x, bulk, p0), logchain.kl_divergence((x, bulk, p0), q)
    assert taken == [16, 16]
    monkeypatch.setattr(choose, "entropy_segments", lambda *_: 1)
    in_turn = logchain.entropy(x, bulk, p0), logchain.kl_divergence((x, bulk, p0), q)
    torch.testing.assert_close(side_by_side, in_turn, rtol=2e-7, atol=0)
