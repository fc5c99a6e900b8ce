"""The log-partition of a chain on several ranks is that of one process, and so are the gradients of every shard."""

import itertools

import pytest
import torch

import logchain
from logchain import distributed
from tests.contract import of_steps
from tests.distributed.chains import Case, chain

F32, F64 = torch.float32, torch.float64
STRATEGIES = ["vectors", "products", "overlapped", "auto"]

# the numbers of variables of two, three and four ranks; some have none, and the first of them too
SIZES = {
    1: [(7,)],
    2: [(5, 4), (1, 6), (7, 1), (0, 5), (6, 0), (1, 1)],
    3: [(4, 3, 5), (0, 4, 3), (3, 0, 4), (1, 1, 1), (2, 6, 0), (0, 5, 0)],
    4: [(3, 4, 2, 5), (0, 3, 0, 4), (1, 1, 1, 1), (4, 0, 0, 2), (2, 5, 3, 0)],
}


def differentiated(rank: int, case: Case, strategy: str = "auto"):
    """The log-partition and the gradients of x, bulk and p0 for weights that differ by sequence."""
    x, bulk, p0 = (operand.requires_grad_() for operand in case.of(rank))
    value = distributed.product(x, bulk, p0, strategy=strategy, **case.options)
    weighted(value).backward()
    return value.detach(), x.grad, bulk.grad, p0.grad


