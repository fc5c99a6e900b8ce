"""A start that meets a likelihood without a maximum is set aside, and priors keep others from meeting one."""

import warnings

import numpy as np
import pytest
import torch

from logchain.nn import HMM, ChainCircuit, DegenerateError, DegenerateWarning, Gaussian

F64 = torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def points(seed, *shape):
    return torch.randn(*(shape or (60,)), generator=seeded(seed), dtype=F64)


def fitted(seed, restarts, **options):
    """The result of a fit, the model, and the texts of warnings."""
    hmm = HMM(4, "gaussian", generator=seeded(seed), **options).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = hmm.fit(points(seed), restarts=restarts, generator=seeded(seed))
    assert all(issubclass(warning.category, DegenerateWarning) for warning in caught)
    return fit, hmm, [str(warning.message) for warning in caught]


def test_starts_that_meet_no_maximum_are_set_aside():
    met = []
    for seed in (0, 3, 10):
        fit, hmm, texts = fitted(seed, 10)
        assert len(fit.starts) + fit.set_aside == 10 and fit.log_likelihood == max(fit.starts)
        assert hmm.log_prob(points(seed)).item() == pytest.approx(fit.log_likelihood, rel=1e-9)
        assert not any(value.isnan().any() for value in hmm.state_dict().values())
        assert len(texts) == (fit.set_aside > 0)
        if texts:
            assert texts[0].startswith(f"fit: set aside {fit.set_aside} of 10 starts; start ")
            assert texts[0].count("maximise: expected positive variances, got 0 for unit [") == fit.set_aside
            assert "prior_scatter" in texts[0] and f"; {fit.set_aside} set aside" in str(fit)
        else:
            assert "aside" not in str(fit)
        met.append(fit.set_aside)
    assert max(met) > 0 and min(met) == 0  # seeds that test something
    # with an outlier, which is a state of its own in all starts
    with pytest.raises(DegenerateError, match=r"got 0 for unit \[\d\].*all of which were set aside"):
        fitted(8, 10)


def test_one_start_raises_what_it_meets():
    data = torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0], dtype=F64)
    hmm = HMM(2, "gaussian").double()
    with pytest.raises(DegenerateError, match=r"^maximise: expected positive variances, got 0 for unit \[\d\], on too"):
        hmm.fit(data, generator=seeded(0))
    assert issubclass(DegenerateError, ValueError)


def test_fit_raises_if_all_starts_are_set_aside():
    data = torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0], dtype=F64)
    with pytest.raises(DegenerateError, match=r"got 0 for unit \[\d\].*prior_scatter.* \(start 1 of 4, all of which"):
        HMM(2, "gaussian").double().fit(data, restarts=4, generator=seeded(0))


@pytest.mark.parametrize("options", [{}, {"num_features": 3, "covariance": "full"}, {"num_features": 3}])
def test_errors_of_arguments_are_no_starts(options):
    shape = (60, 3) if options else (60,)
    hmm = HMM(2, "gaussian", **options).double()
    with pytest.raises(ValueError, match="data: expected at least two different") as caught:
        hmm.fit(torch.zeros(shape, dtype=F64), restarts=3)
    assert not isinstance(caught.value, DegenerateError)
    with pytest.raises(ValueError, match="data: expected finite numbers"):
        hmm.fit(points(0, *shape) / 0, restarts=3)
    # missing everywhere but in a state's worth of observations
    with pytest.raises(ValueError):
        hmm.fit(torch.full(shape, torch.nan, dtype=F64), restarts=3)


def test_priors_keep_starts_from_being_set_aside():
    _, _, texts = fitted(3, 10)
    assert texts
    fit, _, texts = fitted(3, 10, prior_scatter=0.1, prior_count=1)
    assert not texts and fit.set_aside == 0 and len(fit.starts) == 10


def test_starts_of_gradients_that_are_not_finite_are_set_aside():
    hmm, data = HMM(2, "gaussian").double(), points(0)
    calls = []

    def optimiser(parameters):
        calls.append(0)
        return torch.optim.SGD(parameters, lr=1e300 if len(calls) == 1 else 1e-3)

    options = {"method": "gradient", "optimiser": optimiser, "max_iterations": 3, "generator": seeded(0)}
    with pytest.warns(DegenerateWarning, match="set aside 1 of 3 starts; start 1: "):
        fit = hmm.fit(data, restarts=3, **options)
    assert fit.set_aside == 1 and len(fit.starts) == 2


