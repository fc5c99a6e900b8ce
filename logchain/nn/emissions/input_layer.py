"""Log-densities of observations given each hidden unit."""

import torch
from torch import Tensor

from ...arguments import check_device, check_is_tensor
from ...tensors import at_hand
from ..checks import check_count, check_mask
from ..parameters import arithmetic


class InputLayer(torch.nn.Module):
    r"""`log p(data | unit)` for all units: the emissions of a hidden Markov model, the input layer of a circuit.

    Units `[*U, c]` are `c` hidden states for each index of `U`, which for circuits are repetitions and variables. Data
    are `[..., *U, *event]`, the result is `[..., *U, c]` in nats. Entries that are NaN, and those where `observed` is
    False, are summed out, which leaves `log 1 = 0`. What is no observation of the family is refused by value on a CPU;
    inside `torch.compile` and transforms of `torch.func`, and on a GPU, values are not looked at.

    A subclass has the parameters and implements `log_density` (or `forward`), `draw` and `mode`; see also
    `ExponentialFamily` and `Finite`.

    Args:
        units: `[*U, c]`, or `c` alone.
        event: the shape of one observation: () or (d,).

    >>> class Exponential(InputLayer):  # a family of one's own: waiting times, with a rate for each unit
    ...     def __init__(self, units):
    ...         super().__init__(units)
    ...         self.log_rates = torch.nn.Parameter(torch.zeros(self.units))
    ...
    ...     def reset_parameters(self, generator=None):
    ...         self.log_rates.data.normal_(generator=generator)
    ...
    ...     def log_density(self, data):
    ...         return self.log_rates - data * self.log_rates.exp()
    ...
    ...     def draw(self, states, generator=None):
    ...         rates = self.of_states(self.log_rates.detach(), states).exp()
    ...         return torch.empty_like(rates).exponential_(generator=generator) / rates
    ...
    ...     def mode(self):
    ...         return torch.zeros(self.units), self.log_rates.detach()
    >>> waits = Exponential(2)
    >>> waits(torch.tensor([1.0, torch.nan]))
    tensor([[-1., -1.],
            [ 0.,  0.]], grad_fn=<WhereBackward0>)
    >>> waits.draw(torch.tensor([0, 1, 1])).shape
    torch.Size([3])
    """

    # whether the density is a product over the entries of an event, any of which may then be missing
    factorised = True

    def __init__(self, units: int | tuple[int, ...], event: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.units = tuple(units) if isinstance(units, tuple | list) else (units,)
        self.event = event
        check_count("units", *self.units)
        check_count("event", *event)
        if not self.units:
            raise ValueError("units: expected a positive integer or several, got none")

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data | unit)` for all units.

        Args:
            data: `[..., *U, *event]`; the axes `U` may have size 1. NaN is missing.
            observed: bool, of the shape of the data, or without the axes of an event; False is missing.

        Returns:
            `[..., *U, c]` in nats.
        """
        data, known = self.known(data, observed)
        log_density = self.log_density(data.unsqueeze(-1 - len(self.event)))
        if known is not None:
            known = known.unsqueeze(-1 - len(self.event))
            known = known if self.factorised or not self.event else known[..., 0]
            # selected, not multiplied by 0, which would make NaN of infinity
            log_density = torch.where(known, log_density, 0.0)
        return log_density.sum(-1) if self.event and self.factorised else log_density

    def known(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Data with fillers where nothing is observed, and a mask of what is.

        Args:
            data: as in `forward`.
            observed: as in `forward`.

        Returns:
            Data, and a bool mask of their shape, None if everything is observed.

        >>> from logchain.nn import Gaussian
        >>> Gaussian(2).known(torch.tensor([1.0, torch.nan]), None)
        (tensor([1., 0.]), tensor([ True, False]))
        """
        data = self.check(data)
        known: Tensor | None = None
        if data.is_floating_point():
            known = ~data.isnan()
            if at_hand(known) and bool(known.all()):
                known = None
        if observed is not None:
            check_mask(observed, data.shape, data.shape[: data.dim() - len(self.event)])
            if observed.shape != data.shape:
                observed = observed[..., None].expand(data.shape)
            known = observed if known is None else known & observed
        if known is None:
            return data, None
        if self.event and not self.factorised:
            whole = known.all(-1, keepdim=True)
            if at_hand(known) and bool((known != whole).any()):
                raise ValueError("data: expected each event whole or missing, got some of which a part is missing")
            known = whole.expand(data.shape)
        return self.fill(data, known), known

    def fill(self, data: Tensor, known: Tensor) -> Tensor:
        """Data with some value of the support where nothing is observed.

        Args:
            data: `[..., *U, *event]`.
            known: bool mask of the same shape.

        Returns:
            Data of the same shape and dtype.

        >>> from logchain.nn import Gaussian
        >>> Gaussian(2).fill(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))
        tensor([1., 0.])
        """
        return data.masked_fill(~known, 0)

    def check(self, data: Tensor) -> Tensor:
        """Data, after checks of their kind and shape; subclasses may also check values.

        Args:
            data: `[..., *U, *event]`.

        Returns:
            The data.

        Raises:
            TypeError: they are no tensor of real numbers.
            ValueError: their shape does not go with the units, or their device is not that of the parameters.

        >>> from logchain.nn import Gaussian
        >>> Gaussian(2).check(torch.tensor([1.0]))
        tensor([1.])
        """
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

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew.

        Args:
            generator: the source of randomness.
        """
        raise NotImplementedError

    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Draw the parameters anew, in the range of the data.

        Args:
            data: as in `forward`.
            observed: as in `forward`.
            generator: the source of randomness.

        >>> from logchain.nn import Gaussian
        >>> heights = Gaussian(2)
        >>> heights.initialise(torch.tensor([1.0, 1.0, 5.0]))
        >>> heights.means.detach().sort().values
        tensor([1., 5.])
        """
        self.reset_parameters(generator)

    def log_density(self, data: Tensor) -> Tensor:
        """Log-densities of data without missing entries.

        Args:
            data: `[..., *U, 1, *event]`.

        Returns:
            `[..., *U, c]` in nats, or `[..., *U, c, d]` where `factorised`.
        """
        raise NotImplementedError

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One observation of each given state.

        Args:
            states: int64 `[..., *U]`.
            generator: the source of randomness.

        Returns:
            `[..., *U, *event]`.
        """
        raise NotImplementedError

    def log_probabilities(self) -> Tensor:
        """Log-probabilities of all values, where there are finitely many.

        Returns:
            `[*U, c, K]` in nats.

        Raises:
            TypeError: there are infinitely many.

        >>> from logchain.nn import Bernoulli
        >>> Bernoulli(3).log_probabilities().shape
        torch.Size([3, 2])
        """
        raise TypeError(f"input: expected a family with finitely many values, got {type(self).__name__}")

    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable observation of each unit.

        Returns:
            Observations `[*U, c, *event]`, and their log-densities `[*U, c]` in nats.
        """
        raise NotImplementedError

    def of_states(self, parameter: Tensor, states: Tensor) -> Tensor:
        """A parameter at given states.

        Args:
            parameter: `[*U, c, *rest]`.
            states: int64 `[..., *U]`.

        Returns:
            `[..., *U, *rest]`, float32 at least.
        """
        axes = [torch.arange(size, device=states.device) for size in self.units[:-1]]
        grid = torch.meshgrid(*axes, indexing="ij") if axes else ()
        return arithmetic(parameter)[(*grid, states)]

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return f"units={self.units}"
