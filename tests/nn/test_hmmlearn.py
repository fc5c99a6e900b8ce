"""Models of hmmlearn have the same likelihoods, posteriors and steps of expectation maximization."""

import math

import numpy as np
import pytest
import torch

from logchain.nn import HMM
from logchain.nn.priors import Dirichlet, NormalInverseWishart
from tests.nn.hmms import close

engine = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)

GAUSSIANS = [("GaussianHMM", kind) for kind in ("diag", "full", "spherical", "tied")]
MODELS = [("CategoricalHMM", None), ("PoissonHMM", None), *GAUSSIANS]
MIXTURES = [("GMMHMM", kind) for _, kind in GAUSSIANS]
LENGTHS = [10, 19, 1]


def hmmlearn_model(kind, covariance, c=3, d=2):
    """A model with random parameters, and 30 samples."""
    draw = np.random.default_rng(0)
    sizes = (c, 2) if kind == "GMMHMM" else (c,)
    model = getattr(engine, kind)(*sizes, **({"covariance_type": covariance} if covariance else {}))
    model.startprob_, model.transmat_ = draw.dirichlet(np.ones(c)), draw.dirichlet(np.ones(c), c)
    if kind == "CategoricalHMM":
        model.emissionprob_ = draw.dirichlet(np.ones(4), c)
        return model, draw.integers(4, size=(30, 1))
    if kind == "PoissonHMM":
        model.lambdas_ = draw.exponential(3, (c, d))
        return model, draw.poisson(3, (30, d))
    model.n_features, model.means_ = d, draw.normal(size=(*sizes, d))
    full = positive(draw, *sizes, d) + 0.1 * np.eye(d)
    diagonal = np.diagonal(full, axis1=-2, axis2=-1)
    tied = full[:, 0] if kind == "GMMHMM" else full[0]
    model.covars_ = {"full": full, "diag": diagonal, "spherical": diagonal[..., 0], "tied": tied}[covariance]
    if kind == "GMMHMM":
        model.weights_ = draw.dirichlet(np.ones(2), c)
    return model, draw.normal(size=(30, d))


def positive(draw, *shape):
    """Positive definite matrices."""
    root = draw.normal(size=(*shape, shape[-1]))
    return root @ root.swapaxes(-1, -2)


def in_our_shape(kind, samples):
    """Samples of categories have no axis of features."""
    return samples[:, 0] if kind == "CategoricalHMM" else samples


@pytest.mark.parametrize(("kind", "covariance"), MODELS + MIXTURES)
def test_likelihoods_and_posteriors_equal_hmmlearn(kind, covariance):
    model, samples = hmmlearn_model(kind, covariance)
    hmm = HMM.from_hmmlearn(model)
    data = in_our_shape(kind, samples)
    score, posteriors = model.score_samples(samples)
    close(hmm.log_prob(data), score, atol=1e-9)
    close(hmm.posterior(data).states, posteriors, atol=1e-9)


def assert_same_fit(hmm, theirs, kind, samples, iterations, tolerance):
    """From equal parameters equal log-likelihoods of all iterations lead to equal parameters."""
    data, options = in_our_shape(kind, samples), {"max_iterations": iterations, "tolerance": -math.inf}
    report = hmm.fit(data, lengths=LENGTHS, restarts=0, **options)
    theirs.n_iter, theirs.init_params = iterations, ""
    theirs.monitor_.n_iter, theirs.monitor_.tol = iterations, -math.inf
    theirs.fit(samples, LENGTHS)
    found, wanted = ({name: value.detach() for name, value in one.named_parameters()}
                     for one in (hmm, HMM.from_hmmlearn(theirs)))  # fmt: skip
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        values = value, wanted[name]
        if name.endswith("logits"):  # of categories down the first axis
            values = [one.softmax(0 if "emission" in name else -1) for one in values]
        np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance)
    return report


@pytest.mark.parametrize(("kind", "covariance"), MODELS)
def test_em_equals_hmmlearn(kind, covariance):
    model, samples = hmmlearn_model(kind, covariance)
    if covariance:  # without the priors that are on by default
        model.covars_prior, model.covars_weight = 0, {"full": 0, "tied": 0}.get(covariance, 1)
    report = assert_same_fit(HMM.from_hmmlearn(model), model, kind, samples, 15, 1e-9)
    np.testing.assert_allclose(report.history[:-1], model.monitor_.history, rtol=0, atol=1e-8)
    assert report.history[-1] > report.history[0] + 0.1


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_em_step_with_priors_equals_hmmlearn(covariance):
    draw, c, d = np.random.default_rng(3), 3, 2
    model, samples = hmmlearn_model("GaussianHMM", covariance, c, d)
    model.startprob_prior, model.transmat_prior = 1 + draw.random(c), 1 + draw.random((c, c))
    model.means_prior, model.means_weight = draw.normal(size=d), 1.5
    model.covars_prior = positive(draw, c, d) if covariance == "full" else draw.random((c, d))
    model.covars_weight = 2.5 + d
    hmm = HMM.from_hmmlearn(model)
    hmm.initial.prior = Dirichlet(torch.from_numpy(model.startprob_prior))
    hmm.transition.weights[0].prior = Dirichlet(torch.from_numpy(model.transmat_prior))
    emission = hmm.emission
    dof = model.covars_weight - (2 * d + 2 if covariance == "full" else 4)
    scale, mean = torch.from_numpy(model.covars_prior), torch.from_numpy(model.means_prior)
    emission.prior = NormalInverseWishart(scale, dof, mean, 1.5)
    assert_same_fit(hmm, model, "GaussianHMM", samples, 1, 1e-12)
