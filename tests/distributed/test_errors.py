"""What one rank does wrong is raised on all, by name; a rank that is gone or stalls makes the others raise, in time."""

import datetime
import os
import re
import signal
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from logchain import distributed, kernels
from tests.distributed.chains import chain

pytestmark = pytest.mark.xdist_group("ranks")

CASE = chain((4, 3, 5), 3, batch=(2,), lengths=True)


def of_a_mesh(x):
    return DTensor.from_local(x, DeviceMesh("cpu", [1], _init_backend=False), [Replicate()], run_check=False)


def product(x, bulk, p0, **options):
    return distributed.product(x, bulk, p0, **{**CASE.options, **options})


def without_variables(x, *others):
    return distributed.product(x[:, :0], *others)


def draw(number):
    return partial(distributed.sample, num_samples=number)


def count(kind):
    return partial(distributed.marginals, transitions=kind)


LONG = torch.tensor([3, 13])

# the error on all ranks, the call of rank 1, and that of the others if it is not `product`
ERRORS = [
    (TypeError, "rank 1: x: expected a torch.Tensor, got list", lambda x, *others: product([1.0], *others)),
    (TypeError, "rank 1: x: expected float32", lambda x, *others: product(x.long(), *others)),
    (TypeError, "rank 1: x: expected a tensor of this rank alone, got a D", lambda x, *o: product(of_a_mesh(x), *o)),
    (TypeError, "rank 1: log_params: expected True or False, got 1", partial(product, log_params=1)),
    (ValueError, "rank 1: log_params: expected False, as on rank 0, got True", partial(product, log_params=True)),
    (ValueError, "rank 1: x: expected at least 2 axes", lambda x, *others: product(x[0, 0], *others)),
    (ValueError, "rank 1: x: expected shape [2, v, 3]", lambda x, *o: product(x[:1], *o, lengths=CASE.lengths[:1])),
    (ValueError, "rank 1: x: expected shape [2, v, 3] of torch.float64", lambda x, *o: product(x.float(), *o)),
    (ValueError, "rank 1: gradients: expected False, as on", lambda x, *others: product(x.requires_grad_(), *others)),
    (ValueError, "rank 1: bulk: expected shape", lambda x, bulk, p0: product(x, bulk[..., :2], p0)),
    (ValueError, "rank 0: bulk: expected 3 matrices", lambda x, bulk, p0: product(x, bulk.expand(3, 3, 3), p0)),
    (ValueError, "rank 1: bulk: expected the same matrix as on", lambda x, bulk, p0: product(x, bulk + 1, p0)),
    (ValueError, "rank 1: bulk: expected the same matrix as on", lambda x, bulk, p0: product(x, bulk.mT, p0)),
    (ValueError, "rank 1: bulk: expected the same matrix as on", lambda x, bulk, p0: product(x, bulk.roll(-1, -2), p0)),
    (ValueError, "rank 1: p0: expected shape", lambda x, bulk, p0: product(x, bulk, p0[:2])),
    (ValueError, "rank 1: p0: expected the same weights as on", lambda x, bulk, p0: product(x, bulk, p0 * 2)),
    (ValueError, "rank 1: p0: expected the same weights as on", lambda x, bulk, p0: product(x, bulk, p0 * 1.001)),
    (ValueError, "rank 1: p0: expected the same weights as on", lambda x, bulk, p0: product(x, bulk, p0.flip(0))),
    (ValueError, "rank 1: lengths: expected shape", partial(product, lengths=torch.ones(3, dtype=torch.long))),
    (ValueError, "rank 1: lengths: expected values from 1, got 0", partial(product, lengths=torch.tensor([0, 3]))),
    (ValueError, "rank 1: lengths: expected integers", partial(product, lengths=CASE.lengths.flip(0))),
    (ValueError, "rank 1: lengths: expected integers", partial(product, lengths=None)),
    (ValueError, "rank 1: strategy: expected 'auto' or", partial(product, strategy="fast")),
    (ValueError, "rank 1: strategy: expected auto, as on rank 0", partial(product, strategy="products")),
    (ValueError, "rank 1: one_matrix: expected None or False or True, got 'yes'", partial(product, one_matrix="yes")),
    (ValueError, "rank 1: question: expected product, as on rank 0, got marginals", distributed.marginals),
    (ValueError, "rank 1: transitions: expected None, as on rank 0, got full", count("full"), count(None)),
    (ValueError, "rank 1: transitions: expected None or 'sum' or 'full', got 'all'", count("all"), count(None)),
    (ValueError, "rank 1: num_samples: expected 0 or more, got -1", draw(-1), draw(2)),
    (ValueError, "rank 1: num_samples: expected 2, as on rank 0, got 3", draw(3), draw(2)),
    # of several wrong ranks the first
    (ValueError, "rank 0: p0: expected shape", lambda *_: product([], [], []), lambda x, b, p0: product(x, b, p0[:2])),
    # of all ranks together
    (ValueError, "x: expected at least one variable on some rank, got none", *[without_variables] * 2),
    (ValueError, "lengths: expected values from 1 to v = 12, got 13", *[partial(product, lengths=LONG)] * 2),
    (ValueError, "rank 0: bulk: expected 3 matrices, which lead", *[partial(product, one_matrix=False)] * 2),
]


