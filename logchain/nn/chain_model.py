"""The base class of models of sequences along a chain of hidden states: data, initialization and fits."""

from collections.abc import Callable
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from .checks import check_unsharded
from .data import Data, Ends, Rows, Sequences
from .emissions.emission import Emission
from .fitting import Fit, Optimizer, fit
from .parameters import frozen, reset_parameters


class ChainModel(torch.nn.Module):
    """The base class of `HMM` and `ChainCircuit`: models of sequences along a chain of hidden states."""

    # whether the initial distribution is that of the transitions, which leaves them without a maximum in closed form
    stationary = False
    num_states = 1

    @torch.no_grad()
    def initialize(
        self,
        data: Data,
        observed: Rows = None,
        *,
        lengths: Ends = None,
        covariates: Rows = None,
        states: Rows = None,
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
            sequences = self._sequences(data, observed, lengths, covariates, states)
            options: dict[str, Any] = {"covariates": sequences.covariates} if takes_covariates(emission) else {}
            with frozen(emission.parameters()):
                emission.initialize(*self._observations(sequences), generator=generator, **options)

    def fit(
        self,
        data: Data,
        *,
        observed: Rows = None,
        lengths: Ends = None,
        covariates: Rows = None,
        states: Rows = None,
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

        Data and what belongs to them are those of the class, the other options those of `logchain.nn.fit`. By default,
        parameters that nobody has set are initialized first.

        Returns:
            A `Fit`; its `str` is a short report.

        Warns:
            UserWarning: there are several sequences of one step each, which hold nothing about transitions.

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
        sequences = self._sequences(data, observed, lengths, covariates, states).with_batch()
        if sequences.has_one_step_each and self.num_states > 1:
            remedy = (
                "for one sequence of vectors, pass an emission with their size, such as Gaussian(2, num_features=1)"
            )
            warn(
                f"data: {len(sequences)} sequences of one step each hold nothing about transitions; {remedy}, "
                "and for one of numbers data of shape [v]",
                stacklevel=2,
            )
        return fit(
            self,
            sequences,
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

    def num_observations(self, data: Any, *arguments: Any, **conditions: Any) -> Tensor:
        """The number of steps of each sequence `[n]` at which something is observed, of data as `log_prob` takes."""
        sequences = self._sequences(data, *arguments, **conditions).with_batch()
        data, known, axes = sequences.data, sequences.known, self._event_axes()
        if axes is None:  # what a module reads of an event is not known
            present = data.new_ones(data.shape[: 2 - bool(sequences.sizes)]) if known is None else known
        else:
            present = ~data.isnan() if known is None else known & ~data.isnan()
            present = present.flatten(-axes).any(-1) if axes else present
        if sequences.sizes is not None:
            return torch.stack([steps.sum() for steps in present.split(sequences.sizes)])
        return present.flatten(1).sum(1)

    def _emission(self) -> torch.nn.Module:
        """The module of the densities of observations."""
        raise NotImplementedError

    def _event_axes(self) -> int | None:
        """Number of axes of the data after that of the steps; None if it is not known."""
        raise NotImplementedError

    def _observations(self, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        """Data and mask as the emission takes them."""
        return sequences.data, sequences.known

    def _sequences(
        self, data: Any, observed: Rows = None, lengths: Ends = None, covariates: Rows = None, states: Rows = None
    ) -> Sequences:
        """The checked arguments of a method, or those that were checked before."""
        if isinstance(data, Sequences):
            return data
        arguments = {"data": data, "observed": observed, "covariates": covariates, "states": states}
        like = next(self.parameters(), torch.empty(0, device="cpu"))
        return Sequences.of(arguments, lengths, self._event_axes(), like)


def takes_covariates(module: torch.nn.Module) -> bool:
    """Whether a module is called with the keyword `covariates`."""
    return bool(getattr(module, "takes_covariates", False))