def weighted(value: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
    return (value * weight)[value != -torch.inf].sum()


def assert_equal(team, case: Case, strategy: str, run=differentiated) -> None:
    operands = [operand.clone().requires_grad_() for operand in case[:3]]
    value = logchain.product(*operands, **case.options)
    weighted(value).backward()
    x, bulk, p0 = (operand.grad for operand in operands)
    v, c, dtype = sum(case.sizes), x.shape[-1], value.dtype
    bound = 2 * of_steps(v, c, 20.0, dtype=dtype)
    results = team.values(run, case, strategy)
    for rank, (found, *gradients) in enumerate(results):
        assert found.dtype == dtype
        torch.testing.assert_close(found, value.detach(), rtol=2 * torch.finfo(dtype).eps, atol=bound, equal_nan=True)
        assert torch.equal(found, results[0][0]) or found.isnan().any()
        expected = x[..., case.variables(rank), :], bulk[..., case.matrices(rank), :, :], p0
        for one, other in zip(gradients, expected, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=2 * bound, atol=c * torch.finfo(dtype).eps, equal_nan=True)


def all_of(ranks: int, **options):
    for seed, (sizes, c) in enumerate(itertools.product(SIZES[ranks], [1, 3])):
        yield chain(sizes, c, seed=seed, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_matrix(teams, ranks, strategy):
    for case in all_of(ranks):
        assert_equal(teams(ranks), case, strategy)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_matrix_for_each_step(teams, ranks, strategy):
    for case in all_of(ranks, one_matrix=False, log_params=True):
        counts = [len(range(*case.matrices(rank).indices(99))) for rank in range(ranks)]
        if set(counts) != {1}:  # which would be one matrix for all steps
            assert_equal(teams(ranks), case, strategy)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_batches_with_lengths(teams, ranks, strategy, one_matrix):
    batches = [((3,), (), True), ((3,), (3,), True), ((2, 5), (2, 1), True), ((4, 3), (), False), ((4, 3), (3,), False)]
    for seed, (batch, own, lengths) in enumerate(batches):
        for sizes in SIZES[ranks][:3]:
            assert_equal(
                teams(ranks),
                chain(sizes, 3, batch=batch, own=own, lengths=lengths, one_matrix=one_matrix, seed=seed),
                strategy,
            )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
def test_dtypes_and_states(teams, ranks, dtype):
    for c, strategy in itertools.product([2, 16, 33], STRATEGIES[:2]):
        case = chain((11, 9, 13)[:ranks], c, dtype=dtype, batch=(2,))
        if dtype == torch.bfloat16:  # gradients are rounded to it
            for value, *_ in teams(ranks).values(differentiated, case, strategy):
                one = logchain.product(*case[:3])
                torch.testing.assert_close(value, one, rtol=1e-6, atol=1e-4)
        else:
            assert_equal(teams(ranks), case, strategy)


LONG = (2300, 2100, 2400)


def walked_in_turn(rank: int, case: Case) -> tuple[bool, int]:
    """Whether the ranks walked in turn, and how many boundaries they refused."""
    from logchain.distributed.products import Products
    from logchain.distributed.vectors import Vectors

    in_turn, kept = [], [(kind, kind.forward) for kind in (Products, Vectors)]
    for kind, forward in kept:
        kind.forward = lambda self, forward=forward: in_turn.append(self) or forward(self)
    try:
        with logchain.rescues() as seen:
            differentiated(rank, case, "overlapped")
    finally:
        for kind, forward in kept:
            kind.forward = forward
    return len(in_turn) > 0, seen.boundaries


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("one_matrix", [True, False])
def test_stretches_that_forget_are_walked_at_once(teams, ranks, one_matrix):
    case = chain(LONG[:ranks], 4, one_matrix=one_matrix, batch=(2,), zeros=0.0)
    assert_equal(teams(ranks), case, "overlapped")
    assert teams(ranks).values(walked_in_turn, case) == [(False, 0)] * ranks


def test_lengths_end_on_ranks_that_begin_early(teams):
    case = chain(LONG, 4, batch=(4,), zeros=0.0)
    case = case._replace(lengths=torch.tensor([1, 2300, 2301, 6800]))
    assert_equal(teams(3), case, "overlapped")
    assert teams(3).values(walked_in_turn, case) == [(False, 0)] * 3


def test_stretches_that_remember_are_walked_in_turn(teams):
    case = chain(LONG, 4, zeros=0.0)
    remembers = case._replace(bulk=torch.eye(4, dtype=F64)[None] + 1e-14)
    assert_equal(teams(3), remembers, "overlapped")
    assert teams(3).values(walked_in_turn, remembers) == [(True, 0)] * 3


@pytest.mark.parametrize("behind", [True, False])
def test_a_boundary_that_fails_is_found(teams, behind):
    """The chain forgets but around a boundary, and there only on one side: forward or backward messages are wrong."""
    case = chain(LONG, 4, one_matrix=False, zeros=0.0)
    bulk, start = case.bulk.clone(), LONG[0]
    part = slice(start - 1, start + 60) if behind else slice(start - 60, start - 1)
    bulk[part] = torch.eye(4, dtype=F64) + 1e-14
    hard = case._replace(bulk=bulk, x=case.x / 8)
    assert_equal(teams(3), hard, "overlapped")
    assert all(refused > 0 for _, refused in teams(3).values(walked_in_turn, hard))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_impossible_on_one_rank_is_so_on_all(teams, strategy):
    case = chain((5, 4, 6), 3, batch=(3,))
    x = case.x.clone()
    x[0, 2], x[1, 7], x[2, 12] = -torch.inf, -torch.inf, -torch.inf
    for rank, (value, *gradients) in enumerate(teams(3).values(differentiated, case._replace(x=x), strategy)):
        assert (value == -torch.inf).all(), rank
        assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", [1, 6, 11])
def test_nan_stays_in_its_sequence(teams, strategy, where):
    case = chain((5, 4, 6), 3, batch=(2,), own=(2,), zeros=0.0)
    x = case.x.clone()
    x[0, where] = torch.nan
    clean = logchain.product(case.x[1:], case.bulk[1:], case.p0)
    for value, grad_x, grad_bulk, grad_p0 in teams(3).values(differentiated, case._replace(x=x), strategy):
        assert value[0].isnan() and torch.allclose(value[1:], clean)
        assert grad_x[0].isnan().all() and grad_x[1].isfinite().all()
        assert grad_bulk[0].isnan().any() and grad_bulk[1].isfinite().all() and grad_p0.isnan().any()


def value_of(rank: int, case: Case, strategy: str) -> torch.Tensor:
    return distributed.product(*case.of(rank), strategy=strategy, **case.options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", [0, 3, 4, 8, 13])
def test_an_infinite_weight_is_never_taken_for_an_impossible_one(teams, strategy, where):
    case = chain((5, 4, 6), 3, one_matrix=False, zeros=0.0)
    bulk = case.bulk.clone()
    bulk[where, 1, 1] = torch.inf
    values = teams(3).values(value_of, case._replace(bulk=bulk), strategy)
    assert all(value.isnan() or value == torch.inf for value in values), values


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_sequences_that_underflow(teams, strategy, dtype):
    """At the boundary, before and behind it: states that lie a thousand nats below the others are those that count."""
    case = chain((6, 5, 7), 3, dtype=dtype, zeros=0.0)
    for where in (3, 5, 6, 10, 11):
        x = case.x.clone()
        x[where] = torch.tensor([0.0, -900.0, -1000.0])
        bulk = case.bulk.clone()
        x[where + 2 if where < 10 else where - 2] = torch.tensor([-torch.inf, 0.0, -50.0])
        bulk[..., 0, 1] = 0
        assert_equal(teams(3), case._replace(x=x, bulk=bulk), strategy)


def test_huge_offsets(teams):
    case = chain((6, 5), 3, batch=(2,))
    x = case.x + torch.tensor([1e6, -1e6])[:, None, None]
    one = logchain.product(x, case.bulk, case.p0)
    for value, *_ in teams(2).values(differentiated, case._replace(x=x), "auto"):
        torch.testing.assert_close(value, one, rtol=1e-15, atol=1e-8)


def strided(rank: int, case: Case, strategy: str):
    """The same with operands that are expanded, transposed and cut out of others."""
    x, bulk, p0 = case.of(rank)
    x = torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0].detach().requires_grad_()
    bulk = bulk.mT.contiguous().mT.detach().requires_grad_()
    p0 = p0.detach().requires_grad_()
    value = distributed.product(x, bulk, p0.expand(2, -1), strategy=strategy, **case.options)
    weighted(value).backward()
    return value.detach(), x.grad, bulk.grad, p0.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_any_layout(teams, strategy, one_matrix):
    assert_equal(teams(3), chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix), strategy, strided)


def some_gradients(rank: int, case: Case, which: tuple[bool, ...]):
    operands = [operand.requires_grad_(need) for operand, need in zip(case.of(rank), which, strict=True)]
    value = distributed.product(*operands, **case.options)
    value.sum().backward()
    return [operand.grad for operand in operands]


@pytest.mark.parametrize(
    "which", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_gradients_that_are_not_needed_are_none(teams, which, one_matrix):
    case = chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix)
    everything = teams(3).values(some_gradients, case, (True, True, True))
    for found, whole in zip(teams(3).values(some_gradients, case, which), everything, strict=True):
        for one, other, need in zip(found, whole, which, strict=True):
            assert torch.allclose(one, other) if need else one is None


def without_gradients(rank: int, case: Case) -> torch.Tensor:
    with torch.no_grad():
        return distributed.product(*(operand.requires_grad_() for operand in case.of(rank)))


def test_without_gradients(teams):
    case = chain((4, 3), 3)
    for value in teams(2).values(without_gradients, case):
        assert not value.requires_grad
        torch.testing.assert_close(value, logchain.product(*case[:3]))


def second_derivative(rank: int, case: Case) -> None:
    x, bulk, p0 = (operand.requires_grad_() for operand in case.of(rank))
    (gradient,) = torch.autograd.grad(distributed.product(x, bulk, p0), x, create_graph=True)
    gradient.sum().backward()


def test_a_second_derivative_is_refused_by_name(teams):
    for outcome in teams(2).run(second_derivative, chain((4, 3), 3)):
        assert isinstance(outcome.error, RuntimeError)
        assert "logchain.distributed: expected one derivative" in str(outcome.error)


def bytes_sent(rank: int, case: Case, strategy: str = "auto") -> int:
    import torch.distributed as dist

    sent = 0
    gather, reduce = dist.all_gather, dist.all_reduce

    def counted(tensors, tensor, **options):
        nonlocal sent
        sent += tensor.nbytes
        return gather(tensors, tensor, **options)

    def counted_sum(tensor, **options):
        nonlocal sent
        sent += tensor.nbytes
        return reduce(tensor, **options)

    dist.all_gather, dist.all_reduce = counted, counted_sum
    try:
        differentiated(rank, case, strategy)
    finally:
        dist.all_gather, dist.all_reduce = gather, reduce
    return sent


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("c", [8, 16, 40])
def test_little_is_sent(teams, ranks, c):
    """A header, messages and the counts: at most four times a matrix and a message of float64."""
    case = chain((60, 50, 70)[:ranks], c)
    assert max(teams(ranks).values(bytes_sent, case)) <= 4 * 8 * (c * c + c)


@pytest.mark.parametrize("strategy", ["vectors", "products"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("one_matrix", [False, True])
def test_plan_says_what_is_sent(teams, strategy, ranks, one_matrix):
    case = chain((20,) * ranks, 5, one_matrix=one_matrix)
    planned = logchain.plan(*case[:3], gradients=True, world_size=ranks)
    said = {cut.name: cut.bytes for cut in planned.cuts if cut.blocks == 1}
    assert max(teams(ranks).values(bytes_sent, case, strategy)) == said[strategy if ranks > 2 else "vectors"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_without_sequences(teams, strategy):
    case = chain((4, 3), 3, batch=(0,))
    for value, grad_x, grad_bulk, grad_p0 in teams(2).values(differentiated, case, strategy):
        assert value.shape == (0,) and grad_x.numel() == 0
        assert (grad_bulk == 0).all() and (grad_p0 == 0).all()


def twice(rank: int, case: Case, strategy: str) -> bool:
    operands = [operand.requires_grad_() for operand in case.of(rank)]
    value = distributed.product(*operands, strategy=strategy).sum()
    first, second = torch.autograd.grad(value, operands, retain_graph=True), torch.autograd.grad(value, operands)
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_can_be_taken_twice(teams, strategy):
    assert all(teams(3).values(twice, chain((5, 4, 3), 3, batch=(2,)), strategy))
