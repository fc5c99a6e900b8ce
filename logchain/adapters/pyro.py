"""The chain of Pyro's discrete hidden Markov model."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_is_tensor
from ..matmul import matmul
from .chain_arguments import ChainArguments, check_attributes


def from_pyro(hmm: Any, value: Tensor) -> ChainArguments:
    r"""The chain of Pyro's HMM: `log p(value) = log sum_z I(z_0) prod_i T_i(z_i, z_{i+1}) p(value_i | z_{i+1})`.

    Pyro's initial distribution is one transition before the first observation, so that `p0 = I T_0`, and `bulk` is
    `T` without its first matrix.

    Args:
        hmm: a `pyro.distributions.DiscreteHMM`: initial logits `[*B, c]`, transition logits `[*B, v or 1, c, c]`
            (`[from, to]`), and the distribution of an observation, with batch shape `[*B, v or 1, c]`.
        value: observations `[*B, v, *event]`.

    Returns:
        Logarithms, with gradients for the logits and the parameters of the observations' distribution.

    Raises:
        TypeError: `hmm` is no DiscreteHMM; `value` is not a tensor.
        ValueError: `value` has no axis of steps, or another number of steps than the transitions.

    Cost: `c^2` multiply-adds for the first transition, and that of the observations' densities.

    Source: `pyro.distributions.DiscreteHMM`, after S. Sarkka and A. Garcia-Fernandez, "Temporal parallelization of
    Bayesian smoothers" (arXiv:1905.13002).

    >>> from types import SimpleNamespace
    >>> from torch.distributions import Bernoulli
    >>> from logchain import product
    >>> hmm = SimpleNamespace(
    ...     initial_logits=torch.tensor([0.0, -torch.inf]),
    ...     transition_logits=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
    ...     observation_dist=Bernoulli(torch.tensor([0.5, 0.25])),
    ... )
    >>> arguments = from_pyro(hmm, torch.tensor([1.0]))
    >>> arguments.p0.exp()
    tensor([0.9000, 0.1000])
    >>> product(**arguments._asdict()).exp()  # 0.9 / 2 + 0.1 / 4
    tensor(0.4750)
    """
    check_attributes("hmm", hmm, "a pyro DiscreteHMM", "initial_logits", "transition_logits", "observation_dist")
    check_is_tensor("value", value)
    initial, transitions, emission = hmm.initial_logits, hmm.transition_logits, hmm.observation_dist
    event = len(emission.event_shape)
    if value.dim() < event + 1:
        raise ValueError(f"value: expected observations [..., v{', ...' * (event > 0)}], got {list(value.shape)}")
    x = emission.log_prob(value.unsqueeze(-1 - event))  # [..., v, c]
    transitions = transitions if transitions.dim() > 2 else transitions[None]
    v, steps = x.shape[-2], transitions.shape[-3]
    if steps not in (1, v):
        raise ValueError(f"value: expected {steps} steps, as the transition logits have, got {v}")
    batch = torch.broadcast_shapes(initial.shape[:-1], transitions.shape[:-3], x.shape[:-2])
    first = matmul(initial[..., None, :], transitions[..., 0, :, :])[..., 0, :]
    bulk = transitions if steps == 1 else transitions[..., 1:, :, :]
    return ChainArguments(x.expand(*batch, -1, -1), bulk, first, True)
