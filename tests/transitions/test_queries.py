"""Every query of a chain of structures has the result of their dense matrices."""

import itertools
import re

import pytest
import torch
from torch import Tensor

import logchain
from logchain import semirings, transitions
from logchain.autograd import topk
from logchain.chain import Chain
from tests import families
from tests.expected import assert_drawn
from tests.subjects import OTHERS, SUBJECTS, floating
from tests.transitions.structures import MAKE, WITH_PATHS, C, numbers

F64 = torch.float64
V, BATCH = 6, (2, 3)
KINDS = pytest.mark.parametrize("kind", MAKE)
LENGTHS = torch.tensor([[6, 3, 1], [2, 6, 5]])
SOFT = semirings.Semiring("soft maximum", lambda terms, dim: torch.logsumexp(4 * terms, dim) / 4)


class Problem:
    """Operands x [*B, v, c] with an impossible state, a structure and p0, and the same with the dense matrices."""

    def __init__(self, kind, lead=(), *, log=False, batch=BATCH, v=V, lengths=None):
        rand = numbers(3)
        structure, self.p0 = MAKE[kind](rand, *lead), rand(C)
        generator = torch.Generator().manual_seed(4)
        self.x = torch.randn(*batch, v, C, generator=generator, dtype=F64)
        if batch == BATCH:
            self.x[0, 0, 2, 5] = -torch.inf
        if lengths is not None:  # padding has no influence
            self.x[torch.arange(v) >= lengths[..., None]] = torch.nan
        if log:
            structure, self.p0 = structure.map(torch.log), self.p0.log()
        self.structure = structure.map(Tensor.requires_grad_)
        self.x.requires_grad_(), self.p0.requires_grad_()
        self.operands, self.leaves = (self.x, self.structure, self.p0), [self.x, self.p0, *self.structure.parameters]
        self.dense = self.structure.to_dense(log_params=log)
        self.dense = self.dense if lead else self.dense[None]
        self.options = {"log_params": log}

    def zero(self, leaf):
        return -torch.inf if leaf is self.x or self.options["log_params"] else 0.0

    def both(self, query, *args, **options):
        options = {**self.options, **options}
        return [query(self.x, bulk, self.p0, *args, **options) for bulk in (self.structure, self.dense)]


def assert_close(found, expected, rtol=1e-10, atol=1e-11):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def assert_same_gradients(problem, found, expected):
    """Of a number that depends on all outputs, and on their squares."""
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    pairs = []
    for outputs in (found, expected):
        value = sum((t.sin() * (1 + i)).sum() for i, t in enumerate(floating(outputs)))
        pairs.append(torch.autograd.grad(value, problem.leaves, **options))
    for one, other, leaf in zip(*pairs, problem.leaves, strict=True):
        # what is impossible has gradient 0, by definition, also where entries of the matrix are sums
        assert_close(one, other.masked_fill(leaf == problem.zero(leaf), 0.0))


CHOICES = list(itertools.product([(), (V - 1,), (2, 1, 1), (3, V - 1)], [(False, None), (True, LENGTHS)]))
QUERIES = ["product", "packed", *(name for name in OTHERS if name not in ("counts", "divergence", "total"))]
PATHS = ("viterbi", "topk_paths")


def cells():
    """Each structure meets each query by two choices of leading axes, logarithms and lengths."""
    for (i, kind), (j, query) in itertools.product(enumerate(MAKE), enumerate(QUERIES)):
        if query in PATHS and kind not in WITH_PATHS:
            continue
        for k in (0, 3):
            lead, (log, lengths) = CHOICES[(i + j + k) % len(CHOICES)]
            yield pytest.param(kind, query, lead, log, lengths, id=f"{kind}-{query}-{list(lead)}-{log}")


def assert_has_results_of_matrices(problem, query, lengths):
    found, expected = (
        {name: t for name, t in outputs.items() if name != "transitions"}
        for outputs in problem.both(SUBJECTS[query], lengths=lengths)
    )
    expected = {name: expected[name] for name in found}
    assert_close(found, expected)
    if floating(found):
        assert_same_gradients(problem, found, expected)


@pytest.mark.parametrize(("kind", "query", "lead", "log", "lengths"), list(cells()))
def test_structure_has_results_and_gradients_of_its_matrices(kind, query, lead, log, lengths):
    problem = Problem(kind, lead, log=log, lengths=lengths)
    assert_has_results_of_matrices(problem, query, lengths)


@pytest.mark.parametrize(("log", "lengths"), [(False, None), (True, LENGTHS)], ids=["weights", "logarithms"])
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("kind", ["banded", "sparse"])
def test_structure_of_many_entries_has_results_and_gradients_of_its_matrices(kind, query, log, lengths, monkeypatch):
    problem = Problem(kind, (2, 1, 1), log=log, v=60)
    monkeypatch.setattr("logchain.operands._STATES", C)
    assert Chain.of(*problem.operands, log, lengths).operands.cheapest().is_dense
    assert_has_results_of_matrices(problem, query, lengths)


