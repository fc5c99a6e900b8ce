"""Hidden semi-Markov models equal sums over all segmentations; steps reach the maximum of each family."""

import numpy as np
import pytest
import torch

from logchain import nn
from logchain.nn import HMM, Durations
from logchain.transitions import Duration
from tests.nn import segmentations
from tests.nn.hmms import F64, array, categories, close, seeded, semi_markov

C, D, V, LENGTHS = 3, 4, 6, [6, 1, 3, 4, 6]
FAMILIES = ["free", "poisson", "negative_binomial"]
FAMILY = pytest.mark.parametrize("family", FAMILIES)
CENSORED = pytest.mark.parametrize("right_censored", [True, False], ids=["censored", "ends"])


def weights(hmm, data):
    """The log-weight of each segmentation of one sequence."""
    x, structure = array(hmm.emission(data)), hmm.transition()
    parts = (array(part) for part in (hmm.initial(), *structure.parameters))
    return segmentations.log_weights(x, *parts, censored=hmm.transition.right_censored)


@FAMILY
@CENSORED
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=str)
@pytest.mark.parametrize(("num_states", "longest"), [(C, D), (1, D), (2, 1), (2, 9)], ids=str)
def test_likelihoods_posteriors_and_best_paths_equal_the_segmentations(
    family, right_censored, lengths, num_states, longest
):
    if longest < V and num_states == 1 and not right_censored:
        lengths = None
    hmm, data = semi_markov(family, num_states, longest, right_censored=right_censored), categories(5, V)
    posterior, best = hmm.posterior(data, lengths=lengths), hmm.decode(data, lengths=lengths)
    close(hmm.log_prob(data, lengths=lengths), array(posterior.log_norm))
    for row, length in enumerate(lengths or [V] * 5):
        table = weights(hmm, data[row, :length])
        begins = segmentations.posterior(table, length, num_states, longest)
        close(posterior.log_norm[row], segmentations.log_sum(table))
        close(posterior.states[row, :length], segmentations.of_states(begins))
        assert (posterior.states[row, length:] == 0).all() and (best.states[row, length:] == -1).all()
        close(best.score[row], max(table.values()))
        steps = tuple(best.states[row, :length].tolist())
        top = [weight for segments, weight in table.items() if segmentations.steps_of(segments, length) == steps]
        close(best.score[row], max(top))


@CENSORED
def test_em_step_takes_the_expected_counts(right_censored):
    hmm, data = semi_markov(right_censored=right_censored), categories(5, V)
    begins, moves = np.zeros((C, D)), np.zeros((C, C))
    for row in data:
        table = weights(hmm, row)
        begins += segmentations.posterior(table, V, C, D).sum(0)
        norm = segmentations.log_sum(table)
        for segments, weight in table.items():
            for (state, *_), (following, *_) in zip(segments, segments[1:], strict=False):
                moves[state, following] += np.exp(weight - norm)
    counts = hmm.posterior(data, transitions="sum").transitions
    close(counts.matrix, moves)
    hmm.fit(data, max_iterations=1, restarts=0, tolerance=-torch.inf)
    structure = hmm.transition().map(torch.exp)
    close(structure.durations, begins / begins.sum(1, keepdims=True))
    close(structure.matrix, moves / moves.sum(1, keepdims=True))


@FAMILY
def test_step_reaches_the_maximum_of_the_family(family):
    counts = torch.tensor([[9.0, 4.0, 1.0, 0.5], [0.6, 0.2, 0.15, 0.1], [0.0, 0.0, 0.0, 0.0]], dtype=F64)
    durations = semi_markov(family).transition.weights[1]
    before = durations().detach()
    for step in (0.0, 0.5, 1.0):
        target = (1 - step) * durations().exp().detach() + step * counts / counts.sum(1, keepdim=True)
        durations.maximize(counts, step)
        slopes = torch.autograd.grad((target[:2] * durations()[:2]).sum(), list(durations.parameters()))
        assert all(slope.abs().max() < 1e-4 for slope in slopes)
        torch.testing.assert_close(durations()[2], before[2])  # which has no counts
        if not step:
            torch.testing.assert_close(durations(), before)
    assert all(parameter.grad is None for parameter in durations.parameters())


@pytest.mark.parametrize("seed", range(40, 60))
def test_step_without_a_maximum_stays_finite_and_gains(seed):
    # variances below the means: the best negative binomial is the limit of an infinite count
    generator = seeded(seed)
    part = Durations(3, 6, "negative_binomial", generator=generator).weights[1]
    means, width = 2.5 * torch.rand(3, 1, generator=generator), torch.rand(3, 1, generator=generator)
    shares = torch.softmax(-2 * width * (torch.arange(6) - means) ** 2, -1)
    before = (shares * part()).sum().detach()
    part.set(shares)
    assert (shares * part()).sum() > before
    assert all(parameter.isfinite().all() for parameter in part.parameters())


