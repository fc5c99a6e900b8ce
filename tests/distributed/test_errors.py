"""What one rank does wrong is raised on all, by name; a rank that is gone or stalls makes the others raise, in time."""

import itertools
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from logchain import distributed
from logchain.distributed import exchange
from logchain.distributed.agreement import marks
from tests.distributed.chains import Case, chain

CASE = chain((4, 3, 5), 3, batch=(2,), lengths=True)


def with_change(rank: int, change: str) -> None:
    """A product whose arguments are wrong on rank 1 alone."""
    x, bulk, p0 = CASE.of(rank)
    options = dict(CASE.options)
    if rank == 1:
        if change == "x is no tensor":
            x = [1.0]
        elif change == "x of integers":
            x = x.long()
        elif change == "x without axes":
            x = x[0, 0]
        elif change == "bulk of another size":
            bulk = bulk[..., :2]
        elif change == "p0 of another size":
            p0 = p0[:2]
        elif change == "lengths of another shape":
            options["lengths"] = torch.ones(3, dtype=torch.long)
        elif change == "length 0":
            options["lengths"] = torch.tensor([0, 3])
        elif change == "log_params is a number":
            options["log_params"] = 1
        elif change == "strategy is unknown":
            options["strategy"] = "fast"
        elif change == "more matrices":
            bulk = bulk.expand(3, 3, 3)
        elif change == "another dtype":
            x = x.float()
        elif change == "another batch":
            x = x[:1]
            options["lengths"] = CASE.lengths[:1]
        elif change == "another option":
            options["log_params"] = True
        elif change == "other lengths":
            options["lengths"] = CASE.lengths.flip(0)
        elif change == "no lengths":
            options["lengths"] = None
        elif change == "another strategy":
            options["strategy"] = "products"
        elif change == "gradients":
            x.requires_grad_()
        elif change == "another matrix":
            bulk = bulk + 1
        elif change == "other weights":
            p0 = p0 * 2
        elif change == "weights in another order":
            p0 = p0.flip(0)
        elif change == "weights that are a little larger":
            p0 = p0 * 1.001
        elif change == "the transposed matrix":
            bulk = bulk.mT
        elif change == "a zero elsewhere":
            bulk = torch.cat([bulk[..., 1:, :], bulk[..., :1, :]], -2)
        elif change == "an unknown one_matrix":
            options["one_matrix"] = "yes"
        elif change == "an array of a mesh":
            x = DTensor.from_local(x, DeviceMesh("cpu", [1], _init_backend=False), [Replicate()], run_check=False)
        elif change == "other transitions":
            return distributed.marginals(x, bulk, p0, transitions="full", **options)
        elif change == "unknown transitions":
            return distributed.marginals(x, bulk, p0, transitions="all", **options)
        elif change == "another question":
            return distributed.marginals(x, bulk, p0, **options)
        elif change == "a structure":
            return distributed.Columns(bulk[0])
    if change.endswith(" transitions"):
        return distributed.marginals(x, bulk, p0, **options)
    distributed.product(x, bulk, p0, **options)