def with_error(rank, index):
    _, _, of_rank_1, *of_others = ERRORS[index]
    (of_rank_1 if rank == 1 else (*of_others, product)[0])(*CASE.of(rank))


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=lambda index: ERRORS[index][1])
def test_an_error_on_one_rank_is_raised_on_all(teams, index):
    kind, text, *_ = ERRORS[index]
    for outcome in teams(3).run(with_error, index):
        assert type(outcome.error) is kind and str(outcome.error).startswith(text), outcome.trace


def with_p0(rank, of_others, of_rank_1, log_params):
    x, bulk, _ = CASE.of(rank)
    return distributed.product(x, bulk, of_rank_1 if rank == 1 else of_others, log_params=log_params)


@pytest.mark.parametrize(
    ("weights", "log_params"), [([1e-200, 0.5e-200, 0.2], False), ([-torch.inf, -torch.inf, 0.2], True)]
)
def test_weights_of_any_size_have_to_be_the_same(teams, weights, log_params):
    p0 = torch.tensor(weights, dtype=torch.float64)
    for outcome in teams(3).run(with_p0, p0, p0.roll(1), log_params):
        assert str(outcome.error).startswith("rank 1: p0: expected the same weights")
    # but for their rounding
    first, *others = teams(3).values(with_p0, p0, p0 * (1 + 1e-7), log_params)
    assert all(torch.equal(first, other) for other in others)


def negative_weight(rank, place):
    x, bulk, p0 = chain((40, 30, 50), 3, batch=(2,), one_matrix=False, zeros=0.0).of(rank)
    if place == "p0":
        p0[1] = -2
    elif rank == place:
        bulk[0, 1, 0] = -0.5
    distributed.product(x, bulk, p0)


@pytest.mark.parametrize("place", [0, 1, 2, "p0"])
def test_a_negative_weight_on_one_rank_is_raised_on_all(teams, place):
    text = (
        "rank [0-9]: p0: expected non-negative weights, got -2 at .1."
        if place == "p0"
        else f"rank {place}: bulk: expected non-negative"
    )
    for outcome in teams(3).run(negative_weight, place):
        assert type(outcome.error) is ValueError and re.match(text, str(outcome.error)), outcome.trace


def out_of_memory(rank, name):
    """A pass in whose middle rank 1 has no memory."""

    def fails(*_, **__):
        raise MemoryError("of this test")

    loops = kernels.chain_kernels(CASE.x)
    failing = SimpleNamespace(**{"forward": loops.forward, "backward": loops.backward, name: fails})
    x, bulk, p0 = CASE.of(rank)
    with patch.object(kernels, "chain_kernels", lambda x: failing if rank == 1 else loops):
        distributed.product(x.requires_grad_(), bulk, p0, **CASE.options).sum().backward()


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_an_error_in_the_middle_is_raised_on_all(teams, name):
    for outcome in teams(3).run(out_of_memory, name):
        assert isinstance(outcome.error, MemoryError) and "rank 1: of this test" in str(outcome.error), outcome.trace


