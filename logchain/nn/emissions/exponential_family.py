"""Exponential families, whose log-likelihood is a matrix product and has its maximum in closed form."""

import math

import torch
from torch import Tensor

from .input_layer import InputLayer


class ExponentialFamily(InputLayer):
    """An exponential family: `log p(y | unit) = T(y) . eta(unit)`, sufficient statistics times natural parameters.

    The sum is computed in float64, since terms may cancel, and rounded once. Where an observation is missing, T is 0. A
    subclass implements `sufficient` for T, `natural` for eta, and `maximise`.

    Cost: with f sufficient statistics, f multiply-adds for each entry of the result, forward and backward, and a copy
    of the result in float64; the statistics are kept for the backward pass.
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
        """`sum flow T(data)` over all axes but the units': `[*U, c, f]` in float64."""
        return sums(flow, self.sufficient(*self.known(data, observed)), self.units)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the log-densities: that of the parameters, float32 at least; a subclass has it."""
        raise NotImplementedError

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """T of data `[..., *U, *event]`: `[..., *U, f]` in float64, with 0 where nothing is observed."""
        raise NotImplementedError

    def natural(self) -> Tensor:
        """Eta of all units: `[*U, c, f]`; every entry is finite."""
        raise NotImplementedError

    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the parameters to those of the largest expected log-likelihood; units that are not used keep theirs.

        `step`: the part of the way to them, in the mean parameters.
        """
        raise NotImplementedError


def sums(flow: Tensor, features: Tensor, units: tuple[int, ...]) -> Tensor:
    """`sum flow features` `[*U, c, f]` in float64, of `[..., *U, c]` and `[..., *U, f]`, over all axes before `U`."""
    lead = flow.shape[: -len(units)]
    by_group = flow.double().reshape(-1, math.prod(units[:-1]), units[-1]).transpose(0, 1)  # (groups, n, c)
    products = _by_group(features, lead, units).mT @ by_group  # (groups, f, c)
    return products.mT.reshape(*units, features.shape[-1])


def moved(before: Tensor, target: Tensor, step: float, used: Tensor) -> Tensor:
    """Mean parameters after `step` of the way from those before to a target; units that are not `used` keep theirs."""
    return torch.where(used, torch.lerp(before, target, step), before)


def _by_group(features: Tensor, lead: torch.Size, units: tuple[int, ...]) -> Tensor:
    """Features `[..., *U, f]`, where axes U may have size 1, as `[groups, n, f]` with a group for each entry of U."""
    features = features.expand(*lead, *units[:-1], features.shape[-1])
    return features.reshape(lead.numel(), math.prod(units[:-1]), features.shape[-1]).transpose(0, 1)
