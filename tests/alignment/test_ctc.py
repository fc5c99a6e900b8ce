"""`alignment.ctc_loss` has the values and gradients of torch's, and those of all alignments where few."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import ctc_loss

import logchain
from logchain import alignment
from tests.adapted import NATS, SHARE, distance, gradients, normal, seeded
from tests.alignment.enumeration import alignments

F32, F64 = torch.float32, torch.float64

# repeated labels, one target that needs all of its frames, one that needs more, none, and one label in one frame
FRAMES, LABELS = [20, 20, 12, 9, 20, 1], [8, 4, 8, 8, 0, 1]
TARGETS = [
    [3, 3, 3, 1, 2, 2, 5, 4],
    [1, 2, 1, 2, 99, -7, 99, 0],  # padding is not read
    [1, 1, 2, 2, 3, 3, 4, 4],
    [1, 1, 2, 2, 3, 3, 4, 4],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [5, 0, 0, 0, 0, 0, 0, 0],
]
TOGETHER = [label for row, count in zip(TARGETS, LABELS, strict=True) for label in row[:count]]


def loss(*arguments, **options):
    return alignment.ctc_loss(*arguments, reduction="none", **options)


# targets, frames and labels of each sequence, and the blank
PAIR = [[1, 2, 3], [4, 1, 1]]
CASES = {
    "padded": (TARGETS, FRAMES, LABELS, 0),
    "together": (TOGETHER, FRAMES, LABELS, 0),
    "blank that is a label": (PAIR, (9, 7), (3, 2), 2),
    "last class as blank": (PAIR, (9, 7), (3, 2), 6),
    "no labels, padded": ([[], []], (5, 3), (0, 0), 0),
    "no labels, together": ([], (5, 3), (0, 0), 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("kind", "dtype", "nats", "share"),
    [(torch.tensor, F64, NATS, SHARE), (tuple, F64, NATS, SHARE), (tuple, F32, 1e-5, 1e-6)],
)
def test_values_and_gradients_equal_torch(kind, dtype, nats, share, case):
    targets, frames, labels, blank = CASES[case]
    leaf = normal(max(frames), len(frames), 7).requires_grad_()
    args = leaf.log_softmax(-1), torch.tensor(targets, dtype=torch.int64), kind(frames), kind(labels), blank
    ours, theirs = loss(args[0].to(dtype), *args[1:]).double(), ctc_loss(*args, reduction="none")
    possible = theirs < math.inf
    assert torch.equal(ours[~possible], theirs[~possible]) and possible.sum() == len(frames) - (frames is FRAMES)
    assert distance(ours[possible], theirs[possible]) <= nats
    with_zero = ctc_loss(*args, reduction="none", zero_infinity=True)
    for mine, other in gradients([leaf], ours[possible], with_zero):
        assert distance(mine, other) <= share


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("case", ["padded", "together", "no labels, padded"])
def test_reductions_equal_torch(case, reduction, zero_infinity):
    targets, frames, labels, blank = CASES[case]
    leaf = normal(max(frames), len(frames), 7).requires_grad_()
    args = leaf.log_softmax(-1), torch.tensor(targets, dtype=torch.int64), frames, labels, blank, reduction
    ours, theirs = alignment.ctc_loss(*args, zero_infinity), ctc_loss(*args, zero_infinity)
    assert torch.allclose(ours, theirs, rtol=0, atol=NATS)
    assert (ours == math.inf).any() == (case != "no labels, padded" and not zero_infinity)
    # gradients are finite in any case: those of torch without its infinite losses
    ((mine, other),) = gradients([leaf], ours, ctc_loss(*args, zero_infinity=True))
    assert distance(mine, other) <= SHARE


def test_defaults_of_one_sequence_equal_torch():
    log_probs, target = normal(9, 5).log_softmax(-1), torch.tensor([3, 3, 1])
    theirs = ctc_loss(log_probs, target, torch.tensor(9), torch.tensor(3))
    assert distance(alignment.ctc_loss(log_probs, target, 9, 3), theirs) <= NATS


def test_star_is_one_more_class_of_probability_one():
    targets, frames, labels = torch.tensor([[1, 4, 3], [4, 2, 0], [4, 4, 0]]), (9, 7, 8), (3, 2, 2)
    log_probs = normal(9, 3, 4).log_softmax(-1)
    ours = loss(log_probs, targets, frames, labels, star=True)
    more = torch.nn.functional.pad(log_probs, (0, 1))  # as with torchaudio
    assert distance(ours, ctc_loss(more, targets, frames, labels, reduction="none")) <= NATS
    assert distance(loss(log_probs + 1, targets, frames, labels, star=True), ours - torch.tensor(frames)) <= NATS


@pytest.mark.parametrize("lengths", [(5, 2), (torch.tensor(4), torch.tensor(2)), ([5], [1])], ids=str)
def test_single_sequence_has_no_axis(lengths):
    log_probs, labels = normal(5, 3).log_softmax(-1), torch.tensor([1, 1])
    ours = alignment.from_ctc(log_probs, labels, *lengths)
    assert ours.x.shape == (5, 5) and ours.lengths.shape == ()
    frames, count = (int(torch.as_tensor(length)) for length in lengths)
    theirs = ctc_loss(log_probs, labels[:count], torch.tensor(frames), torch.tensor(count), reduction="none")
    assert distance(-logchain.product(**ours._asdict()), theirs) <= NATS


@pytest.mark.parametrize("target", [[1], [2, 2], [2, 1, 2]], ids=str)
def test_values_gradients_and_paths_equal_the_enumeration_of_alignments(target):
    frames, classes, blank = 5, 3, 0
    leaf = normal(frames, classes).requires_grad_()  # no log-probabilities
    every = torch.tensor(list(alignments(frames, classes, target, blank)))
    weights = leaf[torch.arange(frames), every].sum(-1)
    arguments = alignment.from_ctc(leaf, torch.tensor(target), frames, len(target))
    ours, truth = logchain.product(**arguments._asdict()), weights.logsumexp(0)
    assert distance(ours, truth) <= NATS
    direction = normal(frames, classes, seed=1)
    both = [torch.autograd.grad(value, leaf, create_graph=True)[0] for value in (ours, truth)]
    assert distance(*both) <= SHARE
    second = [torch.autograd.grad((grad * direction).sum(), leaf)[0] for grad in both]
    assert distance(*second) <= 10 * SHARE
    # alignments are paths, one to one
    best = logchain.viterbi(**arguments._asdict())
    assert distance(best.score, weights.max()) <= NATS
    labels = alignment.ctc_labels(best.states, torch.tensor(target), len(target))
    assert labels.tolist() == every[weights.argmax()].tolist()
    paths = logchain.topk_paths(**arguments._asdict(), k=len(every) + 1)
    assert distance(paths.scores[:-1], weights.sort(descending=True).values) <= NATS
    assert paths.scores[-1] == -math.inf


# targets, frames, places (frame, sequence, class) that are forbidden, and which targets are possible
IMPOSSIBLE = {
    False: ([[1, 3], [2, 3], [1, 1]], (6, 6, 2), [(2, 0, 1), (slice(None), 1, 2)], [True, False, False]),
    True: ([[4, 1], [2, 4]], (6, 6), [(2, 0), (slice(None), 1, 0)], [False, True]),
}


@pytest.mark.parametrize("star", IMPOSSIBLE)
def test_gradients_are_posteriors_and_zero_where_nothing_is_possible(star):
    targets, frames, places, possible = IMPOSSIBLE[star]
    leaf = normal(6, len(targets), 4).requires_grad_()
    forbidden = torch.zeros(6, len(targets), 4, dtype=torch.bool)
    for place in places:
        forbidden[place] = True
    log_probs = leaf.masked_fill(forbidden, -math.inf)
    log_probs.retain_grad()
    ours = loss(log_probs, torch.tensor(targets), frames, (2,) * len(targets), star=star)
    assert ours.isfinite().tolist() == possible
    ours.sum().backward()
    assert (log_probs.grad[:, ~torch.tensor(possible)] == 0).all() and (log_probs.grad[forbidden] == 0).all()
    assert distance(-log_probs.grad[:, torch.tensor(possible)].sum(-1), torch.ones(6, 1)) <= SHARE


def test_labels_of_alignments_are_the_targets():
    log_probs = normal(20, 6, 7).log_softmax(-1)
    arguments = alignment.from_ctc(log_probs, torch.tensor(TARGETS), FRAMES, LABELS)._asdict()
    drawn = logchain.sample(**arguments, num_samples=2, generator=seeded())
    states = torch.cat([logchain.viterbi(**arguments).states[None], drawn])
    labels = alignment.ctc_labels(states, torch.tensor(TARGETS), LABELS)
    assert labels.equal(alignment.ctc_labels(states, torch.tensor(TARGETS), LABELS, dim=-2))
    assert labels.equal(alignment.ctc_labels(states, torch.tensor(TOGETHER), LABELS))
    for rows in labels.tolist():
        for row, frames, target, count in zip(rows, FRAMES, TARGETS, LABELS, strict=True):
            aligned = [] if frames == 9 else target[:count]  # that one is impossible
            assert [label for label, _ in itertools.groupby(row) if label > 0] == aligned
            assert row[frames:] == [-1] * (20 - frames)
            assert (-1 in row[:frames]) == (frames == 9)


@pytest.mark.parametrize("k", [2, 3])
def test_labels_of_several_best_paths_are_the_targets(k):
    targets, lengths = torch.tensor([[1, 1], [2, 3]]), (2, 2)
    chain = alignment.from_ctc(normal(5, 2, 4), targets, (5, 5), lengths)._asdict()
    labels = alignment.ctc_labels(logchain.topk_paths(**chain, k=k).states, targets, lengths, dim=0)
    assert labels.shape == (2, k, 5) and not labels[:, 0].equal(labels[:, 1])
    for target, rows in zip(targets.tolist(), labels.tolist(), strict=True):
        assert all([label for label, _ in itertools.groupby(row) if label] == target for row in rows)


def test_axis_of_sequences_is_that_of_their_number():
    targets, states = torch.tensor([[1, 1], [2, 3]]), torch.tensor([[[0, 1, 3]] * 3, [[1, 2, 3]] * 3])
    for rows, dim in ((states, 0), (states.transpose(0, 1), -2)):
        explicit = alignment.ctc_labels(rows, targets, (2, 2), dim=dim)
        assert explicit.equal(alignment.ctc_labels(rows, targets, (2, 2)))


def test_half_log_probs_are_summed_in_float32():
    labels = torch.tensor([[1, 3], [2, 2]])
    half = normal(2, 9, 4).transpose(0, 1).bfloat16().requires_grad_()
    value = loss(half, labels, (9, 9), (2, 2))
    assert value.dtype == F32 and distance(value, loss(half.double(), labels, (9, 9), (2, 2))) <= 1e-5
    value.sum().backward()
    assert half.grad.dtype == torch.bfloat16 and distance(-half.grad.float().sum(-1), torch.ones(9, 2)) <= 0.02
