"""The questions that all circuits answer: a mixture of repetitions of a structure of hidden units."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_is_tensor
from ..matmul import matmul
from ..viterbi import Path
from .checks import check_count, check_last_axes, check_mask
from .emissions.input_layer import InputLayer
from .emissions.named import named_input
from .fitting import Fit, Optimiser, fit, frozen
from .log_weights import LogWeights


class Completion(NamedTuple):
    """Data `[*B, v, *event]` without gaps, the hidden units that go with them, and their log-probability `[*B]`.

    The units are the repetition int64 `[*B]` and a state of each variable int64 `[*B, v]`.
    """

    data: Tensor
    repetition: Tensor
    states: Tensor
    log_prob: Tensor


class Circuit(torch.nn.Module):
    r"""`log p(data) = logsumexp_r (mixing_r + log p_r(data))`: a mixture of t repetitions of a structure.

    `input` has units `[t, v, c]`; a subclass joins the units of a repetition's variables by `components`, `best_states`
    and `draw_states`. Data are `[*B, v, *event]`; what is not observed, that is NaN or where the bool tensor `observed`
    of the data's shape (or without the axes of the event) is False, is summed out exactly.

    Args:
        input: an input layer with units `[t, v, c]`, or the name of one: "categorical", "bernoulli", "binomial",
            "gaussian".
        units: `[t, v, c]`.
        num_categories: of categorical variables.
        total_count: of binomial variables.
        generator: where the initial parameters come from.
    """

    def __init__(
        self,
        input: str | InputLayer,
        units: tuple[int, int, int],
        num_categories: int | None,
        total_count: int | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.input = named_input(input, units, num_categories, total_count, generator)
        self.mixing = LogWeights(units[0], generator=generator)

    @property
    def units(self) -> tuple[int, int, int]:
        """Repetitions, variables, states: `[t, v, c]`."""
        t, v, c = self.input.units
        return t, v, c

    def forward(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log_prob`, as wrappers such as DistributedDataParallel call it."""
        return self.log_prob(data, observed)

    def log_prob(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log p(data)`, of the observed variables alone.

        Args:
            data: `[*B, v, *event]`.
            observed: bool; see the class.

        Returns:
            Nats `[*B]`, in the input layer's dtype; sums over variables are float64.
        """
        x = self._weigh(data, observed)
        return self._mixed(self.components(x)).to(x.dtype)

    def posterior(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`p(repetition, state of variable i | observed)`, a derivative of `log_prob`, with its arguments.

        Returns:
            `[*B, t, v, c]`; of each variable it sums to 1, and to 0 for impossible data.
        """
        return self._posterior(data, observed)[0]

    @torch.no_grad()
    def conditionals(self, data: Tensor, observed: Tensor | None = None) -> Tensor:
        """`p(value of variable i | observed)`, for variables with K values; an observed value is certain.

        Arguments as in `log_prob`.

        Returns:
            `[*B, v, K]`.

        Raises:
            TypeError: the input layer is of no family with a finite number of values.
            ValueError: the data are impossible.
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

        The most probable completion with the hidden units summed out may differ; it is hard to find. Values are the
        `mode` of the input layer: of a continuous variable the density counts, and a `Mixture`'s is near the maximum.

        Args:
            data: `[*B, v, *event]`.
            observed: bool; see the class.

        Returns:
            The completed data, their hidden units and log-probability.

        Raises:
            ValueError: the data are impossible, or of an event a part is missing.
        """
        v = self.units[1]
        values, best = self.input.mode()  # (t, v, c, *event), (t, v, c)
        x = self._weigh(data, observed)
        data, known = self._known(data, observed)
        whole = known.all(-1) if self.input.event else known
        if self.input.event and bool((known.any(-1) != whole).any()):
            raise ValueError("data: expected each event whole or missing, got some of which a part is missing")
        path = self.best_states(torch.where(whole[..., None, :, None], x, best.to(x)))
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
            num_samples: how many.
            generator: the source of randomness.

        Returns:
            `[num_samples, v, *event]`.
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
        """Independent, exact draws of the other variables, given the observed ones.

        Args:
            data: `[*B, v, *event]`.
            observed: bool; see the class.
            num_samples: how many for each of the data.
            generator: the source of randomness.

        Returns:
            `[num_samples, *B, v, *event]`.

        Raises:
            ValueError: the data are impossible.
        """
        x = self._weigh(data, observed)
        data, known = self._known(data, observed)
        return torch.where(known, data, self._draw(x, num_samples, generator))

    def initialise(
        self, data: Tensor, *, observed: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draw trained parameters anew: weights uniformly over the simplex, the input layer's by the data."""
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
        """Maximum likelihood of data `[n, v, *event]`: see `logchain.nn.fit`.

        `restarts`: from how many starts, of which the best is kept; 0 goes on from the present parameters.
        """
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

    def components(self, x: Tensor) -> Tensor:
        """`log p_r` of each repetition `[*B, t]` in float64, from log-densities `[*B, t, v, c]`."""
        raise NotImplementedError

    def best_states(self, x: Tensor) -> Path:
        """The best states of each repetition, int64 `[*B, t, v]`, and their log-weight `[*B, t]`."""
        raise NotImplementedError

    def draw_states(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """States of each repetition drawn from their posterior: int64 `[num_samples, *B, t, v]`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Sizes."""
        t, v, c = self.units
        return f"num_variables={v}, num_states={c}, num_repetitions={t}"

    def _mixed(self, components: Tensor) -> Tensor:
        # in float64, or repetitions of long data could not be told apart
        return matmul(components[..., None, :], self.mixing().double()[:, None])[..., 0, 0]

    def _posterior(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x = self._weigh(data, observed)
        with torch.enable_grad():
            log_prob = self._mixed(self.components(x.requires_grad_()))
            return torch.autograd.grad(log_prob.sum(), x)[0], log_prob.detach()

    def _weigh(self, data: Tensor, observed: Tensor | None) -> Tensor:
        """The input layer's log-densities `[*B, t, v, c]`."""
        log_densities: Tensor = self.input(*self._shared(data, observed))
        return log_densities

    def _known(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Data with fillers where nothing is known, and a bool of their shape, True where something is."""
        axis = -2 - len(self.input.event)
        filled, known = self.input.known(*self._shared(data, observed))
        known = torch.ones_like(filled, dtype=torch.bool) if known is None else known
        return filled.squeeze(axis), known.squeeze(axis)

    def _shared(self, data: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Data and mask with an axis of size 1 for the repetitions."""
        check_is_tensor("data", data)
        wanted = (self.units[1], *self.input.event)
        check_last_axes("data", data, wanted)
        if observed is not None:
            variables = data.shape[: data.dim() - len(self.input.event)]
            check_mask(observed, data.shape, variables)
            observed = observed.unsqueeze(len(variables) - 1)
        return data.unsqueeze(-1 - len(wanted)), observed

    def _draw(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        check_count("num_samples", num_samples)
        joint = self.components(x) + self.mixing()  # (*B, t)
        self._check_possible(joint.amax(-1))
        shares = torch.softmax(joint, -1).reshape(-1, joint.shape[-1])
        drawn = torch.multinomial(shares, num_samples, replacement=True, generator=generator)
        repetition = drawn.T.reshape(num_samples, *joint.shape[:-1])
        values = self.input.draw(self.draw_states(x, num_samples, generator), generator)
        return _of_repetition(values, repetition, len(self.input.event))

    @staticmethod
    def _check_possible(log_prob: Tensor) -> None:
        wrong = log_prob == -torch.inf
        if bool(wrong.any()):
            raise ValueError(f"data: expected what is possible, got log-probability -inf {int(wrong.sum())} times")


def _of_repetition(values: Tensor, repetition: Tensor, event: int) -> Tensor:
    """Entries `[..., v, *event]` of values `[..., t, v, *event]` at repetitions int64 `[...]`."""
    axis = values.dim() - event - 2
    index = repetition.reshape(*repetition.shape, *(1,) * (event + 2))
    return values.take_along_dim(index, axis).squeeze(axis)
