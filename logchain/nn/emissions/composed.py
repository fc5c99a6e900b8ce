"""Emissions that are made of others: mixtures of units, and products of families."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

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


class Product(Emission):
    r"""Vectors of features of several families: `log p(y | unit) = sum_f log p_f(y_f | unit)`.

    Args:
        *families: emissions of the same units. Each takes its columns of the data, in order: one for an event (), d for
            an event (d,).

    `families`: a `ModuleList`, each of which is fitted separately. Call: data `[..., *U, d]`, whose entries may be
    missing where the families allow it, to `[..., *U, c]`, in nats; see `Emission`. There is no single `distribution`.

    Raises:
        TypeError: a family is not an `Emission`.
        ValueError: there is no family, or units differ.

    >>> from logchain.nn import Bernoulli, Gaussian
    >>> weather = Product(Gaussian(2), Bernoulli(2))  # temperature, rain
    >>> weather.families[0].set(torch.tensor([0.0, 3.0]), torch.tensor(1.0))
    >>> weather.families[1].set(torch.tensor([0.5, 0.1]))
    >>> weather(torch.tensor([[0.0, 1.0], [3.0, torch.nan]]))
    tensor([[-1.6121, -7.7215],
            [-5.4189, -0.9189]], grad_fn=<AddBackward0>)
    """

    partial = True
    families: Any
    # the families are fitted as separate parts
    statistics: Any = None

    def __init__(self, *families: Emission) -> None:
        for family in families:
            if not isinstance(family, Emission):
                raise TypeError(f"families: expected emissions, got {type(family).__name__}")
        if len({family.units for family in families}) != 1:
            raise ValueError(f"families: expected emissions of the same units, got {[part.units for part in families]}")
        self.sizes = [family.event[0] if family.event else 1 for family in families]
        super().__init__(families[0].units, (sum(self.sizes),))
        self.families = nn.ModuleList(families)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Distribution:
        """A Product has no single distribution."""
        raise NotImplementedError(
            "distribution: expected one of the families of the Product, whose distributions are separate"
        )

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for family in self.families:
            family.reset_parameters(generator)

    def start(self, data: Tensor, known: Tensor | None, generator: Generator | None, **covariates: Tensor) -> None:
        """Initialize all families, by clusters of whole vectors."""
        for family, part, mask in self.parts(data, known):
            family.initialize(part, mask, generator=generator)
        self.fit_clusters(data, known, generator)

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        total: Tensor = sum(family(part, mask) for family, part, mask in self.parts(*self.known(data, observed)))
        return total

    def fill(self, data: Tensor, known: Tensor) -> Tensor:
        return self.joined([family.fill(part, mask) for family, part, mask in self.parts(data, known)])

    def draw(self, states: Tensor, generator: Generator | None = None, **covariates: Tensor) -> Tensor:
        """One observation of each of the states `[..., *U, d]`, a floating tensor: see `Emission.draw`."""
        return self.joined([family.draw(states, generator).to(self.dtype) for family in self.families])

    def mode(self) -> tuple[Tensor, Tensor]:
        modes = [family.mode() for family in self.families]
        return self.joined([places.to(self.dtype) for places, _ in modes]), sum(logs for _, logs in modes)

    def parts(self, data: Tensor, known: Tensor | None) -> list[tuple[Any, Tensor, Any]]:
        """Each family with its columns `[..., *U]` or `[..., *U, d]` of data and of a mask."""
        masks = [None] * len(self.sizes) if known is None else self._columns(known)
        return list(zip(self.families, self._columns(data), masks, strict=True))

    def _columns(self, values: Tensor) -> list[Tensor]:
        """The columns of each family, `[..., *U]` or `[..., *U, d]`."""
        parts = zip(self.families, values.split(self.sizes, -1), strict=True)
        return [part if family.event else part[..., 0] for family, part in parts]

    def joined(self, columns: list[Tensor]) -> Tensor:
        """The vectors `[..., *U, d]` of the columns of all families."""
        parts = zip(self.families, columns, strict=True)
        return torch.cat([part if family.event else part[..., None] for family, part in parts], -1)
