"""The semi-Markov conditional random field equals sums over all segmentations, LinearChainCRF, and torch-struct."""

import itertools

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from logchain.nn import LinearChainCRF, SemiMarkovCRF, semi_markov_crf
from tests.nn import segmentations
from tests.nn.hmms import F64, array, close
from tests.nn.test_crf import turned
from tests.seeded import seeded

INF, NAN = torch.inf, torch.nan
C, D = 3, 3
# masks that leave the same steps wherever they stand, and none
HOLES = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
MASKS = {
    "whole": (torch.ones(4, 5, dtype=torch.bool), {}),
    "ends": (torch.arange(5) < torch.tensor([[5], [1], [3], [4]]), {"strict_mask": True}),
    "holes": (HOLES, {}),
    "holes, steps first": (HOLES, {"batch_first": False}),
    "forbidden": (HOLES, {}),
}


def layer(num_tags=C, longest=D, batch_first=True, strict_mask=False):
    crf = SemiMarkovCRF(num_tags, longest, batch_first, strict_mask=strict_mask).double()
    with torch.no_grad():
        for seed, parameter in enumerate(crf.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(seed), dtype=F64))
    return crf


def emissions_of(*shape):
    return torch.randn(*shape, generator=seeded(9), dtype=F64)


def weights(crf, emissions):
    """The log-weight of each segmentation of emissions (v, c), of which there may be none."""
    if not len(emissions):
        return {(): 0.0}
    x, end = array(emissions).copy(), array(crf.end_transitions)
    x[-1] += end
    return segmentations.log_weights(x, *map(array, (crf.start_transitions, crf.transitions, crf.durations)))


@pytest.fixture(scope="module", params=MASKS)
def enumerated(request):
    """A layer, emissions that are poisoned where masked, a mask, and every segmentation of each sequence."""
    mask, options = MASKS[request.param]
    crf, emissions = layer(**options), emissions_of(*mask.shape, C)
    if request.param == "forbidden":
        with torch.no_grad():
            crf.transitions.fill_diagonal_(-INF)
            crf.durations[1, 0] = crf.start_transitions[2] = -INF
    every = [weights(crf, row[inside]) for row, inside in zip(emissions, mask, strict=True)]
    return crf, emissions.masked_fill(~mask[..., None], NAN), mask, every


def test_partitions_and_marginals_equal_the_segmentations(enumerated):
    crf, emissions, mask, every = enumerated
    inputs = turned(crf, emissions, mask)
    close(crf.log_partition(*inputs), [segmentations.log_sum(table) for table in every])
    marginals, segments = crf.marginals(*inputs), crf.segment_marginals(*inputs)
    assert (marginals[~inputs[1]] == 0).all() and (segments[~inputs[1]] == 0).all()
    marginals, segments = turned(crf, marginals, segments)
    for row, inside, table in zip(range(4), mask, every, strict=True):
        begins = segmentations.posterior(table, int(inside.sum()), C, D)
        close(segments[row, inside], begins)
        close(marginals[row, inside], segmentations.of_states(begins))


def test_likelihoods_of_all_segmentations_are_their_probabilities(enumerated):
    crf, emissions, mask, every = enumerated
    for row, (inside, table) in enumerate(zip(mask, every, strict=True)):
        v, steps = int(inside.sum()), inside.nonzero()[:, 0]
        tags = torch.full((len(table), 5), -100)
        begins = torch.rand(len(table), 5, generator=seeded()) < 0.5
        for i, segments in enumerate(table):
            tags[i, steps] = torch.tensor(segmentations.steps_of(segments, v), dtype=torch.int64)
            begins[i, steps] = False
            begins[i, steps[[first for _, first, _ in segments]]] = True
        expanded = emissions[row].expand(len(table), -1, -1).clone().requires_grad_()
        inputs = turned(crf, expanded, tags, inside.expand(len(table), -1), begins)
        result = crf(*inputs[:3], "none", begins=inputs[3])
        close(result, np.array(list(table.values())) - segmentations.log_sum(table))
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(result.sum(), [expanded]))
        assert crf(*inputs[:3], begins=inputs[3]) == result.sum()