def forward_derivative(rank, _):
    """An entropy at a level of forward derivatives on one rank; to enter one really takes torch some seconds."""
    with patch.object(torch.autograd.forward_ad, "_current_level", 0 if rank == 1 else -1):
        distributed.entropy(*CASE.of(rank))


def derivative(rank, name):
    x, bulk, p0 = CASE.of(rank)
    found = getattr(distributed, name)(x.requires_grad_(), bulk, p0)
    found = {"marginals": lambda: found.states, "viterbi": lambda: found.score}.get(name, lambda: found)()
    (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    gradient.sum().backward()


@pytest.mark.parametrize(
    ("run", "name", "kind", "text"),
    [
        (forward_derivative, "entropy", NotImplementedError, "rank 1: logchain.distributed: expected no transform of"),
        (derivative, "product", RuntimeError, "logchain.distributed: expected one derivative, got a second"),
        (derivative, "marginals", NotImplementedError, "logchain.distributed: expected no derivative"),
        (derivative, "viterbi", NotImplementedError, "logchain.distributed: expected no derivative"),
        (derivative, "entropy", NotImplementedError, "logchain.distributed: expected no derivative"),
    ],
)
def test_derivatives_that_are_not_offered_are_raised(teams, run, name, kind, text):
    for outcome in teams(3).run(run, name):
        assert isinstance(outcome.error, kind) and text in str(outcome.error), outcome.trace


def with_incoming_gradient(rank, of_others, of_rank_1):
    x, bulk, p0 = CASE.of(rank)
    value = distributed.product(x.requires_grad_(), bulk, p0)
    value.backward(torch.tensor(of_rank_1 if rank == 1 else of_others, dtype=value.dtype))


@pytest.mark.parametrize(
    "gradients",
    [
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0, 0.0], [0.0, 2.0]),
        ([1.0, -2.0], [2.0, -4.0]),
        ([1.0, 1.0], [1.0, torch.nan]),
        ([1.0, 1.0], [1e200, 1.0]),
        ([1.0, 1.0], [1.0001, 1.0001]),
    ],
    ids=str,
)
def test_incoming_gradients_have_to_be_the_same(teams, gradients):
    for outcome in teams(3).run(with_incoming_gradient, *gradients):
        assert isinstance(outcome.error, RuntimeError) and "the same incoming gradient" in str(outcome.error)


def backward_in_another_order(rank):
    products = []
    for _ in range(2):
        x, bulk, p0 = CASE.of(rank)
        products.append(distributed.product(x, bulk.requires_grad_(), p0).sum())
    for value in reversed(products) if rank == 1 else products:
        value.backward()


def test_backward_passes_in_another_order_are_raised(teams):
    for outcome in teams(3).run(backward_in_another_order):
        assert isinstance(outcome.error, RuntimeError) and "passes in different orders" in str(outcome.error)


def outside_the_group(rank):
    group = dist.new_group([0])
    if rank == 1:
        distributed.product(*CASE.of(rank), group=group)


def test_a_process_outside_the_group_raises(teams):
    with pytest.raises(AssertionError, match="ValueError: group: expected a process group that this process belongs"):
        teams(2).values(outside_the_group)


def test_a_process_without_a_group_raises():
    with pytest.raises(RuntimeError, match="group: expected torch.distributed to be initialised"):
        distributed.product(*CASE.of(0))


def gone(rank, how, backward):
    """A product for which rank 1 is gone, from the start or after the forward pass."""
    seconds = datetime.timedelta(seconds=30 if how == "killed" else 3)
    group = dist.new_group([0, 1, 2], timeout=seconds)
    x, bulk, p0 = CASE.of(rank)
    value = distributed.product(x.requires_grad_(), bulk, p0, group=group) if backward else None
    if rank == 1:
        return os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else None
    if value is None:
        return distributed.product(x, bulk, p0, group=group)
    return value.sum().backward()


@pytest.mark.parametrize("how", ["killed", "stalls"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_is_gone_is_raised_on_the_others(teams, how, backward):
    first, second, third = teams(3).run(gone, how, backward)
    assert second.exit == (-signal.SIGKILL if how == "killed" else None)
    for outcome in first, third:
        assert isinstance(outcome.error, RuntimeError), outcome
        assert how == "killed" or "Timed out" in str(outcome.error)
