"""Log-densities of observations given each hidden unit."""

import torch
from torch import Tensor

from ...arguments import check_is_tensor
from ...operands import at_hand
from ..checks import check_count, check_mask
from ..parameters import arithmetic


class InputLayer(torch.nn.Module):
    r"""`log p(data | unit)` for all units: the emissions of a hidden Markov model, the input layer of a circuit.

    Units `[*U, c]` are `c` hidden states for each index of `U`, which for circuits are repetitions and variables. Data
    are `[..., *U, *event]`, the result is `[..., *U, c]` in nats. Entries that are NaN, and those where `observed` is
    False, are summed out, which leaves `log 1 = 0`.

    A subclass has the parameters and implements `log_density` (or `forward`), `draw` and `mode`; see also
    `ExponentialFamily` and `Finite`.

    Args:
        units: `[*U, c]`, or `c` alone.
        event: the shape of one observation: () or (d,).
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
        """`log p(data | unit)`, `[..., *U, c]` in nats.

        Args:
            data: `[..., *U, *event]`; the axes `U` may have size 1. NaN is missing.
            observed: bool, of the shape of the data, or without the axes of an event; False is missing.
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
        """Data with fillers where nothing is observed, and a mask of their shape, None if everything is observed."""
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
        """Data with some value of the support where the mask `known` is False."""
        return data.masked_fill(~known, 0)

    def check(self, data: Tensor) -> Tensor:
        """Data, after checks of their kind and shape; subclasses may also check values."""
        check_is_tensor("data", data)
        if data.is_complex():
            raise TypeError(f"data: expected real numbers, got {str(data.dtype)[6:]}")
        lead = self.units[:-1]
        wanted = (*lead, *self.event)
        have = data.shape[data.dim() - len(wanted) :] if wanted else ()
        allowed = [(size, 1) for size in lead] + [(size,) for size in self.event]
        if data.dim() < len(wanted) or not all(a in b for a, b in zip(have, allowed, strict=True)):
            raise ValueError(f"data: expected shape [{', '.join(map(str, ('...', *wanted)))}], got {list(data.shape)}")
        return data

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew."""
        raise NotImplementedError

    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Draw the parameters anew, in the range of the data `[..., *U, *event]`."""
        self.reset_parameters(generator)

    def log_density(self, data: Tensor) -> Tensor:
        """Log-densities `[..., *U, c]`, or `[..., *U, c, d]` where `factorised`, of data `[..., *U, 1, *event]`."""
        raise NotImplementedError

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One observation of each given state: int64 `[..., *U]` to `[..., *U, *event]`."""
        raise NotImplementedError

    def log_probabilities(self) -> Tensor:
        """Log-probabilities of all values, where there are finitely many: `[*U, c, K]`."""
        raise TypeError(f"input: expected a family with finitely many values, got {type(self).__name__}")

    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable observation of each unit `[*U, c, *event]`, and its log-density `[*U, c]`."""
        raise NotImplementedError

    def of_states(self, parameter: Tensor, states: Tensor) -> Tensor:
        """A parameter `[*U, c, *rest]` at given states int64 `[..., *U]`: `[..., *U, *rest]`."""
        axes = [torch.arange(size, device=states.device) for size in self.units[:-1]]
        grid = torch.meshgrid(*axes, indexing="ij") if axes else ()
        return arithmetic(parameter)[(*grid, states)]

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return f"units={self.units}"