def agrees(segments, tags, begins):
    """Whether segments have these tags, and begin where known neighbors differ and where `begins` is."""
    steps, firsts = segmentations.steps_of(segments, len(tags)), {first for _, first, _ in segments}
    for i, tag in enumerate(tags):
        if tag not in (-1, steps[i]) or (i and begins[i] and i not in firsts):
            return False
        if i and -1 not in (tag, tags[i - 1]) and not begins[i] and (i in firsts) != (tag != tags[i - 1]):
            return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_unknown_tags_give_the_sum_over_segmentations_that_agree(enumerated, seed):
    crf, emissions, mask, every = enumerated
    tags, begins = torch.randint(-1, 2, mask.shape, generator=seeded(seed)), mask & False
    begins[:, 3] = seed % 2 == 1
    tags[0, :2] = -1
    tags[0, 2:] = 1
    result = crf(*turned(crf, emissions, tags, mask), "none", partial=True, begins=turned(crf, begins)[0])
    for row, (inside, table) in enumerate(zip(mask, every, strict=True)):
        known, starts = tags[row, inside].tolist(), begins[row, inside].tolist()
        agreeing = {one: weight for one, weight in table.items() if weight > -INF and agrees(one, known, starts)}
        expected = segmentations.log_sum(agreeing) - segmentations.log_sum(table) if agreeing else -INF
        close(result[row], expected)


def test_best_segmentations_equal_the_enumeration(enumerated):
    crf, emissions, mask, every = enumerated
    inputs = turned(crf, emissions, mask)
    best = [max(table, key=table.get) for table in every]
    tags = [list(segmentations.steps_of(segments, 5)) for segments in best]
    assert crf.decode_segments(*inputs) == list(map(list, best))
    assert crf.decode(*inputs) == tags
    states, scores = crf.viterbi(*inputs)
    close(scores, [max(table.values()) for table in every])
    (states,) = turned(crf, states)
    assert [row[inside].tolist() for row, inside in zip(states, mask, strict=True)] == tags
    assert (states[~mask] == -1).all()
    paths, scores = crf.topk(inputs[0], 3, inputs[1])
    for result, score, table in zip(paths, scores.tolist(), every, strict=True):
        ordered = sorted(((w, s) for s, w in table.items() if w > -INF), reverse=True)[:3]
        assert score[: len(ordered)] == pytest.approx([weight for weight, _ in ordered])
        assert result[: len(ordered)] == [list(segmentations.steps_of(segments, 5)) for _, segments in ordered]


def test_draws_have_the_marginals(enumerated):
    crf, emissions, mask, _ = enumerated
    inputs = turned(crf, emissions, mask)
    drawn = crf.sample(inputs[0], 4000, inputs[1], generator=seeded())
    assert (drawn[:, ~inputs[1]] == -1).all()
    frequencies = torch.stack([(drawn == tag).double().mean(0) for tag in range(C)], -1)
    assert (frequencies - crf.marginals(*inputs)).abs().max() < 5 * 0.5 / 4000**0.5


def test_change_of_tag_begins_a_segment_without_begins():
    crf, emissions = layer(), emissions_of(1, 5, C)
    tags, begins = torch.tensor([[0, 0, 2, 2, 1]]), torch.tensor([[True, False, True, False, True]])
    assert crf(emissions, tags) == crf(emissions, tags, begins=begins) == crf(emissions, tags, begins=begins & False)
    begins[0, 3] = True
    assert crf(emissions, tags, begins=begins) != crf(emissions, tags)
    mask = torch.ones_like(begins)
    mean = crf(emissions, tags, mask, "token_mean")
    torch.testing.assert_close(5 * mean, crf(emissions, tags, reduction="mean"))


def test_gradients_equal_finite_differences():
    crf, emissions = layer(2, 2), emissions_of(2, 3, 2).requires_grad_()
    tags, mask = torch.tensor([[0, 0, 1], [1, 0, 0]]), torch.tensor([[True, True, True], [True, True, False]])
    operands = emissions, *crf.parameters()
    assert torch.autograd.gradcheck(lambda *_: crf(emissions, tags, mask, "none"), operands)
    assert torch.autograd.gradgradcheck(lambda *_: crf(emissions, tags, mask), operands)
    assert torch.autograd.gradcheck(lambda *_: crf.segment_marginals(emissions, mask), operands)


