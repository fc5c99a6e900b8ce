"""Answers of the conditional random field equal sums over all tags, wherever a mask is off."""

import itertools
import math

import pytest
import torch

from tests.nn.crfs import F32, F64, HOLES, INF, NAN, REDUCTIONS, batch, gradients, layer, seeded, turned


def all_weights(crf, emissions, inside):
    """Every tagging of what one mask leaves, with its log-weight: start, transitions, emissions and end, added up."""
    start, end, transitions = (t.tolist() for t in (crf.start_transitions, crf.end_transitions, crf.transitions))
    rows = emissions[inside].tolist()
    weights = {}
    for path in itertools.product(range(crf.num_tags), repeat=len(rows)):
        terms = [row[tag] for row, tag in zip(rows, path, strict=True)]
        terms += [transitions[a][b] for a, b in itertools.pairwise(path)]
        terms += [start[path[0]], end[path[-1]]] if path else []
        weights[path] = math.fsum(terms) if -INF not in terms else -INF
    return weights


def log_sum(values):
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values)) if top > -INF else -INF


# numbers of tags, sizes of the batch, and what of it counts
CASES = {
    "holes": (3, (len(HOLES), 4), HOLES),
    "one variable": (4, (3, 1), torch.ones(3, 1, dtype=torch.bool)),
    "one tag": (1, (3, 4), HOLES[:3]),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module", params=[False, True], ids=["steps first", "batch first"])
def enumerated(request, case):
    """A layer, emissions, tags, a mask, and every path of each sequence with its weight."""
    num_tags, sizes, mask = case
    crf = layer(num_tags, batch_first=request.param)
    emissions, tags, _ = batch(*sizes, num_tags)
    return crf, emissions, tags, mask, [all_weights(crf, *pair) for pair in zip(emissions, mask, strict=True)]


def test_likelihood_and_partition_equal_the_enumeration(enumerated):
    crf, emissions, tags, mask, weights = enumerated
    inputs = turned(crf, emissions, tags, mask)
    norms = [log_sum(of_one.values()) for of_one in weights]
    chosen = [of_one[tuple(row[inside].tolist())] for of_one, row, inside in zip(weights, tags, mask, strict=True)]
    norms, chosen = torch.tensor(norms, dtype=F64), torch.tensor(chosen, dtype=F64)
    torch.testing.assert_close(crf.log_partition(inputs[0], inputs[2]), norms, rtol=0, atol=1e-13)
    torch.testing.assert_close(crf(*inputs, reduction="none"), chosen - norms, rtol=0, atol=1e-13)
    total = (chosen - norms).sum()
    torch.testing.assert_close(crf(*inputs, reduction="token_mean"), total / mask.sum(), rtol=0, atol=1e-13)
    torch.testing.assert_close(crf(*inputs, reduction="mean"), total / len(mask), rtol=0, atol=1e-13)


def test_marginals_equal_the_enumeration(enumerated):
    crf, emissions, _, mask, weights = enumerated
    found = crf.marginals(*turned(crf, emissions, mask))
    assert found.shape == turned(crf, emissions)[0].shape
    expected = torch.zeros_like(emissions)
    for i, of_one in enumerate(weights):
        steps, norm = mask[i].nonzero()[:, 0].tolist(), log_sum(of_one.values())
        for path, weight in of_one.items():
            for step, tag in zip(steps, path, strict=True):
                expected[i, step, tag] += math.exp(weight - norm)
    torch.testing.assert_close(*turned(crf, expected), found, rtol=0, atol=1e-13)
    assert (found[~turned(crf, mask)[0]] == 0).all()


def test_best_tags_equal_the_enumeration(enumerated):
    crf, emissions, _, unmasked, weights = enumerated
    emissions, mask = turned(crf, emissions, unmasked)
    ordered = [sorted(of_one.items(), key=lambda pair: -pair[1]) for of_one in weights]
    best = [list(pairs[0][0]) for pairs in ordered]
    assert crf.decode(emissions, mask) == best
    states, scores = crf.viterbi(emissions, mask)
    assert states.shape == mask.shape and (states[~mask] == -1).all()
    rows = states if crf.batch_first else states.T
    assert [row[inside].tolist() for row, inside in zip(rows, unmasked, strict=True)] == best
    torch.testing.assert_close(scores, torch.tensor([pairs[0][1] for pairs in ordered], dtype=F64))
    tags, scores = crf.topk(emissions, 4, mask)
    for found, weight, pairs in zip(tags, scores.tolist(), ordered, strict=True):
        there = len(pairs[:4])
        assert found[:there] == [list(path) for path, _ in pairs[:4]]
        assert weight[:there] == pytest.approx([w for _, w in pairs[:4]], abs=1e-13)
        assert weight[there:] == [-INF] * (4 - there)
        assert all(set(path) <= {-1} and len(path) == len(found[0]) for path in found[there:])


def test_draws_have_the_marginals(enumerated):
    crf, emissions, _, unmasked, _ = enumerated
    emissions, mask = turned(crf, emissions, unmasked)
    draws = 4000
    drawn = crf.sample(emissions, draws, mask, generator=seeded())
    assert drawn.shape == (draws, *mask.shape) and (drawn[:, ~mask] == -1).all()
    assert torch.equal(drawn, crf.sample(emissions, draws, mask, generator=seeded()))
    frequencies = torch.stack([(drawn == tag).double().mean(0) for tag in range(crf.num_tags)], -1)
    assert (frequencies - crf.marginals(emissions, mask)).abs().max() < 5 * 0.5 / draws**0.5


def test_masked_values_have_no_influence():
    crf = layer()
    emissions, tags, ends = batch(6, 4, dtype=F64)
    for mask in (ends, HOLES):
        outside = emissions.masked_fill(~mask[..., None], NAN).requires_grad_()
        inside = emissions.clone().requires_grad_()
        found = crf(outside, tags.masked_fill(~mask, -100), mask, "none")
        expected = crf(inside, tags, mask, "none")
        assert torch.equal(found, expected)
        ours = gradients(crf, outside, found)
        assert all(torch.equal(*pair) for pair in zip(ours, gradients(crf, inside, expected), strict=True))
        assert (ours[0][~mask] == 0).all() and (ours[0][mask] != 0).any()
        assert crf.decode(outside, mask) == crf.decode(inside, mask)
        assert torch.equal(crf.marginals(outside, mask), crf.marginals(inside, mask))
        assert torch.equal(crf.log_partition(outside, mask), crf.log_partition(inside, mask))


def test_forbidden_tags_and_transitions_have_gradient_zero():
    crf = layer(3)
    emissions, _, _ = batch(2, 4, 3)
    with torch.no_grad():
        crf.transitions[2, 0] = crf.start_transitions[1] = crf.end_transitions[2] = -INF
        emissions[0, 1, 0] = -INF
    emissions.requires_grad_()
    tags = torch.tensor([[0, 1, 1, 0], [0, 2, 0, 1]])  # the second takes the forbidden transition
    out = crf(emissions, tags, reduction="none")
    weights = [all_weights(crf, of_one, torch.ones(4, dtype=torch.bool)) for of_one in emissions]
    expected = weights[0][0, 1, 1, 0] - log_sum(weights[0].values())
    assert out[0].item() == pytest.approx(expected, abs=1e-13) and out[1] == -INF
    found = gradients(crf, emissions, out)
    assert all(gradient.isfinite().all() for gradient in found)
    assert found[0][0, 1, 0] == found[1][1] == found[2][2] == found[3][2, 0] == 0
    assert (found[0][1] == 0).all() and (found[0][0] != 0).any()
    assert crf.decode(emissions)[0] == list(max(weights[0], key=weights[0].get))
    # no path at all
    emissions = emissions.detach()
    emissions[0, 1] = -INF
    out = crf(emissions.requires_grad_(), tags, reduction="none")
    assert out[0] == crf.log_partition(emissions)[0] == -INF
    assert all(gradient.isfinite().all() for gradient in gradients(crf, emissions, out))
    assert crf.decode(emissions)[0] == [-1] * 4


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_forbidden_transition_stays_forbidden(optimizer):
    crf = layer(3, F32)
    emissions, tags, mask = batch(c=3, dtype=F32)
    with torch.no_grad():
        crf.transitions[2, 0] = -INF
    steps = optimizer(crf.parameters(), lr=0.1)
    possible = torch.where((tags[:, 1:] == 0) & (tags[:, :-1] == 2), 1, tags[:, 1:])
    tags = torch.cat([tags[:, :1], possible], 1)
    losses = []
    for _ in range(3):
        steps.zero_grad()
        loss = -crf(emissions, tags, mask, "mean")
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert crf.transitions[2, 0] == -INF and crf.transitions.isneginf().sum() == 1
    assert losses[2] < losses[1] < losses[0] < INF


def test_no_sequences_and_empty_sequences():
    crf = layer()
    emissions, tags, mask = batch(0, 5)
    for reduction in REDUCTIONS:
        out = crf(emissions.requires_grad_(), tags, mask, reduction)
        assert out.shape == ((0,) if reduction == "none" else ()) and (out == 0).all()
        assert all((gradient == 0).all() for gradient in gradients(crf, emissions, out))
    assert crf(emissions, tags) == 0
    assert crf.decode(emissions, mask) == [] and crf.marginals(emissions, mask).shape == (0, 5, 4)
    assert crf.topk(emissions, 2, mask)[0] == [] and crf.sample(emissions, 3, mask).shape == (3, 0, 5)
    emissions, tags, mask = batch(2, 3)
    out = crf(emissions.requires_grad_(), tags, torch.zeros_like(mask), "token_mean")
    assert out == 0 and all((gradient == 0).all() for gradient in gradients(crf, emissions, out))
    assert crf.decode(emissions, torch.zeros_like(mask)) == [[], []]
