"""Gaussian observations, numbers or vectors, with a mean and a covariance for each hidden unit."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal
from torch.distributions.constraints import Constraint

from ...arguments import check_choice
from ...tensors import is_readable
from ..checks import check_count
from ..parameters import broadcast, first_draw
from ..priors import NormalInverseWishart
from .emission import Emission
from .linear import by_group, groups_of, linear_log_density, weighted_sums
from .starts import seeds

# the largest variance, relative to the sum of squares, that may be nothing but rounding of float64
ROUNDING = 2.0**-46

# computed here, since torch.compile starts again where it meets a function of a number
_HALF_LOG_2_PI = math.log(2 * math.pi) / 2


class Finite(Constraint):
    """Finite numbers."""

    def check(self, value: Tensor) -> Tensor:
        """Whether numbers are finite."""
        return value.isfinite()


class Gaussian(Emission):
    r"""Gaussian observations: `log p(y | unit) = -(d log 2 pi + log det S + (y - m)' S^-1 (y - m)) / 2`.

    Any entries of a vector may be missing: the density is that of the others, and expectation maximization takes the
    expected statistics of those that are missing. (Inside `torch.compile` and transforms of `torch.func`, and on a GPU,
    a vector observed in part has density NaN if the covariance is "full" or "tied".)

    Args:
        units: `[*U, c]`, or `c` alone.
        num_features: d, for vectors of d entries; None for numbers.
        covariance: "diag"; "spherical" with one variance for all features; "full"; or "tied" with one matrix for all
            units.
        prior: of means and covariances. The M step is the maximum of the posterior: it divides the sums of squares by
            `count + dof + d + 1`, and 1 more for each mean that has a `mean_count`; d is 1 for variances.
        generator: the source of randomness for the initial means, standard normal; the initial variances are 1.

    `means`: parameter `[*U, c]` or `[*U, c, d]`. `log_scales`: of the same shape, spherical `[*U, c, 1]`, logarithms of
    standard deviations; or `factors` `[*U, c, d, d]`, tied `[*U, 1, d, d]`, whose lower triangles, the diagonal
    exponentiated, are Cholesky factors of S. Call: data `[..., *U]` or `[..., *U, d]` to `[..., *U, c]`, in nats; see
    `Emission`.

    Raises:
        ValueError: shapes do not go together, or a number is infinite (checked on a CPU); in `maximize`, a variance is
            0, as for a unit that a single observation belongs to, where the likelihood has no maximum.

    Cost: 3 d multiply-adds for each entry of the result, or 1 + d + d^2 for matrices, in float64; with missing entries,
    a Cholesky factor for each unit and pattern of them. Statistics are taken about the mean m0 of a variable's means:
    the rounding error of a log-density is `2^-53 ((y - m0) / deviation)^2`, which leaves five digits for units a
    million standard deviations apart.

    >>> heights = Gaussian(2)
    >>> heights.set(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 4.0]))
    >>> heights(torch.tensor([0.0, torch.nan]))
    tensor([[-0.9189, -2.7371],
            [ 0.0000,  0.0000]], grad_fn=<ViewBackward0>)
    """

    partial = True
    support, expected = Finite(), "finite numbers, or NaN for what is missing"
    log_scales: torch.nn.Parameter
    factors: torch.nn.Parameter

    def __init__(
        self,
        units: int | tuple[int, ...],
        num_features: int | None = None,
        covariance: str = "diag",
        *,
        prior: NormalInverseWishart | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if num_features is not None:
            check_count("num_features", num_features)
        super().__init__(units, () if num_features is None else (num_features,))
        check_choice("covariance", covariance, ("spherical", "diag", "full", "tied"))
        if covariance != "diag" and num_features is None:
            raise ValueError(f"num_features: expected an integer with covariance={covariance!r}, got None")
        self.covariance, self.has_matrices, self.prior = covariance, covariance in ("full", "tied"), prior
        # the axis of variances `[*U, c, d]` or matrices `[*U, c, d, d]` along which they are shared
        self._shared_axis = {"spherical": -1, "tied": -3}.get(covariance)
        units = (*self.units[:-1], 1) if covariance == "tied" else self.units
        event = 2 * self.event if self.has_matrices else (1,) if covariance == "spherical" else self.event
        self.means = torch.nn.Parameter(torch.empty(*self.units, *self.event))
        spread = torch.nn.Parameter(torch.empty(*units, *event))
        self.register_parameter("factors" if self.has_matrices else "log_scales", spread)
        self._prior()
        first_draw(self, generator)

    @property
    def variances(self) -> Tensor:
        """The variances `[*U, c]` or `[*U, c, d]`, without gradients."""
        return self._diagonal(self._spread()).reshape(self.means.shape).detach().to(self.dtype)

    @property
    def covariances(self) -> Tensor:
        """The covariances `[*U, c, d, d]`, without gradients; d is 1 for numbers."""
        spread = self._spread().detach().to(self.dtype)
        return spread if self.has_matrices else spread.diag_embed()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the means again, standard normal; the variances are 1."""
        self.means.normal_(generator=generator)
        (self.factors if self.has_matrices else self.log_scales).zero_()

    @torch.no_grad()
    def initialize(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        **covariates: Tensor,
    ) -> None:
        """Set the means to observations far from each other, the variances to those of all data, with the prior.

        Raises:
            ValueError: all observations of a variable or feature are equal, and there is no prior.
        """
        start = seeds(self, data, observed, generator)
        squares, counts = start.variance * start.counts, start.counts
        if self.has_matrices:
            squares, counts = squares.diag_embed(), counts[..., None]
        scale, prior_count, *_ = self._prior()
        squares = self._pooled(squares) + scale
        constant = ~(self._diagonal(squares) > 0)
        if bool(constant.any()):
            raise ValueError(
                "data: expected at least two different observations of every variable and feature, or a prior, got one"
                f"{self._place(constant)[1]}"
            )
        self._store(start.places, squares / (self._pooled(counts) + prior_count))

    @torch.no_grad()
    def set(self, means: Tensor, covariance: Tensor) -> None:
        """Set means and covariances.

        Args:
            means: `[*U, c]` or `[*U, c, d]`, or what broadcasts to it.
            covariance: variances of the same shape or, if "full" or "tied", covariances `[*U, c, d, d]`; broadcast
                likewise. Those that are shared, spherical by all features or tied by all units, have to be the same.

        Raises:
            ValueError: a mean is not finite, a variance not positive, a covariance not positive definite, or what is
                shared is not the same.
        """
        means = broadcast("means", means, self.means.shape)
        if not means.isfinite().all():
            raise ValueError("means: expected finite numbers")
        event = 2 * self.event if self.has_matrices else self.event
        covariance = broadcast("covariance", covariance, torch.Size((*self.units, *event)))
        if not covariance.isfinite().all():
            raise ValueError("covariance: expected finite numbers")
        covariance = covariance if self.event else covariance[..., None]
        shared = self._shared(covariance)
        if not bool((covariance == shared).all()):
            alike = "features" if self.covariance == "spherical" else "units"
            raise ValueError(f"covariance: expected the same for all {alike}, got different ones")
        if bool((torch.linalg.cholesky_ex(shared).info > 0 if self.has_matrices else shared <= 0).any()):
            raise ValueError("covariance: expected positive variances, or positive definite matrices")
        self._store(means, shared)

    def _store(self, means: Tensor, spread: Tensor, *, trained_only: bool = False) -> None:
        """Set means and what is not shared of the variances or covariances."""
        parameter = self.factors if self.has_matrices else self.log_scales
        if self.means.requires_grad or not trained_only:
            self.means.copy_(means.reshape(self.means.shape))
        if not parameter.requires_grad and trained_only:
            return
        if self.has_matrices:
            factors = torch.linalg.cholesky(spread)
            spread = factors.tril(-1) + self._diagonal(factors).log().diag_embed()
        else:
            spread = spread.log() / 2
        parameter.copy_(spread if self.event else spread[..., 0])

    def _spread(self) -> Tensor:
        """Variances `[*U, c, d]` or covariances `[*U, c, d, d]` in float64, which holds squares of all of float32."""
        if not self.has_matrices:
            return (2 * self._log_scales()).exp()
        factors = self._cholesky()
        return (factors @ factors.mT).expand(*self.units, -1, -1)

    def _log_scales(self) -> Tensor:
        """The logarithms of standard deviations `[*U, c, d]`, in float64."""
        return self.log_scales.double().expand(self.means.shape).reshape(*self.units, -1)

    def _cholesky(self) -> Tensor:
        """Cholesky factors `[*U, c, d, d]` (tied `[*U, 1, d, d]`) of the covariances, in float64."""
        factors = self.factors.double()
        return factors.tril(-1) + self._diagonal(factors).exp().diag_embed()

    def _means(self) -> Tensor:
        """The means `[*U, c, d]` about the center, in float64."""
        return self.means.double().view(*self.units, -1) - self._center()[..., None, :]

    def _center(self) -> Tensor:
        """The mean `[*U, d]` of the units' means, about which statistics are taken so that they cancel less."""
        return self.means.detach().double().view(*self.units, -1).mean(-2)

    def _shared(self, spread: Tensor) -> Tensor:
        """The first of what is shared, of variances or covariances."""
        return spread if self._shared_axis is None else spread.narrow(self._shared_axis, 0, 1)

    def _pooled(self, sums: Tensor) -> Tensor:
        """Sums added up over the features or units that share a variance or covariance."""
        return sums if self._shared_axis is None else sums.sum(self._shared_axis, keepdim=True)

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Products of each feature with itself or, for matrices, of all pairs of features."""
        return left[..., :, None] * right[..., None, :] if self.has_matrices else left * right

    def _diagonal(self, spread: Tensor) -> Tensor:
        """The variances of variances, or of covariances."""
        return spread.diagonal(dim1=-2, dim2=-1) if self.has_matrices else spread

    def _place(self, mask: Tensor) -> tuple[list[int], str]:
        """The unit of the first entry of a mask `[*U, c(, d)]` that holds, and words for its feature."""
        at = mask.nonzero()[0].tolist()
        of_features = self.event and self.covariance != "spherical" and mask.dim() > len(self.units)
        return at[: len(self.units)], f", feature {at[-1]}" if of_features else ""

    def _prior(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scale and number of observations of each covariance, place and number of each mean `[*U, c, d or 1]`."""
        spread = self.factors if self.has_matrices else self.log_scales
        if self.prior is None:
            zero = torch.zeros((), dtype=torch.float64, device=spread.device)
            return zero, zero, zero, torch.zeros(*self.units, 1).to(zero)
        scale = self.prior.scale
        if self.has_matrices and not scale.dim():
            scale = scale * torch.eye(*self.event).to(scale)
        scale = broadcast("prior.scale", scale, spread.shape)
        units = spread.shape[: len(self.units)] if self.has_matrices else spread.shape
        dof = broadcast("prior.dof", self.prior.dof, units) + 1 + (self.event[0] if self.has_matrices else 1)
        place = broadcast("prior.mean", self.prior.mean, self.means.shape).reshape(*self.units, -1)
        count = broadcast("prior.mean_count", self.prior.mean_count, torch.Size(self.units))[..., None]
        if self.has_matrices:
            return scale, dof[..., None, None], place, count
        return scale.reshape(*self.units, -1), dof.reshape(*self.units, -1), place, count

    def log_prior(self) -> Tensor:
        """The logarithm of the prior density of means and covariances: see `Emission.log_prior`."""
        if self.prior is None:
            return super().log_prior()
        scale, count, place, mean_count = self._prior()
        away = self.means.double().view(*self.units, -1) - place
        if self.has_matrices:
            factors = self._cholesky()
            logs = 2 * self._diagonal(self.factors.double()).sum(-1, keepdim=True)[..., None]  # (*U, c or 1, 1, 1)
            white = torch.linalg.solve_triangular(factors, away[..., None], upper=False)
            squares = white.square().sum(-2, keepdim=True)
            traces = torch.cholesky_solve(scale, factors).diagonal(dim1=-2, dim2=-1).sum()
            mean_count = mean_count[..., None]
        else:
            logs = 2 * self._shared(self._log_scales())
            squares = away.square() / self._spread()
            traces = (scale / self._shared(self._spread())).sum()
        of_means = torch.where(mean_count > 0, logs + mean_count * squares, 0.0)
        return -((count * logs).sum() + traces + of_means.sum()) / 2

    def distribution(self, at: tuple[Tensor, ...] = ()) -> Distribution:
        """The normal distributions in float64: see `Emission.distribution`."""
        means = self.means.double()[at]
        if self.has_matrices:
            factors = self._cholesky().expand(*self.units, -1, -1)[at]
            return MultivariateNormal(means, scale_tril=factors, validate_args=False)
        scales = self.log_scales.double().exp().expand_as(self.means)[at]
        normal = Normal(means, scales, validate_args=False)
        return Independent(normal, 1, validate_args=False) if self.event else normal

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)`, `[..., *U, c]` in nats: see `Emission.forward`."""
        features, centered, known = self._features(data, observed)
        log_density = linear_log_density(features, self._natural(), self.dtype, zeros=False)
        if not self.has_matrices or known is None:
            return log_density
        if not is_readable(known):
            return log_density.masked_fill((known.any(-1) & ~known.all(-1))[..., None], torch.nan)
        at, values = [], []
        for group, rows, pattern, factors, away in self._patterns(centered, known):
            white = torch.linalg.solve_triangular(factors, away.mT, upper=False)  # (c, d, m)
            logs = self._diagonal(factors).log().sum(-1, keepdim=True) + pattern.double().sum() * _HALF_LOG_2_PI
            values.append((-logs - white.square().sum(1) / 2).mT)  # (m, c)
            at.append(rows * math.prod(self.units[:-1]) + group)
        if not at:
            return log_density
        flat = log_density.reshape(-1, self.units[-1])
        return flat.index_put((torch.cat(at),), torch.cat(values).to(self.dtype)).view_as(log_density)

    def _natural(self) -> Tensor:
        """The natural parameters, float64 `[*U, c, f]`."""
        means = self._means()
        if not self.has_matrices:
            log_scales = self._log_scales()
            precisions = (-2 * log_scales).exp()
            first = -log_scales - _HALF_LOG_2_PI - precisions * means.square() / 2
            return torch.cat((first, precisions * means, -precisions / 2), -1)
        (d,) = self.event
        identity = torch.eye(d, dtype=means.dtype, device=means.device)
        whiten = torch.linalg.solve_triangular(self._cholesky(), identity, upper=False)
        precisions = whiten.mT @ whiten
        linear = (precisions @ means[..., None])[..., 0]
        logs = self._diagonal(self.factors.double()).sum(-1)
        first = -logs - d * _HALF_LOG_2_PI - (linear * means).sum(-1) / 2
        squares = (-precisions.flatten(-2) / 2).expand(*self.units, d * d)
        return torch.cat((first[..., None], linear, squares), -1)

    def _features(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Statistics `[..., *U, f]`, data about the center and mask `[..., *U, d]`.

        Statistics are count, value and square of each feature, or one count, all values and all products of vectors
        that are observed as a whole.
        """
        data, known = self.known(data, observed)
        if not self.event:
            data, known = data[..., None], None if known is None else known[..., None]
        centered = data.double() - self._center()
        known = None if known is None else known.expand_as(centered)
        counts, values = torch.ones_like(centered), centered
        if known is not None:
            used = known.all(-1, keepdim=True) if self.has_matrices else known
            values, counts = centered.masked_fill(~used, 0.0), used.double().expand_as(centered)
        if not self.has_matrices:
            return torch.cat((counts, values, values * values), -1), centered, known
        return torch.cat((counts[..., :1], values, self._products(values, values).flatten(-2)), -1), centered, known

    def _patterns(self, centered: Tensor, known: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """For each variable and pattern of entries that are not all missing: the rows of the data that have it.

        Yields the variable, m rows, the pattern `[d]`, the Cholesky factors `[c, d, d]` of covariances whose missing
        entries are those of the identity, and differences from the means `[c, m, d]`, 0 where missing.
        """
        c, d = self.units[-1], self.event[0]
        centered, known = by_group(centered, self.units), groups_of(known, self.units)
        means, spread = self._means().view(-1, c, d), self._spread().reshape(-1, c, d, d)
        for group, masks in enumerate(known):
            for pattern in masks[masks.any(-1) & ~masks.all(-1)].unique(dim=0):
                rows = (masks == pattern).all(-1).nonzero()[:, 0]
                inside = pattern[:, None] & pattern
                matrices = spread[group].masked_fill(~inside, 0.0) + (~pattern).double().diag_embed()
                away = centered[group, rows] - means[group][:, None]
                yield group, rows, pattern, torch.linalg.cholesky(matrices), away.masked_fill(~pattern, 0.0)

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """Expected numbers of observations, sums and products about the center: see `Emission.statistics`."""
        features, centered, known = self._features(data, observed)
        statistics = weighted_sums(flow, features, self.units)
        if not self.has_matrices or known is None or not is_readable(known):
            return statistics
        c, d = self.units[-1], self.event[0]
        flows, means, spread = groups_of(flow.double(), self.units), self._means(), self._spread()
        by_unit = statistics.view(-1, c, statistics.shape[-1])
        for group, rows, pattern, factors, away in self._patterns(centered, known):
            covariance, weights = spread.reshape(-1, c, d, d)[group], flows[group, rows].mT  # (c, m)
            inside = pattern[:, None] & pattern
            gain = covariance @ torch.cholesky_inverse(factors).masked_fill(~inside, 0.0)
            values = means.view(-1, c, d)[group][:, None] + torch.where(pattern, away, away @ gain.mT)
            rest = (covariance - gain @ covariance).masked_fill(pattern[:, None] | pattern, 0.0)
            counts = weights.sum(-1, keepdim=True)
            products = (weights[..., None] * values).mT @ values + counts[..., None] * rest
            sums = (weights[..., None] * values).sum(1)
            by_unit[group] += torch.cat((counts, sums, products.flatten(-2)), -1)
        return statistics

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set means and covariances to those of the data, weighted by the flow, with the prior.

        See `Emission.maximize`; `step` is the part of the way in the moments. With means that are not trained, the
        scatter is that about them.
        """
        d = self.event[0] if self.event else 1
        counts, sums, squares = statistics.split((1, d, d * d) if self.has_matrices else (d, d, d), -1)
        # numbers of observations in a shape that broadcasts to the covariances
        total, squares = (counts[..., None], squares.unflatten(-1, (d, d))) if self.has_matrices else (counts, squares)
        scale, prior_count, place, mean_count = self._prior()
        center, before = self._center()[..., None, :], self._means()
        average, place = torch.where(counts > 0, sums / counts, 0.0), place - center
        within = squares - self._products(sums, average)
        # features whose observations differ by no more than rounding have variance 0
        varies = self._diagonal(within) > ROUNDING * self._diagonal(squares)
        within = torch.where(self._products(varies, varies), within, 0.0)
        means = torch.where(counts + mean_count > 0, (sums + mean_count * place) / (counts + mean_count), before)
        means = means if self.means.requires_grad else before
        mean_counts = mean_count[..., None] if self.has_matrices else mean_count.expand_as(means)
        scatter = within + total * self._products(means - average, means - average)
        scatter = scatter + mean_counts * self._products(means - place, means - place)
        number = self._pooled(total) + prior_count + self._pooled((mean_counts > 0).double())
        old = self._shared(self._spread())
        covariance = torch.lerp(old, (self._pooled(scatter) + scale) / number, step)
        # moments move linearly: the covariance of the mixture of both Gaussians, means apart included
        moves = self._pooled(total * self._products(means - before, means - before)) / number
        covariance = torch.where(number > 0, covariance + step * (1 - step) * moves, old)
        if (self.factors if self.has_matrices else self.log_scales).requires_grad:
            self._refuse_singular(covariance)
        self._store(torch.lerp(before, means, step) + center, covariance, trained_only=True)

    def _refuse_singular(self, covariance: Tensor) -> None:
        """Raise an error for a unit whose covariance is singular but for rounding."""
        positive = (covariance > 0) & covariance.isfinite()
        if self.has_matrices:
            factors, info = torch.linalg.cholesky_ex(covariance)
            left = self._diagonal(factors).square()
            positive = (left > ROUNDING * self._diagonal(covariance)) & (info == 0)[..., None]
        if bool(positive.all()):
            return
        unit, feature = self._place(~positive.all(-1) if self.has_matrices else ~positive)
        which = f"unit {unit}{feature}"
        if self.covariance == "tied":
            which = f"the units of {unit[:-1]}" if unit[1:] else "the units"
        raise ValueError(
            f"maximize: expected positive variances, got 0 for {which}, on too few observations: pass "
            "prior=NormalInverseWishart(scale, dof) to the Gaussian, or have fewer units"
        )

    def num_parameters(self) -> int:
        """The number of trained means, and of trained variances or entries of covariances' lower triangles."""
        spread = self.factors if self.has_matrices else self.log_scales
        entries = torch.ones_like(spread).tril().sum() if self.has_matrices else spread.numel()
        return self.means.requires_grad * self.means.numel() + spread.requires_grad * int(entries)

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        covariance = "" if self.covariance == "diag" else f', covariance="{self.covariance}"'
        return super().extra_repr() + (f", num_features={self.event[0]}" if self.event else "") + covariance
