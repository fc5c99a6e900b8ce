"""The chain of hmmlearn's hidden Markov models."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .chain_arguments import ChainArguments, check_attributes, float64


def from_hmmlearn(model: Any, X: Any, lengths: Sequence[int] | None = None) -> ChainArguments:
    r"""The chain of a model of hmmlearn: `log p(X) = log sum_z pi(z_0) prod_i A(z_{i-1}, z_i) p(X_i | z_i)`.

    `p0` is `startprob_`, `bulk` is `transmat_`, and `x` holds the samples' log-likelihoods. hmmlearn concatenates
    sequences; here they are padded side by side.

    Args:
        model: any fitted model of hmmlearn.
        X: samples `[samples, features]`.
        lengths: the number of samples of each sequence, in order; one sequence by default.

    Returns:
        Probabilities in float64 with `x` `[v, c]`; with `lengths`, `x` `[n, max(lengths), c]` and the lengths. The sum
        of `product` over the sequences is `model.score(X, lengths)`.

    Raises:
        TypeError: `model` is not one of hmmlearn's or not fitted, or `lengths` are no integers.
        ValueError: `X` does not have two axes, or `lengths` do not add up to its samples.

    Cost: that of the samples' densities, and one copy of them.

    Source: `hmmlearn.base.BaseHMM`.

    >>> from logchain import product
    >>> class Coins:
    ...     startprob_, transmat_ = [0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]]
    ...
    ...     def _compute_log_likelihood(self, X):
    ...         return np.log(np.where(X == 1, [0.5, 0.25], [0.5, 0.75]))
    >>> product(**from_hmmlearn(Coins(), [[1], [1], [0]], lengths=[2, 1])._asdict()).exp()
    tensor([0.1563, 0.6250], dtype=torch.float64)
    """
    check_attributes("model", model, "a fitted model of hmmlearn", "startprob_", "transmat_", "_compute_log_likelihood")
    X = np.asarray(X)
    if X.ndim != 2:
        raise ValueError(f"X: expected [samples, features], got {list(X.shape)}")
    x, p0, bulk = float64(model._compute_log_likelihood(X)), float64(model.startprob_), float64(model.transmat_)
    if lengths is None:
        return ChainArguments(x, bulk[None], p0)
    counts = np.asarray(lengths).tolist()
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise TypeError(f"lengths: expected integers, one for each sequence, got {lengths!r}")
    if sum(counts) != len(x) or min(counts, default=0) < 1:
        raise ValueError(f"lengths: expected positive integers that add up to {len(x)} samples, got {counts}")
    x = torch.nn.utils.rnn.pad_sequence(x.split(counts), batch_first=True)  # (n, v, c)
    return ChainArguments(x, bulk[None], p0, lengths=torch.tensor(counts))
