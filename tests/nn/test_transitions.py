"""Trained factors of structured transitions: rows sum to 1, zeros stay, EM takes expected counts."""

import numpy as np
import pytest
import torch

from logchain import nn, transitions
from logchain.nn import Transitions
from logchain.nn.priors import Dirichlet
from tests.nn.hmms import ARCS, F64, MODELS, STRUCTURES, array, close, dense, seeded, structured_hmm, trained

C = 4
KINDS = pytest.mark.parametrize("kind", STRUCTURES)
POSSIBLE = {
    "banded": [[1, 0, 1, 0], [1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]],
    "sparse": [[1, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 1]],
    "block-diagonal": [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]],
}


def make(kind, seed=0, **options):
    return trained(kind, seeded(seed), **options).double()


@KINDS
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_rows_sum_to_1_and_weights_are_set_drawn_and_differentiated(kind, lead):
    module = make(kind, lead=lead)
    matrices = dense(module)
    assert matrices.shape == (*(lead or (1,) * (kind == "dense")), C, C)
    close(torch.from_numpy(matrices.sum(-1)), np.ones(matrices.shape[:-1]), 1e-14)
    possible = np.array(POSSIBLE.get(kind, np.ones((C, C))), bool)
    assert ((matrices > 0) == possible).all()
    other = make(kind, seed=1, lead=lead)
    assert (np.abs(dense(other) - matrices)[..., possible] > 0).any()
    logs = module()
    logs = (logs,) if kind == "dense" else logs.parameters
    other.set(*(parameter.exp() for parameter in logs))
    close(torch.from_numpy(dense(other)), matrices, 1e-14)
    with pytest.raises(ValueError, match="^probabilities: expected sums of 1, got 1.01; "):
        other.set(*(1.01 * parameter.exp() for parameter in logs))
    for one in (module, other):
        one.reset_parameters(seeded(2))
    assert (dense(other) == dense(module)).all() and (dense(other) != matrices).any()
    weight = torch.randn(*lead, C, C, generator=seeded(), dtype=F64)

    def total(*_):
        logs = module() if kind == "dense" else module().to_dense(log_params=True)
        return (logs.exp() * weight).sum()

    assert torch.autograd.gradcheck(total, tuple(module.parameters()))
    assert module.half()().dtype == torch.float32


def expected_matrix(kind, bulk, counts, parameters):
    """The matrix of factors in proportion to expected counts (c, c) of transitions, from those of each state pair."""
    blocks = counts.reshape(2, 2, 2, 2)
    if kind == "kronecker":
        factors = [blocks.sum((1, 3)), blocks.sum((0, 2))]
        return np.kron(*(factor / factor.sum(-1, keepdims=True) for factor in factors))
    if kind == "monarch":  # a, b, b', a'
        left, right = blocks.sum(3), blocks.sum(1).swapaxes(0, 1)
        left, right = (factor / factor.sum(-1, keepdims=True) for factor in (left, right))
        return np.einsum("abm,map->abmp", left, right).reshape(C, C)
    if "rank" in kind:
        left, right = parameters
        stays = np.diag(left[:, 2]) if left.shape[1] > 2 else np.zeros((C, C))
        left = left[:, :2]
        stays = counts * stays / bulk
        each = (counts / bulk)[..., None] * left[:, None, :] * right[None, :, :]
        total = counts.sum(-1, keepdims=True)
        left, right = each.sum(1) / total, each.sum(0) / each.sum((0, 1))
        return left @ right.T + stays / total
    return counts / counts.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", [kind for kind in STRUCTURES if kind != "oblong monarch"])
def test_em_step_takes_the_expected_counts(kind):
    hmm, data = MODELS[kind].make(), MODELS[kind].data()
    bulk = dense(hmm.transition)
    parameters = [array(part().exp()) for part in hmm.transition.weights]
    counts = MODELS[kind].truth(hmm, data).transitions.sum((0, 1))
    hmm.fit(data, max_iterations=1, restarts=0, tolerance=-torch.inf)
    expected = expected_matrix(kind, bulk, counts, parameters)
    close(torch.from_numpy(dense(hmm.transition)), expected.reshape(bulk.shape))


