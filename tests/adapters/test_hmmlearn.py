"""`adapters.from_hmmlearn` gives that package's scores, posteriors and best paths."""

import numpy as np
import pytest
import torch

import logchain
from logchain import adapters
from tests.adapted import NATS, SHARE, answers, distance, peer


def hmmlearn_model(kind):
    """A model with chosen parameters, and samples of it."""
    hmm = peer("hmmlearn.hmm")
    generator = np.random.default_rng(3)
    draw = generator.dirichlet
    if kind == "gaussian":
        model = hmm.GaussianHMM(3, "full")
        model.means_ = generator.normal(size=(3, 2))
        model.covars_ = np.stack([np.eye(2) * (1 + i) + 0.3 for i in range(3)])
    elif kind == "categorical":
        model = hmm.CategoricalHMM(3)
        model.emissionprob_ = draw(np.ones(5), 3)
        model.emissionprob_[0, 0], model.emissionprob_[0, 1] = 0.0, model.emissionprob_[0, :2].sum()
    elif kind == "poisson":
        model = hmm.PoissonHMM(3)
        model.lambdas_ = np.array([[1.0], [4.0], [12.0]])
    else:
        model = hmm.GMMHMM(3, n_mix=2, covariance_type="diag")
        model.weights_ = draw(np.ones(2), 3)
        model.means_ = generator.normal(size=(3, 2, 2))
        model.covars_ = generator.uniform(0.5, 2.0, size=(3, 2, 2))
    model.startprob_ = np.array([0.0, 0.5, 0.5]) if kind == "poisson" else draw(np.ones(3))
    model.transmat_ = draw(np.ones(3), 3)
    if kind == "gaussian":
        model.n_features = 2
    samples, _ = model.sample(120, random_state=0)
    return model, samples


KINDS = pytest.mark.parametrize("kind", ["gaussian", "categorical", "poisson", "gmm"])


@KINDS
def test_hmmlearn(kind):
    model, samples = hmmlearn_model(kind)
    arguments = adapters.from_hmmlearn(model, samples)
    log_norm, posteriors = answers(arguments)
    score, theirs = model.score_samples(samples)
    assert log_norm.shape == ()
    assert distance(log_norm, score) <= NATS
    assert distance(posteriors, theirs) <= SHARE


@KINDS
def test_hmmlearn_sequences_side_by_side(kind):
    model, samples = hmmlearn_model(kind)
    lengths = [50, 1, 69]
    arguments = adapters.from_hmmlearn(model, samples, lengths)
    log_norm, posteriors = answers(arguments)
    score, theirs = model.score_samples(samples, lengths)
    assert distance(log_norm.sum(), score) <= NATS
    assert distance(torch.cat([posteriors[i, :end] for i, end in enumerate(lengths)]), theirs) <= SHARE
    assert arguments.lengths.tolist() == lengths and posteriors[1, 1:].eq(0).all()


@KINDS
def test_hmmlearn_best_path(kind):
    model, samples = hmmlearn_model(kind)
    best = logchain.viterbi(**adapters.from_hmmlearn(model, samples)._asdict())
    score, states = model.decode(samples)
    assert distance(best.score, score) <= NATS
    assert best.states.tolist() == states.tolist()


def test_hmmlearn_model_is_left_alone():
    model, samples = hmmlearn_model("poisson")
    arguments = adapters.from_hmmlearn(model, samples)
    before = model.transmat_.copy()
    arguments.bulk.zero_()
    arguments.p0.zero_()
    assert (model.transmat_ == before).all() and model.startprob_.sum() == 1
