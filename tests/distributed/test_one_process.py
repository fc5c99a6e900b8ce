"""Every function of a chain on several ranks returns what one process returns, each rank for its own variables."""

import itertools
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import logchain
from logchain import distributed
from logchain.memory import peak_bytes
from tests.contract import of_steps
from tests.expected import assert_drawn
from tests.families import Chain
from tests.layouts import STRANGE, relaid

F64, INF, NAN = torch.float64, torch.inf, torch.nan
OFFSETS = torch.tensor([1e6, -1e6])[:, None, None]
NAMES = "x", "bulk", "p0"
GRADIENTS, CHANGES = [[f"{kind} of {name}" for name in NAMES] for kind in ("gradient", "change")]

# the numbers of variables of ranks; some have none, and the first of them too
SIZES = {
    1: [(5,), (1,), (7,)],
    2: [(5, 4), (1, 6), (7, 1), (0, 5), (6, 0), (1, 1)],
    3: [(4, 3, 5), (0, 4, 3), (3, 0, 4), (1, 1, 1), (2, 6, 0), (0, 5, 0)],
}

# the axis of variables, counted from the end, of results that have one
_OF_VARIABLES = {"gradient of x": -2, "change of x": -2, "posteriors": -2, "states": -1}
_OF_STEPS = "gradient of bulk", "change of bulk", "counts"


class Case(NamedTuple):
    """A chain as one process has it, the numbers of variables of ranks, and the layout of their parts, if any."""

    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor | None
    log_params: bool
    sizes: tuple[int, ...]
    layout: str | None = None

    @property
    def options(self) -> dict:
        return {"log_params": self.log_params, "lengths": self.lengths}

    @property
    def paths(self) -> Tensor:
        """The best path, and one that may be impossible [2, *B, v]; past a sequence's end is no state at all."""
        best = logchain.viterbi(*self[:3], **self.options).states
        ends = best.shape[-1] if self.lengths is None else self.lengths[..., None]
        inside, paths = torch.arange(best.shape[-1]) < ends, torch.stack([best, best.roll(1, -1).clamp(min=0)], -1)
        return torch.where(inside[..., None], paths, -100).movedim(-1, 0)  # of strange strides

    def of(self, rank: int) -> tuple[Tensor, ...]:
        parts = self.part(rank, "gradient of x", self.x), self.part(rank, "gradient of bulk", self.bulk), self.p0
        return tuple(part.clone() if self.layout is None else relaid(part, self.layout) for part in parts)

    def part(self, rank: int, name: str, result: Tensor) -> Tensor:
        """A rank's part of a result, by its name: that of its variables, or of the steps that lead into them."""
        start, stop = sum(self.sizes[:rank]), sum(self.sizes[: rank + 1])
        if name in _OF_VARIABLES:
            return result.narrow(_OF_VARIABLES[name], start, stop - start)
        if name == "transitions" or (name in _OF_STEPS and self.bulk.shape[-3] > 1):
            return result[..., max(0, start - 1) : max(0, stop - 1), :, :]
        return result


def chain(
    sizes, c, *, batch=(), own=(), one_matrix=True, log_params=False, dtype=F64, lengths=False, zeros=0.2, scale=2.0,
    change=lambda x: x, layout=None,
) -> Case:  # fmt: skip
    """A random chain with zeros among its weights; `own` are the batch axes of `bulk`, and `change` is made to x."""
    v, generator = sum(sizes), torch.Generator().manual_seed(sum(sizes) + c)
    x = scale * torch.randn(*batch, v, c, generator=generator, dtype=F64)
    bulk = torch.rand(*own, 1 if one_matrix else v - 1, c, c, generator=generator, dtype=F64)
    bulk = bulk * (torch.rand(bulk.shape, generator=generator) > zeros)
    p0 = torch.rand(c, generator=generator, dtype=F64)
    bulk, p0 = (bulk.log(), p0.log()) if log_params else (bulk, p0)
    p0 = p0 if layout is None else p0.expand(*batch, -1)
    ends = torch.randint(1, v + 1, batch, generator=generator) if lengths else None
    return Case(change(x).to(dtype), bulk.to(dtype), p0.to(dtype), ends, log_params, tuple(sizes), layout)


