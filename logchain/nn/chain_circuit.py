"""The chain-shaped circuit: a mixture of chains of hidden states, one state for each variable."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import distributed
from ..distributed.agreement import agree, check_same, marks
from ..distributed.exchange import Exchange
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
        group: a process group of `torch.distributed` over whose ranks the variables are sharded, see
            `logchain.distributed`: v is the number of this rank's, which has their parameters, and data are those of
            these variables. `p0` and `mixing` are the same on every rank. Sampling, restarts and L-BFGS are not
            offered.

    Attributes:
        input: the input layer.
        bulk: `LogWeights` `[t, v-1, c, c]` (`[t, v, c, c]` behind the first rank of a group), `[from, to]`, or the
            module given as `transition`.
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
        group: Any = None,
    ) -> None:
        t, v, c = num_repetitions, num_variables, num_states
        exchange = None if group is None else Exchange(group)

        def build() -> tuple[dict[str, Any], tuple[float, ...]]:
            super(ChainCircuit, self).__init__(input, (t, v, c), num_categories, total_count, generator)
            is_first = exchange is None or exchange.rank == 0
            if not isinstance(transition, torch.nn.Module | None):
                raise TypeError(f"transition: expected a torch.nn.Module, got {type(transition).__name__}")
            self.bulk = LogWeights(t, v - is_first, c, c, generator=generator) if transition is None else transition
            self.p0 = LogWeights(t, c, generator=generator)
            return {"question": "ChainCircuit", "num_states": c, "num_repetitions": t}, ()

        if exchange is None:
            build()
        else:
            agree(exchange, build)
            for weights in (self.mixing, self.p0):
                of_ranks = exchange.gather(weights.logits.shape, partial(torch.clone, weights.logits))
                with torch.no_grad():
                    weights.logits.copy_(of_ranks[0])
        self.group = group
        # whether one matrix serves every step, where that is known
        self._one_matrix = False if transition is None else None

    def components(self, x: Tensor) -> Tensor:
        """The log-partition of each repetition's chain: see `Circuit.components`."""
        # what all states have in common is summed in float64: in float32 it would hide the repetitions' difference
        x, shift = shifted(x)
        if self.group is None:
            return product(x, *self._weights()).double() + shift
        shift = Exchange(self.group).total(shift.numel(), lambda: shift).view(shift.shape).to(x.device)
        value = distributed.product(x, *self._weights(), group=self.group, one_matrix=self._one_matrix)
        return value.double() + shift

    def best_states(self, x: Tensor) -> Path:
        """The Viterbi path of each repetition's chain: see `Circuit.best_states`."""
        if self.group is None:
            return viterbi(x, *self._weights())
        return distributed.viterbi(x, *self._weights(), group=self.group, one_matrix=self._one_matrix)

    def draw_states(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Paths drawn from the posterior of each repetition's chain: see `Circuit.draw_states`."""
        self._check_alone("sample")
        return sample(x, *self._weights(), num_samples, generator=generator)

    def initialise(
        self, data: Tensor, *, observed: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw trained parameters anew, see `Circuit.initialise`; all variables have to be on one rank."""
        self._check_alone("initialise")
        super().initialise(data, observed=observed, generator=generator)

    def _weigh(self, data: Tensor, observed: Tensor | None) -> Tensor:
        """The input layer's log-densities; what is wrong with data or weights on one rank is raised on all."""
        if self.group is None:
            return super()._weigh(data, observed)
        found: list[Tensor] = []

        def describe() -> tuple[dict[str, Any], Tensor]:
            found.append(super(ChainCircuit, self)._weigh(data, observed))
            fields = {"question": "ChainCircuit", "data": f"sequences {list(found[0].shape[:-3])}"}
            return fields, marks(self.mixing.logits, self.p0.logits)

        numbers = agree(Exchange(self.group), describe)
        check_same("mixing and p0", "the same weights", numbers[:, :3], self.mixing.logits.dtype)
        return found[0]

    def _check_alone(self, question: str) -> None:
        if self.group is not None:
            raise NotImplementedError(f"{question}: expected a circuit whose variables are all on one rank")

    def _weights(self) -> tuple[Any, Tensor]:
        # probabilities: from logarithms the product would take exponentials in each of its passes
        bulk = self.bulk()
        return bulk.map(torch.exp) if isinstance(bulk, Transition) else bulk.exp(), self.p0().exp()
