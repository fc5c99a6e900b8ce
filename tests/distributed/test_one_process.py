"""Every function of a chain on several ranks returns what one process returns, each rank for its own variables."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import logchain
from logchain import distributed
from logchain.memory import peak_bytes
from tests.contract import of_steps
from tests.distributed.chains import chain
from tests.layouts import STRANGE

F64, INF, NAN = torch.float64, torch.inf, torch.nan
OFFSETS = torch.tensor([1e6, -1e6])[:, None, None]
GRADIENTS = "gradient of x", "gradient of bulk", "gradient of p0"

# the numbers of variables of ranks; some have none, and the first of them too
SIZES = {
    2: [(5, 4), (1, 6), (7, 1), (0, 5), (6, 0), (1, 1)],
    3: [(4, 3, 5), (0, 4, 3), (3, 0, 4), (1, 1, 1), (2, 6, 0), (0, 5, 0)],
}


def product(package, *operands, **options):
    """The log-partition with and without gradients, of weights that differ by sequence."""
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
    return dict(zip(("path", "score"), package.viterbi(*operands, **options), strict=True))


FUNCTIONS = {
    "product": product,
    "marginals": marginals,
    "viterbi": viterbi,
    "entropy": lambda package, *operands, **options: {"entropy": package.entropy(*operands, **options)},
}


def on_rank(rank, function, cases, **options):
    found = []
    for case in cases:
        # ranks of one matrix each cannot know whether it is the same step after step
        known = {} if case.bulk.shape[-3] == 1 else {"one_matrix": False}
        found.append(FUNCTIONS[function](distributed, *case.of(rank), **known, **case.options, **options))
    return found


def assert_same(team, function, cases, run=on_rank):
    """Ranks have the results of one process; what is not of a rank's variables is the same on all, bit by bit."""
    by_rank = team.values(run, function, cases)
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


def degenerate(sizes, **options):
    """Sequences that are impossible or unknown on one rank or another, and one that is neither."""
    case = chain(sizes, 3, batch=(5,), zeros=0.0, **options)
    for sequence, value in enumerate((-INF, NAN, -INF, NAN)):
        case.x[sequence, (sequence * (sum(sizes) - 1)) // 3] = value
    return case


def underflowing(sizes, where, dtype):
    """States that lie a thousand nats below the others are those that count, at a step before or after a boundary."""
    case = chain({2: (6, 12), 3: (6, 5, 7)}[len(sizes)], 3, dtype=dtype, zeros=0.0)
    # no step leads from state 0 to 1: the last rank, which may scan from the end, loses what does not end in 1
    case.x[where] = torch.tensor([0.0, -900.0, -1000.0]).roll(int(where >= 14))
    case.x[where + 2 if where < 10 else where - 2] = torch.tensor([-INF, 0.0, -50.0])
    case.bulk[..., 0, 1] = 0
    return case


def each(make, **options):
    """The chains of all combinations of options."""
    return [partial(make, **dict(zip(options, row, strict=True))) for row in itertools.product(*options.values())]


BOTH = True, False
CASES = {
    "one matrix": each(chain, c=[3, 3, 3, 3, 3, 3, 1]),
    "a matrix per step": each(chain, c=[3, 3, 3, 3, 3, 3, 1], one_matrix=[False], log_params=[True]),
    "lengths": each(chain, c=[3], batch=[(3,)], own=[(), (3,)], lengths=[True], one_matrix=BOTH),
    "batch axes": [
        *each(chain, c=[3], batch=[(2, 5)], own=[(2, 1)], lengths=[True], one_matrix=BOTH),
        *each(chain, c=[3], batch=[(4, 3)], own=[(), (3,)], one_matrix=BOTH),
        *each(chain, c=[3], batch=[(0,)], one_matrix=BOTH),
    ],
    "dtypes": each(chain, c=[2, 16, 33], batch=[(2,)], dtype=[torch.float32, F64, torch.bfloat16]),
    "ties": each(chain, c=[3], batch=[(), (3,)], lengths=BOTH, one_matrix=BOTH, log_params=BOTH, change=[torch.round]),
    "strides": each(chain, c=[3], batch=[(2,)], layout=STRANGE, one_matrix=BOTH),
    "offsets": each(chain, c=[3], batch=[(2,)], dtype=[torch.float32, F64], change=[lambda x: x + OFFSETS]),
    "impossible or NaN": each(degenerate, lengths=[False, True, True, False]),
    "underflow": each(underflowing, where=[3, 5, 6, 10, 11, 14], dtype=[torch.float32, F64]),
}


def cases_of(kind, ranks):
    """The chains of a kind, each for another division among ranks."""
    return [make(sizes) for make, sizes in zip(CASES[kind], itertools.cycle(SIZES[ranks]), strict=False)]


# each kind for all functions, but for these
FUNCTIONS_OF = {"ties": ["viterbi"], "strides": ["product", "viterbi"], "underflow": ["product", "viterbi"]}
ROWS = [(kind, function) for kind in CASES for function in FUNCTIONS_OF.get(kind, FUNCTIONS)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("kind", "function"), ROWS)
def test_results_equal_those_of_one_process(teams, kind, ranks, function):
    assert_same(teams(ranks), function, cases_of(kind, ranks))


@pytest.mark.parametrize("strategy", ["vectors", "products", "overlapped"])
def test_products_of_each_strategy_equal_those_of_one_process(teams, strategy):
    cases = [case for kind in ("lengths", "impossible or NaN", "underflow") for case in cases_of(kind, 3)]
    assert_same(teams(3), "product", cases, partial(on_rank, strategy=strategy))


@pytest.mark.parametrize(("size", "lengths"), [(200, False), (100, True)])
def test_large_batches_equal_one_process(teams, size, lengths):
    """Ranks pass blocks of the batch on to each other."""
    case = chain((size,) * 3, 200, batch=(12,), lengths=lengths)
    assert_same(teams(3), "product", [case], partial(on_rank, strategy="vectors"))


def in_torch(rank, *args):
    """The results by torch operations, as on a device that has no kernels."""
    with logchain.kernels.use("plain", device="cpu"):
        return on_rank(rank, *args)


def in_unlike_processes(rank, *args):
    """The ranks differ in what has no meaning: their calls before, their threads and their default devices."""
    *alone, together = [dist.new_group(members) for members in ([0], [1], [2], [0, 1, 2])]
    operands = chain((5,), 3)[:3]
    for _ in range(rank):
        value = distributed.product(*operands, group=alone[rank])
        torch.testing.assert_close(value, logchain.product(*operands))
    torch.set_num_threads(1 + rank)
    torch.set_default_device("meta" if rank == 1 else None)
    try:
        return on_rank(rank, *args, group=together)
    finally:
        torch.set_default_device(None)
        torch.set_num_threads(1)


@pytest.mark.parametrize("run", [in_torch, in_unlike_processes])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_processes_equal_one_process(teams, function, run):
    cases = [chain((4, 0, 5), 3, batch=(2,), lengths=lengths) for lengths in (False, True)]
    assert_same(teams(3), function, cases, run)


LONG = (2300, 2100, 2400)


@pytest.mark.parametrize("function", ["product", "viterbi"])
@pytest.mark.parametrize(
    ("start", "stop"),
    [(1, 1), (1, sum(LONG) - 1), (LONG[0] - 60, LONG[0]), (LONG[0], LONG[0] + 60)],
    ids=["nowhere", "everywhere", "before a boundary", "after a boundary"],
)
def test_long_chains_equal_one_process(teams, start, stop, function):
    """Ranks begin early, and compute again what depends on how they began, where chains do not mix."""
    case = chain(LONG, 4, batch=(2,), one_matrix=False, zeros=0.0)
    case.bulk[start - 1 : stop - 1] = torch.eye(4, dtype=F64) + 1e-14
    case.x[:, start:stop] *= 1e-3
    case.x[:, start - 1, 2] += 20
    case.x[:, stop, 1] += 20
    ending_there = case._replace(lengths=torch.tensor([LONG[0], LONG[0] + 1]))
    assert_same(teams(3), function, [case, ending_there], partial(on_rank, strategy="overlapped"))


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


@pytest.mark.parametrize("wanted", [[X] * 3, [BULK] * 3, [(True, False, True)] * 3, [X, BULK, P0]], ids=str)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_gradients_that_are_not_wanted_are_none(teams, wanted, one_matrix):
    case = chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix)
    leaves = [operand.detach().requires_grad_() for operand in case[:3]]
    gradients = torch.autograd.grad(2 * logchain.product(*leaves).sum(), leaves)
    for rank, found in enumerate(teams(3).values(wanted_gradients, case, wanted)):
        for name, gradient, whole, want in zip(GRADIENTS, found, gradients, wanted[rank], strict=True):
            torch.testing.assert_close(gradient, case.part(rank, name, whole) if want else None)


