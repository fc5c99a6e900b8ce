"""Every question, answered for a structure, has the answer for its dense matrices."""

import re
from types import SimpleNamespace

import pytest
import torch

import logchain
from logchain import reference, transitions
from logchain.transitions import Transition
from tests.transitions.structures import MAKE, C, numbers
from tests.transitions.test_structures import Shift

V, BATCH = 6, (2, 3)
KINDS = pytest.mark.parametrize("kind", [*MAKE, "own"])
LEADS = pytest.mark.parametrize("lead", [(), (V - 1,), (2, 1, 1), (3, V - 1)], ids=str)
TWO = pytest.mark.parametrize("lead", [(), (3, V - 1)], ids=str)
LENGTHS = [[6, 3, 1], [2, 6, 5]]


def shift(rand, *lead):
    return Shift(rand(*lead, C))


class Shared(Transition):
    """A matrix that several ranks may hold, all of which is on this one."""

    own = (2,)
    exchange = SimpleNamespace(stacked=lambda part: part[None])
    ranks = SimpleNamespace(agree=lambda options, check: check(), exchange=exchange)

    def __init__(self, matrix):
        super().__init__(matrix)
        self.states = matrix.shape[-1]

    def apply(self, message, arithmetic):
        return arithmetic.matmul(message, *self.parameters)


class Problem:
    """Operands x [2, 3, v, c] with impossible states, a structure and p0, and the same with the dense matrices."""

    def __init__(self, kind, lead=(), *, log=False, dtype=torch.float64, spread=1.0):
        rand = numbers(3, dtype)
        structure = {**MAKE, "own": shift}[kind](rand, *lead)
        generator = torch.Generator().manual_seed(4)
        self.x = (torch.randn(*BATCH, V, C, generator=generator, dtype=torch.float64) * spread).to(dtype)
        self.x[0, 0, 2, 5] = -torch.inf
        self.p0 = rand(C)
        if log:
            structure, self.p0 = structure.map(torch.log), self.p0.log()
        self.structure = structure.map(torch.Tensor.requires_grad_)
        self.x.requires_grad_(), self.p0.requires_grad_()
        self.leaves = [self.x, self.p0, *self.structure.parameters]
        self.dense = self.structure.to_dense(log_params=log)
        self.dense = self.dense if lead else self.dense[None]
        self.options = {"log_params": log}

    def zero(self, leaf):
        return -torch.inf if leaf is self.x or self.options["log_params"] else 0.0

    def both(self, question, *args, **options):
        options = {**self.options, **options}
        return [question(self.x, bulk, self.p0, *args, **options) for bulk in (self.structure, self.dense)]


def same(ours, dense, rtol=1e-10, atol=1e-11):
    torch.testing.assert_close(ours, dense, rtol=rtol, atol=atol)


def same_gradients(problem, ours, dense):
    generator = torch.Generator().manual_seed(5)
    weight = torch.rand(ours.shape, generator=generator, dtype=torch.float64)
    pairs = [torch.where(value.isfinite(), value, 0.0).mul(weight).sum() for value in (ours, dense)]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    got, expected = (torch.autograd.grad(value, problem.leaves, **options) for value in pairs)
    for one, other, leaf in zip(got, expected, problem.leaves, strict=True):
        # what is impossible has gradient 0, by definition, also where entries of the matrix are sums
        same(one, other.masked_fill(leaf == problem.zero(leaf), 0.0))


@KINDS
@LEADS
@pytest.mark.parametrize(("log", "lengths"), [(False, None), (True, LENGTHS)])
def test_product_and_its_gradients(kind, lead, log, lengths):
    problem = Problem(kind, lead, log=log)
    lengths = lengths and torch.tensor(lengths)
    ours, dense = problem.both(logchain.product, lengths=lengths)
    same(ours, dense)
    same_gradients(problem, ours, dense)
    with torch.no_grad():
        assert torch.equal(problem.both(logchain.product, lengths=lengths)[0], ours)


@KINDS
@pytest.mark.parametrize("v", [2, V])
def test_a_gradient_does_not_depend_on_which_others_are_needed(kind, v):
    problem = Problem(kind)
    operands = [problem.x[..., :v, :], problem.p0, *problem.structure.parameters]

    def value(x, p0, *parameters):
        return logchain.product(x, problem.structure.with_parameters(*parameters), p0).sum()

    together = torch.autograd.grad(value(*operands), operands)
    for place, expected in enumerate(together):
        alone = [one.detach() for one in operands]
        alone[place].requires_grad_()
        same(torch.autograd.grad(value(*alone), alone[place])[0], expected, rtol=1e-12, atol=1e-14)


