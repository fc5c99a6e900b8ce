"""A table of emission layers, data for them by numpy, and their densities by scipy."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats
import torch

from logchain.nn import Bernoulli, Binomial, Categorical, Distribution, Gaussian, Mixture, Multinomial, Poisson, Product
from logchain.nn.parameters import arithmetic
from tests.seeded import seeded

F64 = torch.float64
D = 3


class Family(NamedTuple):
    """A layer of given units, data of a given shape, and the log-density [*U, c] of one datum."""

    make: Callable
    data: Callable
    density: Callable


def array(tensor):
    return tensor.detach().double().numpy()


def vectors(rng, shape):
    return rng.normal(size=(*shape, D))


def gaussian(units, *sizes):
    layer = Gaussian(units, *sizes, generator=seeded())
    with torch.no_grad():
        spread = layer.factors if layer.has_matrices else layer.log_scales
        spread.normal_(0, 0.5, generator=seeded(1))
    return layer


def distribution(units, family=torch.distributions.Gamma, **options):
    return Distribution(family, units, **{"concentration": 2.0, "rate": 1.5, "generator": seeded(), **options})


def normal_vectors(units):
    factor = torch.linalg.cholesky(torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.5]]))
    normal = torch.distributions.MultivariateNormal
    return Distribution(normal, units, loc=torch.zeros(D), scale_tril=factor, generator=seeded())


def gaussian_density(layer, y):
    return normals(layer.units, array(layer.means), array(layer.covariances if layer.event else layer.variances), y)


def normals(units, means, covariances, y):
    """The log-density of each unit, with a variance, one for each feature, or a matrix."""
    densities = np.empty(units)
    for unit in np.ndindex(*units):
        densities[unit] = scipy.stats.multivariate_normal(means[unit], covariances[unit]).logpdf(y[unit[:-1]])
    return densities


def mixture_density(layer, y):
    data = np.broadcast_to(y[..., None, :], (*layer.layer.units[:-1], D))
    return scipy.special.logsumexp(gaussian_density(layer.layer, data) + array(layer.weights()), axis=-1)


def values_of(layer):
    return {name: array(layer.transforms[name](arithmetic(value))) for name, value in layer.free.items()}


def gamma_density(layer, y):
    values = values_of(layer)
    return scipy.stats.gamma(values["concentration"], scale=1 / values["rate"]).logpdf(np.asarray(y)[..., None])


def normal_vectors_density(layer, y):
    values = values_of(layer)
    return normals(layer.units, values["loc"], values["scale_tril"] @ values["scale_tril"].swapaxes(-1, -2), y)


def categorical_density(layer, y):
    return np.take_along_axis(array(layer.weights()), np.asarray(y)[..., None, None], -2)[..., 0, :]


def binomial_density(layer, y, total_count):
    return scipy.stats.binom(total_count, array(layer.probabilities)).logpmf(np.asarray(y)[..., None])


def poisson_density(layer, y):
    return scipy.stats.poisson(np.exp(array(layer.log_rates))).logpmf(np.asarray(y)[..., None])


def multinomial_density(layer, y):
    shares = array(layer.probabilities)
    return scipy.stats.multinomial.logpmf(np.asarray(y)[..., None, :], np.asarray(y).sum(-1)[..., None], shares)


def weather(units):
    return Product(gaussian(units, 2, "full"), Bernoulli(units, generator=seeded(2)), distribution(units))


def weather_data(rng, shape):
    parts = rng.normal(size=(*shape, 2)), rng.integers(2, size=(*shape, 1)), rng.gamma(2, size=(*shape, 1))
    return np.concatenate(parts, -1)


def weather_density(layer, y):
    pair, rain, waits = layer.families
    return gaussian_density(pair, y[..., :2]) + binomial_density(rain, y[..., 2], 1) + gamma_density(waits, y[..., 3])


def seeded_layer(kind, *sizes):
    return lambda units: kind(units, *sizes, generator=seeded())


def integers(high):
    return lambda rng, shape: rng.integers(high, size=shape)


FAMILIES = {
    "categorical": Family(seeded_layer(Categorical, 5), integers(5), categorical_density),
    "bernoulli": Family(seeded_layer(Bernoulli), integers(2), partial(binomial_density, total_count=1)),
    "binomial": Family(seeded_layer(Binomial, 16), integers(17), partial(binomial_density, total_count=16)),
    "poisson": Family(seeded_layer(Poisson), lambda rng, shape: rng.poisson(3.0, size=shape), poisson_density),
    "gaussian": Family(gaussian, lambda rng, shape: rng.normal(size=shape), gaussian_density),
    **{
        f"gaussian-{kind}": Family(lambda units, kind=kind: gaussian(units, D, kind), vectors, gaussian_density)
        for kind in ("diag", "spherical", "full", "tied")
    },
    "mixture": Family(
        lambda units: Mixture(Gaussian((*units, 2), D, generator=seeded()), generator=seeded(2)),
        vectors,
        mixture_density,
    ),
    "multinomial": Family(
        seeded_layer(Multinomial, D, 6),
        lambda rng, shape: rng.multinomial(6, [0.2, 0.3, 0.5], size=shape),
        multinomial_density,
    ),
    "product": Family(weather, weather_data, weather_density),
    "student": Family(
        lambda units: Distribution("StudentT", units, spread=0.5, generator=seeded()),
        lambda rng, shape: rng.standard_t(3, size=shape),
        lambda layer, y: scipy.stats.t(*[values_of(layer)[name] for name in ("df", "loc", "scale")]).logpdf(
            np.asarray(y)[..., None]
        ),
    ),
    "gamma": Family(distribution, lambda rng, shape: rng.gamma(2.0, size=shape), gamma_density),
    "normal-vectors": Family(normal_vectors, vectors, normal_vectors_density),
}
COUNTS = ["categorical", "bernoulli", "binomial", "poisson"]
# families with a maximum in closed form
CLOSED = [name for name in FAMILIES if name not in ("gamma", "normal-vectors", "student", "product")]


def drawn(name, units, lead=(7,), dtype=torch.float32):
    """A layer and data for it."""
    family = FAMILIES[name]
    data = torch.as_tensor(family.data(np.random.default_rng(0), (*lead, *units[:-1])))
    return family.make(units).to(dtype), data.to(dtype) if data.is_floating_point() else data
