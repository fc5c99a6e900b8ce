"""Best paths of a chain in segments that begin early: those of the walk through the whole chain, bit for bit."""

import pytest
import torch

import logchain
from logchain import kernels
from logchain.operands import chain_of
from logchain.schedules import choose, overlapped_paths
from logchain.schedules import overlapped as schedule
from tests.few_sequences import drawn

pytestmark = pytest.mark.skipif(not kernels.in_c(torch.empty(0)), reason="the C loops alone keep such messages")

KINDS = "plain", "ties", "sparse", "sticky", "impossible", "unknown", "left-to-right"


def in_segments(operands, segments, early, monkeypatch):
    """The best paths, and whether sequences are unknown, in so many segments that begin so many steps early."""
    x, bulk, p0, lengths, log_params = operands
    chain = chain_of(x, bulk, p0, lengths, log_params)[1]
    if early is not None:
        monkeypatch.setattr(schedule, "steps_to_forget", lambda *_: early)
    return overlapped_paths.paths(chain, x.shape[-2], segments), kernels.path_kernels(x).paths(chain, x.shape[-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("log_params", [False, True], ids=["linear", "logs"])
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_that_of_one_walk(kind, each, log_params, lengths, dtype, monkeypatch):
    for seed in range(9):
        operands = drawn(kind, seed, each=each, log_params=log_params, lengths=lengths, dtype=dtype)
        for segments, early in ((2, None), (3, 1), (7, 4), (200, 1)):
            with monkeypatch.context() as patch:
                (states, unknown), (expected, also) = in_segments((*operands, log_params), segments, early, patch)
            assert torch.equal(states, expected), (seed, segments, early)
            assert torch.equal(unknown, also)


def test_boundaries_that_differ_are_counted(monkeypatch):
    x, bulk, p0 = torch.zeros(1, 1, 200, 5), torch.eye(5)[None, None, None], torch.arange(1.0, 6).view(1, 1, 5)
    with logchain.rescues() as seen:
        (states, _), _ = in_segments((x, bulk, p0, None, False), 4, 10, monkeypatch)
    assert (states == 4).all()
    assert seen.boundaries == 3


def test_a_chain_that_does_not_forget_is_walked_as_one(monkeypatch):
    x, bulk, p0 = torch.zeros(1, 1, 2000, 5), torch.eye(5)[None, None, None], torch.arange(1.0, 6).view(1, 1, 5)
    walked = []
    kept = kernels.path_messages(torch.empty(0))
    monkeypatch.setattr(
        kernels, "path_messages", lambda _: lambda chain, entering: walked.append(chain.v) or kept(chain, entering)
    )
    with logchain.rescues() as seen:
        (states, _), _ = in_segments((x, bulk, p0, None, False), 4, None, monkeypatch)
    assert (states == 4).all()
    assert seen.boundaries == 0
    assert sum(walked) <= 2000 // 16


@pytest.mark.parametrize("lengths", [None, 150_001], ids=["whole", "shorter"])
def test_viterbi_takes_them_on_threads_without_a_sequence(lengths, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, bulk, p0 = torch.randn(160_001, 8, generator=generator), torch.rand(1, 8, 8, generator=generator), torch.ones(8)
    taken = []
    monkeypatch.setattr(
        "logchain.autograd.viterbi.overlapped_paths.paths",
        lambda *args, paths=overlapped_paths.paths: taken.append(args[2]) or paths(*args),
    )
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        with torch.device("meta"):  # what lies on the CPU stays there
            found.append(logchain.viterbi(x, bulk, p0, lengths=lengths))
    assert taken == [8]
    assert torch.equal(found[0].states, found[1].states)
    assert torch.equal(found[0].score, found[1].score)


@pytest.mark.parametrize(
    ("shape", "segments"),
    [((160_001, 8), 8), ((2, 160_001, 8), 1), ((100, 8), 1), ((0, 160_001, 8), 1), ((5000, 512), 8), ((1000, 512), 1)],
)
def test_short_chains_and_several_sequences_are_walked_as_they_are(shape, segments, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, c = torch.empty(1).expand(shape), shape[-1]
    assert choose.path_segments(x, torch.empty(1).expand(1, c, c), torch.empty(c), False) == segments


def test_each_segment_is_followed_back_twice_at_most(monkeypatch):
    v, c, segments = 2001, 8, 16
    x = torch.zeros(1, 1, v, c)  # all messages are the same, and best paths come from different states
    x[..., ::2, 0] = x[..., 1::2, 1:] = -1e12
    x[..., -1, :] = torch.arange(c)
    followed, follow = [], kernels.path_messages(torch.empty(0)).follow

    def counted(self, states, sequences=None):
        followed.append(None if sequences is None else sequences.tolist())
        follow(self, states, sequences)

    monkeypatch.setattr(kernels.path_messages(torch.empty(0)), "follow", counted)
    operands = x, torch.eye(c)[None, None, None], torch.ones(1, 1, c), None, False
    (states, _), (expected, _) = in_segments(operands, segments, 4, monkeypatch)
    assert torch.equal(states, expected)
    assert followed.count(None) == 3  # a guess, all segments, and the head
    assert len(followed) <= 3 + segments


def test_chains_that_stay_in_a_part_of_their_states_are_not_cut(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, blocks = torch.randn(1, 1, 20_000, 4, generator=generator), torch.ones(2, 2)
    for bulk in (torch.ones(4, 4).triu(), torch.ones(4, 4).tril(), torch.block_diag(blocks, blocks)):
        with logchain.rescues() as seen:
            operands = x, bulk[None, None, None], torch.ones(1, 1, 4), None, False
            (states, _), (expected, _) = in_segments(operands, 8, None, monkeypatch)
        assert torch.equal(states, expected)
        assert seen.boundaries == 0