def test_structure_of_few_entries_is_not_computed_as_a_matrix():
    structure = transitions.Banded(torch.rand(2, 200), [0, 1])
    batch = Chain.of(torch.randn(1000, 200), structure, torch.rand(200), False).operands
    assert batch.cheapest() is batch


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=str)
@pytest.mark.parametrize("kind", WITH_PATHS)
def test_search_of_ranked_paths_has_results_of_matrices(kind, lengths, monkeypatch):
    monkeypatch.setattr(topk, "_ENTRIES", 0)
    assert_has_results_of_matrices(Problem(kind, (3, V - 1), lengths=lengths), "topk_paths", lengths)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=str)
@KINDS
def test_any_semiring_adds_the_paths_of_its_matrices(kind, lengths):
    problem = Problem(kind, (3, V - 1), lengths=lengths)
    found, expected = problem.both(semirings.total, SOFT, lengths=lengths)
    assert_close(found, expected)
    assert_same_gradients(problem, {"total": found}, {"total": expected})
    if not problem.structure.sums:
        best = logchain.viterbi(*problem.operands, lengths=lengths).score
        assert torch.equal(semirings.total(*problem.operands, semirings.MAX, lengths=lengths), best)


SMALL = [{"v": 1, "batch": ()}, {"lead": (V - 1,), "batch": (0,)}, {"v": 1, "batch": (2, 0)}]


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@KINDS
def test_few_variables_or_sequences_have_results_of_matrices(kind, sizes):
    problem = Problem(kind, **sizes)
    for query in QUERIES:
        if (query in PATHS and problem.structure.sums) or (query == "packed" and not problem.x.numel()):
            continue
        found, expected = problem.both(SUBJECTS[query])
        found.pop("transitions", None)
        assert_close(found, {name: expected[name] for name in found})
        values = [t.sum() for t in floating(found) if t.requires_grad]
        options = {"allow_unused": True, "materialize_grads": True}
        for gradient in torch.autograd.grad(sum(values), problem.leaves[2:], **options) if values else ():
            assert not gradient.any()
    assert logchain.sample(*problem.operands, 3).shape == (3, *problem.x.shape[:-1])


@pytest.mark.parametrize("query", ["product", "stream"])
@KINDS
def test_second_derivatives_are_those_of_matrices(kind, query):
    problem = Problem(kind)
    possible = [leaf != problem.zero(leaf) for leaf in problem.leaves]
    tangents = [numbers(6)(*leaf.shape) * mask for leaf, mask in zip(problem.leaves, possible, strict=True)]
    seconds = []
    for outputs in problem.both(SUBJECTS[query]):
        value = sum(t.sum() for t in floating(outputs))
        first = torch.autograd.grad(value, problem.leaves, create_graph=True)
        seconds.append(torch.autograd.grad(first, problem.leaves, tangents, retain_graph=True))
    for one, other, mask in zip(*seconds, possible, strict=True):
        assert_close(one, other * mask, rtol=1e-8, atol=1e-9)


@KINDS
@pytest.mark.parametrize("lead", [(), (3, V - 1)], ids=str)
def test_transitions_of_marginals_count_uses_of_parameters(kind, lead):
    problem = Problem(kind, lead)
    counts = logchain.marginals(*problem.operands, transitions="sum", lengths=LENGTHS)
    log_norm = logchain.product(problem.x, problem.dense, problem.p0, lengths=LENGTHS)
    parameters = problem.structure.parameters
    gradients = torch.autograd.grad(log_norm.sum(), parameters, retain_graph=True)
    for count, gradient, parameter in zip(counts.transitions.parameters, gradients, parameters, strict=True):
        assert_close(count, gradient * parameter)
    full, total = (logchain.marginals(*problem.operands, transitions=how).transitions for how in ("full", "sum"))
    assert full.lead == (*BATCH, V - 1)
    alone = logchain.marginals(problem.x[1], problem.structure, problem.p0, transitions="full").transitions
    with torch.no_grad():
        plain = logchain.marginals(*problem.operands, transitions="full").transitions
    for each, summed, one, same in zip(*(c.parameters for c in (full, total, alone, plain)), strict=True):
        assert_close(each.sum_to_size(summed.shape), summed)
        assert_close(each[1], one)
        assert_close(same, each)


@pytest.mark.parametrize("kind", sorted({*MAKE} - {*WITH_PATHS}))
def test_sums_of_products_have_no_best_path(kind):
    problem = Problem(kind)
    name = type(problem.structure).__name__
    for query, args in ((logchain.viterbi, ()), (logchain.topk_paths, (2,))):
        with pytest.raises(TypeError, match=f"bulk: expected a structure .* got {name}.* {name}.to_dense"):
            query(*problem.operands, *args)


