"""statsmodels' Markov-switching models."""

from typing import Any

import torch

from .chain_arguments import ChainArguments, check_attributes, float64


def from_statsmodels(results: Any) -> ChainArguments:
    r"""A Markov-switching model of statsmodels: the weight of a path of regimes is that of the Hamilton filter.

    An autoregression of order r looks at the last r + 1 regimes, so a state is such a tuple, the latest first:
    `state // k^r` is the regime. Transitions are `[to, from]` there; those before the first observation are in `p0`.

    Args:
        results: what `MarkovRegression` or `MarkovAutoregression` give from `fit`, `smooth` or `filter`, with `k`
            regimes; transition probabilities may vary in time.

    Returns:
        Probabilities in float64 with `x` `[v, k^(r+1)]`, the conditional log-likelihoods. `product` is `results.llf`.
        Zeros are zeros, where statsmodels puts 1e-20.

    Raises:
        TypeError: `results` are no such results.

    Cost: `k^(2r+2)` numbers for `bulk`, times `v - 1` where transitions vary.

    Source: J. Hamilton, "A new approach to the economic analysis of nonstationary time series", Econometrica 57 (1989).

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> results = SimpleNamespace(
    ...     order=1,
    ...     regime_transition=np.array([[[0.9], [0.2]], [[0.1], [0.8]]]),
    ...     conditional_loglikelihoods=np.zeros((2, 2, 5)),
    ...     predicted_joint_probabilities=np.full((2, 2, 5), 0.25),
    ... )
    >>> from_statsmodels(results).bulk[0]  # states are (now, before): 00, 01, 10, 11
    tensor([[0.9000, 0.0000, 0.1000, 0.0000],
            [0.9000, 0.0000, 0.1000, 0.0000],
            [0.0000, 0.2000, 0.0000, 0.8000],
            [0.0000, 0.2000, 0.0000, 0.8000]], dtype=torch.float64)
    """
    arrays = ("regime_transition", "conditional_loglikelihoods", "predicted_joint_probabilities")
    check_attributes("results", results, "results of a Markov-switching model", "order", *arrays)
    transitions, conditional, predicted = (float64(getattr(results, name)) for name in arrays)
    k, order, v = len(transitions), int(results.order), conditional.shape[-1]
    if order == 0 and conditional.dim() == 3:  # a regression keeps the regime before, on which nothing depends
        conditional, predicted = conditional[:, 0], predicted.sum(1)
    transitions = transitions.permute(2, 1, 0)  # (v or 1, from, to)
    bulk = transitions[1:] if len(transitions) == v else transitions
    if order:
        # the regimes that are kept become the earlier ones; the oldest is forgotten
        identity = torch.eye(k**order, dtype=bulk.dtype)
        rows = bulk.repeat_interleave(k ** (order - 1), 1)  # (steps, kept regimes, latest)
        bulk = (rows[:, :, None, :, None] * identity[:, None, None, :]).expand(-1, -1, k, -1, -1)
        bulk = bulk.reshape(len(rows), k ** (order + 1), k ** (order + 1))
    return ChainArguments(conditional.flatten(0, -2).T, bulk, predicted[..., 0].flatten())
