"""The chain-shaped circuit: a mixture of chains of hidden states, one state for each variable."""

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..chain_arguments import ChainArguments
from ..marginals import Marginals
from ..matmul import matmul
from ..product import product
from ..sample import sample
from ..transitions import Transition
from ..viterbi import viterbi
from .chain_model import ChainModel, Sample, check_module, check_possible
from .checks import check_count, check_last_axes
from .data import Data, Ends, Rows, Sequences
from .emissions import Emission, Mixture
from .expectations import mixed
from .log_weights import LogWeights
from .transitions import Transitions


class Completion(NamedTuple):
    """Results of `ChainCircuit.decode`.

    Attributes:
        states: the best state of each variable, int64 `[*B, v]`.
        score: the log-probability of data, repetition and states `[*B]`, nats.
        repetition: the best repetition, int64 `[*B]`.
        data: `[*B, v, *event]`, with the modes of the best states where data are missing.
    """

    states: Tensor
    score: Tensor
    repetition: Tensor
    data: Tensor


class ChainCircuit(ChainModel):
    r"""`p(data) = sum_r mixing_r sum_z p_r(z_0) prod_i P_ri(z_{i-1}, z_i) prod_i p_ri(data_i | z_i)`.

    A mixture of t inhomogeneous hidden Markov models over v variables with c hidden states each. Marginals and
    conditionals of any subset of variables are exact, and cost one evaluation.

    Args:
        num_variables: v.
        num_states: c.
        num_repetitions: t.
        emission: an `Emission` with units `[t, v, c]`, such as `Categorical((t, v, c), K)`; or "bernoulli", "gaussian"
            or "poisson" for numbers.
        transition: `Transitions` with `lead=(t, v - 1)`, or 1 in place of either for shared weights; or a module whose
            call returns a structure of `logchain.transitions` of logarithms. By default each step of each repetition
            has a trained matrix.
        generator: the source of randomness for the initial parameters.

    Attributes:
        emission: the input layer.
        transition: `Transitions` of matrices `[t, v-1, c, c]`, `[from, to]`, or the module that was passed.
        initial: `LogWeights` `[t, c]`.
        mixing: `LogWeights` `[t]`.

    The methods take a tensor or array of data `[*B, v, *event]`, and
        observed: bool, of the shape of the data, `[*B, v]` or `[v]`. False entries are summed out exactly, as NaN are.
        lengths: integers from 1 to v, of the shape of the first axes of B; variables after these are summed out.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: sizes do not go together, or there are covariates or known states, which only an `HMM` takes.

    Cost: `t v c^2` multiply-adds per data point, or those of a structure, twice that for gradients, and the memory of
    `logchain.product`. Draws and `decode` cost what `logchain.sample` and `logchain.viterbi` do; the latter needs a
    structure that has best paths, which `LowRank` lacks.

    Source: a chain of sum layers as a probabilistic circuit: Y. Choi, A. Vergari and G. Van den Broeck, "Probabilistic
    circuits" (2020).

    >>> circuit = ChainCircuit(3, 2)
    >>> circuit
    ChainCircuit(
      num_variables=3, num_states=2, num_repetitions=1
      (emission): Bernoulli(
        units=(1, 3, 2), total_count=1
        (weights): LogWeights(1, 3, 2, 2)
      )
      (mixing): LogWeights(1)
      (transition): Transitions(
        Dense([1, 2, 2, 2])
        (weights): ModuleList(
          (0): LogWeights(1, 2, 2, 2)
        )
      )
      (initial): LogWeights(1, 2)
    )
    >>> circuit.initial.set(torch.tensor([0.5, 0.5]))
    >>> circuit.transition.set(torch.eye(2))  # all variables are in the same state
    >>> circuit.emission.set(torch.tensor([0.1, 0.9]))
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

    emission: Emission

    def __init__(
        self,
        num_variables: int,
        num_states: int,
        num_repetitions: int = 1,
        emission: str | Emission = "bernoulli",
        *,
        transition: nn.Module | None = None,
        generator: Generator | None = None,
    ) -> None:
        t, v, c = num_repetitions, num_variables, num_states
        for name, size in zip(("num_repetitions", "num_variables", "num_states"), (t, v, c), strict=True):
            check_count(name, size)
        super().__init__(emission, (t, v, c), generator)
        if not isinstance(self.emission, Emission):
            raise TypeError(f"emission: expected a name or a logchain.nn.Emission, got {type(emission).__name__}")
        if self.emission.units != (t, v, c):
            raise ValueError(f"emission: expected units {[t, v, c]}, got {list(self.emission.units)}")
        check_module("transition", transition, None)
        self.mixing = LogWeights(t, generator=generator)
        self.transition = Transitions(c, lead=(t, v - 1), generator=generator) if transition is None else transition
        self.initial = LogWeights(t, c, generator=generator)

    def posterior(self, data: Data, observed: Rows = None, *, lengths: Ends = None) -> Marginals:
        """`p(repetition, state of variable i | data)`, a derivative of `log_prob`.

        Returns:
            `Marginals(states [*B, t, v, c], transitions=None, log_norm [*B])`, without gradients; `log_norm` is
            `log p(data)` in nats. States sum to 1 over the repetitions and states of each variable, to 0 for impossible
            data.

        >>> circuit = ChainCircuit(3, 2)
        >>> circuit.emission.set(torch.tensor([0.0, 1.0]))  # the state is the value
        >>> circuit.posterior(torch.tensor([0.0, 1.0, 0.0])).states.round()
        tensor([[[1., 0.],
                 [0., 1.],
                 [1., 0.]]])
        """
        return self._posterior(self.arguments(data, observed, lengths=lengths))

    @torch.no_grad()
    def conditionals(self, data: Data, observed: Rows = None, *, lengths: Ends = None) -> Tensor:
        """`p(value of variable i | data)` for variables with K values; 0 or 1 for observed ones.

        Returns:
            `[*B, v, K]`.

        Raises:
            TypeError: the variables have infinitely many values.
            ValueError: the data are impossible.
        """
        sequences, chain = self._chain_of(data, observed, lengths)
        posterior = self._posterior(chain)
        check_possible(posterior.log_norm)
        probabilities = mixed(self.emission, posterior.states, self.emission.log_probabilities().exp())
        values, known = self._known(sequences)
        hits = values[..., None] == torch.arange(probabilities.shape[-1], device=values.device)
        return torch.where(known[..., None], hits.to(probabilities), probabilities)

    @torch.no_grad()
    def decode(self, data: Data, observed: Rows = None, *, lengths: Ends = None) -> Completion:
        """The most probable repetition and states, with the modes of the missing entries.

        It is the maximum of `p(data, repetition, states)` conditional on what is observed. It need not be the most
        probable completion, the maximum of `p(data)`, which is hard to find. Modes are those of the emission: for
        continuous variables those of the density, for a `Mixture` approximate.

        Returns:
            `Completion(states, score, repetition, data)`.

        Raises:
            ValueError: the data are impossible, or an event is observed in part.

        >>> circuit = ChainCircuit(3, 2)
        >>> circuit.emission.set(torch.tensor([0.0, 1.0]))
        >>> circuit.transition.set(torch.eye(2))  # all variables are in the same state
        >>> circuit.decode(torch.tensor([1.0, torch.nan, torch.nan])).data
        tensor([1., 1., 1.])
        """
        sequences, chain = self._chain_of(data, observed, lengths)
        values, known = self._known(sequences)
        self._check_whole(known)
        modes, best = self.emission.mode()  # (t, v, c, *event), (t, v, c)
        whole = known.all(-1) if self.emission.event else known
        x = torch.where(whole[..., None, :, None], chain.x, best.to(chain.x))
        path = viterbi(x, chain.bulk, chain.p0)
        score, repetition = (path.score + self.mixing()).max(-1)
        check_possible(score)
        states = _of_repetition(path.states, repetition, 0)
        variables = torch.arange(states.shape[-1], device=states.device)
        completed = torch.where(known, values, modes[repetition[..., None], variables, states])
        return Completion(states, score.to(x.dtype), repetition, completed)

    @torch.no_grad()
    def sample(self, num_samples: int, generator: Generator | None = None) -> Sample:
        """Independent draws of states and data.

        Returns:
            `Sample(states, data)`: int64 `[num_samples, v]`, those of the repetition that was drawn, and
            `[num_samples, v, *event]`.

        >>> ChainCircuit(3, 2).sample(5).data.shape
        torch.Size([5, 3])
        """
        potentials = self.mixing().new_zeros(self.emission.units)
        return self._draw(ChainArguments(potentials, *self._weights()), num_samples, generator)

    @torch.no_grad()
    def sample_conditional(
        self,
        data: Data,
        observed: Rows = None,
        num_samples: int = 1,
        generator: Generator | None = None,
        *,
        lengths: Ends = None,
    ) -> Tensor:
        """Independent, exact draws of the data, conditional on the observed variables, which stay as they are.

        Returns:
            `[num_samples, *B, v, *event]`.

        Raises:
            ValueError: the data are impossible, or an event whose entries depend on each other is observed in part.

        >>> circuit = ChainCircuit(3, 2)
        >>> circuit.emission.set(torch.tensor([0.0, 1.0]))
        >>> circuit.transition.set(torch.eye(2))  # all variables are in the same state
        >>> circuit.sample_conditional(torch.tensor([1.0, torch.nan, torch.nan]), num_samples=2)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        """
        sequences, chain = self._chain_of(data, observed, lengths)
        values, known = self._known(sequences)
        if any(isinstance(part, Mixture) or getattr(part, "has_matrices", False) for part in self.emission.modules()):
            self._check_whole(known)
        return torch.where(known, values, self._draw(chain, num_samples, generator).data)

    def extra_repr(self) -> str:
        """Sizes."""
        t, v, c = self.emission.units
        return f"num_variables={v}, num_states={c}, num_repetitions={t}"

    def _chain_of(self, *arguments: Any) -> tuple[Sequences, ChainArguments]:
        sequences = self._sequences(*arguments)
        for name in ("covariates", "states"):
            if getattr(sequences, name) is not None:
                raise ValueError(f"{name}: expected None with a circuit, got a tensor")
        return sequences, ChainArguments(self.emission(*self._observations(sequences)), *self._weights())

    def _weights(self) -> tuple[Any, Tensor]:
        # probabilities: from logarithms the product would take exponentials in each of its passes
        bulk = self.transition()
        return bulk.map(torch.exp) if isinstance(bulk, Transition) else bulk.exp(), self.initial().exp()

    def _log_norm(self, chain: ChainArguments) -> Tensor:
        # in float64: for long data the difference between repetitions is small compared with their log-likelihoods
        log_norm = matmul(_components(chain)[..., None, :], self.mixing().double()[:, None])[..., 0, 0]
        # a copy: a view would lose the hooks that FSDP2 puts on what `forward` returns
        return log_norm.to(chain.x.dtype, copy=True)

    def _posterior(self, chain: ChainArguments) -> Marginals:
        with torch.enable_grad():
            x = chain.x.detach().requires_grad_()
            log_norm = self._log_norm(chain._replace(x=x))
            return Marginals(torch.autograd.grad(log_norm.sum(), x)[0], None, log_norm.detach())

    def _event_axes(self) -> int:
        return len(self.emission.event)

    def _observations(self, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        """Data and mask, checked, with an axis of size 1 for the repetitions."""
        data, known = sequences.data, sequences.known
        wanted = (self.emission.units[1], *self.emission.event)
        if sequences.sizes is not None:
            raise ValueError(f"data: expected [*B, {', '.join(map(str, wanted))}], got several sequences; pad them")
        check_last_axes("data", data, wanted)
        axis = -1 - len(wanted)
        return data.unsqueeze(axis), None if known is None else known.unsqueeze(axis)

    def _known(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Data with fillers where nothing is observed, and a mask of their shape, True where observed."""
        axis = -2 - len(self.emission.event)
        filled, known = self.emission.known(*self._observations(sequences))
        known = torch.ones_like(filled, dtype=torch.bool) if known is None else known
        return filled.squeeze(axis), known.squeeze(axis)

    def _check_whole(self, known: Tensor) -> None:
        if self.emission.event and bool((known != known[..., :1]).any()):
            raise ValueError("data: expected each event whole or missing, got some of which a part is missing")

    def _draw(self, chain: ChainArguments, num_samples: int, generator: Generator | None) -> Sample:
        check_count("num_samples", num_samples)
        joint = _components(chain) + self.mixing()  # (*B, t)
        check_possible(joint.amax(-1))
        shares = torch.softmax(joint, -1).reshape(-1, joint.shape[-1])
        drawn = torch.multinomial(shares, num_samples, replacement=True, generator=generator)
        repetition = drawn.T.reshape(num_samples, *joint.shape[:-1])
        states = sample(chain.x, chain.bulk, chain.p0, num_samples, generator=generator)
        values = self.emission.draw(states, generator)
        data = _of_repetition(values, repetition, len(self.emission.event))
        return Sample(_of_repetition(states, repetition, 0), data)


def _components(chain: ChainArguments) -> Tensor:
    """`log p_r(data)` of each repetition, float64 `[*B, t]`."""
    # what all states have in common is summed in float64: in float32 it would hide the repetitions' difference
    top = chain.x.detach().amax(-1, keepdim=True)
    # a variable with -inf alone is not shifted
    top = torch.where(top == -torch.inf, 0.0, top)
    return product(chain.x - top, chain.bulk, chain.p0).double() + top.double().sum((-2, -1))


def _of_repetition(values: Tensor, repetition: Tensor, event: int) -> Tensor:
    """Values `[..., v, *event]` of the repetitions int64 `[...]`, from values `[..., t, v, *event]` of all."""
    axis = values.dim() - event - 2
    index = repetition.reshape(*repetition.shape, *(1,) * (event + 2))
    return values.take_along_dim(index, axis).squeeze(axis)
