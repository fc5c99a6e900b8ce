"""Gaussian observations, numbers or vectors, with a mean and a covariance for each hidden unit."""

import math

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal
from torch.distributions.constraints import Constraint

from ...arguments import check_choice
from ..checks import check_count, check_prior
from ..parameters import broadcast
from .exponential_family import ExponentialFamily
from .starts import seeds

# the largest variance, relative to the sum of squares, that may be nothing but rounding of float64
_ROUNDING = 2.0**-46

# computed here, since torch.compile starts again where it meets a function of a number
_HALF_LOG_2_PI = math.log(2 * math.pi) / 2


class _Finite(Constraint):
    """Finite numbers."""

    def check(self, value: Tensor) -> Tensor:
        """Whether numbers are finite."""
        return value.isfinite()


class Gaussian(ExponentialFamily):
    r"""Gaussian observations: `log p(y | unit) = -(d log 2 pi + log det S + (y - m)' S^-1 (y - m)) / 2`.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_features: d, for vectors of d entries; None for numbers.
        covariance: "diagonal", or "spherical" with one variance for all features, where any entries of a vector may be
            missing; "full", or "tied" with one matrix for all units, where all or none may.
        prior_scatter, prior_count: added by expectation maximization to a unit's sum of squares and to its number of
            observations: `S = (squares + prior_scatter) / (count + prior_count)`. A number is that of each feature; a
            tensor broadcasts to the sums, `[*U, c(, d)]` or `[*U, c, d, d]` (tied `[*U, 1, d, d]`), and that of
            `prior_count` to the units `[*U, c]` (tied `[*U, 1]`).
        prior_means, prior_means_count: expectation maximization adds that many observations (`[*U, c]`) at these means
            (which broadcast to `means`), whose distance from the new means also counts among the squares.
        generator: the source of randomness for the initial means, standard normal; the initial variances are 1.

    The priors are a normal one of the means, `N(prior_means, S / prior_means_count)`, and an inverse gamma or inverse
    Wishart one of S.

    `means`: parameter `[*U, c]` or `[*U, c, d]`. `log_scales`: of the same shape, spherical `[*U, c, 1]`, logarithms of
    standard deviations; or `factors` `[*U, c, d, d]`, tied `[*U, 1, d, d]`, whose lower triangles, the diagonal
    exponentiated, are Cholesky factors of S. Call: data `[..., *U]` or `[..., *U, d]` to `[..., *U, c]`, in nats; see
    `Emission`.

    Raises:
        TypeError: a prior is neither a number nor a tensor.
        ValueError: shapes do not go together, or a number is infinite (checked on a CPU); or, in `maximize`, a variance
            is 0, as for a unit that a single observation belongs to, where the likelihood has no maximum. A prior or
            fewer units avoid that.

    Cost: that of `ExponentialFamily` with 3 d statistics, or 1 + d + d^2 for a full covariance. Statistics are taken
    about the mean m0 of a variable's means: the rounding error of a log-density is `2^-53 ((y - m0) / deviation)^2`,
    which leaves five digits for units a million standard deviations apart.

    >>> heights = Gaussian(2)
    >>> heights.set(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 4.0]))
    >>> heights(torch.tensor([0.0, torch.nan]))
    tensor([[-0.9189, -2.7371],
            [ 0.0000,  0.0000]], grad_fn=<ViewBackward0>)
    """

    support, expected = _Finite(), "finite numbers, or NaN for what is missing"
    always_possible = True
    log_scales: torch.nn.Parameter
    factors: torch.nn.Parameter

    def __init__(
        self,
        units: int | tuple[int, ...],
        num_features: int | None = None,
        covariance: str = "diagonal",
        *,
        prior_scatter: float | Tensor = 0.0,
        prior_count: float | Tensor = 0.0,
        prior_means: float | Tensor = 0.0,
        prior_means_count: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if num_features is not None:
            check_count("num_features", num_features)
        super().__init__(units, () if num_features is None else (num_features,))
        check_choice("covariance", covariance, ("diagonal", "spherical", "full", "tied"))
        if covariance != "diagonal" and num_features is None:
            raise ValueError(f"num_features: expected an integer with covariance={covariance!r}, got None")
        self.covariance_kind, self.factorised = covariance, covariance in ("diagonal", "spherical")
        # the axis of a spread along which it is shared, the units that have one each, and the shape of one
        self._shared_axis = {"spherical": -1, "tied": -3}.get(covariance)
        self._spread_units = (*self.units[:-1], 1) if covariance == "tied" else self.units
        self._spread_event = self.event if self.factorised else 2 * self.event
        self.means = torch.nn.Parameter(torch.empty(*self.units, *self.event))
        shape = (*self.units, 1) if covariance == "spherical" else (*self._spread_units, *self._spread_event)
        self.register_parameter("log_scales" if self.factorised else "factors", torch.nn.Parameter(torch.empty(shape)))
        matrices = isinstance(prior_scatter, Tensor) and not self.factorised
        check_prior("prior_scatter", prior_scatter, (*self._spread_units, *self._spread_event), signed=matrices)
        check_prior("prior_count", prior_count, self._spread_units)
        check_prior("prior_means", prior_means, self.means.shape, signed=True)
        check_prior("prior_means_count", prior_means_count, self.units)
        self.prior_scatter, self.prior_count = prior_scatter, prior_count
        self.prior_means, self.prior_means_count = prior_means, prior_means_count
        if isinstance(prior_scatter, Tensor) and matrices and not prior_scatter.is_meta:
            scatter, _ = self._prior_of_spread(torch.zeros((), dtype=torch.float64))
            # of a number, a row or a column there is no telling which matrix is meant
            shares = torch.linalg.eigvalsh(scatter)
            if not bool((scatter == scatter.mT).all() and (shares[..., 0] >= -_ROUNDING * shares[..., -1]).all()):
                raise ValueError("prior_scatter: expected symmetric matrices without negative eigenvalues")
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the means again, standard normal; the variances are 1. See `Emission.reset_parameters`."""
        with torch.no_grad():
            self.means.normal_(generator=generator)
            (self.log_scales if self.factorised else self.factors).zero_()

    @torch.no_grad()
    def initialize(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the means to observations far from each other, the variances to those of all data, with the prior.

        See `Emission.initialize`.

        Raises:
            ValueError: all observations of a variable or feature are equal, and there is no `prior_scatter`.
        """
        chosen, _, variance, counts = seeds(self, data, observed, generator)  # [*U, c, d], [*U, 1, d]
        if not self.event:
            chosen, variance, counts = chosen[..., 0], variance[..., 0], counts[..., 0]
        squares = variance * counts
        if not self.factorised:
            squares, counts = squares.diag_embed(), counts[..., None]
        scatter, prior_count = self._prior_of_spread(squares)
        squares = self._pooled(squares) + scatter
        constant = self._diagonal(squares) <= 0
        if bool(constant.any()):
            unit, feature = self._first(constant)
            variable = f" of variable {unit[:-1]}" if unit[1:] else ""
            raise ValueError(
                "data: expected at least two different observations of every variable and feature, or prior_scatter, "
                f"got one{variable}{feature}"
            )
        covariance = squares / (self._pooled(counts) + prior_count)
        self.set(chosen, covariance.expand(*self.units, *self._spread_event))

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
        covariance = broadcast("covariance", covariance, torch.Size((*self.units, *self._spread_event)))
        if self.factorised and not ((covariance > 0) & covariance.isfinite()).all():
            raise ValueError("covariance: expected positive, finite variances")
        if not covariance.isfinite().all():
            raise ValueError("covariance: expected finite numbers")
        shared = self._shared(covariance)
        if not bool((covariance == shared).all()):
            alike = "features" if self.covariance_kind == "spherical" else "units"
            raise ValueError(f"covariance: expected the same for all {alike}, got different ones")
        if self.factorised:
            self.log_scales.copy_(shared.log() / 2)
        else:
            factors, failed = torch.linalg.cholesky_ex(shared)
            if bool(failed.any()):
                raise ValueError("covariance: expected positive definite matrices")
            self.factors.copy_(factors.tril(-1) + self._diagonal(factors).log().diag_embed())
        self.means.copy_(means)

    def covariance(self) -> Tensor:
        """The variances or covariances of all units.

        Returns:
            Variances `[*U, c]` or `[*U, c, d]` or, if "full" or "tied", covariances `[*U, c, d, d]`.

        >>> Gaussian(1, 2, "full").covariance().detach()
        tensor([[[1., 0.],
                 [0., 1.]]])
        """
        return self._spread().to(self.dtype)

    def _spread(self) -> Tensor:
        """`covariance()` in float64, which holds the squares of all numbers of float32."""
        factors = None if self.factorised else self._cholesky()
        spread = (2 * self.log_scales.double()).exp() if factors is None else factors @ factors.mT
        return spread.expand(*self.units, *self._spread_event)

    def _cholesky(self) -> Tensor:
        """Cholesky factors `[*U, c, d, d]` (tied `[*U, 1, d, d]`) of the covariances, in float64."""
        factors = self.factors.double()
        return factors.tril(-1) + self._diagonal(factors).exp().diag_embed()

    def _shared(self, spread: Tensor) -> Tensor:
        """The first of what is shared, in the shape of the parameter, of a tensor in the shape of `covariance()`."""
        return spread if self._shared_axis is None else spread.narrow(self._shared_axis, 0, 1)

    def _pooled(self, sums: Tensor) -> Tensor:
        """Sums in the shape of `covariance()` added up over the features or units that share it."""
        return sums if self._shared_axis is None else sums.sum(self._shared_axis, keepdim=True)

    def _prior_of_spread(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`prior_scatter` in the shape of the spread's parameter, and `prior_count`, which broadcasts to it."""
        scatter, count = (torch.as_tensor(prior).to(like) for prior in (self.prior_scatter, self.prior_count))
        if not self.factorised and scatter.dim() == 0:
            scatter = scatter * torch.eye(*self.event).to(like)
        scatter = scatter.expand(*self._spread_units, *self._spread_event)
        count = count.expand(self._spread_units).reshape(*self._spread_units, *(1,) * len(self._spread_event))
        return self._pooled(scatter), self._pooled(count.expand_as(scatter))

    def _first(self, mask: Tensor) -> tuple[list[int], str]:
        """The index of the first unit for which a mask in the shape of the spread holds, and words for the feature."""
        at = mask.nonzero()[0].tolist()
        of_features = self.event and self.covariance_kind != "spherical" and mask.dim() > len(self.units)
        return at[: len(self.units)], f", feature {at[-1]}" if of_features else ""

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
            log_scales = self.log_scales.double().expand_as(means)
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
        squares = (-precisions.flatten(-2) / 2).expand(*self.units, d * d)
        return torch.cat((first[..., None], linear, squares), -1)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> Distribution:
        """The normal distributions in float64: see `Emission.distribution`."""
        means = self.means.double()[at]
        if not self.factorised:
            factors = self._cholesky().expand(*self.units, *self._spread_event)[at]
            return MultivariateNormal(means, scale_tril=factors, validate_args=False)
        scales = self.log_scales.double().exp().expand_as(self.means)[at]
        normal = Normal(means, scales, validate_args=False)
        return Independent(normal, 1, validate_args=False) if self.event else normal

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
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set means and covariances to those of the data, weighted by the flow: see `ExponentialFamily.maximize`."""
        d = self.event[0] if self.event else 1
        counts, sums, squares = statistics.split((d, d, d) if self.factorised else (1, d, d * d), -1)
        if not self.event:
            counts, sums, squares = counts[..., 0], sums[..., 0], squares[..., 0]
        # counts in a shape that broadcasts to the covariance
        total, squares = (counts, squares) if self.factorised else (counts[..., None], squares.unflatten(-1, (d, d)))
        centre = self._centre().unsqueeze(len(self.units) - 1)
        means, before = torch.where(counts > 0, sums / counts, 0.0), self.means.double() - centre
        scatter = squares - self._products(sums, means)
        # features whose observations differ by no more than rounding have variance 0
        varies = self._diagonal(scatter) > _ROUNDING * self._diagonal(squares)
        scatter = torch.where(self._products(varies, varies), scatter, 0.0)
        # the prior's observations pull the means, and both lie apart from the new ones
        weight, place = self._prior_of_means(centre)
        used = counts + weight > 0
        share = torch.where(used, counts * weight / (counts + weight), 0.0)
        away = self._products(means - place, means - place)
        scatter = self._pooled(scatter + (share if self.factorised else share[..., None]) * away)
        means = torch.where(used, (sums + weight * place) / (counts + weight), before)
        prior, prior_count = self._prior_of_spread(scatter)
        observed, old = self._pooled(total), self._shared(self._spread())
        covariance = torch.lerp(old, (scatter + prior) / (observed + prior_count), step)
        # mean parameters move linearly: the covariance of the mixture of both Gaussians, means apart included
        moves = self._pooled(total * self._products(means - before, means - before)) / observed
        covariance = torch.where(observed > 0, covariance + step * (1 - step) * moves, old)
        self._refuse_singular(covariance)
        self.set(torch.lerp(before, means, step) + centre, covariance)

    def _prior_of_means(self, centre: Tensor) -> tuple[Tensor, Tensor]:
        """`prior_means_count` in a shape that broadcasts to the means, and `prior_means` about the centre."""
        weight, place = (torch.as_tensor(prior).to(centre) for prior in (self.prior_means_count, self.prior_means))
        return weight.expand(self.units).reshape(*self.units, *(1,) * len(self.event)), place - centre

    def _refuse_singular(self, covariance: Tensor) -> None:
        """Refuse a unit whose covariance is singular but for rounding."""
        if self.factorised:
            singular = covariance <= 0
        else:
            factors, info = torch.linalg.cholesky_ex(covariance)
            left = self._diagonal(factors).square()
            singular = (left <= _ROUNDING * self._diagonal(covariance)).any(-1) | (info > 0)
        if bool(singular.any()):
            unit, feature = self._first(singular)
            which = f"unit {unit}{feature}"
            if self.covariance_kind == "tied":
                which = f"the units of {unit[:-1]}" if unit[1:] else "the units"
            raise ValueError(
                f"maximize: expected positive variances, got 0 for {which}, on too few observations: give the "
                "Gaussian a prior_scatter, or have fewer units"
            )

    def num_parameters(self) -> int:
        """The number of trained means, and of trained variances or entries of covariances' lower triangles."""
        spread = self.log_scales if self.factorised else self.factors
        entries = spread.numel() if self.factorised else torch.ones_like(spread).tril().sum()
        return self.means.requires_grad * self.means.numel() + spread.requires_grad * int(entries)

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        covariance = "" if self.covariance_kind == "diagonal" else f', covariance="{self.covariance_kind}"'
        return super().extra_repr() + (f", num_features={self.event[0]}" if self.event else "") + covariance
