"""Where hidden units may begin: at observations that lie apart."""

import torch
from torch import Tensor

from .input_layer import InputLayer


def seeds(
    layer: InputLayer, data: Tensor, observed: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One observation for each unit, the next one drawn in proportion to its squared distance from those before.

    Returns:
        The observations `[*U, c, d]`, and of all data the mean, the (biased) variance and the count `[*U, 1, d]`, in
        float64, for events of d entries (1 for scalars). Entries that are missing stand at the mean.

    Raises:
        ValueError: of some variable nothing is observed.

    Cost: c passes over the data.

    Source: D. Arthur and S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007.
    """
    rows, known = observations(layer, data, observed)  # (g, n, d)
    counts = known.sum(1, keepdim=True)
    if not bool((counts > 0).all()):
        raise ValueError("data: expected at least one observation of every variable and feature, got none of some")
    # first about any observation: the squares of large numbers would leave nothing of their differences
    first = rows.gather(1, known.long().argmax(1, keepdim=True))
    mean = first + torch.where(known, rows - first, 0.0).sum(1, keepdim=True) / counts
    rows = torch.where(known, rows, mean)
    variance = (rows - mean).square().sum(1, keepdim=True) / counts
    # features of different scales count alike; one that never changes has no scale
    scaled = (rows - mean) / torch.where(variance > 0, variance, 1.0).sqrt()
    seen = known.any(-1).double()  # (g, n)
    chosen, distance = [], None
    for _ in range(layer.units[-1]):
        weights = seen if distance is None else torch.where((distance.sum(-1) > 0)[:, None], distance, seen)
        at = _draw(weights, generator)[:, None, None].expand(-1, 1, rows.shape[-1])
        chosen.append(rows.gather(1, at))
        apart = (scaled - scaled.gather(1, at)).square().sum(-1) * seen
        distance = apart if distance is None else torch.minimum(distance, apart)
    of_all = [part.view(*layer.units[:-1], 1, rows.shape[-1]) for part in (mean, variance, counts.double())]
    return torch.cat(chosen, 1).view(*layer.units, rows.shape[-1]), of_all[0], of_all[1], of_all[2]


def observations(layer: InputLayer, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
    """All data of each variable `[g, n, d]` in float64, and which of it is known."""
    data, known = layer.known(data, observed)
    known = torch.ones_like(data, dtype=torch.bool) if known is None else known
    lead, axes = layer.units[:-1], len(layer.units) - 1 + len(layer.event)
    shape = (*data.shape[: data.dim() - axes], *lead, *layer.event)
    size = layer.event[0] if layer.event else 1
    groups = torch.Size(lead).numel()
    data, known = (part.expand(shape).reshape(-1, groups, size).transpose(0, 1) for part in (data, known))
    return data.double(), known


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index for each row of weights; `multinomial` would take 2^24 of them at most."""
    sums = weights.cumsum(-1)
    level = torch.rand(len(weights), 1, dtype=weights.dtype, device=weights.device, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, level, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
