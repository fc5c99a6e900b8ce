"""Poisson observations, with a rate for each hidden unit."""

import torch
from torch import Tensor

from ...tensors import at_hand
from ..checks import check_prior
from ..parameters import arithmetic, broadcast
from .exponential_family import ExponentialFamily, moved
from .starts import seeds


class Poisson(ExponentialFamily):
    r"""Poisson observations: `log p(k | unit) = k log rate - rate - log k!`.

    Args:
        units: `[*U, c]`, or `c` alone.
        prior_total, prior_count: added by expectation maximisation to a unit's sum of counts and to its number of
            observations, a gamma prior: `rate = (total + prior_total) / (observed + prior_count)`. Numbers, or tensors
            that broadcast to the units.
        generator: the source of randomness for the initial rates, whose logarithms are standard normal.

    `log_rates`: parameter `[*U, c]`; -inf is a rate of 0, with which only the count 0 is possible. Call: data
    `[..., *U]`, non-negative integers of any dtype, to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        TypeError: a prior is neither a number nor a tensor.
        ValueError: a value is no count (checked on a CPU), a prior is negative, or shapes do not go together.

    Cost: that of `ExponentialFamily` with 3 statistics.

    >>> quakes = Poisson(2)
    >>> quakes.set(torch.tensor([0.0, 20.0]))
    >>> quakes(torch.tensor([0, 19]))
    tensor([[  0.0000, -20.0000],
            [    -inf,  -2.4210]], grad_fn=<MaskedFillBackward0>)
    """

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

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the logarithms of the rates anew, standard normal: see `InputLayer.reset_parameters`."""
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
    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the rates half way between the mean of the data and observations far from each other, with noise.

        See `InputLayer.initialise`.
        """
        chosen, mean, *_ = seeds(self, data, observed, generator)
        rates = (chosen + mean) / 2  # (*U, c, 1)
        log_rates = rates[..., 0].log() + torch.empty_like(rates[..., 0]).normal_(0, 0.05, generator=generator)
        self.log_rates.copy_(torch.where(log_rates.isfinite(), log_rates, self.log_rates.double()))

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats: see `InputLayer.forward`."""
        log_density = super().forward(data, observed)
        never = self.log_rates == -torch.inf
        if at_hand(never) and not bool(never.any()):
            return log_density
        positive = self.known(data, observed)[0] > 0
        return log_density.masked_fill(positive[..., None] & never, -torch.inf)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the log-densities: that of the parameters, float32 at least."""
        return arithmetic(self.log_rates).dtype

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """The statistics 1, k and `log k!` of each count k, `[..., *U, 3]`: see `ExponentialFamily.sufficient`."""
        if at_hand(data):
            wrong = (data < 0) | (data.frac() != 0) if data.is_floating_point() else data < 0
            if bool(wrong.any()):
                raise ValueError(f"data: expected counts, got {data[wrong][0].item():g}")
        data = data.double()
        data = data if known is None else data.masked_fill(~known, 0.0)
        return torch.stack((torch.ones_like(data) if known is None else known.double(), data, (data + 1).lgamma()), -1)

    def natural(self) -> Tensor:
        """The natural parameters `-rate`, `log rate` (0 for a rate of 0, which `forward` corrects) and -1.

        See `ExponentialFamily.natural`.
        """
        log_rates = self.log_rates.double()
        finite = log_rates.masked_fill(log_rates == -torch.inf, 0.0)
        return torch.stack((-log_rates.exp(), finite, -torch.ones_like(finite)), -1)

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One observation of each given state, int64: see `InputLayer.draw`."""
        rates = self.of_states(self.log_rates.detach(), states).double().exp()
        return torch.poisson(rates, generator=generator).long()

    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable count, the lower of two equals, and its log-probability: see `InputLayer.mode`."""
        log_rates = self.log_rates.detach().double()
        counts = (log_rates.exp().ceil() - 1).relu()
        log_density = torch.where(counts > 0, counts * log_rates, 0.0) - log_rates.exp() - (counts + 1).lgamma()
        return counts.long(), log_density.to(self.dtype)

    @torch.no_grad()
    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the rates to the means of the data, weighted by the flow: see `ExponentialFamily.maximise`."""
        counts, sums, _ = statistics.unbind(-1)
        total, observed = (
            torch.as_tensor(prior).to(counts) + part
            for prior, part in ((self.prior_total, sums), (self.prior_count, counts))
        )
        before = self.log_rates.double().exp()
        self.log_rates.copy_(moved(before, total / observed, step, observed > 0).log())
