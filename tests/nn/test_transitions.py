"""Trained factors of structured transitions: rows sum to 1, zeros stay, and models answer as with dense matrices."""

import copy

import numpy as np
import pytest
import scipy.special
import torch

from logchain import nn
from logchain import transitions as structures
from logchain.nn import transitions
from tests.nn.hmms import F64, LENGTHS, V, all_paths, array, categories, close, probabilities, seeded

C = 4
ARCS = torch.tensor([[0, 3, 0, 1, 2, 3, 3], [2, 3, 0, 2, 1, 0, 1]])
MAKERS = {
    "banded": lambda **options: transitions.Banded(C, [2, 0, -1], **options),
    "sparse": lambda **options: transitions.Sparse(ARCS, **options),
    "low rank": lambda **options: transitions.LowRank(C, 2, **options),
    "low rank and diagonal": lambda **options: transitions.LowRank(C, 2, diagonal=True, **options),
    "block-diagonal": lambda **options: transitions.BlockDiagonal(2, 2, **options),
    "kronecker": lambda **options: transitions.Kronecker(2, 2, **options),
    "monarch": lambda **options: transitions.Monarch(2, 2, **options),
    "oblong monarch": lambda **options: transitions.Monarch(4, 1, 2, **options),
}
KINDS = pytest.mark.parametrize("kind", MAKERS)
POSSIBLE = {
    "banded": [[1, 0, 1, 0], [1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]],
    "sparse": [[1, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 1]],
    "block-diagonal": [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]],
}


def made(kind, seed=0, **options):
    return MAKERS[kind](generator=seeded(seed), **options).double()


def dense(module):
    return array(module().to_dense(log_params=True).exp())


def hmm_of(kind, **options):
    module = made(kind, **options)
    return nn.HMM(C, "categorical", num_categories=4, transition=module, generator=seeded(1)).double()


def truth_of(hmm, data, bulk, lengths=None):
    x = array(hmm.emission.weights())[data.numpy()]
    return all_paths(x, bulk if bulk.ndim > 2 else bulk[None], probabilities(hmm.initial), lengths)


@KINDS
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_rows_sum_to_1_and_what_is_set_is_found(kind, lead):
    module = made(kind, lead=lead)
    matrices = dense(module)
    assert matrices.shape == (*lead, C, C) and module.num_states == C
    close(torch.from_numpy(matrices.sum(-1)), np.ones((*lead, C)), 1e-14)
    possible = np.array(POSSIBLE.get(kind, np.ones((C, C))), bool)
    assert ((matrices > 0) == possible).all()
    other = made(kind, seed=1, lead=lead)
    assert (np.abs(dense(other) - matrices)[..., possible] > 0).any()
    # weights that are set are normalised
    other.set(*(3 * parameter.exp() for parameter in module().parameters))
    close(other().to_dense(log_params=True).exp(), matrices, 1e-14)
    for one in (module, other):
        one.reset_parameters(seeded(2))
    assert (dense(other) == dense(module)).all() and (dense(other) != matrices).any()
    again = copy.deepcopy(made(kind, lead=lead))
    again.load_state_dict(other.state_dict())
    assert (dense(again) == dense(other)).all()
    assert module.half()().dtype == torch.float32


@KINDS
def test_gradients_are_those_of_the_softmax(kind):
    module = made(kind, lead=(2,))
    weight = torch.randn(2, C, C, generator=seeded(), dtype=F64)
    assert torch.autograd.gradcheck(
        lambda *_: (module().to_dense(log_params=True).exp() * weight).sum(), tuple(module.parameters())
    )


@KINDS
def test_answers_of_a_model_are_sums_over_paths(kind):
    hmm, data = hmm_of(kind), categories(5, V)
    bulk = dense(hmm.transition)
    truth = truth_of(hmm, data, bulk, LENGTHS)
    close(hmm.log_prob(data, lengths=LENGTHS), truth.log_norm)
    found = hmm.posterior(data, lengths=LENGTHS, transitions="sum")
    close(found.states, truth.states)
    inside = sum(length - 1 for length in LENGTHS)
    # a path uses each factor once a step, and of a low rank's either the diagonal or both factors
    used = [array(counts) for counts in found.transitions.parameters]
    assert sum(one.sum() for one in (used[:1] + used[2:] if "rank" in kind else used[:1])) == pytest.approx(inside)
    drawn = hmm.sample_posterior(data, 2000, generator=seeded())
    shares = torch.nn.functional.one_hot(drawn, C).double().mean(0)
    close(shares, truth_of(hmm, data, bulk).states, 0.06)
    if "rank" in kind:
        with pytest.raises(TypeError, match=r"bulk: expected a structure whose entries are products, got LowRank"):
            hmm.decode(data)
    else:
        twin = dense_twin(hmm)
        assert torch.equal(hmm.decode(data).states, twin.decode(data).states)
    states, values = hmm.sample(2000, 3, generator=seeded())
    p0 = probabilities(hmm.initial)
    close(torch.bincount(states[:, 2], minlength=C) / 2000, p0 @ bulk @ bulk, 0.05)
    assert values.shape == (2000, 3)


