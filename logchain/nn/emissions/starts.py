"""Initial places of hidden units: observations far from each other."""

import torch
from torch import Tensor

from ...arguments import check_has_values
from .emission import Emission


def seeds(
    layer: Emission, data: Tensor, observed: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One observation for each unit, drawn in proportion to its squared distance from those drawn before (k-means++).

    Returns:
        The observations `[*U, c, d]`, and the mean, the (biased) variance and the number `[*U, 1, d]` of all data, in
        float64, for events of d entries (1 for scalars). Missing entries are replaced by the mean.

    Raises:
        ValueError: a variable or feature is never observed.

    Cost: c passes over the data.

    Source: D. Arthur and S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007.
    """
    rows, known = observations(layer, data, observed)  # (g, n, d)
    counts = known.sum(1, keepdim=True)
    if not bool((counts > 0).all()):
        raise ValueError("data: expected at least one observation of every variable and feature, got none of some")
    # the mean is taken about one of the observations, since sums of large numbers would round their differences away
    first = rows.gather(1, known.long().argmax(1, keepdim=True))
    mean = first + torch.where(known, rows - first, 0.0).sum(1, keepdim=True) / counts
    rows = torch.where(known, rows, mean)
    variance = (rows - mean).square().sum(1, keepdim=True) / counts
    # distances are in standard deviations, so that features count alike; a constant feature is not scaled
    scaled = (rows - mean) / torch.where(variance > 0, variance, 1.0).sqrt()
    seen = known.any(-1).double()  # (g, n)
    chosen, distance = [], None
    for _ in range(layer.units[-1]):
        weights = seen if distance is None else torch.where((distance.sum(-1) > 0)[:, None], distance, seen)
        drawn = _draw(weights, generator)[:, None, None].expand(-1, 1, rows.shape[-1])
        chosen.append(rows.gather(1, drawn))
        to_drawn = (scaled - scaled.gather(1, drawn)).square().sum(-1) * seen
        distance = to_drawn if distance is None else torch.minimum(distance, to_drawn)
    of_all = [part.view(*layer.units[:-1], 1, rows.shape[-1]) for part in (mean, variance, counts.double())]
    return torch.cat(chosen, 1).view(*layer.units, rows.shape[-1]), of_all[0], of_all[1], of_all[2]


def observations(layer: Emission, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The data of each of g variables, `[g, n, d]` in float64, and the mask of what is observed."""
    data, known = layer.known(data, observed)
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
