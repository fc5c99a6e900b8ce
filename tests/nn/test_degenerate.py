"""Data on which a likelihood has no maximum: starts are set aside, and a prior makes them fit."""

import warnings

import pytest
import torch

from logchain.nn import HMM, ChainCircuit, DegenerateError, DegenerateWarning, Gaussian, fit
from tests.nn.hmms import seeded

VARIANCES = {
    "diagonal": {},
    **{kind: {"num_features": 2, "covariance": kind} for kind in ("spherical", "full", "tied")},
}


def sixty(seed):
    return torch.randn(60, generator=seeded(seed))


def fitted(hmm, data, **options):
    """The report, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = hmm.fit(data, **options)
    return report, [str(one.message) for one in caught if one.category is DegenerateWarning]


@pytest.mark.parametrize("seed", [3, 5, 10, 12, 19])
def test_of_ten_starts_the_degenerate_ones_are_set_aside(seed):
    hmm, data, generator = HMM(4, "gaussian", generator=seeded(seed)), sixty(seed), seeded(seed)
    report, said = fitted(hmm, data, restarts=10, generator=generator)
    assert report.set_aside + len(report.starts) == 10 and len(said) == (report.set_aside > 0)
    assert report.log_likelihood == max(report.starts)
    assert hmm.log_prob(data).item() == pytest.approx(report.log_likelihood, abs=1e-3), "the best is kept"
    if report.set_aside:
        assert said[0].startswith(f"fit: set aside {report.set_aside} of 10 starts; start ")
        assert said[0].count("got 0 for unit [") == report.set_aside
        assert f"; {report.set_aside} set aside" in str(report)


def test_some_of_the_seeds_are_degenerate_and_none_with_a_prior():
    aside = 0
    for seed in range(21):
        aside += fitted(HMM(4, "gaussian"), sixty(seed), restarts=3, generator=seeded(seed))[0].set_aside
        # in float64 and float32, as an error unless none is set aside
        HMM(4, "gaussian", prior_scatter=0.01).double().fit(sixty(seed).double(), restarts=2, generator=seeded(seed))
    assert aside


def test_where_no_start_fits_the_first_is_told():
    data = torch.tensor([0.0, 1.0, 5.0])
    hmm = HMM(5, "gaussian", generator=seeded())
    with pytest.raises(
        DegenerateError, match=r"got 0 for unit \[\d\], .* give the Gaussian a prior_scatter.* 1 of 4, all"
    ):
        hmm.fit(data, restarts=4, generator=seeded())
    with pytest.raises(ValueError, match=r"got 0 for unit \[\d\].*fewer units$"):
        hmm.fit(data, generator=seeded())
    HMM(5, "gaussian", prior_scatter=0.1).fit(data, restarts=4, generator=seeded())


@pytest.mark.parametrize("kind", VARIANCES)
def test_constant_data_need_a_prior(kind):
    data = torch.full((9, *(2,) * (kind != "diagonal")), 3.0)
    with pytest.raises(ValueError, match="expected at least two different observations .*, or prior_scatter, got one"):
        HMM(2, "gaussian", **VARIANCES[kind]).fit(data, restarts=3)
    hmm = HMM(2, "gaussian", prior_scatter=0.9, prior_count=1.0, **VARIANCES[kind])
    report = hmm.fit(data, restarts=3, generator=seeded())
    assert report.set_aside == 0 and hmm.emission.covariance().isfinite().all()


@pytest.mark.parametrize("kind", VARIANCES)
def test_missing_data(kind):
    data = torch.randn(40, *(2,) * (kind != "diagonal"), generator=seeded(), dtype=torch.float64)
    data[5:15] = torch.nan
    if kind == "spherical":
        data[20, 0] = torch.nan
    hmm = HMM(2, "gaussian", prior_scatter=0.1, **VARIANCES[kind]).double()
    report = hmm.fit(data, restarts=2, generator=seeded(), tolerance=-torch.inf, max_iterations=8)
    assert all(parameter.isfinite().all() for parameter in hmm.parameters())
    assert report.log_likelihood > report.history[0]


@pytest.mark.parametrize("kind", VARIANCES)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_numbers_whose_squares_float32_cannot_hold(kind, scale):
    """Their variances went through float32, as 0 or infinity."""
    data = torch.randn(60, *(2,) * (kind != "diagonal"), generator=seeded())
    hmms = [HMM(2, "gaussian", **VARIANCES[kind]) for _ in range(2)]
    for hmm, of in zip(hmms, (1.0, scale), strict=True):
        hmm.fit(data * of, generator=seeded(), tolerance=-torch.inf, max_iterations=5, step=0.5)
    torch.testing.assert_close(hmms[1].emission.means / scale, hmms[0].emission.means, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["spherical", "tied"])
def test_shared_covariances_never_lower_the_likelihood_and_are_shared(kind):
    data = torch.randn(60, 2, generator=seeded(), dtype=torch.float64) * torch.tensor([1.0, 3.0])
    hmm = HMM(2, "gaussian", **VARIANCES[kind]).double()
    report = hmm.fit(data, generator=seeded(), tolerance=-torch.inf, max_iterations=20)
    assert (torch.tensor(report.history).diff() > -1e-9).all()
    found = hmm.emission.covariance().detach()
    assert torch.equal(found, found[..., :1].expand_as(found) if kind == "spherical" else found[:1].expand_as(found))
    by_gradient = hmm.fit(data, restarts=0, method="gradient", tolerance=1e-9)
    assert by_gradient.log_likelihood >= report.log_likelihood - 1e-9
    with pytest.raises(ValueError, match=r"covariance: expected the same for all (features|units), got different ones"):
        hmm.emission.set(
            torch.zeros(2), torch.diag_embed(torch.rand(2, 2) + 1) if kind == "tied" else torch.rand(2) + 1
        )
    states = hmm.sample(1, 2000, generator=seeded()).states
    assert hmm.emission.draw(states[0], seeded()).shape == (2000, 2)
    means, heights = hmm.emission.mode()
    torch.testing.assert_close(heights, hmm.emission(means).diagonal().detach())


def test_gradients_that_leave_the_finite_numbers_are_set_aside():
    leaps = iter([1e20, 1e-3, 1e-3])
    hmm, data = HMM(2, "gaussian", generator=seeded()), sixty(0)
    options = {"method": "gradient", "max_iterations": 3, "generator": seeded()}
    report, said = fitted(hmm, data, restarts=3, optimiser=lambda p: torch.optim.SGD(p, lr=next(leaps)), **options)
    assert report.set_aside == 1 and "start 1: data: expected a finite log-likelihood, got" in said[0]
    with pytest.raises(DegenerateError, match="expected a finite log-likelihood"):
        hmm.fit(data, optimiser=lambda p: torch.optim.SGD(p, lr=1e20), **options)


def test_other_errors_end_the_fit():
    tries = []

    class Wrong(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Gaussian(1)

        def initialise(self, data, generator=None):
            tries.append(1)

        def log_prob(self, data):
            raise ValueError("data: wrong")

    with pytest.raises(ValueError, match="data: wrong"):
        fit(Wrong(), torch.zeros(3), restarts=5)
    assert len(tries) == 1


def test_circuits_set_starts_aside():
    data = torch.randn(9, 3, generator=seeded(1))
    circuit = ChainCircuit(3, 3, input="gaussian", generator=seeded())
    generator = seeded(2)
    try:
        report, said = fitted(circuit, data, restarts=6, generator=generator)
    except DegenerateError as error:
        report, said = None, [str(error)]
    assert report is None or len(report.starts) + report.set_aside == 6
    assert "got 0 for unit [0, " in said[0], "a repetition, a variable and a state"
    layer = Gaussian((1, 3, 3), prior_scatter=0.1)
    assert ChainCircuit(3, 3, input=layer).fit(data, restarts=6, generator=seeded()).set_aside == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            ("poisson", {"prior_scatter": 1.0}),
            TypeError,
            "prior_scatter: .* 'poisson', whose priors are prior_total, prior_count, got 1.0",
        ),
        (
            ("gaussian", {"prior_total": 1.0}),
            TypeError,
            "prior_total: expected None with emission 'gaussian', whose priors are",
        ),
        ((Gaussian(2), {"prior_count": 1.0}), TypeError, "prior_count: expected None with an emission module"),
        (("gaussian", {"prior_scatter": -1.0}), ValueError, "prior_scatter: expected a number from 0 on"),
        (
            ("gaussian", {"prior_means": torch.ones(3)}),
            ValueError,
            r"prior_means: expected what broadcasts to \[2\], got \[3\]",
        ),
        (("gaussian", {"prior_means": float("nan")}), ValueError, "prior_means: expected a finite number, got nan"),
        (("gaussian", {"prior_count": "1"}), TypeError, "prior_count: expected a number, got '1'"),
        (
            ("gaussian", {"prior_scatter": torch.tensor([1.0, 2.0]), "num_features": 2, "covariance": "full"}),
            ValueError,
            "prior_scatter: expected symmetric matrices without negative eigenvalues",
        ),
    ],
)
def test_priors_pass_on_to_the_emission_or_are_named(arguments, error, text):
    emission, options = arguments
    with pytest.raises(error, match=text):
        HMM(2, emission, **options)


def test_named_emissions_take_their_priors():
    assert HMM(2, "categorical", num_categories=3, prior_count=0.5).emission.weights.prior_count == 0.5
    poisson = HMM(2, "poisson", prior_total=2.0, prior_count=1.0)
    poisson.fit(torch.zeros(6, dtype=torch.int64), restarts=2, generator=seeded())
    assert (poisson.emission.log_rates > -torch.inf).all(), "no rate becomes 0"
    layer = HMM(2, "gaussian", prior_scatter=1.0, prior_means=3.0, prior_means_count=2.0).emission
    assert (layer.prior_scatter, layer.prior_means, layer.prior_means_count) == (1.0, 3.0, 2.0)
