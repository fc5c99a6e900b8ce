"""A table of emission layers, data for them by numpy, and their densities by scipy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats
import torch

from logchain.nn import Bernoulli, Binomial, Categorical, Distribution, Gaussian, InputLayer, Mixture, Poisson
from tests.seeded import seeded

D = 3


class Family(NamedTuple):
    """A layer of given units, data of a given shape, and the log-density [*U, c] of one datum."""

    make: Callable
    data: Callable
    density: Callable


def array(tensor):
    return tensor.detach().double().numpy()


def gaussian(units, *sizes):
    layer = Gaussian(units, *sizes, generator=seeded())
    with torch.no_grad():
        spread = layer.log_scales if layer.factorised else layer.factors
        spread.normal_(0, 0.5, generator=seeded(1))
    return layer


def distribution(units, family=torch.distributions.Gamma, **options):
    return Distribution(family, units, **{"concentration": 2.0, "rate": 1.5, "generator": seeded(), **options})


def normal_vectors(units):
    factor = torch.linalg.cholesky(torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.5]]))
    normal = torch.distributions.MultivariateNormal
    return Distribution(normal, units, loc=torch.zeros(D), scale_tril=factor, generator=seeded())


def of_each_unit(log_density: Callable, layer: InputLayer):
    """Log-densities [*U, c] from that of each unit."""
    densities = np.empty(layer.units)
    for unit in np.ndindex(*layer.units):
        densities[unit] = log_density(unit)
    return densities


def factorized_density(layer, y):
    return scipy.stats.norm(array(layer.means), np.exp(array(layer.log_scales))).logpdf(y[..., None, :]).sum(-1)


def gaussian_density(layer, y):
    means, covariance = array(layer.means), array(layer.covariance())
    normal = scipy.stats.multivariate_normal
    return of_each_unit(lambda unit: normal(means[unit], covariance[unit]).logpdf(y[unit[:-1]]), layer)


def mixture_density(layer, y):
    components = factorized_density(layer.layer, y[..., None, :])
    return scipy.special.logsumexp(components + array(layer.weights()), axis=-1)


def gamma_density(layer, y):
    values = {name: array(value) for name, value in layer.parameters_of_units().items()}
    return scipy.stats.gamma(values["concentration"], scale=1 / values["rate"]).logpdf(np.asarray(y)[..., None])


def normal_density(layer, y):
    values = {name: array(value) for name, value in layer.parameters_of_units().items()}
    means, factors, normal = values["loc"], values["scale_tril"], scipy.stats.multivariate_normal
    return of_each_unit(lambda unit: normal(means[unit], factors[unit] @ factors[unit].T).logpdf(y[unit[:-1]]), layer)


def probabilities(layer):
    return scipy.special.expit(array(layer.logits))


FAMILIES = {
    "categorical": Family(
        lambda units: Categorical(units, 5, generator=seeded()),
        lambda rng, shape: rng.integers(5, size=shape),
        lambda layer, y: np.take_along_axis(array(layer.weights()), np.asarray(y)[..., None, None], -2)[..., 0, :],
    ),
    "bernoulli": Family(
        lambda units: Bernoulli(units, generator=seeded()),
        lambda rng, shape: rng.integers(2, size=shape),
        lambda layer, y: scipy.stats.bernoulli(probabilities(layer)).logpmf(np.asarray(y)[..., None]),
    ),
    "binomial": Family(
        lambda units: Binomial(units, 16, generator=seeded()),
        lambda rng, shape: rng.integers(17, size=shape),
        lambda layer, y: scipy.stats.binom(16, probabilities(layer)).logpmf(np.asarray(y)[..., None]),
    ),
    "poisson": Family(
        lambda units: Poisson(units, generator=seeded()),
        lambda rng, shape: rng.poisson(3.0, size=shape),
        lambda layer, y: scipy.stats.poisson(np.exp(array(layer.log_rates))).logpmf(np.asarray(y)[..., None]),
    ),
    "gaussian": Family(
        gaussian,
        lambda rng, shape: rng.normal(size=shape),
        lambda layer, y: scipy.stats.norm(array(layer.means), np.exp(array(layer.log_scales))).logpdf(
            np.asarray(y)[..., None]
        ),
    ),
    "gaussian-diagonal": Family(
        lambda units: gaussian(units, D), lambda rng, shape: rng.normal(size=(*shape, D)), factorized_density
    ),
    "gaussian-spherical": Family(
        lambda units: gaussian(units, D, "spherical"),
        lambda rng, shape: rng.normal(size=(*shape, D)),
        factorized_density,
    ),
    "gaussian-full": Family(
        lambda units: gaussian(units, D, "full"), lambda rng, shape: rng.normal(size=(*shape, D)), gaussian_density
    ),
    "gaussian-tied": Family(
        lambda units: gaussian(units, D, "tied"), lambda rng, shape: rng.normal(size=(*shape, D)), gaussian_density
    ),
    "mixture": Family(
        lambda units: Mixture(Gaussian((*units, 2), D, generator=seeded()), generator=seeded(2)),
        lambda rng, shape: rng.normal(size=(*shape, D)),
        mixture_density,
    ),
    "gamma": Family(distribution, lambda rng, shape: rng.gamma(2.0, size=shape), gamma_density),
    "normal-vectors": Family(normal_vectors, lambda rng, shape: rng.normal(size=(*shape, D)), normal_density),
}
COUNTS = ["categorical", "bernoulli", "binomial", "poisson"]
# families with an M step: parameters of a Distribution have no maximum in closed form
CLOSED = [name for name in FAMILIES if name not in ("gamma", "normal-vectors")]


def drawn(name, units, lead=(7,), dtype=torch.float32):
    """A layer and data for it."""
    family = FAMILIES[name]
    data = torch.as_tensor(family.data(np.random.default_rng(0), (*lead, *units[:-1])))
    return family.make(units).to(dtype), data.to(dtype) if data.is_floating_point() else data
