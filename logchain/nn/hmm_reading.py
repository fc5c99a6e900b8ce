"""What is read from a fitted hidden Markov model: means of data, and states in another order."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal

from .emissions import Categorical, Emission
from .parameters import over
from .priors import Prior


def mixed(emission: Emission, shares: Tensor, values: Tensor) -> Tensor:
    """Sums `[..., *U, *rest]` over states of values `[*U, c, *rest]`, weighted by shares `[..., c]`."""
    sums: Tensor = torch.tensordot(shares.to(values), values.movedim(len(emission.units) - 1, 0), 1)
    return sums


def mean_of(emission: torch.nn.Module, shares: Tensor, covariates: Tensor | None) -> Tensor | None:
    """The mean of the data for probabilities `[..., c]` of states, None if there is none."""
    if not isinstance(emission, Emission):
        return None
    try:
        if emission.takes_covariates and covariates is not None:
            states = torch.arange(shares.shape[-1], device=shares.device).expand(shares.shape)
            distribution: Any = emission.distribution
            means = distribution((states,), covariates=covariates[..., None, :]).mean  # [..., c, *event]
            mean = (over(shares, means.shape) * means).sum(shares.dim() - 1)
        else:
            mean = mixed(emission, shares, emission.distribution().mean)
    except NotImplementedError:
        return None
    return None if bool(mean.isnan().any()) else mean.to(emission.dtype)


def expected_data(emission: Emission, data: Tensor, known: Tensor, shares: Tensor, covariates: Tensor | None) -> Tensor:
    """Data where nothing is known, for posteriors `[*B, v, c]`: their means, or the most probable of finitely many."""
    if emission.num_values is not None:
        return mixed(emission, shares, emission.log_probabilities().exp()).argmax(-1)
    mean: Tensor | None = None
    family = emission.distribution() if bool(emission.event) and bool((known != known[..., :1]).any()) else None
    if isinstance(family, MultivariateNormal):
        mean = conditional_mean(family, data, known, shares)
    elif isinstance(family, Independent | None):
        mean = mean_of(emission, shares, covariates)
    if mean is None:
        raise NotImplementedError(f"impute: expected an emission with means of what is missing, got {emission}")
    return mean.to(data.dtype if data.is_floating_point() else emission.dtype)


def conditional_mean(normal: MultivariateNormal, data: Tensor, known: Tensor, shares: Tensor) -> Tensor:
    """Means `[..., *U, d]` of vectors conditional on their known entries, for shares `[..., c]` of states."""
    means, covariance, data, known = normal.loc, normal.covariance_matrix, data[..., None, :], known[..., None, :]
    # the block of known entries, with 1 on the rest of the diagonal
    identity = torch.eye(means.shape[-1], dtype=means.dtype, device=means.device)
    block = torch.where(known[..., None] & known[..., None, :], covariance, identity)
    errors = torch.linalg.solve(block, torch.where(known, data - means, 0.0))
    of_states: Tensor = means + (covariance @ errors[..., None])[..., 0]  # [..., *U, c, d]
    shares = shares.view(*shares.shape[:-1], *(1,) * (means.dim() - 2), -1, 1)
    return (shares.to(means) * of_states).sum(-2)


def permute(tensor: Tensor, order: Tensor, *axes: int) -> None:
    """Permute the entries along axes that have as many as there are states, in place."""
    for axis in axes:
        if -tensor.dim() <= axis < tensor.dim() and tensor.shape[axis] == len(order):
            tensor.copy_(tensor.index_select(axis, order))


def permute_units(emission: Emission, order: Tensor) -> None:
    """Permute the states of an emission, whose axis comes after those of features, and is the last of categories."""
    priors = (layer for layer in emission.modules() if isinstance(layer, Prior))
    if any(tensor.numel() > 1 for prior in priors for tensor in prior.buffers()):
        remedy = "sort states before a prior with tensors is assigned"
        raise ValueError(f"emission: expected numbers in its prior, got tensors; {remedy}")
    families = [layer for layer in emission.modules() if isinstance(layer, Categorical)]
    of_categories = [layer for layer in families if layer.units == emission.units]
    last = {id(tensor) for layer in of_categories for tensor in (*layer.parameters(), *layer.buffers())}
    for tensor in (*emission.parameters(), *emission.buffers()):
        permute(tensor, order, -1 if id(tensor) in last else len(emission.units) - 1)