def differentiated(function, operands, *args, **options):
    leaves = [operand.detach().requires_grad_() for operand in operands]
    value = function(*leaves, *args, **options)
    weight = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype, device="cpu").view(value.shape)
    return value.detach(), torch.autograd.grad(value, leaves, weight)


def product(package, operands, paths, **options):
    value, gradients = differentiated(package.product, operands, **options)
    without = package.product(*operands, **options)
    return {"log-partition": value, "without gradients": without, **dict(zip(GRADIENTS, gradients, strict=True))}


def marginals(package, operands, paths, **options):
    plain, counted, full = (package.marginals(*operands, transitions=kind, **options) for kind in (None, "sum", "full"))
    assert plain.transitions is None
    transitions = {"counts": counted.transitions, "transitions": full.transitions}
    return {"log-partition": plain.log_norm, "posteriors": plain.states, **transitions}


def log_prob(package, operands, paths, **options):
    value, changes = differentiated(package.log_prob, operands, paths, **options)  # their terms cancel
    return {"log-probability": value, **dict(zip(CHANGES, changes, strict=True))}


# what is compared of each function, by name
FUNCTIONS = {
    "product": product,
    "marginals": marginals,
    "viterbi": lambda of, operands, _, **options: of.viterbi(*operands, **options)._asdict(),
    "entropy": lambda of, operands, _, **options: {"entropy": of.entropy(*operands, **options)},
    "log_prob": log_prob,
}


def on_rank(rank, function, cases, paths, **options):
    results = []
    for case, path in zip(cases, paths, strict=True):  # of which many matrices may be one on each rank
        settings = {"one_matrix": None if case.bulk.shape[-3] == 1 else False, **case.options, **options}
        results.append(FUNCTIONS[function](distributed, case.of(rank), case.part(rank, "states", path), **settings))
    return results


def assert_same(team, function, cases, run=on_rank):
    """Ranks have the results of one process; what is not of a rank's variables is the same on all, bit by bit."""
    paths = [case.paths for case in cases]
    by_rank = team.values(run, function, cases, paths)
    for index, case in enumerate(cases):
        for name, expected in FUNCTIONS[function](logchain, case[:3], paths[index], **case.options).items():
            for rank, results in enumerate(by_rank):
                found, part = results[index][name], case.part(rank, name, expected)
                rtol, atol = tolerance(case, name, part.dtype)
                torch.testing.assert_close(found, part, rtol=rtol, atol=atol, equal_nan=True)
                if part is expected:
                    assert torch.equal(found.nan_to_num(), by_rank[0][index][name].nan_to_num())


def tolerance(case, name, dtype):
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    bound = 2 * of_steps(sum(case.sizes), case.x.shape[-1], 20.0, dtype=case.x.dtype)
    match name:
        case "log-partition" | "without gradients" | "score":
            return 2 * eps, bound
        case "log-probability":  # a difference too
            largest = case.x.double().abs().nan_to_num(posinf=0.0).sum(-2).max() if case.x.numel() else 0.0
            return 2 * eps, bound + 4 * torch.finfo(F64).eps * float(largest)
        case "entropy":  # a difference of two numbers of the size of the log-partition
            return (1e-11, 1e-8) if dtype == F64 else (0, 1e-5)
        case "states":
            return 0, 0
        case "change of x" | "change of bulk" | "change of p0":  # each is a count, over a weight, less another
            weights = torch.cat([case.bulk.double().flatten(), case.p0.double().flatten()])
            largest = sum(case.sizes) * (1.0 if case.log_params else 1 / float(weights[weights > 0].min()))
            return 2 * bound, largest * max(2 * bound, eps)
    return max(2 * bound, eps), case.x.shape[-1] * eps


def degenerate(sizes, **options):
    """Sequences that are impossible or unknown on one rank or another, and one that is neither."""
    case = chain(sizes, 3, batch=(5,), zeros=0.0, **options)
    for sequence, value in enumerate((-INF, NAN, -INF, NAN)):
        case.x[sequence, (sequence * (sum(sizes) - 1)) // 3] = value
    return case


def underflowing(sizes, where, dtype):
    """States that lie a thousand nats below the others are those that count, at a step before or after a boundary."""
    case = chain({1: (18,), 2: (6, 12), 3: (6, 5, 7)}[len(sizes)], 3, dtype=dtype, zeros=0.0)
    case.x[where] = torch.tensor([0.0, -900.0, -1000.0])
    case.x[where + 2] = torch.tensor([-INF, 0.0, -50.0])
    case.bulk[..., 0, 1:] = 0  # what is in state 0 stays there, and is lost
    return case


def each(make, **options):  # of all combinations
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
    "underflow": each(underflowing, where=[3, 4, 5, 9, 10, 11], dtype=[torch.float32, F64]),
}

