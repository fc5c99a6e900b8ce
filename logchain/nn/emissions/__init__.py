"""Families of distributions of observations: emissions of hidden Markov models, input layers of circuits."""

from .composed import Mixture, Product
from .distribution import Distribution
from .emission import Emission
from .gaussian import Gaussian
from .integers import Bernoulli, Binomial, Categorical, Multinomial, Poisson
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
