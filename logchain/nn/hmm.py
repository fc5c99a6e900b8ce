"""Hidden Markov models with trained parameters."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Generator, Tensor, nn

from ..arguments import check_tensor
from ..chain_arguments import ChainArguments
from ..filtered import filtered
from ..marginals import Marginals, marginals
from ..sample import sample as draw_paths
from ..transitions import Duration, Transition
from ..transitions.dense import Dense
from ..viterbi import Path, viterbi
from .chain_model import ChainModel, Sample, check_module, emission_options
from .checks import check_count, check_rows
from .data import Array, Data, Ends, Rows, Sequences, as_tensor
from .emissions import Emission
from .expectations import FilteredStates, Forecast, filtered_states, forecast_states, mean_of
from .hmm_steps import check_transitions, first_steps, into_steps, potentials, stationary_start
from .hmmlearn_models import emission_of, float64
from .log_weights import LogWeights
from .parameters import arithmetic, over
from .state_order import permute_states
from .transitions import Transitions


class HMM(ChainModel):
    r"""`p(data) = sum_z p(z_0) prod_i P_i(z_{i-1}, z_i) prod_i p(data_i | z_i)` over paths `z` of hidden states.

    Args:
        num_states: c.
        emission: an `Emission` with units `c`, or `(d, c)` for d observations per step that are independent given the
            state; or "gaussian", "poisson" or "bernoulli" for numbers; or any module that maps data `[*B, v, *event]`
            to log-potentials `[*B, v, c]` (`lengths` then need all axes of B).
        initial: "free" for trained initial probabilities; "stationary" for the stationary distribution of the
            transitions, which must be one irreducible matrix for all steps; `fit` then needs `method="gradient"`. Or a
            module that returns their logarithms `[c]`, such as `LogWeights(c, prior=...)`.
        transition: `Transitions`, such as `Transitions(c, lead=(v - 1,))` for a matrix at each step, or `Durations` for
            a hidden semi-Markov model; or a module that maps covariates to logits `[*B or ones, v-1 or 1, c, c]`
            (`[from, to]`), or to a structure of `logchain.transitions` whose parameters are logarithms. By default
            `Transitions(num_states)`, one matrix for all steps.
        generator: the source of randomness for the initial parameters, except those of modules that are passed.

    The methods take data as a tensor, a numpy array, or a list of these:
        data: `[*B, v, *event]`, such as `[n, v]` or `[v]`; a list of sequences `[v_i, *event]`; or concatenated
            sequences `[total, *event]` with `lengths` `[n]`. The latter two are packed, never padded. What methods
            return for each step has the layout of the data: a list for a list, `[total, ...]` for concatenated ones.
        observed: bool, of the shape of the data or `[*B, v]`. False entries are summed out. If the emission is an
            `Emission`, NaN entries of the data are summed out too, and a mask `[v]` serves all sequences.
        lengths: integers from 1 to v, of the shape of the first axes of B; steps after the end have no influence.
            Those of concatenated sequences have the sum `total`.
        covariates: one row for each step, `[*B, v, ...]`, or 1 in place of v or of axes of B. Row i drives the emission
            at step i, if it `takes_covariates`, and the transition into step i; row 0 drives no transition.
            Transitions of packed sequences are called with all rows `[total, ...]`, for `[total or 1, c, c]`.
        states: integers `[*B, v]`, the states that are known, and -1 elsewhere.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a choice is unknown, or sizes or values do not go together.

    Cost: that of the emission and of `logchain.product`.

    Source: L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989).

    >>> from logchain.nn import Categorical
    >>> hmm = HMM(2, Categorical(2, 2))
    >>> hmm.initial.set(torch.tensor([0.5, 0.5]))
    >>> hmm.transition.set(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    >>> hmm.emission.weights.set(torch.tensor([[0.5, 0.25], [0.5, 0.75]]))  # [data, state]
    >>> hmm.log_prob([torch.tensor([0, 0, 1]), torch.tensor([0])]).exp()
    tensor([0.0875, 0.3750], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        num_states: int,
        emission: str | nn.Module,
        *,
        initial: Literal["free", "stationary"] | nn.Module = "free",
        transition: nn.Module | None = None,
        generator: Generator | None = None,
    ) -> None:
        check_count("num_states", num_states)
        super().__init__(emission, (num_states,), generator)
        check_module("initial", initial, "free", "stationary")
        check_module("transition", transition, None)
        self.stationary = initial == "stationary"
        free = LogWeights(num_states, generator=generator) if initial == "free" else None
        self.initial = initial if isinstance(initial, nn.Module) else free
        self.transition = Transitions(num_states, generator=generator) if transition is None else transition
        units = self.emission.units if isinstance(self.emission, Emission) else (num_states,)
        if units[-1] != num_states or len(units) > 2:
            raise ValueError(f"emission: expected units ({num_states},) or (d, {num_states}), got {units}")

    @property
    def transition_matrix(self) -> Tensor:
        """The probabilities `[c, c]` of transitions, `[from, to]`, or `[v-1, c, c]` where they differ by steps.

        They have no gradients. With `Durations`, they are those of the moves between segments.
        """
        logs = self._log_transitions(None)
        dense = logs.matrix if isinstance(logs, Duration) else logs.to_dense(log_params=True)
        matrix = dense.detach().exp()
        return matrix.squeeze(0) if matrix.dim() == 3 else matrix

    @property
    def initial_probabilities(self) -> Tensor:
        """The probabilities `[c]` of the first state, without gradients."""
        start = stationary_start(self._log_transitions(None)) if self.initial is None else self.initial().exp()
        return start.detach()

    def posterior(
        self,
        data: Data,
        observed: Rows = None,
        *,
        transitions: Literal["sum", "full"] | None = None,
        lengths: Ends = None,
        covariates: Rows = None,
        states: Rows = None,
    ) -> Marginals:
        """The posterior marginals of states, and those of transitions: see `logchain.marginals`.

        `transitions` is None for none, "sum" for expected counts, "full" for posteriors of each step `[*B, v-1, c, c]`;
        of packed sequences `[total, c, c]`, those into each step, or a list of `[v_i - 1, c, c]`.
        With `Durations` those are of moves between segments, and of the durations of all segments but the first.

        Returns:
            `Marginals(states [*B, v, c], transitions, log_norm [*B])`; `log_norm` is `log p(data)` in nats.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> posterior = hmm.posterior(torch.tensor([0, 1, 48]), transitions="sum")
        >>> posterior.states.detach().round()
        tensor([[1., 0.],
                [1., 0.],
                [0., 1.]])
        >>> posterior.transitions.detach().round()  # state 0 stays once, then moves to 1
        tensor([[[1., 1.],
                 [0., 0.]]])
        """
        sequences, chain = self._chain_of(data, observed, lengths, covariates, states)
        result = self._posterior(chain, transitions)
        moves: Any = result.transitions
        if transitions == "full" and sequences.is_list and chain.cu_seqlens is not None:
            # no transition leads into a first row
            steps = [(first + 1, end) for first, end in pairwise(chain.cu_seqlens.tolist())]
            dense = isinstance(moves, Tensor)
            moves = [moves[first:end] if dense else moves.between(first, end) for first, end in steps]
        return result._replace(states=sequences.in_layout(result.states), transitions=moves)

    def decode(
        self, data: Data, observed: Rows = None, *, lengths: Ends = None, covariates: Rows = None, states: Rows = None
    ) -> Path:
        """The most probable path of states of each sequence: see `logchain.viterbi`.

        Returns:
            `Path(states, score)`: int64 `[*B, v]`, -1 after a sequence's end, and `log p(data, states)` `[*B]`, nats.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> hmm.decode(torch.tensor([0, 1, 48])).states
        tensor([0, 0, 1])
        """
        sequences, chain = self._chain_of(data, observed, lengths, covariates, states)
        path = viterbi(**chain._asdict())
        return path._replace(states=sequences.in_layout(self._of_steps(path.states, chain)))

    @torch.no_grad()
    def filter(
        self, data: Data, observed: Rows = None, *, lengths: Ends = None, covariates: Rows = None, states: Rows = None
    ) -> FilteredStates:
        """The posterior of each state given the data up to it, and the log-likelihood of each step given the past.

        Returns:
            `FilteredStates(states [*B, v, c], log_likelihoods [*B, v])`, without gradients.

        Cost: that of `logchain.forward_backward` in float64, which loses no digits of the log-likelihoods.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> data = torch.tensor([0, 1, 48])
        >>> filtered = hmm.filter(data)
        >>> filtered.states[0].round()
        tensor([1., 0.])
        >>> torch.isclose(filtered.log_likelihoods.sum(), hmm.log_prob(data))
        tensor(True)
        """
        sequences, chain = self._chain_of(data, observed, lengths, covariates, states)
        filtered, dtype = filtered_states(chain), chain.x.dtype
        results = self._of_states(filtered.states), filtered.log_likelihoods
        return FilteredStates(*(sequences.in_layout(result.to(dtype)) for result in results))

    @torch.no_grad()
    def forecast(
        self,
        data: Data,
        num_steps: int,
        observed: Rows = None,
        *,
        future_covariates: Rows = None,
        lengths: Ends = None,
        covariates: Rows = None,
        states: Rows = None,
    ) -> Forecast:
        """The probabilities of the states at the k = `num_steps` steps after the last one, and the mean of the data.

        `future_covariates` `[*B, k, ...]`, packed `[n, k, ...]`, are the covariates of these steps, a tensor or array.

        Returns:
            `Forecast(states [*B, k, c], mean [*B, k, *event])`, packed `[n, k, ...]`, without gradients.

        Raises:
            ValueError: each step has a trained matrix, and further steps have none.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.transition.set(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> forecast = hmm.forecast(torch.tensor([0, 1, 48]), 2)
        >>> forecast.states.round(decimals=2), forecast.mean.round(decimals=1)
        (tensor([[0.1000, 0.9000],
                [0.1800, 0.8200]]), tensor([45.1000, 41.2000]))
        """
        check_count("num_steps", num_steps)
        sequences, chain = self._chain_of(data, observed, lengths, covariates, states)
        shares = sequences.last(filtered(**chain._asdict()).states)  # (*B, c)
        future = None
        if future_covariates is not None:
            future = as_tensor("future_covariates", future_covariates, chain.x, cast=True)
            check_rows("future_covariates", future, (*shares.shape[:-1], num_steps))
        elif sequences.covariates is not None:
            raise ValueError(f"future_covariates: expected those of {num_steps} steps after the covariates, got None")
        matrices = self._log_transitions(future).to_dense(log_params=True).exp()
        matrices = matrices if matrices.dim() > 2 else matrices[None]  # (*B or less, k or 1, c, c)
        if matrices.shape[-3] not in (1, num_steps) or (self._is_trained and matrices.shape[-3] > 1):
            expected = f"one matrix for all steps, or future_covariates of {num_steps} steps"
            raise ValueError(f"transition: expected {expected}, got {list(matrices.shape)}")
        matrices = matrices.expand(*matrices.shape[:-3], num_steps, -1, -1)
        result = self._of_states(forecast_states(shares, matrices))
        return Forecast(result, mean_of(self.emission, result, future))

    @torch.no_grad()
    def sample_posterior(
        self,
        data: Data,
        num_samples: int,
        observed: Rows = None,
        *,
        generator: Generator | None = None,
        lengths: Ends = None,
        covariates: Rows = None,
        states: Rows = None,
    ) -> Any:
        """Independent draws of `num_samples` paths of states of each sequence, given the data: see `logchain.sample`.

        Returns:
            int64 `[num_samples, *B, v]`, -1 after a sequence's end; packed `[num_samples, total]`.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> hmm.sample_posterior(torch.tensor([0, 1, 48]), 2)  # two draws, hardly uncertain
        tensor([[0, 0, 1],
                [0, 0, 1]])
        """
        sequences, chain = self._chain_of(data, observed, lengths, covariates, states)
        paths = draw_paths(**chain._asdict(), num_samples=num_samples, generator=generator)
        return sequences.in_layout(self._of_steps(paths, chain), 1)

    @torch.no_grad()
    def sample(
        self, num_samples: int, num_steps: int, *, covariates: Tensor | None = None, generator: Generator | None = None
    ) -> Sample:
        """Independent draws of states and data from the model, whose emission has to be an `Emission`.

        Args:
            num_samples: the number of sequences.
            num_steps: v, the length of each.
            covariates: as for all methods, `[*B, v, k]`.
            generator: the source of randomness.

        Returns:
            `Sample(states, data)`: int64 `[num_samples, *B, v]` and `[num_samples, *B, v, *event]`.

        Raises:
            TypeError: the emission is not an `Emission`, or a number is not an integer.
            ValueError: a number is negative, the model has trained matrices for fewer steps, or `Durations` that are
                not `right_censored` do not sum to `num_steps`.

        >>> draws = HMM(2, "gaussian").sample(4, 5)
        >>> draws.states.shape, draws.data.shape
        (torch.Size([4, 5]), torch.Size([4, 5]))
        """
        emission = self._known_emission("sample from")
        check_count("num_steps", num_steps)
        batch = () if covariates is None else covariates.shape[:-2]
        bulk = self._transitions(batch, num_steps, covariates, None)
        potentials = torch.zeros(*batch, num_steps, self.num_states, device=bulk.device)
        chain = self._chain(potentials, bulk, None, None)
        paths = draw_paths(**chain._asdict(), num_samples=num_samples, generator=generator)
        states = self._of_steps(paths, chain)
        if not getattr(self.transition, "right_censored", True) and bool((states < 0).any()):
            expected = "a sum of possible durations, since no segment may go on after the last step"
            raise ValueError(f"num_steps: expected {expected}, got {num_steps}")
        units = over(states, states.shape + emission.units[:-1])
        return Sample(states, emission.draw(units, generator, **emission_options(emission, covariates)))

    @torch.no_grad()
    def sort_states(self, by: Tensor | Array | Sequence[float] | Callable[["HMM"], Any]) -> None:
        """Renumber the states in ascending order of `by`, in place.

        Args:
            by: numbers `[c]`, a tensor, an array or a list, or a function of the model that returns them.

        Raises:
            TypeError: transitions are neither dense nor `Durations`, or a part is a user's module.
            ValueError: there are not c numbers, one is NaN, or a prior of the emission or of durations has tensors.

        >>> hmm = HMM(2, "gaussian")
        >>> hmm.emission.set(torch.tensor([5.0, 1.0]), torch.ones(2))
        >>> hmm.sort_states(by=lambda hmm: hmm.emission.means)
        >>> hmm.emission.means.detach()
        tensor([1., 5.])
        """
        emission = self._known_emission("sort states")
        numbers = torch.as_tensor(by(self) if callable(by) else by)
        if numbers.shape != (self.num_states,):
            raise ValueError(f"by: expected numbers [{self.num_states}], got shape {list(numbers.shape)}")
        if bool(numbers.isnan().any()):
            raise ValueError(f"by: expected numbers, got nan of state {int(numbers.isnan().int().argmax())}")
        transition = self.transition
        if not isinstance(transition, Transitions) or not isinstance(self._log_transitions(None), Dense | Duration):
            expected = "a dense matrix or durations that are trained"
            raise TypeError(f"transition: expected {expected}, got {transition}")
        if not isinstance(self.initial, LogWeights | None):
            raise TypeError(f"initial: expected LogWeights, got {type(self.initial).__name__}")
        permute_states(emission, self.initial, transition, torch.argsort(numbers, stable=True))

    @classmethod
    def from_hmmlearn(cls, model: Any) -> "HMM":
        """The model, in float64, of a fitted model of hmmlearn.

        Args:
            model: a GaussianHMM, GMMHMM, PoissonHMM or CategoricalHMM.

        Returns:
            An `HMM`. Its data are `[*B, v, d]` as hmmlearn's samples are `[samples, d]`, but categories are `[*B, v]`.
            hmmlearn's priors are not read: pass priors to the parts of an `HMM`.

        Raises:
            TypeError: the model is another, or not fitted.

        >>> from types import SimpleNamespace
        >>> PoissonHMM = type("PoissonHMM", (SimpleNamespace,), {})  # in the place of hmmlearn's
        >>> model = PoissonHMM(n_components=1, startprob_=[1.0], transmat_=[[1.0]], lambdas_=[[3.5]])
        >>> HMM.from_hmmlearn(model).emission.log_rates.exp().detach()
        tensor([[3.5000]], dtype=torch.float64)
        """
        emission = emission_of(model)
        hmm: Any = cls(model.n_components, emission).double()
        hmm.initial.set(float64(model.startprob_))
        hmm.transition.set(float64(model.transmat_))
        return cast(HMM, hmm)

    def extra_repr(self) -> str:
        """The number of states, and whether the initial distribution is stationary."""
        stationary = ", initial='stationary'" if self.initial is None else ""
        return f"num_states={self.num_states}{stationary}"

    @property
    def _is_trained(self) -> bool:
        """Whether the transition is a module of trained probabilities, which takes no covariates."""
        return isinstance(self.transition, Transitions)

    def _chain_of(self, *arguments: Any) -> tuple[Sequences, ChainArguments]:
        sequences = self._sequences(*arguments)
        x = potentials(self.emission, self.num_states, sequences)
        if not x.shape[-2]:
            raise ValueError(f"data: expected at least one step [*B, v, ...], got {list(sequences.data.shape)}")
        packed = sequences.cu_seqlens
        batch = x.shape[:-2] if packed is None else ()
        bulk = self._transitions(batch, x.shape[-2], sequences.covariates, packed)
        return sequences, self._chain(x, bulk, sequences.lengths, packed)

    def _chain(self, x: Tensor, bulk: Transition, ends: Tensor | None, packed: Tensor | None) -> ChainArguments:
        """The chain of log-potentials of the c states; with durations, of the states that count steps."""
        if self.initial is None:
            if isinstance(bulk, Duration):
                raise ValueError("initial: expected 'free' with durations, got 'stationary'")
            start, bulk = stationary_start(bulk).to(bulk.dtype), bulk.map(torch.exp)
        elif isinstance(bulk, Duration):
            censored: bool = getattr(self.transition, "right_censored", True)
            return bulk.arguments(
                x, self.initial(), log_params=True, lengths=ends, cu_seqlens=packed, right_censored=censored
            )
        else:
            start = self.initial()
        matrices = bulk.parameters[0] if isinstance(bulk, Dense) else bulk
        return ChainArguments(x, matrices, start, self.initial is not None, ends, packed)

    def _posterior(self, chain: ChainArguments, transitions: Literal["sum", "full"] | None = None) -> Marginals:
        posterior = marginals(**chain._asdict(), transitions=transitions)
        return posterior._replace(states=self._of_states(posterior.states))

    def _of_states(self, values: Tensor) -> Tensor:
        """Probabilities `[..., c]` of the states, from those of states that may count steps."""
        return values.unflatten(-1, (self.num_states, -1)).sum(-1) if values.shape[-1] > self.num_states else values

    def _of_steps(self, paths: Tensor, chain: ChainArguments) -> Tensor:
        """The states on paths of states that may count steps; -1 stays."""
        counted = chain.x.shape[-1] // self.num_states
        return paths // counted if counted > 1 else paths

    def _log_transitions(self, covariates: Tensor | None) -> Transition:
        bulk: Tensor | Transition = self.transition() if self._is_trained else self.transition(covariates)
        if isinstance(bulk, Transition):
            return bulk
        if not self._is_trained:
            check_tensor("transition", bulk, 3)
            bulk = torch.log_softmax(arithmetic(bulk), -1)
        return Dense(bulk)

    def _transitions(
        self, batch: tuple[int, ...], v: int, covariates: Tensor | None, packed: Tensor | None
    ) -> Transition:
        """Log-probabilities of leading axes `[*B or less, v-1 or 1]`, packed `[v or 1]`."""
        if covariates is not None:
            if self._is_trained and not getattr(self.emission, "takes_covariates", False):
                raise ValueError("covariates: expected None with a transition and an emission that take none")
            covariates = into_steps(covariates, batch, v, packed)
        bulk = self._log_transitions(covariates)
        if self._is_trained:
            bulk = first_steps(bulk, v, packed)
        check_transitions(bulk, batch, v - 1 if packed is None else v, self.num_states)
        return bulk