@KINDS
def test_second_derivatives(kind):
    problem = Problem(kind)
    possible = [leaf != problem.zero(leaf) for leaf in problem.leaves]
    tangents = [numbers(6)(*leaf.shape) * mask for leaf, mask in zip(problem.leaves, possible, strict=True)]
    seconds = []
    for value in problem.both(logchain.product):
        first = torch.autograd.grad(value.sum(), problem.leaves, create_graph=True)
        seconds.append(torch.autograd.grad(first, problem.leaves, tangents, retain_graph=True))
    for one, other, mask in zip(*seconds, possible, strict=True):
        same(one, other * mask, rtol=1e-8, atol=1e-9)


@KINDS
@TWO
def test_marginals_count_the_uses_of_parameters(kind, lead):
    problem = Problem(kind, lead)
    ours, dense = problem.both(logchain.marginals, transitions="sum", lengths=torch.tensor(LENGTHS))
    same(ours.states, dense.states), same(ours.log_norm, dense.log_norm)
    log_norm = logchain.product(problem.x, problem.dense, problem.p0, lengths=torch.tensor(LENGTHS))
    gradients = torch.autograd.grad(log_norm.sum(), problem.structure.parameters, retain_graph=True)
    for counts, gradient, parameter in zip(
        ours.transitions.parameters, gradients, problem.structure.parameters, strict=True
    ):
        same(counts, gradient * parameter)
    same_gradients(problem, ours.states, dense.states)
    full = problem.both(logchain.marginals, transitions="full")[0].transitions
    assert full.lead == (*BATCH, V - 1)
    total = problem.both(logchain.marginals, transitions="sum")[0].transitions
    for each, summed in zip(full.parameters, total.parameters, strict=True):
        same(each.sum_to_size(summed.shape), summed)
    alone = logchain.marginals(problem.x[1], problem.structure, problem.p0, transitions="full").transitions
    for each, one in zip(full.parameters, alone.parameters, strict=True):
        if lead != (2, 1, 1):
            same(each[1], one)


@KINDS
@TWO
def test_messages(kind, lead):
    problem = Problem(kind, lead)
    ours, dense = problem.both(logchain.forward_backward, lengths=torch.tensor(LENGTHS))
    for one, other in zip(ours, dense, strict=True):
        same(one, other)
        same_gradients(problem, one, other)


@KINDS
@TWO
def test_best_paths(kind, lead):
    problem = Problem(kind, lead)
    if problem.structure.sums:
        name = type(problem.structure).__name__
        for question, args in ((logchain.viterbi, ()), (logchain.topk_paths, (2,))):
            with pytest.raises(TypeError, match=f"bulk: expected a structure .* got {name}.* {name}.to_dense"):
                question(problem.x, problem.structure, problem.p0, *args)
        return
    ours, dense = problem.both(logchain.viterbi, lengths=torch.tensor(LENGTHS))
    assert torch.equal(ours.states, dense.states)
    same(ours.score, dense.score)
    same_gradients(problem, ours.score, dense.score)
    ours, dense = problem.both(logchain.topk_paths, 40, lengths=torch.tensor(LENGTHS))
    same(ours.scores, dense.scores)
    assert torch.equal(ours.scores == -torch.inf, ours.states[..., 0] == -1)
    paths = {tuple(path) for path in ours.states[1, 1].tolist()}
    assert len(paths) == 40 or kind == "own"


@KINDS
@TWO
def test_draws_have_the_probabilities_of_paths(kind, lead):
    problem = Problem(kind, lead)
    lengths = torch.tensor([[2, 2, 1], [2, 2, 2]])
    draws = 4000
    paths = logchain.sample(
        problem.x, problem.structure, problem.p0, draws, lengths=lengths, generator=torch.Generator().manual_seed(0)
    )
    assert (paths[..., 2:] == -1).all() and (paths[:, 0, 2, 1] == -1).all()
    pairs = torch.stack(torch.meshgrid(torch.arange(C), torch.arange(C), indexing="ij"), -1).reshape(-1, 1, 1, 2)
    every = torch.nn.functional.pad(pairs.expand(-1, *BATCH, -1), (0, V - 2))
    with torch.no_grad():
        ours, dense = problem.both(logchain.log_prob, every, lengths=lengths)
    same(ours, dense)
    seen = torch.stack([(paths[:, 0, 1, 0] * C + paths[:, 0, 1, 1] == k).double().mean() for k in range(C * C)])
    expected = dense[:, 0, 1].exp()
    assert not seen[expected == 0].any()
    # six standard deviations of each frequency
    assert ((seen - expected).abs() <= 6 * (expected / draws).sqrt() + 1e-12).all()


