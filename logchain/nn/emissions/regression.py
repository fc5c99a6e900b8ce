"""Linear regressions on covariates, with coefficients for each hidden unit."""

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution

from ...arguments import check_is_tensor
from ..checks import check_count
from ..parameters import broadcast, first_draw
from .gaussian import Covariances, cholesky


class LinearGaussian(Covariances):
    r"""Switching regression: `y ~ N(W u + b, S)` of covariates u, with W, b and S for each unit.

    With former values of y as covariates it is the emission of an autoregressive hidden Markov model. Expectation
    maximization solves weighted least squares.

    Args:
        units: c.
        num_covariates: k.
        num_features: d, for vectors of d entries; None for numbers.
        covariance: "diag", "spherical", "full" or "tied", as of a `Gaussian`.
        bias: whether there is a b.
        generator: the source of randomness for the initial coefficients, standard normal; the variances are 1.

    `weights`: parameter `[c, d, k]`, `bias` `[c, d]` (None without), where d is 1 for numbers; `log_scales` or
    `factors` of the covariances, as of a `Gaussian`. Call: data `[...]` or `[..., d]` and `covariates` `[..., k]` to
    `[..., c]`, in nats; see `Emission`. Covariates are finite where data are observed.

    Raises:
        TypeError: there are no covariates.
        ValueError: shapes do not go together, or a number is infinite (checked on a CPU); in `maximize`, covariates are
            linearly dependent where a unit is used, or fit the data exactly.

    Cost: `c d (k + d)` multiply-adds an observation; expectation maximization takes `c (k + d + 1)^2`, in float64.

    >>> lines = LinearGaussian(1, 1)
    >>> lines.set(torch.tensor([[[2.0]]]), torch.tensor(1.0), torch.tensor(1.0))
    >>> lines(torch.tensor([3.0, 6.0]), covariates=torch.tensor([[1.0], [2.0]]))
    tensor([[-0.9189],
            [-1.4189]], grad_fn=<ToCopyBackward0>)
    """

    bias: nn.Parameter | None
    takes_covariates = True

    def __init__(
        self,
        units: int,
        num_covariates: int,
        num_features: int | None = None,
        covariance: str = "diag",
        *,
        bias: bool = True,
        generator: Generator | None = None,
    ) -> None:
        check_count("units", units)
        check_count("num_covariates", num_covariates)
        super().__init__(units, num_features, covariance)
        self.weights = nn.Parameter(torch.empty(units, num_features or 1, num_covariates))
        self.register_parameter("bias", nn.Parameter(torch.empty(units, num_features or 1)) if bias else None)
        first_draw(self, generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the coefficients again, standard normal; the variances are 1."""
        self.weights.normal_(generator=generator)
        if self.bias is not None:
            self.bias.normal_(generator=generator)
        self._parameter.zero_()

    @torch.no_grad()
    def set(self, weights: Tensor, bias: Tensor | None, covariance: Tensor) -> None:
        """Set W `[c, d, k]`, b `[c, d]` and variances or covariances as of a `Gaussian`, or what broadcasts to these.

        Raises:
            ValueError: a variance is not positive, or a covariance singular but for rounding; see `Gaussian.set`.
        """
        weights = broadcast("weights", weights, self.weights.shape)
        bias = None if self.bias is None or bias is None else broadcast("bias", bias, self.bias.shape)
        self._set_covariances(covariance)
        self.weights.copy_(weights)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def distribution(self, at: tuple[Tensor, ...] = (), covariates: Tensor | None = None) -> Distribution:
        """The normal distributions, of batch shape `[..., c]` for covariates `[..., k]`, or of states `[...]`."""
        covariates = self._checked(covariates).double()
        means = (covariates @ self.weights.double().flatten(0, 1).mT).unflatten(-1, self.weights.shape[:2])
        means = means if self.bias is None else means + self.bias.double()  # (..., c, d)
        if at:
            means = means.expand(*at[0].shape, -1, -1).take_along_dim(at[0][..., None, None], -2)[..., 0, :]
        return self._normal(means if self.event else means[..., 0], at)

    def forward(self, data: Tensor, observed: Tensor | None = None, *, covariates: Tensor | None = None) -> Tensor:
        data, covariates, whole = self._rows(data, observed, covariates)
        log_density = self.distribution((), covariates).log_prob(data[..., None, :] if self.event else data)
        return log_density.masked_fill(~whole[..., None], 0.0).to(self.dtype)

    def statistics(
        self, flow: Tensor, data: Tensor, observed: Tensor | None = None, *, covariates: Tensor | None = None
    ) -> Tensor:
        """Expected products `[c, f, f]` of the vectors `(u, 1, y)`: see `Emission.statistics`."""
        data, covariates, whole = self._rows(data, observed, covariates)
        covariates = covariates.expand(*data.shape[:-1], -1)
        rows = torch.cat((covariates, torch.ones_like(data[..., :1]), data), -1).flatten(0, -2)
        weights = flow.double().masked_fill(~whole[..., None], 0.0).reshape(len(rows), -1)
        return (weights.mT[..., None] * rows).mT @ rows

    @torch.no_grad()
    def maximize(self, statistics: Tensor, step: float = 1.0) -> None:
        """Set coefficients and covariances by weighted least squares: see `Emission.maximize`."""
        c, d, k = self.weights.shape
        bias = torch.zeros_like(self.weights[..., 0]) if self.bias is None else self.bias
        before = torch.cat((self.weights, bias[..., None]), -1).double()  # (c, d, k + 1)
        bias_is_trained = self.bias is not None and self.bias.requires_grad
        free = torch.tensor([self.weights.requires_grad] * k + [bias_is_trained], device=statistics.device)
        # products of the covariates whose coefficients are trained, and of y without the effect of the others
        change = torch.eye(k + 1 + d).to(statistics).repeat(c, 1, 1)
        change[:, k + 1 :, : k + 1] = -before.masked_fill(free, 0.0)
        change = change[:, torch.cat((free, free.new_ones(d)))]
        count = statistics[:, k, k, None, None]
        products = torch.where(count > 0, change @ statistics @ change.mT, torch.eye(change.shape[1]).to(statistics))
        factors, independent = cholesky(products)
        if not bool(independent.all()):
            raise ValueError(
                f"maximize: expected linearly independent covariates that do not fit the data exactly, got others "
                f"for unit {int((~independent).nonzero()[0, 0])}: have fewer covariates, fewer units or more data"
            )
        # the factor of the products holds the coefficients and the factor of the residuals' scatter
        q, after = factors.shape[-1] - d, before.clone()
        after[..., free] = torch.linalg.solve_triangular(
            factors[:, :q, :q], factors[:, q:, :q], upper=False, left=False
        )
        scatter = torch.where(count > 0, factors[:, q:, q:] @ factors[:, q:, q:].mT, 0.0)
        scatter = scatter[:, None] if self.has_matrices else scatter.diagonal(dim1=-2, dim2=-1)[..., None, None]
        number, old = self._pooled(count[..., None].expand(-1, self._blocks[0], 1, 1)), self._spread()
        covariance = torch.where(number > 0, torch.lerp(old, self._pooled(scatter) / number, step), old)
        after = torch.where(count > 0, torch.lerp(before, after, step), before)
        for parameter, value in (self.weights, after[..., :k]), (self.bias, after[..., k]):
            if parameter is not None and parameter.requires_grad:
                parameter.copy_(value)
        if self._parameter.requires_grad:
            self._store(covariance)

    def _rows(self, data: Tensor, observed: Tensor | None, covariates: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Data `[..., d]` or `[...]` and covariates in float64, 0 where data are missing, and where they are not."""
        data, known = self.known(data, observed)
        data, covariates = (data if self.event else data[..., None]).double(), self._checked(covariates).double()
        whole = torch.ones_like(data[..., 0], dtype=torch.bool)
        if known is not None:
            whole = known[..., 0] if self.event else known
        return data, covariates.masked_fill(~whole[..., None], 0.0), whole

    def _checked(self, covariates: Tensor | None) -> Tensor:
        check_is_tensor("covariates", covariates)
        assert covariates is not None
        if not covariates.dim() or covariates.shape[-1] != self.weights.shape[-1]:
            raise ValueError(
                f"covariates: expected shape [..., {self.weights.shape[-1]}], got {list(covariates.shape)}"
            )
        return covariates

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{super().extra_repr()}, num_covariates={self.weights.shape[-1]}{bias}"
