"""The priors of hmmlearn's models as those of `HMM`, and back.

Both add pseudo-counts to the sums of expectation maximisation; hmmlearn says them as parameters of a Dirichlet, a
normal and an inverse gamma or inverse Wishart distribution. Two of its formulas are no maximum of a posterior, and are
read as what they are documented to be. A number for the scale of an inverse Wishart is that times the identity; there
it is added to every entry of the matrix, which leaves all directions but one as they are. The observations that the
prior of a PoissonHMM is weighed against are those of the state; there they are those of all states together.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .emissions.gaussian import Gaussian

Prior = float | Tensor


def float64(array: Any) -> Tensor:
    """A float64 tensor with a copy of an array."""
    return torch.from_numpy(np.array(array, np.float64))


def counts_of_dirichlet(model: Any, name: str, weights: str, *, keep_zeros: bool = False) -> Tensor:
    """`prior_count` of the weights of a model, whose Dirichlet prior it has under a name.

    With `keep_zeros` weights that are 0 have no prior, so that they stay 0, as hmmlearn keeps what is forbidden.
    """
    values = float64(getattr(model, weights))
    counts = broadcast(name, getattr(model, name, 1.0), tuple(values.shape)) - 1
    counts = counts.masked_fill(values == 0, 0.0) if keep_zeros else counts
    if bool((counts < 0).any()):
        raise ValueError(f"{name}: expected numbers from 1 on, whose posterior has a maximum, got {1 + counts.min():g}")
    return counts


def gaussian_priors(model: Any) -> dict[str, Prior]:
    """The priors of `Gaussian` for a GaussianHMM."""
    c, d = np.shape(model.means_)
    shape: tuple[int, ...] = {"full": (c, d, d), "tied": (1, d, d)}.get(model.covariance_type, (c, d))
    matrices = len(shape) == 3
    weight = _number("covars_weight", model.covars_weight)
    return {
        "prior_scatter": (_matrices if matrices else broadcast)("covars_prior", model.covars_prior, shape),
        # hmmlearn takes no observations away either, with a weight below that
        "prior_count": max(weight - (d if matrices else 1), 0.0),
        "prior_means": broadcast("means_prior", model.means_prior, (c, d)),
        "prior_means_count": _number("means_weight", model.means_weight),
    }


def options_of_gaussian(layer: Gaussian) -> dict[str, Any]:
    """The priors of a GaussianHMM for those of a layer of units c."""
    (c,), d = layer.units, layer.event[0] if layer.event else 1
    scatter, counts = _spread(layer, d)
    matrices = not layer.factorised
    tied = layer.covariance_kind == "tied"
    return {
        "covars_prior": scatter[0] if tied else scatter,
        "covars_weight": _alike("prior_count", counts) + (d if matrices else 1),
        "means_prior": as_array(layer.prior_means, tuple(layer.means.shape)).reshape(c, d),
        "means_weight": _alike("prior_means_count", as_array(layer.prior_means_count, layer.units)),
    }


def mixture_priors(model: Any) -> dict[str, Prior]:
    """The priors of the components' `Gaussian` for a GMMHMM."""
    c, k, d = np.shape(model.means_)
    means: dict[str, Prior] = {
        "prior_means": broadcast("means_prior", model.means_prior, (c, k, d)),
        "prior_means_count": broadcast("means_weight", model.means_weight, (c, k)),
    }
    if model.covars_prior is None and model.covars_weight is None:
        return means
    first, second = _filled(model, k, d)
    scatter: Prior
    if model.covariance_type == "full":
        scatter = _matrices("covars_prior", first, (c, k, d, d))
        counts = broadcast("covars_weight", second, (c, k)) + d + 2
    elif model.covariance_type == "tied":
        scatter = _matrices("covars_prior", first, (c, d, d))
        scatter = scatter[:, None] if isinstance(scatter, Tensor) else scatter
        counts = broadcast("covars_weight", second, (c,))[:, None] + k + d + 1
    elif model.covariance_type == "diag":
        scatter = 2 * broadcast("covars_weight", second, (c, k, d))
        by_feature = 2 * broadcast("covars_prior", first, (c, k, d)) + 3
        counts = by_feature[..., 0]
        if not bool((by_feature == counts[..., None]).all()):
            raise ValueError("covars_prior: expected the same for all features, got different ones")
    else:
        shapes = broadcast("covars_prior", first, (c, k))
        # hmmlearn's default leaves d - k counts, which it does not mean to
        counts = torch.where(shapes == -(k + 2) / 2, 0.0, (d + 2 * shapes + 2) / d)
        scatter = (2 / d * broadcast("covars_weight", second, (c, k)))[..., None].expand(c, k, d)
    if bool((counts < 0).any()):
        raise ValueError(f"covars_prior, covars_weight: expected no less than no observation, got {counts.min():g}")
    return {"prior_scatter": scatter, "prior_count": counts, **means}


