"""Families of distributions of observations: emissions of hidden Markov models, input layers of circuits."""

from .categorical import Categorical
from .counts import Bernoulli, Binomial, Multinomial, Poisson
from .distribution import Distribution
from .emission import Emission
from .gaussian import Gaussian
from .mixture import Mixture
from .product import Product
from .regression import LinearGaussian

__all__ = [
    "Bernoulli",
    "Binomial",
    "Categorical",
    "Distribution",
    "Emission",
    "Gaussian",
    "LinearGaussian",
    "Mixture",
    "Multinomial",
    "Poisson",
    "Product",
]
