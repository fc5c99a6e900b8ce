"""Hidden Markov models of hmmlearn as `HMM`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .emissions.categorical import Categorical
from .emissions.counts import Poisson
from .emissions.emission import Emission
from .emissions.gaussian import Gaussian
from .emissions.mixture import Mixture
from .hmm import HMM


def from_hmmlearn(model: Any) -> HMM:
    """A fitted model of hmmlearn as an `HMM`: see `HMM.from_hmmlearn`."""
    kind = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _READ), "")
    if not kind:
        raise TypeError(f"model: expected hmmlearn's {' or '.join(_READ)}, got {type(model).__name__}")
    if not hasattr(model, "startprob_"):
        raise TypeError(f"model: expected a {kind} that is fitted, got one without startprob_")
    hmm = HMM(model.n_components, _READ[kind](model)).double()
    parts: Any = hmm
    parts.initial.set(_float64(model.startprob_))
    parts.transition.set(_float64(model.transmat_))
    return hmm


def _gaussian(model: Any) -> Emission:
    """The emission of a GaussianHMM, whose `covars_` are matrices for every type of covariance."""
    covariance, kind = np.asarray(model.covars_), model.covariance_type
    if kind == "spherical":
        # a fit of hmmlearn leaves the variance of each feature, and so a matrix for each
        covariance = covariance[:: len(covariance) // model.n_components]
    return _layer(model, covariance if kind in ("full", "tied") else np.diagonal(covariance, axis1=-2, axis2=-1))


def _mixture(model: Any) -> Emission:
    """The emission of a GMMHMM, whose `covars_` are those that are shared."""
    axes: Any = {"tied": (slice(None), None), "spherical": (..., None)}.get(model.covariance_type, ())
    mixture = Mixture(_layer(model, np.asarray(model.covars_)[axes])).double()
    mixture.weights.set(_float64(model.weights_))
    return mixture


def _layer(model: Any, covariance: Any) -> Gaussian:
    means, kind = _float64(model.means_), model.covariance_type
    *units, d = means.shape
    layer = Gaussian(tuple(units), d, kind).double()
    layer.set(means, _float64(covariance))
    return layer


def _poisson(model: Any) -> Emission:
    rates = _float64(model.lambdas_).T  # (d, c)
    layer = Poisson(tuple(rates.shape)).double()
    layer.set(rates)
    return layer


def _categorical(model: Any) -> Emission:
    table = _float64(model.emissionprob_).T  # (K, c)
    layer = Categorical(table.shape[1], table.shape[0]).double()
    layer.weights.set(table)
    return layer


_READ = {"GaussianHMM": _gaussian, "GMMHMM": _mixture, "PoissonHMM": _poisson, "CategoricalHMM": _categorical}


def _float64(array: Any) -> Tensor:
    """A float64 tensor with a copy of an array."""
    return torch.from_numpy(np.array(array, np.float64))
