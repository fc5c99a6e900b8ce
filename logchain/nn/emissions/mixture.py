"""Mixtures of the units of any emission, with weights for each hidden unit."""

from typing import Any

import torch
from torch import Generator, Tensor

from ...transitions import LOG
from ..log_weights import LogWeights
from ..priors import Dirichlet
from .emission import Emission


class Mixture(Emission):
    r"""Mixtures of k components: `log p(y | unit) = logsumexp_k (log weight[unit, k] + log p(y | unit, k))`.

    Args:
        layer: the emission of the components, of units `[*U, c, k]`; the mixture has units `[*U, c]`.
        prior: of the weights `[*U, c, k]`, see `LogWeights`.
        generator: the source of randomness for the initial weights, uniform over the simplex.

    `weights`: `LogWeights` `[*U, c, k]`. Call: data `[..., *U, *event]` to `[..., *U, c]`, in nats; see `Emission`.

    Cost: that of the layer, and four passes over its result.

    >>> from logchain.nn import Gaussian
    >>> halves = Mixture(Gaussian((1, 2)))
    >>> halves.layer.set(torch.tensor([-2.0, 2.0]), torch.tensor(1.0))
    >>> halves.weights.set(torch.tensor([0.5, 0.5]))
    >>> halves(torch.tensor([2.0, torch.nan]))
    tensor([[-1.6118],
            [ 0.0000]], grad_fn=<WhereBackward0>)
    """

    # layer and weights are fitted as separate parts
    statistics: Any = None

    def __init__(self, layer: Emission, *, prior: Dirichlet | None = None, generator: Generator | None = None) -> None:
        if not isinstance(layer, Emission):
            raise TypeError(f"layer: expected an Emission, got {type(layer).__name__}")
        if len(layer.units) < 2:
            raise ValueError(f"layer: expected units (..., c, k), got {layer.units}")
        super().__init__(layer.units[:-1], layer.event)
        self.layer, self.partial, self.num_values = layer, layer.partial, layer.num_values
        self.weights = LogWeights(*layer.units, prior=prior, generator=generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        self.layer.reset_parameters(generator)
        self.weights.reset_parameters(generator)

    def start(self, data: Tensor, known: Tensor | None, generator: Generator | None, **covariates: Tensor) -> None:
        """Initialize the components of each unit as their layer does, and draw the weights again."""
        self.layer.initialize(*self._of_layer(data, known), generator=generator)
        self.weights.reset_parameters(generator)

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        data, known = self.known(data, observed)
        log_density = LOG.sum(self.layer(*self._of_layer(data, known)) + self.weights(), -1)
        if known is None:
            return log_density
        # exactly 0 where nothing is observed: the weights sum to 1 but for rounding
        return torch.where((known.any(-1) if self.event else known)[..., None], log_density, 0.0)

    def fill(self, data: Tensor, known: Tensor) -> Tensor:
        return self.layer.fill(data, known)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.MixtureSameFamily:
        weights = torch.distributions.Categorical(logits=self.weights()[at], validate_args=False)
        return torch.distributions.MixtureSameFamily(weights, self.layer.distribution(at), validate_args=False)

    @torch.no_grad()
    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable of the components' modes (the mode of a mixture has no formula), and its log-density."""
        places = self.layer.mode()[0].movedim(len(self.units), 0)  # (k, *U, c, *event)
        best = LOG.sum(self.layer(places) + self.weights(), -1).max(0)  # of (k, *U, c)
        at = best.indices.view(1, *self.units, *(1,) * len(self.event))
        return places.take_along_dim(at, 0)[0], best.values

    def _of_layer(self, data: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Data and mask with an axis of size 1 for the mixture's units, as the components' layer takes them."""
        at = -1 - len(self.event)
        return data.unsqueeze(at), None if known is None else known.unsqueeze(at)
