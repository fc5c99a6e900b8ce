"""Conversions between hidden Markov models of hmmlearn and `HMM`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..adapters.chain_arguments import float64
from .emissions.categorical import Categorical
from .emissions.gaussian import Gaussian
from .emissions.input_layer import InputLayer
from .emissions.mixture import Mixture
from .emissions.poisson import Poisson
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
    hmm.initial.set(float64(model.startprob_))
    hmm.transition.set(float64(model.transmat_))
    return hmm


def to_hmmlearn(hmm: HMM) -> Any:
    """An `HMM` as a fitted model of hmmlearn: see `HMM.to_hmmlearn`."""
    import hmmlearn.hmm

    if hmm.initial is None or not isinstance(hmm.transition, LogWeights) or hmm.num_steps is not None:
        raise ValueError("hmm: expected a free initial distribution and one transition matrix, as hmmlearn has them")
    emission = hmm.emission
    if not isinstance(emission, InputLayer) or (len(emission.units) > 1 and not isinstance(emission, Poisson)):
        raise ValueError(f"hmm: expected an emission that hmmlearn has, got {emission}")
    with torch.no_grad():
        if isinstance(emission, Gaussian):
            model = hmmlearn.hmm.GaussianHMM(hmm.num_states, covariance_type=_kind(emission))
            model.n_features = emission.event[0] if emission.event else 1
            model.means_, model.covars_ = _moments(emission)
        elif isinstance(emission, Mixture) and isinstance(emission.layer, Gaussian):
            model = hmmlearn.hmm.GMMHMM(*emission.layer.units, covariance_type=_kind(emission.layer))
            model.n_features = emission.event[0] if emission.event else 1
            model.means_, model.covars_ = _moments(emission.layer)
            model.weights_ = _shares(emission.weights())
        elif isinstance(emission, Poisson):
            model = hmmlearn.hmm.PoissonHMM(hmm.num_states)
            model.lambdas_ = _array(emission.log_rates.double().exp()).reshape(-1, hmm.num_states).T
            model.n_features = model.lambdas_.shape[1]
        elif isinstance(emission, Categorical):
            model = hmmlearn.hmm.CategoricalHMM(hmm.num_states)
            model.emissionprob_ = _shares(emission.weights().mT)
            model.n_features = model.emissionprob_.shape[1]
        else:
            raise ValueError(f"hmm: expected an emission that hmmlearn has, got {emission}")
        model.startprob_, model.transmat_ = _shares(hmm.initial()), _shares(hmm.transition()[0])
    return model


def _gaussian(model: Any) -> InputLayer:
    """The emission of a GaussianHMM, whose `covars_` are matrices for every type of covariance."""
    full = model.covariance_type in ("full", "tied")
    return _layer(model.means_, model.covars_ if full else np.diagonal(model.covars_, axis1=-2, axis2=-1), full)


def _mixture(model: Any) -> InputLayer:
    covariance, kind = np.asarray(model.covars_), model.covariance_type
    if kind == "tied":
        covariance = covariance[:, None]
    if kind == "spherical":
        covariance = covariance[..., None]
    mixture = Mixture(_layer(model.means_, covariance, kind in ("full", "tied"))).double()
    mixture.weights.set(float64(model.weights_))
    return mixture


def _layer(means: Any, covariance: Any, full: bool) -> Gaussian:
    means = float64(means)
    layer = Gaussian(tuple(means.shape[:-1]), means.shape[-1], "full" if full else "diagonal").double()
    layer.set(means, float64(covariance))
    return layer


def _poisson(model: Any) -> InputLayer:
    rates = float64(model.lambdas_).T  # (d, c)
    layer = Poisson(tuple(rates.shape)).double()
    layer.set(rates)
    return layer


def _categorical(model: Any) -> InputLayer:
    table = float64(model.emissionprob_).T  # (K, c)
    layer = Categorical(table.shape[1], table.shape[0]).double()
    layer.weights.set(table)
    return layer


_READ = {"GaussianHMM": _gaussian, "GMMHMM": _mixture, "PoissonHMM": _poisson, "CategoricalHMM": _categorical}


def _moments(layer: Gaussian) -> tuple[Any, Any]:
    """Means [*units, d] and variances [*units, d] or covariances [*units, d, d], in float64."""
    means, covariance = layer.means.double(), layer.covariance().double()
    if not layer.event:
        means, covariance = means[..., None], covariance[..., None]
    return _array(means), _array(covariance)


def _kind(layer: Gaussian) -> str:
    return "diag" if layer.factorised else "full"


def _shares(logs: Tensor) -> Any:
    """Probabilities of log-probabilities, normalised in float64 along the last axis, as hmmlearn checks them."""
    return _array(logs.double().softmax(-1))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy().astype(np.float64)
