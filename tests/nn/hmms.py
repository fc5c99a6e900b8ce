"""A table of hidden Markov models, data for them, and their potentials by scipy; the oracle sums over all paths."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.special
import torch

from logchain import transitions as structures
from logchain.nn import HMM, Categorical, Gaussian, Poisson
from logchain.nn import transitions as trained
from tests import oracle
from tests.adapted import normal
from tests.nn.emissions import array
from tests.seeded import seeded

F64 = torch.float64
V, C = 4, 3
LENGTHS = [4, 1, 3, 2, 4]
vectors = partial(normal, 5, V, 2)


def close(found, truth, atol=1e-10):
    np.testing.assert_allclose(array(found), truth, rtol=0, atol=atol)


def probabilities(weights):
    return np.exp(array(weights()))


def random_hmm(emission=None, seed=0, **options):
    if not isinstance(emission, torch.nn.Module):
        emission = (emission or partial(Categorical, C, 4))(generator=seeded(seed))
    return HMM(C, emission, generator=seeded(seed), **options).double()


def categories(*shape, seed=1):
    return torch.randint(4, shape, generator=seeded(seed))


def driven_hmm():
    """Logits of transitions are linear in covariates [..., 2]."""
    torch.manual_seed(5)
    return random_hmm(transition=torch.nn.Sequential(torch.nn.Linear(2, C * C), torch.nn.Unflatten(-1, (C, C))))


def network():
    """Log-potentials of data [..., 2]."""
    torch.manual_seed(6)
    return torch.nn.Sequential(torch.nn.Linear(2, C), torch.nn.Tanh())


class Ring(torch.nn.Module):
    """A ring of states, which are left with probabilities that depend on covariates [*B, v-1, 2]; a structure."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(2, C, generator=seeded()))

    def stay(self, covariates):
        return torch.sigmoid(covariates @ self.slope)  # (*B, v-1, c)

    def forward(self, covariates):
        stay = self.stay(covariates)
        leave = (1 - stay).roll(1, -1)
        return structures.Banded(torch.stack([stay, leave, leave], -2).log(), [0, 1, 1 - C])

    @staticmethod
    def of_hmm(hmm, covariates):
        stay = array(hmm.transition.stay(covariates))[..., None]
        return stay * np.eye(C) + (1 - stay) * np.roll(np.eye(C), 1, 1)


class Model(NamedTuple):
    """An HMM, data for it, and how bulk [(n,) v-1 or 1, c, c] is known without the library."""

    make: Callable = random_hmm
    data: Callable = lambda: categories(5, V)
    bulk: Callable = lambda hmm, covariates: probabilities(hmm.transition)
    covariates: torch.Tensor | None = None

    def truth(self, hmm, data, lengths=None, observed=None):
        """The sums over all paths, without the potentials of what is not observed."""
        lengths = None if lengths is None else np.array(lengths)
        return oracle.all_paths(*self.potentials(hmm, data, observed), lengths=lengths)

    def potentials(self, hmm, data, observed=None):
        x, bulk = array(hmm.emission(data)), self.bulk(hmm, self.covariates)  # see test_emissions
        x = x.sum(-2) if x.ndim > 3 else x  # over features
        x = x if observed is None else np.where(observed.numpy()[..., None], x, 0)
        return x, bulk, np.linalg.matrix_power(bulk[0], 1000)[0] if hmm.initial is None else probabilities(hmm.initial)


def softmax_of(hmm, covariates):
    return scipy.special.softmax(array(hmm.transition(covariates)), -1)


ARCS = torch.tensor([[0, 3, 0, 1, 2, 3, 3], [2, 3, 0, 2, 1, 0, 1]])
# transitions of four states as trained factors
STRUCTURES = {
    "banded": lambda **options: trained.Banded(4, [2, 0, -1], **options),
    "sparse": lambda **options: trained.Sparse(ARCS, **options),
    "low rank": lambda **options: trained.LowRank(4, 2, **options),
    "low rank and diagonal": lambda **options: trained.LowRank(4, 2, diagonal=True, **options),
    "block-diagonal": lambda **options: trained.BlockDiagonal(2, 2, **options),
    "kronecker": lambda **options: trained.Kronecker(2, 2, **options),
    "monarch": lambda **options: trained.Monarch(2, 2, **options),
    "oblong monarch": lambda **options: trained.Monarch(4, 1, 2, **options),
}


def structured_hmm(kind, initial="free", **options):
    transition = STRUCTURES[kind](generator=seeded(), **options)
    hmm = HMM(4, Categorical(4, 4, generator=seeded(1)), initial=initial, transition=transition, generator=seeded(1))
    return hmm.double()


def dense(structure):
    """Probabilities [*L, c, c] of trained factors."""
    return array(structure().to_dense(log_params=True).exp())


def structured(kind, **options):
    return Model(lambda: structured_hmm(kind, **options), bulk=lambda hmm, _: dense(hmm.transition).reshape(-1, 4, 4))


MODELS = {
    "categories": Model(),
    "counts of two features": Model(lambda: random_hmm(partial(Poisson, (2, C))), lambda: categories(5, V, 2)),
    "full covariances": Model(lambda: random_hmm(partial(Gaussian, C, 2, "full")), vectors),
    "network": Model(lambda: random_hmm(network()), vectors),
    "matrix per step": Model(lambda: random_hmm(num_steps=V)),
    "covariates per step": Model(driven_hmm, bulk=softmax_of, covariates=normal(5, V - 1, 2)),
    "covariates per sequence": Model(driven_hmm, bulk=softmax_of, covariates=normal(5, 1, 2)),
    "structure of covariates": Model(
        lambda: random_hmm(transition=Ring()), bulk=Ring.of_hmm, covariates=normal(5, V - 1, 2)
    ),
    "stationary start": Model(lambda: random_hmm(initial="stationary")),
    **{kind: structured(kind) for kind in STRUCTURES},
    "banded per step": structured("banded", lead=(V - 1,)),
    "monarch per step": structured("monarch", lead=(V - 1,)),
    "stationary start, banded": structured("banded", initial="stationary"),
    "stationary start, low rank": structured("low rank", initial="stationary", lead=(1,)),
}