def draws(rank, case, count, seed, apart=1):
    generator = torch.Generator().manual_seed(seed + apart * rank)  # only that of the first rank counts
    return distributed.sample(*case.of(rank), count, generator=generator, **case.options)


@pytest.mark.parametrize(
    ("ranks", "one_matrix", "lengths"), [(2, True, True), (2, False, False), (3, True, False), (3, False, True)]
)
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


def test_samples_are_by_the_first_generator_and_differ_between_ranks(teams):
    """The same steps on two ranks, which the same numbers would make the same, but that one rank draws a state more."""
    case = chain((2000, 2000), 2, zeros=0.0, scale=0.0)._replace(bulk=torch.ones(1, 2, 2, dtype=F64))
    first, again, other = (teams(2).values(draws, case, 1, seed, apart) for seed, apart in ((1, 1), (1, 2), (2, 1)))
    for rank in range(2):
        assert torch.equal(first[rank], again[rank]) and not torch.equal(first[rank], other[rank])
    for further in (-1, 0, 1):
        assert 0.45 < (first[0].roll(further, -1) == first[1]).double().mean() < 0.55


def peak(rank, sizes, c, strategy):
    operands = torch.zeros(sizes[rank], c), torch.full((1, c, c), 1 / c), torch.ones(c)
    leaves = [operand.requires_grad_() for operand in operands]
    return peak_bytes(lambda: torch.autograd.grad(distributed.product(*leaves, strategy=strategy), leaves))


@pytest.mark.parametrize(
    ("ranks", "c", "strategy"), [(2, 16, "auto"), (3, 8, "vectors"), (3, 8, "products"), (3, 8, "overlapped")]
)
def test_a_rank_allocates_twice_its_own_operands(teams, ranks, c, strategy):
    """The messages that it keeps and the gradient of its x, however many variables the others hold."""
    slack = 2**17  # what does not depend on the number of variables: matrices, headers, the exchanged messages
    for large in range(ranks):
        sizes = [100_000 if rank == large else 3000 for rank in range(ranks)]
        for found, size in zip(teams(ranks).values(peak, sizes, c, strategy), sizes, strict=True):
            assert 4 * size * c <= found <= 2 * 4 * size * c + slack