@pytest.mark.parametrize(
    "change, kind, text",
    [
        ("x is no tensor", TypeError, "rank 1: x: expected a torch.Tensor, got list"),
        ("x of integers", TypeError, "rank 1: x: expected float32"),
        ("x without axes", ValueError, "rank 1: x: expected at least 2 axes"),
        ("bulk of another size", ValueError, "rank 1: bulk: expected shape"),
        ("p0 of another size", ValueError, "rank 1: p0: expected shape"),
        ("lengths of another shape", ValueError, "rank 1: lengths: expected shape"),
        ("length 0", ValueError, "rank 1: lengths: expected values from 1, got 0"),
        ("log_params is a number", TypeError, "rank 1: log_params: expected True or False, got 1"),
        ("strategy is unknown", ValueError, "rank 1: strategy: expected 'auto' or"),
        ("more matrices", ValueError, "rank 0: bulk: expected 3 matrices"),
        ("another dtype", ValueError, "rank 1: x: expected shape .* of torch.float64, as on rank 0, got .*float32"),
        ("another batch", ValueError, "rank 1: x: expected shape .2, v, 3."),
        ("another option", ValueError, "rank 1: log_params: expected False, as on rank 0, got True"),
        ("other lengths", ValueError, "rank 1: lengths: expected"),
        ("no lengths", ValueError, "rank 1: lengths: expected .* as on rank 0, got None"),
        ("another strategy", ValueError, "rank 1: strategy: expected auto, as on rank 0, got products"),
        ("gradients", ValueError, "rank 1: gradients: expected False, as on rank 0, got True"),
        ("another matrix", ValueError, "rank 1: bulk: expected the same matrix as on rank 0"),
        ("other weights", ValueError, "rank 1: p0: expected the same weights as on rank 0"),
        ("weights in another order", ValueError, "rank 1: p0: expected the same weights as on rank 0"),
        ("weights that are a little larger", ValueError, "rank 1: p0: expected the same weights as on rank 0"),
        ("the transposed matrix", ValueError, "rank 1: bulk: expected the same matrix as on rank 0"),
        ("a zero elsewhere", ValueError, "rank 1: bulk: expected the same matrix as on rank 0"),
        ("an unknown one_matrix", ValueError, "rank 1: one_matrix: expected None or False or True, got 'yes'"),
        ("an array of a mesh", TypeError, "rank 1: x: expected a tensor of this rank alone, got a DTensor"),
        ("other transitions", ValueError, "rank 1: transitions: expected None, as on rank 0, got full"),
        ("unknown transitions", ValueError, "rank 1: transitions: expected None or 'sum' or 'full', got 'all'"),
        ("another question", ValueError, "rank 1: question: expected product, as on rank 0, got marginals"),
        ("a structure", ValueError, "rank 1: question: expected product, as on rank 0, got Columns"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_raised_on_all(teams, change, kind, text):
    for outcome in teams(3).run(with_change, change):
        assert type(outcome.error) is kind, (outcome.error, outcome.trace)
        assert outcome.error is not None and re.search(text, str(outcome.error)), outcome.error


def of_own_matrices(rank: int, one_matrix: bool) -> None:
    case = chain((4, 3, 5), 3, one_matrix=one_matrix)
    distributed.product(*case.of(rank), one_matrix=not one_matrix)


@pytest.mark.parametrize(
    "one_matrix, text",
    [
        (False, "rank 0: bulk: expected 1 matrix for every step, got 3"),
        (True, "rank 0: bulk: expected 3 matrices, which lead into the 4 variables of the rank"),
    ],
)
def test_matrices_are_as_many_as_one_matrix_says(teams, one_matrix, text):
    for outcome in teams(3).run(of_own_matrices, one_matrix):
        assert isinstance(outcome.error, ValueError) and text in str(outcome.error), outcome.error


def many_calls(rank: int) -> None:
    """Calls of ranks of which the first has made any number before."""
    x, bulk, p0 = CASE.of(rank)
    for _ in range(1100 if rank == 0 else 3):
        next(exchange._calls)
    distributed.product(x.requires_grad_(), bulk, p0).sum().backward()
    for number in (2**10 - 1, 1):
        exchange._calls = itertools.chain([number], exchange._calls)
        distributed.product(x.requires_grad_(), bulk, p0).sum().backward()


def test_the_number_of_calls_before_has_no_meaning(teams):
    teams(3).values(many_calls)


def wrong_on_two(rank: int) -> None:
    x, bulk, p0 = CASE.of(rank)
    distributed.product([x] if rank == 1 else x, bulk, p0[:2] if rank == 2 else p0)


def test_the_first_of_several_wrong_ranks_is_named(teams):
    for outcome in teams(3).run(wrong_on_two):
        assert str(outcome.error) == "rank 1: x: expected a torch.Tensor, got list"


def without_variables(rank: int) -> None:
    distributed.product(torch.zeros(0, 2), torch.ones(1, 2, 2), torch.ones(2))


def too_long(rank: int) -> None:
    x, bulk, p0 = CASE.of(rank)
    distributed.product(x, bulk, p0, lengths=torch.tensor([3, 13]))


def test_wrong_on_all_ranks_together(teams):
    for outcome in teams(2).run(without_variables):
        assert isinstance(outcome.error, ValueError) and "at least one variable on some rank" in str(outcome.error)
    for outcome in teams(3).run(too_long):
        assert isinstance(outcome.error, ValueError) and "from 1 to v = 12, got 13" in str(outcome.error)


def out_of_memory(rank: int, backward: bool) -> None:
    """A rank whose kernels raise in the middle of a pass."""
    from logchain.distributed.stretch import Stretch

    names = ("back", "back_turned") if backward else ("ahead", "turned")
    kept = {name: getattr(Stretch, name) for name in names}

    def fails(*_: object) -> None:
        raise MemoryError("of this test")

    try:
        if rank == 1:
            for name in names:
                setattr(Stretch, name, fails)
        x, bulk, p0 = CASE.of(rank)
        distributed.product(x.requires_grad_(), bulk, p0, **CASE.options).sum().backward()
    finally:
        for name, method in kept.items():
            setattr(Stretch, name, method)


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_in_the_middle_is_raised_on_all(teams, backward):
    for outcome in teams(3).run(out_of_memory, backward):
        assert isinstance(outcome.error, MemoryError) and "rank 1: of this test" in str(outcome.error), outcome.trace


def tiny_weights(rank: int) -> None:
    """Weights whose squares are zero, and infinite ones."""
    x, bulk, p0 = CASE.of(rank)
    for least, log_params in (1e-200, False), (-torch.inf, True):
        p0 = torch.tensor([least, 0.5 * least, 0.2], dtype=p0.dtype)
        if rank == 1:
            p0 = p0.roll(1)
        with pytest.raises(ValueError, match="rank 1: p0: expected the same weights"):
            distributed.product(x, bulk, p0, log_params=log_params)


def test_weights_of_any_size_have_to_agree(teams):
    teams(2).values(tiny_weights)


def rounded_weights(rank: int) -> torch.Tensor:
    x, bulk, p0 = CASE.of(rank)
    return distributed.product(x, bulk, p0 * (1.0 + 1e-7 * rank))


def test_weights_may_differ_by_rounding(teams):
    first, *others = teams(3).values(rounded_weights)
    assert all(torch.equal(first, other) for other in others)


def forward_derivative(rank: int) -> None:
    """An entropy at a level of forward derivatives on one rank; to enter one really takes torch some seconds."""
    from torch.autograd import forward_ad

    x, bulk, p0 = CASE.of(rank)
    forward_ad._current_level = 0 if rank == 1 else -1
    try:
        distributed.entropy(x, bulk, p0)
    finally:
        forward_ad._current_level = -1


def test_a_forward_derivative_is_refused(teams):
    for outcome in teams(2).run(forward_derivative):
        assert isinstance(outcome.error, NotImplementedError)
        assert str(outcome.error).startswith("rank 1: logchain.distributed: expected no transform of torch.func")


def on_another_default_device(rank: int) -> torch.Tensor:
    x, bulk, p0 = CASE.of(rank)
    torch.set_default_device("meta" if rank == 1 else None)
    try:
        value = distributed.product(x.requires_grad_(), bulk, p0, **CASE.options)
        value.sum().backward()
        distributed.sample(x, bulk, p0, 2, **CASE.options), distributed.viterbi(x, bulk, p0, **CASE.options)
        return value.detach()
    finally:
        torch.set_default_device(None)


def test_the_default_device_has_no_meaning(teams):
    first, *others = teams(3).values(on_another_default_device)
    assert all(torch.equal(first, other) for other in others)


# of all ranks but the second, and of that
GRADIENTS = [
    [[1.0, 2.0], [2.0, 1.0]],
    [[1.0, 0.0], [0.0, 2.0]],
    [[1.0, -2.0], [2.0, -4.0]],
    [[1.0, 1.0], [1.0, torch.nan]],
    [[1.0, 1.0], [1e200, 1.0]],
    [[1.0, 1.0], [1.0001, 1.0001]],
]


def another_gradient(rank: int, of_ranks: list[list[float]]) -> None:
    x, bulk, p0 = CASE.of(rank)
    value = distributed.product(x.requires_grad_(), bulk, p0)
    value.backward(torch.tensor(of_ranks[rank == 1], dtype=value.dtype))


@pytest.mark.parametrize("of_ranks", GRADIENTS, ids=str)
def test_incoming_gradients_have_to_agree(teams, of_ranks):
    for outcome in teams(3).run(another_gradient, of_ranks):
        assert isinstance(outcome.error, RuntimeError) and "the same incoming gradient" in str(outcome.error)


def in_another_order(rank: int) -> None:
    products = []
    for _ in range(2):
        x, bulk, p0 = CASE.of(rank)
        products.append(distributed.product(x, bulk.requires_grad_(), p0).sum())
    for value in reversed(products) if rank == 1 else products:
        value.backward()


def test_backward_passes_in_another_order_are_refused(teams):
    for outcome in teams(3).run(in_another_order):
        assert isinstance(outcome.error, RuntimeError) and "passes in different orders" in str(outcome.error)


def leaves(rank: int, how: str, backward: bool) -> None:
    """A product during which rank 1 goes, forward or between its passes."""
    x, bulk, p0 = CASE.of(rank)
    value = distributed.product(x.requires_grad_(), bulk, p0) if backward else None
    if rank == 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exits":
            os._exit(3)
        elif how == "raises":
            raise ValueError("of rank 1")
        elif how == "leaves the group":
            dist.destroy_process_group()
            return
        time.sleep(4.5)
        return
    if value is None:
        distributed.product(x, bulk, p0)
    else:
        value.sum().backward()


@pytest.mark.parametrize("how", ["is killed", "exits", "raises", "stalls", "leaves the group"])
@pytest.mark.parametrize("backward", [False, True])
def test_others_raise_where_a_rank_is_gone(teams, how, backward):
    team = teams(3)
    begin = time.monotonic()
    first, _, third = team.run(leaves, how, backward)
    for outcome in (first, third):
        assert isinstance(outcome.error, RuntimeError), outcome
    assert time.monotonic() - begin < 60
    team.broken = True


def outside(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return "inside"
    try:
        distributed.product(torch.zeros(2, 2), torch.ones(1, 2, 2), torch.ones(2), group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_process_outside_the_group(teams):
    assert teams(2).values(outside)[1] == "group: expected a process group that this process belongs to"


def test_without_a_group():
    with pytest.raises(RuntimeError, match="group: expected torch.distributed to be initialised"):
        distributed.product(torch.zeros(2, 2), torch.ones(1, 2, 2), torch.ones(2))


def in_groups(rank: int, case: Case) -> torch.Tensor:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return distributed.product(*case.of(rank % 2), group=groups[rank // 2])


def test_two_groups_beside_each_other(teams):
    case = chain((4, 3), 3)
    values = teams(4).values(in_groups, case)
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("c", [2, 3, 64, 1024])
def test_marks_tell_places_apart(c):
    matrix = torch.rand(c, c, generator=torch.Generator().manual_seed(0))
    mark, norm, top = marks(matrix).tolist()
    assert norm * matrix.amax() == pytest.approx(torch.linalg.vector_norm(matrix, dtype=torch.float64).item(), rel=1e-6)
    assert top == pytest.approx(matrix.amax().log().item(), abs=1e-6)
    assert abs(marks(matrix.double()) - marks(matrix))[0] < 1e-6 * norm
    for other in matrix.mT, matrix.flip(0), matrix.flip(1), matrix.roll(1), -matrix:
        assert abs(mark - marks(other)[0]) > 1e-3 * norm


def test_marks_of_several_tensors_and_of_none():
    matrix = torch.rand(2**18 + 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(marks(matrix, torch.ones(0)), marks(matrix))
    assert abs(marks(matrix, matrix[:3]) - marks(matrix[:3], matrix))[0] > 1e-3 * marks(matrix)[1]
    assert marks().tolist() == [0.0, 0.0, 0.0] == marks(torch.zeros(4)).tolist()
    kinds = [torch.tensor([1.0, one]) for one in (torch.inf, -torch.inf, torch.nan, 1.0)]
    assert len({marks(one)[0].item() for one in kinds}) == 4


QUESTIONS = {
    "product": distributed.product,
    "marginals": distributed.marginals,
    "viterbi": distributed.viterbi,
    "entropy": distributed.entropy,
    "sample": lambda *operands, **options: distributed.sample(*operands, 2, **options),
}


def negative_weights(rank: int, place: str, question: str, strategy: str, one_matrix: bool) -> None:
    """A chain with a negative weight among those that one rank reads, or all."""
    case = chain((40, 30, 50), 3, batch=(2,), one_matrix=one_matrix, zeros=0.0)
    x, bulk, p0 = case.of(rank)
    if place == "p0":
        p0[1] = -2
    elif one_matrix or str(rank) == place:
        bulk[..., 0, 1, 0] = -0.5
    options = {} if question in ("viterbi", "sample") else {"strategy": strategy}
    QUESTIONS[question](x, bulk, p0, **options)


@pytest.mark.parametrize(
    "question, strategy",
    [*((question, "auto") for question in QUESTIONS), ("product", "vectors"), ("product", "products")],
)
@pytest.mark.parametrize("place", ["0", "1", "2", "all", "p0"])
def test_a_negative_weight_on_one_rank_is_raised_on_all(teams, question, strategy, place):
    for outcome in teams(3).run(negative_weights, place, question, strategy, place == "all"):
        assert type(outcome.error) is ValueError, (outcome.error, outcome.trace)
        at = "p0: expected non-negative weights, got -2 at [1]" if place == "p0" else "bulk: expected non-negative"
        rank = place if place in "012" else "[0-9]"
        assert re.match(f"rank {rank}: {re.escape(at)}", str(outcome.error)), outcome.error
    teams(3).values(many_calls)  # no rank is left behind