@KINDS
@TWO
def test_log_probabilities_and_entropies(kind, lead):
    problem = Problem(kind, lead, log=True)
    states = torch.randint(-1, C, (4, *BATCH, V), generator=torch.Generator().manual_seed(7)).abs()
    states[0, 0, 0, 3] = -1
    ours, dense = problem.both(logchain.log_prob, states)
    same(ours, dense)
    same_gradients(problem, ours, dense)
    ours, dense = problem.both(logchain.entropy, lengths=torch.tensor(LENGTHS))
    same(ours, dense, rtol=1e-9)
    same_gradients(problem, ours, dense)


@KINDS
@pytest.mark.parametrize("per_row", [False, True])
def test_packed_sequences(kind, per_row):
    lengths = [3, 6, 1, 2]
    total = sum(lengths)
    structure = {**MAKE, "own": shift}[kind](numbers(3), *([total] if per_row else []))
    dense = structure.to_dense() if per_row else structure.to_dense()[None]
    x, p0 = numbers(4)(total, C).log(), numbers(5)(4, C)
    options = {"cu_seqlens": torch.tensor([0, 3, 9, 10, 12])}
    ours, theirs = (logchain.product(x, bulk, p0, **options) for bulk in (structure, dense))
    same(ours, theirs)
    ours, theirs = (logchain.marginals(x, bulk, p0, transitions="sum", **options) for bulk in (structure, dense))
    same(ours.states, theirs.states)
    if kind == "banded":
        index = torch.arange(C) - torch.tensor(structure.offsets)[:, None]
        picked = theirs.transitions[:, index % C, torch.arange(C)]
        same(ours.transitions.values.expand_as(picked), picked.masked_fill((index < 0) | (index >= C), 0))
    ours, theirs = (logchain.forward_backward(x, bulk, p0, **options) for bulk in (structure, dense))
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
    if not structure.sums:
        ours, theirs = (logchain.viterbi(x, bulk, p0, **options) for bulk in (structure, dense))
        assert torch.equal(ours.states, theirs.states)
        ours, theirs = (logchain.topk_paths(x, bulk, p0, 5, **options) for bulk in (structure, dense))
        same(ours.scores, theirs.scores)
        assert ours.states.shape == theirs.states.shape
    paths = logchain.sample(x, structure, p0, 3, generator=torch.Generator().manual_seed(0), **options)
    ours, theirs = (logchain.log_prob(x, bulk, p0, paths, **options) for bulk in (structure, dense))
    same(ours, theirs)
    assert ours.isfinite().all() or kind == "own"


@KINDS
def test_one_variable_and_no_batch(kind):
    rand = numbers(3)
    structure = {**MAKE, "own": shift}[kind](rand).map(torch.Tensor.requires_grad_)
    x, p0 = rand(1, C).log(), rand(C)
    value = logchain.product(x, structure, p0)
    same(value, (p0.log() + x[0]).logsumexp(0))
    value.backward()
    assert all(not parameter.grad.any() for parameter in structure.parameters)
    with torch.no_grad():
        assert not any(one.requires_grad for one in logchain.marginals(x, structure, p0) if one is not None)
    empty = x.expand(2, 0, 1, C)
    logchain.product(empty, structure, p0).sum().backward()
    for question in (logchain.marginals, logchain.forward_backward, logchain.entropy):
        question(empty, structure, p0)
    assert logchain.sample(empty, structure, p0, 3).shape == (3, 2, 0, 1)
    if not structure.sums:
        assert logchain.viterbi(empty, structure, p0).states.shape == (2, 0, 1)
        assert logchain.topk_paths(empty, structure, p0, 2).states.shape == (2, 0, 2, 1)