def dense_twin(hmm):
    """The model with dense matrices, and the same parts besides."""
    twin = copy.deepcopy(hmm)
    twin.transition = nn.LogWeights(1, C, C).double()
    twin.transition.set(torch.from_numpy(dense(hmm.transition)))
    return twin


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


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "oblong monarch"])
def test_a_step_of_expectation_maximisation_takes_the_expected_counts(kind):
    hmm, data = hmm_of(kind), categories(5, V)
    bulk = dense(hmm.transition)
    parameters = [array(parameter.exp()) for parameter in hmm.transition().parameters]
    counts = truth_of(hmm, data, bulk).transitions.sum((0, 1))
    hmm.fit(data, max_iterations=1, restarts=0)
    close(hmm.transition().to_dense(log_params=True).exp(), expected_matrix(kind, bulk, counts, parameters))


@pytest.mark.parametrize("kind", ["sparse", "low rank and diagonal", "monarch"])
@pytest.mark.parametrize("method", ["em", "gradient"])
def test_fits_rise_and_zeros_stay(kind, method):
    hmm, data = hmm_of(kind), categories(8, V)
    before = dense(hmm.transition)
    iterations = 4 if method == "em" else 1
    report = hmm.fit(
        data, method=method, max_iterations=iterations, tolerance=-torch.inf, restarts=2, generator=seeded()
    )
    assert (np.diff(report.history) > -1e-9).all()
    assert report.log_likelihood > report.history[0]
    matrix = dense(hmm.transition)
    assert np.abs(matrix - before).max() > 1e-3
    assert (matrix[before == 0] == 0).all()
    close(torch.from_numpy(matrix.sum(-1)), np.ones(C))


def test_a_prior_keeps_zeros_of_the_graph_and_no_others():
    hmm = hmm_of("sparse", prior_count=0.5)
    hmm.fit(torch.zeros(1, 2, dtype=torch.int64), max_iterations=60, restarts=0)
    assert ((dense(hmm.transition) > 1e-3) == np.array(POSSIBLE["sparse"], bool)).all()


def test_weights_of_arcs_move_a_part_of_the_way_and_stay_where_nothing_is_counted():
    module = transitions.Sparse(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])).double()
    module.set(torch.tensor([0.4, 0.6, 0.3, 0.7], dtype=F64))
    nn.em_step(module, [lambda: 3 * module().values[0] + module().values[1]], step=0.5)
    close(module().values.exp(), [0.575, 0.425, 0.3, 0.7])
    with pytest.raises(ValueError, match="probabilities: expected non-negative numbers with a .* positive sum"):
        module.set(torch.tensor([0.5, 0.5, 0.0, 0.0]))


@KINDS
def test_initialising_draws_the_weights_anew(kind):
    hmm = hmm_of(kind)
    first, second = (
        hmm.initialise(categories(5, V), generator=seeded(seed)) or dense(hmm.transition) for seed in (1, 2)
    )
    assert (first != second).any()


@pytest.mark.parametrize("kind", ["banded", "monarch"])
def test_a_matrix_for_each_step(kind):
    hmm, data = hmm_of(kind, lead=(V - 1,)), categories(5, V)
    truth = truth_of(hmm, data, dense(hmm.transition))
    close(hmm.log_prob(data), truth.log_norm)
    with pytest.raises(ValueError, match=r"transition: expected shape \[5, 2, 4, 4\]"):
        hmm.log_prob(data[:, :3])


@pytest.mark.parametrize("kind", ["banded", "low rank"])
@pytest.mark.parametrize("lead", [(), (1,)])
def test_a_stationary_start(kind, lead):
    module = made(kind, lead=lead)
    hmm = nn.HMM(C, "categorical", num_categories=4, initial="stationary", transition=module).double()
    bulk = dense(module).reshape(1, C, C)
    p0 = np.linalg.matrix_power(bulk[0], 1000)[0]
    data = categories(5, V)
    close(hmm.log_prob(data), all_paths(array(hmm.emission.weights())[data.numpy()], bulk, p0).log_norm)
    assert torch.autograd.gradcheck(lambda *_: hmm.log_prob(data[:2]), tuple(hmm.parameters()))
    states = hmm.sample(2000, 2, generator=seeded()).states
    close(torch.bincount(states[:, 1], minlength=C) / 2000, p0, 0.05)
    hmm.transition = made(kind, lead=(V - 1,))
    with pytest.raises(ValueError, match="initial: expected 'free' with 3 transition matrices, got 'stationary'"):
        hmm.log_prob(data)


