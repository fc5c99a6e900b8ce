"""Families of distributions of observations: emissions of hidden Markov models, input layers of circuits."""

from .categorical import Categorical
from .counts import Bernoulli, Binomial, Poisson
from .distribution import Distribution
from .emission import Emission
from .gaussian import Gaussian
from .mixture import Mixture

__all__ = ["Bernoulli", "Binomial", "Categorical", "Distribution", "Gaussian", "Emission", "Mixture", "Poisson"]
