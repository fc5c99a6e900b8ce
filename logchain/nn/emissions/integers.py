"""Observations that are integers: categories, counts, and numbers of successes."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributions import constraints

from ..checks import check_count
from ..log_weights import LogWeights
from ..parameters import broadcast, first_draw
from ..priors import Dirichlet, Gamma
from .emission import Emission, Units
from .linear import linear_log_density, weighted_sums

# number of observations of one variable whose gradients are summed sequentially
_BLOCK = 4096


class Weighted(Emission):
    """An emission whose only parameters are probabilities, the `weights`, which are fitted as a separate part."""

    statistics: Any = None
    weights: LogWeights

    @property
    def probabilities(self) -> Tensor:
        """The probabilities, in the shape of the weights, without gradients."""
        weights: Tensor = self.weights()
        return weights.detach().exp()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        self.weights.reset_parameters(generator)


class Categorical(Weighted):
    r"""Categorical observations: `log p(k | unit)` is looked up in a table of log-probabilities.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_categories: K; data are integers from 0 to K-1, of any dtype.
        prior: of the probabilities `[*U, K, c]`, see `LogWeights`.
        generator: the source of randomness for the initial probabilities, uniform over the simplex.

    `weights`: `LogWeights` `[*U, K, c]`. Call: data `[..., *U]` to `[..., *U, c]`, in nats; see `Emission`.

    Raises:
        ValueError: a value is not a category (checked on a CPU), or shapes do not go together.

    Cost: one pass over the result forward, and two backward, which save nothing of its size. The table is copied once
    for every 4096 observations of a variable.

    >>> coins = Categorical(2, 2)
    >>> coins.weights.set(torch.tensor([[0.5, 0.9], [0.5, 0.1]]))
    >>> coins(torch.tensor([0, 1, 1]), observed=torch.tensor([True, True, False])).exp()
    tensor([[0.5000, 0.9000],
            [0.5000, 0.1000],
            [1.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self, units: Units, num_categories: int, *, prior: Dirichlet | None = None, generator: Generator | None = None
    ) -> None:
        check_count("num_categories", num_categories)
        super().__init__(units)
        self.num_values = num_categories
        self.support = constraints.integer_interval(0, num_categories - 1)
        self.expected = f"integers from 0 to {num_categories - 1}"
        shape = *self.units[:-1], num_categories, self.units[-1]
        self.weights = LogWeights(*shape, dim=-2, prior=prior, generator=generator)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.weights().mT[at], validate_args=False)

    def log_density(self, data: Tensor) -> Tensor:
        return look_up(self.weights(), data[..., 0].long())


def look_up(table: Tensor, values: Tensor) -> Tensor:
    """The entries `[..., *U, c]` of tables `[*U, K, c]` for values int64 `[..., *U]`."""
    lead, (size, c) = table.shape[:-2], table.shape[-2:]
    rows = values + torch.arange(lead.numel(), device=values.device).view(lead) * size  # (..., *U)
    flat = rows.reshape(-1, lead.numel())
    copies = -(-len(flat) // _BLOCK)
    if copies > 1:
        # each block has a copy of the table, so that small gradients are not rounded away in the sum over all blocks
        flat = flat + torch.arange(len(flat), device=values.device)[:, None] // _BLOCK * (lead.numel() * size)
        table = table.expand(copies, *table.shape)
    # the backward pass of index_select is faster than that of an embedding
    return table.reshape(-1, c).index_select(0, flat.reshape(-1)).view(*rows.shape, c)


class Poisson(Emission):
    r"""Poisson observations: `log p(k | unit) = k log rate - rate - log k!`.

    Args:
        units: `[*U, c]`, or `c` alone.
        prior: of the rates `[*U, c]`; the M step is `rate = (total + concentration - 1) / (observed + prior.rate)`.
        generator: the source of randomness for the initial rates, whose logarithms are standard normal.

    `log_rates`: parameter `[*U, c]`; -inf is a rate of 0, with which only the count 0 is possible. Call: data
    `[..., *U]`, non-negative integers of any dtype, to `[..., *U, c]`, in nats; see `Emission`.

    Raises:
        ValueError: a value is not a count (checked on a CPU), or shapes do not go together.

    Cost: 3 multiply-adds for each entry of the result, in float64.

    >>> quakes = Poisson(2)
    >>> quakes.set(torch.tensor([0.0, 20.0]))
    >>> quakes(torch.tensor([0, 19]))
    tensor([[  0.0000, -20.0000],
            [    -inf,  -2.4210]], grad_fn=<ToCopyBackward0>)
    """

    support, expected = constraints.nonnegative_integer, "counts"

    def __init__(self, units: Units, *, prior: Gamma | None = None, generator: Generator | None = None) -> None:
        super().__init__(units)
        for name, value in () if prior is None else prior.named_buffers():
            broadcast(f"prior.{name}", value, torch.Size(self.units))
        self.prior = prior
        self.log_rates = nn.Parameter(torch.empty(self.units))
        first_draw(self, generator)

    @property
    def rates(self) -> Tensor:
        """The rates `[*U, c]`, without gradients."""
        return self.log_rates.detach().double().exp().to(self.dtype)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Poisson:
        return torch.distributions.Poisson(self.log_rates[at].double().exp(), validate_args=False)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the logarithms of the rates again, standard normal."""
        self.log_rates.normal_(generator=generator)

    @torch.no_grad()
    def set(self, rates: Tensor) -> None:
        """Set the rates, `[*U, c]` or what broadcasts to it.

        Raises:
            ValueError: a rate is negative or not finite.
        """
        rates = broadcast("rates", rates, self.log_rates.shape)
        valid = rates.isfinite() & (rates >= 0)
        if not valid.all():
            raise ValueError(f"rates: expected finite, non-negative numbers, got {rates[~valid][0]:g}")
        self.log_rates.copy_(rates.log())

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        log_rates = self.log_rates.double()
        natural = torch.stack((-log_rates.exp(), log_rates, -torch.ones_like(log_rates)), -1)
        return linear_log_density(self._features(data, observed), natural, self.dtype)

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        return weighted_sums(flow, self._features(data, observed), self.units)

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the rates to the means of the data, weighted by the flow, with the prior: see `Emission.maximize`."""
        observed, total, _ = statistics.unbind(-1)
        if self.prior is not None:
            total, observed = total + self.prior.concentration - 1, observed + self.prior.rate
        before = self.log_rates.double().exp()
        self.log_rates.copy_(torch.where(observed > 0, torch.lerp(before, total / observed, step), before).log())

    def log_prior(self) -> Tensor:
        return super().log_prior() if self.prior is None else self.prior.log_density(self.log_rates)

    def _features(self, data: Tensor, observed: Tensor | None) -> Tensor:
        """The statistics 1, k and `log k!` `[..., *U, 3]` of counts k, 0 where nothing is observed."""
        data, known = self.known(data, observed)
        ones = torch.ones_like(data, dtype=torch.float64) if known is None else known.double()
        counts = data.double() * ones
        return torch.stack((ones, counts, (counts + 1).lgamma()), -1)


class Binomial(Weighted):
    r"""Binomial observations: `log p(k | unit) = log choose(total, k) + k log p + (total - k) log(1 - p)`.

    Args:
        units: `[*U, c]`, or `c` alone.
        total_count: the number of trials; data are integers from 0 to `total_count`, of any dtype.
        prior: of the probabilities of success and failure `[*U, c, 2]`, see `LogWeights`.
        generator: the source of randomness for the initial probabilities, uniform in 0..1.

    `weights`: `LogWeights` `[*U, c, 2]` of success and failure. Call: data `[..., *U]` to `[..., *U, c]`, in nats,
    looked up in a table `[*U, total_count + 1, c]` made in float64; see `Emission`.

    Raises:
        ValueError: a value is out of range (checked on a CPU), or shapes do not go together.

    >>> pixels = Binomial(2, 16)
    >>> pixels.set(torch.tensor([0.5, 0.0]))
    >>> pixels(torch.tensor([0, 8]))
    tensor([[-11.0904,   0.0000],
            [ -1.6277,     -inf]], grad_fn=<ViewBackward0>)
    """

    def __init__(
        self, units: Units, total_count: int, *, prior: Dirichlet | None = None, generator: Generator | None = None
    ) -> None:
        check_count("total_count", total_count, least=0)
        super().__init__(units)
        self.total_count, self.num_values = total_count, total_count + 1
        self.support = constraints.integer_interval(0, total_count)
        self.expected = f"integers from 0 to {total_count}"
        self.weights = LogWeights(*self.units, 2, prior=prior, generator=generator)

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of success `[*U, c]`, without gradients."""
        return super().probabilities[..., 0]

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Binomial:
        probabilities = self.weights().double()[..., 0].exp()[at]
        return torch.distributions.Binomial(self.total_count, probabilities, validate_args=False)

    def set(self, probabilities: Tensor) -> None:
        """Set the probabilities of success, `[*U, c]` or what broadcasts to it.

        Raises:
            ValueError: a number is not from 0 to 1.
        """
        probabilities = broadcast("probabilities", probabilities, torch.Size(self.units))
        valid = (probabilities >= 0) & (probabilities <= 1)
        if not valid.all():
            raise ValueError(f"probabilities: expected numbers from 0 to 1, got {probabilities[~valid][0]:g}")
        self.weights.set(torch.stack((probabilities, 1 - probabilities), -1))

    def log_density(self, data: Tensor) -> Tensor:
        values = torch.arange(self.total_count + 1, dtype=torch.float64, device=data.device)
        # the logarithm of choose(total, k), exactly 0 for k = 0
        ways = -(values + 1).lgamma() - (values.flip(0) + 1).lgamma()
        trials = torch.stack((values, values.flip(0)), -1).view(-1, *(1,) * (len(self.units) - 1), 2)
        logs = linear_log_density(trials, self.weights(), self.dtype).movedim(0, -2)  # [*U, K, c]
        return look_up(logs + (ways - ways[0]).to(logs.dtype)[:, None], data[..., 0].long())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, total_count={self.total_count}"


class Bernoulli(Binomial):
    r"""Bernoulli observations: `log p(1 | unit) = log p`, `log p(0 | unit) = log(1 - p)`.

    Args:
        units: `[*U, c]`, or `c` alone.
        prior: of the probabilities of 1 and 0 `[*U, c, 2]`, see `LogWeights`.
        generator: the source of randomness for the initial probabilities, uniform in 0..1.

    `weights`: `LogWeights` `[*U, c, 2]` of 1 and 0. Call: data `[..., *U]`, 0 or 1 of any dtype, to `[..., *U, c]`, in
    nats; see `Emission`.

    Raises:
        ValueError: a value is neither 0 nor 1 (checked on a CPU), or shapes do not go together.

    >>> switches = Bernoulli(2)
    >>> switches.set(torch.tensor([0.25, 1.0]))
    >>> switches(torch.tensor([True, False])).exp()
    tensor([[0.2500, 1.0000],
            [0.7500, 0.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(self, units: Units, *, prior: Dirichlet | None = None, generator: Generator | None = None) -> None:
        super().__init__(units, 1, prior=prior, generator=generator)


class Multinomial(Weighted):
    r"""Counts of K categories: `log p(k | unit) = log n! + sum_j (k_j log p_j - log k_j!)` of vectors of sum n.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_categories: K; data are vectors of K counts, of any dtype.
        total_count: n for draws. Sums of the data may be others.
        prior: of the probabilities `[*U, c, K]`, see `LogWeights`.
        generator: the source of randomness for the initial probabilities, uniform over the simplex.

    `weights`: `LogWeights` `[*U, c, K]`. Call: data `[..., *U, K]` to `[..., *U, c]`, in nats; see `Emission`.

    Raises:
        ValueError: a value is not a count (checked on a CPU), or shapes do not go together.

    Cost: K multiply-adds for each entry of the result, in float64.

    >>> votes = Multinomial(2, 3, total_count=5)
    >>> votes.weights.set(torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]]))
    >>> votes(torch.tensor([[1, 0, 1], [2, 0, 0]])).exp()
    tensor([[0.2400, 0.0000],
            [0.0400, 0.2500]], grad_fn=<ExpBackward0>)
    """

    support, expected = constraints.independent(constraints.nonnegative_integer, 1), "counts"

    def __init__(
        self,
        units: Units,
        num_categories: int,
        total_count: int = 1,
        *,
        prior: Dirichlet | None = None,
        generator: Generator | None = None,
    ) -> None:
        check_count("total_count", total_count)
        check_count("num_categories", num_categories)
        super().__init__(units, (num_categories,))
        self.total_count = total_count
        self.weights = LogWeights(*self.units, num_categories, prior=prior, generator=generator)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Multinomial:
        """The distribution, which has no mode: see `Emission.distribution`."""
        return torch.distributions.Multinomial(self.total_count, logits=self.weights()[at], validate_args=False)

    def log_density(self, data: Tensor) -> Tensor:
        counts = data[..., 0, :].double()
        ways = (counts.sum(-1) + 1).lgamma() - (counts + 1).lgamma().sum(-1)
        return (linear_log_density(counts, self.weights(), torch.float64) + ways[..., None]).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_categories={self.event[0]}, total_count={self.total_count}"
