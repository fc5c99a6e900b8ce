"""Conjugate priors of probabilities, rates, means and covariances, for maximum a posteriori fits."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .checks import check_number


class Prior(nn.Module):
    """A density of the parameters of a module, without its normalizing constant; it may be improper.

    Hyperparameters are numbers or tensors that broadcast to the parameters. They are buffers, in the `state_dict`.
    """

    # the least values of hyperparameters, which are finite
    _least: Mapping[str, float] = {}

    def __init__(self, **hyperparameters: float | Tensor) -> None:
        super().__init__()
        for name, value in hyperparameters.items():
            if not isinstance(value, Tensor):
                check_number(name, value)
            numbers, least = torch.as_tensor(value, dtype=torch.float64).clone(), self._least.get(name, -torch.inf)
            refused = ~(numbers.isfinite() & (numbers >= least))
            if not numbers.is_meta and bool(refused.any()):
                expected = f"finite numbers from {least} on" if name in self._least else "finite numbers"
                raise ValueError(f"{name}: expected {expected}, got {numbers[refused][0].item():g}")
            self.register_buffer(name, numbers)

    def extra_repr(self) -> str:
        """The hyperparameters, or the shapes of tensors."""
        values = {name: value.item() if value.dim() == 0 else list(value.shape) for name, value in self.named_buffers()}
        return ", ".join(f"{name}={value}" for name, value in values.items())


class Dirichlet(Prior):
    """`log p(w) = sum_k (concentration_k - 1) log w_k` of probabilities w.

    Args:
        concentration: 1 or more; `concentration - 1` is added to expected counts. 1 is the uniform density.

    Raises:
        TypeError: the concentration is neither a number nor a tensor.
        ValueError: a number is less than 1 or not finite.

    >>> Dirichlet(2.0).log_density(torch.tensor([0.5, 0.5]).log())
    tensor(-1.3863, dtype=torch.float64)
    """

    concentration: Tensor
    _least = {"concentration": 1}

    def __init__(self, concentration: float | Tensor = 1.0) -> None:
        super().__init__(concentration=concentration)

    def log_density(self, log_weights: Tensor) -> Tensor:
        """The logarithm of the density of probabilities, a scalar in float64."""
        counts = (self.concentration - 1).expand(log_weights.shape)
        return (counts * log_weights.double().masked_fill(counts == 0, 0.0)).sum()


class Gamma(Prior):
    """`log p(r) = (concentration - 1) log r - rate r` of rates r.

    Args:
        concentration: 1 or more; `concentration - 1` is added to sums of counts.
        rate: 0 or more; it is added to numbers of observations.

    Raises:
        TypeError: an argument is neither a number nor a tensor.
        ValueError: a number is too small or not finite.

    >>> Gamma(2.0, 1.0).log_density(torch.tensor(0.5).log())
    tensor(-1.1931, dtype=torch.float64)
    """

    concentration: Tensor
    rate: Tensor
    _least = {"concentration": 1, "rate": 0}

    def __init__(self, concentration: float | Tensor = 1.0, rate: float | Tensor = 0.0) -> None:
        super().__init__(concentration=concentration, rate=rate)

    def log_density(self, log_rates: Tensor) -> Tensor:
        """The logarithm of the density of rates, a scalar in float64."""
        log_rates = log_rates.double()
        counts = (self.concentration - 1).expand(log_rates.shape)
        return (counts * log_rates.masked_fill(counts == 0, 0.0) - self.rate * log_rates.exp()).sum()


class NormalInverseWishart(Prior):
    r"""An inverse-Wishart density of covariances S, and a normal one of means m given S.

    `log p(m, S) = -((dof + d + 1) log det S + tr(scale S^-1)) / 2`, and, where `mean_count` is positive,
    `- (log det S + mean_count (m - mean)' S^-1 (m - mean)) / 2`. A `Gaussian` without matrices has this prior, with
    d = 1, of each variance and of the means that belong to it.

    Args:
        scale: added to the sums of squares about the means. A number is that of each feature; a tensor broadcasts to
            the covariances, or to the variances.
        dof: degrees of freedom; `dof + d + 1` is added to the number of observations, and 0 or more.
        mean: where the means are expected; it broadcasts to them.
        mean_count: the number of observations that the expectation of the means is worth, `[*U, c]` or a number.

    Raises:
        TypeError: an argument is neither a number nor a tensor.
        ValueError: a number is too small or not finite.

    >>> NormalInverseWishart(scale=0.1, dof=3.0)
    NormalInverseWishart(scale=0.1, dof=3.0, mean=0.0, mean_count=0.0)
    """

    scale: Tensor
    dof: Tensor
    mean: Tensor
    mean_count: Tensor
    _least = {"mean_count": 0}

    def __init__(
        self, scale: float | Tensor, dof: float | Tensor, mean: float | Tensor = 0.0, mean_count: float | Tensor = 0.0
    ) -> None:
        super().__init__(scale=scale, dof=dof, mean=mean, mean_count=mean_count)
