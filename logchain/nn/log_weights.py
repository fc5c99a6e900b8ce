"""Trained probabilities along an axis, as logarithms."""

import torch
from torch import Tensor

from .checks import check_count, check_prior
from .parameters import DrawnModule, arithmetic, broadcast


class LogWeights(DrawnModule):
    r"""`log_softmax(logits)`: logarithms of probabilities that sum to 1 along an axis.

    Args:
        *shape: sizes of the weights.
        dim: the axis along which they sum to 1, counted from the right: -1 is the last.
        prior_count: added to each expected count by expectation maximization (a Dirichlet prior with parameter
            `1 + prior_count`); if positive, no weight becomes 0 because the data lack it. A number, or a tensor that
            broadcasts to the shape.
        generator: the source of randomness for the initial weights, uniform over the simplex (a Dirichlet of ones).

    Call: `()` to the logarithms `[*shape]` in nats: float32 for half parameters, otherwise of the parameters' dtype. A
    logit of -inf is a weight of 0, which stays 0 under gradients and, without a prior, under expectation maximization.
    Gradients alone never take a weight to 0; expectation maximization does where a count is 0.

    Raises:
        TypeError: a size is no integer.
        ValueError: the axis has no entry, `dim` is no axis, or `prior_count` is negative.

    >>> weights = LogWeights(2, 2)
    >>> weights.set(torch.tensor([[0.9, 0.1], [0.0, 1.0]]))
    >>> weights()
    tensor([[-0.1054, -2.3026],
            [   -inf,  0.0000]], grad_fn=<LogSoftmaxBackward0>)
    >>> torch.autograd.grad(weights()[:, 1].sum(), weights.logits)[0]  # a zero stays, and nothing pulls at it
    tensor([[-0.9000,  0.9000],
            [ 0.0000,  0.0000]])
    >>> counts = weights.statistics(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))  # the gradient of a log-likelihood
    >>> weights.maximize(counts)
    >>> weights().exp()
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]], grad_fn=<ExpBackward0>)
    >>> weights.reset_parameters(torch.Generator().manual_seed(0))
    >>> bool((weights() < 0).all())
    True
    """

    def __init__(
        self, *shape: int, dim: int = -1, prior_count: float | Tensor = 0.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_count("shape", *shape, least=0)
        if not (isinstance(dim, int) and -len(shape) <= dim < 0 and shape[dim] > 0):
            raise ValueError(f"dim: expected an axis of {list(shape)} that is not empty, from the right, got {dim!r}")
        check_prior("prior_count", prior_count, shape)
        self.dim, self.prior_count = dim, prior_count
        self.logits = torch.nn.Parameter(torch.empty(shape))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights again, uniformly over the simplex.

        Args:
            generator: the source of randomness.
        """
        with torch.no_grad():
            # drawn in float32 at least: float16 could draw 0, a weight that would stay 0
            self.logits.copy_(torch.empty_like(arithmetic(self.logits)).exponential_(generator=generator).log_())

    def forward(self) -> Tensor:
        """The logarithms `[*shape]`."""
        return self.normalized(arithmetic(self.logits))

    def normalized(self, logits: Tensor) -> Tensor:
        """Logarithms of weights that sum to 1."""
        return torch.log_softmax(logits, self.dim)

    def totals(self, weights: Tensor) -> Tensor:
        """The sum to which each weight belongs."""
        return weights.sum(self.dim, keepdim=True)

    @torch.no_grad()
    def set(self, probabilities: Tensor) -> None:
        """Set the weights to probabilities.

        Args:
            probabilities: `[*shape]` or what broadcasts to it; they are normalized.

        Raises:
            ValueError: a number is negative, or a sum along the axis is 0 or not finite.
        """
        probabilities = broadcast("probabilities", probabilities, self.logits.shape)
        total = self.totals(probabilities)
        if not ((probabilities >= 0).all() and (total > 0).all() and total.isfinite().all()):
            raise ValueError("probabilities: expected non-negative numbers with a finite, positive sum along the axis")
        self._store(probabilities / total)

    def statistics(self, flow: Tensor) -> Tensor:
        """Expected counts of each weight, the sufficient statistics.

        Args:
            flow: the gradient of a log-likelihood with respect to the logarithms `[*shape]`.

        Returns:
            float64 `[*shape]`.
        """
        return flow.double()

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set the weights to normalized expected counts, with the prior's; where all counts are 0, they stay.

        Args:
            statistics: expected counts, float64 `[*shape]`.
            step: the part of the way to them, in probabilities.
        """
        counts = statistics + torch.as_tensor(self.prior_count).to(statistics)
        total = self.totals(counts)
        shares, before = counts / total, self.normalized(self.logits.double()).exp()
        shares = torch.where(total > 0, before + step * (shares - before) if step < 1 else shares, before)
        self._store(shares)

    def num_parameters(self) -> int:
        """The number of weights that are not 0, less one for each sum."""
        possible = (self().detach() > -torch.inf).double()
        return round(float((possible - possible / self.totals(possible)).sum()))

    def _store(self, probabilities: Tensor) -> None:
        """Set the weights to probabilities that sum to 1."""
        self.logits.copy_(probabilities.log())

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return ", ".join(map(str, self.logits.shape)) + ("" if self.dim == -1 else f", dim={self.dim}")
