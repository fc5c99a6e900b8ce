"""Trained probabilities along an axis, or of the arcs out of states, as logarithms."""

import torch
from torch import Generator, Tensor, nn

from ..arguments import has_values
from ..transitions import LINEAR, LOG, Semiring
from .checks import check_count
from .parameters import arithmetic, broadcast, first_draw
from .priors import Dirichlet


class LogWeights(nn.Module):
    r"""`log_softmax(logits)`: logarithms of probabilities that sum to 1 along an axis.

    Args:
        *shape: sizes of the weights.
        dim: the axis along which they sum to 1, counted from the right: -1 is the last.
        prior: a `Dirichlet` density for maximum a posteriori fits, whose concentration broadcasts to the shape; above
            1, no weight becomes 0 because the data lack it.
        generator: the source of randomness for the initial weights, uniform over the simplex (a Dirichlet of ones).

    Call: `()` to the logarithms `[*shape]` in nats: float32 for half parameters, otherwise of the parameters' dtype. A
    logit of -inf is a weight of 0, which stays 0 under gradients and, without a prior, under expectation maximization.
    Gradients alone never take a weight to 0; expectation maximization does where a count is 0.

    Raises:
        TypeError: a size is not an integer, or the prior is not a `Dirichlet`.
        ValueError: the axis has no entry, `dim` is not an axis, or the concentration has another shape.

    >>> weights = LogWeights(2, 2)
    >>> weights.set(torch.tensor([[0.9, 0.1], [0.0, 1.0]]))
    >>> weights()
    tensor([[-0.1054, -2.3026],
            [   -inf,  0.0000]], grad_fn=<LogSoftmaxBackward0>)
    >>> torch.autograd.grad(weights()[:, 1].sum(), weights.logits)[0]  # a weight of 0 has gradient 0
    tensor([[-0.9000,  0.9000],
            [ 0.0000,  0.0000]])
    >>> counts = weights.statistics(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))  # the gradient of a log-likelihood
    >>> weights.maximize(counts)
    >>> weights().exp()
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    zeros: Tensor | None
    _remedy = "pass weights / weights.sum({dim}, keepdim=True)"

    def __init__(
        self, *shape: int, dim: int = -1, prior: Dirichlet | None = None, generator: Generator | None = None
    ) -> None:
        super().__init__()
        check_count("shape", *shape, least=0)
        if not (isinstance(dim, int) and -len(shape) <= dim < 0 and shape[dim] > 0):
            raise ValueError(f"dim: expected an axis of {list(shape)} that is not empty, from the right, got {dim!r}")
        if not isinstance(prior, Dirichlet | None):
            raise TypeError(f"prior: expected a Dirichlet or None, got {type(prior).__name__}")
        if prior is not None:
            broadcast("prior", prior.concentration, torch.Size(shape))
        self.dim, self.prior = dim, prior
        self.register_buffer("zeros", None)  # weights that are 0 whatever their logits
        self.logits = nn.Parameter(torch.empty(shape))
        first_draw(self, generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the weights again, uniformly over the simplex; those that are fixed at 0 stay."""
        with torch.no_grad():
            # drawn in float32 at least: float16 could draw 0, a weight that would stay 0
            self.logits.copy_(torch.empty_like(arithmetic(self.logits)).exponential_(generator=generator).log_())

    def forward(self) -> Tensor:
        """The logarithms `[*shape]`."""
        return self.normalized(arithmetic(self.logits))

    def normalized(self, logits: Tensor) -> Tensor:
        """Logarithms of weights that sum to 1."""
        return torch.log_softmax(self._masked(logits, -torch.inf), self.dim)

    def totals(self, weights: Tensor) -> Tensor:
        """The sum to which each weight belongs."""
        return weights.sum(self.dim, keepdim=True)

    @torch.no_grad()
    def set(self, probabilities: Tensor) -> None:
        """Set the weights to probabilities.

        Args:
            probabilities: `[*shape]` or what broadcasts to it; rounding errors of sums are divided out.

        Raises:
            ValueError: a number is negative, a sum differs from 1 by more than 1e-5, or a weight that is fixed at 0 is
                positive.
        """
        probabilities = broadcast("probabilities", probabilities, self.logits.shape)
        total = self.totals(probabilities)
        if bool((bad := ~(probabilities >= 0)).any()):
            raise ValueError(f"probabilities: expected non-negative numbers, got {probabilities[bad][0]:g}")
        if bool((bad := ~((total - 1).abs() <= 1e-5)).any()):
            remedy = self._remedy.format(dim=self.dim)
            raise ValueError(f"probabilities: expected sums of 1, got {total[bad][0]:.6g}; {remedy}")
        if self.zeros is not None and bool(probabilities[self.zeros].any()):
            expected = "0 for weights that are fixed at 0 since construction"
            raise ValueError(f"probabilities: expected {expected}, got others; construct a module that has them")
        self._store(probabilities / total)

    @torch.no_grad()
    def start(self, weights: Tensor) -> None:
        """Set the weights in proportion to others, of their dtype and on their device, and fix at 0 those that are 0.

        Weights without values wait for `reset_parameters`.
        """
        self.logits = nn.Parameter(torch.zeros_like(weights, memory_format=torch.contiguous_format))
        self._first_draw = None
        if not has_values(weights):
            return
        weights = weights.double()
        total = self.totals(weights)
        if not ((weights >= 0).all() and (total > 0).all() and total.isfinite().all()):
            raise ValueError(
                "states: expected non-negative weights with finite, positive sums; pass ones for any start"
            )
        self.zeros = weights == 0 if bool((weights == 0).any()) else None
        self._store(weights / total)

    def log_prior(self) -> Tensor:
        """The logarithm of the prior's density, without its constant: a float64 scalar, 0 without a prior."""
        if self.prior is None:
            return self.logits.new_zeros((), dtype=torch.float64)
        return self.prior.log_density(self._masked(self(), 0.0))

    def statistics(self, flow: Tensor) -> Tensor:
        """Expected counts, float64 `[*shape]`: the gradient `flow` of a log-likelihood in the logarithms."""
        return flow.double()

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Go the part `step` of the way, in probabilities, to normalized expected counts `[*shape]` with the prior's.

        Weights of which all counts are 0 stay.

        Raises:
            ValueError: a count is negative.
        """
        counts = statistics if self.prior is None else statistics + (self.prior.concentration - 1).to(statistics)
        counts = self._masked(counts, 0.0)
        total = self.totals(counts)
        if bool((counts < 0).any()):
            raise ValueError(f"statistics: expected non-negative counts with the prior's, got {counts.min().item():g}")
        shares, before = counts / total, self.normalized(self.logits.double()).exp()
        shares = torch.where(total > 0, before + step * (shares - before) if step < 1 else shares, before)
        self._store(shares)

    def num_parameters(self) -> int:
        """The number of weights that are not 0, less one for each sum."""
        possible = (self().detach() > -torch.inf).double()
        return round(float((possible - possible / self.totals(possible)).sum()))

    def _store(self, probabilities: Tensor) -> None:
        # finite where weights are fixed at 0: weight decay would make NaN of -inf
        self.logits.copy_(self._masked(probabilities.log(), 0.0))

    def _masked(self, values: Tensor, value: float) -> Tensor:
        return values if self.zeros is None else values.masked_fill(self.zeros, value)

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return ", ".join(map(str, self.logits.shape)) + ("" if self.dim == -1 else f", dim={self.dim}")


class ArcWeights(LogWeights):
    """Logarithms of probabilities that sum to 1 over the arcs out of each state.

    `sources` is the state that each arc leads from, int64 of the last axes of the shape.
    """

    sources: Tensor
    _remedy = "divide by the sum over the arcs out of each state"

    def __init__(self, *shape: int, sources: Tensor, num_states: int, prior: Dirichlet | None = None) -> None:
        super().__init__(*shape, prior=prior)
        self.num_states = num_states
        self.register_buffer("sources", sources, persistent=False)

    def normalized(self, logits: Tensor) -> Tensor:
        """Logarithms of weights that sum to 1."""
        logs = self._masked(logits, -torch.inf)
        return logs - self._sums(LOG, logs)

    def totals(self, weights: Tensor) -> Tensor:
        """The sum to which each weight belongs."""
        return self._sums(LINEAR, weights)

    def _sums(self, semiring: Semiring, weights: Tensor) -> Tensor:
        arcs = weights.flatten(weights.dim() - self.sources.dim())
        return semiring.sum_at(arcs, self.sources.flatten(), self.num_states)[..., self.sources]
