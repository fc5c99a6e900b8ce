"""The input layers against scipy's densities, their draws, what is missing, and what they refuse."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch

from logchain.nn import Bernoulli, Binomial, Categorical, Distribution, Gaussian, InputLayer, Mixture, Poisson

D = 3


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def wide(tensor):
    return tensor.detach().double().numpy()


def gaussian_full(layer, y):
    means, covariance = wide(layer.means), wide(layer.covariance())
    found = np.empty(layer.units)
    for at in np.ndindex(*layer.units):
        found[at] = scipy.stats.multivariate_normal(means[at], covariance[at]).logpdf(y[at[:-1]])
    return found


def of_unit(y):
    """A datum [*U] beside the parameters [*U, c]."""
    return np.asarray(y)[..., None]


def spread_full(units):
    layer = Gaussian(units, D, "full", generator=seeded())
    with torch.no_grad():
        layer.factors.normal_(0, 0.5, generator=seeded(1))
    return layer


def spread_diagonal(units, d=None):
    layer = Gaussian(units, d, generator=seeded())
    with torch.no_grad():
        layer.log_scales.normal_(0, 0.5, generator=seeded(1))
    return layer


def gaussian_mixture(units):
    layer = Gaussian((*units, 4), D, generator=seeded())
    return Mixture(layer, generator=seeded(2))


def mixture_density(layer, y):
    means, scales = wide(layer.layer.means), wide(layer.layer.covariance()) ** 0.5
    each = scipy.stats.norm(means, scales).logpdf(y[..., None, None, :]).sum(-1)
    return scipy.special.logsumexp(each + wide(layer.weights()), axis=-1)


def gamma(units):
    return Distribution(torch.distributions.Gamma, units, concentration=2.0, rate=1.5, generator=seeded())


def gamma_density(layer, y):
    values = {name: wide(value) for name, value in layer.parameters_of_units().items()}
    return scipy.stats.gamma(values["concentration"], scale=1 / values["rate"]).logpdf(of_unit(y))


def normals(units):
    start = torch.linalg.cholesky(torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.5]]))
    made = torch.distributions.MultivariateNormal
    return Distribution(made, units, loc=torch.zeros(D), scale_tril=start, generator=seeded())


def normals_density(layer, y):
    values = {name: wide(value) for name, value in layer.parameters_of_units().items()}
    found = np.empty(layer.units)
    for at in np.ndindex(*layer.units):
        factor = values["scale_tril"][at]
        found[at] = scipy.stats.multivariate_normal(values["loc"][at], factor @ factor.T).logpdf(y[at[:-1]])
    return found


# for each family: how it is made of units; data of a given shape, by numpy; the density [*U, c] of one datum, by scipy
FAMILIES = {
    "categorical": (
        lambda units: Categorical(units, 5, generator=seeded()),
        lambda rng, shape: rng.integers(5, size=shape),
        lambda layer, y: np.take_along_axis(wide(layer.weights()), np.asarray(y)[..., None, None], -2)[..., 0, :],
    ),
    "bernoulli": (
        lambda units: Bernoulli(units, generator=seeded()),
        lambda rng, shape: rng.integers(2, size=shape),
        lambda layer, y: scipy.stats.bernoulli(scipy.special.expit(wide(layer.logits))).logpmf(of_unit(y)),
    ),
    "binomial": (
        lambda units: Binomial(units, 16, generator=seeded()),
        lambda rng, shape: rng.integers(17, size=shape),
        lambda layer, y: scipy.stats.binom(16, scipy.special.expit(wide(layer.logits))).logpmf(of_unit(y)),
    ),
    "poisson": (
        lambda units: Poisson(units, generator=seeded()),
        lambda rng, shape: rng.poisson(3.0, size=shape),
        lambda layer, y: scipy.stats.poisson(np.exp(wide(layer.log_rates))).logpmf(of_unit(y)),
    ),
    "gaussian": (
        spread_diagonal,
        lambda rng, shape: rng.normal(size=shape),
        lambda layer, y: scipy.stats.norm(wide(layer.means), np.exp(wide(layer.log_scales))).logpdf(of_unit(y)),
    ),
    "gaussian-diagonal": (
        lambda units: spread_diagonal(units, D),
        lambda rng, shape: rng.normal(size=(*shape, D)),
        lambda layer, y: (
            scipy.stats.norm(wide(layer.means), np.exp(wide(layer.log_scales))).logpdf(y[..., None, :]).sum(-1)
        ),
    ),
    "gaussian-full": (spread_full, lambda rng, shape: rng.normal(size=(*shape, D)), gaussian_full),
    "mixture": (gaussian_mixture, lambda rng, shape: rng.normal(size=(*shape, D)), mixture_density),
    "gamma": (gamma, lambda rng, shape: rng.gamma(2.0, size=shape), gamma_density),
    "normals": (normals, lambda rng, shape: rng.normal(size=(*shape, D)), normals_density),
}
UNITS = [(2,), (4, 2), (3, 4, 2)]


def drawn(name, units, lead=(7,), dtype=torch.float32):
    make, data, density = FAMILIES[name]
    layer = make(units).to(dtype)
    found = torch.as_tensor(data(np.random.default_rng(0), (*lead, *units[:-1])))
    return layer, found.to(dtype) if found.is_floating_point() else found, density


def truth(layer, density, data, lead):
    return np.stack([density(layer, y) for y in data.numpy().reshape(-1, *data.shape[lead:])])


@pytest.mark.parametrize("units", UNITS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_density_is_that_of_scipy(name, units):
    layer, data, density = drawn(name, units, (5, 2), torch.float64)
    found = layer(data)
    assert found.shape == (5, 2, *units) and found.dtype == torch.float64
    np.testing.assert_allclose(wide(found).reshape(10, *units), truth(layer, density, data, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_low_precision_parameters_are_computed_with_in_float32(name, dtype):
    layer, data, density = drawn(name, (4, 2), (9,))
    layer = layer.to(dtype)
    found = layer(data)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(wide(found), truth(layer, density, data, 1), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_data_shared_by_the_variables_need_not_be_expanded(name):
    layer, data, _ = drawn(name, (3, 4, 2))
    shared = data[:, :1]
    torch.testing.assert_close(layer(shared), layer(shared.expand_as(data)), rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_missing_is_summed_out(name):
    layer, data, _ = drawn(name, (4, 2))
    observed = torch.rand(7, 4, generator=seeded(3)) < 0.5
    found = layer(data, observed=observed)
    full = layer(data)
    assert torch.equal(found[observed], full[observed]) and (found[~observed] == 0).all()
    if data.is_floating_point():
        gone = data.clone()
        gone[~observed] = torch.nan
        assert torch.equal(layer(gone), found)
    for gradient in torch.autograd.grad(found.sum(), list(layer.parameters())):
        assert gradient.isfinite().all()


def test_single_features_of_a_factorised_vector_may_be_missing():
    layer, data, _ = drawn("gaussian-diagonal", (4, 2), dtype=torch.float64)
    known = torch.rand(data.shape, generator=seeded(3)) < 0.5
    each = scipy.stats.norm(wide(layer.means), np.exp(wide(layer.log_scales))).logpdf(data.numpy()[..., None, :])
    expected = np.where(known.numpy()[..., None, :], each, 0).sum(-1)
    np.testing.assert_allclose(wide(layer(data, known)), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(wide(layer(data.where(known, torch.nan))), expected, rtol=1e-12, atol=1e-12)
    whole, *_ = drawn("gaussian-full", (4, 2), dtype=torch.float64)
    with pytest.raises(ValueError, match="whole or missing"):
        whole(data, known)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_first_and_second_order(name):
    layer, data, _ = drawn(name, (2, 2), (3,), torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(*values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (data,))

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize("name", ["binomial", "poisson", "gaussian-full", "mixture", "gamma"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    layer, data, _ = drawn(name, (4, 2))
    observed = torch.rand(7, 4, generator=seeded(3)) < 0.5
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(data, observed), layer(data, observed))
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(
            torch.autograd.grad(compiled(data, observed).sum(), list(layer.parameters())),
            torch.autograd.grad(layer(data, observed).sum(), list(layer.parameters())),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_each_observation_by_vmap(name):
    layer, data, _ = drawn(name, (4, 2))
    values = {at: value.detach() for at, value in layer.named_parameters()}

    def total(values, data):
        return torch.func.functional_call(layer, values, (data,)).sum()

    found = torch.func.vmap(torch.func.grad(total), (None, 0))(values, data)
    for row, one in enumerate(data):
        expected = torch.autograd.grad(layer(one).sum(), list(layer.parameters()))
        for got, wanted in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(got[row], wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_states_and_sizes(name):
    make = FAMILIES[name][0]
    layer, data, _ = drawn(name, (4, 2))
    other = copy.deepcopy(layer)
    assert torch.equal(other(data), layer(data))
    other.reset_parameters(seeded(5))
    assert not torch.equal(other(data), layer(data))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(data), layer(data))
    again = make((4, 2))
    again.reset_parameters(seeded(5))
    other.reset_parameters(seeded(5))
    assert torch.equal(other(data), again(data)), "a seed says everything"
    assert "(4, 2" in repr(layer)


@pytest.mark.parametrize("name", FAMILIES)
def test_states_differ_from_the_start(name):
    layer, data, _ = drawn(name, (4, 6))
    for _ in range(2):
        found = layer(data)
        apart = (found[..., :, None] - found[..., None, :]).abs().amax(0) > 0
        assert (apart | torch.eye(6, dtype=torch.bool)).all()
        layer.initialise(data, generator=seeded(4))


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gamma", "normals"}))
def test_starting_at_the_data_is_better_than_anywhere(name):
    make, data, _ = FAMILIES[name]
    rng = np.random.default_rng(1)
    found = torch.as_tensor(data(rng, (200, 4)))
    found = found * 3 + 20 if found.is_floating_point() else found
    layer = make((4, 3)).double()
    layer.reset_parameters(seeded(1))
    before = torch.logsumexp(layer(found), -1).sum()
    layer.initialise(found, generator=seeded(1))
    assert torch.logsumexp(layer(found), -1).sum() > before
    missing = torch.rand(200, 4, generator=seeded(2)) < 0.3
    twin = copy.deepcopy(layer)
    poisoned = found.clone()
    poisoned[missing] = 1
    layer.initialise(found, ~missing, generator=seeded(1))
    twin.initialise(poisoned, ~missing, generator=seeded(1))
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        assert a.isfinite().all() and torch.equal(a, b), "what is missing has an influence"


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "binomial", "mixture-binomial"])
def test_finite_families_sum_to_one_and_have_a_mode(name):
    if name == "mixture-binomial":
        layer = Mixture(Binomial((4, 2, 3), 16, generator=seeded()), generator=seeded()).double()
    else:
        layer, *_ = drawn(name, (4, 2), dtype=torch.float64)
    table = layer.log_probabilities().detach()
    k = table.shape[-1]
    torch.testing.assert_close(table.logsumexp(-1), torch.zeros(4, 2, dtype=torch.float64))
    each = layer(torch.arange(k)[:, None].expand(k, 4))
    torch.testing.assert_close(each.movedim(0, -1), table)
    if name != "mixture-binomial":
        value, log_density = layer.mode()
        assert torch.equal(value, table.argmax(-1)) and torch.equal(log_density, table.amax(-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mode_is_a_maximum(name):
    layer, data, density = drawn(name, (4, 2), (300,), torch.float64)
    value, log_density = layer.mode()
    assert value.shape == (4, 2, *layer.event) and log_density.shape == (4, 2)
    if name != "mixture":
        assert (layer(data) <= log_density + 1e-12).all()
    for state in range(2):
        np.testing.assert_allclose(
            wide(log_density)[:, state], density(layer, value[:, state].numpy())[:, state], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_have_the_density_they_are_said_to_have(name):
    layer, *_ = drawn(name, (3, 2), dtype=torch.float64)
    states = torch.tensor([0, 1, 1]).expand(20000, 3)
    found = layer.draw(states, seeded())
    assert found.shape == (20000, 3, *layer.event)
    assert torch.equal(found, layer.draw(states, seeded()))
    # the integral of p q / (p + q), by draws of the one and of the other
    with torch.no_grad():
        of_one = layer(found).softmax(-1)[:, torch.arange(3), 1 - states[0]]
        of_other = layer(layer.draw(1 - states, seeded(1))).softmax(-1)[:, torch.arange(3), states[0]]
    error = 5 * (of_one.var(0) + of_other.var(0)).div(20000).sqrt()
    assert ((of_one.mean(0) - of_other.mean(0)).abs() < error).all()
    assert (error < 0.02).all()


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "binomial", "poisson"])
def test_draws_are_as_frequent_as_they_are_likely(name):
    layer, *_ = drawn(name, (3, 2), dtype=torch.float64)
    states = torch.tensor([0, 1, 1])
    found = layer.draw(states.expand(20000, 3), seeded())
    k = int(found.max()) + 1
    shares = torch.stack([(found == value).double().mean(0) for value in range(k)])
    expected = layer(torch.arange(k)[:, None].expand(k, 3)).detach().exp()[:, torch.arange(3), states]
    error = 5 * (expected * (1 - expected) / 20000).sqrt() + 1e-4
    assert ((shares - expected).abs() < error).all()


def test_draws_of_a_full_gaussian_have_its_covariance():
    layer, *_ = drawn("gaussian-full", (2, 2), dtype=torch.float64)
    found = layer.draw(torch.tensor([1, 0]).expand(40000, 2), seeded())
    for variable, state in enumerate([1, 0]):
        expected = layer.covariance()[variable, state].detach()
        got = torch.cov(found[:, variable].T)
        scale = expected.diagonal().sqrt()
        assert ((got - expected).abs() < 0.04 * scale[:, None] * scale).all()
        torch.testing.assert_close(found[:, variable].mean(0), layer.means[variable, state].detach(), atol=0.05, rtol=0)


def test_impossible_is_exactly_minus_infinity_with_gradients_of_zero():
    rates = Poisson(2)
    rates.set(torch.tensor([0.0, 2.0]))
    coins = Bernoulli(2)
    coins.set(torch.tensor([0.0, 1.0]))
    trials = Binomial(2, 3)
    trials.set(torch.tensor([0.0, 1.0]))
    for layer, data, expected in [
        (rates, [0, 1], [[0.0, -2.0], [-math.inf, math.log(2) - 2]]),
        (coins, [0, 1], [[0.0, -math.inf], [-math.inf, 0.0]]),
        (trials, [0, 1, 3], [[0.0, -math.inf], [-math.inf, -math.inf], [-math.inf, 0.0]]),
    ]:
        found = layer(torch.tensor(data))
        torch.testing.assert_close(found, torch.tensor(expected))
        total = found.masked_fill(found == -torch.inf, 0.0).sum()
        (gradient,) = torch.autograd.grad(total, list(layer.parameters()))
        assert gradient.isfinite().all()
    mixed = Mixture(Bernoulli((1, 2)))
    mixed.layer.set(torch.tensor([0.0, 0.0]))
    found = mixed(torch.tensor([1, 0]))
    torch.testing.assert_close(found, torch.tensor([[-math.inf], [0.0]]))
    for gradient in torch.autograd.grad(found[0].sum(), list(mixed.parameters())):
        assert (gradient == 0).all()


def test_a_distribution_ends_where_the_support_of_each_unit_does():
    scales = torch.tensor([2.0, 0.5])
    layer = Distribution(torch.distributions.Pareto, 2, scale=scales, alpha=3.0, spread=0)
    found = layer(torch.tensor([1.0, 4.0]))
    expected = scipy.stats.pareto(3, scale=scales.numpy()).logpdf(np.array([[1.0], [4.0]]))
    torch.testing.assert_close(found.double(), torch.tensor(expected), rtol=0, atol=1e-5)
    for gradient in torch.autograd.grad(found[:, 1].sum() + found[1, 0], list(layer.parameters())):
        assert gradient.isfinite().all()


def test_what_is_not_observed_may_be_anything():
    data, observed = torch.tensor([torch.inf, 1.0]), torch.tensor([False, True])
    for layer in (Gaussian(2), Poisson(2), Mixture(Gaussian((2, 2))), Bernoulli(2)):
        assert torch.equal(layer(data, observed), layer(torch.tensor([torch.nan, 1.0])))


def test_large_counts_and_large_means_cost_no_digits():
    counts = Poisson(1)
    counts.set(torch.tensor([1e6]))
    found = counts(torch.tensor([1_000_300])).item()
    rate = math.exp(counts.log_rates.double().item())
    assert abs(found - scipy.stats.poisson(rate).logpmf(1_000_300)) < 1e-5
    far = Gaussian(1).double()
    far.set(torch.tensor([1e8], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    expected = scipy.stats.norm(1e8, 1).logpdf(1e8 + 0.5)
    assert abs(far(torch.tensor([1e8 + 0.5], dtype=torch.float64)).item() - expected) < 1e-14


def test_a_distribution_learns_by_gradients_and_takes_functions():
    def skewed(loc, scale):
        return torch.distributions.LogNormal(loc, scale)

    layer = Distribution(skewed, 2, limits={"scale": torch.distributions.constraints.positive}, loc=0.0, scale=1.0)
    data = torch.distributions.LogNormal(1.0, 0.2).sample((400,))
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        found = -layer(data).sum() / 400
        found.backward()
        return found

    optimiser.step(loss)
    values = layer.parameters_of_units()
    torch.testing.assert_close(values["loc"].detach(), data.log().mean().expand(2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values["scale"].detach(), data.log().std(correction=0).expand(2), rtol=1e-3, atol=1e-3)
    found = layer(data[:3], torch.tensor([True, False, True]))
    assert (found[1] == 0).all()
    for gradient in torch.autograd.grad(found.sum(), list(layer.parameters())):
        assert gradient.isfinite().all(), "what stands for a missing entry is allowed"
    trials = Distribution(torch.distributions.Binomial, 3, total_count=7, probs=0.5)
    assert set(dict(trials.named_parameters())) == {"free.probs"}
    assert trials(torch.tensor([7])).shape == (1, 3)
    assert set(dict(normals((2,)).named_parameters())) == {"free.loc", "free.scale_tril"}


@pytest.mark.parametrize(
    ("make", "data", "error", "text"),
    [
        (lambda: Poisson(2), torch.tensor([-1]), ValueError, "expected counts, got -1"),
        (lambda: Poisson(2), torch.tensor([0.5]), ValueError, "expected counts, got 0.5"),
        (lambda: Poisson(2), torch.tensor([torch.inf]), ValueError, "expected counts, got inf"),
        (lambda: Bernoulli(2), torch.tensor([2]), ValueError, "integers from 0 to 1, got 2"),
        (lambda: Categorical(2, 3), torch.tensor([0.5]), ValueError, "integers from 0 to 2, got 0.5"),
        (lambda: Gaussian((3, 2)), torch.zeros(5, 4), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
        (lambda: Gaussian(2, 3), torch.zeros(5, 4), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
        (lambda: Gaussian(2), [1.0], TypeError, "expected a torch.Tensor, got list"),
        (lambda: Gaussian(2), torch.zeros(2, dtype=torch.complex64), TypeError, "complex64"),
        (lambda: gamma((2,)), torch.tensor([-1.0]), ValueError, "GreaterThan"),
        (lambda: Gaussian(0), None, ValueError, "units: expected a positive integer"),
        (lambda: Gaussian("two"), None, ValueError, "units: expected a positive integer"),
        (lambda: Gaussian(2, 3, "tied"), None, ValueError, "covariance: expected 'diagonal' or 'full', got 'tied'"),
        (lambda: Gaussian(2, covariance="full"), None, ValueError, "num_features: expected an integer"),
        (lambda: Gaussian(2, 0), None, ValueError, "num_features: expected 1 or more, got 0"),
        (lambda: Gaussian(2, prior_scatter=-1.0), None, ValueError, "prior_scatter: expected a number from 0 on"),
        (lambda: Binomial(2, -1), None, ValueError, "total_count: expected 0 or more, got -1"),
        (lambda: Binomial(2, 1.5), None, TypeError, "total_count: expected an int, got 1.5"),
        (lambda: Categorical(2, 0), None, ValueError, "num_categories: expected 1 or more, got 0"),
        (lambda: Mixture(Poisson(2)), None, ValueError, "layer: expected units"),
        (lambda: Mixture("poisson"), None, TypeError, "layer: expected an InputLayer"),
        (lambda: Distribution(torch.distributions.Gamma, 2, concentration=-1.0, rate=1.0), None, ValueError, "conc"),
        (
            lambda: Distribution(
                torch.distributions.Normal,
                2,
                limits={"loc": torch.distributions.constraints.dependent},
                loc=0.0,
                scale=1.0,
            ),
            None,
            ValueError,
            "limits: expected what loc has to satisfy by itself",
        ),
        (lambda: Poisson(1).set(torch.tensor([-1.0])), None, ValueError, "rates: expected"),
        (lambda: Bernoulli(1).set(torch.tensor([1.5])), None, ValueError, "probabilities: expected"),
        (lambda: Gaussian(1).set(torch.zeros(1), torch.zeros(1)), None, ValueError, "covariance: expected positive"),
        (
            lambda: Gaussian(3).set(torch.zeros(2), torch.ones(3)),
            None,
            ValueError,
            r"means: expected .* \[3\], got \[2\]",
        ),
        (lambda: Gaussian(3).set(0.0, torch.ones(3)), None, TypeError, "means: expected a torch.Tensor, got float"),
        (lambda: Gaussian(1).set(torch.tensor([torch.nan]), torch.ones(1)), None, ValueError, "means: expected finite"),
        (lambda: Gaussian(1)(torch.tensor([torch.inf])), None, ValueError, "data: expected finite numbers"),
        (lambda: Gaussian(1).initialise(torch.full((3,), torch.nan)), None, ValueError, "at least one observation"),
        (lambda: Gaussian(1).initialise(torch.ones(3)), None, ValueError, "two different observations"),
    ],
)
def test_what_is_refused(make, data, error, text):
    with pytest.raises(error, match=text):
        make()(data)


@pytest.mark.parametrize("observed", [torch.ones(7), torch.ones(6, dtype=torch.bool), "all"])
def test_masks_that_do_not_go_with_the_data(observed):
    with pytest.raises((TypeError, ValueError), match="observed: expected"):
        Poisson(2)(torch.ones(7), observed)


def test_a_layer_of_ones_own_needs_a_density_only():
    class Laplace(InputLayer):
        def __init__(self):
            super().__init__(2)
            self.places = torch.nn.Parameter(torch.tensor([0.0, 1.0]))

        def log_density(self, data):
            return -(data - self.places).abs() - math.log(2)

    found = Laplace()(torch.tensor([0.0, torch.nan]))
    torch.testing.assert_close(found, torch.tensor([[0.0, -1.0], [math.log(2), math.log(2)]]) - math.log(2))


def test_small_gradients_do_not_drown_in_long_data():
    layer = Bernoulli(2)
    data = torch.randint(2, (300_000,), generator=seeded())
    flow = torch.rand(300_000, 2, generator=seeded(1))
    table = layer.table().detach().requires_grad_()
    layer.table = lambda: table
    (found,) = torch.autograd.grad(layer(data), table, flow)
    expected = torch.zeros(2, 2, dtype=torch.float64).index_add_(0, data, flow.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_a_variable_that_never_changes_needs_a_prior():
    data = torch.zeros(9, 2)
    data[:, 1] = torch.arange(9)
    layer = Gaussian((2, 3), prior_scatter=0.9)
    layer.initialise(data, generator=seeded())
    torch.testing.assert_close(layer.covariance()[0], torch.full((3,), 0.1))
    torch.testing.assert_close(layer.covariance()[1], (data[:, 1].var(correction=0) + 0.1).expand(3))
