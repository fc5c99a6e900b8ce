"""`alignment.from_arcs` sums over all paths of a graph; `openfst_arcs` reads the text that OpenFst prints."""

import math

import pytest
import torch

import logchain
from logchain import alignment
from tests.adapted import NATS, SHARE, distance, gradients, normal, seeded

CLASSES, STATES = 4, 4


def graph(seed=0, arcs=18):
    """Random arcs, the last of them twice, and final log-weights, of which one is zero's."""
    places = torch.randperm(STATES * STATES * CLASSES, generator=seeded(seed))[:arcs]
    found = torch.stack(torch.unravel_index(places, (STATES, STATES, CLASSES)), 1)
    final = normal(STATES, seed=seed + 1)
    final[1] = -math.inf
    return torch.cat([found, found[-1:]]), normal(arcs + 1, seed=seed + 2), final


def paths(arcs, start, frames):
    """All sequences of so many arcs that begin in a state."""
    if frames == 0:
        yield ()
        return
    for arc, (source, target, _) in enumerate(arcs):
        if source == start:
            yield from ((arc, *rest) for rest in paths(arcs, target, frames - 1))


def total(log_probs, arcs, scores, final, start):
    """The log-weight of all paths, one by one."""
    weights = [torch.tensor(-math.inf, dtype=scores.dtype)]
    for path in paths(arcs.tolist(), start, len(log_probs)):
        weight = final[arcs[path[-1], 1]]
        for frame, arc in enumerate(path):
            weight = weight + scores[arc] + log_probs[frame, arcs[arc, 2]]
        weights.append(weight)
    return torch.stack(weights).logsumexp(0)


def with_final_arcs(arcs, scores, final):
    """The same graph as k2 has it: arcs with label -1 to one more state."""
    ends = torch.arange(STATES)[final > -math.inf]
    last = torch.stack([ends, torch.full_like(ends, STATES), torch.full_like(ends, -1)], 1)
    return torch.cat([last, arcs]), torch.cat([final[ends], scores])


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("seed", [0, 10])
def test_partition_equals_the_sum_over_paths(seed, frames):
    arcs, scores, final = graph(seed)
    leaves = log_probs, scores, final = [one.requires_grad_() for one in (normal(frames, CLASSES), scores, final)]
    truth = total(log_probs, arcs, scores, final, start=2)
    ours = logchain.product(**alignment.from_arcs(log_probs, arcs, scores, final, start=2)._asdict())
    assert truth.isfinite() and distance(ours, truth) <= NATS
    for mine, theirs in gradients(leaves, ours, truth):
        assert distance(mine, theirs) <= SHARE


def test_arcs_with_label_minus_one_are_final_weights():
    arcs, scores, final = graph()
    log_probs = normal(2, 3, 5, CLASSES)
    lengths = torch.tensor([[5, 1, 3], [2, 5, 4]])
    k2 = alignment.from_arcs(log_probs, *with_final_arcs(arcs, scores, final), lengths=lengths)
    ours = logchain.product(**k2._asdict())
    for sequence, frames, found in zip(log_probs.view(-1, 5, CLASSES), lengths.flatten(), ours.flatten(), strict=True):
        assert distance(found, total(sequence[:frames], arcs, scores, final, start=0)) <= NATS
    lists = alignment.from_arcs(log_probs, arcs, scores, final, lengths=lengths.tolist())
    assert distance(logchain.product(**lists._asdict()), ours) <= NATS


def test_states_are_pairs_of_target_and_label():
    arcs, scores, final = graph()
    arcs, scores = arcs[:-1], scores[:-1]
    log_probs = normal(5, CLASSES)
    best = logchain.viterbi(**alignment.from_arcs(log_probs, arcs, scores, final)._asdict())
    pairs = arcs[:, 1:].unique(dim=0)[best.states]
    weights = [
        sum(scores[arc] + log_probs[frame, arcs[arc, 2]] for frame, arc in enumerate(path)) + final[arcs[path[-1], 1]]
        for path in paths(arcs.tolist(), 0, 5)
    ]
    path = list(paths(arcs.tolist(), 0, 5))[int(torch.stack(weights).argmax())]
    assert pairs.tolist() == arcs[list(path), 1:].tolist()
    assert distance(best.score, max(weights)) <= NATS


@pytest.mark.parametrize("frames", [1, 2])
def test_graph_without_two_arcs_in_a_row(frames):
    arcs = torch.tensor([[0, 1, 2], [1, 2, -1]])
    scores = torch.tensor([0.5, 0.25], requires_grad=True)
    log_probs = torch.zeros(frames, CLASSES, requires_grad=True)
    ours = logchain.product(**alignment.from_arcs(log_probs, arcs, scores)._asdict())
    assert math.isclose(ours.item(), 0.75 if frames == 1 else -math.inf, rel_tol=1e-6)
    ours.backward()
    torch.testing.assert_close(scores.grad, torch.full_like(scores, 2.0 - frames))
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 0, 1, 0]] if frames == 1 else [[0.0] * 4] * 2))


def test_openfst_text_has_its_weights():
    text = "3 0 1 0.5\n3 2 2\n\n0 0 1 1.5\n0 2 3 0.25\n2\n0 0.125\n1 Infinity\n"
    arcs, scores, final, start = alignment.openfst_arcs(text)
    assert start == 3 and final.tolist() == [-0.125, -math.inf, 0.0, -math.inf]
    log_probs = normal(3, CLASSES)
    ours = logchain.product(**alignment.from_arcs(log_probs, arcs, scores, final, start)._asdict())
    one, three = log_probs[:, 1], log_probs[:, 3]
    weights = one[:2].sum() - 2.0 + torch.stack([one[2] - 1.5 - 0.125, three[2] - 0.25])
    assert distance(ours, weights.logsumexp(0)) <= NATS
    # without a final state nothing is possible
    arguments = alignment.from_arcs(torch.zeros(2, 3, 4), *alignment.openfst_arcs("0 0 1"))
    assert logchain.product(**arguments._asdict()).tolist() == [-math.inf] * 2


def test_final_weights_keep_their_digits_with_half_log_probs():
    arguments = alignment.from_arcs(
        torch.full((3, 4), -8.0).bfloat16(), *alignment.openfst_arcs("0 0 1\n0 0.001953125")
    )
    assert logchain.product(**arguments._asdict()).item() == -24.001953125
