"""The chain of statsmodels' Markov-switching models."""

from typing import Any

import torch

from .chain_arguments import ChainArguments, check_attributes, float64


def from_statsmodels(results: Any) -> ChainArguments:
    r"""The chain of a Markov-switching model: a path of regimes has the weight that the Hamilton filter gives it.

    The observations of an autoregression of order r depend on the last r + 1 regimes. A state is such a tuple, the
    latest regime first: `state // k^r` is the latest. Transitions before the first observation are part of `p0`.

    Args:
        results: a result of `fit`, `smooth` or `filter` of statsmodels' `MarkovRegression` or `MarkovAutoregression`
            with `k` regimes; transition probabilities may vary in time.

    Returns:
        Probabilities in float64 with `x` `[v, k^(r+1)]`, the conditional log-likelihoods. `product` is `results.llf`.
        Zero probabilities are exactly 0, where statsmodels takes 1e-20.

    Raises:
        TypeError: `results` is no such result.

    Cost: `k^(2r+2)` numbers for `bulk`, times `v - 1` where transitions vary in time.

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
    if order == 0 and conditional.dim() == 3:  # a regression keeps an axis for the regime before, which has no effect
        conditional, predicted = conditional[:, 0], predicted.sum(1)
    transitions = transitions.permute(2, 1, 0)  # (v or 1, from, to)
    bulk = transitions[1:] if len(transitions) == v else transitions
    if order:
        # the new tuple is the new regime and the old tuple without its oldest regime
        identity = torch.eye(k**order, dtype=bulk.dtype)
        rows = bulk.repeat_interleave(k ** (order - 1), 1)  # (steps, kept regimes, latest)
        bulk = (rows[:, :, None, :, None] * identity[:, None, None, :]).expand(-1, -1, k, -1, -1)
        bulk = bulk.reshape(len(rows), k ** (order + 1), k ** (order + 1))
    return ChainArguments(conditional.flatten(0, -2).T, bulk, predicted[..., 0].flatten())
