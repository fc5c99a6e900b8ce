"""Models of hmmlearn have the same likelihoods, posteriors and steps of expectation maximization."""

import math

import numpy as np
import pytest

from logchain.nn import HMM
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
    root = draw.normal(size=(*sizes, d, d))
    full = root @ root.swapaxes(-1, -2) + 0.1 * np.eye(d)
    diagonal = np.diagonal(full, axis1=-2, axis2=-1)
    tied = full[:, 0] if kind == "GMMHMM" else full[0]
    model.covars_ = {"full": full, "diag": diagonal, "spherical": diagonal[..., 0], "tied": tied}[covariance]
    if kind == "GMMHMM":
        model.weights_ = draw.dirichlet(np.ones(2), c)
    return model, draw.normal(size=(30, d))


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


@pytest.mark.parametrize(("kind", "covariance"), MODELS)
def test_em_equals_hmmlearn(kind, covariance):
    """From equal parameters equal log-likelihoods of all iterations lead to equal parameters."""
    theirs, samples = hmmlearn_model(kind, covariance)
    if covariance:  # without the priors that are on by default
        theirs.covars_prior, theirs.covars_weight = 0, {"full": 0, "tied": 0}.get(covariance, 1)
    hmm, options = HMM.from_hmmlearn(theirs), {"max_iterations": 15, "restarts": 0, "tolerance": -math.inf}
    report = hmm.fit(in_our_shape(kind, samples), lengths=LENGTHS, **options)
    theirs.n_iter, theirs.init_params = 15, ""
    theirs.monitor_.n_iter, theirs.monitor_.tol = 15, -math.inf
    theirs.fit(samples, LENGTHS)
    wanted = dict(HMM.from_hmmlearn(theirs).named_parameters())
    assert dict(hmm.named_parameters()).keys() == wanted.keys()
    for name, value in hmm.named_parameters():
        values = value.detach(), wanted[name].detach()
        if name.endswith("logits"):  # of categories down the first axis
            values = [one.softmax(0 if "emission" in name else -1) for one in values]
        np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(report.history[:-1], theirs.monitor_.history, rtol=0, atol=1e-8)
    assert report.history[-1] > report.history[0] + 0.1
