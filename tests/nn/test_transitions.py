"""Trained factors of structured transitions: rows sum to 1, zeros stay, EM takes expected counts."""

import numpy as np
import pytest
import torch

from logchain import nn
from logchain.nn import transitions
from tests.nn.hmms import F64, MODELS, STRUCTURES, array, close, dense, seeded, structured_hmm

C = 4
KINDS = pytest.mark.parametrize("kind", STRUCTURES)
POSSIBLE = {
    "banded": [[1, 0, 1, 0], [1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]],
    "sparse": [[1, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 1]],
    "block-diagonal": [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]],
}


def make(kind, seed=0, **options):
    return STRUCTURES[kind](generator=seeded(seed), **options).double()


@KINDS
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_rows_sum_to_1_and_weights_are_set_drawn_and_differentiated(kind, lead):
    module = make(kind, lead=lead)
    matrices = dense(module)
    assert matrices.shape == (*lead, C, C) and module.num_states == C
    close(torch.from_numpy(matrices.sum(-1)), np.ones((*lead, C)), 1e-14)
    possible = np.array(POSSIBLE.get(kind, np.ones((C, C))), bool)
    assert ((matrices > 0) == possible).all()
    other = make(kind, seed=1, lead=lead)
    assert (np.abs(dense(other) - matrices)[..., possible] > 0).any()
    # weights that are set are normalized
    other.set(*(3 * parameter.exp() for parameter in module().parameters))
    close(other().to_dense(log_params=True).exp(), matrices, 1e-14)
    for one in (module, other):
        one.reset_parameters(seeded(2))
    assert (dense(other) == dense(module)).all() and (dense(other) != matrices).any()
    weight = torch.randn(*lead, C, C, generator=seeded(), dtype=F64)
    parameters = tuple(module.parameters())
    assert torch.autograd.gradcheck(lambda *_: (module().to_dense(log_params=True).exp() * weight).sum(), parameters)
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
        left, right, *diagonal = parameters
        stays = np.diag(diagonal[0]) if diagonal else np.zeros((C, C))
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
    parameters = [array(parameter.exp()) for parameter in hmm.transition().parameters]
    counts = MODELS[kind].truth(hmm, data).transitions.sum((0, 1))
    hmm.fit(data, max_iterations=1, restarts=0, tolerance=-torch.inf)
    close(hmm.transition().to_dense(log_params=True).exp(), expected_matrix(kind, bulk, counts, parameters))


def test_prior_keeps_zeros_of_the_graph_and_no_others():
    hmm = structured_hmm("sparse", prior_count=0.5)
    hmm.fit(torch.zeros(1, 2, dtype=torch.int64), max_iterations=60, restarts=0)
    assert ((dense(hmm.transition) > 1e-3) == np.array(POSSIBLE["sparse"], bool)).all()


def test_em_step_of_arcs_keeps_states_without_counts():
    module = transitions.Sparse(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])).double()
    module.set(torch.tensor([0.4, 0.6, 0.3, 0.7], dtype=F64))
    for step, shares in ((0.5, [0.575, 0.425, 0.3, 0.7]), (1.0, [0.75, 0.25, 0.3, 0.7])):
        nn.em_step(module, [lambda: 3 * module().values[0] + module().values[1]], step=step)
        close(module().values.exp(), shares)
