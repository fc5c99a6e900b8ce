"""Families of distributions of observations: emissions of hidden Markov models, input layers of circuits."""

from .bernoulli import Bernoulli
from .binomial import Binomial
from .categorical import Categorical
from .distribution import Distribution
from .exponential_family import ExponentialFamily
from .finite import Finite
from .gaussian import Gaussian
from .input_layer import InputLayer
from .mixture import Mixture
from .poisson import Poisson

__all__ = [
    "Bernoulli",
    "Binomial",
    "Categorical",
    "Distribution",
    "ExponentialFamily",
    "Finite",
    "Gaussian",
    "InputLayer",
    "Mixture",
    "Poisson",
]
