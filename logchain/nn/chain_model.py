"""The base class of models of sequences along a chain of hidden states: data, initialization and fits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple
from warnings import warn

import torch
from torch import Generator, Tensor, nn

from ..chain_arguments import ChainArguments
from ..marginals import Marginals
from ..product import product
from .checks import check_unsharded
from .data import Array, Data, Ends, Rows, Sequences
from .emissions import Bernoulli, Emission, Gaussian, Poisson
from .expectations import expected_data
from .fitting import Fit, Optimizer, fit
from .parameters import frozen, reset_parameters

EMISSIONS: dict[str, Any] = {"gaussian": Gaussian, "poisson": Poisson, "bernoulli": Bernoulli}


class Sample(NamedTuple):
    """Draws of `sample` of a model.

    Attributes:
        states: paths int64 `[num_samples, *B, v]`.
        data: `[num_samples, *B, v, *event]`.
    """

    states: Tensor
    data: Tensor


class ChainModel(nn.Module):
    """The base class of `HMM` and `ChainCircuit`: models of sequences along a chain of hidden states.

    Methods take data, and what belongs to them, as these classes say.
    """

    # whether the initial distribution is that of the transitions, which leaves them without a maximum in closed form
    stationary = False
    emission: nn.Module

    def __init__(self, emission: str | nn.Module, units: tuple[int, ...], generator: Generator | None) -> None:
        super().__init__()
        check_module("emission", emission, *EMISSIONS)
        module = EMISSIONS[emission](units, generator=generator) if isinstance(emission, str) else emission
        self.emission, self.num_states = module, units[-1]

    def arguments(
        self, data: Data, observed: Rows = None, *, lengths: Ends = None, covariates: Rows = None, states: Rows = None
    ) -> ChainArguments:
        """The chain of the data, for functions such as `logchain.entropy`.

        Returns:
            `x` `[*B, v, c]` in nats, `bulk` and `p0` (logarithms if `log_params`), and lengths; of packed sequences `x`
            `[total, c]` and `cu_seqlens`. With `Durations`, states count steps: state s with r more steps is number
            `s D + r`. Of a circuit the chains of all repetitions, `x` `[*B, t, v, c]`.

        >>> from logchain import entropy
        >>> from logchain.nn import HMM
        >>> hmm = HMM(2, "poisson")
        >>> entropy(**hmm.arguments(torch.tensor([[0, 3, 1]]))._asdict()).shape
        torch.Size([1])
        """
        return self._chain_of(data, observed, lengths, covariates, states)[1]

    def log_prob(
        self, data: Data, observed: Rows = None, *, lengths: Ends = None, covariates: Rows = None, states: Rows = None
    ) -> Tensor:
        """`log p(data)` of each sequence, or `log p(data, states)` of the states that are known.

        Returns:
            `[*B]`, packed `[n]`, in nats, with gradients: float64 if a parameter is, otherwise float32; -inf for
            impossible data.

        >>> from logchain.nn import HMM
        >>> hmm = HMM(2, "poisson")
        >>> hmm.log_prob(torch.tensor([[0, 2, 5], [1, 0, 0]]), lengths=[3, 1]).shape
        torch.Size([2])
        """
        return self._log_norm(self._chain_of(data, observed, lengths, covariates, states)[1])

    # wrappers such as DistributedDataParallel call `forward`
    forward = log_prob

    @torch.no_grad()
    def impute(
        self, data: Data, observed: Rows = None, *, lengths: Ends = None, covariates: Rows = None, states: Rows = None
    ) -> Any:
        """The data, with what is missing replaced by its expectation conditional on all that is observed.

        Where data have finitely many values, such as categories, it is replaced by the most probable one.

        Returns:
            The data in their layout, 0 past the end in an `HMM`.

        Raises:
            NotImplementedError: the emission has no means, or none conditional on a part of a vector.
            ValueError: the data are impossible.

        >>> from logchain.nn import HMM
        >>> hmm = HMM(2, "poisson")
        >>> hmm.transition.set(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> hmm.impute(torch.tensor([0.0, torch.nan, 2.0])).round()
        tensor([0., 1., 2.])
        """
        emission = self._known_emission("impute from")
        sequences, chain = self._chain_of(data, observed, lengths, covariates, states)
        values, known = emission.known(*self._observations(sequences))
        if known is not None:
            posterior = self._posterior(chain)
            check_possible(posterior.log_norm)
            best = expected_data(emission, values, known, posterior.states, sequences.covariates)
            values = torch.where(known, values, best.reshape(values.shape))
        return sequences.in_layout(values.reshape(sequences.data.shape))

    @torch.no_grad()
    def initialize(
        self,
        data: Data,
        observed: Rows = None,
        *,
        lengths: Ends = None,
        covariates: Rows = None,
        states: Rows = None,
        generator: Generator | None = None,
    ) -> None:
        """Draw trained parameters again: weights uniformly over the simplex, emissions near observations of data."""
        check_unsharded(self)
        emission = self.emission
        reset_parameters(self, generator, without=emission if isinstance(emission, Emission) else None)
        if isinstance(emission, Emission) and any(p.requires_grad for p in emission.parameters()):
            sequences = self._sequences(data, observed, lengths, covariates, states)
            options = emission_options(emission, sequences.covariates)
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
        weights: Tensor | Array | Sequence[float] | None = None,
        method: Literal["em", "gradient"] = "em",
        max_iterations: int = 100,
        tolerance: float = 1e-2,
        batch_size: int | None = None,
        step: float | Callable[[int], float] | None = None,
        optimizer: Optimizer | None = None,
        restarts: int | None = None,
        generator: Generator | None = None,
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
        sequences = self._batched(self._sequences(data, observed, lengths, covariates, states))
        if sequences.has_one_step_each and self.num_states > 1:
            problem = f"data: {len(sequences)} sequences of one step each hold nothing about transitions"
            remedy = "pass an emission with their size, such as Gaussian(2, num_features=1)"
            warn(f"{problem}; for one sequence of vectors, {remedy}; of numbers, data of shape [v]", stacklevel=2)
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

    @torch.no_grad()
    def num_observations(self, data: Any, **conditions: Any) -> Tensor:
        """The number of steps of each sequence `[n]` at which something is observed, of data as `log_prob` takes."""
        sequences = self._batched(self._sequences(data, **conditions))
        data, known, axes = sequences.data, sequences.known, self._event_axes()
        if axes is None:  # what a module reads of an event is not known
            present = ~self._chain_of(sequences)[1].x[..., 0].isnan() if known is None else known
        else:
            present = ~data.isnan() if known is None else known & ~data.isnan()
            present = present.flatten(-axes).any(-1) if axes else present
        if sequences.sizes is not None:
            return torch.stack([steps.sum() for steps in present.split(sequences.sizes)])
        return present.flatten(1).sum(1)

    def _chain_of(self, *arguments: Any) -> tuple[Sequences, ChainArguments]:
        """The checked arguments of a method, and their chain."""
        raise NotImplementedError

    def _posterior(self, chain: ChainArguments) -> Marginals:
        """The posterior marginals of states."""
        raise NotImplementedError

    def _known_emission(self, purpose: str) -> Emission:
        if not isinstance(self.emission, Emission):
            raise TypeError(f"emission: expected an Emission to {purpose}, got {type(self.emission).__name__}")
        return self.emission

    @torch.no_grad()
    def _batched(self, sequences: Sequences) -> Sequences:
        """The same sequences with a batch axis; likelihoods have the axes of B where those of events are not known."""
        if sequences.batch_axes is None:
            sequences = replace(sequences, batch_axes=self._log_norm(self._chain_of(sequences)[1]).dim())
        return sequences.with_batch()

    def _log_norm(self, chain: ChainArguments) -> Tensor:
        return product(**chain._asdict())

    def _event_axes(self) -> int | None:
        """Number of axes of the data after that of the steps; None if it is not known."""
        layer = self.emission
        return len(layer.units) - 1 + len(layer.event) if isinstance(layer, Emission) else None

    def _observations(self, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
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


def check_module(name: str, value: object, *choices: str | None) -> None:
    """Check for a module, or one of the choices."""
    if not isinstance(value, nn.Module) and not (isinstance(value, str | None) and value in choices):
        kind, got = (ValueError, repr(value)) if isinstance(value, str) else (TypeError, type(value).__name__)
        expected = " or ".join([*map(repr, choices), "a torch.nn.Module"])
        remedy = "; pass Transitions(matrix)" if name == "transition" and hasattr(value, "__array__") else ""
        raise kind(f"{name}: expected {expected}, got {got}{remedy}")


def check_possible(log_prob: Tensor) -> None:
    """Check that no log-probability is -inf."""
    impossible = log_prob == -torch.inf
    if bool(impossible.any()):
        count, remedy = int(impossible.sum()), "give probabilities that are 0 small values, or mark the data as missing"
        raise ValueError(f"data: expected what is possible, got log-probability -inf {count} times; {remedy}")


def emission_options(emission: Emission, covariates: Tensor | None) -> dict[str, Any]:
    """The keyword `covariates` of the methods of an emission that takes it."""
    return {"covariates": covariates} if emission.takes_covariates else {}
