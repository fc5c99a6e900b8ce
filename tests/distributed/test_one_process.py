"""Every function of a chain on several ranks returns what one process returns, each rank for its own variables."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import logchain
from logchain import distributed, kernels
from logchain.distributed import sharded
from logchain.memory import peak_bytes
from logchain.schedules.ranks import Cut
from tests.contract import of_steps
from tests.distributed.chains import chain
from tests.layouts import STRANGE

pytestmark = pytest.mark.xdist_group("ranks")

F64 = torch.float64
INF, NAN = torch.inf, torch.nan

# the numbers of variables of ranks; some have none, and the first of them too
SIZES = {
    1: [(7,)],
    2: [(5, 4), (1, 6), (7, 1), (0, 5), (6, 0), (1, 1)],
    3: [(4, 3, 5), (0, 4, 3), (3, 0, 4), (1, 1, 1), (2, 6, 0), (0, 5, 0)],
}
GRADIENTS = "gradient of x", "gradient of bulk", "gradient of p0"


def product(package, *operands, **options):
    """The log-partition with and without gradients, which are for weights that differ by sequence."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    value = package.product(*leaves, **options)
    weight = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype, device="cpu").view(value.shape)
    gradients = torch.autograd.grad((value * weight)[value != -INF].sum(), leaves)
    found = {"log-partition": value.detach(), "without gradients": package.product(*operands, **options)}
    return found | dict(zip(GRADIENTS, gradients, strict=True))


def marginals(package, *operands, **options):
    plain, counted, full = (package.marginals(*operands, transitions=kind, **options) for kind in (None, "sum", "full"))
    assert plain.transitions is None
    found = {"posteriors": plain.states, "counts": counted.transitions, "transitions": full.transitions}
    return {"log-partition": plain.log_norm, **found}


def viterbi(package, *operands, strategy="auto", **options):
    found = package.viterbi(*operands, **options)
    return {"path": found.states, "score": found.score}


def entropy(package, *operands, **options):
    return {"entropy": package.entropy(*operands, **options)}


FUNCTIONS = {"product": product, "marginals": marginals, "viterbi": viterbi, "entropy": entropy}


def on_rank(rank, function, cases, options=None, layout=None):
    found = []
    for case in cases:
        # ranks of one matrix each cannot know whether it is the same step after step
        known = {} if case.bulk.shape[-3] == 1 else {"one_matrix": False}
        found.append(FUNCTIONS[function](distributed, *case.of(rank, layout), **known, **case.options, **options or {}))
    return found


def assert_same(team, function, cases, layout=None, run=on_rank, **options):
    """Ranks have the results of one process; what is not of a rank's own variables is the same on all, bit by bit."""
    by_rank = team.values(run, function, cases, options, layout)
    for index, case in enumerate(cases):
        for name, expected in FUNCTIONS[function](logchain, *case[:3], **case.options).items():
            for rank, results in enumerate(by_rank):
                found, part = results[index][name], case.part(rank, name, expected)
                torch.testing.assert_close(found, part, **tolerance(case, name, part.dtype), equal_nan=True)
                if part is expected:
                    assert torch.equal(found.nan_to_num(), by_rank[0][index][name].nan_to_num())


def tolerance(case, name, dtype):
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    bound = 2 * of_steps(sum(case.sizes), case.x.shape[-1], 20.0, dtype=case.x.dtype)
    match name:
        case "log-partition" | "without gradients" | "score":
            return {"rtol": 2 * eps, "atol": bound}
        case "entropy":  # a difference of two numbers of the size of the log-partition
            return {"rtol": 1e-11, "atol": 1e-8} if dtype == F64 else {"rtol": 0, "atol": 1e-5}
        case "path":
            return {"rtol": 0, "atol": 0}
    return {"rtol": max(2 * bound, eps), "atol": case.x.shape[-1] * eps}


def ties(sizes, **options):
    case = chain(sizes, 3, **options)
    return case._replace(x=case.x.round())


def offset(sizes, **options):
    case = chain(sizes, 3, batch=(2,), **options)
    return case._replace(x=case.x + torch.tensor([1e6, -1e6])[:, None, None])


