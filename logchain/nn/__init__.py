"""Modules that hold parameters and call the library: hidden Markov models, conditional random fields, circuits."""

from . import transitions
from .chain_circuit import ChainCircuit
from .circuit import Circuit, Completion
from .degenerate import DegenerateError, DegenerateWarning
from .em import em_step
from .emissions import (
    Bernoulli,
    Binomial,
    Categorical,
    Distribution,
    ExponentialFamily,
    Finite,
    Gaussian,
    InputLayer,
    Mixture,
    Poisson,
)
from .fitting import Fit, fit
from .hmm import HMM, Sample
from .layers import CPLayer, ProductLayer, SumLayer, TuckerLayer
from .linear_chain_crf import LinearChainCRF
from .log_weights import LogWeights
from .tree_circuit import TreeCircuit

__all__ = [
    "HMM",
    "Bernoulli",
    "Binomial",
    "CPLayer",
    "Categorical",
    "ChainCircuit",
    "Circuit",
    "Completion",
    "DegenerateError",
    "DegenerateWarning",
    "Distribution",
    "ExponentialFamily",
    "Finite",
    "Fit",
    "Gaussian",
    "InputLayer",
    "LinearChainCRF",
    "LogWeights",
    "Mixture",
    "Poisson",
    "ProductLayer",
    "Sample",
    "SumLayer",
    "TreeCircuit",
    "TuckerLayer",
    "em_step",
    "fit",
    "transitions",
]