# each kind for all functions, but for these
FUNCTIONS_OF = {"ties": ["viterbi"], "strides": ["product", "viterbi", "log_prob"]}
ROWS = [(kind, function) for kind in CASES for function in FUNCTIONS_OF.get(kind, FUNCTIONS)]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(("kind", "function"), ROWS)
def test_results_equal_those_of_one_process(teams, kind, ranks, function):
    """Each chain of a kind is divided among ranks in another way."""
    divided = zip(CASES[kind], itertools.cycle(SIZES[ranks]), strict=False)
    assert_same(teams(ranks), function, [make(sizes) for make, sizes in divided])


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


# parts that are longer than a guess
LONG = (230, 210, 240)
STUCK = {
    "identity": torch.eye(4, dtype=F64) + 1e-14,
    "permutation": torch.eye(4, dtype=F64).roll(1, 0),
    "blocks": torch.block_diag(*[torch.full((2, 2), 0.5, dtype=F64)] * 2),
    "periodic": torch.full((2, 2), 0.5, dtype=F64).kron(1 - torch.eye(2, dtype=F64)),
    "sticky": torch.eye(4, dtype=F64) + 0.001,
}


def stuck(matrix, start, stop, dtype=F64):
    """A chain that mixes but for a stretch of steps, whose message depends on how it began."""
    case = chain(LONG, 4, batch=(2,), one_matrix=False, zeros=0.0)
    case.bulk[start - 1 : stop - 1] = STUCK[matrix]
    case.x[:, start:stop] *= 1e-3
    case.x[:, start - 1, 2] += 20
    case.x[:, stop, 1] += 20
    return case._replace(**{name: getattr(case, name).to(dtype) for name in ("x", "bulk", "p0")})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("start", "stop"),
    [(1, 1), (1, sum(LONG) - 1), (LONG[0] - 90, LONG[0]), (LONG[0], LONG[0] + 90)],
    ids=["nowhere", "everywhere", "before a boundary", "after a boundary"],
)
def test_long_chains_equal_one_process(teams, start, stop, function):
    """Ranks compute again what depends on how they began, where chains do not mix."""
    cases = [stuck(matrix, start, stop) for matrix in STUCK]
    ending = cases[0]._replace(lengths=torch.tensor([LONG[0], LONG[0] + 1]))
    impossible = stuck("identity", 1, 1)._replace(lengths=torch.full((2,), LONG[0] + 5))
    impossible.x[:, LONG[0] + 2] = -INF  # early in the second part, where sequences end
    narrow = stuck("sticky", start, stop, torch.float32)
    if function == "entropy":
        narrow.x.mul_(8)  # float32 holds the entropies of a sharp chain to 1e-5
    assert_same(teams(3), function, [*cases, ending, narrow, impossible])


def refused(rank, case, function):
    with logchain.rescues() as seen:
        FUNCTIONS[function](distributed, case.of(rank), None, one_matrix=False, **case.options)
    return seen.boundaries, seen.sequences


@pytest.mark.parametrize("function", ["product", "viterbi"])
def test_only_boundaries_that_do_not_mix_are_recomputed(teams, function):
    assert {boundaries for boundaries, _ in teams(3).values(refused, stuck("identity", 1, 1), function)} == {0}
    case = stuck("permutation", 1, sum(LONG) - 1)
    assert all(boundaries > 0 for boundaries, _ in teams(3).values(refused, case, function)[1:])
    ended = case._replace(lengths=torch.tensor([LONG[0] - 1, LONG[0]]))
    assert {boundaries for boundaries, _ in teams(3).values(refused, ended, function)} == {0}


@pytest.mark.parametrize(("rank", "where"), [(0, 3), (1, 6), (2, 14)])
def test_sequences_that_underflow_are_reported_by_their_rank(teams, rank, where):
    case = underflowing((6, 5, 7), where, torch.float32)
    case = case._replace(bulk=case.bulk.expand(17, 3, 3))
    assert teams(3).values(refused, case, "product")[rank][1] == 2  # with gradients and without


