"""The steps of the chain of a hidden Markov model: log-potentials, transitions, and the first state."""

import torch
from torch import Tensor, nn

from ..arguments import check_integers, check_tensor
from ..tensors import is_readable
from ..transitions import Duration, Transition
from .chain_model import emission_options
from .checks import check_rows
from .data import Sequences
from .emissions import Emission
from .parameters import fill


def potentials(emission: nn.Module, c: int, sequences: Sequences) -> Tensor:
    """`log p(data_i | z_i)` `[*B, v, c]` in nats, 0 where nothing is observed, -inf for states that are excluded."""
    known = sequences.known
    if isinstance(emission, Emission):
        x: Tensor = emission(sequences.data, known, **emission_options(emission, sequences.covariates))
        x = x.sum(-2) if len(emission.units) > 1 else x  # (*B, v, c)
    else:
        x = emission(sequences.data)
        check_tensor("emission", x, 2)
        if x.shape[-1] != c:
            raise ValueError(f"emission: expected log-potentials [..., v, {c}], got {list(x.shape)}")
        if known is not None:
            if x.shape[:-1] != known.shape:
                name = "observed" if sequences.lengths is None else "lengths"
                expected = f"those of {list(x.shape[:-1])}, the steps that the emission module makes of the data"
                raise ValueError(f"{name}: expected {expected}, got {list(known.shape)}")
            x = torch.where(known[..., None], x, 0)
    return x if sequences.states is None else _with_known_states(x, sequences.states)


def into_steps(covariates: Tensor, batch: tuple[int, ...], v: int, packed: Tensor | None) -> Tensor:
    """The rows of covariates `[*B, v, ...]` that drive a transition; those of packed sequences with 0 in first rows."""
    axis = len(batch)
    check_rows("covariates", covariates, (*batch, v))
    if v == 1 or covariates.shape[axis : axis + 1] != (v,):
        return covariates
    if packed is None:
        return covariates.narrow(axis, 1, v - 1)
    inner = torch.ones(v, dtype=torch.bool).index_fill(0, packed[:-1], False)
    return fill(covariates, inner.to(covariates.device))


def first_steps(bulk: Transition, v: int, packed: Tensor | None) -> Transition:
    """The trained matrices of v steps, or of the steps of each packed sequence, where each step has one."""
    trained = (bulk.lead or (1,))[-1]
    if trained == 1 or (packed is None and trained == v - 1):
        return bulk
    steps = torch.arange(v - 1, device="cpu")
    if packed is not None:  # what leads into first rows has no influence
        steps = (torch.arange(v, device="cpu") - packed[:-1].repeat_interleave(packed.diff()) - 1).clamp(min=0)
    if len(steps) and int(steps.max()) >= trained:
        raise ValueError(f"data: expected at most {trained + 1} steps, got {int(steps.max()) + 2}")
    steps, pairs = steps.to(bulk.device), zip(bulk.parameters, bulk.leads, strict=True)
    selected = (a if lead[-1:] in ((), (1,)) else a.index_select(len(lead) - 1, steps) for a, lead in pairs)
    return bulk.with_parameters(*selected)


def check_transitions(bulk: Transition, batch: tuple[int, ...], rows: int, c: int) -> None:
    """Check for matrices of c states, with leading axes of the batch and of so many rows, or 1 in their places."""
    lead, states = bulk.lead or (1,), bulk.matrix.shape[-1] if isinstance(bulk, Duration) else bulk.states
    sizes = (*((1, size) for size in batch), (1, rows))[max(0, len(batch) + 1 - len(lead)) :]
    fits = len(sizes) == len(lead) and all(size in allowed for size, allowed in zip(lead, sizes, strict=True))
    if not fits or states != c:
        expected = f"{[*batch, rows, c, c]}, or 1 for batch and steps"
        raise ValueError(f"transition: expected shape {expected}, got {[*lead, states, states]}")


def stationary_start(logs: Transition) -> Tensor:
    """The stationary distribution `[*B or less, c]` of one irreducible matrix for all steps, in float64.

    The solution of `p = p P` by elimination without subtractions: each entry has the relative accuracy of float64.

    Cost: `c^3 / 3` multiply-adds in c dependent steps.

    Source: W. Grassmann, M. Taksar and D. Heyman, "Regenerative analysis and steady state distributions for Markov
    chains", Operations Research 33 (1985).
    """
    lead = logs.lead
    if lead and lead[-1] != 1:
        raise ValueError(f"initial: expected 'free' with {lead[-1]} transition matrices, got 'stationary'")
    dense = logs.to_dense(log_params=True)
    # probabilities: the logarithm of a state that is never visited would have no gradient
    remaining, visits = (dense[..., 0, :, :] if lead else dense).double().exp(), []
    # states are eliminated from the last: paths through one are added to the transitions among those that remain
    for k in range(remaining.shape[-1] - 1, 0, -1):
        out = remaining[..., k, :k]
        leaving = out.sum(-1, keepdim=True)
        if is_readable(leaving) and bool((leaving == 0).any()):
            expected = "every state to reach every other with initial='stationary'"
            raise ValueError(f"transition: expected {expected}, got some that do not; pass initial='free'")
        # expected visits of state k for each visit of a state that remains
        visits_of_k = remaining[..., :k, k] / leaving
        remaining = remaining[..., :k, :k] + visits_of_k[..., :, None] * out[..., None, :]
        visits.append(visits_of_k)
    weights = torch.ones_like(remaining[..., 0])  # (..., 1)
    for visits_of_k in reversed(visits):
        weights = torch.cat([weights, (weights * visits_of_k).sum(-1, keepdim=True)], -1)
    return weights / weights.sum(-1, keepdim=True)


def _with_known_states(x: Tensor, states: Tensor) -> Tensor:
    """Log-potentials `[..., v, c]`, -inf of all states but those that are known; -1 is unknown."""
    c = x.shape[-1]
    check_integers("states", states)
    if states.shape != x.shape[:-1]:
        raise ValueError(f"states: expected shape {list(x.shape[:-1])}, got {list(states.shape)}")
    if is_readable(states) and not bool(((states >= -1) & (states < c)).all()):
        got = f"{int(states.min())} to {int(states.max())}"
        raise ValueError(f"states: expected integers from -1 to {c - 1}, got {got}")
    excluded = torch.arange(c, device=x.device) != states[..., None]
    return x.masked_fill(excluded & (states >= 0)[..., None], -torch.inf)