@FAMILY
@CENSORED
def test_gradients_equal_finite_differences(family, right_censored):
    hmm, data = semi_markov(family, right_censored=right_censored), categories(5, V)
    lengths = torch.tensor(LENGTHS)
    parameters = tuple(hmm.transition.parameters())
    assert torch.autograd.gradcheck(lambda *_: hmm.log_prob(data, lengths=lengths), parameters)


@CENSORED
def test_draws_have_the_probabilities_of_segmentations(right_censored):
    count, hmm, nothing = 4000, semi_markov(right_censored=right_censored), torch.full((V,), torch.nan)
    table = weights(hmm, nothing)
    possible = {segmentations.steps_of(segments, V) for segments, weight in table.items() if weight > -np.inf}
    truth = segmentations.of_states(segmentations.posterior(table, V, C, D))
    states, data = hmm.sample(count, V, generator=seeded())
    assert data.shape == (count, V)
    for drawn in (states, hmm.sample_posterior(nothing, count, generator=seeded(1))):
        assert set(map(tuple, drawn.tolist())) <= possible
        shares = torch.nn.functional.one_hot(drawn, C).double().mean(0).numpy()
        assert (abs(shares - truth) <= 5 * np.sqrt(truth / count) + 1e-12).all()


def test_draws_of_a_length_that_no_segments_have_are_refused():
    transition = Durations(2, 3, right_censored=False)
    transition.set(1 - torch.eye(2), torch.tensor([0.0, 0.0, 1.0]).expand(2, 3))
    hmm = HMM(2, "poisson", transition=transition)
    with pytest.raises(ValueError, match="^num_steps: expected a sum of possible durations, .* got 4$"):
        hmm.sample(2, 4)
    assert hmm.sample(2, 6).states.diff().count_nonzero() == 2


def test_distribution_of_torch_is_a_family():
    logits = torch.tensor([0.5, 0.0, -1.0])
    transition = Durations(C, D, nn.Distribution(torch.distributions.Geometric, C, logits=logits, spread=0))
    expected = torch.sigmoid(-logits)[:, None] ** torch.arange(D)
    torch.testing.assert_close(transition().durations.exp(), expected / expected.sum(1, keepdim=True))


def test_module_may_return_durations_that_follow_covariates():
    class Driven(torch.nn.Module):
        def forward(self, covariates):
            structure = hmm.transition()
            tilted = structure.durations + covariates * torch.arange(D)
            return Duration(structure.matrix, tilted.log_softmax(-1))

    hmm, data = semi_markov(), categories(5, V)
    driven = HMM(C, hmm.emission, transition=Driven())
    driven.initial = hmm.initial
    torch.testing.assert_close(driven.log_prob(data, covariates=torch.tensor(0.0)), hmm.log_prob(data))
    lasting = driven.decode(data[0], covariates=torch.tensor(99.0)).states
    assert (lasting[:D] == lasting[0]).all()


@CENSORED
def test_filtered_states_forecasts_and_known_states(right_censored):
    hmm, data = semi_markov(right_censored=right_censored), categories(5, V)
    posterior, filtered, forecast = hmm.posterior(data), hmm.filter(data, lengths=LENGTHS), hmm.forecast(data, 2).states
    close(filtered.log_likelihoods.sum(-1), array(hmm.log_prob(data, lengths=LENGTHS)))
    close(filtered.states[0, -1], array(posterior.states[0, -1]))
    if right_censored:
        observed = (torch.arange(V + 2) < V).expand(5, -1)
        longer = torch.nn.functional.pad(data, (0, 2))
        close(forecast, array(hmm.posterior(longer, observed).states[:, V:]))
    else:  # the last segment ends at the last step
        close(forecast[:, 0], array(posterior.states[:, -1] @ hmm.transition().map(torch.exp).matrix))
    known = torch.full((5, V), -1)
    known[:, 2] = 1
    close(hmm.posterior(data, states=known).states[:, 2], [[0, 1, 0]] * 5)


def test_durations_of_a_family_with_sums_in_float64_have_the_dtype_of_its_parameters():
    hmm = HMM(2, "gaussian", transition=Durations(2, 4, nn.Poisson(2)))
    assert hmm.log_prob(torch.zeros(3, 6)).dtype == torch.float32