def options_of_mixture(layer: Gaussian) -> dict[str, Any]:
    """The priors of a GMMHMM for those of its components' layer, of units (c, k)."""
    (c, k), d = layer.units, layer.event[0] if layer.event else 1
    options: dict[str, Any] = {
        "means_prior": as_array(layer.prior_means, tuple(layer.means.shape)).reshape(c, k, d),
        "means_weight": as_array(layer.prior_means_count, (c, k)),
    }
    scatter, counts = _spread(layer, d)
    if not (scatter.any() or counts.any()):
        return options
    if layer.covariance_kind == "full":
        return options | {"covars_prior": scatter, "covars_weight": counts - d - 2}
    if layer.covariance_kind == "tied":
        return options | {"covars_prior": scatter[:, 0], "covars_weight": counts[:, 0] - k - d - 1}
    if layer.covariance_kind == "diagonal":
        return options | {"covars_prior": np.repeat((counts[..., None] - 3) / 2, d, -1), "covars_weight": scatter / 2}
    return options | {"covars_prior": (d * counts - d) / 2 - 1, "covars_weight": scatter.sum(-1) / 2}


def _filled(model: Any, k: int, d: int) -> tuple[Any, Any]:
    """`covars_prior` and `covars_weight` of a GMMHMM, with what hmmlearn takes where one of them is None."""
    defaults = {
        "full": (0.0, -(d + 2.0)),
        "tied": (0.0, -(k + d + 1.0)),
        "diag": (-1.5, 0.0),
        "spherical": (-(k + 2.0) / 2, 0.0),
    }[model.covariance_type]
    given = model.covars_prior, model.covars_weight
    first, second = (default if value is None else value for value, default in zip(given, defaults, strict=True))
    return first, second


def _matrices(name: str, value: Any, shape: tuple[int, ...]) -> Prior:
    """A number, which stands for that times the identity, or whole matrices that broadcast to a shape."""
    if np.ndim(value) == 0:
        return _number(name, value)
    if np.shape(value)[-2:] != shape[-2:]:
        raise ValueError(f"{name}: expected a number or matrices {list(shape[-2:])}, got {list(np.shape(value))}")
    return broadcast(name, value, shape)


def broadcast(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """What broadcasts to a shape, as a float64 tensor of that shape."""
    try:
        return float64(np.broadcast_to(value, shape))
    except ValueError:
        expected = f"{name}: expected what broadcasts to {list(shape)}"
        raise ValueError(f"{expected}, got shape {list(np.shape(value))}") from None


def _number(name: str, value: Any) -> float:
    if np.size(value) != 1:
        raise ValueError(f"{name}: expected one number, got shape {list(np.shape(value))}")
    return float(np.reshape(value, ()))


def _alike(name: str, values: Any) -> float:
    """The number that all values are."""
    first = float(values.flat[0])
    if (values != first).any():
        raise ValueError(f"{name}: expected one number for all units, as hmmlearn has it, got different ones")
    return first


def as_array(value: Prior, shape: tuple[int, ...]) -> Any:
    """A number or tensor as an array of a shape."""
    return torch.as_tensor(value, dtype=torch.float64).detach().cpu().expand(shape).numpy().copy()


def _spread(layer: Gaussian, d: int) -> tuple[Any, Any]:
    """`prior_scatter` of a layer in full, and `prior_count` of each unit, or of units that share a covariance."""
    holders = (*layer.units[:-1], 1) if layer.covariance_kind == "tied" else layer.units
    counts = as_array(layer.prior_count, holders)
    if layer.factorised:
        return as_array(layer.prior_scatter, (*layer.units, *layer.event)).reshape(*layer.units, d), counts
    given = layer.prior_scatter
    scatter = given if isinstance(given, Tensor) else given * torch.eye(d, dtype=torch.float64)
    return as_array(scatter, (*holders, d, d)), counts