@KINDS
@pytest.mark.parametrize("lead", [(), (V - 1,), (0, V - 1)], ids=str)
def test_answers_for_no_sequence_have_gradients_of_nothing(kind, lead):
    rand = numbers(3)
    structure = {**MAKE, "own": shift}[kind](rand, *lead).map(torch.Tensor.requires_grad_)
    leaves = [torch.zeros(0, V, C).requires_grad_(), rand(C).requires_grad_(), *structure.parameters]
    operands = leaves[0], structure, leaves[1]
    for transitions_wanted in ("sum", "full"):
        states, counted, log_norm = logchain.marginals(*operands, transitions=transitions_wanted)
        found = [states, log_norm, *counted.parameters, logchain.entropy(*operands), logchain.product(*operands)]
        for answer in found:
            assert not any(one.any() for one in torch.autograd.grad(answer.sum(), leaves, retain_graph=True))
    assert logchain.forward_backward(*operands).forward.shape == (0, V, C)
    if not structure.sums:
        assert logchain.viterbi(*operands).states.shape == (0, V)
        assert logchain.topk_paths(*operands, 2).states.shape == (0, 2, V)


@KINDS
def test_float32_and_half_operands(kind):
    problem = Problem(kind, dtype=torch.float32)
    with torch.no_grad():
        value = logchain.product(problem.x, problem.structure, problem.p0)
        exact = reference.product(problem.x, problem.structure, problem.p0)
        assert value.dtype == torch.float32
        bound = V * (C + 8) * 2**-24
        same(value.double(), torch.from_numpy(exact), rtol=2**-23, atol=bound)
        half = [leaf.bfloat16() for leaf in problem.leaves]
        structure = problem.structure.with_parameters(*half[2:])
        value = logchain.product(half[0], structure, half[1])
        wide = logchain.product(half[0].float(), structure.to(torch.float32), half[1].float())
        assert torch.equal(value, wide)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_potentials_of_thousands_of_nats(kind, dtype):
    problem = Problem(kind, dtype=dtype, spread=3000.0)
    value = logchain.product(problem.x, problem.structure, problem.p0)
    operands = [leaf.detach().double() for leaf in problem.leaves]
    structure = problem.structure.with_parameters(*operands[2:])
    exact = reference.marginals(operands[0], structure, operands[1])
    unit = torch.finfo(dtype).eps / 2
    spread = float(problem.x.detach().masked_fill(problem.x == -torch.inf, 0).abs().amax()) * 2
    bound = V * (C + 8 + 2 * spread) * unit
    same(value.double(), torch.from_numpy(exact.log_norm), rtol=unit * 2, atol=bound)
    (states,) = torch.autograd.grad(value.sum(), problem.x)
    same(states.double(), torch.from_numpy(exact.states), rtol=2 * bound, atol=C * 2**-26)


@KINDS
@pytest.mark.parametrize("offset", [-(2.0**60), 2.0**20, 2.0**100])
def test_an_offset_of_all_potentials_does_not_drown_weights(kind, offset):
    problem = Problem(kind)
    with torch.no_grad():
        x = torch.zeros_like(problem.x).masked_fill(problem.x == -torch.inf, -torch.inf)
        p0 = problem.p0.index_fill(0, torch.tensor(0), 0.0)
        operands = [(one, problem.structure, p0) for one in (x, x + offset)]
        values = [logchain.entropy(*each) for each in operands]
        same(values[1], values[0], rtol=1e-12)
        operands[1][0][..., 0, 0] = 2 * abs(offset)  # where no path begins
        if not problem.structure.sums:
            paths = [logchain.viterbi(*each).states for each in operands]
            assert torch.equal(*paths)
        draws = [logchain.sample(*each, 5, generator=torch.Generator().manual_seed(0)) for each in operands]
        assert torch.equal(*draws)


@pytest.mark.parametrize("offset", [2.0**20, 2.0**100])
def test_entropies_by_steps_at_an_offset(offset):
    problem = Problem("blocks")
    with torch.no_grad():
        x = torch.zeros_like(problem.x).masked_fill(problem.x == -torch.inf, -torch.inf)
        matrix = Shared(problem.dense[0])
        value = logchain.entropy(x, matrix, problem.p0, lengths=torch.tensor(LENGTHS))
        same(value, logchain.entropy(x, problem.dense, problem.p0, lengths=torch.tensor(LENGTHS)))
        assert torch.equal(logchain.entropy(x + offset, matrix, problem.p0, lengths=torch.tensor(LENGTHS)), value)
        x[0, 1, 0], x[0, 2, 1], x[1, 0, 0, 1], x[1, 1, 3, 2] = -torch.inf, -torch.inf, torch.nan, torch.inf
        values = logchain.entropy(x, matrix, problem.p0)
        assert values.isnan().tolist() == [[False, False, False], [True, True, False]]
        assert not values[0, 1:].any()


