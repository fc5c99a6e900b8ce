"""The log-partition of a chain on several ranks is that of one process, and so are the gradients of every shard."""

import contextlib
import itertools
import pkgutil
from functools import partial
from unittest.mock import patch

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


def in_blocks(rank: int, case: Case, strategy: str, blocks: int, run=differentiated):
    """What a question gives where vectors pass through the ranks in so many blocks of the batch."""
    from logchain.distributed import sharded
    from logchain.schedules.ranks import Cut

    with patch.object(sharded, "_ranked", lambda *_: [Cut("vectors", blocks, 0.0, 0)]):
        return run(rank, case, strategy)


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("one_matrix", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
def test_blocks_of_the_batch_follow_each_other(teams, blocks, one_matrix, lengths):
    for sizes, own in itertools.product([(4, 3, 5), (3, 0, 4)], [(), (5,)]):
        case = chain(sizes, 3, batch=(5,), own=own, one_matrix=one_matrix, lengths=lengths)
        assert_equal(teams(3), case, "vectors", partial(in_blocks, blocks=blocks))


def calls(rank: int, case: Case, strategy: str, *methods: str) -> list[int]:
    """How often methods of `logchain.distributed` are called."""
    with contextlib.ExitStack() as stack:
        spies = []
        for name in (f"logchain.distributed.{method}" for method in methods):
            spies.append(stack.enter_context(patch(name, autospec=True, side_effect=pkgutil.resolve_name(name))))
        differentiated(rank, case, strategy)
    return [spy.call_count for spy in spies]


@pytest.mark.parametrize("strategy, expected", [("vectors", [1, 0]), ("products", [0, 1])])
def test_the_strategy_that_is_named_is_taken(teams, strategy, expected):
    methods = "vectors.Vectors.forward", "products.Products.forward"
    assert teams(3).values(calls, chain((4, 3, 5), 3), strategy, *methods) == [expected] * 3


@pytest.mark.parametrize("lengths, of_last", [(False, [0, 1]), (True, [1, 0])])
def test_two_ranks_meet_in_the_middle(teams, lengths, of_last):
    case = chain((4, 3), 3, batch=(1,), lengths=lengths)
    methods = "stretch.Stretch.ahead", "stretch.Stretch.turned"
    assert teams(2).values(calls, case, "auto", *methods) == [[1, 0], of_last]


def cuts_of(rank: int, case: Case) -> list:
    """The cuts in order of predicted time where each rank computes on another number of threads."""
    from logchain.distributed import sharded

    threads = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        with patch.object(sharded, "_ranked", wraps=sharded._ranked) as ranked:
            differentiated(rank, case)
    finally:
        torch.set_num_threads(threads)
    return sharded._ranked(*ranked.call_args.args)


def test_ranks_with_other_numbers_of_threads_choose_the_same_cut(teams):
    first, *others = teams(3).values(cuts_of, chain((4, 3, 5), 3))
    assert others == [first, first]


LONG = (2300, 2100, 2400)


def walked_in_turn(rank: int, case: Case, run=differentiated) -> tuple[bool, int]:
    """Whether the ranks walked in turn, and how many boundaries they refused."""
    from logchain.distributed.products import Products
    from logchain.distributed.vectors import Vectors

    in_turn, kept = [], [(kind, kind.forward) for kind in (Products, Vectors)]
    for kind, forward in kept:
        kind.forward = lambda self, forward=forward: in_turn.append(self) or forward(self)
    try:
        with logchain.rescues() as seen:
            run(rank, case, "overlapped")
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


@pytest.mark.parametrize("further", [0, 1])
def test_a_boundary_counts_only_for_sequences_that_cross_it(teams, further):
    case = chain(LONG, 4, batch=(1,), one_matrix=False, zeros=0.0)
    bulk = case.bulk.clone()
    bulk[LONG[0] - 60 : LONG[0] - 1] = torch.eye(4, dtype=F64) + 1e-14
    hard = case._replace(bulk=bulk, x=case.x / 8, lengths=torch.tensor([LONG[0] + further]))
    assert_equal(teams(3), hard, "overlapped")
    assert teams(3).values(walked_in_turn, hard) == [(further == 1, further)] * 3


def first_alone(rank: int, case: Case, strategy: str) -> None:
    """The gradients of the first of some sequences."""
    operands = [operand.requires_grad_() for operand in case.of(rank)]
    distributed.product(*operands, strategy=strategy, **case.options)[0].backward()


@pytest.mark.parametrize("run", [differentiated, first_alone])
def test_sequences_without_gradients_refuse_no_boundary(teams, run):
    case = chain(LONG, 4, batch=(2,), zeros=0.0)
    case.x[0, -1000] = -torch.inf
    assert_equal(teams(3), case, "overlapped")
    assert teams(3).values(walked_in_turn, case, run) == [(False, 0)] * 3


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


@pytest.mark.parametrize("where", [3, LONG[0] - 1, LONG[0], sum(LONG) - 2])
def test_an_infinite_weight_is_walked_in_turn(teams, where):
    case = chain(LONG, 3, one_matrix=False, zeros=0.0)
    case.bulk[where, 1, 1] = torch.inf
    assert all(in_turn for in_turn, _ in teams(3).values(walked_in_turn, case))


def underflowing(where: int, dtype: torch.dtype) -> Case:
    """States that lie a thousand nats below the others are those that count."""
    case = chain((6, 5, 7), 3, dtype=dtype, zeros=0.0)
    # no step leads from state 0 to 1: the last rank, which walks from the end, loses what does not end in 1
    case.x[where] = torch.tensor([0.0, -900.0, -1000.0]).roll(int(where >= 14))
    case.x[where + 2 if where < 10 else where - 2] = torch.tensor([-torch.inf, 0.0, -50.0])
    case.bulk[..., 0, 1] = 0
    return case


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_sequences_that_underflow(teams, strategy, dtype):
    """At the boundary, before and behind it."""
    for where in (3, 5, 6, 10, 11, 14):
        assert_equal(teams(3), underflowing(where, dtype), strategy)


def rescued(rank: int, case: Case, strategy: str) -> int:
    """How many sequences a rank computed again."""
    with logchain.rescues() as seen:
        value_of(rank, case, strategy)
    return seen.sequences


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank, where", [(0, 3), (1, 6), (2, 14)])
def test_what_underflows_is_reported_by_its_rank(teams, strategy, rank, where):
    assert teams(3).values(rescued, underflowing(where, F32), strategy)[rank] == 1


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


def own_gradients(rank: int, case: Case, which: list[tuple[bool, ...]]):
    return some_gradients(rank, case, which[rank])


@pytest.mark.parametrize("one_matrix", [True, False])
def test_each_rank_may_need_other_gradients(teams, one_matrix):
    case = chain((4, 3, 5), 3, batch=(2,), one_matrix=one_matrix)
    which = [(True, False, False), (False, True, False), (False, False, True)]
    everything = teams(3).values(some_gradients, case, (True, True, True))
    for rank, (found, whole) in enumerate(zip(teams(3).values(own_gradients, case, which), everything, strict=True)):
        assert [gradient is not None for gradient in found] == list(which[rank])
        torch.testing.assert_close(found[rank], whole[rank])


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
