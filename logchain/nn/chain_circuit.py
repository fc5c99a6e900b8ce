"""The chain-shaped circuit: a mixture of chains of hidden states, one state for each variable."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_dense, check_is_tensor
from ..matmul import matmul
from ..product import product
from ..sample import sample
from ..transitions import Transition
from ..viterbi import viterbi
from .checks import check_count, check_last_axes, expanded, mask_of
from .emissions.input_layer import InputLayer
from .emissions.named import named_input
from .fitting import Fit, Optimiser, fit, frozen
from .log_weights import LogWeights


class Completion(NamedTuple):
    """The results of `ChainCircuit.mpe`.

    Attributes:
        data: `[*B, v, *event]`, completed.
        repetition: the best repetition, int64 `[*B]`.
        states: the best state of each variable, int64 `[*B, v]`.
        log_prob: the log-probability of data, repetition and states `[*B]`, nats.
    """

    data: Tensor
    repetition: Tensor
    states: Tensor
    log_prob: Tensor


class ChainCircuit(torch.nn.Module):
    r"""`p(data) = sum_r mixing_r sum_z p0_r(z_0) prod_i bulk_ri(z_{i-1}, z_i) prod_i p_ri(data_i | z_i)`.

    A mixture of t inhomogeneous hidden Markov models over v variables with c hidden states each. Every marginal and
    every conditional of any subset of variables is exact, at the cost of one evaluation.

    Args:
        num_variables: v.
        num_states: c.
        num_repetitions: t.
        input: "categorical", "bernoulli", "binomial" or "gaussian", or an `InputLayer` with units `[t, v, c]`.
        num_categories: K, for categorical variables.
        total_count: number of trials, for binomial variables.
        transition: a module of `logchain.nn.transitions`, such as `Monarch`, with `lead=(t, v - 1)`, or 1 in the place
            of either for weights that are shared; or any whose call returns a structure of `logchain.transitions` of
            logarithms. By default each step of each repetition has a trained matrix.
        generator: the source of randomness for the initial parameters.

    Attributes:
        input: the input layer.
        bulk: `LogWeights` `[t, v-1, c, c]`, `[from, to]`, or the module given as `transition`.
        p0: `LogWeights` `[t, c]`.
        mixing: `LogWeights` `[t]`.

    Data are `[*B, v, *event]`; entries that are NaN, or False in `observed`, of the shape of the data, `[*B, v]` or
    `[v]`, are summed out exactly.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost: `t v c^2` multiply-adds a data point, or what a structure says, twice that for gradients, and the memory of
    `logchain.product`. Sampling and the most probable explanation cost what `logchain.sample` and `logchain.viterbi`
    do; the latter needs a structure that has best paths, which `LowRank` has not.

    Source: a chain of sum layers as a probabilistic circuit: Y. Choi, A. Vergari and G. Van den Broeck, "Probabilistic
    circuits" (2020).

    >>> circuit = ChainCircuit(3, 2, num_categories=2)
    >>> circuit
    ChainCircuit(
      num_variables=3, num_states=2, num_repetitions=1
      (input): Categorical(
        units=(1, 3, 2)
        (weights): LogWeights(1, 3, 2, 2, dim=-2)
      )
      (mixing): LogWeights(1)
      (bulk): LogWeights(1, 2, 2, 2)
      (p0): LogWeights(1, 2)
    )
    >>> circuit.p0.set(torch.tensor([0.5, 0.5]))
    >>> circuit.bulk.set(torch.eye(2))  # all variables are in the same state
    >>> circuit.input.weights.set(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> data = torch.tensor([0, 0, 1])
    >>> circuit.log_prob(data).exp()  # (0.9 * 0.9 * 0.1 + 0.1 * 0.1 * 0.9) / 2
    tensor(0.0450, grad_fn=<ExpBackward0>)
    >>> observed = torch.tensor([True, True, False])
    >>> circuit.log_prob(data, observed).exp()
    tensor(0.4100, grad_fn=<ExpBackward0>)
    >>> circuit.conditionals(data, observed)
    tensor([[1.0000, 0.0000],
            [1.0000, 0.0000],
            [0.8902, 0.1098]])
    """

    def __init__(
        self,
        num_variables: int,
        num_states: int,
        num_repetitions: int = 1,
        input: str | InputLayer = "categorical",
        *,
        num_categories: int | None = None,
        total_count: int | None = None,
        transition: torch.nn.Module | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        t, v, c = num_repetitions, num_variables, num_states
        super().__init__()
        self.input = named_input(input, (t, v, c), num_categories, total_count, generator)
        self.mixing = LogWeights(t, generator=generator)
        if not isinstance(transition, torch.nn.Module | None):
            raise TypeError(f"transition: expected a torch.nn.Module, got {type(transition).__name__}")
        self.bulk = LogWeights(t, v - 1, c, c, generator=generator) if transition is None else transition
        self.p0 = LogWeights(t, c, generator=generator)

    @property
    def units(self) -> tuple[int, int, int]:
        """Repetitions, variables, states: `[t, v, c]`."""
        t, v, c = self.input.units
        return t, v, c

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """The result of `log_prob`, for wrappers such as DistributedDataParallel, which call `forward`.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.

        Returns:
            nats `[*B]`.
        """
        return self.log_prob(data, observed)

    def log_prob(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data)` of the observed variables.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.

        Returns:
            nats `[*B]`, of the dtype of the input layer's result; sums over variables are float64.

        >>> circuit = ChainCircuit(3, 2, num_categories=2)
        >>> circuit.log_prob(torch.tensor([[0, 1, 1], [0, 0, 1]])).shape
        torch.Size([2])
        """
        x = self._weigh(data, observed)
        # a copy: a view would lose the hooks that FSDP2 puts on what `forward` returns
        return self._mixed(self._components(x)).to(x.dtype, copy=True)

    def posterior(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`p(repetition, state of variable i | data)`, a derivative of `log_prob`.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.

        Returns:
            `[*B, t, v, c]`. It sums to 1 over the repetitions and states of each variable, to 0 for impossible data.

        >>> circuit = ChainCircuit(3, 2, input="bernoulli")
        >>> circuit.input.set(torch.tensor([0.0, 1.0]))  # the state is the value
        >>> circuit.posterior(torch.tensor([0.0, 1.0, 0.0])).round()
        tensor([[[1., 0.],
                 [0., 1.],
                 [1., 0.]]])
        """
        return self._posterior(data, observed)[0]

    @torch.no_grad()
    def conditionals(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`p(value of variable i | data)` for variables with K values; 0 or 1 for observed ones.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.

        Returns:
            `[*B, v, K]`.

        Raises:
            TypeError: the variables have infinitely many values.
            ValueError: the data are impossible.

        >>> circuit = ChainCircuit(3, 2, input="bernoulli")
        >>> circuit.input.set(torch.tensor([0.1, 0.9]))
        >>> circuit.bulk.set(torch.eye(2))  # all variables are in the same state
        >>> circuit.p0.set(torch.ones(2))
        >>> circuit.conditionals(torch.tensor([1.0, 1.0, torch.nan]))
        tensor([[0.0000, 1.0000],
                [0.0000, 1.0000],
                [0.1098, 0.8902]])
        """
        shares = self.input.log_probabilities().exp()  # (t, v, c, K)
        posterior, log_prob = self._posterior(data, observed)
        self._check_possible(log_prob)
        probabilities = torch.einsum("...tvc,tvck->...vk", posterior, shares.to(posterior))
        data, known = self._known(data, observed)
        values = torch.arange(shares.shape[-1], device=data.device)
        return torch.where(known[..., None], (data[..., None] == values).to(probabilities), probabilities)

    @torch.no_grad()
    def mpe(self, data: Tensor, observed: Tensor | None = None) -> Completion:
        """The most probable explanation: the maximum of `p(data, repetition, states)` given the observed variables.

        The maximum of `p(data)`, with the hidden units summed out, may be another one, and is hard to find. Completed
        values are modes of the input layer: for continuous variables those of the density, for a `Mixture` approximate.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.

        Returns:
            `Completion(data, repetition, states, log_prob)`.

        Raises:
            ValueError: the data are impossible, or an event is observed in part.

        >>> circuit = ChainCircuit(3, 2, input="bernoulli")
        >>> circuit.input.set(torch.tensor([0.0, 1.0]))
        >>> circuit.bulk.set(torch.eye(2))  # all variables are in the same state
        >>> circuit.mpe(torch.tensor([1.0, torch.nan, torch.nan])).data
        tensor([1., 1., 1.])
        """
        v = self.units[1]
        values, best = self.input.mode()  # (t, v, c, *event), (t, v, c)
        x = self._weigh(data, observed)
        data, known = self._known(data, observed)
        whole = known.all(-1) if self.input.event else known
        if self.input.event and bool((known.any(-1) != whole).any()):
            raise ValueError("data: expected each event whole or missing, got some of which a part is missing")
        path = viterbi(torch.where(whole[..., None, :, None], x, best.to(x)), *self._weights())
        score, repetition = (path.score + self.mixing()).max(-1)
        self._check_possible(score)
        states = _of_repetition(path.states, repetition, 0)
        variables = torch.arange(v, device=data.device)
        best_values = values[repetition[..., None], variables, states]
        return Completion(torch.where(known, data, best_values), repetition, states, score.to(x.dtype))

    @torch.no_grad()
    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of all variables.

        Args:
            num_samples: the number of draws.
            generator: the source of randomness.

        Returns:
            `[num_samples, v, *event]`.

        >>> ChainCircuit(3, 2, num_categories=2).sample(5).shape
        torch.Size([5, 3])
        """
        return self._draw(self.mixing().new_zeros(self.units), num_samples, generator)

    @torch.no_grad()
    def sample_conditional(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Independent, exact draws given the observed variables, which stay as they are.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.
            num_samples: the number of draws for each of B.
            generator: the source of randomness.

        Returns:
            `[num_samples, *B, v, *event]`.

        Raises:
            ValueError: the data are impossible.

        >>> circuit = ChainCircuit(3, 2, input="bernoulli")
        >>> circuit.input.set(torch.tensor([0.0, 1.0]))
        >>> circuit.bulk.set(torch.eye(2))  # all variables are in the same state
        >>> circuit.sample_conditional(torch.tensor([1.0, torch.nan, torch.nan]), num_samples=2)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        """
        x = self._weigh(data, observed)
        data, known = self._known(data, observed)
        return torch.where(known, data, self._draw(x, num_samples, generator))

    def initialise(
        self, data: Tensor, *, observed: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw trained parameters again: weights uniformly over the simplex, the input layer's at places in the data.

        Args:
            data: `[*B, v, *event]`.
            observed: bool of the same shape or `[*B, v]`.
            generator: the source of randomness.

        >>> circuit = ChainCircuit(1, 2, input="gaussian")
        >>> circuit.initialise(torch.tensor([[1.0], [1.0], [5.0]]))
        >>> circuit.input.means.detach().flatten().sort().values
        tensor([1., 5.])
        """
        inputs = set(self.input.modules())
        with frozen(self):
            for part in self.modules():
                if isinstance(part, LogWeights) and part not in inputs:
                    part.reset_parameters(generator)
            if any(parameter.requires_grad for parameter in self.input.parameters()):
                self.input.initialise(*self._shared(data, observed), generator=generator)

    def fit(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        method: Literal["em", "gradient"] = "em",
        max_iterations: int = 100,
        tolerance: float = 1e-2,
        batch_size: int | None = None,
        step: float | Callable[[int], float] | None = None,
        optimiser: Optimiser | None = None,
        restarts: int = 1,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Fit:
        """Fit the trained parameters to data by maximum likelihood, in place: see `logchain.nn.fit`.

        Args:
            data: `[n, v, *event]`.
            observed: bool of the same shape or `[n, v]`.
            method: "em" or "gradient".
            max_iterations: the largest number of passes over the data.
            tolerance: nats; the fit ends with the first iteration that gains less.
            batch_size: number of sequences that are computed at a time.
            step: for mini-batches with "em", the part (0..1) of the way to the maximum, or a function of their number.
            optimiser: for "gradient", a function of the list of parameters.
            restarts: number of initialisations, of which the best fit is kept; 0 starts from the present parameters.
            generator: the source of randomness.
            progress: show a progress bar (tqdm).

        Returns:
            A `Fit`; its `str` is a short report.

        >>> circuit = ChainCircuit(2, 2, num_categories=2)
        >>> report = circuit.fit(torch.tensor([[0, 0], [0, 0], [1, 1]]), generator=torch.Generator().manual_seed(0))
        >>> report.log_likelihood > report.history[0]
        True
        """
        if isinstance(data, Tensor) and isinstance(observed, Tensor):
            observed = expanded(observed, data.shape[: data.dim() - len(self.input.event)])
        return fit(
            self,
            data,
            conditions={"observed": observed},
            method=method,
            max_iterations=max_iterations,
            tolerance=tolerance,
            batch_size=batch_size,
            step=step,
            optimiser=optimiser,
            restarts=restarts,
            generator=generator,
            progress=progress,
        )

    def extra_repr(self) -> str:
        """Sizes."""
        t, v, c = self.units
        return f"num_variables={v}, num_states={c}, num_repetitions={t}"

    def _components(self, x: Tensor) -> Tensor:
        """`log p_r(data)` of each repetition, float64 `[*B, t]`, of log-densities `[*B, t, v, c]`."""
        # what all states have in common is summed in float64: in float32 it would hide the repetitions' difference
        top = x.detach().amax(-1, keepdim=True)
        # a variable with -inf alone is not shifted
        top = torch.where(top == -torch.inf, 0.0, top)
        return product(x - top, *self._weights()).double() + top.double().sum((-2, -1))

    def _weights(self) -> tuple[Any, Tensor]:
        # probabilities: from logarithms the product would take exponentials in each of its passes
        bulk = self.bulk()
        return bulk.map(torch.exp) if isinstance(bulk, Transition) else bulk.exp(), self.p0().exp()

    def _mixed(self, components: Tensor) -> Tensor:
        # in float64: for long data the difference between repetitions is small compared with their log-likelihoods
        return matmul(components[..., None, :], self.mixing().double()[:, None])[..., 0, 0]

    def _posterior(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x = self._weigh(data, observed)
        with torch.enable_grad():
            log_prob = self._mixed(self._components(x.requires_grad_()))
            return torch.autograd.grad(log_prob.sum(), x)[0], log_prob.detach()

    def _weigh(self, data: Tensor, observed: Tensor | None) -> Tensor:
        """The input layer's log-densities `[*B, t, v, c]`."""
        log_densities: Tensor = self.input(*self._shared(data, observed))
        return log_densities

    def _known(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Data with fillers where nothing is observed, and a mask of their shape, True where observed."""
        axis = -2 - len(self.input.event)
        filled, known = self.input.known(*self._shared(data, observed))
        known = torch.ones_like(filled, dtype=torch.bool) if known is None else known
        return filled.squeeze(axis), known.squeeze(axis)

    def _shared(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Data and mask, checked, with an axis of size 1 for the repetitions."""
        check_is_tensor("data", data)
        check_dense("data", data)
        wanted = (self.units[1], *self.input.event)
        check_last_axes("data", data, wanted)
        if observed is not None:
            variables = data.shape[: data.dim() - len(self.input.event)]
            observed = mask_of(observed, data.shape, variables).unsqueeze(len(variables) - 1)
        return data.unsqueeze(-1 - len(wanted)), observed

    def _draw(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        check_count("num_samples", num_samples)
        joint = self._components(x) + self.mixing()  # (*B, t)
        self._check_possible(joint.amax(-1))
        shares = torch.softmax(joint, -1).reshape(-1, joint.shape[-1])
        drawn = torch.multinomial(shares, num_samples, replacement=True, generator=generator)
        repetition = drawn.T.reshape(num_samples, *joint.shape[:-1])
        values = self.input.draw(sample(x, *self._weights(), num_samples, generator=generator), generator)
        return _of_repetition(values, repetition, len(self.input.event))

    @staticmethod
    def _check_possible(log_prob: Tensor) -> None:
        wrong = log_prob == -torch.inf
        if bool(wrong.any()):
            raise ValueError(f"data: expected what is possible, got log-probability -inf {int(wrong.sum())} times")


def _of_repetition(values: Tensor, repetition: Tensor, event: int) -> Tensor:
    """Values `[..., v, *event]` of the given repetitions int64 `[...]`, from values `[..., t, v, *event]` of all."""
    axis = values.dim() - event - 2
    index = repetition.reshape(*repetition.shape, *(1,) * (event + 2))
    return values.take_along_dim(index, axis).squeeze(axis)
