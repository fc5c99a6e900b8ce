"""Likelihoods, posteriors, best paths and draws of hidden Markov models equal sums over all paths."""

import numpy as np
import pytest
import torch

import logchain
from logchain.nn import HMM, Categorical, Gaussian
from logchain.transitions import Banded, BlockDiagonal, Sparse
from tests import oracle
from tests.nn import hmms
from tests.nn.hmms import F64, LENGTHS, MODELS, STRUCTURES, V, array, categories, close, normal, random_hmm, seeded

ALL = pytest.mark.parametrize("name", MODELS)


def drawn(name):
    """A row of the table, its model and data; a Gaussian's parameters suit the data."""
    model = MODELS[name]
    hmm, data = model.make(), model.data()
    if "covariances" in name:
        hmm.initialize(data, generator=seeded())
    return model, hmm, data


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=str)
@ALL
def test_likelihoods_and_posteriors_equal_the_sums_over_paths(name, lengths):
    model, hmm, data = drawn(name)
    truth = model.truth(hmm, data, lengths)
    options = {"lengths": lengths, "covariates": model.covariates}
    close(hmm.log_prob(data, **options), truth.log_norm)
    found = hmm.posterior(data, transitions="full", **options)
    close(found.states, truth.states)
    assert (logchain.entropy(**hmm.arguments(data, **options)._asdict()) >= 0).all()
    moves = found.transitions
    if isinstance(moves, torch.Tensor | Banded | Sparse | BlockDiagonal):
        close(moves if isinstance(moves, torch.Tensor) else moves.to_dense(), truth.transitions)
    else:  # a path uses each factor once a step, and of a low rank's either the diagonal or both factors
        counts = [array(part).sum() for part in moves.parameters]
        used = sum(counts[:1] + counts[2:] if "rank" in name else counts[:1])
        assert used == pytest.approx(truth.transitions.sum())
    # steps that are not observed are summed out
    observed = torch.rand(5, V, generator=seeded()) < 0.5
    truth = model.truth(hmm, data, lengths, observed).log_norm
    close(hmm.log_prob(data, observed=observed, **options), truth)
    if isinstance(hmm.emission, logchain.nn.Emission):
        missing = data.double().masked_fill(~observed.view(5, V, *(1,) * (data.dim() - 2)), torch.nan)
        close(hmm.log_prob(missing, **options), truth)


@ALL
def test_best_path_has_the_largest_weight(name):
    model, hmm, data = drawn(name)
    if "rank" in name:  # whose entries are sums
        with pytest.raises(TypeError, match="bulk: expected a structure whose entries"):
            hmm.decode(data)
        return
    found = hmm.decode(data, covariates=model.covariates)
    x, bulk, p0 = model.potentials(hmm, data)
    for row in range(5):
        weights = oracle.paths(x[row], np.broadcast_to(bulk, (5, V - 1, *bulk.shape[-2:]))[row], p0)
        best = max(weights, key=weights.get)
        assert tuple(found.states[row].tolist()) == best
        close(found.score[row], float(weights[best].ln()))


@pytest.mark.parametrize(
    ("name", "poison"),
    [
        ("categories", -1),
        ("full covariances", torch.nan),
        ("full covariances", torch.inf),
        ("network", torch.nan),
        ("covariates per step", torch.inf),
        ("structure of covariates", -1.0),
    ],
)
def test_padding_has_no_influence(name, poison):
    model, hmm, data = drawn(name)
    padding = torch.arange(V) >= torch.tensor(LENGTHS)[:, None]

    def answers(data, covariates):
        hmm.zero_grad()
        found = hmm.log_prob(data, lengths=LENGTHS, covariates=covariates)
        found.sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in hmm.parameters())]

    covariates = model.covariates
    truth = answers(data, covariates)
    if covariates is not None:
        covariates = covariates.masked_fill(padding[:, 1:, None], poison)
    if name == "categories":
        data = data.masked_fill(padding, poison)
        with pytest.raises(ValueError, match="data: "):
            hmm.log_prob(data)
    if data.is_floating_point():
        data = data.masked_fill(padding[..., None], poison)
    for one, other in zip(answers(data, covariates), truth, strict=True):
        assert torch.equal(one, other)


