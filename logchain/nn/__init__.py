"""Modules that hold parameters and call the library: hidden Markov models, conditional random fields, circuits."""

from .bernoulli import Bernoulli
from .binomial import Binomial
from .categorical import Categorical
from .chain_circuit import ChainCircuit
from .circuit import Circuit, Completion
from .distribution import Distribution
from .em import em_step
from .exponential_family import ExponentialFamily
from .finite import Finite
from .fitting import Fit, fit
from .gaussian import Gaussian
from .hmm import HMM, Sample
from .input_layer import InputLayer
from .layers import CPLayer, ProductLayer, SumLayer, TuckerLayer
from .linear_chain_crf import LinearChainCRF
from .log_weights import LogWeights
from .mixture import Mixture
from .poisson import Poisson
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
]
