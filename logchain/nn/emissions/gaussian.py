"""Gaussian observations, numbers or vectors, with a mean and a covariance for each hidden unit."""

import math

import torch
from torch import Tensor

from ...arguments import check_choice
from ...operands import at_hand
from ..checks import check_amount, check_count
from ..parameters import arithmetic, broadcast
from .exponential_family import ExponentialFamily, moved
from .starts import seeds

# the largest variance, relative to the sum of squares, that may be nothing but rounding of float64
_ROUNDING = 2.0**-46

# computed here, since torch.compile starts again where it meets a function of a number
_HALF_LOG_2_PI = math.log(2 * math.pi) / 2


class Gaussian(ExponentialFamily):
    r"""Gaussian observations: `log p(y | unit) = -(d log 2 pi + log det S + (y - m)' S^-1 (y - m)) / 2`.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_features: d, for vectors of d entries; None for numbers.
        covariance: "diagonal", where any entries of a vector may be missing, or "full", where all or none may.
        prior_scatter, prior_count: added by expectation maximisation to a unit's sum of squares (of each feature) and
            to its number of observations: `variance = (squares + prior_scatter) / (count + prior_count)`.
        generator: the source of randomness for the initial means, standard normal; the initial variances are 1.

    `means`: parameter `[*U, c]` or `[*U, c, d]`. `log_scales`: of the same shape, logarithms of standard deviations; or
    `factors` `[*U, c, d, d]`, whose lower triangles, the diagonal exponentiated, are Cholesky factors of S. Call: data
    `[..., *U]` or `[..., *U, d]` to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        ValueError: shapes do not go together, or a number is infinite (checked on a CPU). In `maximise`: a variance is
            0, as for a unit that a single observation belongs to, where the likelihood has no maximum. A prior or fewer
            units avoid that.

    Cost: that of `ExponentialFamily` with 3 d statistics, or 1 + d + d^2 for a full covariance. Statistics are taken
    about the mean m0 of a variable's means: the rounding error of a log-density is `2^-53 ((y - m0) / deviation)^2`,
    which leaves five digits for units a million standard deviations apart.

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
        """Draw the means anew, standard normal; the variances are 1. See `InputLayer.reset_parameters`."""
        with torch.no_grad():
            self.means.normal_(generator=generator)
            (self.log_scales if self.factorised else self.factors).zero_()

    @torch.no_grad()
    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the means to observations far from each other, the variances to those of all data, with the prior.

        See `InputLayer.initialise`.

        Raises:
            ValueError: all observations of a variable or feature are equal, and there is no `prior_scatter`.
        """
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
        """Data and mask as in `InputLayer.known`; on a CPU, infinite numbers are refused."""
        data, known = super().known(data, observed)
        if data.is_floating_point() and at_hand(data) and bool(data.isinf().any()):
            raise ValueError("data: expected finite numbers, or NaN for what is missing, got an infinite one")
        return data, known

    @torch.no_grad()
    def set(self, means: Tensor, covariance: Tensor) -> None:
        """Set means and covariances.

        Args:
            means: `[*U, c]` or `[*U, c, d]`, or what broadcasts to it.
            covariance: variances of the same shape or, if "full", covariances `[*U, c, d, d]`; broadcast likewise.

        Raises:
            ValueError: a mean is not finite, a variance not positive, or a covariance not positive definite.
        """
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
        """The variances or covariances of all units.

        Returns:
            Variances `[*U, c]` or `[*U, c, d]` or, if "full", covariances `[*U, c, d, d]`.

        >>> Gaussian(1, 2, "full").covariance().detach()
        tensor([[[1., 0.],
                 [0., 1.]]])
        """
        if self.factorised:
            return (2 * self.log_scales.double()).exp().to(self.dtype)
        factors = self._cholesky()
        return (factors @ factors.mT).to(self.dtype)

    def _cholesky(self) -> Tensor:
        """Cholesky factors `[*U, c, d, d]` of the covariances, in float64."""
        factors = self.factors.double()
        return factors.tril(-1) + self._diagonal(factors).exp().diag_embed()

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Products of each feature with itself, or of all pairs of features: of the shape of `covariance()`."""
        return left * right if self.factorised else left[..., :, None] * right[..., None, :]

    def _diagonal(self, matrix: Tensor) -> Tensor:
        """The entries for each feature with itself, of a matrix in the shape of `covariance()`."""
        return matrix if self.factorised else matrix.diagonal(dim1=-2, dim2=-1)

    def natural(self) -> Tensor:
        """The natural parameters, float64 `[*U, c, f]`: see `ExponentialFamily.natural`."""
        means = self.means.double() - self._centre().unsqueeze(len(self.units) - 1)
        if self.factorised:
            log_scales = self.log_scales.double()
            precisions = (-2 * log_scales).exp()
            first = -log_scales - _HALF_LOG_2_PI - precisions * means.square() / 2
            return (torch.cat if self.event else torch.stack)((first, precisions * means, -precisions / 2), -1)
        (d,) = self.event
        identity = torch.eye(d, dtype=means.dtype, device=means.device)
        whiten = torch.linalg.solve_triangular(self._cholesky(), identity, upper=False)
        precisions = whiten.mT @ whiten
        linear = (precisions @ means[..., None])[..., 0]
        logs = self._diagonal(self.factors.double()).sum(-1)
        first = -logs - d * _HALF_LOG_2_PI - (linear * means).sum(-1) / 2
        return torch.cat((first[..., None], linear, -precisions.flatten(-2) / 2), -1)

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One observation of each given state, of the parameters' dtype, float32 at least: see `InputLayer.draw`."""
        means = self.of_states(self.means.detach(), states)
        noise = torch.empty_like(means).normal_(generator=generator)
        if self.factorised:
            return means + noise * self.of_states(self.log_scales.detach(), states).exp()
        factors = self.of_states(self._cholesky().detach().to(means.dtype), states)
        return means + (factors @ noise[..., None])[..., 0]

    def mode(self) -> tuple[Tensor, Tensor]:
        """The means and their log-densities: see `InputLayer.mode`."""
        spread = self.log_scales if self.factorised else self.factors
        logs = self._diagonal(spread.detach().double()) + _HALF_LOG_2_PI
        return arithmetic(self.means.detach()), -(logs.sum(-1) if self.event else logs).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the log-densities: that of the parameters, float32 at least."""
        return arithmetic(self.means).dtype

    def sufficient(self, data: Tensor, known: Tensor | None) -> Tensor:
        """Count, value and square of each feature, or one count, all values and all products, about the centre.

        See `ExponentialFamily.sufficient`.
        """
        centred = data.double() - self._centre()
        centred = centred if known is None else centred.masked_fill(~known, 0.0)
        counts = torch.ones_like(centred) if known is None else known.double().expand_as(centred)
        products = self._products(centred, centred)
        if not self.event:
            return torch.stack((counts, centred, products), -1)
        if self.factorised:
            return torch.cat((counts, centred, products), -1)
        return torch.cat((counts[..., :1], centred, products.flatten(-2)), -1)

    def _centre(self) -> Tensor:
        """The mean `[*U(, d)]` of the units' means, about which statistics are taken so that they cancel less."""
        return self.means.detach().double().mean(len(self.units) - 1)

    @torch.no_grad()
    def maximise(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set means and covariances to those of the data, weighted by the flow: see `ExponentialFamily.maximise`."""
        d = self.event[0] if self.event else 1
        counts, sums, squares = statistics.split((d, d, d) if self.factorised else (1, d, d * d), -1)
        if not self.event:
            counts, sums, squares = counts[..., 0], sums[..., 0], squares[..., 0]
        # counts in a shape that broadcasts to the covariance
        total, squares = (counts, squares) if self.factorised else (counts[..., None], squares.unflatten(-1, (d, d)))
        centre = self._centre().unsqueeze(len(self.units) - 1)
        means, before = sums / counts, self.means.double() - centre
        scatter = squares - self._products(sums, means)
        # features whose observations differ by no more than rounding have variance 0
        varies = self._diagonal(scatter) > _ROUNDING * self._diagonal(squares)
        scatter = torch.where(self._products(varies, varies), scatter, 0.0)
        prior = self.prior_scatter * (1.0 if self.factorised else torch.eye(d).to(scatter))
        old = self.covariance().double()
        covariance = torch.lerp(old, (scatter + prior) / (total + self.prior_count), step)
        # mean parameters move linearly: the covariance of the mixture of both Gaussians, means apart included
        covariance = covariance + step * (1 - step) * self._products(means - before, means - before)
        covariance = torch.where(total > 0, covariance, old)
        self._refuse_singular(covariance)
        self.set(moved(before, means, step, counts > 0) + centre, covariance)

    def _refuse_singular(self, covariance: Tensor) -> None:
        """Raise ValueError for a unit whose covariance is singular but for rounding."""
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
