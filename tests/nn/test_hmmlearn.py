"""Models of hmmlearn have the same likelihoods, posteriors and M steps; its own tests pass with `HMM` as the engine.

Those are the tests of the installed package; only the class that they make is another. It starts where hmmlearn does,
and fits, scores and decodes through `HMM.from_hmmlearn`, `HMM.fit` and `HMM.to_hmmlearn`.
"""

import math
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch

from logchain.nn import HMM
from tests.nn.hmms import close

engine = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)
# importing them makes numpy warn of underflow, here and in all other tests
with np.errstate():
    theirs = pytest.importorskip("hmmlearn.tests.test_gaussian_hmm", exc_type=ImportError)


class Ours(engine.GaussianHMM):
    """A GaussianHMM that asks `HMM`."""

    def fit(self, X, lengths=None):
        lengths = [len(X)] if lengths is None else lengths
        self._init(X, lengths)
        self._check()
        hmm = HMM.from_hmmlearn(self)
        for part, letters in ((hmm.initial, "s"), (hmm.transition, "t"), (hmm.emission, "mc")):
            assert len(set(letters) & set(self.params)) in (0, len(letters)), "half of an emission"
            part.requires_grad_(letters[0] in self.params)
        data = in_rows(X, lengths)
        hmm.fit(data, lengths=lengths, restarts=0, max_iterations=self.n_iter, tolerance=self.tol)
        fitted = hmm.to_hmmlearn()
        assert fitted.covariance_type == self.covariance_type
        for name in ("startprob_", "transmat_", "means_", "_covars_"):
            setattr(self, name, getattr(fitted, name))
        return self

    def _score(self, X, lengths=None, *, compute_posteriors):
        lengths = [len(X)] if lengths is None else lengths
        found = HMM.from_hmmlearn(self).posterior(in_rows(X, lengths), lengths=lengths)
        states = [rows[:length] for rows, length in zip(found.states.detach(), lengths, strict=True)]
        return found.log_norm.sum().item(), torch.cat(states).numpy()

    def _decode_viterbi(self, X):
        path = HMM.from_hmmlearn(self).decode(torch.from_numpy(X))
        return path.score.item(), path.states.numpy()


def in_rows(X, lengths):
    """Concatenated samples as padded sequences [n, v, d] in float64."""
    return torch.nn.utils.rnn.pad_sequence(torch.tensor(np.array(X, np.float64)).split(list(lengths)), batch_first=True)


@pytest.fixture(autouse=True)
def ours_in_their_place(monkeypatch):
    monkeypatch.setattr(theirs, "hmm", SimpleNamespace(GaussianHMM=Ours))


def once(test):
    """A test of theirs with one of hmmlearn's two implementations, which make no difference to `Ours`.

    Of its scaled recursions one of the tests expects that they underflow.
    """
    copied = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__)
    return pytest.mark.parametrize("implementation", ["log"])(copied)


for _name in ("Spherical", "Diagonal", "Tied", "Full"):
    _tests = getattr(theirs, f"TestGaussianHMMWith{_name}Covars")
    _once = {name: once(getattr(_tests, name)) for name in dir(_tests) if name.startswith("test_")}
    globals()[f"Test{_name}"] = type(f"Test{_name}", (_tests,), {"__module__": __name__, **_once})


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
def test_likelihoods_and_posteriors_equal_hmmlearn_both_ways(kind, covariance):
    model, samples = hmmlearn_model(kind, covariance)
    hmm = HMM.from_hmmlearn(model)
    data = torch.from_numpy(in_our_shape(kind, samples))
    for theirs in (model, hmm.to_hmmlearn()):
        score, posteriors = theirs.score_samples(samples)
        close(hmm.log_prob(data), score, atol=1e-9)
        close(hmm.posterior(data).states, posteriors, atol=1e-9)


def assert_same_fit(theirs, kind, covariance, samples, iterations, tolerance):
    """From equal parameters equal log-likelihoods of all iterations lead to equal parameters."""
    hmm = HMM.from_hmmlearn(theirs)
    data = torch.nn.utils.rnn.pad_sequence(torch.from_numpy(in_our_shape(kind, samples)).split(LENGTHS), True)
    report = hmm.fit(data, lengths=LENGTHS, restarts=0, max_iterations=iterations, tolerance=-math.inf)
    theirs.n_iter, theirs.init_params = iterations, ""
    theirs.monitor_.n_iter, theirs.monitor_.tol = iterations, -math.inf
    theirs.fit(samples, LENGTHS)
    ours = hmm.to_hmmlearn()
    emission = {"CategoricalHMM": ["emissionprob_"], "PoissonHMM": ["lambdas_"]}.get(kind, ["means_", "_covars_"])
    for name in ("startprob_", "transmat_", *emission):
        expected = getattr(theirs, name)
        # of spherical covariances it leaves one for each feature
        expected = expected[:, 0] if covariance == "spherical" and name == "_covars_" else expected
        np.testing.assert_allclose(getattr(ours, name), expected, rtol=tolerance, atol=tolerance)
    return report


@pytest.mark.parametrize(("kind", "covariance"), MODELS)
def test_em_equals_hmmlearn(kind, covariance):
    model, samples = hmmlearn_model(kind, covariance)
    if covariance:  # without the priors that are on by default
        model.covars_prior, model.covars_weight = 0, {"full": 0, "tied": 0}.get(covariance, 1)
    report = assert_same_fit(model, kind, covariance, samples, 15, 1e-9)
    np.testing.assert_allclose(report.history[:-1], model.monitor_.history, rtol=0, atol=1e-8)
    assert report.history[-1] > report.history[0] + 0.1


@pytest.mark.parametrize(("kind", "covariance"), MODELS)
def test_em_step_with_priors_equals_hmmlearn(kind, covariance):
    # its Poisson step is that of the prior for a single state alone
    starts, d = [1.0] if kind == "PoissonHMM" else [0.6, 0.4, 0.0], 3
    draw, c = np.random.default_rng(3), len(starts)
    model, samples = hmmlearn_model(kind, covariance, c, d)
    model.startprob_ = np.array(starts)
    model.startprob_prior, model.transmat_prior = 1 + draw.random(c), 1 + draw.random((c, c))
    if kind == "CategoricalHMM":
        model.emissionprob_prior = 1 + draw.random((c, 4))
    elif kind == "PoissonHMM":
        model.lambdas_prior, model.lambdas_weight = 2.5, 1.5
    else:
        model.means_prior, model.means_weight = draw.normal(size=d), 1.5
        shape = {"full": (c, d), "tied": (d,)}.get(covariance)
        model.covars_prior = positive(draw, *shape) if shape else draw.random((c, d))
        model.covars_weight = 2.5 + d
    assert_same_fit(model, kind, covariance, samples, 1, 1e-12)
