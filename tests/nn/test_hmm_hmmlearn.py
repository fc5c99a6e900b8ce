"""Models of hmmlearn become modules with the same likelihoods and posteriors, and are given back."""

import numpy as np
import pytest
import torch

from logchain.nn import HMM
from tests.nn.hmms import F64, C, Network, close, random_hmm, seeded


def hmmlearn_model(kind, covariance="diag", d=2):
    hmm = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)
    draw = np.random.default_rng(0)
    options = {"covariance_type": covariance} if kind in ("GaussianHMM", "GMMHMM") else {}
    model = hmm.GMMHMM(C, 2, **options) if kind == "GMMHMM" else getattr(hmm, kind)(C, **options)
    model.startprob_, model.transmat_ = draw.dirichlet(np.ones(C)), draw.dirichlet(np.ones(C), C)
    samples = draw.normal(size=(30, d))
    if kind == "CategoricalHMM":
        model.emissionprob_, samples = draw.dirichlet(np.ones(4), C), draw.integers(4, size=(30, 1))
    elif kind == "PoissonHMM":
        model.lambdas_, samples = draw.exponential(3, (C, d)), draw.poisson(3, (30, d))
    else:
        units = (C, 2) if kind == "GMMHMM" else (C,)
        model.means_ = draw.normal(size=(*units, d))
        root = draw.normal(size=(*units, d, d))
        full = root @ root.swapaxes(-1, -2) + 0.1 * np.eye(d)
        diagonal = np.diagonal(full, axis1=-2, axis2=-1)
        tied = full[:, 0] if kind == "GMMHMM" else full[0]
        model.n_features = d
        model.covars_ = {"full": full, "diag": diagonal, "spherical": diagonal[..., 0], "tied": tied}[covariance]
        if kind == "GMMHMM":
            model.weights_ = draw.dirichlet(np.ones(2), C)
    return model, samples


KINDS = [
    ("CategoricalHMM", "diag"),
    ("PoissonHMM", "diag"),
    *(("GaussianHMM", kind) for kind in ("diag", "full", "spherical", "tied")),
    *(("GMMHMM", kind) for kind in ("diag", "full", "spherical", "tied")),
]


@pytest.mark.parametrize(("kind", "covariance"), KINDS)
def test_models_of_hmmlearn_and_back(kind, covariance):
    model, samples = hmmlearn_model(kind, covariance)
    hmm = HMM.from_hmmlearn(model)
    data = torch.from_numpy(samples[:, 0] if kind == "CategoricalHMM" else samples)
    for theirs in (model, hmm.to_hmmlearn()):
        score, posteriors = theirs.score_samples(samples)
        close(hmm.log_prob(data), score, atol=1e-9)
        close(hmm.posterior(data).states, posteriors, atol=1e-9)


def test_numbers_are_samples_with_one_feature():
    pytest.importorskip("hmmlearn", exc_type=ImportError)
    hmm, data = random_hmm("gaussian"), torch.randn(30, generator=seeded(), dtype=F64)
    assert hmm.to_hmmlearn().score(data[:, None].numpy()) == pytest.approx(hmm.log_prob(data).item(), abs=1e-9)
    hmm, data = random_hmm("poisson"), torch.randint(5, (30,), generator=seeded())
    assert hmm.to_hmmlearn().score(data[:, None].numpy()) == pytest.approx(hmm.log_prob(data).item(), abs=1e-9)


def test_what_hmmlearn_does_not_have():
    pytest.importorskip("hmmlearn", exc_type=ImportError)
    with pytest.raises(TypeError, match="model: expected hmmlearn's GaussianHMM or GMMHMM .*, got int"):
        HMM.from_hmmlearn(1)
    with pytest.raises(ValueError, match="hmm: expected a free initial distribution and one transition matrix"):
        random_hmm(initial="stationary").to_hmmlearn()
    with pytest.raises(ValueError, match="hmm: expected an emission that hmmlearn has, got Network"):
        random_hmm(Network(2)).to_hmmlearn()