def test_segments_of_one_step_are_a_linear_chain():
    crf, linear, emissions = layer(longest=1), LinearChainCRF(C, batch_first=True).double(), emissions_of(4, 5, C)
    with torch.no_grad():
        crf.durations.zero_()
    linear.load_state_dict({name: part for name, part in crf.state_dict().items() if name != "durations"})
    tags = torch.randint(C, (4, 5), generator=seeded())
    close(crf(emissions, tags, begins=torch.ones_like(tags, dtype=torch.bool)), array(linear(emissions, tags)))
    close(crf.marginals(emissions), array(linear.marginals(emissions)))
    assert crf.decode(emissions) == linear.decode(emissions)


def test_sequence_without_a_segmentation_has_no_segments():
    crf, emissions = layer(), emissions_of(2, 5, C)
    emissions[0, 2] = -INF
    assert crf.decode_segments(emissions)[0] == [] and len(crf.decode_segments(emissions)[1])
    assert crf(emissions, torch.zeros(2, 5).long(), begins=torch.ones(2, 5).bool(), reduction="none")[0] == -INF


def test_segment_that_is_too_long_is_impossible_where_values_are_not_read(monkeypatch):
    crf, emissions, tags = layer(), emissions_of(2, 5, C), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="tags: expected segments of at most 3 steps, got one of 5; pass a larger"):
        crf(emissions, tags)
    mask = torch.tensor([[True, True, True, False, False]] * 2)
    assert crf(emissions, tags, mask).isfinite()  # three steps
    monkeypatch.setattr(semi_markov_crf, "is_readable", lambda _: False)
    assert (crf(emissions, tags, reduction="none") == -INF).all()
    with (mode := FakeTensorMode()):
        crf = SemiMarkovCRF(C, D, batch_first=True)
        assert crf(mode.from_tensor(emissions), mode.from_tensor(tags)).shape == ()


@pytest.mark.filterwarnings("ignore:.* does not define `arg_constraints`")
@pytest.mark.parametrize("v", [4, 5, 7])
def test_partition_maximum_and_marginals_equal_torch_struct(v):
    torch_struct = pytest.importorskip("torch_struct", exc_type=ImportError)
    crf, emissions = layer(), emissions_of(2, v, C)
    edges = torch.full((2, v, D + 1, C, C), -1e5, dtype=F64)  # first step, duration, next tag, tag
    for first, d, tag in itertools.product(range(v), range(1, D + 1), range(C)):
        if (end := first + d) > v:
            continue
        weight = emissions[:, first:end, tag].sum(1) + crf.durations[tag, d - 1]
        weight = weight + (crf.start_transitions[tag] if first == 0 else 0.0)
        if end < v:
            edges[:, first, d, :, tag] = (weight[:, None] + crf.transitions[tag]).detach()
        else:  # the tag after the end is 0
            edges[:, first, d, 0, tag] = (weight + crf.end_transitions[tag]).detach()
    theirs = torch_struct.SemiMarkovCRF(edges)
    close(crf.log_partition(emissions), array(theirs.partition), 1e-8)
    close(crf.viterbi(emissions).score, array(theirs.max), 1e-8)
    close(crf.segment_marginals(emissions), array(theirs.marginals.sum(3).mT[..., 1:]), 1e-8)


def test_training_learns_durations():
    crf = SemiMarkovCRF(2, 4, batch_first=True).double()
    tags = (torch.arange(24) // 3 % 2).expand(2, 24)  # segments of three steps
    optimizer, losses = torch.optim.Adam(crf.parameters(), 0.1), []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(-crf(torch.zeros(2, 24, 2, dtype=F64), tags))
        losses[-1].backward()
        optimizer.step()
    assert 0 < losses[-1].item() < losses[0].item() / 4
    assert (crf.durations.argmax(1) == 2).all()
