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

    >>> from logchain.nn import Poisson
    >>> quakes, data = Poisson(2), torch.tensor([2, 5])
    >>> log_density = quakes.sufficient(data, None) @ quakes.natural().mT  # [n, f] by [f, c]
    >>> torch.allclose(log_density.float(), quakes(data))
    True
    >>> flow = torch.tensor([[0.5, 0.5], [0.5, 0.5]])  # each observation belongs to either unit by half
    >>> quakes.maximise(quakes.statistics(flow, data))
    >>> quakes.mode()[0]  # the rate of both is 3.5
    tensor([3, 3])
    """

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats: see `InputLayer.forward`."""
        features = self.sufficient(*self.known(data, observed))  # [..., *U, f]
        axes = len(self.units)
        lead, f, c = features.shape[:-axes], features.shape[-1], self.units[-1]
        rows = _by_group(features, lead, self.units)
        natural = self.natural().double().movedim(-1, -2).reshape(-1, f, c)
        products = (rows @ natural).transpose(0, 1)  # (n, groups, c)
        return products.to(self.dtype, memory_format=torch.contiguous_format).view(*lead, *self.units)

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """The expected sufficient statistics, `sum flow T(data)` over all axes but the units'.

        Args:
            flow: how often each unit is expected to have been used, `[..., *U, c]`: the gradient of a log-likelihood
                with respect to `forward(data, observed)`.
            data: as in `InputLayer.forward`.
            observed: as in `InputLayer.forward`.

        Returns:
            float64 `[*U, c, f]`.
        """
        return sums(flow, self.sufficient(*self.known(data, observed)), self.units)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the log-densities: that of the parameters, float32 at least; a subclass has it."""
        raise NotImplementedError

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """T, the sufficient statistics of data.

        Args:
            data: `[..., *U, *event]`.
            known: bool mask of the same shape, None if everything is observed.

        Returns:
            float64 `[..., *U, f]`, 0 where nothing is observed.
        """
        raise NotImplementedError

    def natural(self) -> Tensor:
        """Eta, the natural parameters of all units.

        Returns:
            `[*U, c, f]`; every entry is finite.
        """
        raise NotImplementedError

    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the parameters to those of the largest expected log-likelihood; units that are not used keep theirs.

        Args:
            statistics: expected sufficient statistics, float64 `[*U, c, f]`.
            step: the part of the way to them, in the mean parameters.
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
