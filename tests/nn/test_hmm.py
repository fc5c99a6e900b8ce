"""The answers of `logchain.nn.HMM`, likelihoods, posteriors, paths and draws, are sums over all paths."""

import itertools

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

import logchain
from tests import oracle
from tests.nn.hmms import (
    F64,
    LENGTHS,
    C,
    Driven,
    Network,
    V,
    all_paths,
    array,
    categories,
    close,
    parameters,
    probabilities,
    random_hmm,
    seeded,
)


def test_categories():
    hmm, data = random_hmm(), categories(5, V)
    p0, bulk = parameters(hmm)
    table = array(hmm.emission.weights())  # (K, c)
    truth = all_paths(table[data.numpy()], bulk, p0)
    close(hmm.log_prob(data), truth.log_norm)
    found = hmm.posterior(data, transitions="full")
    close(found.states, truth.states)
    close(found.transitions, truth.transitions)


def test_counts_of_several_features():
    """Independent given the state; a part of a step may be missing."""
    hmm = random_hmm("poisson", num_features=2)
    data = torch.tensor([[0, 3], [2, 1], [1, 1], [4, 0]], dtype=F64)
    rates = np.exp(array(hmm.emission.log_rates))
    terms = scipy.stats.poisson.logpmf(data.numpy()[:, :, None], rates)  # (v, d, c)
    p0, bulk = parameters(hmm)
    close(hmm.log_prob(data), all_paths(terms.sum(1), bulk, p0).log_norm)
    observed = torch.tensor([[True, True], [False, True], [False, False], [True, False]])
    truth = all_paths((terms * observed.numpy()[..., None]).sum(1), bulk, p0).log_norm
    close(hmm.log_prob(data, observed=observed), truth)
    close(hmm.log_prob(data.masked_fill(~observed, torch.nan)), truth)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_vectors(covariance):
    hmm = random_hmm("gaussian", num_features=2, covariance=covariance)
    data = torch.randn(5, V, 2, generator=seeded(), dtype=F64)
    hmm.initialise(data, generator=seeded())
    means, covariances = array(hmm.emission.means), array(hmm.emission.covariance())
    logpdf = scipy.stats.multivariate_normal.logpdf
    x = np.stack([logpdf(data.numpy(), means[j], covariances[j]) for j in range(C)], -1)
    p0, bulk = parameters(hmm)
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)


def test_a_single_sequence():
    hmm, data = random_hmm(), categories(V)
    found = hmm.log_prob(data)
    assert found.shape == ()
    assert found == hmm.log_prob(data[None])[0]


def test_log_potentials_of_a_network():
    hmm = random_hmm(Network(2))
    data = torch.randn(5, V, 2, generator=seeded(), dtype=F64)
    p0, bulk = parameters(hmm)
    x = array(hmm.emission(data))
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)
    observed = torch.rand(5, V, generator=seeded()) < 0.5
    close(hmm.log_prob(data, observed=observed), all_paths(np.where(observed[..., None], x, 0), bulk, p0).log_norm)


def test_a_matrix_per_step():
    hmm, data = random_hmm(num_steps=V), categories(5, V)
    p0, bulk = parameters(hmm)
    assert bulk.shape == (V - 1, C, C)
    x = array(hmm.emission.weights())[data.numpy()]
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)
    close(hmm.log_prob(data[:, :2]), all_paths(x[:, :2], bulk[:1], p0).log_norm)
    close(hmm.log_prob(data[:, :1]), all_paths(x[:, :1], bulk[:0], p0).log_norm)
    with pytest.raises(ValueError, match="data: expected at most 4 steps, got 5"):
        hmm.log_prob(categories(5, V + 1))


@pytest.mark.parametrize("steps", [V - 1, 1])
def test_transitions_of_covariates(steps):
    hmm, data = random_hmm(transition=Driven(2)), categories(5, V)
    covariates = torch.randn(5, steps, 2, generator=seeded(), dtype=F64)
    logits = array(hmm.transition(covariates))
    bulk = scipy.special.softmax(logits, -1)
    x = array(hmm.emission.weights())[data.numpy()]
    close(hmm.log_prob(data, covariates=covariates), all_paths(x, bulk, probabilities(hmm.initial)).log_norm)


def test_a_stationary_start():
    hmm, data = random_hmm(initial="stationary"), categories(5, V)
    bulk = probabilities(hmm.transition)
    p0 = np.linalg.matrix_power(bulk[0], 1000)[0]
    x = array(hmm.emission.weights())[data.numpy()]
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)
    assert torch.autograd.gradcheck(lambda *_: hmm.log_prob(data), tuple(hmm.parameters()))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -1.0])