def degenerate(sizes, **options):
    """Sequences that are impossible or unknown on one rank or another, and one that is neither."""
    case = chain(sizes, 3, batch=(5,), zeros=0.0, **options)
    for sequence, value in enumerate((-INF, NAN, -INF, NAN)):
        case.x[sequence, (sequence * (sum(sizes) - 1)) // 3] = value
    return case


def underflowing(sizes, where, dtype):
    """States that lie a thousand nats below the others are those that count, at a step before or after a boundary."""
    case = chain({1: (18,), 2: (6, 12), 3: (6, 5, 7)}[len(sizes)], 3, dtype=dtype, zeros=0.0)
    # no step leads from state 0 to 1: the last rank, which may scan from the end, loses what does not end in 1
    case.x[where] = torch.tensor([0.0, -900.0, -1000.0]).roll(int(where >= 14))
    case.x[where + 2 if where < 10 else where - 2] = torch.tensor([-INF, 0.0, -50.0])
    case.bulk[..., 0, 1] = 0
    return case


BATCHES = ((2, 5), (2, 1)), ((4, 3), ()), ((4, 3), (3,)), ((0,), ())
CASES = {
    "one matrix": [partial(chain, c=c) for c in (3, 3, 3, 3, 3, 3, 1)],
    "a matrix per step": [partial(chain, c=c, one_matrix=False, log_params=True) for c in (3, 3, 3, 3, 3, 3, 1)],
    "lengths": [
        partial(chain, c=3, batch=(3,), own=own, lengths=True, one_matrix=one_matrix)
        for own, one_matrix in itertools.product([(), (3,)], [True, False])
    ],
    "batch axes": [
        partial(chain, c=3, batch=batch, own=own, lengths=own == (2, 1), one_matrix=one_matrix)
        for (batch, own), one_matrix in itertools.product(BATCHES, [True, False])
    ],
    "dtypes": [
        partial(chain, c=c, dtype=dtype, batch=(2,))
        for c, dtype in itertools.product([2, 16, 33], [torch.float32, F64, torch.bfloat16])
    ],
    "ties": [
        partial(ties, batch=batch, lengths=batch == (3,), one_matrix=one_matrix, log_params=not one_matrix)
        for batch, one_matrix in itertools.product([(), (3,)], [True, False])
    ],
    "offsets": [offset, partial(offset, dtype=torch.float32)],
    "impossible or NaN": [partial(degenerate, lengths=lengths) for lengths in (False, True, True, False)],
    "underflow": [
        partial(underflowing, where=where, dtype=dtype)
        for where, dtype in itertools.product([3, 5, 6, 10, 11, 14], [torch.float32, F64])
    ],
}


def cases_of(kind, ranks):
    """The chains of a kind, each for another division among ranks."""
    return [make(sizes) for make, sizes in zip(CASES[kind], itertools.cycle(SIZES[ranks]), strict=False)]


# each kind for all functions and two or three ranks, but for these
FUNCTIONS_OF = {"ties": ["viterbi"], "underflow": ["product", "viterbi"]}
RANKS_OF = {"one matrix": [1, 2, 3], "lengths": [1, 2, 3]}


@pytest.mark.parametrize(
    ("kind", "ranks", "function"),
    [
        (kind, ranks, function)
        for kind in CASES
        for ranks in RANKS_OF.get(kind, [2, 3])
        for function in FUNCTIONS_OF.get(kind, FUNCTIONS)
    ],
)
def test_results_equal_those_of_one_process(teams, kind, ranks, function):
    assert_same(teams(ranks), function, cases_of(kind, ranks))


@pytest.mark.parametrize("strategy", ["vectors", "products", "overlapped"])
def test_products_of_each_strategy_equal_those_of_one_process(teams, strategy):
    cases = [case for kind in ("lengths", "impossible or NaN", "underflow") for case in cases_of(kind, 3)]
    assert_same(teams(3), "product", cases, strategy=strategy)


def in_blocks(rank, *args):
    """The results where ranks pass three blocks of the batch on to each other, as they do with large batches."""
    with patch.object(sharded, "_ranked", lambda *_: [Cut("vectors", 3, 0.0)]):
        return on_rank(rank, *args)


@pytest.mark.parametrize("function", ["product", "marginals"])
def test_blocks_of_a_batch_equal_one_process(teams, function):
    cases = [chain(sizes, 3, batch=(5,), own=own) for sizes, own in itertools.product(SIZES[3][:3:2], [(), (5,)])]
    assert_same(teams(3), function, [*cases, *cases_of("lengths", 3)[:4]], run=in_blocks)


@pytest.mark.parametrize("layout", STRANGE)
def test_strided_operands_equal_one_process(teams, layout):
    cases = [chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix) for one_matrix in (True, False)]
    cases = [case._replace(p0=case.p0.expand(2, -1)) for case in cases]
    for function in "product", "viterbi":
        assert_same(teams(3), function, cases, layout)


