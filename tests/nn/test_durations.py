"""Chains of counting states on `Sparse` last as long as a distribution says."""

import numpy as np
import pytest
import torch

from logchain import nn
from logchain.nn import transitions
from tests.nn.hmms import array, seeded


def test_a_stay_takes_as_many_steps_as_its_distribution_says():
    """Counting states: a state's stay of d steps has probability q_d."""
    lasts = np.array([[0.1, 0.2, 0.7], [0.5, 0.0, 0.5]])
    transition = transitions.Sparse(*duration_arcs(2, 3)).double()
    leaves = lasts / lasts[:, ::-1].cumsum(1)[:, ::-1]
    transition.set(torch.from_numpy(np.concatenate([1 - leaves[:, :-1].flatten(), leaves.flatten()])))
    matrix = array(transition().to_dense(log_params=True).exp())
    for state in range(2):
        start, other = 3 * state, [3, 4, 5] if state == 0 else [0, 1, 2]
        stays = np.eye(6)[start]
        for steps in range(3):
            after = stays @ matrix
            np.testing.assert_allclose(after[other].sum(), lasts[state, steps], atol=1e-15)
            assert after[other[1:]].sum() == 0
            stays = np.where(np.isin(np.arange(6), other), 0, after)
        assert stays.sum() == pytest.approx(0, abs=1e-15)
    hmm = nn.HMM(6, nn.Categorical(6, 2), transition=transition, generator=seeded())
    states = (hmm.sample(300, 60, generator=seeded()).states // 3).numpy()
    found = np.zeros((2, 3))
    for row in states:
        bounds = np.flatnonzero(np.diff(row)) + 1
        for first, last in zip(bounds[:-1], bounds[1:], strict=True):
            found[row[first], last - first - 1] += 1
    np.testing.assert_allclose(found / found.sum(1, keepdims=True), lasts, atol=0.03)


def duration_arcs(states, longest):
    """Arcs [2, arcs] among counting states, `longest` for each state, and their number."""
    number = torch.arange(states * longest).view(states, longest)
    stays = number[:, :-1].flatten(), number[:, 1:].flatten()
    leaves = [(number[a], number[b, :1].expand(longest)) for a in range(states) for b in range(states) if a != b]
    sources, targets = zip(stays, *leaves, strict=True)
    return torch.stack([torch.cat(sources), torch.cat(targets)]), states * longest