@pytest.mark.parametrize("kind", ["gaussian", "network", "covariates"])
def test_what_lies_behind_the_end_has_no_influence(kind, poison):
    options = {"gaussian": {}, "network": {}, "covariates": {"transition": Driven(2)}}[kind]
    hmm = random_hmm(Network(2) if kind == "network" else "gaussian", **options)
    shape = (5, V, 2) if kind == "network" else (5, V)
    data = torch.randn(*shape, generator=seeded(), dtype=F64)
    behind = torch.arange(V) >= torch.tensor(LENGTHS)[:, None]
    given = {}
    if kind == "covariates":
        given["covariates"] = torch.randn(5, V - 1, 2, generator=seeded(2), dtype=F64)

    def answers(data, **given):
        hmm.zero_grad()
        found = hmm.log_prob(data, lengths=LENGTHS, **given)
        found.sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in hmm.parameters())]

    truth = answers(data, **given)
    for row, length in enumerate(LENGTHS):
        some = {name: value[row, : length - 1] for name, value in given.items()}
        close(truth[0][row], array(hmm.log_prob(data[row, :length], **some)))
    if kind == "covariates":
        given["covariates"] = given["covariates"].masked_fill(behind[:, 1:, None], poison)
    found = answers(data.masked_fill(behind[..., None] if kind == "network" else behind, poison), **given)
    for a, b in zip(found, truth, strict=True):
        assert torch.equal(a, b)


def test_categories_behind_the_end_may_be_none():
    hmm, data = random_hmm(), categories(5, V)
    behind = torch.arange(V) >= torch.tensor(LENGTHS)[:, None]
    padded = data.masked_fill(behind, -1)
    assert torch.equal(hmm.log_prob(padded, lengths=LENGTHS), hmm.log_prob(data, lengths=LENGTHS))
    with pytest.raises(ValueError, match="data: "):
        hmm.log_prob(padded)


def test_what_is_not_observed_is_summed_out():
    hmm, data = random_hmm(), categories(V)
    observed = torch.tensor([True, False, True, False])
    rows = [torch.tensor([data[0], a, data[2], b]) for a, b in itertools.product(range(4), repeat=2)]
    close(hmm.log_prob(data, observed=observed), array(hmm.log_prob(torch.stack(rows)).logsumexp(0)))
    close(hmm.log_prob(data, observed=torch.zeros(V, dtype=torch.bool)), 0.0)


def test_a_mask_of_the_steps_serves_all_sequences():
    data, mask, lengths = categories(V, V), torch.tensor([True, False, True, True]), torch.tensor([4, 1, 3, 2])
    whole, hmm = mask.expand(V, V), random_hmm()
    for options in ({}, {"lengths": lengths}):
        assert torch.equal(hmm.log_prob(data, observed=mask, **options), hmm.log_prob(data, observed=whole, **options))
    assert torch.equal(hmm.posterior(data, observed=mask).states, hmm.posterior(data, observed=whole).states)
    # the sizes of data and mask agree, and a batch is divided
    fits = [random_hmm().fit(data, observed=one, batch_size=2, max_iterations=2, restarts=0) for one in (mask, whole)]
    assert fits[0] == fits[1]
    vectors = random_hmm("gaussian", num_features=2)
    data = torch.randn(5, V, 2, generator=seeded(), dtype=F64)
    assert torch.equal(vectors.log_prob(data, observed=mask), vectors.log_prob(data, observed=mask.expand(5, V)))


def test_the_best_path():
    hmm, data = random_hmm(), categories(5, V)
    p0, bulk = parameters(hmm)
    x = array(hmm.emission.weights())[data.numpy()]
    found = hmm.decode(data)
    for row in range(5):
        weights = oracle.paths(x[row], bulk, p0)
        best = max(weights, key=weights.get)
        assert tuple(found.states[row].tolist()) == best
        close(found.score[row], float(weights[best].ln()))


def test_draws_have_the_probabilities_of_the_model():
    """Each of 4^3 outcomes as often as the sum over paths says, within five standard deviations."""
    hmm = random_hmm(num_steps=3)
    count = 20_000
    states, data = hmm.sample(count, 3, generator=seeded())
    assert states.shape == data.shape == (count, 3)
    every = torch.cartesian_prod(*[torch.arange(4)] * 3)
    truth = array(hmm.log_prob(every).exp())
    codes = (data * torch.tensor([16, 4, 1])).sum(-1)
    found = torch.bincount(codes, minlength=64).numpy() / count
    assert (np.abs(found - truth) <= 5 * np.sqrt(truth / count)).all()
    p0, bulk = parameters(hmm)
    pairs = np.stack([torch.bincount(C * states[:, i] + states[:, i + 1], minlength=C * C).numpy() for i in range(2)])
    first = p0[:, None] * bulk[0]
    truth = np.stack([first, first.sum(0)[:, None] * bulk[1]]).reshape(2, -1)
    assert (np.abs(pairs / count - truth) <= 5 * np.sqrt(truth / count)).all()


def test_draws_of_states_given_the_data():
    hmm, data = random_hmm(), categories(2, V)
    drawn = hmm.sample_posterior(data, 20_000, generator=seeded())
    share = torch.nn.functional.one_hot(drawn, C).double().mean(0)
    truth = array(hmm.posterior(data).states)
    assert (np.abs(share.numpy() - truth) <= 5 * np.sqrt(truth / 20_000) + 1e-12).all()


def test_the_library_takes_the_arguments():
    hmm, data = random_hmm(), categories(2, V)
    found = logchain.entropy(**hmm.arguments(data, lengths=[4, 2])._asdict())
    assert found.shape == (2,) and (found > 0).all()