def without_c(rank, *args):
    """The results as they are computed on a device for which there are no loops in C."""
    with patch.object(kernels, "in_c", lambda tensor: False):
        return on_rank(rank, *args)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_devices_without_c_equal_one_process(teams, function):
    cases = [chain((6, 0, 5), 3, batch=(3,), lengths=lengths) for lengths in (False, True)]
    assert_same(teams(3), function, cases, run=without_c)


LONG = (2300, 2100, 2400)


@pytest.mark.parametrize("function", ["product", "viterbi"])
@pytest.mark.parametrize("mixing", ["everywhere", "nowhere", "not before a boundary", "not after it"])
def test_long_chains_equal_one_process(teams, mixing, function):
    """Ranks begin early, and compute again what depends on how they began."""
    case = chain(LONG, 4, batch=(2,), one_matrix=False, zeros=0.0)
    start, stop = {
        "everywhere": (1, 1),
        "nowhere": (1, sum(LONG) - 1),
        "not before a boundary": (LONG[0] - 60, LONG[0]),
        "not after it": (LONG[0], LONG[0] + 60),
    }[mixing]
    case.bulk[start - 1 : stop - 1] = torch.eye(4, dtype=F64) + 1e-14
    case.x[:, start:stop] *= 1e-3
    case.x[:, start - 1, 2] += 20
    case.x[:, stop, 1] += 20
    ending_there = case._replace(lengths=torch.tensor([LONG[0], LONG[0] + 1]))
    assert_same(teams(3), function, [case, ending_there], strategy="overlapped")


def rescued(rank, case):
    with logchain.rescues() as seen:
        distributed.product(*case.of(rank))
    return seen.sequences


@pytest.mark.parametrize(("rank", "where"), [(0, 3), (1, 6), (2, 14)])
def test_sequences_that_underflow_are_reported_by_their_rank(teams, rank, where):
    assert teams(3).values(rescued, underflowing((6, 5, 7), where, torch.float32))[rank] == 1


@pytest.mark.parametrize("where", [0, 3, 4, 8, 13])
def test_an_infinite_weight_is_not_an_impossible_one(teams, where):
    case = chain((5, 4, 6), 3, one_matrix=False, zeros=0.0)
    case.bulk[where, 1, 1] = INF
    values = [found["log-partition"] for (found,) in teams(3).values(on_rank, "product", [case])]
    assert all(value.isnan() or value == INF for value in values)


def wanted_gradients(rank, case, wanted):
    """The gradients of two passes."""
    operands = [operand.requires_grad_(want) for operand, want in zip(case.of(rank), wanted[rank], strict=True)]
    value = distributed.product(*operands).sum()
    value.backward(retain_graph=True)
    value.backward()
    return [operand.grad for operand in operands]


X, BULK, P0 = (True, False, False), (False, True, False), (False, False, True)


@pytest.mark.parametrize("wanted", [[X] * 3, [BULK] * 3, [P0] * 3, [(True, False, True)] * 3, [X, BULK, P0]], ids=str)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_gradients_that_are_not_wanted_are_none(teams, wanted, one_matrix):
    case = chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix)
    leaves = [operand.detach().requires_grad_() for operand in case[:3]]
    gradients = torch.autograd.grad(2 * logchain.product(*leaves).sum(), leaves)
    for rank, found in enumerate(teams(3).values(wanted_gradients, case, wanted)):
        for name, gradient, whole, want in zip(GRADIENTS, found, gradients, wanted[rank], strict=True):
            torch.testing.assert_close(gradient, case.part(rank, name, whole) if want else None)


def in_unlike_processes(rank, *args):
    """The ranks differ in what has no meaning: their calls before, their threads and their default devices."""
    alone = [dist.new_group([each]) for each in range(3)][rank]
    for _ in range(rank):
        distributed.product(torch.zeros(2, 3), torch.ones(1, 3, 3), torch.ones(3), group=alone)
    torch.set_num_threads(1 + rank)
    torch.set_default_device("meta" if rank == 1 else None)
    try:
        return on_rank(rank, *args)
    finally:
        torch.set_default_device(None)
        torch.set_num_threads(1)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unlike_processes_equal_one_process(teams, function):
    assert_same(teams(3), function, [chain((4, 3, 5), 3, batch=(2,), lengths=True)], run=in_unlike_processes)


def in_groups(rank, whole, halves):
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    operands = whole.of(0) if rank == 0 else halves.of(rank - 1)
    return distributed.product(*operands, group=groups[rank > 0])


