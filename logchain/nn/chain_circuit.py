"""The chain-shaped circuit: a mixture of chains of hidden states, one state for each variable."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths, check_choice
from ..chain_arguments import ChainArguments
from ..matmul import matmul
from ..product import product
from ..sample import sample
from ..transitions import Transition
from ..viterbi import viterbi
from .chain_model import ChainModel
from .checks import check_count, check_last_axes
from .data import Sequences
from .emissions import Bernoulli, Categorical, Gaussian
from .emissions.emission import Emission
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


class ChainCircuit(ChainModel):
    r"""`p(data) = sum_r mixing_r sum_z p0_r(z_0) prod_i bulk_ri(z_{i-1}, z_i) prod_i p_ri(data_i | z_i)`.

    A mixture of t inhomogeneous hidden Markov models over v variables with c hidden states each. Every marginal and
    every conditional of any subset of variables is exact, at the cost of one evaluation.

    Args:
        num_variables: v.
        num_states: c.
        num_repetitions: t.
        input: "categorical", "bernoulli" or "gaussian", or an `Emission` with units `[t, v, c]`.
        num_categories: K, for categorical variables.
        transition: `Transitions` with `lead=(t, v - 1)`, or 1 in the place of either for weights that are shared; or a
            module whose call returns a structure of `logchain.transitions` of logarithms. By default each step of each
            repetition has a trained matrix.
        generator: the source of randomness for the initial parameters.

    Attributes:
        input: the input layer.
        bulk: `LogWeights` `[t, v-1, c, c]`, `[from, to]`, or the module given as `transition`.
        p0: `LogWeights` `[t, c]`.
        mixing: `LogWeights` `[t]`.

    The methods take data `[*B, v, *event]`, and
        observed: bool, of the shape of the data, `[*B, v]` or `[v]`. False entries are summed out exactly, as NaN are.
        lengths: integers from 1 to v, of the shape of the first axes of B; variables after these are summed out.

    Raises:
        TypeError: an argument is of another kind.
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
        input: str | Emission = "categorical",
        *,
        num_categories: int | None = None,
        transition: torch.nn.Module | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        t, v, c = num_repetitions, num_variables, num_states
        super().__init__()
        for name, size in zip(("num_repetitions", "num_variables", "num_states"), (t, v, c), strict=True):
            check_count(name, size)
        layer: object = input
        if isinstance(input, str):
            check_choice("input", input, ("categorical", "bernoulli", "gaussian"))
            if input == "categorical":
                layer = Categorical((t, v, c), num_categories, generator=generator)  # type: ignore[arg-type]
            else:
                layer = {"bernoulli": Bernoulli, "gaussian": Gaussian}[input]((t, v, c), generator=generator)
        if not isinstance(layer, Emission):
            raise TypeError(f"input: expected a name or a logchain.nn.Emission, got {type(layer).__name__}")
        if layer.units != (t, v, c):
            raise ValueError(f"input: expected units {[t, v, c]}, got {list(layer.units)}")
        self.input = layer
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

    def arguments(
        self, data: Tensor, observed: Tensor | None = None, *, lengths: Lengths | None = None
    ) -> ChainArguments:
        """The chains of all repetitions, for functions such as `logchain.entropy`.

        Returns:
            `x` `[*B, t, v, c]` in nats, `bulk` `[t, v-1, c, c]` and `p0` `[t, c]` as probabilities.
        """
        data, known = self._observations(self._sequences(data, observed, lengths))
        return ChainArguments(self.input(data, known), *self._weights())

    def log_prob(self, data: Tensor, observed: Tensor | None = None, *, lengths: Lengths | None = None) -> Tensor:
        """`log p(data)` of the observed variables.

        Returns:
            nats `[*B]`, of the dtype of the input layer's result; sums over variables are float64.

        >>> circuit = ChainCircuit(3, 2, num_categories=2)
        >>> circuit.log_prob(torch.tensor([[0, 1, 1], [0, 0, 1]])).shape
        torch.Size([2])
        """
        chain = self.arguments(data, observed, lengths=lengths)
        # a copy: a view would lose the hooks that FSDP2 puts on what `forward` returns
        return self._mixed(self._components(chain)).to(chain.x.dtype, copy=True)

    forward = log_prob

    def posterior(self, data: Tensor, observed: Tensor | None = None, *, lengths: Lengths | None = None) -> Tensor:
        """`p(repetition, state of variable i | data)`, a derivative of `log_prob`.

        Returns:
            `[*B, t, v, c]`. It sums to 1 over the repetitions and states of each variable, to 0 for impossible data.

        >>> circuit = ChainCircuit(3, 2, input="bernoulli")
        >>> circuit.input.set(torch.tensor([0.0, 1.0]))  # the state is the value
        >>> circuit.posterior(torch.tensor([0.0, 1.0, 0.0])).round()
        tensor([[[1., 0.],
                 [0., 1.],
                 [1., 0.]]])
        """
        chain = self.arguments(data, observed, lengths=lengths)
        return self._posterior(chain)[0]

    @torch.no_grad()
    def conditionals(self, data: Tensor, observed: Tensor | None = None, *, lengths: Lengths | None = None) -> Tensor:
        """`p(value of variable i | data)` for variables with K values; 0 or 1 for observed ones.

        Returns:
            `[*B, v, K]`.

        Raises:
            TypeError: the variables have infinitely many values.
            ValueError: the data are impossible.

        >>> circuit = ChainCircuit(3, 2, input="bernoulli")
        >>> circuit.input.set(torch.tensor([0.1, 0.9]))
        >>> circuit.bulk.set(torch.eye(2))  # all variables are in the same state
        >>> circuit.p0.set(torch.tensor([0.5, 0.5]))
        >>> circuit.conditionals(torch.tensor([1.0, 1.0, torch.nan]))
        tensor([[0.0000, 1.0000],
                [0.0000, 1.0000],
                [0.1098, 0.8902]])
        """
        shares = self.input.log_probabilities().exp()  # (t, v, c, K)
        chain = self.arguments(data, observed, lengths=lengths)
        posterior, log_prob = self._posterior(chain)
        self._check_possible(log_prob)
        probabilities = torch.einsum("...tvc,tvck->...vk", posterior, shares.to(posterior))
        data, known = self._known(data, observed, lengths)
        values = torch.arange(shares.shape[-1], device=data.device)
        return torch.where(known[..., None], (data[..., None] == values).to(probabilities), probabilities)

    @torch.no_grad()
    def mpe(self, data: Tensor, observed: Tensor | None = None, *, lengths: Lengths | None = None) -> Completion:
        """The most probable explanation: the maximum of `p(data, repetition, states)` given the observed variables.

        The maximum of `p(data)`, with the hidden units summed out, may be another one, and is hard to find. Completed
        values are modes of the input layer: for continuous variables those of the density, for a `Mixture` approximate.

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
        chain = self.arguments(data, observed, lengths=lengths)
        data, known = self._known(data, observed, lengths)
        whole = known.all(-1) if self.input.event else known
        if self.input.event and bool((known.any(-1) != whole).any()):
            raise ValueError("data: expected each event whole or missing, got some of which a part is missing")
        x = torch.where(whole[..., None, :, None], chain.x, best.to(chain.x))
        path = viterbi(x, chain.bulk, chain.p0)
        score, repetition = (path.score + self.mixing()).max(-1)
        self._check_possible(score)
        states = _of_repetition(path.states, repetition, 0)
        variables = torch.arange(v, device=data.device)
        best_values = values[repetition[..., None], variables, states]
        return Completion(torch.where(known, data, best_values), repetition, states, score.to(x.dtype))

    @torch.no_grad()
    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of all variables.

        Returns:
            `[num_samples, v, *event]`.

        >>> ChainCircuit(3, 2, num_categories=2).sample(5).shape
        torch.Size([5, 3])
        """
        potentials = self.mixing().new_zeros(self.units)
        return self._draw(ChainArguments(potentials, *self._weights()), num_samples, generator)

    @torch.no_grad()
    def sample_conditional(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        *,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """Independent, exact draws given the observed variables, which stay as they are; `num_samples` for each of B.

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
        chain = self.arguments(data, observed, lengths=lengths)
        data, known = self._known(data, observed, lengths)
        return torch.where(known, data, self._draw(chain, num_samples, generator))

    def extra_repr(self) -> str:
        """Sizes."""
        t, v, c = self.units
        return f"num_variables={v}, num_states={c}, num_repetitions={t}"

    def _components(self, chain: ChainArguments) -> Tensor:
        """`log p_r(data)` of each repetition, float64 `[*B, t]`."""
        # what all states have in common is summed in float64: in float32 it would hide the repetitions' difference
        top = chain.x.detach().amax(-1, keepdim=True)
        # a variable with -inf alone is not shifted
        top = torch.where(top == -torch.inf, 0.0, top)
        return product(chain.x - top, chain.bulk, chain.p0).double() + top.double().sum((-2, -1))

    def _weights(self) -> tuple[Any, Tensor]:
        # probabilities: from logarithms the product would take exponentials in each of its passes
        bulk = self.bulk()
        return bulk.map(torch.exp) if isinstance(bulk, Transition) else bulk.exp(), self.p0().exp()

    def _mixed(self, components: Tensor) -> Tensor:
        # in float64: for long data the difference between repetitions is small compared with their log-likelihoods
        return matmul(components[..., None, :], self.mixing().double()[:, None])[..., 0, 0]

    def _posterior(self, chain: ChainArguments) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = chain.x.detach().requires_grad_()
            log_prob = self._mixed(self._components(chain._replace(x=x)))
            return torch.autograd.grad(log_prob.sum(), x)[0], log_prob.detach()

    def _known(self, data: Tensor, observed: Tensor | None, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
        """Data with fillers where nothing is observed, and a mask of their shape, True where observed."""
        axis = -2 - len(self.input.event)
        data, known = self._observations(self._sequences(data, observed, lengths))
        filled, known = self.input.known(data, known)
        known = torch.ones_like(filled, dtype=torch.bool) if known is None else known
        return filled.squeeze(axis), known.squeeze(axis)

    def _emission(self) -> torch.nn.Module:
        return self.input

    def _event_axes(self) -> int:
        return len(self.input.event)

    def _observations(self, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        """Data and mask, checked, with an axis of size 1 for the repetitions."""
        data, known = sequences.data, sequences.known
        wanted = (self.units[1], *self.input.event)
        if sequences.sizes is not None:
            raise ValueError(f"data: expected [*B, {', '.join(map(str, wanted))}], got several sequences; pad them")
        check_last_axes("data", data, wanted)
        axis = -1 - len(wanted)
        return data.unsqueeze(axis), None if known is None else known.unsqueeze(axis)

    def _draw(self, chain: ChainArguments, num_samples: int, generator: torch.Generator | None) -> Tensor:
        check_count("num_samples", num_samples)
        joint = self._components(chain) + self.mixing()  # (*B, t)
        self._check_possible(joint.amax(-1))
        shares = torch.softmax(joint, -1).reshape(-1, joint.shape[-1])
        drawn = torch.multinomial(shares, num_samples, replacement=True, generator=generator)
        repetition = drawn.T.reshape(num_samples, *joint.shape[:-1])
        states = sample(chain.x, chain.bulk, chain.p0, num_samples, generator=generator)
        values = self.input.draw(states, generator)
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
