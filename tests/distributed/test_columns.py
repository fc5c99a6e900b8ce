"""Chains of one matrix whose columns lie on several ranks: each question has the answer of the dense matrix."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import logchain
from logchain.distributed import Columns
from logchain.transitions import LOG
from tests.contract import of_steps
from tests.transitions.structures import numbers

F64 = torch.float64
V, C, BATCH = 5, 12, (2, 3)
LENGTHS = torch.tensor([[5, 3, 1], [2, 5, 4]])
SIZES = [(5, 7), (12, 0), (4, 0, 8)]
SPLITS = pytest.mark.parametrize("sizes", SIZES, ids=str)


class Problem:
    """Operands x [2, 3, v, c] with impossible states, the columns of a rank, p0, and all columns."""

    def __init__(self, rank, sizes, *, lead=(), log=False, dtype=torch.float64, spread=1.0, scale=1.0):
        rand = numbers(3)
        dense, p0 = rand(*lead, C, C) * scale, rand(C)
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(*BATCH, V, C, generator=generator, dtype=torch.float64) * spread
        x[0, 0, 2, 5] = -torch.inf
        if log:
            dense, p0 = dense.log(), p0.log()
        self.start = sum(sizes[:rank])
        self.mine = slice(self.start, self.start + sizes[rank])
        self.x, self.dense, self.p0 = (one.to(dtype).requires_grad_() for one in (x, dense, p0))
        self.columns = self.dense[..., self.mine].detach().clone().requires_grad_()
        self.structure = Columns(self.columns)
        self.bulk = self.dense if lead else self.dense[None]
        self.options = {"log_params": log}

    def both(self, question, *args, **options):
        options = {**self.options, **options}
        return [question(self.x, bulk, self.p0, *args, **options) for bulk in (self.structure, self.bulk)]

    def zero(self, leaf):
        return -torch.inf if leaf is self.x or self.options["log_params"] else 0.0

    def same_gradients(self, ours, dense, **close):
        weight = torch.rand(ours.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        pairs = [torch.where(value.isfinite(), value, 0.0).mul(weight).sum() for value in (ours, dense)]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        x, p0, columns = torch.autograd.grad(pairs[0], [self.x, self.p0, self.columns], **options)
        expected = torch.autograd.grad(pairs[1], [self.x, self.p0, self.dense], **options)
        expected = [
            one.masked_fill(leaf == self.zero(leaf), 0.0)
            for one, leaf in zip(expected, (self.x, self.p0, self.dense), strict=True)
        ]
        same(x, expected[0], **close)
        same(p0, expected[1], **close)
        same(columns, expected[2][..., self.mine], **close)
        assert columns.shape == self.columns.shape


def same(ours, dense, rtol=1e-10, atol=1e-11):
    torch.testing.assert_close(ours, dense, rtol=rtol, atol=atol)


def product(rank, sizes, lead, log, lengths):
    problem = Problem(rank, sizes, lead=lead, log=log)
    ours, dense = problem.both(logchain.product, lengths=lengths)
    same(ours, dense)
    problem.same_gradients(ours, dense)


@SPLITS
@pytest.mark.parametrize("lead", [(), (V - 1,), (2, 1, 1), (3, V - 1)], ids=str)
@pytest.mark.parametrize(("log", "lengths"), [(False, None), (True, LENGTHS)])
def test_product_and_its_gradients(teams, sizes, lead, log, lengths):
    teams(len(sizes)).values(product, sizes, lead, log, lengths)


def alone(rank, sizes, needed):
    problem = Problem(rank, sizes)
    leaves = {"x": problem.x, "p0": problem.p0, "columns": problem.columns}
    value = logchain.product(problem.x, problem.structure, problem.p0).sum()
    together = torch.autograd.grad(value, leaves[needed])[0]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == needed)
    value = logchain.product(problem.x, problem.structure, problem.p0).sum()
    same(torch.autograd.grad(value, leaves[needed])[0], together)


@pytest.mark.parametrize("needed", ["x", "p0", "columns"])
def test_a_gradient_does_not_depend_on_which_others_are_needed(teams, needed):
    teams(2).values(alone, (5, 7), needed)


def questions(rank, sizes, lead, log, lengths):
    problem = Problem(rank, sizes, lead=lead, log=log)
    options = {"lengths": lengths}
    ours, dense = problem.both(logchain.marginals, transitions="sum", **options)
    same(ours.states, dense.states), same(ours.log_norm, dense.log_norm)
    counts = ours.transitions.parameters[0]
    same(counts, dense.transitions[..., problem.mine].view(counts.shape))
    problem.same_gradients(ours.states, dense.states)
    for one, other in zip(*problem.both(logchain.forward_backward, **options), strict=True):
        same(one, other)
        problem.same_gradients(one, other)
    ours, dense = problem.both(logchain.entropy, **options)
    same(ours, dense)
    problem.same_gradients(ours, dense)
    with torch.no_grad():  # where messages pass by other loops
        same(problem.both(logchain.entropy, **options)[0], dense)
        for one, other in zip(*problem.both(logchain.forward_backward, **options), strict=True):
            same(one, other)
    for ours, dense in (problem.both(logchain.viterbi, **options), problem.both(logchain.topk_paths, 3, **options)):
        assert torch.equal(ours[0], dense[0])
        same(ours[1], dense[1])
        problem.same_gradients(ours[1], dense[1])
    paths = ours[0][..., 0, :]
    ours, dense = problem.both(logchain.log_prob, paths, **options)
    same(ours, dense)
    problem.same_gradients(ours, dense)


@SPLITS
@pytest.mark.parametrize(("lead", "log", "lengths"), [((), False, LENGTHS), ((3, V - 1), True, None)])
def test_the_other_questions(teams, sizes, lead, log, lengths):
    teams(len(sizes)).values(questions, sizes, lead, log, lengths)


def changed_in_place(rank):
    problem = Problem(rank, (5, 7), lead=(1,))
    message = torch.linspace(-1.0, 0.0, C, dtype=F64).expand(1, 2, C)
    with torch.no_grad():
        for _ in range(2):
            same(problem.structure.apply(message, LOG), torch.logsumexp(message[..., None] + problem.dense[0], -2))
            problem.columns.mul_(2.0), problem.dense.mul_(2.0)


def test_columns_that_change_in_place(teams):
    teams(2).values(changed_in_place)


def tied(rank):
    """Best paths among many of equal weight, of which maxima are found a few columns at a time."""
    from logchain.distributed import columns

    kept, columns._TERMS = columns._TERMS, 2 * 3 * C * 2
    try:
        problem = Problem(rank, (5, 7), log=True)
        with torch.no_grad():
            for leaf in problem.x, problem.dense, problem.p0:
                leaf.copy_(leaf.round().clamp(min=-3))
            problem.columns.copy_(problem.dense[:, problem.mine])
        for ours, dense in zip(*problem.both(logchain.viterbi), strict=True):
            assert torch.equal(ours, dense)
    finally:
        columns._TERMS = kept


def test_ties_go_to_the_path_of_one_process(teams):
    teams(2).values(tied)


def rows_kept(rank):
    from logchain.kernels.plain import columns

    longest, kept = 0, columns._Counts.add

    def counted(counts, *args):
        nonlocal longest
        kept(counts, *args)
        longest = max(longest, sum(messages.shape[-2] for messages, _ in counts._rows))

    columns._Counts.add = counted
    try:
        x = torch.zeros(3, 400, 4, requires_grad=True)
        mine = torch.full((4, 2), 0.25, requires_grad=True)
        logchain.product(x, Columns(mine), torch.ones(4)).sum().backward()
    finally:
        columns._Counts.add = kept
    return longest


def test_messages_do_not_pile_up_for_the_counts(teams):
    assert all(128 < longest < 256 for longest in teams(2).values(rows_kept))


def draws(rank, sizes):
    problem = Problem(rank, sizes)
    torch.manual_seed(rank)
    paths = logchain.sample(problem.x, problem.structure, problem.p0, 3000, lengths=LENGTHS)
    states = logchain.marginals(problem.x, problem.bulk, problem.p0, lengths=LENGTHS).states
    found = torch.nn.functional.one_hot(paths + 1, C + 1)[..., 1:].double().mean(0)
    same(found, states, rtol=0, atol=0.05)
    return paths


@SPLITS
def test_draws_are_those_of_the_posterior_and_of_all_ranks(teams, sizes):
    first, *others = teams(len(sizes)).values(draws, sizes)
    assert all(torch.equal(first, other) for other in others)


def ended(rank, sizes, lead):
    problem = Problem(rank, sizes, lead=lead)
    lengths = torch.tensor([[4, 3, 1], [2, 4, 1]])
    with torch.no_grad():
        if lead:  # matrices that no sequence uses
            for one in (problem.columns, problem.dense):
                one[1, 0, 1:] = one[:, 2] = torch.nan
                one[0, 0, 3:] = torch.nan
    # what dense matrices do with NaN behind ends is not the question
    clean = problem.dense.detach().nan_to_num(0.5).requires_grad_()
    ours = logchain.product(problem.x, problem.structure, problem.p0, lengths=lengths)
    dense = logchain.product(problem.x, clean if lead else clean[None], problem.p0, lengths=lengths)
    same(ours, dense)
    problem.dense = clean
    problem.same_gradients(ours, dense)


@pytest.mark.parametrize("lead", [(), (2, 3, V - 1)], ids=str)
def test_sequences_that_have_ended(teams, lead):
    teams(2).values(ended, (5, 7), lead)


def second(rank, sizes, log):
    problem = Problem(rank, sizes, log=log)
    leaves = [problem.x, problem.p0]
    found = []
    for value, matrix in zip(problem.both(logchain.product), (problem.columns, problem.dense), strict=True):
        first = torch.autograd.grad(value.sum(), leaves, create_graph=True)
        total = sum((one * numbers(6)(*one.shape)).sum() for one in first)
        found.append(torch.autograd.grad(total, [*leaves, matrix]))
    (*ours, columns), (*dense, matrix) = found
    for one, other, leaf in zip(ours, dense, leaves, strict=True):
        same(one, other.masked_fill(leaf == problem.zero(leaf), 0.0), rtol=1e-8, atol=1e-9)
    zero = problem.dense == problem.zero(problem.dense)
    same(columns, matrix.masked_fill(zero, 0.0)[:, problem.mine], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("log", [False, True])
def test_second_derivatives(teams, log):
    teams(2).values(second, (5, 7), log)


def narrow(rank, sizes, dtype, spread, power, scale, log):
    """Chains of a narrow dtype, whose entries are powers of numbers in [0, 1), against float64."""
    problem = Problem(rank, sizes, dtype=dtype, spread=spread)
    with torch.no_grad():
        dense = problem.dense.double() ** power * scale
        dense = (dense.log() if log else dense).to(dtype)
        p0 = problem.p0.log() if log else problem.p0
    exact = [one.detach().double().requires_grad_() for one in (problem.x, dense, p0)]
    ours = [one.detach().requires_grad_() for one in (problem.x, dense[:, problem.mine].contiguous(), p0)]
    options = {"log_params": log, "lengths": LENGTHS}
    expected = logchain.product(exact[0], exact[1][None], exact[2], **options)
    with logchain.rescues() as rescues:
        value = logchain.product(ours[0], Columns(ours[1]), ours[2], **options)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-5)
    first, second = torch.autograd.grad(value.sum(), ours), torch.autograd.grad(expected.sum(), exact)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    zero = [-torch.inf, -torch.inf if log else 0.0, -torch.inf if log else 0.0]
    for one, other, leaf, nothing in zip(first, second, exact, zero, strict=True):
        other = other.masked_fill(leaf == nothing, 0.0)
        other = other[:, problem.mine] if leaf is exact[1] else other
        weights = leaf[:, problem.mine] if leaf is exact[1] else leaf
        counts, wanted = (one.double(), other) if log or leaf is exact[0] else (one * weights, other * weights)
        torch.testing.assert_close(counts, wanted.masked_fill(wanted.isnan(), 0.0), **close)
        assert (one[weights == nothing] == 0).all() and one.isfinite().all()
    return rescues.sequences


@SPLITS
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("spread", "power", "scale", "rescued"),
    [
        (1.0, 1, 1.0, False),
        (300.0, 0, 1.0, False),
        (200.0, 1, 1.0, True),
        (60.0, 60, 1.0, True),
        (30.0, 30, 1e30, True),
    ],
)
def test_chains_that_underflow_in_float32(teams, sizes, log, spread, power, scale, rescued):
    counts = teams(len(sizes)).values(narrow, sizes, torch.float32, spread, power, scale, log)
    assert len(set(counts)) == 1
    assert (counts[0] > 0) == rescued


@pytest.mark.parametrize(
    ("spread", "power", "scale", "rescued"), [(30.0, 1, 1.0, False), (600.0, 1, 1.0, True), (9.0, 4000, 1e300, True)]
)
@pytest.mark.parametrize("log", [False, True])
def test_chains_that_underflow_in_float64(teams, log, spread, power, scale, rescued):
    counts = teams(2).values(narrow, (5, 7), torch.float64, spread, power, scale, log)
    assert counts[0] == counts[1]
    assert (counts[0] > 0) == rescued


def detour(rank, log, entry):
    """A path through a state far below others, and an entry far below others, that is the only one."""
    x = torch.tensor([[0.0, -200.0, 0.0, 0.0], [-torch.inf, -torch.inf, 1.0, -torch.inf]], requires_grad=True)
    logs = torch.full((4, 4), -torch.inf, dtype=torch.float64)
    logs[:, 0] = logs[0] = torch.linspace(-1.0, 0.0, 4)
    logs[0, 2], logs[1, 2] = -torch.inf, entry
    bulk = (logs if log else logs.exp()).float()[:, 2 * rank : 2 * rank + 2].contiguous().requires_grad_()
    exact = entry if log else logs.exp().float()[1, 2].double().log().item()
    value = logchain.product(x, Columns(bulk), torch.zeros(4) if log else torch.ones(4), log_params=log)
    torch.testing.assert_close(value.item(), exact - 199.0, rtol=1e-6, atol=0)
    states, columns = torch.autograd.grad(value, [x, bulk])
    assert states.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    if log or entry > -88:  # the gradient of less is beyond float32
        counts = columns if log else columns.double() * bulk
        assert torch.allclose(counts.sum(), torch.tensor(float(rank), dtype=counts.dtype))


@pytest.mark.parametrize(
    ("log", "entry"), [(True, -5.0), (True, -300.0), (False, -5.0), (False, -80.0), (False, -87.0), (False, -101.0)]
)
def test_the_only_path_is_found(teams, log, entry):
    teams(2).values(detour, log, entry)


def long(rank, log):
    problem = Problem(rank, (5, 7), log=log)
    problem.x = problem.x.detach().repeat(1, 1, 30, 1).requires_grad_()
    ours, dense = problem.both(logchain.product)
    same(ours, dense)
    problem.same_gradients(ours, dense)


@pytest.mark.parametrize("log", [False, True])
def test_chains_of_many_steps(teams, log):
    teams(2).values(long, log)


@SPLITS
def test_bfloat16(teams, sizes):
    teams(len(sizes)).values(narrow, sizes, torch.bfloat16, 1.0, 1, 1.0, False)


def impossible(rank, sizes, dtype):
    problem = Problem(rank, sizes, dtype=dtype)
    with torch.no_grad():
        problem.x[0, 1, 3] = -torch.inf
        problem.x[1, 0, 2, 3] = torch.nan
    value = logchain.product(problem.x, problem.structure, problem.p0)
    assert value[0, 1] == -torch.inf and value[1, 0].isnan() and value.isfinite().sum() == 4
    keep = torch.ones(BATCH, dtype=torch.bool)
    keep[1, 0] = False
    x, columns = torch.autograd.grad(value[keep].sum(), [problem.x, problem.columns])
    assert (x[0, 1] == 0).all() and columns.isfinite().all() and (columns[problem.columns == 0] == 0).all()
    states = logchain.viterbi(problem.x, problem.structure, problem.p0)[0]
    assert (states[0, 1] == -1).all() and (states[1, 0] == -1).all() and (states >= 0).sum() == 4 * V


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_impossible_and_what_is_unknown(teams, dtype):
    teams(2).values(impossible, (5, 7), dtype)


def of_a_mesh(rank, placement):
    mesh = init_device_mesh("cpu", (2,))
    problem = Problem(rank, (6, 6))
    whole = distribute_tensor(problem.dense.detach(), mesh, [placement]).requires_grad_()
    ours = logchain.product(problem.x, Columns(whole), problem.p0)
    dense = logchain.product(problem.x, problem.bulk, problem.p0)
    same(ours, dense)
    ours.sum().backward(), dense.sum().backward()
    same(whole.grad.to_local(), problem.dense.grad.masked_fill(problem.dense == 0, 0.0)[:, problem.mine])


def test_a_dtensor(teams):
    teams(2).values(of_a_mesh, Shard(-1))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_other_placements_are_refused(teams, placement):
    for outcome in teams(2).run(of_a_mesh, placement):
        assert isinstance(outcome.error, ValueError)
        assert re.match(r"rank 0: columns: expected .*Shard\(.*got .*DTensor\.redistribute", str(outcome.error))


OPTIONS = {
    "rank 1: k: expected 2, as on rank 0, got 3": ("topk_paths", {"k": 2}, {"k": 3}),
    "rank 1: k: expected at least 1, got 0": ("topk_paths", {"k": 2}, {"k": 0}),
    "rank 1: num_samples: expected 2, as on rank 0, got 30": ("sample", {"num_samples": 2}, {"num_samples": 30}),
    "rank 1: strategy: expected 'auto' or 'sequential', got 'tree'": ("product", {}, {"strategy": "tree"}),
    "rank 1: transitions: expected sum, as on rank 0, got full": (
        "marginals", {"transitions": "sum"}, {"transitions": "full"},
    ),
    "rank 1: states: expected integers [2, 3, 5] of sum 0, 0 by place, as on rank 0, got integers [2, 3, 5] of sum 1": (
        "log_prob", {"states": torch.zeros(2, 3, 5).long()}, {"states": (torch.arange(30) == 7).view(2, 3, 5).long()},
    ),
    "rank 1: x: expected shape [total, c] to go with cu_seqlens": ("entropy", {}, {"cu_seqlens": torch.tensor([0, 9])}),
}  # fmt: skip


def with_options(rank, question, first, second):
    problem = Problem(rank, (5, 7))
    with torch.no_grad():
        getattr(logchain, question)(problem.x, problem.structure, problem.p0, **(second if rank else first))


@pytest.mark.parametrize("message", OPTIONS)
def test_options_that_are_wrong_or_not_the_same(teams, message):
    for outcome in teams(2).run(with_options, *OPTIONS[message]):
        assert isinstance(outcome.error, ValueError | TypeError), outcome.trace
        assert str(outcome.error).startswith(message), outcome.error


def of_a_mesh_on_one_rank(rank):
    mesh, part = init_device_mesh("cpu", (2,)), torch.ones(4, 2)
    Columns(DTensor.from_local(part, mesh, [Replicate() if rank else Shard(-1)], run_check=False))


def test_a_placement_that_is_wrong_on_one_rank(teams):
    for outcome in teams(2).run(of_a_mesh_on_one_rank):
        assert isinstance(outcome.error, ValueError) and str(outcome.error).startswith("rank 1: columns: expected a DT")


def wide(rank, v, c):
    """Log-partitions of `Columns` and of one matrix, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(v, c, generator=generator, dtype=F64), torch.rand(c, c, generator=generator, dtype=F64)
    p0, mine = torch.rand(c, generator=generator, dtype=F64), slice(c * rank // 2, c * (rank + 1) // 2)
    return logchain.product(x, Columns(bulk[:, mine]), p0), logchain.product(x, bulk[None], p0)


@pytest.mark.parametrize("c", [2, 4, 32])
def test_steps_in_float64_add_up_no_error(teams, c):
    (found, expected), _ = teams(2).values(wide, 2001, c)
    assert abs(found - expected) <= of_steps(2001, c, 2.0, dtype=F64) + 2**-52 * abs(expected)


def made(rank, columns):
    Columns(columns[rank])


ones = torch.ones
WRONG_COLUMNS = {
    "columns: expected 12 columns on all ranks together, as many as rows, got [5, 6]": (ones(12, 5), ones(12, 6)),
    "rank 1: columns: expected [12, c_r] of torch.float32 on cpu, as on rank 0, got [12, c_r] of torch.float64 on"
    " cpu": (
        ones(12, 5),
        ones(12, 7, dtype=torch.float64),
    ),
    "rank 1: columns: expected [2, 12, c_r] of torch.float32 on cpu, as on rank 0, got [1, 12, c_r] of torch.float32 on"
    " cpu": (ones(2, 12, 5), ones(1, 12, 7)),
    "rank 1: columns: expected a torch.Tensor, got list": (ones(12, 5), [[1.0]]),
    "rank 0: columns: expected at least 2 axes, got shape [12]": (ones(12), ones(12, 7)),
}


@pytest.mark.parametrize("message", WRONG_COLUMNS)
def test_columns_that_do_not_go_together(teams, message):
    for outcome in teams(2).run(made, WRONG_COLUMNS[message]):
        assert isinstance(outcome.error, ValueError | TypeError) and str(outcome.error) == message


def asked(rank, change):
    problem = Problem(rank, (5, 7))
    x, p0, options = problem.x.detach(), problem.p0.detach(), {}
    if rank == 1:
        match change:
            case "kind":
                x = [1.0]
            case "states":
                x = x[..., :-1]
            case "variables":
                x = x[..., :-1, :]
            case "values":
                p0 = p0 * 2
            case "log":
                options = {"log_params": True}
            case "lengths":
                options = {"lengths": LENGTHS}
            case "gradients":
                x = problem.x
            case "rows":
                x = x.flip(0)
            case "question":
                return logchain.viterbi(x, problem.structure, p0)
    logchain.marginals(x, problem.structure, p0, **options)


WRONG = {
    "kind": "rank 1: x: expected a torch.Tensor, got list",
    "states": "rank 1: bulk: expected 11 states to go with x [2, 3, 5, 11], got 12",
    "variables": "rank 1: x: expected shape [2, 3, 5, 12] of torch.float64, as on rank 0, got shape [2, 3, 4, 12] of",
    "values": "rank 1: p0: expected the same weights as on rank 0, got other values",
    "log": "rank 1: log_params: expected False, as on rank 0, got True",
    "lengths": "rank 1: lengths: expected None, as on rank 0, got integers [2, 3] of sum 20, ",
    "rows": "rank 1: x: expected the same log-potentials as on rank 0, got other values",
    "question": "rank 1: question: expected marginals, as on rank 0, got viterbi",
    "gradients": "rank 1: gradients: expected [False, False, True], as on rank 0, got [True, False, True]",
}


@pytest.mark.parametrize("change", WRONG)
def test_operands_that_are_not_the_same(teams, change):
    for outcome in teams(2).run(asked, change):
        assert isinstance(outcome.error, ValueError | TypeError) and WRONG[change] in str(outcome.error)
