"""`fit`: starts, priors, batches, mini-batches and gradients; data on which a likelihood has no maximum."""

import copy
import pickle
import warnings
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from logchain import nn
from tests.nn.hmms import F64, MODELS, V, array, categories, close, network, random_hmm, semi_markov, trained
from tests.seeded import seeded

COVARIANCES = {"diag": {}} | {kind: {"num_features": 2, "covariance": kind} for kind in ("spherical", "full", "tied")}
ENDLESS = {"tolerance": -torch.inf}


def normal(kind, *shape, seed=0, dtype=F64):
    """Data for a Gaussian emission."""
    event = () if kind == "diag" else (2,)
    return torch.randn(*shape, *event, generator=seeded(seed), dtype=dtype)


def fitted(model, data, **options):
    """The report, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = model.fit(data, **options)
    return report, [str(warning.message) for warning in caught if warning.category is nn.ConvergenceWarning]


def test_em_step_takes_expected_counts_of_the_enumeration_whatever_the_batches():
    hmm, data, observed = random_hmm(), categories(5, V), torch.rand(5, V, generator=seeded()) < 0.7
    truth = MODELS["categories"].truth(hmm, data, observed=observed)
    starts, moves = truth.states[:, 0].sum(0), truth.transitions.sum((0, 1))
    seen = np.stack([truth.states[((data == k) & observed).numpy()].sum(0) for k in range(4)])  # (K, c)
    for batch_size in (None, 2):
        model = copy.deepcopy(hmm)
        report = model.fit(data, observed=observed, max_iterations=1, restarts=0, batch_size=batch_size, **ENDLESS)
        assert report.history[0] == pytest.approx(truth.log_norm.sum(), abs=1e-10)
        close(model.initial().exp(), starts / starts.sum())
        close(model.transition().exp()[0], moves / moves.sum(-1, keepdims=True))
        close(model.emission.weights().exp(), seen / seen.sum(0))


def numbers(**options):
    """A model of numbers, data of which some are missing, and lengths."""
    data, lengths = normal("diag", 20, 6), torch.randint(1, 7, (20,), generator=seeded())
    data[3, 2] = torch.nan
    return random_hmm(nn.Gaussian(3, generator=seeded()), **options), data, {"lengths": lengths}


def random_circuit(v=8, seed=0):
    generator = seeded(seed)
    return nn.ChainCircuit(v, 3, 2, nn.Categorical((2, v, 3), 4, generator=generator), generator=generator).double()


def forbidding_circuit():
    circuit = random_circuit(3, 4)
    circuit.transition.set(torch.ones(3, 3).triu() / torch.tensor([[3.0], [2.0], [1.0]]))
    return circuit, categories(30, 3), {"observed": torch.rand(30, 3, generator=seeded(1)) < 0.7}


def structured_circuit(kind):
    transition = trained(kind, seeded(1), lead=(2, V - 1))
    circuit = nn.ChainCircuit(V, 4, 2, nn.Categorical((2, V, 4), 4), transition=transition, generator=seeded())
    return circuit.double(), categories(12, V), {}


def with_durations(family):
    return semi_markov(family), categories(5, V), {}


def product():
    """A model whose features have different families, and draws from it of which some are missing."""
    torch.manual_seed(0)
    hmm = random_hmm(nn.Product(nn.Gaussian(3, 2, "full"), nn.Poisson(3), nn.Distribution("Gamma", 3)))
    data = hmm.sample(5, 40, generator=seeded(1)).data
    data[0, :9, 0], data[1, :9, 2], data[2, :9] = torch.nan, torch.nan, torch.nan
    hmm.initialize(data, generator=seeded(2))
    return hmm, data, {}


class Coins(nn.Emission):
    """Bernoulli observations, whose probabilities are a part inside."""

    def __init__(self):
        super().__init__(3)
        self.weights = nn.LogWeights(3, 2, generator=seeded())

    def reset_parameters(self, generator=None):
        self.weights.reset_parameters(generator)

    def distribution(self, at=()):
        return torch.distributions.Bernoulli(self.weights()[:, 0].exp()[at], validate_args=False)


FAMILIES = ["free", "poisson", "negative_binomial"]
TRANSITIONS = ["banded", "sparse", "low rank and diagonal", "monarch"]
FITTED = {
    "numbers": numbers,
    "matrix per step": partial(numbers, transition=nn.Transitions(3, lead=(5,), generator=seeded())),
    "forbidding circuit": forbidding_circuit,
    **{f"circuit, {kind}": partial(structured_circuit, kind) for kind in TRANSITIONS},
    **{family: partial(with_durations, family) for family in FAMILIES},
    "durations of an emission": partial(with_durations, nn.Binomial(3, 3, generator=seeded(3))),
    "product": product,
    "emission of a user": lambda: (random_hmm(Coins()), normal("diag", 4, 30).gt(0).double(), {}),
}
BY_GRADIENT = ["numbers", "forbidding circuit", "circuit, low rank and diagonal", *FAMILIES]


def matrices(model):
    transition = model.transition()
    return array((transition if isinstance(transition, torch.Tensor) else transition.to_dense(log_params=True)).exp())


@pytest.mark.parametrize(
    ("name", "method"), [(name, "em") for name in FITTED] + [(name, "gradient") for name in BY_GRADIENT]
)
def test_fit_never_lowers_the_likelihood_and_zeros_stay(name, method):
    model, data, conditions = FITTED[name]()
    before = matrices(model)
    iterations = 15 if method == "em" else 2
    report = model.fit(data, method=method, max_iterations=iterations, restarts=0, **conditions, **ENDLESS)
    assert report.iterations == iterations and not report.converged
    assert (np.diff(report.history) > -1e-9).all()
    assert report.log_likelihood > report.history[0] + 1e-3
    assert report.log_likelihood == pytest.approx(model.log_prob(data, **conditions).sum().item(), abs=1e-9)
    after = matrices(model)
    assert np.abs(after - before).max() > 1e-3 and (after[before == 0] == 0).all()
    np.testing.assert_allclose(after.sum(-1), 1, rtol=0, atol=1e-12)


def test_gradients_and_em_stop_at_the_same_maximum():
    hmm, data = random_hmm(nn.Categorical(3, 3, generator=seeded(1))), torch.randint(3, (30, 12), generator=seeded())
    by_gradient = hmm.fit(data, restarts=0, method="gradient", tolerance=1e-9, max_iterations=200)
    assert by_gradient.converged
    assert by_gradient.log_likelihood > by_gradient.history[0] + 1
    by_em = hmm.fit(data, restarts=0, max_iterations=3, tolerance=-torch.inf)
    assert abs(by_em.log_likelihood - by_gradient.log_likelihood) < 1e-6


@pytest.mark.parametrize("make", [random_hmm, random_circuit, *(partial(semi_markov, family) for family in FAMILIES)])
def test_best_of_several_starts_is_kept_and_seeds_repeat(make):
    model, data = make(), categories(20, 8)
    report = model.fit(data, restarts=4, max_iterations=10, generator=seeded(), **ENDLESS)
    assert len(report.starts) == 4 and len(set(report.starts)) == 4
    assert report.log_likelihood == max(report.starts)
    assert model.log_prob(data).sum().item() == pytest.approx(max(report.starts), abs=1e-10)
    assert str(report).startswith("log-likelihood ") and "best of 4 starts" in str(report)
    assert make(seed=9).fit(data, restarts=4, max_iterations=10, generator=seeded(), **ENDLESS) == report
    first, again, other = (make(seed=seed).log_prob(data) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


# Earthquakes of magnitude 7 or more, 1900 to 2006: Zucchini and MacDonald, Hidden Markov Models for Time Series, 2009.
EARTHQUAKES = """
13 14  8 10 16 26 32 27 18 32 36 24 22 23 22 18 25 21 21 14  8 11 14 23 18 17 19 20 22 19 13 26 13 14 22 24
21 22 26 21 23 24 27 41 31 27 35 26 28 36 39 21 17 22 17 19 15 34 10 15 22 18 15 20 15 22 19 16 30 27 29 23
20 16 21 21 25 16 18 15 18 14 10 15  8 15  6 11  8  7 18 16 13 12 13 20 15 16 12 18 15 16 13 15 16 11 11
"""
COUNTS = torch.tensor([int(count) for count in EARTHQUAKES.split()])


@pytest.mark.parametrize(
    ("states", "published", "rates"), [(2, 342.3183, [15.472, 26.125]), (3, 329.4603, [13.146, 19.721, 29.714])]
)
def test_earthquakes_have_the_published_maximum(states, published, rates):
    """Zucchini and MacDonald, Hidden Markov Models for Time Series, 2009: stationary, from starts in the data."""
    hmm = nn.HMM(states, "poisson", initial="stationary").double()
    report = hmm.fit(COUNTS, method="gradient", restarts=4, tolerance=1e-7, generator=seeded())
    assert report.converged
    assert round(-report.log_likelihood, 4) == published
    np.testing.assert_allclose(hmm.emission.log_rates.detach().exp().sort().values, rates, rtol=0, atol=2e-3)


def test_fit_takes_any_module_with_a_log_prob():
    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shares, self.coins = nn.LogWeights(2, generator=seeded()), nn.Categorical(2, 2, generator=seeded(1))

        def log_prob(self, data):
            return (self.shares() + self.coins(data).sum(-2)).logsumexp(-1)

    data = (torch.rand(50, 5, generator=seeded()) < torch.tensor([0.9, 0.2])[torch.arange(50) % 2, None]).long()
    report = nn.fit(Mixture().double(), data, tolerance=1e-8)
    assert report.converged and report.log_likelihood > report.history[0]
    report = nn.fit(Mixture().double(), data, restarts=3, generator=seeded())
    assert len(set(report.starts)) == 3
    with pytest.raises(ValueError, match="observed: expected 50 along the first axis, .* got 3"):
        nn.fit(Mixture(), data, conditions={"observed": torch.ones(3)}, batch_size=10)
    with pytest.raises(ValueError, match="data: expected at least one sequence"):
        nn.fit(Mixture(), data[:0])


def test_progress_is_shown_without_gradients_outside(capsys):
    pytest.importorskip("tqdm")
    with torch.no_grad():
        report = random_hmm().fit(categories(5, V), progress=True)
    assert report.iterations > 2 and "iterations" in capsys.readouterr().err


def test_failed_starts_are_skipped():
    """Of four states for twenty numbers; none with a prior."""
    hmm, data = nn.HMM(4, "gaussian", generator=seeded(9)), normal("diag", 20, seed=9, dtype=torch.float32)
    options = {"restarts": 3, "tolerance": -torch.inf}
    report, messages = fitted(hmm, data, generator=seeded(9), **options)
    assert report.num_failed and report.num_failed + len(report.starts) == 3
    assert report.log_likelihood == max(report.starts)
    assert hmm.log_prob(data).item() == pytest.approx(report.log_likelihood, abs=1e-3), "the best is kept"
    (message,) = messages
    assert message.count("got 0 for unit [") == report.num_failed
    for dtype in (torch.bfloat16, torch.float32, F64):
        model = nn.HMM(4, nn.Gaussian(4, prior=nn.NormalInverseWishart(0.01, -2.0))).to(dtype)
        assert fitted(model, data.to(dtype), generator=seeded(9), **options)[1] == []


def test_first_error_is_raised_where_every_start_fails():
    data = torch.tensor([0.0, 1.0, 5.0])
    hmm = nn.HMM(5, "gaussian", generator=seeded())
    with pytest.raises(ValueError, match=r"got 0 for unit \[\d\], .* prior=.* 1 of 4, all"):
        hmm.fit(data, restarts=4, generator=seeded())
    with pytest.raises(ValueError, match=r"got 0 for unit \[\d\].*fewer units$"):
        hmm.fit(data, restarts=1, generator=seeded())
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied.* 1 of 5, all of which failed"):
        nn.fit(random_hmm(network()), torch.zeros(3, 4, 5, dtype=F64), method="gradient", restarts=5)


@pytest.mark.parametrize("kind", COVARIANCES)
def test_constant_and_missing_data_are_fitted_with_a_prior(kind):
    data = torch.full_like(normal(kind, 9), 3.0).float()
    with pytest.raises(ValueError, match="expected at least two different observations .*, or a prior, got one"):
        nn.HMM(2, nn.Gaussian(2, **COVARIANCES[kind])).fit(data, restarts=3)
    hmm = nn.HMM(2, nn.Gaussian(2, prior=nn.NormalInverseWishart(0.9, 3.0), **COVARIANCES[kind]))
    report = hmm.fit(data, restarts=3, generator=seeded())
    assert report.num_failed == 0 and hmm.emission.covariances.isfinite().all()
    data = normal(kind, 40)
    data[5:15] = torch.nan
    if kind == "spherical":
        data[20, 0] = torch.nan
    hmm = nn.HMM(2, nn.Gaussian(2, prior=nn.NormalInverseWishart(0.1, 3.0), **COVARIANCES[kind])).double()
    report = hmm.fit(data, restarts=2, generator=seeded(), tolerance=-torch.inf, max_iterations=8)
    assert all(parameter.isfinite().all() for parameter in hmm.parameters())
    assert report.log_likelihood > report.history[0]


@pytest.mark.parametrize(("kind", "scale"), [("diag", 1e-25), ("spherical", 1e25), ("full", 1e-25), ("tied", 1e25)])
def test_data_whose_squares_float32_cannot_hold_are_fitted(kind, scale):
    data = normal(kind, 60, dtype=torch.float32)
    hmms = [nn.HMM(2, nn.Gaussian(2, **COVARIANCES[kind])) for _ in range(2)]
    for hmm, of in zip(hmms, (1.0, scale), strict=True):
        hmm.fit(data * of, generator=seeded(), tolerance=-torch.inf, max_iterations=5, step=0.5)
    torch.testing.assert_close(hmms[1].emission.means / scale, hmms[0].emission.means, rtol=1e-4, atol=1e-4)


def test_starts_whose_gradients_overflow_are_skipped():
    leaps = iter([1e20, 1e-3, 1e-3])
    hmm, data = nn.HMM(2, "gaussian", generator=seeded()), normal("diag", 60, dtype=torch.float32)
    options = {"method": "gradient", "max_iterations": 3, "generator": seeded(), **ENDLESS}
    report, messages = fitted(hmm, data, restarts=3, optimizer=lambda p: torch.optim.SGD(p, lr=next(leaps)), **options)
    assert report.num_failed == 1 and "start 1: data: expected a finite log-likelihood, got" in messages[0]
    with pytest.raises(ValueError, match="expected a finite log-likelihood"):
        hmm.fit(data, optimizer=lambda p: torch.optim.SGD(p, lr=1e20), **options)


def blocks(length, size, of=1.0):
    """Numbers [1, length] that alternate between two means after `size` steps."""
    draw = np.random.default_rng(0)
    return torch.tensor(draw.normal((np.arange(length) // size) % 2 * of, 1.0))[None]


def test_fit_with_a_prior_ends_at_the_maximum_of_the_posterior():
    data = blocks(400, 10)
    hmm = nn.HMM(2, "gaussian", transition=nn.Transitions(2, prior=nn.Dirichlet(21.0)), generator=seeded()).double()
    report = hmm.fit(data, restarts=3, generator=seeded())
    assert report.converged and report.log_posterior == max(report.starts) == report.history[-1]
    expected = hmm.log_prob(data).sum() + 20 * hmm.transition().sum()
    assert report.log_posterior == pytest.approx(expected.item(), abs=1e-9)
    assert report.log_likelihood == pytest.approx(hmm.log_prob(data).item(), abs=1e-9)
    assert str(report).startswith("log-posterior ") and "; log-likelihood " in str(report)
    more = hmm.fit(data, restarts=0, max_iterations=1000, **ENDLESS)
    assert (np.diff(more.history) > -1e-9).all() and more.log_posterior - report.log_posterior < 0.05
    by_gradient = hmm.fit(data, method="gradient", restarts=0)
    assert abs(by_gradient.log_posterior - more.log_posterior) < 1e-4


def test_fit_ends_within_its_tolerance_of_the_maximum_where_gains_fall_slowly():
    hmm, data = nn.HMM(2, "gaussian", generator=seeded()).double(), blocks(400, 10)
    report = hmm.fit(data, generator=seeded(1))
    more = hmm.fit(data, restarts=0, max_iterations=500, **ENDLESS)
    assert report.converged and 0 <= more.log_likelihood - report.log_likelihood < 0.01


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_priors_count_once_in_mini_batches(method):
    data = torch.tensor([0, 1]).repeat(200, 1)[:, :1]
    prior = nn.Dirichlet(torch.tensor([[101.0], [301.0]]))
    hmm = nn.HMM(1, nn.Categorical(1, 2, prior=prior, generator=seeded())).double()
    options = {"step": lambda k: 0.2} if method == "em" else {"optimizer": partial(torch.optim.SGD, lr=0.3)}
    report = hmm.fit(data, method=method, batch_size=20, max_iterations=30, restarts=0, generator=seeded(), **options)
    torch.testing.assert_close(hmm.emission.weights().exp().flatten().detach(), torch.tensor([0.5, 0.5]).double())
    assert report.iterations == 30


def test_strong_prior_of_means_counts_under_gradients():
    class Near(nn.Gaussian):
        def log_prior(self):
            return -1e6 * self.means.double().square().sum()

    hmm = nn.HMM(2, Near(2, generator=seeded()), generator=seeded()).double()
    hmm.fit(blocks(300, 30, of=2.0), method="gradient", generator=seeded(1))
    assert hmm.emission.means.abs().max() < 1e-3


class Wrapped(torch.nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        self.inner = nn.Gaussian(2, generator=seeded())
        for name, value in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, data):
        return self.inner(data)


def test_restarts_draw_the_modules_of_users_or_refuse():
    data = blocks(100, 10, of=4.0)
    hmm = nn.HMM(2, Wrapped(), generator=seeded()).double()
    report = hmm.fit(data, restarts=4, generator=seeded(), max_iterations=3, **ENDLESS)
    assert len(set(report.starts)) == 4
    same = nn.HMM(2, Wrapped()).double().fit(data, restarts=4, generator=seeded(), max_iterations=3, **ENDLESS)
    assert same.starts == report.starts
    mixed = nn.HMM(2, Wrapped(offset=torch.zeros(()))).double()
    with pytest.raises(ValueError, match="restarts: expected `reset_parameters` of HMM.emission, which has offset"):
        mixed.fit(data, method="gradient", restarts=1)
    mixed.emission.offset.requires_grad_(False)
    mixed.fit(data, restarts=1, generator=seeded())
    linear = random_hmm(network())
    before = linear.emission[0].weight.detach().clone()
    linear.initialize(normal("full", 3, 4), generator=seeded())
    assert not torch.equal(linear.emission[0].weight, before)


def test_starts_with_errors_of_linear_algebra_are_skipped():
    numbers = count()

    def fail(*_):
        if next(numbers) == 1:
            raise torch.linalg.LinAlgError("the input is singular")

    hmm = nn.HMM(2, "gaussian", initial="stationary", generator=seeded()).double()
    hmm.emission.register_forward_pre_hook(fail)
    report, _ = fitted(hmm, blocks(300, 30, of=2.0), method="gradient", restarts=2, generator=seeded())
    assert report.num_failed == len(report.starts) == 1


@pytest.mark.parametrize("method", ["em", "gradient"])
@pytest.mark.parametrize("name", ["emission.means", "emission.log_scales", "initial.logits"])
def test_one_frozen_parameter_stays_and_others_are_fitted(name, method):
    hmm = nn.HMM(2, "gaussian", generator=seeded())
    parameters = dict(hmm.named_parameters())
    parameters[name].requires_grad_(False)
    before = {key: value.detach().clone() for key, value in parameters.items()}
    hmm.fit(blocks(100, 10, of=4.0).float(), method=method, generator=seeded(), max_iterations=9, **ENDLESS)
    assert [key for key, value in parameters.items() if torch.equal(value, before[key])] == [name]


@pytest.mark.parametrize("change", ["none", "copy", "dtype", "set", "load", "optimizer", "fit", "data"])
def test_parameters_that_nobody_set_are_initialized_from_the_data(change):
    data = blocks(50, 5) + 1e4
    hmm = nn.HMM(2, "gaussian", generator=seeded()).double()
    if change == "copy":
        hmm = pickle.loads(pickle.dumps(copy.deepcopy(hmm)))
    elif change == "dtype":
        hmm = hmm.float()
    elif change == "set":
        hmm.emission.set(torch.tensor([0.0, 1.0]), torch.tensor(1e8))
    elif change == "load":
        hmm.load_state_dict(nn.HMM(2, "gaussian", generator=seeded(1)).state_dict())
    elif change == "optimizer":
        hmm.log_prob(data).sum().backward()
        torch.optim.SGD(hmm.parameters(), lr=1e-9).step()
    elif change == "fit":
        hmm.fit(data, max_iterations=1, restarts=0, **ENDLESS)
        hmm.emission.means.data.zero_()
    elif change == "data":
        hmm.emission.means.data = torch.tensor([0.0, 1.0], dtype=F64)
        hmm.emission.log_scales.data[:] = 9.0
    model = copy.deepcopy(hmm)
    start = model.fit(data, max_iterations=0, generator=seeded(5))
    unset = change in ("none", "copy", "dtype")
    assert (model.emission.means > 9e3).all() == unset
    assert unset or torch.equal(model.emission.means, hmm.emission.means)
    same = start.log_likelihood == pytest.approx(hmm.log_prob(data).sum().item(), abs=1e-9)
    assert same == (change in ("load", "optimizer", "fit"))


def test_weights_count_as_repeated_sequences():
    data, weights = categories(6, V), torch.tensor([2, 0, 1, 3, 1, 0])
    groups = categories(6, 2, V)
    for rows, given, options in [
        (data, weights, {"batch_size": 4}),
        (data, weights, {"method": "gradient"}),
        (data, weights, {"batch_size": 4, "method": "gradient"}),
        (groups, weights.tolist(), {}),
        (groups, weights.numpy(), {}),
    ]:
        hmms = [random_hmm() for _ in range(2)]
        reports = [
            hmm.fit(part, weights=weight, max_iterations=2, restarts=0, generator=seeded(), **options, **ENDLESS)
            for hmm, part, weight in zip(hmms, (rows, rows.repeat_interleave(weights, 0)), (given, None), strict=True)
        ]
        assert reports[0].history[0] == pytest.approx(reports[1].history[0]) or "method" in options
        assert reports[0].num_observations == reports[1].num_observations == 7 * rows[0].numel()
        if "method" not in options:
            close(hmms[0].emission.weights(), array(hmms[1].emission.weights()))
    hmm = random_hmm()
    hmm.emission.weights.set(torch.tensor([[0.0], [1.0], [1.0], [1.0]]) / 3)
    impossible = torch.tensor([[0, 0], [1, 2]])
    assert hmm.fit(impossible, weights=torch.tensor([0.0, 1.0]), restarts=0).converged
    with pytest.raises(ValueError, match=r"weights: expected shape \[6\], got \[2\]"):
        hmm.fit(data, weights=torch.ones(2))
    with pytest.raises(ValueError, match="weights: expected finite numbers from 0 on"):
        hmm.fit(data, weights=-weights)


@pytest.mark.parametrize("observed", [False, True])
def test_one_sequence_of_a_module_of_users_is_one_sequence(observed):
    data, options = normal("full", 6), {"method": "gradient", "max_iterations": 1, "restarts": 0, "batch_size": 4}
    options |= {"observed": torch.arange(6) != 2} if observed else {}
    hmms = [random_hmm(network()) for _ in range(2)]
    one = hmms[0].fit(data, **options)
    batch = {name: value[None] if name == "observed" else value for name, value in options.items()}
    assert one == hmms[1].fit(data[None], **batch)
    assert one.num_observations == 6 - observed
    assert random_hmm(network()).num_observations(normal("full", 3, 6)).tolist() == [6, 6, 6]


def test_gradients_that_gain_nothing_have_converged():
    hmm = nn.HMM(1, "poisson").double()
    hmm.emission.set(torch.tensor([3.5]))
    with torch.no_grad():
        hmm.emission.log_rates.add_(1e-3)
    report = hmm.fit(torch.tensor([[2, 4, 4, 4]]), method="gradient", max_iterations=3, restarts=0, tolerance=0.0)
    assert report.converged and report.history[-1] == pytest.approx(report.history[-2], abs=1e-12)


def test_fit_that_does_not_converge_warns_at_the_call_and_counts_free_parameters():
    data = torch.tensor([[0.0, 1.0, torch.nan, 5.0, 4.5]])
    hmm = nn.HMM(2, nn.Gaussian((2,), generator=seeded()), generator=seeded()).double()
    for call in (hmm.fit, partial(nn.fit, hmm)):
        with pytest.warns(nn.ConvergenceWarning, match="1 iterations gained .* pass a larger max_iterations") as caught:
            report = call(data, max_iterations=1, generator=seeded())
        assert [warning.filename for warning in caught] == [__file__]
    assert not report.converged and (report.num_parameters, report.num_observations) == (1 + 2 + 4, 4)
    hmm.transition.set(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    hmm.emission.means.requires_grad_(False)
    report = hmm.fit(data, max_iterations=0, restarts=0)
    assert report.num_parameters == 1 + 1 + 2
    assert report.aic == 8 - 2 * report.log_likelihood
    assert report.bic == pytest.approx(4 * np.log(4) - 2 * report.log_likelihood)


def test_standard_errors_equal_closed_forms():
    data = blocks(50, 5).flatten()[:, None]
    hmm = nn.HMM(1, "gaussian").double()
    hmm.fit(data)
    found = nn.standard_errors(hmm, data)
    scale = data.std(correction=0).item()
    close(found["emission.means"], [scale / 50**0.5])
    close(found["emission.log_scales"], [1 / 100**0.5])
    counts = torch.tensor([5, 0, 10, 35])
    coins = nn.HMM(1, nn.Categorical(1, 4)).double()
    draws = torch.arange(4).repeat_interleave(counts)[:, None]
    coins.fit(draws)
    found = nn.standard_errors(coins, draws, lambda hmm: {"p": hmm.emission.weights().exp()})["p"].flatten()
    shares = counts.double() / 50
    close(found[counts > 0], (shares * (1 - shares) / 50).sqrt()[counts > 0])
    found = nn.standard_errors(coins, draws)["emission.weights.logits"].flatten()
    of_others = np.array([[2, -1, -1], [-1, 2, -1], [-1, -1, 2]]) / 3  # of each logit less their mean
    close(found[counts > 0], np.sqrt(np.square(of_others) @ (1 / counts[counts > 0].double()).numpy()))
    assert found[1] == torch.inf
    with torch.no_grad():
        close(nn.standard_errors(coins, draws)["emission.weights.logits"].flatten(), array(found))
    with pytest.raises(ValueError, match=r"^of: expected functions .* pass `lambda hmm: hmm.transition\(\).exp\(\)`"):
        nn.standard_errors(coins, draws, lambda hmm: hmm.transition_matrix)
    with pytest.raises(ValueError, match="^model: expected trained parameters, got none"):
        nn.standard_errors(coins.requires_grad_(False), draws)
    hidden = nn.HMM(2, "gaussian", generator=seeded()).double()
    expected = (
        r"a maximum .* flat or curves up in transition.weights.0.logits; .* such as prior=Dirichlet\(2.0\), or call"
    )
    with pytest.raises(ValueError, match=f"model: expected {expected}"):
        nn.standard_errors(hidden, data.mT)


def test_standard_errors_of_hidden_states_equal_finite_differences():
    hmm, data = nn.HMM(2, "gaussian", generator=seeded()).double(), blocks(200, 20, of=3.0)
    hmm.fit(data, generator=seeded(), tolerance=1e-12, max_iterations=5000)
    assert hmm.initial_probabilities.min() < 1e-20
    where_certain = nn.standard_errors(hmm, data, lambda hmm: hmm.emission.means)
    hmm.initial.requires_grad_(False)
    found = nn.standard_errors(hmm, data, lambda hmm: hmm.emission.means)
    close(found, array(where_certain), atol=1e-12)
    free = hmm.transition.weights[0].logits[0, :, 0], hmm.emission.means, hmm.emission.log_scales

    def slopes(part, i, size):
        """The gradient where an entry of a parameter is moved."""
        with torch.no_grad():
            part[i] += size
        grads = torch.autograd.grad(hmm.log_prob(data).sum(), [hmm.transition.weights[0].logits, *free[1:]])
        with torch.no_grad():
            part[i] -= size
        return torch.cat([grads[0][0, :, 0], *grads[1:]])

    rows = [(slopes(part, i, 1e-5) - slopes(part, i, -1e-5)) / 2e-5 for part in free for i in range(2)]
    close(found, (-torch.stack(rows)).inverse().diagonal()[2:4].sqrt(), atol=1e-7)
    # a start that is nearly sure, as fits leave it: the curvature by its logit is the posterior less the prior
    hmm.requires_grad_(False).initial.requires_grad_(True)
    hmm.emission.means.requires_grad_(True)
    likely = hmm.decode(data).states[0, 0]
    start = torch.full((2,), 1e-18, dtype=F64).index_fill(0, likely, 1.0)
    hmm.initial.set(start)
    errors = nn.standard_errors(hmm, data)["initial.logits"][1 - likely]
    curvature = 1e-18 - hmm.posterior(data).states[0, 0, 1 - likely].detach()
    close(errors * curvature.sqrt(), 1.0)
