"""Binomial observations, with a probability of success for each hidden unit."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..checks import check_count
from ..parameters import arithmetic, broadcast
from .exponential_family import moved, sums
from .finite import Finite
from .starts import observations


class Binomial(Finite):
    r"""Binomial observations: `log p(k | unit) = log choose(total, k) + k log p + (total - k) log(1 - p)`.

    Args:
        units: `[*U, c]`, or `c` alone.
        total_count: the number of trials; data are integers from 0 to `total_count`, of any dtype.
        generator: the source of randomness for the initial probabilities, uniform in 0..1.

    `logits`: parameter `[*U, c]`, `log p / (1 - p)`; -inf and inf are probabilities 0 and 1. Call: data `[..., *U]` to
    `[..., *U, c]`, in nats, looked up in a table `[*U, total_count + 1, c]` made in float64; see `InputLayer`.

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
        super().__init__(units, total_count + 1)
        self.total_count = total_count
        self.logits = torch.nn.Parameter(torch.empty(self.units))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the probabilities anew, uniformly in 0..1: see `InputLayer.reset_parameters`."""
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
    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the logits to that of the share of successes, half a success and a failure added, and normal noise.

        See `InputLayer.initialise`.
        """
        rows, known = observations(self, data, observed)  # (g, n, 1)
        successes = torch.where(known, self._values(rows), 0).sum((1, 2)) + 0.5
        trials = known.sum((1, 2)) * self.total_count + 1
        noise = torch.empty_like(self.logits, dtype=torch.float64).normal_(generator=generator)
        self.logits.copy_((successes / trials).logit().view(*self.units[:-1], 1) + noise)

    def table(self) -> Tensor:
        """Log-probabilities `[*U, total_count + 1, c]`: see `Finite.table`."""
        logits = arithmetic(self.logits)
        wide = logits.double()[..., None, :]
        hits = torch.arange(self.num_values, device=logits.device, dtype=torch.float64)[:, None]
        misses = self.total_count - hits
        ways = -torch.lgamma(hits + 1) - torch.lgamma(misses + 1)
        ways = ways - ways[:1]  # the logarithm of choose(total, k), exactly 0 for k = 0
        # 0 hits or misses contribute 0, also where log p or log(1 - p) is -inf
        log_density = torch.where(hits > 0, hits * logsigmoid(wide), 0.0) + torch.where(
            misses > 0, misses * logsigmoid(-wide), 0.0
        )
        return (ways + log_density).to(logits.dtype)

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """Expected successes and failures, float64 `[*U, c, 2]`: see `ExponentialFamily.statistics`."""
        data, known = self.known(data, observed)
        features = torch.stack((data.double(), self.total_count - data.double()), -1)
        return sums(flow, features if known is None else features.masked_fill(~known[..., None], 0.0), self.units)

    @torch.no_grad()
    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the probabilities to the shares of expected successes: see `ExponentialFamily.maximise`."""
        trials = statistics.sum(-1, keepdim=True)
        before = torch.stack((self.logits.double(), -self.logits.double()), -1).sigmoid()
        hits, misses = moved(before, statistics / trials, step, trials > 0).unbind(-1)
        self.logits.copy_(hits.log() - misses.log())

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return f"{super().extra_repr()}, total_count={self.total_count}"
