"""Observations that are counts: Poisson, binomial and Bernoulli, with a rate or a probability for each hidden unit."""

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from ..checks import check_count, check_prior
from ..parameters import broadcast
from .categorical import look_up
from .emission import Emission
from .exponential_family import ExponentialFamily, moved
from .starts import observations, seeds


class Poisson(ExponentialFamily):
    r"""Poisson observations: `log p(k | unit) = k log rate - rate - log k!`.

    Args:
        units: `[*U, c]`, or `c` alone.
        prior_total, prior_count: added by expectation maximization to a unit's sum of counts and to its number of
            observations, a gamma prior: `rate = (total + prior_total) / (observed + prior_count)`. Numbers, or tensors
            that broadcast to the units.
        generator: the source of randomness for the initial rates, whose logarithms are standard normal.

    `log_rates`: parameter `[*U, c]`; -inf is a rate of 0, with which only the count 0 is possible. Call: data
    `[..., *U]`, non-negative integers of any dtype, to `[..., *U, c]`, in nats; see `Emission`.

    Raises:
        TypeError: a prior is neither a number nor a tensor.
        ValueError: a value is no count (checked on a CPU), a prior is negative, or shapes do not go together.

    Cost: 3 multiply-adds for each entry of the result, in float64.

    >>> quakes = Poisson(2)
    >>> quakes.set(torch.tensor([0.0, 20.0]))
    >>> quakes(torch.tensor([0, 19]))
    tensor([[  0.0000, -20.0000],
            [    -inf,  -2.4210]], grad_fn=<ViewBackward0>)
    """

    support, expected = constraints.nonnegative_integer, "counts"

    def __init__(
        self,
        units: int | tuple[int, ...],
        *,
        prior_total: float | Tensor = 0.0,
        prior_count: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(units)
        check_prior("prior_total", prior_total, self.units)
        check_prior("prior_count", prior_count, self.units)
        self.prior_total, self.prior_count = prior_total, prior_count
        self.log_rates = torch.nn.Parameter(torch.empty(self.units))
        self.reset_parameters(generator)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Poisson:
        """The distribution in float64: see `Emission.distribution`."""
        return torch.distributions.Poisson(self.log_rates[at].double().exp(), validate_args=False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the logarithms of the rates again, standard normal: see `Emission.reset_parameters`."""
        with torch.no_grad():
            self.log_rates.normal_(generator=generator)

    @torch.no_grad()
    def set(self, rates: Tensor) -> None:
        """Set the rates.

        Args:
            rates: `[*U, c]` or what broadcasts to it.

        Raises:
            ValueError: a rate is negative or not finite.
        """
        rates = broadcast("rates", rates, self.log_rates.shape)
        if not (rates.isfinite() & (rates >= 0)).all():
            raise ValueError("rates: expected finite, non-negative numbers")
        self.log_rates.copy_(rates.log())

    @torch.no_grad()
    def initialize(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the rates half way between the mean of the data and observations far from each other, with noise.

        See `Emission.initialize`.
        """
        chosen, mean, *_ = seeds(self, data, observed, generator)
        log_rates = ((chosen + mean) / 2)[..., 0].log()
        log_rates += torch.empty_like(log_rates).normal_(0, 0.05, generator=generator)
        self.log_rates.copy_(torch.where(log_rates.isfinite(), log_rates, self.log_rates.double()))

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """The statistics 1, k and `log k!` of each count k: see `ExponentialFamily.sufficient`."""
        data = data.double()
        ones = torch.ones_like(data) if known is None else known.double()
        return torch.stack((ones, data * ones, (data * ones + 1).lgamma()), -1)

    def natural(self) -> Tensor:
        """The natural parameters `-rate`, `log rate` and -1: see `ExponentialFamily.natural`."""
        log_rates = self.log_rates.double()
        return torch.stack((-log_rates.exp(), log_rates, -torch.ones_like(log_rates)), -1)

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the rates to the means of the data, weighted by the flow: see `ExponentialFamily.maximize`."""
        counts, sums, _ = statistics.unbind(-1)
        total = sums + torch.as_tensor(self.prior_total).to(sums)
        observed = counts + torch.as_tensor(self.prior_count).to(counts)
        before = self.log_rates.double().exp()
        self.log_rates.copy_(moved(before, total / observed, step, observed > 0).log())


class Binomial(ExponentialFamily):
    r"""Binomial observations: `log p(k | unit) = log choose(total, k) + k log p + (total - k) log(1 - p)`.

    Args:
        units: `[*U, c]`, or `c` alone.
        total_count: the number of trials; data are integers from 0 to `total_count`, of any dtype.
        generator: the source of randomness for the initial probabilities, uniform in 0..1.

    `logits`: parameter `[*U, c]`, `log p / (1 - p)`; -inf and inf are probabilities 0 and 1. Call: data `[..., *U]` to
    `[..., *U, c]`, in nats, looked up in a table `[*U, total_count + 1, c]` made in float64; see `Emission`.

    Raises:
        ValueError: a value is out of range (checked on a CPU), or shapes do not go together.

    >>> pixels = Binomial(2, 16)
    >>> pixels.set(torch.tensor([0.5, 0.0]))
    >>> pixels(torch.tensor([0, 8]))
    tensor([[-11.0904,   0.0000],
            [ -1.6277,     -inf]], grad_fn=<ViewBackward0>)
    """

    def __init__(
        self, units: int | tuple[int, ...], total_count: int, *, generator: torch.Generator | None = None
    ) -> None:
        check_count("total_count", total_count, least=0)
        super().__init__(units)
        self.total_count, self.num_values = total_count, total_count + 1
        self.support = constraints.integer_interval(0, total_count)
        self.expected = f"integers from 0 to {total_count}"
        self.logits = torch.nn.Parameter(torch.empty(self.units))
        self.reset_parameters(generator)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Binomial:
        """The distribution in float64: see `Emission.distribution`."""
        probabilities = self.logits[at].double().sigmoid()
        return torch.distributions.Binomial(self.total_count, probabilities, validate_args=False)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the probabilities again, uniformly in 0..1: see `Emission.reset_parameters`."""
        noise = self.logits.new_empty(self.units, dtype=torch.float64)
        # uniform probabilities are logistic logits; the ends of the interval are left out
        self.logits.copy_(noise.uniform_(1e-6, 1 - 1e-6, generator=generator).logit())

    @torch.no_grad()
    def set(self, probabilities: Tensor) -> None:
        """Set the probabilities of success.

        Args:
            probabilities: `[*U, c]` or what broadcasts to it, from 0 to 1.

        Raises:
            ValueError: a number is out of range.
        """
        probabilities = broadcast("probabilities", probabilities, self.logits.shape)
        if not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise ValueError("probabilities: expected numbers from 0 to 1")
        self.logits.copy_(probabilities.logit())

    @torch.no_grad()
    def initialize(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the logits to that of the share of successes, half a success and a failure added, and normal noise.

        See `Emission.initialize`.
        """
        rows, known = observations(self, data, observed)  # (g, n, 1)
        successes = torch.where(known, rows, 0).sum((1, 2)) + 0.5
        trials = known.sum((1, 2)) * self.total_count + 1
        noise = torch.empty_like(self.logits, dtype=torch.float64).normal_(generator=generator)
        self.logits.copy_((successes / trials).logit().view(*self.units[:-1], 1) + noise)

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats: see `Emission.forward`."""
        return Emission.forward(self, data, observed)

    def log_density(self, data: Tensor) -> Tensor:
        """The log-probabilities of the data, looked up in those of all values: see `Emission.log_density`."""
        values = torch.arange(self.total_count + 1, device=data.device)
        logs = super().forward(values.view(-1, *(1,) * (len(self.units) - 1))).movedim(0, -2)  # [*U, K, c]
        ways = -(values.double() + 1).lgamma()
        # the logarithm of choose(total, k), exactly 0 for k = 0
        ways = (ways + ways.flip(0)) - (ways + ways.flip(0))[0]
        return look_up(logs + ways.to(logs.dtype)[:, None], data[..., 0].long())

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """Successes and failures: see `ExponentialFamily.sufficient`."""
        hits = data.double()
        features = torch.stack((hits, self.total_count - hits), -1)
        return features if known is None else features.masked_fill(~known[..., None], 0.0)

    def natural(self) -> Tensor:
        """The natural parameters `log p` and `log(1 - p)`: see `ExponentialFamily.natural`."""
        logits = self.logits.double()
        return torch.stack((logsigmoid(logits), logsigmoid(-logits)), -1)

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the probabilities to the shares of expected successes: see `ExponentialFamily.maximize`."""
        trials = statistics.sum(-1, keepdim=True)
        before = torch.stack((self.logits.double(), -self.logits.double()), -1).sigmoid()
        hits, misses = moved(before, statistics / trials, step, trials > 0).unbind(-1)
        self.logits.copy_(hits.log() - misses.log())

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return f"{super().extra_repr()}, total_count={self.total_count}"


class Bernoulli(Binomial):
    r"""Bernoulli observations: `log p(1 | unit) = log p`, `log p(0 | unit) = log(1 - p)`.

    Args:
        units: `[*U, c]`, or `c` alone.
        generator: the source of randomness for the initial probabilities, uniform in 0..1.

    `logits`: parameter `[*U, c]`, `log p / (1 - p)`; -inf and inf are probabilities 0 and 1. Call: data `[..., *U]`,
    0 or 1 of any dtype, to `[..., *U, c]`, in nats; see `Emission`.

    Raises:
        ValueError: a value is neither 0 nor 1 (checked on a CPU), or shapes do not go together.

    >>> switches = Bernoulli(2)
    >>> switches.set(torch.tensor([0.25, 1.0]))
    >>> switches(torch.tensor([True, False])).exp()
    tensor([[0.2500, 1.0000],
            [0.7500, 0.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(self, units: int | tuple[int, ...], *, generator: torch.Generator | None = None) -> None:
        super().__init__(units, 1, generator=generator)
