"""Expectations of states and of data, given a part of the data: filtered states, forecasts, imputations."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal

from ..chain_arguments import ChainArguments
from ..forward_backward import forward_backward
from .emissions import Emission, Product


class FilteredStates(NamedTuple):
    """Results of `HMM.filter`, in the layout of the data.

    Attributes:
        states: `p(z_i | data_0, ..., data_i)` `[*B, v, c]`, 0 past the end and where the data are impossible.
        log_likelihoods: `log p(data_i | data_0, ..., data_{i-1})` `[*B, v]` in nats, 0 past the end; their sum over
            steps is the log-likelihood of the sequence.
    """

    states: Any
    log_likelihoods: Any


class Forecast(NamedTuple):
    """Results of `HMM.forecast`, for the steps after the last one.

    Attributes:
        states: their probabilities `[*B, num_steps, c]`.
        mean: the mean of the data `[*B, num_steps, *event]`; None if the distribution of the emission has none.
    """

    states: Tensor
    mean: Tensor | None


def filtered_states(chain: ChainArguments) -> FilteredStates:
    """Those of the chain's states, in float64."""
    forward = forward_backward(**chain._replace(x=chain.x.double())._asdict()).forward
    totals = forward.logsumexp(-1)  # log p(data up to each step)
    before = totals.roll(1, -1)
    before[..., 0 if chain.cu_seqlens is None else chain.cu_seqlens[:-1]] = 0
    impossible = totals == -torch.inf  # or past the end
    steps = torch.where(impossible, totals, totals - before)
    if chain.lengths is not None:
        past = torch.arange(steps.shape[-1], device=steps.device) >= chain.lengths[..., None]
        steps = steps.masked_fill(past, 0)
    return FilteredStates((forward - totals[..., None]).exp().masked_fill(impossible[..., None], 0), steps)


def forecast_states(shares: Tensor, matrices: Tensor) -> Tensor:
    """Probabilities `[*B, k, c]` of the states after those of the last step `[*B, c]`, by matrices `[..., k, c, c]`."""
    steps = []
    for matrix in matrices.unbind(-3):
        shares = (shares[..., None, :].to(matrix) @ matrix)[..., 0, :]
        steps.append(shares)
    return torch.stack(steps, -2)


def mixed(emission: Emission, shares: Tensor, values: Tensor) -> Tensor:
    """Sums `[..., k]` over states of values `[..., *U, c, k]`, weighted by posteriors of the states.

    Units are `[c]` or `[d, c]` of an `HMM`, with posteriors `[..., c]`, and `[t, v, c]` of a circuit, with theirs.
    """
    sums = ("...c,...ck->...k", "...c,...dck->...dk", "...tvc,...tvck->...vk")[len(emission.units) - 1]
    result: Tensor = torch.einsum(sums, shares.to(values), values)
    return result


def mean_of(emission: nn.Module, shares: Tensor, covariates: Tensor | None) -> Tensor | None:
    """The mean of the data for probabilities of states, None if there is none."""
    if not isinstance(emission, Emission):
        return None
    if isinstance(emission, Product):
        columns: list[Any] = [mean_of(family, shares, covariates) for family in emission.families]
        return None if any(column is None for column in columns) else emission.joined(columns)
    distribution: Any = emission.distribution
    try:
        if emission.takes_covariates and covariates is not None:
            states = torch.arange(shares.shape[-1], device=shares.device).expand(shares.shape)
            means = distribution((states,), covariates=covariates[..., None, :]).mean  # (..., c, *event)
        else:
            means = distribution().mean  # (*U, c, *event)
    except NotImplementedError:
        return None
    mean = mixed(emission, shares, means if emission.event else means[..., None])
    mean = mean if emission.event else mean[..., 0]
    return None if bool(mean.isnan().any()) else mean.to(emission.dtype)


def expected_data(emission: Emission, data: Tensor, known: Tensor, shares: Tensor, covariates: Tensor | None) -> Tensor:
    """The means where data are missing, or the most probable of finitely many values, for posteriors of states."""
    if isinstance(emission, Product):
        parts = emission.parts(data, known)
        return emission.joined([expected_data(*part, shares, covariates).to(emission.dtype) for part in parts])
    if emission.num_values is not None:
        return mixed(emission, shares, emission.log_probabilities().exp()).argmax(-1)
    mean: Tensor | None = None
    family = emission.distribution() if bool(emission.event) and bool((known != known[..., :1]).any()) else None
    if isinstance(family, MultivariateNormal):
        mean = mixed(emission, shares, conditional_means(family, data, known))
    elif isinstance(family, Independent | None):
        mean = mean_of(emission, shares, covariates)
    if mean is None:
        raise NotImplementedError(f"impute: expected an emission with means of what is missing, got {emission}")
    return mean.to(data.dtype if data.is_floating_point() else emission.dtype)


def conditional_means(normal: MultivariateNormal, data: Tensor, known: Tensor) -> Tensor:
    """The mean of each unit `[..., *U, c, d]` conditional on the known entries of vectors `[..., *U, d]`."""
    means, covariance, data, known = normal.loc, normal.covariance_matrix, data[..., None, :], known[..., None, :]
    # the block of known entries, with 1 on the rest of the diagonal
    identity = torch.eye(means.shape[-1], dtype=means.dtype, device=means.device)
    block = torch.where(known[..., None] & known[..., None, :], covariance, identity)
    errors = torch.linalg.solve(block, torch.where(known, data - means, 0.0))
    of_units: Tensor = means + (covariance @ errors[..., None])[..., 0]
    return of_units
