"""Input layers whose likelihood is a product with sums of the data, and has its maximum in closed form."""

import math

import torch
from torch import Tensor

from .input_layer import InputLayer


class ExponentialFamily(InputLayer):
    """`log p(y | unit) = T(y) . eta(unit)`, one matrix product forward, one backward, and one to be fitted.

    It is computed in float64, where the terms may cancel, and rounded once. What is missing adds nothing to T. A
    subclass has `dtype`, `sufficient` for T, `natural` for eta and `maximise`.

    Cost: for f sufficient statistics f multiply-adds for each entry of the result, forward and backward, and a copy of
    it in float64; only the statistics are kept for the backward.
    """

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats; see `InputLayer.forward`."""
        features = self.sufficient(*self.known(data, observed))  # [..., *U, f]
        axes = len(self.units)
        lead, f, c = features.shape[:-axes], features.shape[-1], self.units[-1]
        rows = _by_group(features, lead, self.units)
        natural = self.natural().double().movedim(-1, -2).reshape(-1, f, c)
        products = (rows @ natural).transpose(0, 1)  # (n, groups, c)
        return products.to(self.dtype, memory_format=torch.contiguous_format).view(*lead, *self.units)

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`sum flow T(data)` over all but the units: `[*U, c, f]` in float64."""
        return sums(flow, self.sufficient(*self.known(data, observed)), self.units)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        raise NotImplementedError

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """T of data `[..., *U, *event]`: `[..., *U, f]` in float64, with 0 where nothing is known."""
        raise NotImplementedError

    def natural(self) -> Tensor:
        """Eta of all units: `[*U, c, f]`, finite."""
        raise NotImplementedError

    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Take the parameters of the largest expected log-likelihood; where nothing is expected, they stay.

        `step`: how far to go, in the mean parameters.
        """
        raise NotImplementedError


def sums(flow: Tensor, features: Tensor, units: tuple[int, ...]) -> Tensor:
    """`sum flow feature` over all but the units: `[..., *U, c]` and `[..., *U, f]` to `[*U, c, f]` in float64."""
    lead = flow.shape[: -len(units)]
    by_group = flow.double().reshape(-1, math.prod(units[:-1]), units[-1]).transpose(0, 1)  # (groups, n, c)
    products = _by_group(features, lead, units).mT @ by_group  # (groups, f, c)
    return products.mT.reshape(*units, features.shape[-1])


def _by_group(features: Tensor, lead: torch.Size, units: tuple[int, ...]) -> Tensor:
    """`[..., *U, f]`, where U may be 1, to `[groups, n, f]`."""
    features = features.expand(*lead, *units[:-1], features.shape[-1])
    return features.reshape(lead.numel(), math.prod(units[:-1]), features.shape[-1]).transpose(0, 1)
