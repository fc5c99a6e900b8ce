"""Modules that hold parameters and call the library: hidden Markov models, conditional random fields, circuits."""

from . import transitions
from .chain_circuit import ChainCircuit, Completion
from .chain_model import ChainModel
from .em import em_step
from .emissions import (
    Bernoulli,
    Binomial,
    Categorical,
    Distribution,
    Emission,
    Gaussian,
    Mixture,
    Poisson,
)
from .fitting import ConvergenceWarning, Fit, fit
from .hmm import HMM, Sample
from .layers import SumLayer
from .linear_chain_crf import LinearChainCRF
from .log_weights import LogWeights
from .semi_markov_crf import SemiMarkovCRF
from .standard_errors import standard_errors

__all__ = [
    "HMM",
    "Bernoulli",
    "Binomial",
    "Categorical",
    "ChainCircuit",
    "ChainModel",
    "Completion",
    "ConvergenceWarning",
    "Distribution",
    "Fit",
    "Gaussian",
    "Emission",
    "LinearChainCRF",
    "LogWeights",
    "Mixture",
    "Poisson",
    "Sample",
    "SemiMarkovCRF",
    "SumLayer",
    "em_step",
    "fit",
    "standard_errors",
    "transitions",
]
