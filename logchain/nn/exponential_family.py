"""Input layers whose likelihood has a maximum in closed form, from expected sufficient statistics."""

import math

from torch import Tensor

from .input_layer import InputLayer


class ExponentialFamily(InputLayer):
    """An input layer that expectation maximisation fits; a subclass adds `sufficient` and `maximise`."""

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`sum flow T(data)` over all but the units: `[*U, c, f]` in float64, for the sufficient statistics T."""
        data, known = self.known(data, observed)
        features = self.sufficient(data, known)  # [..., *U, f]
        axes = len(self.units)
        lead, size = flow.shape[:-axes], features.shape[-1]
        features = features.double().expand(*lead, *self.units[:-1], size)
        n, groups, c = lead.numel(), math.prod(self.units[:-1]), self.units[-1]
        by_group = flow.double().reshape(n, groups, c).permute(1, 2, 0)  # (groups, c, n)
        found = by_group @ features.reshape(n, groups, size).transpose(0, 1)  # (groups, c, f)
        return found.view(*self.units, size)

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """T of data `[..., *U, *event]`: `[..., *U, f]`, with 0 where nothing is known."""
        raise NotImplementedError

    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Take the parameters of the largest expected log-likelihood; where nothing is expected, they stay.

        `step`: how far to go, in the mean parameters.
        """
        raise NotImplementedError
