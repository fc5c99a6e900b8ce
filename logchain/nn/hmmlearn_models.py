"""Emissions of the hidden Markov models of hmmlearn."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .emissions import Categorical, Emission, Gaussian, Mixture, Poisson

_KINDS = ("GaussianHMM", "GMMHMM", "PoissonHMM", "CategoricalHMM")


def emission_of(model: Any) -> Emission:
    """The emission, in float64, of a fitted model of hmmlearn."""
    kind = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _KINDS), "")
    if not kind:
        raise TypeError(f"model: expected hmmlearn's {' or '.join(_KINDS)}, got {type(model).__name__}")
    if not hasattr(model, "startprob_"):
        raise TypeError(f"model: expected a {kind} that is fitted, got one without startprob_")
    if kind == "PoissonHMM":
        rates = float64(model.lambdas_).T  # (d, c)
        counts = Poisson(tuple(rates.shape)).double()
        counts.set(rates)
        return counts
    if kind == "CategoricalHMM":
        table = float64(model.emissionprob_).T  # (K, c)
        categories = Categorical(table.shape[1], table.shape[0]).double()
        categories.weights.set(table)
        return categories
    means, shape, covariance = float64(model.means_), model.covariance_type, np.asarray(model.covars_)
    if kind == "GMMHMM":  # whose `covars_` are those that are shared
        axes: Any = {"tied": (slice(None), None), "spherical": (..., None)}.get(shape, ())
        covariance = covariance[axes]
    else:  # `covars_` are matrices for every type of covariance
        if shape == "spherical":  # a fit of hmmlearn leaves the variance of each feature, and so a matrix for each
            covariance = covariance[:: len(covariance) // model.n_components]
        covariance = covariance if shape in ("full", "tied") else np.diagonal(covariance, axis1=-2, axis2=-1)
    gaussian = Gaussian(tuple(means.shape[:-1]), means.shape[-1], shape).double()
    gaussian.set(means, float64(covariance))
    if kind == "GaussianHMM":
        return gaussian
    mixture = Mixture(gaussian).double()
    mixture.weights.set(float64(model.weights_))
    return mixture


def float64(array: Any) -> Tensor:
    """A float64 tensor with a copy of an array."""
    return torch.from_numpy(np.array(array, np.float64))
