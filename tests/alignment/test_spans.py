"""`alignment.align` has the spans of the best alignment, their weights, and their posteriors by enumeration."""

import math

import pytest
import torch

from logchain import alignment
from tests.adapted import NATS, SHARE, distance, normal
from tests.alignment.enumeration import alignments, positions


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("target", [[1], [1, 1], [1, 3], [3, 1, 1]], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_spans_equal_the_enumeration_of_alignments(target, blank, seed):
    frames, classes = 5, 4
    log_probs = 2 * normal(frames, classes, seed=seed)  # no log-probabilities
    every = torch.tensor(list(alignments(frames, classes, target, blank)))
    weights = log_probs[torch.arange(frames), every].sum(-1)
    numbers = [positions(labels, blank) for labels in every.tolist()]
    shares = weights.softmax(0)
    spans = alignment.align(log_probs, torch.tensor(target), frames, len(target), blank)
    assert spans.label.tolist() == target
    best = numbers[int(weights.argmax())]
    for number, (start, end) in enumerate(zip(spans.start.tolist(), spans.end.tolist(), strict=True)):
        assert list(range(start, end)) == [frame for frame in range(frames) if best[frame] == number]
        assert distance(spans.log_prob[number], log_probs[start:end, target[number]].sum()) <= NATS
        matches = torch.tensor([[row[frame] == number for frame in range(start, end)] for row in numbers])
        assert distance(spans.confidence[number], (shares @ matches.double()).mean()) <= SHARE


def test_batch_has_the_spans_of_single_sequences():
    frames, counts = (9, 5, 9, 3, 6), (3, 1, 0, 3, 2)
    targets = torch.tensor([[1, 1, 2], [3, 99, -7], [0, 0, 0], [1, 1, 2], [2, 4, 0]])  # padding is not read
    log_probs = normal(9, 5, 4)
    log_probs[5:, 1] = math.nan  # padding
    together = torch.cat([target[:count] for target, count in zip(targets, counts, strict=True)])
    for labels in (targets, together):
        spans = alignment.align(log_probs, labels, frames, counts, star=True)
        for n, (length, count) in enumerate(zip(frames, counts, strict=True)):
            single = alignment.align(log_probs[:length, n], targets[n, : max(1, count)], length, count, star=True)
            for name, ours, theirs in zip(spans._fields, spans, single, strict=True):
                ended = 0 if name in ("log_prob", "confidence") else -1
                assert ours[n, :count].equal(theirs[:count]) and (ours[n, count:] == ended).all()


def test_impossible_targets_have_no_frames():
    log_probs = normal(6, 3, 4)
    log_probs[:, 1, 2] = -math.inf
    log_probs[3, 2, 1] = math.nan
    spans = alignment.align(log_probs, torch.tensor([[1, 1], [2, 3], [1, 2]]), (2, 6, 6), (2, 2, 1))
    assert spans.label.tolist() == [[1, 1], [2, 3], [1, -1]]
    assert (spans.start == -1).all() and (spans.end == -1).all()
    assert spans.log_prob[:2].eq(-math.inf).all() and spans.confidence[:2].eq(0).all()
    assert spans.log_prob[2, 0].isnan() and spans.confidence[2, 0].isnan()
    assert spans.log_prob[2, 1] == 0 and spans.confidence[2, 1] == 0


def test_star_takes_the_frames_without_transcript():
    heard = torch.tensor([0, 1, 1, 3, 0, 2, 3, 3, 0, 2, 2])
    log_probs = (6 * torch.nn.functional.one_hot(heard, 4).double()).log_softmax(-1)
    spans = alignment.align(log_probs, torch.tensor([1, 4, 2]), 11, 3, star=True)
    assert spans.label.tolist() == [1, 4, 2]
    assert spans.start.tolist() == [1, 2, 10] and spans.end.tolist() == [2, 10, 11]
    assert distance(spans.log_prob[1], 0.0) <= NATS


def test_spans_have_no_gradient_and_the_dtype_of_the_chain():
    log_probs = normal(6, 4).bfloat16().requires_grad_()
    spans = alignment.align(log_probs, torch.tensor([1, 2]), 6, 2)
    assert [each.dtype for each in spans] == [torch.int64] * 3 + [torch.float32] * 2
    assert not spans.log_prob.requires_grad and not spans.confidence.requires_grad
