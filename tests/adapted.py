"""How far `logchain` is from another package."""

import numpy as np
import pytest
import torch

from tests.seeded import seeded

F64 = torch.float64

# What two float64 recursions of some hundred steps may differ by, in nats and in probabilities.
NATS, SHARE = 1e-11, 1e-12


def peer(name):
    return pytest.importorskip(name, exc_type=ImportError)


def normal(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def gradients(leaves, ours, theirs):
    """Pairs of gradients of what may share a part of its graph."""
    both = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for out in (ours, theirs))
    return zip(*both, strict=True)


def distance(out, truth):
    """The largest difference of values, whatever their dtypes."""
    out, truth = (value.detach() if isinstance(value, torch.Tensor) else value for value in (out, truth))
    out, truth = np.asarray(out, np.float64), np.asarray(truth, np.float64)
    assert out.shape == truth.shape
    return np.abs(out - truth).max()
