"""Conversions between hidden Markov models of hmmlearn and `HMM`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .emissions.categorical import Categorical
from .emissions.gaussian import Gaussian
from .emissions.input_layer import InputLayer
from .emissions.mixture import Mixture
from .emissions.poisson import Poisson
from .hmm import HMM
from .hmmlearn_priors import (
    as_array,
    broadcast,
    counts_of_dirichlet,
    float64,
    gaussian_priors,
    mixture_priors,
    options_of_gaussian,
    options_of_mixture,
)
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
    hmm.initial.prior_count = counts_of_dirichlet(model, "startprob_prior", "startprob_", keep_zeros=True)
    hmm.transition.prior_count = counts_of_dirichlet(model, "transmat_prior", "transmat_", keep_zeros=True)
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
            options = options_of_gaussian(emission)
            model = hmmlearn.hmm.GaussianHMM(hmm.num_states, covariance_type=_kind(emission), **options)
            model.n_features = emission.event[0] if emission.event else 1
            model.means_, model.covars_ = _moments(emission)
        elif isinstance(emission, Mixture) and isinstance(emission.layer, Gaussian):
            options = options_of_mixture(emission.layer)
            model = hmmlearn.hmm.GMMHMM(*emission.layer.units, covariance_type=_kind(emission.layer), **options)
            model.n_features = emission.event[0] if emission.event else 1
            model.means_, model.covars_ = _moments(emission.layer)
            model.weights_ = _shares(emission.weights())
            model.weights_prior = 1 + as_array(emission.weights.prior_count, emission.layer.units)
        elif isinstance(emission, Poisson):
            model = hmmlearn.hmm.PoissonHMM(hmm.num_states)
            model.lambdas_ = _array(emission.log_rates.double().exp()).reshape(-1, hmm.num_states).T
            model.n_features = model.lambdas_.shape[1]
            of_units = ((prior, emission.units) for prior in (emission.prior_total, emission.prior_count))
            model.lambdas_prior, model.lambdas_weight = (
                as_array(prior, units).reshape(-1, hmm.num_states).T for prior, units in of_units
            )
        elif isinstance(emission, Categorical):
            model = hmmlearn.hmm.CategoricalHMM(hmm.num_states)
            model.emissionprob_ = _shares(emission.weights().mT)
            model.n_features = model.emissionprob_.shape[1]
            counts = as_array(emission.weights.prior_count, tuple(emission.weights.logits.shape))
            model.emissionprob_prior = 1 + counts.T
        else:
            raise ValueError(f"hmm: expected an emission that hmmlearn has, got {emission}")
        model.startprob_, model.transmat_ = _shares(hmm.initial()), _shares(hmm.transition()[0])
        model.startprob_prior = 1 + as_array(hmm.initial.prior_count, (hmm.num_states,))
        model.transmat_prior = 1 + as_array(hmm.transition.prior_count, (1, hmm.num_states, hmm.num_states))[0]
    return model


def _gaussian(model: Any) -> InputLayer:
    """The emission of a GaussianHMM, whose `covars_` are matrices for every type of covariance."""
    matrices = model.covars_
    if model.covariance_type == "spherical":
        # a fit of hmmlearn leaves the variance of each feature, and so a matrix for each
        matrices = matrices[:: len(matrices) // model.n_components]
    full = model.covariance_type in ("full", "tied")
    covariance = matrices if full else np.diagonal(matrices, axis1=-2, axis2=-1)
    return _layer(model, covariance, gaussian_priors(model))


def _mixture(model: Any) -> InputLayer:
    covariance, kind = np.asarray(model.covars_), model.covariance_type
    if kind == "tied":
        covariance = covariance[:, None]
    if kind == "spherical":
        covariance = covariance[..., None]
    mixture = Mixture(_layer(model, covariance, mixture_priors(model))).double()
    mixture.weights.set(float64(model.weights_))
    mixture.weights.prior_count = counts_of_dirichlet(model, "weights_prior", "weights_")
    return mixture


def _layer(model: Any, covariance: Any, priors: dict[str, Any]) -> Gaussian:
    means = float64(model.means_)
    *units, d = means.shape
    layer = Gaussian(tuple(units), d, _KINDS[model.covariance_type], **priors).double()
    layer.set(means, float64(covariance))
    return layer


def _poisson(model: Any) -> InputLayer:
    rates = float64(model.lambdas_).T  # (d, c)
    total, count = (
        broadcast(name, getattr(model, name, 0.0), rates.T.shape).T for name in ("lambdas_prior", "lambdas_weight")
    )
    layer = Poisson(tuple(rates.shape), prior_total=total, prior_count=count).double()
    layer.set(rates)
    return layer


def _categorical(model: Any) -> InputLayer:
    table = float64(model.emissionprob_).T  # (K, c)
    layer = Categorical(table.shape[1], table.shape[0]).double()
    layer.weights.set(table)
    layer.weights.prior_count = counts_of_dirichlet(model, "emissionprob_prior", "emissionprob_").T
    return layer


_KINDS = {"diag": "diagonal", "spherical": "spherical", "full": "full", "tied": "tied"}
_READ = {"GaussianHMM": _gaussian, "GMMHMM": _mixture, "PoissonHMM": _poisson, "CategoricalHMM": _categorical}


def _moments(layer: Gaussian) -> tuple[Any, Any]:
    """Means [*units, d] and covariances, of the shape that hmmlearn has for their kind, in float64."""
    means, covariance = layer.means.double(), layer.covariance().double()
    if layer.covariance_kind == "spherical":
        covariance = covariance[..., 0]
    elif layer.covariance_kind == "tied":
        covariance = covariance.select(len(layer.units) - 1, 0)
    elif not layer.event:
        covariance = covariance[..., None]
    return _array(means if layer.event else means[..., None]), _array(covariance)


def _kind(layer: Gaussian) -> str:
    return next(theirs for theirs, ours in _KINDS.items() if ours == layer.covariance_kind)


def _shares(logs: Tensor) -> Any:
    """Probabilities of log-probabilities, normalised in float64 along the last axis, as hmmlearn checks them."""
    return _array(logs.double().softmax(-1))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy().astype(np.float64)
