"""Normal distributions with a mean and a covariance for each hidden unit: numbers and vectors of them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal
from torch.distributions.constraints import Constraint

from ...arguments import check_choice
from ...tensors import is_readable
from ..checks import check_count
from ..parameters import broadcast, first_draw
from ..priors import NormalInverseWishart
from .emission import Emission, Units
from .linear import by_group, groups_of, linear_log_density, weighted_sums

# the largest variance, relative to the sum of squares, that may be nothing but rounding of float64
ROUNDING = 2.0**-46

# computed here, since torch.compile starts again where it meets a function of a number
_HALF_LOG_2_PI = math.log(2 * math.pi) / 2


class Finite(Constraint):
    """Finite numbers."""

    def check(self, value: Tensor) -> Tensor:
        """Whether numbers are finite: two operations where `isfinite` takes four."""
        return value.abs() < torch.inf


def cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factors, and the rows `[..., d]` that are, but for rounding, independent of others."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    independent = _diagonal(factors).square() > ROUNDING * _diagonal(matrices)
    return factors, independent & (failed == 0)[..., None]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def _sum(values: Tensor) -> Tensor:
    """The sum along the last axis, in no operation if its size is 1."""
    return values.squeeze(-1) if values.shape[-1] == 1 else values.sum(-1)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)


class Covariances(Emission):
    """Normal distributions, whose covariances `[*U, c, b, e, e]` have b blocks; axes that share one have size 1.

    Blocks are single features (b = d, e = 1) or, if the covariance is "full" or "tied", whole vectors (b = 1, e = d).
    """

    support, expected = Finite(), "finite numbers, or NaN for what is missing"
    log_scales: nn.Parameter
    factors: nn.Parameter

    def __init__(self, units: Units, num_features: int | None, covariance: str) -> None:
        if num_features is not None:
            check_count("num_features", num_features)
        super().__init__(units, () if num_features is None else (num_features,))
        check_choice("covariance", covariance, ("spherical", "diag", "full", "tied"))
        if covariance != "diag" and num_features is None:
            raise ValueError(f"num_features: expected an integer with covariance={covariance!r}, got None")
        self.covariance, self.has_matrices = covariance, covariance in ("full", "tied")
        d = num_features or 1
        self._blocks = (1, d) if self.has_matrices else (d, 1)
        # the axis along which blocks share one matrix
        self._shared_axis = {"spherical": -3, "tied": -4}.get(covariance)
        units = (*self.units[:-1], 1) if covariance == "tied" else self.units
        event = 2 * self.event if self.has_matrices else (1,) if covariance == "spherical" else self.event
        self._spread_shape = *units, 1 if covariance == "spherical" else self._blocks[0], *2 * self._blocks[1:]
        name = "factors" if self.has_matrices else "log_scales"
        self.register_parameter(name, nn.Parameter(torch.empty(*units, *event)))

    @property
    def variances(self) -> Tensor:
        """The variances `[*U, c]` or `[*U, c, d]`, without gradients."""
        variances = _diagonal(self._spread().detach().to(self.dtype)).expand(*self.units, *self._blocks)
        return variances.reshape(*self.units, *self.event)

    @property
    def covariances(self) -> Tensor:
        """The covariances `[*U, c, d, d]`, without gradients; d is 1 for numbers."""
        if not self.has_matrices:
            return self.variances.reshape(*self.units, -1).diag_embed()
        return self._spread().detach().to(self.dtype).squeeze(-3).expand(*self.units, -1, -1)

    @property
    def _parameter(self) -> nn.Parameter:
        return self.factors if self.has_matrices else self.log_scales

    def _cholesky(self) -> Tensor:
        """The Cholesky factors of the covariances, in float64."""
        parameter = self._parameter.double().view(self._spread_shape)
        return parameter.tril(-1) + _diagonal(parameter).exp().diag_embed() if self.has_matrices else parameter.exp()

    def _spread(self) -> Tensor:
        """The covariances, in float64."""
        factors = self._cholesky()
        return factors @ factors.mT if self.has_matrices else factors.square()

    def _precisions(self) -> tuple[Tensor, Tensor]:
        """The inverses of the covariances, and logarithms of the roots of their determinants `[*U, c, b]`."""
        parameter = self._parameter.double().view(self._spread_shape)
        if not self.has_matrices:
            return (-2 * parameter).exp(), parameter[..., 0, 0]
        identity = torch.eye(parameter.shape[-1], dtype=torch.float64, device=parameter.device)
        whiten: Tensor = torch.linalg.solve_triangular(self._cholesky(), identity, upper=False)
        return whiten.mT @ whiten, _diagonal(parameter).sum(-1)

    def _pooled(self, sums: Tensor) -> Tensor:
        """Sums added up over the blocks that share a matrix."""
        return sums if self._shared_axis is None else sums.sum(self._shared_axis, keepdim=True)

    def _store(self, matrices: Tensor) -> Tensor | None:
        """Set the covariances if all are positive but for rounding; otherwise return which rows `[*U, c, d]` are."""
        if self.has_matrices:
            factors, positive = cholesky(matrices)
            values = factors.tril(-1) + _diagonal(factors).log().diag_embed()
        else:
            values = matrices.log() / 2
            positive = values[..., 0].abs() < torch.inf
        if not bool(positive.all()):
            return positive.flatten(-2)
        self._parameter.copy_(values.view_as(self._parameter))
        return None

    def _set_covariances(self, covariance: Tensor) -> None:
        event = 2 * self.event if self.has_matrices else self.event
        covariance = broadcast("covariance", covariance, torch.Size((*self.units, *event)))
        if bool((bad := ~covariance.isfinite()).any()):
            raise ValueError(f"covariance: expected finite numbers, got {covariance[bad][0]:g}")
        covariance = covariance.reshape(*self.units, *self._blocks, self._blocks[1])
        shared = covariance if self._shared_axis is None else covariance.narrow(self._shared_axis, 0, 1)
        if not bool((covariance == shared).all()):
            alike = "features" if self.covariance == "spherical" else "units"
            raise ValueError(f"covariance: expected the same for all {alike}, got different ones")
        if self._store(shared) is not None:
            raise ValueError("covariance: expected positive variances, or positive definite matrices")

    def _normal(self, means: Tensor, at: Any) -> Distribution:
        """The distributions of units at an index, for their means."""
        factors = self._cholesky().expand(*self.units, -1, -1, -1)[at]
        if self.has_matrices:
            return MultivariateNormal(means, scale_tril=factors[..., 0, :, :], validate_args=False)
        scales = factors[..., 0, 0] if self.event else factors[..., 0, 0, 0]
        normal = Normal(means, scales.expand_as(means), validate_args=False)
        return Independent(normal, 1, validate_args=False) if self.event else normal

    def num_parameters(self) -> int:
        """The number of trained coefficients, and of trained variances or entries of covariances' lower triangles."""
        trained = {name: torch.ones_like(part) for name, part in self.named_parameters() if part.requires_grad}
        return sum(int((ones.tril() if name == "factors" else ones).count_nonzero()) for name, ones in trained.items())

    def extra_repr(self) -> str:
        covariance = "" if self.covariance == "diag" else f', covariance="{self.covariance}"'
        return super().extra_repr() + (f", num_features={self.event[0]}" if self.event else "") + covariance


