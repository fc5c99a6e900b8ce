"""The log-potentials and transition matrices of a hidden Markov model for given data and covariates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_choice, check_tensor
from ..transitions import Transition
from .checks import check_count
from .emissions.input_layer import InputLayer
from .log_weights import LogWeights
from .parameters import arithmetic
from .stationary import stationary
from .transitions.weights import TransitionWeights


def potentials(emission: torch.nn.Module, num_states: int, data: Tensor, known: Tensor | None, masked: bool) -> Tensor:
    """`log p(data_i | z_i)` `[*B, v, c]` in nats, 0 where nothing is observed; `masked`: by `observed`."""
    if isinstance(emission, InputLayer):
        x: Tensor = emission(data, known)  # (*B, v, *U, c)
        return x.sum(-2) if len(emission.units) > 1 else x
    x = emission(data)
    check_tensor("emission", x, 2)
    if x.shape[-1] != num_states:
        raise ValueError(f"emission: expected log-potentials [..., v, {num_states}], got {list(x.shape)}")
    if known is None:
        return x
    if x.shape[:-1] != known.shape:
        expected = f"{list(x.shape[:-1])}, the steps that the emission module makes of the data"
        if masked:
            raise ValueError(f"observed: expected shape {expected}, got {list(known.shape)}")
        raise ValueError(f"lengths: expected those of {expected}, got those of {list(known.shape)}")
    return torch.where(known[..., None], x, 0)


def check_transitions(initial: object, transition: object, num_steps: object) -> None:
    """Check the options of a hidden Markov model that concern its initial and transition probabilities."""
    if num_steps is not None:
        check_count("num_steps", num_steps)
    check_choice("initial", initial, ("free", "stationary"))
    if initial == "stationary" and num_steps is not None:
        raise ValueError("initial: expected 'free' where each step has a matrix of its own, got 'stationary'")
    if not isinstance(transition, torch.nn.Module | None):
        raise TypeError(f"transition: expected a torch.nn.Module, got {type(transition).__name__}")
    if transition is not None and num_steps is not None:
        raise ValueError(f"num_steps: expected None with a transition module, got {num_steps}")


def transitions(
    transition: Any,
    shape: Sequence[int],
    ends: Tensor | None,
    covariates: Tensor | None,
    num_steps: int | None,
    *,
    any_batch: bool = False,
) -> Tensor | Transition:
    """Log-probabilities `[*B or less, v-1 or 1, c, c]` of transitions, for log-potentials of a shape `[*B, v, c]`.

    Or a structure of such. `any_batch`: B is not known.
    """
    *batch, v, c = shape
    if isinstance(transition, LogWeights | TransitionWeights):
        if covariates is not None:
            raise ValueError("covariates: expected None without a transition module")
        if num_steps is not None and v > num_steps:
            name = "num_steps" if any_batch else "data"
            raise ValueError(f"{name}: expected at most {num_steps} steps, got {v}")
        found: Tensor | Transition = transition()
        if num_steps is not None and isinstance(found, Tensor):
            found = found[: v - 1]
    else:
        if covariates is not None and ends is not None and covariates.shape[: len(batch) + 1] == (*batch, v - 1):
            covariates = fill(covariates, torch.arange(1, v, device=ends.device) < ends[..., None])
        found = transition(covariates)
        if not isinstance(found, Transition):
            check_tensor("transition", found, 3)
            found = torch.log_softmax(arithmetic(found), -1)
    _check_sizes(found, None if any_batch else batch, v - 1, c)
    return found


def _check_sizes(found: Tensor | Transition, batch: list[int] | None, steps: int, c: int) -> None:
    """Check the sizes of transitions for a batch, or for any if it is None."""
    if isinstance(found, Transition):
        *lead, rows, columns = (*found.lead, found.states, found.states)
    else:
        *lead, rows, columns = found.shape
    own = lead[:-1]
    batch = own if batch is None else batch
    fits = len(own) <= len(batch) and all(a in (1, b) for a, b in zip(own[::-1], batch[::-1], strict=False))
    if not fits or lead[-1:] not in ([], [1], [steps]) or not rows == columns == c:
        expected = f"[{', '.join(map(str, (*batch, steps, c, c)))}], or 1 in the place of batch and steps"
        raise ValueError(f"transition: expected shape {expected}, got {[*lead, rows, columns]}")


def stationary_start(logs: Tensor | Transition) -> Tensor:
    """The stationary distribution `[*B or less, c]` of one matrix for all steps, in float64."""
    lead = logs.lead if isinstance(logs, Transition) else logs.shape[:-2]
    if lead and lead[-1] != 1:
        raise ValueError(f"initial: expected 'free' with {lead[-1]} transition matrices, got 'stationary'")
    dense = logs.to_dense(log_params=True) if isinstance(logs, Transition) else logs
    # probabilities: the logarithm of a state that is never visited would have no gradient
    return stationary((dense[..., 0, :, :] if lead else dense).double().exp())


def fill(values: Tensor, known: Tensor) -> Tensor:
    """Values with 0 where the mask `known`, of their first axes, is False."""
    return values.masked_fill(~over(known, values.shape), 0)


def over(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values expanded to a shape with further axes on the right."""
    return values[(..., *(None,) * (len(shape) - values.dim()))].expand(shape)
