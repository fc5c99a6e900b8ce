"""hmmlearn's own tests of its GaussianHMM, with `HMM` in the place of its engine, and its M steps beside ours.

The tests are those of the installed package; only the class that they make is another. It starts where hmmlearn does,
and fits, scores and decodes through `HMM.from_hmmlearn`, `HMM.fit` and `HMM.to_hmmlearn`.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logchain.nn import HMM

engine = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)
# importing them makes numpy warn of underflow, here and in all other tests
with np.errstate():
    theirs = pytest.importorskip("hmmlearn.tests.test_gaussian_hmm", exc_type=ImportError)

NOT_OURS = {
    "test_underflow_from_scaling[scaling]": "it expects an error of hmmlearn's scaled recursions, which underflow"
}


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
def ours_in_their_place(monkeypatch, request):
    monkeypatch.setattr(theirs, "hmm", SimpleNamespace(GaussianHMM=Ours))
    if reason := NOT_OURS.get(request.node.name):
        request.applymarker(pytest.mark.xfail(reason=reason, raises=pytest.fail.Exception, strict=True))


for _name in ("Spherical", "Diagonal", "Tied", "Full"):
    _tests = getattr(theirs, f"TestGaussianHMMWith{_name}Covars")
    globals()[f"Test{_name}"] = type(f"Test{_name}", (_tests,), {"__module__": __name__})


def spread(draw, kind, c, d):
    """A scale of the prior of covariances, of the shape that hmmlearn's M step adds it in."""
    root = draw.normal(size=(c, d, d))
    full = root @ root.swapaxes(-1, -2)
    return {"full": full, "tied": full[0], "diag": draw.random((c, d)), "spherical": draw.random((c, d))}[kind]


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("kind", ["diag", "spherical", "full", "tied"])
def test_a_step_with_priors_is_hmmlearns(kind, d):
    draw, c = np.random.default_rng(3), 2
    theirs = engine.GaussianHMM(c, kind, n_iter=1, init_params="")
    theirs.n_features = d
    theirs.startprob_, theirs.transmat_ = np.array([1.0, 0.0]), draw.dirichlet(np.ones(c), c)
    theirs.means_ = draw.normal(size=(c, d))
    theirs.covars_ = {"diag": np.ones((c, d)), "spherical": np.ones(c), "tied": np.eye(d)}.get(
        kind, np.eye(d)[None].repeat(c, 0)
    )
    theirs.startprob_prior, theirs.transmat_prior = 1 + draw.random(c), 1 + draw.random((c, c))
    theirs.means_prior, theirs.means_weight = draw.normal(size=d), 1.5
    theirs.covars_prior, theirs.covars_weight = spread(draw, kind, c, d), 2.5 + d
    hmm, X, lengths = HMM.from_hmmlearn(theirs), draw.normal(size=(30, d)), [10, 19, 1]
    hmm.fit(in_rows(X, lengths), lengths=lengths, restarts=0, max_iterations=1)
    again = hmm.to_hmmlearn()
    theirs.fit(X, lengths)
    for name in ("startprob_", "transmat_", "means_"):
        np.testing.assert_allclose(getattr(again, name), getattr(theirs, name), rtol=1e-12, atol=1e-12)
    covars = theirs._covars_[:, 0] if kind == "spherical" else theirs._covars_
    np.testing.assert_allclose(again._covars_, covars, rtol=1e-12, atol=1e-12)
    for name in ("startprob_prior", "transmat_prior", "means_prior", "means_weight", "covars_prior", "covars_weight"):
        prior = getattr(theirs, name)
        prior = np.where(theirs.startprob_ > 0, prior, 1.0) if name == "startprob_prior" else prior
        np.testing.assert_allclose(
            getattr(again, name), np.broadcast_to(prior, np.shape(getattr(again, name))), rtol=1e-15
        )


def test_a_number_for_a_matrix_is_that_times_the_identity():
    """Not of every entry, as hmmlearn has it, whose matrix then stays singular."""
    for kind in ("full", "tied"):
        theirs = engine.GaussianHMM(2, kind)
        theirs.startprob_, theirs.transmat_ = np.full(2, 0.5), np.full((2, 2), 0.5)
        theirs.means_, theirs.n_features = np.array([[0.0] * 3, [1.0] * 3]), 3
        theirs.covars_ = np.eye(3) if kind == "tied" else np.eye(3)[None].repeat(2, 0)
        hmm = HMM.from_hmmlearn(theirs)
        data = torch.zeros(8, 3, dtype=torch.float64)
        hmm.fit(data, restarts=0, max_iterations=1)
        found = hmm.emission.covariance().detach()
        torch.testing.assert_close(found, found[:, :1, :1] * torch.eye(3, dtype=torch.float64))
        np.testing.assert_allclose(
            hmm.to_hmmlearn().covars_prior, np.broadcast_to(0.01 * np.eye(3), hmm.to_hmmlearn().covars_prior.shape)
        )