def test_two_groups_compute_at_once(teams):
    case = chain((4, 3), 3)
    for value in teams(3).values(in_groups, case._replace(sizes=(7,)), case):
        torch.testing.assert_close(value, logchain.product(*case[:3]))


def draws(rank, case, count, seed, apart=1):
    generator = torch.Generator().manual_seed(seed + apart * rank)  # only that of the first rank counts
    return distributed.sample(*case.of(rank), count, generator=generator, **case.options)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("one_matrix", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
def test_samples_are_of_the_posterior(teams, ranks, one_matrix, lengths):
    count = 20_000
    case = chain((4, 3, 4)[:ranks], 3, one_matrix=one_matrix, batch=(3,), lengths=lengths)
    case.x[0, 0] = -INF  # no states of an impossible sequence
    states = torch.cat(teams(ranks).values(draws, case, count, 5), -1)
    truth = logchain.marginals(*case[:3], transitions="full", **case.options)
    taken = torch.nn.functional.one_hot(states + 1, 4)[..., 1:].double()
    pairs = torch.einsum("sbvi,sbvj->bvij", taken[:, :, :-1], taken[:, :, 1:]) / count
    # five standard deviations of a share
    torch.testing.assert_close(taken.mean(0), truth.states, rtol=0, atol=2.5 / count**0.5)
    torch.testing.assert_close(pairs, truth.transitions, rtol=0, atol=2.5 / count**0.5)
    assert logchain.log_prob(*case[:3], states[:100], **case.options)[:, 1:].isfinite().all()


def test_samples_depend_on_the_first_generator_alone(teams):
    case = chain((4, 3), 3, batch=(2,))
    first, again, other = (
        torch.cat(teams(2).values(draws, case, 50, seed, apart), -1) for seed, apart in ((1, 1), (1, 2), (2, 1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_samples_of_ranks_are_independent(teams):
    """The same steps on two ranks, which the same numbers would make the same, but that one rank draws a state more."""
    case = chain((2000, 2000), 2, zeros=0.0, scale=0.0)
    first, second = teams(2).values(draws, case._replace(bulk=torch.ones(1, 2, 2, dtype=F64)), 1, 3)
    for further in (-1, 0, 1):
        assert 0.45 < (first.roll(further, -1) == second).double().mean() < 0.55


def peak(rank, sizes, c, function, options):
    x = torch.zeros(sizes[rank], c, requires_grad=function == "product")
    bulk, p0 = torch.full((1, c, c), 1 / c, requires_grad=x.requires_grad), torch.ones(c, requires_grad=x.requires_grad)

    def compute():
        if function == "marginals":
            return list(distributed.marginals(x, bulk, p0, **options)[:1])
        return torch.autograd.grad(distributed.product(x, bulk, p0, **options), (x, bulk, p0))

    return peak_bytes(compute)


@pytest.mark.parametrize(
    ("ranks", "c", "function", "strategies"),
    [
        (3, 8, "product", ["vectors", "products", "overlapped"]),
        (2, 16, "product", ["auto"]),
        (2, 16, "marginals", ["auto"]),
    ],
)
def test_a_rank_allocates_twice_its_own_operands(teams, ranks, c, function, strategies):
    """The messages that it keeps and the gradient of its x, however many variables the others hold."""
    slack = 2**17  # what does not depend on the number of variables: matrices, headers, the exchanged messages
    for strategy, large in itertools.product(strategies, range(ranks)):
        sizes = [100_000 if rank == large else 3000 for rank in range(ranks)]
        for found, size in zip(
            teams(ranks).values(peak, sizes, c, function, {"strategy": strategy}), sizes, strict=True
        ):
            assert 4 * size * c <= found <= 2 * 4 * size * c + slack


def bytes_sent(rank, case, strategy):
    sent = []

    def counted(collective, position):
        return lambda *args, **options: sent.append(args[position].nbytes) or collective(*args, **options)

    with (
        patch.object(dist, "all_gather", counted(dist.all_gather, 1)),
        patch.object(dist, "all_reduce", counted(dist.all_reduce, 0)),
    ):
        distributed.product(*(operand.requires_grad_() for operand in case.of(rank)), strategy=strategy).backward()
    return sum(sent)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("c", [8, 16, 40])
def test_ranks_send_at_most_four_matrices_and_messages(teams, ranks, c):
    """A header, messages and the counts, in float64."""
    assert max(teams(ranks).values(bytes_sent, chain((60, 50, 70)[:ranks], c), "auto")) <= 4 * 8 * (c * c + c)
