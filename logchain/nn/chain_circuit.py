"""The chain-shaped circuit: a mixture of chains of hidden states, one state for each variable."""

from typing import Any

import torch
from torch import Tensor

from ..product import product
from ..sample import sample
from ..transitions import Transition
from ..viterbi import Path, viterbi
from .circuit import Circuit
from .emissions.input_layer import InputLayer
from .layers import shifted
from .log_weights import LogWeights


class ChainCircuit(Circuit):
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

    Data are `[*B, v, *event]`; entries that are NaN, or False in `observed`, are summed out. The methods are those of
    `Circuit`.

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
        super().__init__(input, (t, v, c), num_categories, total_count, generator)
        if not isinstance(transition, torch.nn.Module | None):
            raise TypeError(f"transition: expected a torch.nn.Module, got {type(transition).__name__}")
        self.bulk = LogWeights(t, v - 1, c, c, generator=generator) if transition is None else transition
        self.p0 = LogWeights(t, c, generator=generator)

    def components(self, x: Tensor) -> Tensor:
        """The log-partition of each repetition's chain: see `Circuit.components`."""
        # what all states have in common is summed in float64: in float32 it would hide the repetitions' difference
        x, shift = shifted(x)
        return product(x, *self._weights()).double() + shift

    def best_states(self, x: Tensor) -> Path:
        """The Viterbi path of each repetition's chain: see `Circuit.best_states`."""
        return viterbi(x, *self._weights())

    def draw_states(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Paths drawn from the posterior of each repetition's chain: see `Circuit.draw_states`."""
        return sample(x, *self._weights(), num_samples, generator=generator)

    def _weights(self) -> tuple[Any, Tensor]:
        # probabilities: from logarithms the product would take exponentials in each of its passes
        bulk = self.bulk()
        return bulk.map(torch.exp) if isinstance(bulk, Transition) else bulk.exp(), self.p0().exp()
