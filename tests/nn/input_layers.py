"""Input layers of every family, data for them by numpy, and their densities by scipy."""

import numpy as np
import scipy.special
import scipy.stats
import torch

from logchain.nn import Bernoulli, Binomial, Categorical, Distribution, Gaussian, Mixture, Poisson
from tests.seeded import seeded

D = 3


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


def gamma(units, family=torch.distributions.Gamma, **options):
    return Distribution(family, units, **{"concentration": 2.0, "rate": 1.5, "generator": seeded(), **options})


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


def drawn(name, units, lead=(7,), dtype=torch.float32):
    make, data, density = FAMILIES[name]
    layer = make(units).to(dtype)
    found = torch.as_tensor(data(np.random.default_rng(0), (*lead, *units[:-1])))
    return layer, found.to(dtype) if found.is_floating_point() else found, density
