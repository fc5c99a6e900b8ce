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


def cholesky_of(factors: Tensor) -> Tensor:
    """The Cholesky factors in float64 of parameters, which have the logarithms of the diagonals."""
    factors = factors.double()
    return factors.tril(-1) + factors.diagonal(dim1=-2, dim2=-1).exp().diag_embed()


def factors_of(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The parameters of Cholesky factors, and the rows `[..., d]` that are, but for rounding, independent of others."""
    cholesky, failed = torch.linalg.cholesky_ex(matrices)
    diagonal = cholesky.diagonal(dim1=-2, dim2=-1)
    independent = diagonal.square() > ROUNDING * matrices.diagonal(dim1=-2, dim2=-1)
    return cholesky.tril(-1) + diagonal.log().diag_embed(), independent & (failed == 0)[..., None]


class Finite(Constraint):
    """Finite numbers."""

    def check(self, value: Tensor) -> Tensor:
        """Whether numbers are finite: two operations where `isfinite` takes four."""
        return value.abs() < torch.inf


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
        if prior is not None:
            self._prior(prior)
        first_draw(self, generator)

    @property
    def variances(self) -> Tensor:
        """The variances `[*U, c]` or `[*U, c, d]`, without gradients."""
        variances = self._diagonal(self._spread().detach().to(self.dtype))
        return (variances if self.event else variances[..., 0]).expand(self.means.shape)

    @property
    def covariances(self) -> Tensor:
        """The covariances `[*U, c, d, d]`, without gradients; d is 1 for numbers."""
        if not self.has_matrices:
            return self.variances.reshape(*self.units, -1).diag_embed()
        return self._spread().detach().to(self.dtype).expand(*self.units, -1, -1)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the means again, standard normal; the variances are 1."""
        self.means.normal_(generator=generator)
        self._parameter.zero_()

    @torch.no_grad()
    def start(
        self, data: Tensor, known: Tensor | None, generator: torch.Generator | None, **covariates: Tensor
    ) -> None:
        """Set the means to observations far from each other, the variances to those of all data, with the prior."""
        start = seeds(self, data, known, generator)
        squares, counts = start.variance * start.counts, start.counts
        if self.has_matrices:
            squares, counts = squares.diag_embed(), counts[..., None]
        squares, counts = self._pooled(squares), self._pooled(counts)
        if self.prior is not None:
            scale, number, *_ = self._prior(self.prior)
            squares, counts = squares + scale, counts + number
        if not bool((self._diagonal(squares) > 0).all()):
            expected = "at least two different observations of every variable and feature, or a prior"
            raise ValueError(f"data: expected {expected}, got one")
        self.means.copy_(start.places.view_as(self.means))
        self._store(squares / counts)

    @torch.no_grad()
    def set(self, means: Tensor, covariance: Tensor) -> None:
        """Set means and covariances.

        Args:
            means: `[*U, c]` or `[*U, c, d]`, or what broadcasts to it.
            covariance: variances of the same shape or, if "full" or "tied", covariances `[*U, c, d, d]`; broadcast
                likewise. Those that are shared, spherical by all features or tied by all units, have to be the same.

        Raises:
            ValueError: a mean is not finite, a variance not positive, a covariance singular but for rounding, or
                what is shared is not the same.
        """
        means = broadcast("means", means, self.means.shape)
        if not means.isfinite().all():
            raise ValueError("means: expected finite numbers")
        event = 2 * self.event if self.has_matrices else self.event
        covariance = broadcast("covariance", covariance, torch.Size((*self.units, *event)))
        if not covariance.isfinite().all():
            raise ValueError("covariance: expected finite numbers")
        covariance = covariance if self.event else covariance[..., None]
        shared = covariance if self._shared_axis is None else covariance.narrow(self._shared_axis, 0, 1)
        if not bool((covariance == shared).all()):
            alike = "features" if self.covariance == "spherical" else "units"
            raise ValueError(f"covariance: expected the same for all {alike}, got different ones")
        if not bool(self._store(shared).all()):
            raise ValueError("covariance: expected positive variances, or positive definite matrices")
        self.means.copy_(means)

    def _store(self, spread: Tensor) -> Tensor:
        """Set variances or covariances if all are positive but for rounding, and return which rows `[..., d]` are."""
        if self.has_matrices:
            values, positive = factors_of(spread)
        else:
            values = spread.log() / 2
            positive = values.isfinite()
        if bool(positive.all()):
            self._parameter.copy_(values if self.event else values[..., 0])
        return positive

    @property
    def _parameter(self) -> torch.nn.Parameter:
        """The parameter of the covariances."""
        return self.factors if self.has_matrices else self.log_scales

    def _log_scales(self) -> Tensor:
        """Logarithms of standard deviations, or of the diagonals of factors, float64 `[*U, c, d]`; 1 if shared."""
        return self._diagonal(self._parameter.double()).reshape(*self._parameter.shape[: len(self.units)], -1)

    def _spread(self) -> Tensor:
        """Variances `[*U, c, d]` or covariances `[*U, c, d, d]`, float64; axes that share have size 1."""
        if not self.has_matrices:
            return (2 * self._log_scales()).exp()
        factors = cholesky_of(self.factors)
        return factors @ factors.mT

    def _precisions(self) -> Tensor:
        """The inverses of `_spread`."""
        if not self.has_matrices:
            return (-2 * self._log_scales()).exp()
        identity = torch.eye(*self.event, dtype=torch.float64, device=self.factors.device)
        whiten: Tensor = torch.linalg.solve_triangular(cholesky_of(self.factors), identity, upper=False)
        return whiten.mT @ whiten

    def _means(self) -> Tensor:
        """The means `[*U, c, d]` about the center, in float64."""
        return self.means.double().view(*self.units, -1) - self._center()[..., None, :]

    def _center(self) -> Tensor:
        """The mean `[*U, d]` of the units' means, about which statistics are taken so that they cancel less."""
        return self.means.detach().double().view(*self.units, -1).mean(-2)

    def _pooled(self, sums: Tensor) -> Tensor:
        """Sums added up over the features or units that share a variance or covariance."""
        return sums if self._shared_axis is None else sums.sum(self._shared_axis, keepdim=True)

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Products of each feature with itself or, for matrices, of all pairs of features."""
        return left[..., :, None] * right[..., None, :] if self.has_matrices else left * right

    def _times(self, precisions: Tensor, values: Tensor) -> Tensor:
        """Precisions times values `[*U, c, d]`."""
        return precisions.matmul(values[..., None]).squeeze(-1) if self.has_matrices else precisions * values

    def _of_event(self, values: Tensor) -> Tensor:
        """Values of features, summed over those of a vector if they have one matrix."""
        return values.sum(-1, keepdim=True) if self.has_matrices else values

    def _diagonal(self, spread: Tensor) -> Tensor:
        """The variances of variances, or of covariances."""
        return spread.diagonal(dim1=-2, dim2=-1) if self.has_matrices else spread

    def _prior(self, prior: NormalInverseWishart) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scale and number of observations of each covariance, place and number of each mean `[*U, c, d or 1]`."""
        shape, units = self._parameter.shape, len(self.units)
        scale = prior.scale
        if self.has_matrices and not scale.dim():
            scale = scale * torch.eye(*self.event).to(scale)
        scale = broadcast("prior.scale", scale, shape)
        dof = broadcast("prior.dof", prior.dof, shape[:units] if self.has_matrices else shape)
        dof = dof + 1 + (self.event[0] if self.has_matrices else 1)
        place = broadcast("prior.mean", prior.mean, self.means.shape).reshape(*self.units, -1)
        count = broadcast("prior.mean_count", prior.mean_count, torch.Size(self.units))[..., None]
        if self.has_matrices:
            return scale, dof[..., None, None], place, count
        return scale.reshape(*shape[:units], -1), dof.reshape(*shape[:units], -1), place, count

    def log_prior(self) -> Tensor:
        """The logarithm of the prior density of means and covariances: see `Emission.log_prior`."""
        if self.prior is None:
            return super().log_prior()
        scale, number, place, count = self._prior(self.prior)
        precisions, logs = self._precisions(), self._of_event(self._log_scales())
        away = self.means.double().view(*self.units, -1) - place
        squares = self._of_event(away * self._times(precisions, away))
        of_means = torch.where(count > 0, 2 * logs + count * squares, 0.0).sum()
        of_covariances = 2 * number * (logs[..., None] if self.has_matrices else logs)
        return -(of_covariances.sum() + (scale * precisions).sum() + of_means) / 2

    def distribution(self, at: tuple[Tensor, ...] = ()) -> Distribution:
        """The normal distributions in float64: see `Emission.distribution`."""
        means = self.means.double()[at]
        if self.has_matrices:
            factors = cholesky_of(self.factors).expand(*self.units, -1, -1)[at]
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
        flat = log_density.reshape(-1, self.units[-1])
        at, values = [torch.zeros(0).long().to(flat.device)], [flat[:0]]
        for group, rows, pattern, factors, away in self._patterns(centered, known):
            white = torch.linalg.solve_triangular(factors, away.mT, upper=False)  # (c, d, m)
            logs = self._diagonal(factors).log().sum(-1, keepdim=True) + pattern.double().sum() * _HALF_LOG_2_PI
            values.append((-logs - white.square().sum(1) / 2).mT.to(flat.dtype))  # (m, c)
            at.append(rows * math.prod(self.units[:-1]) + group)
        return flat.index_put((torch.cat(at),), torch.cat(values)).view_as(log_density)

    def _natural(self) -> Tensor:
        """The natural parameters, float64 `[*U, c, f]`."""
        means, precisions = self._means(), self._precisions()
        linear = self._times(precisions, means)
        first = self._of_event(-self._log_scales() - _HALF_LOG_2_PI - linear * means / 2)
        size = means.shape[-1] ** (2 if self.has_matrices else 1)
        squares = (-precisions / 2).flatten(len(self.units)).expand(*self.units, size)
        return torch.cat((first, linear, squares), -1)

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
            used = (known.all(-1, keepdim=True) if self.has_matrices else known).expand_as(centered)
            values, counts = centered.masked_fill(~used, 0.0), used.double()
        if self.has_matrices:
            counts = counts[..., :1]
        return torch.cat((counts, values, self._products(values, values).flatten(data.dim() - 1)), -1), centered, known

    def _patterns(self, centered: Tensor, known: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """For each variable and pattern of entries that are not all missing: the rows of the data that have it.

        Yields the variable, m rows, the pattern `[d]`, the Cholesky factors `[c, d, d]` of covariances whose missing
        entries are those of the identity, and differences from the means `[c, m, d]`, 0 where missing.
        """
        c, d = self.units[-1], self.event[0]
        centered, known = by_group(centered, self.units), groups_of(known, self.units)
        means, spread = self._means().view(-1, c, d), self._spread().expand(*self.units, d, d).reshape(-1, c, d, d)
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
        flows, by_unit = groups_of(flow.double(), self.units), statistics.view(-1, c, statistics.shape[-1])
        means, spread = self._means().view(-1, c, d), self._spread().expand(*self.units, d, d).reshape(-1, c, d, d)
        for group, rows, pattern, factors, away in self._patterns(centered, known):
            covariance, weights = spread[group], flows[group, rows].mT[..., None]  # (c, m, 1)
            inside = pattern[:, None] & pattern
            gain = covariance @ torch.cholesky_inverse(factors).masked_fill(~inside, 0.0)
            values = means[group][:, None] + torch.where(pattern, away, away @ gain.mT)
            rest = (covariance - gain @ covariance).masked_fill(pattern[:, None] | pattern, 0.0)
            counts, weighed = weights.sum(1), weights * values
            products = weighed.mT @ values + counts[..., None] * rest
            by_unit[group] += torch.cat((counts, weighed.sum(1), products.flatten(-2)), -1)
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
        center, before = self._center()[..., None, :], self._means()
        number, scale, weight = self._pooled(total), total.new_zeros(()), total
        if self.prior is not None:
            # a prior of means is a number of observations at its place
            scale, of_prior, place, count = self._prior(self.prior)
            place, of_place = place - center, count[..., None] if self.has_matrices else count.expand_as(sums)
            number = number + of_prior + self._pooled((of_place > 0).double())
            counts, weight, sums = counts + count, total + of_place, sums + count * place
            squares = squares + of_place * self._products(place, place)
        average = torch.where(counts > 0, sums / counts, before)
        means, old = average if self.means.requires_grad else before, self._spread()
        scatter = squares - self._products(sums, average)
        # features whose observations differ by no more than rounding have variance 0
        varies = self._diagonal(scatter) > ROUNDING * self._diagonal(squares)
        scatter = torch.where(self._products(varies, varies), scatter, 0.0)
        if means is before:
            scatter = scatter + weight * self._products(before - average, before - average)
        covariance = (self._pooled(scatter) + scale) / number
        if step < 1:
            # moments move linearly: the covariance of the mixture of both Gaussians, means apart included
            apart = self._pooled(total * self._products(means - before, means - before)) / number
            means, covariance = torch.lerp(before, means, step), torch.lerp(old, covariance, step)
            covariance = covariance + step * (1 - step) * apart
        if self._parameter.requires_grad:
            positive = self._store(torch.where(number > 0, covariance, old))
            if not bool(positive.all()):
                raise ValueError(self._singular(positive))
        if self.means.requires_grad:
            self.means.copy_((means + center).view_as(self.means))

    def _singular(self, positive: Tensor) -> str:
        """An error message for variances `[*U, c, d]`, where axes that share have size 1, that are not all positive."""
        *unit, feature = (~positive).nonzero()[0].tolist()
        which = (
            f"unit {unit}" if self.covariance != "tied" else f"the units of {unit[:-1]}" if unit[1:] else "the units"
        )
        which += f", feature {feature}" if self.event and self.covariance != "spherical" else ""
        remedy = "pass prior=NormalInverseWishart(scale, dof) to the Gaussian, or have fewer units"
        return f"maximize: expected positive variances, got 0 for {which}, on too few observations: {remedy}"

    def num_parameters(self) -> int:
        """The number of trained means, and of trained variances or entries of covariances' lower triangles."""
        spread = torch.ones_like(self._parameter)
        entries = int((spread.tril() if self.has_matrices else spread).sum())
        return self.means.requires_grad * self.means.numel() + self._parameter.requires_grad * entries

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        covariance = "" if self.covariance == "diag" else f', covariance="{self.covariance}"'
        return super().extra_repr() + (f", num_features={self.event[0]}" if self.event else "") + covariance
