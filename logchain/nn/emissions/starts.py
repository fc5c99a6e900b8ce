"""Initial places of hidden units: observations far from each other."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...arguments import check_has_values

if TYPE_CHECKING:
    from .emission import Emission


class Seeds(NamedTuple):
    """Observations of each unit, `[*U, c, d]`, and of all data the variance and number `[*U, 1, d]`, in float64.

    `nearest` `[g, n]` is the unit whose seed is the nearest to an observation.
    """

    places: Tensor
    variance: Tensor
    counts: Tensor
    nearest: Tensor


def seeds(layer: "Emission", data: Tensor, known: Tensor | None, generator: torch.Generator | None) -> Seeds:
    """One observation for each unit, drawn in proportion to its squared distance from those drawn before (k-means++).

    Data and mask are those of `known` of the layer. Events have d entries (1 for numbers). Missing entries are replaced
    by the mean.

    Raises:
        ValueError: a variable or feature is never observed.

    Cost: c passes over the data.

    Source: D. Arthur and S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007.
    """
    rows, seen = observations(layer, data, known)  # (g, n, d)
    counts = seen.sum(1, keepdim=True)
    if not bool((counts > 0).all()):
        raise ValueError("data: expected at least one observation of every variable and feature, got none of some")
    # the mean is taken about one of the observations, since sums of large numbers would round their differences away
    first = rows.gather(1, seen.long().argmax(1, keepdim=True))
    mean = first + torch.where(seen, rows - first, 0.0).sum(1, keepdim=True) / counts
    rows = torch.where(seen, rows, mean)
    variance = (rows - mean).square().sum(1, keepdim=True) / counts
    # distances are in standard deviations, so that features count alike; a constant feature is not scaled
    scaled = (rows - mean) / torch.where(variance > 0, variance, 1.0).sqrt()
    weights = seen.any(-1).double()  # (g, n)
    distance, nearest, places = torch.full_like(weights, torch.inf), torch.zeros_like(weights, dtype=torch.long), []
    for unit in range(layer.units[-1]):
        apart = (distance.sum(-1) > 0)[:, None] & (unit > 0)
        drawn = _draw(torch.where(apart, distance, weights), generator)[:, None, None].expand(-1, 1, rows.shape[-1])
        places.append(rows.gather(1, drawn))
        to_drawn = (scaled - scaled.gather(1, drawn)).square().sum(-1) * weights
        nearest = nearest.masked_fill(to_drawn < distance, unit)
        distance = torch.minimum(distance, to_drawn)
    shape = *layer.units[:-1], 1, rows.shape[-1]
    chosen = torch.cat(places, 1).view(*layer.units, rows.shape[-1])
    return Seeds(chosen, variance.view(shape), counts.double().view(shape), nearest)


def cluster_weights(layer: "Emission", data: Tensor, known: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """Weights `[..., *U, c]` of observations for each unit: most for those nearest to its seed, some for all others."""
    nearest = seeds(layer, data, known, generator).nearest  # (g, n)
    groups, c = len(nearest), layer.units[-1]
    noise = torch.rand(groups, c, c, dtype=torch.float64, device=data.device, generator=generator)
    # random shares of the other clusters make units differ whose seeds are the same
    shares = torch.eye(c, dtype=torch.float64, device=data.device) + noise / 2
    weights = shares.gather(1, nearest[..., None].expand(-1, -1, c)).transpose(0, 1)  # (n, g, c)
    return weights.reshape(*data.shape[: data.dim() - len(layer.units) + 1 - len(layer.event)], *layer.units)


def observations(layer: "Emission", data: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The data of each of g variables, `[g, n, d]` in float64, and the mask of what is observed."""
    check_has_values("data", data)
    known = torch.ones_like(data, dtype=torch.bool) if known is None else known
    lead, axes = layer.units[:-1], len(layer.units) - 1 + len(layer.event)
    shape = (*data.shape[: data.dim() - axes], *lead, *layer.event)
    size = layer.event[0] if layer.event else 1
    groups = torch.Size(lead).numel()
    data, known = (part.expand(shape).reshape(-1, groups, size).transpose(0, 1) for part in (data, known))
    return data.double(), known


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index for each row of weights, drawn in proportion; unlike `multinomial`, for more than 2^24 columns too."""
    sums = weights.cumsum(-1)
    level = torch.rand(len(weights), 1, dtype=weights.dtype, device=weights.device, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, level, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
