"""The base class of models of sequences along a chain of hidden states: arguments, initialization and fits."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import Lengths, as_lengths, check_dense, check_is_tensor, tensor_of
from .checks import check_mask, check_unsharded, mask_of
from .emissions.emission import Emission
from .fitting import Fit, Optimizer, fit
from .parameters import fill, frozen, over, reset_parameters


class ChainModel(torch.nn.Module):
    """The base class of `HMM` and `ChainCircuit`: models of sequences along a chain of hidden states."""

    # whether the initial distribution is that of the transitions, which leaves them without a maximum in closed form
    stationary = False

    @torch.no_grad()
    def initialize(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw trained parameters again: weights uniformly over the simplex, emissions near observations of the data.

        >>> from logchain.nn import HMM
        >>> hmm = HMM(2, "gaussian")
        >>> hmm.initialize(torch.tensor([1.0, 1.0, 5.0]))
        >>> hmm.emission.means.detach().sort().values
        tensor([1., 5.])
        """
        check_unsharded(self)
        emission = self._emission()
        reset_parameters(self, generator, without=emission if isinstance(emission, Emission) else None)
        if isinstance(emission, Emission) and any(p.requires_grad for p in emission.parameters()):
            with frozen(emission):
                data, known, _ = self._observations(data, observed, lengths)
                emission.initialize(data, known, generator=generator)

    def fit(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        weights: Tensor | None = None,
        method: Literal["em", "gradient"] = "em",
        max_iterations: int = 100,
        tolerance: float = 1e-2,
        batch_size: int | None = None,
        step: float | Callable[[int], float] | None = None,
        optimizer: Optimizer | None = None,
        restarts: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Fit:
        """Fit the trained parameters to data by maximum likelihood, in place: see `logchain.nn.fit`.

        `observed`, `lengths` and, of an `HMM`, `covariates` are those of the class, the other options those of
        `logchain.nn.fit`. By default, parameters that nobody has set are initialized first.

        Returns:
            A `Fit`; its `str` is a short report.

        >>> from logchain.nn import HMM
        >>> hmm = HMM(2, "poisson")
        >>> report = hmm.fit(torch.tensor([0, 1, 0, 1, 30, 31, 32, 33]), generator=torch.Generator().manual_seed(0))
        >>> report.converged
        True
        >>> hmm.emission.log_rates.exp().detach().sort().values
        tensor([ 0.5000, 31.5000])
        """
        if method == "em" and self.stationary:
            raise ValueError("method: expected 'gradient' with a stationary initial distribution, got 'em'")
        conditions: dict[str, Any] = {"observed": observed, "lengths": lengths, "covariates": covariates}
        data, conditions = self._in_batch(data, {name: part for name, part in conditions.items() if part is not None})
        return fit(
            self,
            data,
            conditions=conditions,
            weights=weights,
            method=method,
            max_iterations=max_iterations,
            tolerance=tolerance,
            batch_size=batch_size,
            step=step,
            optimizer=optimizer,
            restarts=restarts,
            generator=generator,
            progress=progress,
        )

    def num_observations(
        self, data: Tensor, observed: Tensor | None = None, *, lengths: Lengths | None = None, **others: Any
    ) -> Tensor:
        """The number of steps of each sequence `[n]` at which something is observed."""
        data, known, _ = self._observations(data, observed, lengths)
        axes = self._event_axes()
        if axes is None:  # steps are the second axis
            return torch.full(data.shape[:1], data.shape[1]) if known is None else known.flatten(1).sum(1)
        present = ~data.isnan() if known is None else known & ~data.isnan()
        return (present.flatten(-axes).any(-1) if axes else present).flatten(1).sum(1)

    def _emission(self) -> torch.nn.Module:
        """The module of the densities of observations."""
        raise NotImplementedError

    def _event_axes(self) -> int | None:
        """Number of axes of the data after that of the steps; None if it is not known."""
        raise NotImplementedError

    def _observations(
        self, data: Tensor, observed: Tensor | None, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Data with 0 where nothing is observed, the mask of observed entries, None if all are, and the lengths `[*B]`.

        The mask ends with each sequence. If the number of axes of an event is known, it has the shape of the data,
        otherwise that of `observed` or `[*B, v]`.
        """
        check_is_tensor("data", data)
        check_dense("data", data)
        event_axes = self._event_axes()
        if event_axes is not None:
            steps = data.shape[: max(data.dim() - event_axes, 0)]  # (*B, v)
        else:
            steps = data.shape[: 1 + (0 if lengths is None else tensor_of(lengths).dim())]
        if not steps:
            raise ValueError(f"data: expected shape [..., v{', ...' * bool(event_axes)}], got {list(data.shape)}")
        known, ends = observed, None
        if observed is not None and event_axes is not None:
            known = mask_of(observed, data.shape, steps)
        elif observed is not None:
            # the shape of the mask says how many axes of the data are those of an event
            check_mask(observed, *(data.shape[:end] for end in range(1, data.dim() + 1)))
            steps = observed.shape
        if lengths is not None:
            ends = as_lengths(lengths, data.new_empty(()).expand(*steps, 1), given=("data", data))
            inside = torch.arange(steps[-1], device=data.device) < ends[..., None]  # (*B, v)
            known = inside if known is None else known & over(inside, known.shape)
        if known is None:
            return data, None, ends
        # entries that are not observed may be outside the emission's support
        return fill(data, known), known if event_axes is None else over(known, data.shape), ends

    def _in_batch(self, data: Tensor, conditions: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Data and conditions with a batch axis: one is added to a single sequence, if the axes of an event are known.

        Conditions of another kind are refused by `log_prob`.
        """
        check_is_tensor("data", data)
        event_axes = self._event_axes()
        if "observed" in conditions and event_axes is not None:
            conditions["observed"] = mask_of(conditions["observed"], data.shape, data.shape[: data.dim() - event_axes])
        if "lengths" in conditions:
            conditions["lengths"] = tensor_of(conditions["lengths"])
        if event_axes is None or data.dim() != 1 + event_axes:
            return data, conditions
        if "lengths" in conditions:
            as_lengths(conditions["lengths"], data.new_empty(()).expand(data.shape[0], 1), given=("data", data))
        parts = {name: part[None] if isinstance(part, Tensor) else part for name, part in conditions.items()}
        return data[None], parts
