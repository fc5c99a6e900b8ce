"""Hidden Markov models that the tests of `logchain.nn.HMM` share, and what is observed of them."""

import numpy as np
import torch

from logchain.nn import HMM
from tests import oracle
from tests.seeded import seeded

F64 = torch.float64
V, C = 4, 3
LENGTHS = [4, 1, 3, 2, 4]


def random_hmm(emission="categorical", seed=0, **options):
    if emission == "categorical":
        options.setdefault("num_categories", 4)
    return HMM(C, emission, generator=seeded(seed), **options).double()


def categories(*shape, seed=1):
    return torch.randint(4, shape, generator=seeded(seed))


class Driven(torch.nn.Module):
    """Logits of transitions, linear in covariates [..., k]."""

    def __init__(self, k):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(k, C * C, generator=seeded(5)))

    def forward(self, covariates):
        return (covariates @ self.weight).unflatten(-1, (C, C))


class Network(torch.nn.Module):
    """Log-potentials of data [..., d]."""

    def __init__(self, d):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(d, C, generator=seeded(6)))

    def forward(self, data):
        return torch.cos(data @ self.weight)


def array(tensor):
    return tensor.detach().double().numpy()


def probabilities(weights):
    return np.exp(array(weights()))


def parameters(hmm):
    return probabilities(hmm.initial), probabilities(hmm.transition)


def all_paths(x, bulk, p0, lengths=None):
    return oracle.all_paths(x, bulk, p0, lengths=None if lengths is None else np.array(lengths))


def close(found, truth, atol=1e-10):
    np.testing.assert_allclose(array(found), truth, rtol=0, atol=atol)
