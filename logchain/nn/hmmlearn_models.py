"""Hidden Markov models of hmmlearn as `HMM`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .emissions.categorical import Categorical
from .emissions.counts import Poisson
from .emissions.gaussian import Gaussian
from .emissions.input_layer import InputLayer
from .emissions.mixture import Mixture
from .hmm import HMM
from .log_weights import LogWeights


def from_hmmlearn(model: Any) -> HMM:
    """A fitted model of hmmlearn as an `HMM`: see `HMM.from_hmmlearn`."""
    kind = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _READ), "")
    if not kind:
        raise TypeError(f"model: expected hmmlearn's {' or '.join(_READ)}, got {type(model).__name__}")
    if not hasattr(model, "startprob_"):
        raise TypeError(f"model: expected a {kind} that is fitted, got one without startprob_")
    hmm = HMM(model.n_components, _READ[kind](model)).double()
    assert isinstance(hmm.initial, LogWeights) and isinstance(hmm.transition, LogWeights)
    hmm.initial.set(_float64(model.startprob_))
    hmm.transition.set(_float64(model.transmat_))
    return hmm


def _gaussian(model: Any) -> InputLayer:
    """The emission of a GaussianHMM, whose `covars_` are matrices for every type of covariance."""
    matrices = model.covars_
    if model.covariance_type == "spherical":
        # a fit of hmmlearn leaves the variance of each feature, and so a matrix for each
        matrices = matrices[:: len(matrices) // model.n_components]
    full = model.covariance_type in ("full", "tied")
    covariance = matrices if full else np.diagonal(matrices, axis1=-2, axis2=-1)
    return _layer(model, covariance)


def _mixture(model: Any) -> InputLayer:
    covariance, kind = np.asarray(model.covars_), model.covariance_type
    if kind == "tied":
        covariance = covariance[:, None]
    if kind == "spherical":
        covariance = covariance[..., None]
    mixture = Mixture(_layer(model, covariance)).double()
    mixture.weights.set(_float64(model.weights_))
    return mixture


def _layer(model: Any, covariance: Any) -> Gaussian:
    means = _float64(model.means_)
    *units, d = means.shape
    layer = Gaussian(tuple(units), d, _KINDS[model.covariance_type]).double()
    layer.set(means, _float64(covariance))
    return layer


def _poisson(model: Any) -> InputLayer:
    rates = _float64(model.lambdas_).T  # (d, c)
    layer = Poisson(tuple(rates.shape)).double()
    layer.set(rates)
    return layer


def _categorical(model: Any) -> InputLayer:
    table = _float64(model.emissionprob_).T  # (K, c)
    layer = Categorical(table.shape[1], table.shape[0]).double()
    layer.weights.set(table)
    return layer


_KINDS = {"diag": "diagonal", "spherical": "spherical", "full": "full", "tied": "tied"}
_READ = {"GaussianHMM": _gaussian, "GMMHMM": _mixture, "PoissonHMM": _poisson, "CategoricalHMM": _categorical}


def _float64(array: Any) -> Tensor:
    """A float64 tensor with a copy of an array."""
    return torch.from_numpy(np.array(array, np.float64))
