"""Counts without a bound: each hidden unit has a rate of its own."""

import torch
from torch import Tensor

from ...operands import at_hand
from ..parameters import arithmetic, broadcast
from .exponential_family import ExponentialFamily
from .starts import seeds


class Poisson(ExponentialFamily):
    r"""`log p(k | unit) = k log rate - rate - log k!`.

    Args:
        units: `[*U, c]`, or `c` alone.
        generator: where the initial rates come from, log-normal around 1.

    `log_rates`: parameter `[*U, c]`; -inf is a rate of 0, where only 0 is possible. Call: data `[..., *U]`, integers
    from 0 of any dtype, to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        ValueError: a value is no count (looked at on a CPU), or shapes do not go together.

    Cost: see `ExponentialFamily`, with 3 statistics.

    >>> quakes = Poisson(2)
    >>> quakes.set(torch.tensor([0.0, 20.0]))
    >>> quakes(torch.tensor([0, 19]))
    tensor([[  0.0000, -20.0000],
            [    -inf,  -2.4210]], grad_fn=<MaskedFillBackward0>)
    """

    def __init__(self, units: int | tuple[int, ...], *, generator: torch.Generator | None = None) -> None:
        super().__init__(units)
        self.log_rates = torch.nn.Parameter(torch.empty(self.units))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the rates anew."""
        with torch.no_grad():
            self.log_rates.normal_(generator=generator)

    @torch.no_grad()
    def set(self, rates: Tensor) -> None:
        """Take over rates, which broadcast to the units."""
        rates = broadcast("rates", rates, self.log_rates.shape)
        if not (rates.isfinite() & (rates >= 0)).all():
            raise ValueError("rates: expected finite, non-negative numbers")
        self.log_rates.copy_(rates.log())

    @torch.no_grad()
    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Rates half way between the mean of the data and counts that lie apart."""
        chosen, mean, *_ = seeds(self, data, observed, generator)
        rates = (chosen + mean) / 2  # (*U, c, 1)
        log_rates = rates[..., 0].log() + torch.empty_like(rates[..., 0]).normal_(0, 0.05, generator=generator)
        self.log_rates.copy_(torch.where(log_rates.isfinite(), log_rates, self.log_rates.double()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return arithmetic(self.log_rates).dtype

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats; see `InputLayer.forward`."""
        log_density = super().forward(data, observed)
        never = self.log_rates == -torch.inf
        if at_hand(never) and not bool(never.any()):
            return log_density
        positive = self.known(data, observed)[0] > 0
        return log_density.masked_fill(positive[..., None] & never, -torch.inf)

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """How many counts, their sum, and the logarithms of their factorials."""
        if at_hand(data):
            wrong = (data < 0) | (data.frac() != 0) if data.is_floating_point() else data < 0
            if bool(wrong.any()):
                raise ValueError(f"data: expected counts, got {data[wrong][0].item():g}")
        data = data.double()
        data = data if known is None else data.masked_fill(~known, 0.0)
        return torch.stack((torch.ones_like(data) if known is None else known.double(), data, (data + 1).lgamma()), -1)

    def natural(self) -> Tensor:
        """`-rate`, its logarithm, and -1; `forward` sees to rates of 0."""
        log_rates = self.log_rates.double()
        finite = log_rates.masked_fill(log_rates == -torch.inf, 0.0)
        return torch.stack((-log_rates.exp(), finite, -torch.ones_like(finite)), -1)

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """int64."""
        rates = self.of_states(self.log_rates.detach(), states).double().exp()
        return torch.poisson(rates, generator=generator).long()

    def mode(self) -> tuple[Tensor, Tensor]:
        """The count below the rate, the lower one of two equals."""
        log_rates = self.log_rates.detach().double()
        counts = (log_rates.exp().ceil() - 1).relu()
        log_density = torch.where(counts > 0, counts * log_rates, 0.0) - log_rates.exp() - (counts + 1).lgamma()
        return counts.long(), log_density.to(self.dtype)

    @torch.no_grad()
    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """The mean of the expected counts."""
        known, sums, _ = statistics.unbind(-1)
        before = self.log_rates.double().exp()
        self.log_rates.copy_(torch.where(known > 0, torch.lerp(before, sums / known, step), before).log())
