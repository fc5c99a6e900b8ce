"""Modules that hold parameters and call the library: hidden Markov models, conditional random fields, circuits."""

from .bio import TagConstraints, bio_constraints
from .chain_circuit import ChainCircuit, Completion
from .chain_model import ChainModel, Sample
from .durations import Durations
from .em import em_step
from .emissions import (
    Bernoulli,
    Binomial,
    Categorical,
    Distribution,
    Emission,
    Gaussian,
    LinearGaussian,
    Mixture,
    Multinomial,
    Poisson,
    Product,
)
from .expectations import FilteredStates, Forecast
from .fitting import ConvergenceWarning, Fit, fit
from .hmm import HMM
from .layers import SumLayer
from .linear_chain_crf import LinearChainCRF
from .log_weights import LogWeights
from .priors import Dirichlet, Gamma, NormalInverseWishart
from .semi_markov_crf import SemiMarkovCRF
from .standard_errors import standard_errors
from .transitions import Transitions

__all__ = [
    "HMM",
    "Bernoulli",
    "Binomial",
    "Categorical",
    "ChainCircuit",
    "ChainModel",
    "Completion",
    "ConvergenceWarning",
    "Dirichlet",
    "Distribution",
    "Durations",
    "Emission",
    "FilteredStates",
    "Fit",
    "Forecast",
    "Gamma",
    "Gaussian",
    "LinearChainCRF",
    "LinearGaussian",
    "LogWeights",
    "Mixture",
    "Multinomial",
    "NormalInverseWishart",
    "Poisson",
    "Product",
    "Sample",
    "SemiMarkovCRF",
    "SumLayer",
    "TagConstraints",
    "Transitions",
    "bio_constraints",
    "em_step",
    "fit",
    "standard_errors",
]
