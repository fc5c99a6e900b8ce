"""A table of hidden Markov models, data for them, and their potentials by scipy; the oracle sums over all paths."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.special
import torch
from torch import ones

from logchain import transitions as structures
from logchain.nn import HMM, Categorical, Durations, Gaussian, Poisson, Transitions
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
    """A model of four categories, unless an emission is passed."""
    emission = Categorical(C, 4, generator=seeded(seed + 100)) if emission is None else emission
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
        stay = array(hmm.transition.stay(covariates[:, 1:]))[..., None]
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
    into = covariates[:, 1:] if covariates.shape[1] > 1 else covariates  # the first row drives no transition
    return scipy.special.softmax(array(hmm.transition(into)), -1)


def semi_markov(family="free", num_states=C, longest=4, seed=0, **options):
    """A model whose states last up to `longest` steps."""
    transition = Durations(num_states, longest, family, generator=seeded(seed), **options)
    emission = Categorical(num_states, 4, generator=seeded(seed + 2))
    return HMM(num_states, emission, transition=transition, generator=seeded(seed + 1)).double()


ARCS = torch.tensor([[0, 3, 0, 1, 2, 3, 3], [2, 3, 0, 2, 1, 0, 1]])
# the entries of four states that may be positive, by structure
STRUCTURES = {
    "dense": lambda: torch.eye(4) + 1,
    "banded": lambda: structures.Banded(ones(3, 4), [2, 0, -1]),
    "sparse": lambda: structures.Sparse(ARCS, ones(7)),
    "low rank": lambda: structures.LowRank(ones(4, 2), ones(4, 2)),
    "low rank and diagonal": lambda: structures.LowRank(ones(4, 2), ones(4, 2), ones(4)),
    "block-diagonal": lambda: structures.BlockDiagonal(ones(2, 2, 2)),
    "kronecker": lambda: structures.Kronecker(ones(2, 2), ones(2, 2)),
    "monarch": lambda: structures.Monarch(ones(2, 2, 2), ones(2, 2, 2)),
    "oblong monarch": lambda: structures.Monarch(ones(4, 1, 2), ones(2, 4, 2)),
}


def trained(kind, generator, **options):
    """`Transitions` of a structure, drawn."""
    module = Transitions(STRUCTURES[kind](), **options)
    module.reset_parameters(generator)
    return module


def structured_hmm(kind, initial="free", **options):
    transition = trained(kind, seeded(), **options)
    emission = Categorical(4, 4, generator=seeded(2))
    hmm = HMM(4, emission, initial=initial, transition=transition, generator=seeded(1))
    return hmm.double()


def dense(structure):
    """Probabilities [*L, c, c] of trained factors."""
    found = structure()
    return array((found if isinstance(found, torch.Tensor) else found.to_dense(log_params=True)).exp())


def structured(kind, **options):
    return Model(lambda: structured_hmm(kind, **options), bulk=lambda hmm, _: dense(hmm.transition).reshape(-1, 4, 4))


MODELS = {
    "categories": Model(),
    "counts of two features": Model(
        lambda: random_hmm(Poisson((2, C), generator=seeded())), lambda: categories(5, V, 2)
    ),
    "full covariances": Model(lambda: random_hmm(Gaussian(C, 2, "full")), vectors),
    "network": Model(lambda: random_hmm(network()), vectors),
    "matrix per step": Model(lambda: random_hmm(transition=Transitions(C, lead=(V - 1,), generator=seeded(3)))),
    "covariates per step": Model(driven_hmm, bulk=softmax_of, covariates=normal(5, V, 2)),
    "covariates per sequence": Model(driven_hmm, bulk=softmax_of, covariates=normal(5, 1, 2)),
    "structure of covariates": Model(
        lambda: random_hmm(transition=Ring()), bulk=Ring.of_hmm, covariates=normal(5, V, 2)
    ),
    "stationary start": Model(lambda: random_hmm(initial="stationary")),
    **{kind: structured(kind) for kind in STRUCTURES},
    "banded per step": structured("banded", lead=(V - 1,)),
    "monarch per step": structured("monarch", lead=(V - 1,)),
    "stationary start, banded": structured("banded", initial="stationary"),
    "stationary start, low rank": structured("low rank", initial="stationary", lead=(1,)),
}
