"""`alignment.from_arcs` and `lattice_total` sum over all paths of a graph; `openfst_arcs` reads OpenFst's text."""

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


@pytest.mark.parametrize("lengths", [None, [5, 1, 4]], ids=str)
def test_batch_of_graphs_equals_single_graphs(lengths):
    dense, sparse = graph(3), graph(5, arcs=7)
    acceptors = [
        alignment.Acceptor(*dense, 2),
        alignment.Acceptor(*with_final_arcs(*sparse)),
        alignment.Acceptor(*sparse),
    ]
    leaves = log_probs, *scores = [
        leaf.requires_grad_() for leaf in (normal(3, 5, CLASSES), *(a.scores for a in acceptors))
    ]
    chain = alignment.from_arcs(log_probs, acceptors, lengths=lengths)
    ours = logchain.product(**chain._asdict())
    single = []
    for n, acceptor in enumerate(acceptors):
        frames = log_probs[n, : 5 if lengths is None else lengths[n]]
        single.append(logchain.product(**alignment.from_arcs(frames, *acceptor)._asdict()))
    truth = torch.stack(single)
    assert truth.isfinite().any() and torch.equal(ours == -math.inf, truth == -math.inf)
    assert torch.allclose(ours, truth, rtol=0, atol=NATS)
    for mine, theirs in gradients(leaves, ours, truth):
        assert distance(mine, theirs) <= SHARE


def test_batch_of_chains_of_labels_shares_their_transitions():
    acceptors = [alignment.openfst_arcs(f"0 1 {a}\n1 1 {a}\n1 2 {b}\n2 2 {b}\n2") for a, b in ((1, 2), (3, 1), (2, 3))]
    chain = alignment.from_arcs(normal(3, 6, CLASSES), acceptors)
    assert chain.bulk.states == 2 and chain.bulk.values.shape == (3, 1, 3)
    pairs = torch.tensor([[1, 2], [3, 1], [2, 3]])
    labels = pairs.gather(1, logchain.viterbi(**chain._asdict()).states)
    assert (labels[:, 0] == pairs[:, 0]).all() and (labels[:, -1] == pairs[:, 1]).all()


def lattice(seed):
    """A random graph whose arcs lead to higher states, with arcs in parallel."""
    source, target = torch.randint(6, (2, 14), generator=seeded(seed)).sort(0).values
    arcs = torch.stack([source, target + 1, torch.arange(14) % 3], 1)
    return arcs, normal(14, seed=seed), normal(7, seed=seed + 1)


@pytest.mark.parametrize("seed", range(4))
def test_lattice_total_equals_the_sum_over_paths(seed):
    arcs, scores, final = lattice(seed)
    final[2] = -math.inf
    leaves = scores.requires_grad_(), final.requires_grad_()
    weights = [
        scores[list(path)].sum() + final[arcs[path[-1], 1] if path else 0]
        for length in range(8)
        for path in paths(arcs.tolist(), 0, length)
    ]
    truth, ours = torch.stack(weights).logsumexp(0), alignment.lattice_total(arcs, scores, final)
    assert len(weights) > 5 and distance(ours, truth) <= NATS
    for mine, theirs in gradients(leaves, ours, truth):
        assert distance(mine, theirs) <= SHARE


def test_lattice_total_of_final_arcs_and_of_no_path():
    arcs = torch.tensor([[0, 1, 0], [1, 2, 5], [0, 3, -1], [2, 3, -1], [4, 4, 1]])  # the cycle is not reached
    total = alignment.lattice_total(arcs, torch.tensor([1.0, 2.0, -1.0, 0.5, 9.0]))
    assert math.isclose(total.item(), math.log(math.exp(-1) + math.exp(3.5)), rel_tol=1e-6)
    assert alignment.lattice_total(arcs, torch.zeros(5), start=1).item() == 0
    assert alignment.lattice_total(arcs, torch.zeros(5), start=3).item() == -math.inf


def test_openfst_costs_of_digits_are_no_output_labels():
    for text in ("0 1 3 2\n1 1 4\n1", "0 1 3 2\n1 1 4 0.5\n1", "0 1 3 2.0\n1", "0 1 3 -2\n1"):
        assert alignment.openfst_arcs(text).scores[0].abs() == 2


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