def test_prior_keeps_zeros_of_the_graph_and_no_others():
    hmm = structured_hmm("sparse", prior=Dirichlet(1.5))
    hmm.fit(torch.zeros(1, 2, dtype=torch.int64), max_iterations=60, restarts=0)
    assert ((dense(hmm.transition) > 1e-3) == np.array(POSSIBLE["sparse"], bool)).all()


def test_em_step_of_arcs_keeps_states_without_counts():
    arcs = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    module = Transitions(transitions.Sparse(arcs, torch.tensor([0.8, 1.2, 0.3, 0.7], dtype=F64)))
    for step, shares in ((0.5, [0.575, 0.425, 0.3, 0.7]), (1.0, [0.75, 0.25, 0.3, 0.7])):
        nn.em_step(module, [lambda: 3 * module().values[0] + module().values[1]], step=step)
        close(module().values.exp(), shares)


@pytest.mark.parametrize("kind", ["dense", "banded", "sparse"])
def test_sticky_prior_is_in_counts_and_in_the_posterior_that_they_maximize(kind):
    module = trained(kind, seeded(), prior=Dirichlet(1.5), sticky=3.0).double()
    (part,), possible = module.weights, np.array(POSSIBLE.get(kind, np.ones((C, C))))
    counts = torch.rand(part.logits.shape, generator=seeded(1), dtype=F64)
    counts = counts if part.zeros is None else counts.masked_fill(part.zeros, 0.0)
    plain = {"dense": lambda: counts[0], "banded": lambda: transitions.Banded(counts, [2, 0, -1]).to_dense()}
    matrix = array(plain.get(kind, lambda: transitions.Sparse(ARCS, counts).to_dense())()) + 0.5 * possible
    matrix += 3.0 * np.eye(C) * possible
    before, expected = dense(module).reshape(C, C), matrix / matrix.sum(-1, keepdims=True)
    for step, wanted in ((0.5, (before + expected) / 2), (1.0, expected)):
        part.maximize(counts, step)
        close(torch.from_numpy(dense(module).reshape(C, C)), wanted)
    posterior = (counts * part().masked_fill(counts == 0, 0.0)).sum() + part.log_prior()
    (slope,) = torch.autograd.grad(posterior, part.logits)
    assert slope.abs().max() < 1e-12


def test_entries_of_0_stay_whatever_draws_and_trains():
    module = Transitions(torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 3.0]]), prior=Dirichlet(2.0))
    close(module().exp(), [[[1 / 3, 2 / 3, 0], [0, 0.5, 0.5], [0, 0, 1]]], 1e-7)
    optimizer = torch.optim.Adam(module.parameters(), weight_decay=0.1)
    for _ in range(2):
        module.reset_parameters(seeded())
        (module().exp() ** 2).sum().backward()
        optimizer.step()
        module.weights[0].maximize(torch.zeros(1, 3, 3))
        assert torch.equal(module()[0] > -torch.inf, torch.eye(3) + torch.eye(3).roll(1, 1).triu() > 0)
    assert module.weights[0].log_prior().isfinite()
    with pytest.raises(ValueError, match="^probabilities: expected 0 for weights that are fixed at 0"):
        module.set(torch.full((3, 3), 1 / 3))


def test_user_structure_is_trained_along_the_axes_that_are_passed():
    class Scaled(transitions.LowRank):
        """A structure whose type is not that of the table."""

    start = Scaled(torch.rand(3, 2, generator=seeded()), torch.rand(3, 2, generator=seeded(1)))
    with pytest.raises(
        ValueError, match="^dims: expected the axes along which parameters of Scaled sum to 1, got None"
    ):
        Transitions(start)
    rows = dense(Transitions(start, dims=(-1, -2))).sum(-1)
    close(torch.from_numpy(rows), np.ones(3), 1e-6)


@pytest.mark.parametrize("sparse", [ARCS, ARCS.flip(1)], ids=["sorted", "flipped"])
def test_arcs_follow_the_module_to_another_device(sparse):
    module = Transitions(transitions.Sparse(sparse, torch.rand(7, generator=seeded())))
    module.to("meta")
    assert module().indices.is_meta and all(buffer.is_meta for buffer in module.buffers())
