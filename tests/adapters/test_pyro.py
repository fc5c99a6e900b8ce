"""`adapters.from_pyro` gives that package's log-likelihoods, filters and gradients."""

import pytest
import torch

import logchain
from logchain import adapters
from tests.adapted import NATS, SHARE, answers, distance, gradients, normal, peer

F64 = torch.float64


def pyro_hmm(case):
    """A DiscreteHMM whose leaves ask for gradients, observations, and the leaves."""
    distributions = peer("pyro.distributions")
    v, c = 9, 3
    initial, transitions, location = {
        "one matrix": ((c,), (c, c), (c,)),
        "one step axis": ((c,), (1, c, c), (1, c)),
        "matrix of every step": ((c,), (v, c, c), (v, c)),
        "batch of starts": ((2, c), (c, c), (v, c)),
        "batch of transitions": ((c,), (2, 1, c, c), (c,)),
        "batch of emissions": ((2, c), (v, c, c), (2, v, c)),
        "vectors": ((c,), (v, c, c), (c, 4)),
    }[case]
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate((initial, transitions, location))]
    emission = distributions.Normal(leaves[2], 0.5)
    emission = emission.to_event(1) if case == "vectors" else emission
    hmm = distributions.DiscreteHMM(leaves[0], leaves[1], emission)
    return hmm, normal(*hmm.batch_shape, v, *emission.event_shape, seed=7), leaves


PYRO = [
    "one matrix",
    "one step axis",
    "matrix of every step",
    "batch of starts",
    "batch of transitions",
    "batch of emissions",
    "vectors",
]


@pytest.mark.parametrize("case", PYRO)
def test_pyro(case):
    hmm, value, leaves = pyro_hmm(case)
    arguments = adapters.from_pyro(hmm, value)
    ours, theirs = logchain.product(**arguments._asdict()), hmm.log_prob(value)
    assert ours.shape == theirs.shape
    assert distance(ours, theirs) <= NATS
    for mine, peers in gradients(leaves, ours, theirs):
        assert distance(mine, peers) <= NATS
    assert distance(answers(arguments)[1][..., -1, :], hmm.filter(value).probs.detach()) <= SHARE


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("one matrix", (1,)),
        ("one matrix", (5, 1)),
        ("one matrix", (5, 4)),
        ("batch of starts", (9,)),
        ("batch of transitions", (4, 1, 9)),
    ],
    ids=str,
)
def test_pyro_observations_of_other_shapes(case, shape):
    hmm, _, _ = pyro_hmm(case)
    value = normal(*shape, seed=7)
    ours, theirs = logchain.product(**adapters.from_pyro(hmm, value)._asdict()), hmm.log_prob(value)
    assert ours.shape == theirs.shape
    assert distance(ours, theirs) <= NATS


def test_pyro_unreachable_states():
    distributions = peer("pyro.distributions")
    initial = torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64, requires_grad=True)
    matrix = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]], dtype=F64)
    transitions, location = matrix.log().requires_grad_(), normal(3).requires_grad_()
    hmm = distributions.DiscreteHMM(initial, transitions, distributions.Normal(location, 1.0))
    value = normal(6, seed=1)
    arguments = adapters.from_pyro(hmm, value)
    assert arguments.p0[2] == -torch.inf
    out = logchain.product(**arguments._asdict())
    assert distance(out, hmm.log_prob(value)) <= NATS
    out.backward()
    assert location.grad[:2].ne(0).all() and location.grad[2] == 0
    assert initial.grad.eq(0).all()  # one start: nothing to choose
    assert transitions.grad.isfinite().all() and transitions.grad[matrix == 0].eq(0).all()
