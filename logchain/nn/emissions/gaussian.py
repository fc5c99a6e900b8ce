"""Real numbers or vectors: each hidden unit has a mean and a covariance of its own."""

import math

import torch
from torch import Tensor

from ...arguments import check_choice
from ...operands import at_hand
from ..checks import check_amount, check_count
from ..parameters import arithmetic, broadcast
from .exponential_family import ExponentialFamily
from .starts import seeds

# what the float64 sums of squares leave of a variance that is 0, relative to the squares
_ROUNDING = 2.0**-46


class Gaussian(ExponentialFamily):
    r"""`log p(y | unit) = -(d log 2 pi + log det S + (y - m)' S^-1 (y - m)) / 2`.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_features: d, where an observation is a vector of as many; None where it is a number.
        covariance: "diagonal", where any entry of a vector may be missing, or "full", where only the whole may.
        prior_scatter, prior_count: what expectation maximisation adds to a unit's sum of squares (of each feature) and
            to its number of observations: `variance = (squares + prior_scatter) / (count + prior_count)`.
        generator: where the initial means come from, standard normal; the variances are 1.

    `means`: parameter `[*U, c]` or `[*U, c, d]`. `log_scales`: of the same shape, logarithms of standard deviations; or
    `factors` `[*U, c, d, d]`, whose lower triangles, the diagonal exponentiated, are Cholesky factors of S. Call: data
    `[..., *U]` or `[..., *U, d]` to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        ValueError: shapes do not go together; a number is infinite (looked at on a CPU). In `maximise`: a variance is
            0, as it is for a unit that stands on one observation, where the likelihood has no maximum; a prior or
            fewer units mend it.

    Cost: see `ExponentialFamily`, with 3 d statistics, or 1 + d + d^2. About the centre of a variable's means a density
    loses `2^-53 (distance / standard deviation)^2`: units a million deviations apart keep five digits.

    >>> heights = Gaussian(2)
    >>> heights.set(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 4.0]))
    >>> heights(torch.tensor([0.0, torch.nan]))
    tensor([[-0.9189, -2.7371],
            [ 0.0000,  0.0000]], grad_fn=<ViewBackward0>)
    """

    log_scales: torch.nn.Parameter
    factors: torch.nn.Parameter

    def __init__(
        self,
        units: int | tuple[int, ...],
        num_features: int | None = None,
        covariance: str = "diagonal",
        *,
        prior_scatter: float = 0.0,
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if num_features is not None:
            check_count("num_features", num_features)
        super().__init__(units, () if num_features is None else (num_features,))
        check_choice("covariance", covariance, ("diagonal", "full"))
        check_amount("prior_scatter", prior_scatter)
        check_amount("prior_count", prior_count)
        if covariance == "full" and num_features is None:
            raise ValueError('num_features: expected an integer with covariance="full", got None')
        self.factorised = covariance == "diagonal"
        self.prior_scatter, self.prior_count = prior_scatter, prior_count
        self.means = torch.nn.Parameter(torch.empty(*self.units, *self.event))
        spread = torch.nn.Parameter(torch.empty(*self.units, *self.event, *(() if self.factorised else self.event)))
        self.register_parameter("log_scales" if self.factorised else "factors", spread)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the means anew."""
        with torch.no_grad():
            self.means.normal_(generator=generator)
            (self.log_scales if self.factorised else self.factors).zero_()

    @torch.no_grad()
    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Means at observations that lie apart, and the variances of all data, with the prior."""
        chosen, _, variance, counts = seeds(self, data, observed, generator)
        variance = (variance * counts + self.prior_scatter) / (counts + self.prior_count)
        if not bool((variance > 0).all()):
            raise ValueError(
                "data: expected at least two different observations of every variable and feature, got one of some, "
                "and no prior_scatter"
            )
        variance = variance.expand_as(chosen)
        if not self.event:
            chosen, variance = chosen[..., 0], variance[..., 0]
        self.set(chosen, variance if self.factorised else variance.diag_embed())

    def known(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Finite numbers, where something is known."""
        data, known = super().known(data, observed)
        if data.is_floating_point() and at_hand(data) and bool(data.isinf().any()):
            raise ValueError("data: expected finite numbers, or NaN for what is missing, got an infinite one")
        return data, known

    @torch.no_grad()
    def set(self, means: Tensor, covariance: Tensor) -> None:
        """Take over means and variances `[*U, c(, d)]` or covariances `[*U, c, d, d]`, which broadcast to these."""
        means = broadcast("means", means, self.means.shape)
        if not means.isfinite().all():
            raise ValueError("means: expected finite numbers")
        if self.factorised:
            covariance = broadcast("covariance", covariance, self.log_scales.shape)
            if not ((covariance > 0) & covariance.isfinite()).all():
                raise ValueError("covariance: expected positive, finite variances")
            self.log_scales.copy_(covariance.log() / 2)
        else:
            factors, failed = torch.linalg.cholesky_ex(broadcast("covariance", covariance, self.factors.shape))
            if bool(failed.any()):
                raise ValueError("covariance: expected positive definite matrices")
            self.factors.copy_(factors.tril(-1) + self._diagonal(factors).log().diag_embed())
        self.means.copy_(means)

    def covariance(self) -> Tensor:
        """Variances `[*U, c(, d)]`, or covariances `[*U, c, d, d]`."""
        if self.factorised:
            return (2 * self.log_scales.double()).exp().to(self.dtype)
        factors = self._cholesky()
        return (factors @ factors.mT).to(self.dtype)

    def _cholesky(self) -> Tensor:
        factors = self.factors.double()
        return factors.tril(-1) + self._diagonal(factors).exp().diag_embed()

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Of each feature with itself, or of all pairs of features: of the shape of `covariance()`."""
        return left * right if self.factorised else left[..., :, None] * right[..., None, :]

    def _diagonal(self, matrix: Tensor) -> Tensor:
        """What `_products` made of each feature with itself."""
        return matrix if self.factorised else matrix.diagonal(dim1=-2, dim2=-1)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return arithmetic(self.means).dtype

    def natural(self) -> Tensor:
        """What the sums of `sufficient` are multiplied with."""
        means = self.means.double() - self._centre().unsqueeze(len(self.units) - 1)
        if self.factorised:
            log_scales = self.log_scales.double()
            precisions = (-2 * log_scales).exp()
            first = -log_scales - math.log(2 * math.pi) / 2 - precisions * means.square() / 2
            return (torch.cat if self.event else torch.stack)((first, precisions * means, -precisions / 2), -1)
        (d,) = self.event
        identity = torch.eye(d, dtype=means.dtype, device=means.device)
        whiten = torch.linalg.solve_triangular(self._cholesky(), identity, upper=False)
        precisions = whiten.mT @ whiten
        linear = (precisions @ means[..., None])[..., 0]
        logs = self._diagonal(self.factors.double()).sum(-1)
        first = -logs - d * math.log(2 * math.pi) / 2 - (linear * means).sum(-1) / 2
        return torch.cat((first[..., None], linear, -precisions.flatten(-2) / 2), -1)

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Of the parameters' dtype, at least float32."""
        means = self.of_states(self.means.detach(), states)
        noise = torch.empty_like(means).normal_(generator=generator)
        if self.factorised:
            return means + noise * self.of_states(self.log_scales.detach(), states).exp()
        factors = self.of_states(self._cholesky().detach().to(means.dtype), states)
        return means + (factors @ noise[..., None])[..., 0]

    def mode(self) -> tuple[Tensor, Tensor]:
        """The means."""
        spread = self.log_scales if self.factorised else self.factors
        logs = self._diagonal(spread.detach().double()) + math.log(2 * math.pi) / 2
        return arithmetic(self.means.detach()), -(logs.sum(-1) if self.event else logs).to(self.dtype)

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """Counts, sums and squares of each feature, or one count and all products, about a common centre."""
        apart = data.double() - self._centre()
        apart = apart if known is None else apart.masked_fill(~known, 0.0)
        counts = torch.ones_like(apart) if known is None else known.double().expand_as(apart)
        products = self._products(apart, apart)
        if not self.event:
            return torch.stack((counts, apart, products), -1)
        if self.factorised:
            return torch.cat((counts, apart, products), -1)
        return torch.cat((counts[..., :1], apart, products.flatten(-2)), -1)

    def _centre(self) -> Tensor:
        """`[*U(, d)]`, the same until the parameters change; no result depends on it but for rounding."""
        return self.means.detach().double().mean(len(self.units) - 1)

    @torch.no_grad()
    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Weighted means and covariances."""
        d = self.event[0] if self.event else 1
        counts, sums, squares = statistics.split((d, d, d) if self.factorised else (1, d, d * d), -1)
        if not self.event:
            counts, sums, squares = counts[..., 0], sums[..., 0], squares[..., 0]
        # of the shape of the covariance
        total, squares = (counts, squares) if self.factorised else (counts[..., None], squares.unflatten(-1, (d, d)))
        centre = self._centre().unsqueeze(len(self.units) - 1)
        means, before = sums / counts, self.means.double() - centre
        scatter = squares - self._products(sums, means)
        # observations that differ by rounding only are one
        apart = self._diagonal(scatter) > _ROUNDING * self._diagonal(squares)
        scatter = torch.where(self._products(apart, apart), scatter, 0.0)
        prior = self.prior_scatter * (1.0 if self.factorised else torch.eye(d).to(scatter))
        old = self.covariance().double()
        covariance = torch.lerp(old, (scatter + prior) / (total + self.prior_count), step)
        # the mean of both distributions: their variances, and what their means lie apart
        covariance = covariance + step * (1 - step) * self._products(means - before, means - before)
        covariance = torch.where(total > 0, covariance, old)
        self._refuse_singular(covariance)
        self.set(torch.where(counts > 0, torch.lerp(before, means, step), before) + centre, covariance)

    def _refuse_singular(self, covariance: Tensor) -> None:
        if self.factorised:
            singular = covariance <= 0
        else:
            factors, info = torch.linalg.cholesky_ex(covariance)
            left = self._diagonal(factors).square()
            singular = (left <= _ROUNDING * self._diagonal(covariance)).any(-1) | (info > 0)
        if bool(singular.any()):
            at = singular.nonzero()[0].tolist()
            unit, feature = at[: len(self.units)], at[len(self.units) :]
            raise ValueError(
                f"maximise: expected positive variances, got 0 for unit {unit}"
                + (f", feature {feature[0]}" if feature else "")
                + ", which stands on too few observations: give prior_scatter, or have fewer units"
            )

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        covariance = "" if self.factorised else ', covariance="full"'
        return super().extra_repr() + (f", num_features={self.event[0]}" if self.event else "") + covariance