@KINDS
@pytest.mark.parametrize("lead", [(), (3, V - 1)], ids=str)
def test_draws_have_the_probabilities_of_paths(kind, lead):
    problem = Problem(kind, lead)
    lengths, generator = torch.tensor([[2, 2, 1], [2, 2, 2]]), torch.Generator().manual_seed(0)
    paths = logchain.sample(*problem.operands, 10_000, lengths=lengths, generator=generator)
    assert_drawn(families.Chain(problem.x, problem.dense, problem.p0), paths, lengths)
    pairs = torch.cartesian_prod(torch.arange(C), torch.arange(C)).view(-1, 1, 1, 2)
    every = torch.nn.functional.pad(pairs.expand(-1, *BATCH, -1), (0, V - 2))
    with torch.no_grad():
        found, expected = problem.both(logchain.log_prob, every, lengths=lengths)
    assert_close(found, expected)


@KINDS
def test_draws_of_packed_sequences_are_possible(kind):
    structure, x, p0 = MAKE[kind](numbers(3)), numbers(4)(12, C).log(), numbers(5)(4, C)
    options = {"cu_seqlens": torch.tensor([0, 3, 9, 10, 12])}
    paths = logchain.sample(x, structure, p0, 3, generator=torch.Generator().manual_seed(0), **options)
    log_norm = logchain.product(x, structure, p0, **options)
    weights = logchain.log_prob(x, structure, p0, paths, **options)
    assert_close(weights, logchain.log_prob(x, structure.to_dense()[None], p0, paths, **options))
    assert (weights.isfinite() == log_norm.isfinite()).all() and log_norm.isfinite().any()


@KINDS
@pytest.mark.parametrize("offset", [-(2.0**60), 2.0**20, 2.0**100])
def test_offset_of_all_potentials_does_not_drown_weights(kind, offset):
    problem = Problem(kind)
    with torch.no_grad():
        x = torch.zeros_like(problem.x).masked_fill(problem.x == -torch.inf, -torch.inf)
        p0 = problem.p0.index_fill(0, torch.tensor(0), 0.0)
        operands = [(one, problem.structure, p0) for one in (x, x + offset)]
        values = [logchain.entropy(*each) for each in operands]
        assert_close(values[1], values[0], rtol=1e-12)
        operands[1][0][..., 0, 0] = 2 * abs(offset)  # where no path begins
        if not problem.structure.sums:
            assert torch.equal(*(logchain.viterbi(*each).states for each in operands))
        draws = [logchain.sample(*each, 5, generator=torch.Generator().manual_seed(0)) for each in operands]
        assert torch.equal(*draws)


def test_wrong_operands_are_named():
    structure = transitions.Banded(torch.ones(2, C), [0, 1])
    x, p0 = torch.zeros(2, V, C), torch.ones(C)
    three = transitions.Banded(torch.ones(3, 1, 2, C), [0, 1])
    packed = {"cu_seqlens": torch.tensor([0, V]), "lengths": 1}
    one_scan = "'auto' or 'sequential' with a structure as bulk"
    cases = [
        ("bulk: expected 11 states to go with x [2, 6, 11], got 12", (x[..., :11], structure, p0[:11]), {}),
        ("bulk: expected shape [1 or 2, 5 or 1, 2, 12] to go with x [2, 6, 12], got [3, 1, 2, 12]", (x, three, p0), {}),
        ("p0: expected shape [12] to go with x [2, 6, 12], got [11]", (x, structure, p0[:11]), {}),
        ("memory_budget: expected None with a structure as bulk, got 5", (x, structure, p0), {"memory_budget": 5}),
        (f"strategy: expected {one_scan}, got 'tree'", (x, structure, p0), {"strategy": "tree"}),
        ("lengths: expected values from 1 to v = 6, got 0 to 7", (x, structure, p0), {"lengths": [0, 7]}),
        ("log_params: expected True or False, got 1", (x, structure, p0), {"log_params": 1}),
        ("lengths: expected None with cu_seqlens, which holds them", (x[0], structure, p0), packed),
    ]
    for message, operands, options in cases:
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
            logchain.product(*operands, **options)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_transforms_are_refused(transform):
    problem = Problem("banded")
    with pytest.raises(NotImplementedError, match=r"bulk: expected a tensor inside transforms of torch\.func"):
        transform(lambda x: logchain.product(x, problem.structure, problem.p0).sum())(problem.x)


@KINDS
def test_plan_of_structures_counts_their_multiply_adds(kind):
    problem = Problem(kind)
    planned = logchain.plan(*problem.operands)
    assert f"{problem.structure.multiply_adds} multiply-adds per step in place of {C**2}" in str(planned)
    assert logchain.plan(problem.x.shape, problem.structure, problem.p0.shape, dtype=problem.x.dtype) == planned


def test_a_nan_after_which_no_step_follows_is_in_no_gradient_of_matrices():
    left, right = (numbers(4)(C, 2).requires_grad_() for _ in range(2))
    x = torch.zeros(2, 4, C, dtype=F64)
    x[1, 0, 0] = torch.nan
    structure = transitions.LowRank(left, right)
    value = logchain.semirings.total(x, structure, torch.ones(C, dtype=F64), SOFT, lengths=[4, 1])
    gradients = torch.autograd.grad(value[0] + torch.where(value[1].isnan(), 0.0, value[1]), [left, right])
    assert value[1].isnan() and all(one.isfinite().all() for one in gradients)
