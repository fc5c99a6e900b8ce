"""Log-densities of observations given each hidden unit."""

from itertools import chain
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ...arguments import check_device, check_has_values, check_is_tensor
from ...tensors import is_readable
from ..checks import check_count, check_mask
from ..em import em_step, maximize_by_lbfgs
from ..parameters import arithmetic, seeded
from .linear import by_group

Units = int | tuple[int, ...]


class Emission(nn.Module):
    r"""`log p(data | unit)` for all units: the emissions of a hidden Markov model, the input layer of a circuit.

    Units `[*U, c]` are `c` hidden states for each index of `U`, which for circuits are repetitions and variables. The
    methods take
        data: `[..., *U, *event]`; the axes `U` may have size 1. NaN is missing.
        observed: bool, of the shape of the data, or without the axes of an event; False is missing.
        generator: the source of randomness.

    Missing entries are summed out, which leaves `log 1 = 0`. Values outside the support of the family raise an error on
    a CPU; inside `torch.compile` and transforms of `torch.func`, and on a GPU, values are not checked.

    A subclass defines parameters, `reset_parameters` and `distribution(at)`, which returns one of
    `torch.distributions`. Densities, draws, modes and expectation maximization (by L-BFGS) follow; a subclass may
    override `log_density`, or `statistics` and `maximize` by a closed form.

    Args:
        units: `[*U, c]`, or `c` alone.
        event: the shape of one observation: () or (d,).

    >>> class Exponential(Emission):  # waiting times, with a rate for each unit
    ...     def __init__(self, units):
    ...         super().__init__(units)
    ...         self.log_rates = torch.nn.Parameter(torch.zeros(self.units))
    ...
    ...     def reset_parameters(self, generator=None):
    ...         self.log_rates.data.normal_(generator=generator)
    ...
    ...     def distribution(self, at=()):
    ...         return torch.distributions.Exponential(self.log_rates[at].exp(), validate_args=False)
    >>> waits = Exponential(2)
    >>> waits(torch.tensor([1.0, torch.nan]))
    tensor([[-1., -1.],
            [ 0.,  0.]], grad_fn=<WhereBackward0>)
    >>> waits.draw(torch.tensor([0, 1, 1])).shape
    torch.Size([3])
    """

    # whether single entries of an event may be missing; otherwise it is observed as a whole or not at all
    partial = False
    # whether `forward` takes `covariates`
    takes_covariates = False
    # the number of values, integers from 0, where there are finitely many
    num_values: int | None = None
    # the constraint of torch.distributions that data have to satisfy, and its description in errors
    support: Any = None
    expected = ""

    def __init__(self, units: Units, event: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.units = tuple(units) if isinstance(units, tuple | list) else (units,)
        self.event = event
        check_count("units", *self.units)
        check_count("event", *event)
        if not self.units:
            raise ValueError("units: expected a positive integer or several, got none")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the log-densities: that of the parameters, float32 at least."""
        return arithmetic(next(chain(self.parameters(), self.buffers()))).dtype

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Distribution:
        """The distribution, whose parameters are not validated, with batch shape `[*U, c]`; some are in float64.

        With an index `at` of the units, such as a tensor for each of their axes, the batch shape is that of the index.

        >>> from logchain.nn import Poisson
        >>> quakes = Poisson(2)
        >>> quakes.set(torch.tensor([3.0, 20.0]))
        >>> quakes.distribution().variance
        tensor([ 3.0000, 20.0000], dtype=torch.float64, grad_fn=<ExpBackward0>)
        """
        raise NotImplementedError

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)` for all units, `[..., *U, c]` in nats."""
        data, known = self.known(data, observed)
        log_density = self.log_density(data.unsqueeze(-1 - len(self.event)))
        if known is None:
            return log_density
        known = (known[..., 0] if self.event else known)[..., None]
        # selected, not multiplied by 0, which would make NaN of infinity
        return torch.where(known, log_density, 0.0)

    def log_density(self, data: Tensor) -> Tensor:
        """Log-densities `[..., *U, c]`, in nats, of data `[..., *U, 1, *event]` without missing entries.

        They are exactly -inf outside the support of a unit.
        """
        distribution = self.distribution()
        data = data.to(self.dtype)
        support: Any = distribution.support
        allowed: Tensor = support.check(data)
        if is_readable(allowed) and not bool(allowed.any(-1).all()):
            raise ValueError(f"data: expected {support}, got something else")
        # some families, such as Pareto, evaluate their formula outside their support, too
        return distribution.log_prob(data).to(self.dtype).masked_fill(~allowed, -torch.inf)

    def known(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Data with fillers where nothing is observed, and a mask of their shape, None if everything is observed."""
        data = self.check(data)
        if observed is None and self.support is not None and is_readable(data) and self.support.check(data).all():
            return data, None
        known: Tensor | None = None
        if data.is_floating_point():
            known = ~data.isnan()
            if is_readable(known) and bool(known.all()):
                known = None
        if observed is not None:
            check_mask(observed, data.shape, data.shape[: data.dim() - len(self.event)])
            if observed.shape != data.shape:
                observed = observed[..., None].expand(data.shape)
            known = observed if known is None else known & observed
        if known is not None:
            if self.event and not self.partial:
                whole = known.all(-1, keepdim=True)
                if is_readable(known) and bool((known != whole).any()):
                    raise ValueError("data: expected each event whole or missing, got some of which a part is missing")
                known = whole.expand(data.shape)
            data = self.fill(data, known)
        if self.support is not None and is_readable(data):
            allowed = self.support.check(data)
            if not bool(allowed.all()):
                raise ValueError(f"data: expected {self.expected}, got {data[~allowed][0].tolist()}")
        return data, known

    def fill(self, data: Tensor, known: Tensor) -> Tensor:
        """Data with some value of the support where nothing is observed."""
        return data.masked_fill(~known, 0)

    def check(self, data: Tensor) -> Tensor:
        """Data, after checks of their kind, shape and device."""
        check_is_tensor("data", data)
        if data.is_complex():
            raise TypeError(f"data: expected real numbers, got {str(data.dtype)[6:]}")
        check_device("data", data, next(self.parameters(), data))
        lead = self.units[:-1]
        wanted = (*lead, *self.event)
        have = data.shape[data.dim() - len(wanted) :] if wanted else ()
        allowed = [(size, 1) for size in lead] + [(size,) for size in self.event]
        if data.dim() < len(wanted) or not all(a in b for a, b in zip(have, allowed, strict=True)):
            raise ValueError(f"data: expected shape [{', '.join(map(str, ('...', *wanted)))}], got {list(data.shape)}")
        return data

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the parameters again, without regard to data."""
        raise NotImplementedError

    def initialize(
        self, data: Tensor, observed: Tensor | None = None, *, generator: Generator | None = None, **covariates: Tensor
    ) -> None:
        """Draw the parameters again, in the range of the data: by clusters about observations far from each other.

        >>> from logchain.nn import Gaussian
        >>> heights = Gaussian(2)
        >>> heights.initialize(torch.tensor([1.0, 1.0, 5.0]))
        >>> heights.means.detach().sort().values
        tensor([1., 5.])

        Raises:
            ValueError: a variable or feature is never observed; for `Gaussian`, all observations of one are equal, and
                there is no prior.
        """
        self.start(*self.known(data, observed), generator, **covariates)

    def start(self, data: Tensor, known: Tensor | None, generator: Generator | None, **covariates: Tensor) -> None:
        """`initialize` for data and mask of `known`."""
        self.reset_parameters(generator)
        self.fit_clusters(data, known, generator, **covariates)

    def fit_clusters(
        self, data: Tensor, known: Tensor | None, generator: Generator | None, **covariates: Tensor
    ) -> None:
        """Fit each unit mostly to the observations that are nearest to one of them."""
        *_, nearest = self.seeds(data, known, generator)  # (g, n)
        c = self.units[-1]
        noise = torch.rand(len(nearest), c, c, dtype=torch.float64, device=data.device, generator=generator)
        # random shares of the other clusters make units differ whose seeds are the same
        shares = torch.eye(c, dtype=torch.float64, device=data.device) + noise / 2
        weights = shares.gather(1, nearest[..., None].expand(-1, -1, c)).transpose(0, 1)  # (n, g, c)
        weights = weights.reshape(*data.shape[: data.dim() - len(self.units) + 1 - len(self.event)], *self.units)
        # most of the way, so that no probability becomes 0 because the data lack a value
        em_step(self, [lambda: (weights * self(data, known, **covariates)).sum()], 0.9)

    def seeds(
        self, data: Tensor, known: Tensor | None, generator: Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One observation for each unit, drawn in proportion to its squared distance from those drawn before.

        Returns, in float64, the observations `[*U, c, d]`, where missing entries become the mean; the variance and the
        number of all data `[*U, 1, d]`; and the unit of the observation nearest to each, `[g, n]` for g variables.

        Source: D. Arthur and S. Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007.
        """
        check_has_values("data", data)
        known = torch.ones_like(data, dtype=torch.bool) if known is None else known
        parts = (part if self.event else part[..., None] for part in (data.double(), known))
        rows, seen = (by_group(part, self.units) for part in parts)  # (g, n, d)
        counts = seen.sum(1, keepdim=True)
        if not bool((counts > 0).all()):
            raise ValueError("data: expected at least one observation of every variable and feature, got none of one")
        # the mean is taken about one of the observations, since sums of large numbers would round their differences
        first = rows.gather(1, seen.long().argmax(1, keepdim=True))
        mean = first + torch.where(seen, rows - first, 0.0).sum(1, keepdim=True) / counts
        rows = torch.where(seen, rows, mean)
        variance = (rows - mean).square().sum(1, keepdim=True) / counts
        # distances are in standard deviations, so that features count alike; a constant feature is not scaled
        scaled = (rows - mean) / torch.where(variance > 0, variance, 1.0).sqrt()
        weights, (groups, n, d) = seen.any(-1).double(), rows.shape
        distance, nearest, places = torch.full_like(weights, torch.inf), torch.zeros_like(weights, dtype=torch.long), []
        for unit in range(self.units[-1]):
            apart = (distance.sum(-1) > 0)[:, None] & (unit > 0)
            # unlike `multinomial`, for more than 2^24 columns too
            sums = torch.where(apart, distance, weights).cumsum(-1)
            level = torch.rand(groups, 1, dtype=sums.dtype, device=sums.device, generator=generator) * sums[:, -1:]
            drawn = torch.searchsorted(sums, level, right=True).clamp(max=n - 1)[..., None].expand(-1, 1, d)
            places.append(rows.gather(1, drawn))
            to_drawn = (scaled - scaled.gather(1, drawn)).square().sum(-1) * weights
            nearest = nearest.masked_fill(to_drawn < distance, unit)
            distance = torch.minimum(distance, to_drawn)
        shape = *self.units[:-1], 1, d
        chosen = torch.cat(places, 1).view(*self.units, d)
        return chosen, variance.view(shape), counts.double().view(shape), nearest

    def log_prior(self) -> Tensor:
        """The logarithm of the prior density of the parameters, without its normalizing constant: a float64 scalar."""
        return torch.zeros((), dtype=torch.float64)

    def statistics(self, flow: Tensor, *inputs: Any, **named: Any) -> Any:
        """What `maximize` needs to know of a call, a list or a float64 tensor; those of several calls are added.

        The flow `[..., *U, c]` is the expected number of times that each unit was used: the gradient of a
        log-likelihood with respect to `forward(*inputs, **named)`.
        """
        return [(flow.double(), inputs, named)]

    @torch.no_grad()
    def maximize(self, statistics: Any, step: float = 1.0) -> None:
        """Maximize the expected log-likelihood and the prior over the trained parameters, or move `step` of the way.

        By default up to 20 iterations of L-BFGS, in float32 at least, from the present parameters. Units that are not
        used keep theirs.
        """
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        before = [parameter.clone() for parameter in parameters]
        total = sum((flow.sum() for flow, _, _ in statistics), torch.zeros(()))

        def objective() -> Tensor:
            value: Tensor = self.log_prior()
            for flow, inputs, named in statistics:
                # not 0 times -inf
                value = value + (flow * self(*inputs, **named).double().masked_fill(flow == 0, 0.0)).sum()
            return value / total

        if total > 0:
            maximize_by_lbfgs(parameters, objective, 20)
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(torch.lerp(old, parameter, step))

    @torch.no_grad()
    def draw(self, states: Tensor, generator: Generator | None = None, **covariates: Tensor) -> Tensor:
        """One observation of each of the states, int64 `[..., *U]`.

        The generator draws the seed, since torch's distributions take no generator.

        Returns:
            `[..., *U, *event]`: int64 for integers, otherwise of the parameters' dtype, float32 at least.
        """
        axes = [torch.arange(size, device=states.device) for size in self.units[:-1]]
        grid = torch.meshgrid(*axes, indexing="ij") if axes else ()
        distribution = self.distribution((*grid, states), **covariates)
        devices = [states.device] if states.device.type == "cuda" else []
        with seeded(generator, devices):
            return self._of_kind(distribution.sample(), distribution)

    @torch.no_grad()
    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable observation of each unit `[*U, c, *event]`, and its log-density `[*U, c]` in nats."""
        distribution = self.distribution()
        modes = distribution.mode.detach()
        return self._of_kind(modes, distribution), distribution.log_prob(modes).to(self.dtype)

    def _of_kind(self, values: Tensor, distribution: torch.distributions.Distribution) -> Tensor:
        """Values of a distribution as int64 if they are integers, otherwise in the dtype of the log-densities."""
        support: Any = distribution.support
        return values.to(torch.int64 if getattr(support, "base_constraint", support).is_discrete else self.dtype)

    def log_probabilities(self) -> Tensor:
        """Log-probabilities `[*U, c, K]` in nats of all K values, where there are finitely many."""
        if self.num_values is None:
            raise TypeError(f"emission: expected a family with finitely many values, got {type(self).__name__}")
        values = torch.arange(self.num_values, device=next(self.parameters()).device)
        every: Tensor = self(values.view(-1, *(1,) * (len(self.units) - 1)))
        return every.movedim(0, -1)

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return f"units={self.units}"
