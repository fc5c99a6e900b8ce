"""The chain-shaped circuit: repetitions of a chain of hidden states, one for each variable."""

import torch
from torch import Tensor

from ..product import product
from ..sample import sample
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
        num_categories: K, of categorical variables.
        total_count: of binomial variables.
        generator: where the initial parameters come from.

    Attributes:
        input: the input layer.
        bulk: `LogWeights` `[t, v-1, c, c]`, `[from, to]`.
        p0: `LogWeights` `[t, c]`.
        mixing: `LogWeights` `[t]`.

    Data are `[*B, v, *event]`; NaN, or False in `observed`, is summed out: see `Circuit` for what can be asked.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost: `t v c^2` multiply-adds for each of the data, and twice that for gradients: that of `logchain.product`, with
    its memory. Sampling and the most probable explanation cost what `logchain.sample` and `logchain.viterbi` do.

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
        generator: torch.Generator | None = None,
    ) -> None:
        t, v, c = num_repetitions, num_variables, num_states
        super().__init__(input, (t, v, c), num_categories, total_count, generator)
        self.bulk = LogWeights(t, v - 1, c, c, generator=generator)
        self.p0 = LogWeights(t, c, generator=generator)

    def components(self, x: Tensor) -> Tensor:
        """The log-partition of each chain."""
        # in float32 what all states have in common would hide what tells repetitions of long data apart
        x, shift = shifted(x)
        return product(x, *self._weights()).double() + shift

    def best_states(self, x: Tensor) -> Path:
        """The Viterbi path of each chain."""
        return viterbi(x, *self._weights())

    def draw_states(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Paths drawn from each chain's posterior."""
        return sample(x, *self._weights(), num_samples, generator=generator)

    def _weights(self) -> tuple[Tensor, Tensor]:
        # linear, since the product would take exponentials for each of its passes
        return self.bulk().exp(), self.p0().exp()
