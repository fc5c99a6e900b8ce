"""Exponential families, whose log-likelihood is a matrix product and has its maximum in closed form."""

import math

import torch
from torch import Tensor

from ...tensors import is_readable
from .emission import Emission


class ExponentialFamily(Emission):
    """An exponential family: `log p(y | unit) = T(y) . eta(unit)`, sufficient statistics times natural parameters.

    The sum is computed in float64, since terms may cancel, and rounded once. Where an observation is missing, T is 0. A
    subclass implements `sufficient` for T, `natural` for eta, and `maximize`.

    Cost: with f sufficient statistics, f multiply-adds for each entry of the result, forward and backward, and a copy
    of the result in float64; the statistics are saved for the backward pass.
    """

    # whether no natural parameter is -inf
    always_possible = False

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats: see `Emission.forward`."""
        features = self.sufficient(*self.known(data, observed))  # [..., *U, f]
        lead, f, c = features.shape[: -len(self.units)], features.shape[-1], self.units[-1]
        rows = _by_group(features, lead, self.units)
        natural = self.natural().double().movedim(-1, -2).reshape(-1, f, c)
        products = rows @ natural if self.always_possible else _products_with_zeros(rows, natural)
        products = products.transpose(0, 1)  # (n, groups, c)
        return products.to(self.dtype, memory_format=torch.contiguous_format).view(*lead, *self.units)

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """The expected sufficient statistics, `sum flow T(data)` `[*U, c, f]` in float64, over all axes before `U`.

        The flow `[..., *U, c]` is how often each unit is expected to have been used: the gradient of a log-likelihood
        with respect to `forward(data, observed)`.
        """
        lead = flow.shape[: -len(self.units)]
        features = self.sufficient(*self.known(data, observed))
        by_group = flow.double().reshape(-1, math.prod(self.units[:-1]), self.units[-1]).transpose(0, 1)
        products = _by_group(features, lead, self.units).mT @ by_group  # (groups, f, c)
        return products.mT.reshape(*self.units, features.shape[-1])

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """T `[..., *U, f]` of data `[..., *U, *event]`, in float64, 0 where the mask `known` is False.

        T is not negative where eta can be -inf.
        """
        raise NotImplementedError

    def natural(self) -> Tensor:
        """Eta, the natural parameters `[*U, c, f]` of all units."""
        raise NotImplementedError

    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the parameters to those of the largest expected log-likelihood; units that are not used keep theirs.

        The statistics are float64 `[*U, c, f]`; `step` is the part of the way to them, in the mean parameters.
        """
        raise NotImplementedError


def moved(before: Tensor, target: Tensor, step: float, used: Tensor) -> Tensor:
    """Mean parameters after `step` of the way from those before to a target; units that are not `used` keep theirs."""
    return torch.where(used, torch.lerp(before, target, step), before)


def _products_with_zeros(rows: Tensor, natural: Tensor) -> Tensor:
    """`rows @ natural`, where natural parameters may be -inf: times 0 they are 0."""
    never = natural == -torch.inf
    products = rows @ natural.masked_fill(never, 0.0)
    if is_readable(never) and not bool(never.any()):
        return products
    return products.masked_fill(rows @ never.double() > 0, -torch.inf)


def _by_group(features: Tensor, lead: torch.Size, units: tuple[int, ...]) -> Tensor:
    """Features `[..., *U, f]`, where axes U may have size 1, as `[groups, n, f]` with a group for each entry of U."""
    features = features.expand(*lead, *units[:-1], features.shape[-1])
    return features.reshape(math.prod(lead), math.prod(units[:-1]), features.shape[-1]).transpose(0, 1)