class Gaussian(Covariances):
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
            [ 0.0000,  0.0000]], grad_fn=<ToCopyBackward0>)
    """

    partial = True

    def __init__(
        self,
        units: Units,
        num_features: int | None = None,
        covariance: str = "diag",
        *,
        prior: NormalInverseWishart | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(units, num_features, covariance)
        self.means = nn.Parameter(torch.empty(*self.units, *self.event))
        self.prior = prior
        if prior is not None:
            self._prior(prior)
        first_draw(self, generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the means again, standard normal; the variances are 1."""
        self.means.normal_(generator=generator)
        self._parameter.zero_()

    @torch.no_grad()
    def start(self, data: Tensor, known: Tensor | None, generator: Generator | None, **covariates: Tensor) -> None:
        """Set the means to observations far from each other, the variances to those of all data, with the prior."""
        places, variance, counts, _ = self.seeds(data, known, generator)
        counts = counts.unflatten(-1, self._blocks)  # (*U, 1, b, e)
        squares = (variance.view_as(counts) * counts).diag_embed()
        squares, counts = self._pooled(squares), self._pooled(counts[..., None])
        if self.prior is not None:
            scale, number, *_ = self._prior(self.prior)
            squares, counts = squares + scale, counts + number
        if not bool((_diagonal(squares) > 0).all()):
            expected = "at least two different observations of every variable and feature, or a prior"
            raise ValueError(f"data: expected {expected}, got one")
        self.means.copy_(places.view_as(self.means))
        self._store((squares / counts).expand(self._spread_shape))

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
        if bool((bad := ~means.isfinite()).any()):
            raise ValueError(f"means: expected finite numbers, got {means[bad][0]:g}")
        self._set_covariances(covariance)
        self.means.copy_(means)

    def _prior(self, prior: NormalInverseWishart) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scale and number of observations of each covariance, place and number of each mean."""
        shape, (b, e) = self._parameter.shape, self._blocks
        scale = prior.scale
        if self.has_matrices and not scale.dim():
            scale = scale * torch.eye(e).to(scale)
        scale = broadcast("prior.scale", scale, shape).reshape(self._spread_shape)
        dof = broadcast("prior.dof", prior.dof, shape[: len(self.units)] if self.has_matrices else shape)
        place = broadcast("prior.mean", prior.mean, self.means.shape).reshape(*self.units, b, e)
        count = broadcast("prior.mean_count", prior.mean_count, torch.Size(self.units))[..., None, None]
        return scale, (dof + 1 + e).reshape(*self._spread_shape[:-2], 1, 1), place, count

    def log_prior(self) -> Tensor:
        if self.prior is None:
            return super().log_prior()
        scale, number, place, count = self._prior(self.prior)
        precisions, logs = self._precisions()
        away = self.means.double().view_as(place) - place
        squares = (_outer(away, away) * precisions).sum((-2, -1))
        count = count[..., 0]
        of_means = torch.where(count > 0, 2 * logs + count * squares, 0.0).sum()
        return -((2 * number[..., 0, 0] * logs).sum() + (scale * precisions).sum() + of_means) / 2

    def distribution(self, at: tuple[Tensor, ...] = ()) -> Distribution:
        return self._normal(self.means.double()[at], at)

    def _means(self) -> tuple[Tensor, Tensor]:
        """The means `[*U, c, b, e]` and, so that statistics about it cancel less, their mean `[*U, 1, b, e]`."""
        means = self.means.double().view(*self.units, *self._blocks)
        return means, means.detach().mean(-3, keepdim=True)

    def _features(self, data: Tensor, observed: Tensor | None, center: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Statistics `[..., *U, f]` of blocks observed as a whole, data about the center and mask `[..., *U, b, e]`."""
        data, known = self.known(data, observed)
        shape = *data.shape[: data.dim() - len(self.event)], *self._blocks
        centered = data.double().reshape(shape) - center.squeeze(-3)
        if known is None:
            return _statistics(centered), centered, None
        known = known.reshape(shape).expand_as(centered)
        return _statistics(centered, known.all(-1, keepdim=True)), centered, known

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        (means, center), (precisions, logs) = self._means(), self._precisions()
        features, centered, known = self._features(data, observed, center)
        means = means - center
        natural = _natural(means, precisions, logs + self._blocks[1] * _HALF_LOG_2_PI)
        log_density = linear_log_density(features, natural, self.dtype, zeros=False)
        if not self.has_matrices or known is None:
            return log_density
        if not is_readable(known):
            return log_density.masked_fill((known.any(-1) & ~known.all(-1)), torch.nan)
        flat = log_density.reshape(-1, self.units[-1])
        at, values = [torch.zeros(0).long().to(flat.device)], [flat[:0]]
        means = means.reshape(-1, *means.shape[-3:])  # (g, c, 1, d)
        for group, rows, away, pattern, factors in self._patterns(centered, known, means):
            white = torch.linalg.solve_triangular(factors, away.mT, upper=False)  # (c, d, m)
            logs = _diagonal(factors).log().sum(-1, keepdim=True) + pattern.double().sum() * _HALF_LOG_2_PI
            values.append((-logs - white.square().sum(1) / 2).mT.to(flat.dtype))  # (m, c)
            at.append(rows * math.prod(self.units[:-1]) + group)
        return flat.index_put((torch.cat(at),), torch.cat(values)).view_as(log_density)

    def _matrices(self) -> Tensor:
        """The covariances `[g, c, d, d]` of all variables."""
        return self._spread().expand(*self.units, 1, *2 * self.event).reshape(-1, self.units[-1], *2 * self.event)

    def _patterns(
        self, centered: Tensor, known: Tensor, means: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """Each variable and pattern of entries that are missing in part, with the rows that have it."""
        centered, known = by_group(centered[..., 0, :], self.units), groups_of(known[..., 0, :], self.units)
        for group, (masks, matrices) in enumerate(zip(known, self._matrices(), strict=True)):
            for pattern in masks[masks.any(-1) & ~masks.all(-1)].unique(dim=0):
                rows, identity = (masks == pattern).all(-1).nonzero()[:, 0], torch.eye(len(pattern)).to(matrices)
                away = (centered[group, rows] - means[group]).masked_fill(~pattern, 0.0)  # (c, m, d)
                # of covariances whose missing entries are those of the identity
                factors = torch.linalg.cholesky(torch.where(pattern[:, None] & pattern, matrices, identity))
                yield group, rows, away, pattern, factors

    def statistics(self, flow: Tensor, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """Expected numbers of observations, sums and products about the center: see `Emission.statistics`."""
        means, center = self._means()
        features, centered, known = self._features(data, observed, center)
        statistics = weighted_sums(flow, features, self.units)
        if not self.has_matrices or known is None or not is_readable(known):
            return statistics
        matrices, means = self._matrices(), (means - center).view(-1, self.units[-1], 1, *self.event)
        flows, by_unit = groups_of(flow.double(), self.units), statistics.view(*matrices.shape[:2], -1)
        for group, rows, away, pattern, factors in self._patterns(centered, known, means):
            covariance, weights = matrices[group], flows[group, rows].mT[..., None]  # (c, m, 1)
            gain = covariance @ torch.cholesky_inverse(factors).masked_fill(~(pattern[:, None] & pattern), 0.0)
            values = means[group] + torch.where(pattern, away, away @ gain.mT)
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
        b, e = self._blocks
        counts, sums, squares = statistics.unflatten(-1, (b, -1)).split((1, e, e * e), -1)
        total, squares = counts[..., None], squares.unflatten(-1, (e, e))
        before, center = self._means()
        before = before - center
        number, old = self._pooled(total), self._spread()
        scale: Tensor | float = 0.0
        if self.prior is not None:
            # a prior of means is a number of observations at its place
            scale, of_prior, place, of_place = self._prior(self.prior)
            place, of_place = place - center, of_place.expand_as(counts)
            number = number + of_prior + self._pooled((of_place > 0).double()[..., None])
            counts, sums = counts + of_place, sums + of_place * place
            squares = squares + of_place[..., None] * _outer(place, place)
        average = torch.where(counts > 0, sums / counts, before)
        scatter = squares - _outer(sums, average)
        # features whose observations differ by no more than rounding have variance 0
        varies = _diagonal(scatter) > ROUNDING * _diagonal(squares)
        scatter = torch.where(_outer(varies, varies), scatter, 0.0)
        means = average if self.means.requires_grad else before
        if means is before:
            scatter = scatter + counts[..., None] * _outer(before - average, before - average)
        covariance = (self._pooled(scatter) + scale) / number
        if step < 1:
            # moments move linearly: the covariance of the mixture of both Gaussians, means apart included
            apart = self._pooled(total * _outer(means - before, means - before)) / number
            means, covariance = torch.lerp(before, means, step), torch.lerp(old, covariance, step)
            covariance = covariance + step * (1 - step) * apart
        if self._parameter.requires_grad:
            positive = self._store(torch.where(number > 0, covariance, old))
            if positive is not None:
                raise ValueError(self._singular(positive))
        if self.means.requires_grad:
            self.means.copy_((means + center).view_as(self.means))

    def _singular(self, positive: Tensor) -> str:
        """An error message for variances `[*U, c, d]`, where axes that share have size 1, that are not all positive."""
        *unit, feature = (~positive).nonzero()[0].tolist()
        which = f"unit {unit}"
        if self.covariance == "tied":
            which = f"the units of {unit[:-1]}" if unit[1:] else "the units"
        which += f", feature {feature}" if self.event and self.covariance != "spherical" else ""
        remedy = "pass prior=NormalInverseWishart(scale, dof) to the Gaussian, or have fewer units"
        return f"maximize: expected positive variances, got 0 for {which}, on too few observations: {remedy}"


def _statistics(values: Tensor, known: Tensor | None = None) -> Tensor:
    """Count, values and products `[..., b (1 + e + e^2)]` of values `[..., b, e]`, 0 where a mask is False."""
    if known is None:
        counts = torch.ones_like(values[..., :1])
    else:
        counts, values = known.double(), values.masked_fill(~known, 0.0)
    return torch.cat((counts, values, _outer(values, values).flatten(-2)), -1).flatten(-2)


def _natural(means: Tensor, precisions: Tensor, logs: Tensor) -> Tensor:
    """The natural parameters of `_statistics`, for means `[..., b, e]` and minus the log-density at them `[..., b]`."""
    linear = _sum(precisions * means.unsqueeze(-2))  # (*U, c, b, e)
    first = torch.sub(-logs, _sum(linear * means), alpha=0.5)
    squares = (precisions / -2).flatten(-2).expand(*means.shape[:-1], -1)
    return torch.cat((first[..., None], linear, squares), -1).flatten(-2)