def test_circuits_set_starts_aside():
    data = torch.cat([torch.zeros(7, 2), torch.ones(1, 2)]).double()
    circuit = ChainCircuit(2, 2, 1, "gaussian", generator=seeded(0)).double()
    with pytest.raises(DegenerateError, match=r"unit \[\d, \d, \d\].*all of which"):
        circuit.fit(data, restarts=3, generator=seeded(0))


@pytest.mark.parametrize(
    ("name", "options", "takes"),
    [
        ("prior_total", {"emission": "gaussian"}, "prior_scatter, prior_count, prior_means, prior_means_count"),
        ("prior_scatter", {"emission": "poisson"}, "prior_total, prior_count"),
        ("prior_means", {"emission": "categorical", "num_categories": 3}, "prior_count"),
    ],
)
def test_a_prior_that_the_family_lacks_is_named(name, options, takes):
    emission = options["emission"]
    expected = f"^{name}: expected None with emission '{emission}', whose priors are {takes}, got 1.0$"
    with pytest.raises(TypeError, match=expected):
        HMM(2, **options, **{name: 1.0})
    with pytest.raises(TypeError, match=f"^{name}: expected None with an emission module, which has its own, got 1.0$"):
        HMM(2, Gaussian(2), **{name: 1.0})


def test_priors_are_those_of_the_family():
    one = torch.tensor([1.0, 2.0])
    gaussian = HMM(2, "gaussian", prior_scatter=0.5, prior_count=one, prior_means=3, prior_means_count=4).emission
    assert gaussian.prior_scatter == 0.5 and gaussian.prior_count is one
    assert (gaussian.prior_means, gaussian.prior_means_count) == (3, 4)
    poisson = HMM(2, "poisson", prior_total=one, prior_count=1).emission
    assert poisson.prior_total is one and poisson.prior_count == 1
    assert HMM(2, "categorical", num_categories=3, prior_count=2).emission.weights.prior_count == 2


@pytest.mark.parametrize("kind", ["diag", "spherical", "full", "tied"])
@pytest.mark.parametrize("with_priors", [False, True])
def test_one_iteration_is_that_of_hmmlearn(kind, with_priors):
    hmmlearn = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)
    draw, c, d = np.random.default_rng(0), 3, 2
    samples = draw.normal(size=(80, d)) + draw.integers(3, size=(80, 1))
    matrices = kind in ("full", "tied")
    # a number for the scale of matrices is read as that times the identity, which hmmlearn says, and does not do
    options = {"covars_prior": 0.3 * np.eye(d) if matrices else 0.3, "covars_weight": d + 2.0 if matrices else 2.5}
    if with_priors:
        options |= {"means_prior": draw.normal(size=(c, d)), "means_weight": 1.5}
        options |= {"startprob_prior": draw.uniform(1, 3, c), "transmat_prior": draw.uniform(1, 3, (c, c))}
    if kind == "full":
        options["covars_prior"] = np.stack([0.3 * np.eye(d)] * c)
    theirs = hmmlearn.GaussianHMM(c, kind, n_iter=1, init_params="", tol=0.0, **options)
    theirs.n_features = d
    theirs.startprob_, theirs.transmat_ = draw.dirichlet(np.ones(c)), draw.dirichlet(np.ones(c), c)
    theirs.means_ = samples[:c] + 0.1
    spread = {"diag": np.ones((c, d)), "spherical": np.ones(c), "full": np.stack([np.eye(d)] * c), "tied": np.eye(d)}
    theirs.covars_ = spread[kind]
    ours = HMM.from_hmmlearn(theirs)
    ours.fit(torch.from_numpy(samples), restarts=0, max_iterations=1)
    theirs.fit(samples)
    back = ours.to_hmmlearn()
    for name in ("startprob_", "transmat_", "means_"):
        np.testing.assert_allclose(getattr(back, name), getattr(theirs, name), rtol=1e-9, atol=1e-12)
    # after a fit, hmmlearn has a matrix for each feature of a spherical covariance
    np.testing.assert_allclose(back.covars_, theirs.covars_[:: len(theirs.covars_) // c], rtol=1e-9)
    for name in ("means_prior", "startprob_prior", "transmat_prior"):
        assert (np.broadcast_to(getattr(theirs, name), np.shape(getattr(back, name))) == getattr(back, name)).all()
    for name in ("covars_prior", "covars_weight", "means_weight"):
        np.testing.assert_allclose(
            getattr(back, name), np.broadcast_to(getattr(theirs, name), np.shape(getattr(back, name)))
        )