class Driven(torch.nn.Module):
    """A ring of states, which are left with probabilities that depend on covariates [*B, v-1]."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(C, dtype=F64, generator=seeded()))

    def forward(self, covariates):
        stay = torch.sigmoid(covariates[..., None] * self.slope)  # (*B, v-1, c)
        leave = (1 - stay).roll(1, -1)
        return structures.Banded(torch.stack([stay, leave, leave], -2).log(), [0, 1, 1 - C])


def test_a_module_may_return_any_structure():
    hmm = nn.HMM(C, "categorical", num_categories=4, transition=Driven(), generator=seeded(1)).double()
    data, covariates = categories(5, V), torch.randn(5, V - 1, dtype=F64, generator=seeded())
    stay = scipy.special.expit(covariates.numpy()[..., None] * array(hmm.transition.slope))
    bulk = np.zeros((5, V - 1, C, C))
    for state in range(C):
        bulk[..., state, state] = stay[..., state]
        bulk[..., state, (state + 1) % C] = 1 - stay[..., state]
    close(hmm.log_prob(data, covariates=covariates), truth_of(hmm, data, bulk).log_norm)
    drawn = hmm.sample(3, V, covariates=covariates)
    assert drawn.states.shape == (3, 5, V)
    before = hmm.transition.slope.detach().clone()
    report = hmm.fit(data, covariates=covariates, method="gradient", max_iterations=2, restarts=0)
    assert report.log_likelihood > report.history[0] and (hmm.transition.slope != before).all()
    with pytest.raises(ValueError, match="method: expected 'gradient' .* got 'em' with transition.slope"):
        hmm.fit(data, covariates=covariates)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: transitions.Banded(3, [1]),
            ValueError,
            "offsets: expected to lead out of every state, got none out of 2",
        ),
        (lambda: transitions.Banded(3, [3]), ValueError, "offsets: expected different integers from -2 to 2"),
        (lambda: transitions.Banded(3.0, [0]), TypeError, "num_states: expected a positive integer"),
        (
            lambda: transitions.Sparse(ARCS, 5),
            ValueError,
            "indices: expected to lead out of every state, got none out of 4",
        ),
        (lambda: transitions.Sparse(ARCS, 3), ValueError, "indices: expected values from 0 to c - 1 = 2"),
        (lambda: transitions.Sparse([[0], [0]]), TypeError, "indices: expected a torch.Tensor, got list"),
        (lambda: transitions.Sparse(ARCS[:, [0, 1, 1]]), ValueError, "indices: expected each pair of states once"),
        (lambda: transitions.LowRank(3, 0), ValueError, "rank: expected a positive integer"),
        (lambda: transitions.LowRank(3, 1, diagonal=2), TypeError, "diagonal: expected"),
        (lambda: transitions.BlockDiagonal(2, 0), ValueError, "block_size: expected a positive integer"),
        (lambda: transitions.Kronecker(2), ValueError, "sizes: expected two or more, got 1"),
        (lambda: transitions.Monarch(2, 2, 3), ValueError, "middle: expected a divisor of 4 states, got 3"),
        (lambda: transitions.Monarch(2, 2, lead=(0,)), ValueError, "lead: expected a positive integer"),
        (lambda: made("sparse", prior_count=-1), ValueError, "prior_count: expected a number from 0 on"),
        (
            lambda: made("low rank").set(torch.ones(4, 2), torch.ones(4, 2), torch.ones(4)),
            ValueError,
            "diagonal: expected None",
        ),
        (lambda: made("kronecker").set(torch.ones(2, 2)), ValueError, "matrices: expected 2, got 1"),
        (lambda: made("banded").set(torch.zeros(3, 4)), ValueError, "probabilities: expected non-negative numbers"),
        (
            lambda: hmm_of("banded").log_prob(categories(2, V), covariates=torch.zeros(1)),
            ValueError,
            "covariates: expected None",
        ),
        (
            lambda: nn.HMM(3, "poisson", transition=made("banded")).log_prob(torch.zeros(2, V)),
            ValueError,
            r"transition: expected shape \[2, 3, 3, 3\]",
        ),
    ],
)
def test_wrong_arguments_say_what_is_wrong(make, error, message):
    with pytest.raises(error, match=message):
        make()