def test_masks_of_steps_and_of_features():
    mask, whole = torch.tensor([True, False, True, True]), torch.tensor([[True, False, True, True]]).expand(5, V)
    hmm, vectors = random_hmm(), random_hmm(Gaussian(3, 2, generator=seeded()))
    for model, data in ((hmm, categories(5, V)), (vectors, normal(5, V, 2))):
        for lengths in (None, LENGTHS):
            found, expected = (model.log_prob(data, observed=some, lengths=lengths) for some in (mask, whole))
            assert torch.equal(found, expected)
    some = torch.rand(5, V, 2, generator=seeded()) < 0.5  # of the features
    missing = data.masked_fill(~some, torch.nan)
    assert torch.equal(vectors.log_prob(data, observed=some), vectors.log_prob(missing))
    fits = [random_hmm().fit(categories(5, V), observed=some, batch_size=2, restarts=0) for some in (mask, whole)]
    assert fits[0] == fits[1]


def test_matrix_per_step_serves_shorter_data_and_single_sequences():
    hmm, data = random_hmm(num_steps=V), categories(5, V)
    for v in (1, 2):
        truth = MODELS["matrix per step"]._replace(bulk=lambda hmm, _, v=v: hmms.probabilities(hmm.transition)[: v - 1])
        close(hmm.log_prob(data[:, :v]), truth.truth(hmm, data[:, :v]).log_norm)
        assert hmm.log_prob(data[0, :v]) == hmm.log_prob(data[:1, :v])[0]


def test_stationary_start_of_rare_states_keeps_its_digits_and_has_gradients():
    """Birth and death: p_{i+1} / p_i = 1e-12, far below where a linear solver's rounding is."""
    hmm = HMM(6, Categorical(6, 2), initial="stationary").double()
    matrix = torch.diag(torch.full((5,), 1e-13, dtype=F64), 1) + torch.diag(torch.full((5,), 0.1, dtype=F64), -1)
    hmm.transition.set(matrix + torch.diag(1 - matrix.sum(-1)))
    nothing = torch.full((1,), torch.nan)
    start = hmm.posterior(nothing).states.detach()[0]
    np.testing.assert_allclose(start[1:] / start[:-1], 1e-12, rtol=1e-12)
    hmm.transition.set(torch.eye(6))
    with pytest.raises(ValueError, match="transition: expected every state to reach every other"):
        hmm.log_prob(nothing)
    hmm, data = random_hmm(initial="stationary"), categories(5, V)
    assert torch.autograd.gradcheck(lambda *_: hmm.log_prob(data), tuple(hmm.parameters()))


@pytest.mark.parametrize("name", ["categories", *STRUCTURES])
def test_draws_have_their_probabilities(name):
    model, hmm, data = drawn(name)
    c, count = hmm.num_states, 4000
    x, bulk, p0 = model.potentials(hmm, data[:2])
    drawn_states = hmm.sample_posterior(data[:2], count, generator=seeded())
    states, values = hmm.sample(count, 3, generator=seeded())
    assert torch.equal(values, hmm.sample(count, 3, generator=seeded()).data)
    last = torch.nn.functional.one_hot(states[:, 2], c).double().mean(0)
    posterior = torch.nn.functional.one_hot(drawn_states, c).double().mean(0)
    # each of 4^3 outcomes as often as the sum over paths says, within five standard deviations
    outcomes = (values[:, None] == torch.cartesian_prod(*[torch.arange(4)] * 3)).all(-1).double().mean(0)
    of_outcomes = model.truth(hmm, torch.cartesian_prod(*[torch.arange(4)] * 3)).log_norm
    shares = (last, posterior, outcomes)
    truths = (p0 @ bulk[0] @ bulk[0], model.truth(hmm, data[:2]).states, np.exp(of_outcomes))
    for share, truth in zip(shares, truths, strict=True):
        assert (np.abs(share.numpy() - truth) <= 5 * np.sqrt(truth / count) + 1e-12).all()