def test_what_a_fit_of_hmmlearn_leaves_is_read():
    """Of spherical covariances it leaves one for each feature."""
    X = np.random.default_rng(0).normal(size=(40, 3))
    theirs = engine.GaussianHMM(2, "spherical", random_state=0).fit(X)
    assert HMM.from_hmmlearn(theirs).log_prob(torch.from_numpy(X)).item() == pytest.approx(theirs.score(X), abs=1e-9)


def mixture(kind):
    draw = np.random.default_rng(1)
    model = engine.GMMHMM(2, 3, covariance_type=kind, random_state=0, n_iter=2)
    return model, draw.normal(size=(60, 2))


@pytest.mark.parametrize("kind", ["diag", "spherical", "full", "tied"])
def test_mixtures_have_no_prior_unless_it_is_given(kind):
    model, X = mixture(kind)
    emission = HMM.from_hmmlearn(model.fit(X)).emission
    assert (
        not torch.as_tensor(emission.layer.prior_scatter).any()
        and not torch.as_tensor(emission.layer.prior_count).any()
    )


@pytest.mark.parametrize("kind", ["diag", "spherical", "full", "tied"])
def test_priors_of_mixtures_are_carried(kind):
    model, X = mixture(kind)
    d, k = 2, 3
    model.weights_prior, model.means_prior, model.means_weight = 2.0, 0.5, 1.5
    counts = {"diag": 0.25, "spherical": 0.25}.get(kind, 3.0)
    model.covars_prior, model.covars_weight = (
        (counts, 0.7) if kind in ("diag", "spherical") else (0.7 * np.eye(d), counts)
    )
    hmm = HMM.from_hmmlearn(model.fit(X))
    layer = hmm.emission.layer
    expected = {"diag": 2 * 0.25 + 3, "spherical": (d + 2 * 1.25) / d, "full": 3 + d + 2, "tied": 3 + k + d + 1}[kind]
    assert (layer.prior_count == expected).all() and (layer.prior_means_count == 1.5).all()
    scatter = torch.as_tensor({"diag": 1.4, "spherical": 1.4 / d}.get(kind, 0.7 * torch.eye(d))).double()
    torch.testing.assert_close(layer.prior_scatter, scatter.expand(layer.prior_scatter.shape))
    again = hmm.to_hmmlearn()
    for name in ("weights_prior", "means_prior", "means_weight", "covars_prior", "covars_weight"):
        np.testing.assert_allclose(getattr(again, name), getattr(model, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["CategoricalHMM", "PoissonHMM"])
def test_a_step_of_counts_with_priors_is_hmmlearns(kind):
    draw, c = np.random.default_rng(3), 1 if kind == "PoissonHMM" else 2
    theirs = getattr(engine, kind)(c, n_iter=1, init_params="")
    theirs.startprob_, theirs.transmat_ = draw.dirichlet(np.ones(c)), draw.dirichlet(np.ones(c), c)
    if kind == "PoissonHMM":
        # of one state, whose observations are all
        theirs.lambdas_, theirs.lambdas_prior, theirs.lambdas_weight = np.array([[1.0, 4.0]]), 2.5, 1.5
        X = draw.poisson(3, (30, 2))
    else:
        theirs.emissionprob_, theirs.emissionprob_prior = draw.dirichlet(np.ones(3), c), 1 + draw.random((c, 3))
        X = draw.integers(3, size=(30, 1))
    hmm = HMM.from_hmmlearn(theirs)
    hmm.fit(torch.from_numpy(X if kind == "PoissonHMM" else X[:, 0]), restarts=0, max_iterations=1)
    again = hmm.to_hmmlearn()
    theirs.fit(X)
    result, *priors = (
        ("lambdas_", "lambdas_prior", "lambdas_weight")
        if kind == "PoissonHMM"
        else ("emissionprob_", "emissionprob_prior")
    )
    np.testing.assert_allclose(getattr(again, result), getattr(theirs, result), rtol=1e-12)
    for name in priors:
        np.testing.assert_allclose(
            getattr(again, name), np.broadcast_to(getattr(theirs, name), np.shape(getattr(again, name)))
        )


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("startprob_prior", 0.5, "startprob_prior: expected numbers from 1 on, whose posterior has a maximum, got 0.5"),
        ("transmat_prior", np.ones(3), r"transmat_prior: expected what broadcasts to \[2, 2\], got shape \[3\]"),
        ("covars_prior", np.ones(3), r"covars_prior: expected a number or matrices \[3, 3\], got \[3\]"),
        ("covars_weight", np.ones(2), r"covars_weight: expected one number, got shape \[2\]"),
    ],
)
def test_priors_that_cannot_be_carried_are_named(attribute, value, text):
    theirs = engine.GaussianHMM(2, "full")
    theirs.startprob_, theirs.transmat_ = np.full(2, 0.5), np.full((2, 2), 0.5)
    theirs.means_, theirs.n_features, theirs.covars_ = np.zeros((2, 3)), 3, np.eye(3)[None].repeat(2, 0)
    setattr(theirs, attribute, value)
    with pytest.raises(ValueError, match=text):
        HMM.from_hmmlearn(theirs)
