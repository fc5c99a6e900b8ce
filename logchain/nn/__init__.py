"""Modules that hold parameters and call the library: hidden Markov models, conditional random fields, circuits."""

from .categorical import Categorical
from .em import em_step
from .exponential_family import ExponentialFamily
from .input_layer import InputLayer
from .log_weights import LogWeights

__all__ = ["Categorical", "ExponentialFamily", "InputLayer", "LogWeights", "em_step"]