@pytest.mark.parametrize("where", [0, 3, 4, 8, 13])
def test_an_infinite_weight_is_not_an_impossible_one(teams, where):
    case = chain((5, 4, 6), 3, one_matrix=False, zeros=0.0)
    case.bulk[where, 1, 1] = INF
    for [results] in teams(3).values(on_rank, "product", [case], [case.x[:, 0]]):
        assert results["log-partition"].isnan() or results["log-partition"] == INF


def wanted_gradients(rank, case, wanted, function, args):
    leaves = [leaf.requires_grad_(name in wanted[rank]) for name, leaf in zip(NAMES, case.of(rank), strict=True)]
    value = getattr(distributed, function)(*leaves, *(case.part(rank, "states", path) for path in args)).sum()
    value.backward(retain_graph=True)
    value.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", ["product", "log_prob"])
@pytest.mark.parametrize("wanted", [["x"] * 3, ["bulk"] * 3, [("x", "p0")] * 3, ["x", "bulk", "p0"]], ids=str)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_gradients_that_are_not_wanted_are_none(teams, wanted, one_matrix, name):
    case = chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix)
    args, leaves = [case.paths[0]] if name == "log_prob" else [], [one.clone().requires_grad_() for one in case[:3]]
    expected = torch.autograd.grad(2 * getattr(logchain, name)(*leaves, *args).sum(), leaves)
    for rank, found in enumerate(teams(3).values(wanted_gradients, case, wanted, name, args)):
        for of, gradient, whole in zip(NAMES, found, expected, strict=True):
            part = case.part(rank, f"gradient of {of}", whole) if of in wanted[rank] else None
            torch.testing.assert_close(gradient, part)


def draws(rank, case, count, seed, apart=1, backend="auto"):
    generator = torch.Generator().manual_seed(seed + apart * rank)  # only that of the first rank counts
    with logchain.kernels.use(backend, device="cpu"):
        return distributed.sample(*case.of(rank), count, generator=generator, **case.options)


@pytest.mark.parametrize(
    ("ranks", "one_matrix", "lengths", "backend"),
    [
        (1, True, False, "auto"),
        (2, True, True, "plain"),
        (2, False, False, "auto"),
        (3, True, False, "plain"),
        (3, False, True, "auto"),
    ],
)
def test_samples_are_of_the_posterior(teams, ranks, one_matrix, lengths, backend):
    case = chain((4, 3, 4)[:ranks], 3, one_matrix=one_matrix, batch=(3,), lengths=lengths)
    case.x[0, 0] = -INF  # no states of an impossible sequence
    states = torch.cat(teams(ranks).values(draws, case, 20_000, 5, 1, backend), -1)
    assert_drawn(Chain(*case[:3]), states, case.lengths)


def test_samples_are_by_the_first_generator_and_differ_between_ranks(teams):
    """The same steps on two ranks, which the same numbers would make the same, but that one rank draws a state more."""
    case = chain((2000, 2000), 2, zeros=0.0, scale=0.0)._replace(bulk=torch.ones(1, 2, 2, dtype=F64))
    first, again, other = (teams(2).values(draws, case, 1, seed, apart) for seed, apart in ((1, 1), (1, 2), (2, 1)))
    for rank in range(2):
        assert torch.equal(first[rank], again[rank]) and not torch.equal(first[rank], other[rank])
    for further in (-1, 0, 1):
        assert 0.45 < (first[0].roll(further, -1) == first[1]).double().mean() < 0.55


def peak(rank, sizes, c):
    leaves = [torch.full(shape, 1 / c, requires_grad=True) for shape in ((sizes[rank], c), (1, c, c), (c,))]
    return peak_bytes(lambda: torch.autograd.grad(distributed.product(*leaves), leaves))


@pytest.mark.parametrize(("ranks", "c"), [(2, 16), (3, 8)])
def test_a_rank_allocates_twice_its_own_operands(teams, ranks, c):
    """The messages that it keeps and the gradient of its x, however many variables the others hold."""
    slack = 2**17  # what does not depend on the number of variables: matrices and the exchanged messages
    for sizes in {*itertools.permutations([100_000, *[3000] * (ranks - 1)])}:
        for found, size in zip(teams(ranks).values(peak, sizes, c), sizes, strict=True):
            assert 4 * size * c <= found <= 2 * 4 * size * c + slack