@KINDS
def test_impossible_and_unknown_sequences(kind):
    problem = Problem(kind)
    x = problem.x.detach().clone()
    x[0, 1, 3] = -torch.inf
    x[1, 0, 2, 1] = torch.nan
    x.requires_grad_()
    value = logchain.product(x, problem.structure, problem.p0)
    assert value[0, 1] == -torch.inf and value[1, 0].isnan()
    others = torch.tensor([[True, False, True], [False, True, True]])
    same(value[others], logchain.product(problem.x, problem.dense, problem.p0)[others])
    (states,) = torch.autograd.grad(value[others].sum() + value[0, 1], x, retain_graph=True)
    assert not states[0, 1].any()
    assert states[others].isfinite().all()
    gradients = torch.autograd.grad(value[0, 1], problem.structure.parameters)
    assert not any(gradient.any() for gradient in gradients)


def test_wrong_operands_are_named():
    structure = transitions.Banded(torch.ones(2, C), [0, 1])
    x, p0 = torch.zeros(2, V, C), torch.ones(C)
    cases = [
        ("bulk: expected 11 states to go with x [2, 6, 11], got 12", (x[..., :11], structure, p0[:11]), {}),
        (
            "bulk: expected shape [1 or 2, 5 or 1, 2, 12] to go with x [2, 6, 12], got [3, 1, 2, 12]",
            (x, transitions.Banded(torch.ones(3, 1, 2, C), [0, 1]), p0),
            {},
        ),
        ("p0: expected shape [12] to go with x [2, 6, 12], got [11]", (x, structure, p0[:11]), {}),
        ("memory_budget: expected None where bulk is a structure, got 5", (x, structure, p0), {"memory_budget": 5}),
        ("strategy: expected 'auto' or 'sequential', got 'tree'", (x, structure, p0), {"strategy": "tree"}),
        ("lengths: expected values from 1 to v = 6, got 0 to 7", (x, structure, p0), {"lengths": [0, 7]}),
        ("log_params: expected True or False, got 1", (x, structure, p0), {"log_params": 1}),
        ("lengths: expected None beside cu_seqlens, which holds them", (x[0], structure, p0), {"lengths": 1}),
    ]
    for message, operands, options in cases:
        if "beside" in message:
            options = {**options, "cu_seqlens": torch.tensor([0, V])}
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
            logchain.product(*operands, **options)


def test_transforms_are_refused():
    problem = Problem("banded")
    with pytest.raises(NotImplementedError, match="bulk: expected a tensor inside transforms of torch.func"):
        torch.func.grad(lambda x: logchain.product(x, problem.structure, problem.p0).sum())(problem.x)
    with pytest.raises(NotImplementedError, match="bulk: expected a tensor inside transforms of torch.func"):
        torch.vmap(lambda x: logchain.product(x, problem.structure, problem.p0))(problem.x)


@KINDS
def test_values_are_checked_and_plans_are_made(kind):
    problem = Problem(kind)
    logchain.check(problem.x, problem.structure, problem.p0)
    wrong = problem.structure.map(torch.neg)
    with pytest.raises(ValueError, match=r"bulk\.\S+: expected non-negative weights, got -"):
        logchain.check(problem.x, wrong, problem.p0)
    steps = problem.structure.map(lambda one: one.expand(V - 1, *one.shape))
    logchain.check(problem.x, steps, problem.p0, lengths=torch.tensor(LENGTHS))
    logchain.check(problem.x[..., :1, :], steps.map(lambda one: one[:0]), problem.p0)
    elsewhere = logchain.plan(problem.x, problem.structure, problem.p0, device="cuda")
    assert elsewhere.constants != logchain.plan(problem.x, problem.structure, problem.p0).constants
    planned = logchain.plan(problem.x, problem.structure, problem.p0)
    assert planned.multiply_adds == 3 * 6 * (V - 1) * problem.structure.multiply_adds
    (dense,) = planned.alternatives
    assert dense.multiply_adds >= 3 * 6 * (V - 1) * C**2
    assert f"{problem.structure.multiply_adds} multiply-adds a step in place of {C**2}" in str(planned)


def test_a_structure_on_several_ranks_has_no_plan():
    message = "bulk: expected matrices or a structure on one process, got Shared: pass the shape of its dense matrices"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        logchain.plan(torch.zeros(V, C), Shared(torch.ones(C, C)), torch.ones(C))
