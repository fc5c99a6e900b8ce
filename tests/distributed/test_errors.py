"""What one rank does wrong is raised on all, by name; a rank that is gone or stalls makes the others raise, in time."""

import datetime
import os
import signal
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from logchain import distributed
from tests.distributed.chains import chain

CASE = chain((4, 3, 5), 3, batch=(2,), lengths=True)
EACH = chain((4, 3, 5), 3, batch=(2,), one_matrix=False, zeros=0.0)


def product(x, bulk, p0, **options):
    return distributed.product(x, bulk, p0, **{**CASE.options, **options})


def of_a_mesh(x, bulk, p0):
    product(DTensor.from_local(x, DeviceMesh("cpu", [1], _init_backend=False), [Replicate()]), bulk, p0)


def with_log_p0(*p0):
    return lambda x, bulk, _: product(x, bulk, torch.tensor(p0, dtype=x.dtype), log_params=True)


draw, count = partial(partial, distributed.sample), partial(partial, distributed.marginals)
OF_SEQUENCES, LONG = torch.vmap(distributed.product, (0, None, None)), torch.tensor([3, 13])

# the error on all ranks, the call of rank 1, and that of the others if it is not `product`
ERRORS = [
    (TypeError, "rank 1: x: expected a torch.Tensor, got list", lambda x, *others: product([1.0], *others)),
    (TypeError, "rank 1: x: expected a tensor of this rank alone, got a DTensor", of_a_mesh),
    (ValueError, "rank 1: x: expected at least 2 axes", lambda x, *others: product(x[0, 0], *others)),
    (ValueError, "rank 1: x: expected shape [2, v, 3] of torch.float64", lambda x, *o: product(x.float(), *o)),
    (NotImplementedError, "rank 1: logchain.distributed: expected no transform of", OF_SEQUENCES),
    (ValueError, "rank 1: gradients: expected False, as on", lambda x, *others: product(x.requires_grad_(), *others)),
    (ValueError, "rank 1: bulk: expected shape", lambda x, bulk, p0: product(x, bulk[..., :2], p0)),
    (ValueError, "rank 1: bulk: expected the same matrix as on", lambda x, bulk, p0: product(x, bulk.mT, p0)),
    (ValueError, "rank 0: bulk: expected 3 matrices, which lead", *[partial(product, one_matrix=False)] * 2),
    (ValueError, "rank 1: p0: expected shape", lambda x, bulk, p0: product(x, bulk, p0[:2])),
    (ValueError, "rank 1: p0: expected the same weights as on", lambda x, bulk, p0: product(x, bulk, p0 * 1.001)),
    (ValueError, "rank 1: p0: expected the same", with_log_p0(0, 0, -torch.inf), with_log_p0(-torch.inf, 0, 0)),
    (TypeError, "rank 1: log_params: expected True or False, got 1", partial(product, log_params=1)),
    (ValueError, "rank 1: log_params: expected False, as on rank 0, got True", partial(product, log_params=True)),
    (ValueError, "rank 1: lengths: expected values from 1, got 0", partial(product, lengths=torch.tensor([0, 3]))),
    (ValueError, "rank 1: lengths: expected integers", partial(product, lengths=CASE.lengths.flip(0))),
    (ValueError, "lengths: expected values from 1 to v = 12, got 13", *[partial(product, lengths=LONG)] * 2),
    (ValueError, "rank 1: strategy: expected 'auto' or", partial(product, strategy="fast")),
    (ValueError, "rank 1: strategy: expected auto, as on rank 0", partial(product, strategy="products")),
    (ValueError, "rank 1: one_matrix: expected None or False or True, got 'yes'", partial(product, one_matrix="yes")),
    (ValueError, "rank 1: question: expected product, as on rank 0, got marginals", distributed.marginals),
    (ValueError, "rank 1: transitions: expected None or 'sum' or 'full', got 'all'", count(transitions="all"), count()),
    (ValueError, "rank 1: num_samples: expected 0 or more, got -1", draw(num_samples=-1), draw(num_samples=2)),
    (ValueError, "rank 1: num_samples: expected 2, as on rank 0, got 3", draw(num_samples=3), draw(num_samples=2)),
    (ValueError, "x: expected at least one variable on some rank", *[lambda x, *o: product(x[:, :0], *o)] * 2),
    # of several wrong ranks the first
    (ValueError, "rank 0: p0: expected shape", lambda *_: product([], [], []), lambda x, b, p0: product(x, b, p0[:2])),
]  # fmt: skip


def with_error(rank, index):
    _, _, of_rank_1, *of_others = ERRORS[index]
    (of_rank_1 if rank == 1 else (*of_others, product)[0])(*CASE.of(rank))


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=lambda index: ERRORS[index][1])
def test_an_error_on_one_rank_is_raised_on_all(teams, index):
    kind, text, *_ = ERRORS[index]
    for error in teams(3).errors(with_error, index):
        assert type(error) is kind and str(error).startswith(text), error


def with_rounded_p0(rank):
    x, bulk, p0 = CASE.of(rank)
    return product(x, bulk, p0 * (1 + 1e-7 * rank))


def test_weights_may_differ_by_rounding(teams):
    first, *others = teams(3).values(with_rounded_p0)
    assert all(torch.equal(first, other) for other in others)


def negative(rank, name, place):
    operands = dict(zip(("x", "bulk", "p0"), EACH.of(rank), strict=True))
    if name == "p0" or rank == 1:
        operands[name][place] = -2.0
    distributed.product(**operands)


class OutOfMemory(TorchDispatchMode):
    """A context in which nothing can be concatenated, as ranks do with what they send."""

    def __torch_dispatch__(self, operator, types, args=(), options=None):
        if operator is torch.ops.aten.cat.default:
            raise MemoryError("of this test")
        return operator(*args, **(options or {}))


def out_of_memory(rank):
    x, *others = CASE.of(rank)
    value = product(x.requires_grad_(), *others).sum()
    with OutOfMemory() if rank == 1 else nullcontext():
        value.backward()


def derivative(rank, name, part=""):
    x, bulk, p0 = CASE.of(rank)
    result = getattr(distributed, name)(x.requires_grad_(), bulk, p0)
    (gradient,) = torch.autograd.grad(getattr(result, part, result).sum(), x, create_graph=True)
    gradient.sum().backward()


def incoming_gradient(rank, of_others, of_rank_1):
    x, bulk, p0 = CASE.of(rank)
    value = product(x.requires_grad_(), bulk, p0)
    value.backward(torch.tensor(of_rank_1 if rank == 1 else of_others, dtype=value.dtype))


def backward_in_another_order(rank):
    x, bulk, p0 = CASE.of(rank)
    products = [product(x, bulk.requires_grad_(), p0).sum() for _ in range(2)]
    for value in reversed(products) if rank == 1 else products:
        value.backward()


UNLIKE = "grad: expected the same incoming gradient on every rank"
NO_DERIVATIVE = "logchain.distributed: expected no derivative"


@pytest.mark.parametrize(
    ("kind", "text", "run", "args"),
    [
        (ValueError, "rank 1: bulk: expected non-negative weights, got -2 at [0, 1, 0]", negative, ["bulk", (0, 1, 0)]),
        (ValueError, "rank 0: p0: expected non-negative weights, got -2 at [1]", negative, ["p0", 1]),
        (MemoryError, "rank 1: of this test", out_of_memory, []),
        (RuntimeError, "logchain.distributed: expected one derivative, got a second", derivative, ["product"]),
        (NotImplementedError, NO_DERIVATIVE, derivative, ["marginals", "states"]),
        (NotImplementedError, NO_DERIVATIVE, derivative, ["viterbi", "score"]),
        (NotImplementedError, NO_DERIVATIVE, derivative, ["entropy"]),
        (RuntimeError, UNLIKE, incoming_gradient, [[1.0, 2.0], [2.0, 1.0]]),
        (RuntimeError, UNLIKE, incoming_gradient, [[1.0, -2.0], [2.0, -4.0]]),
        (RuntimeError, UNLIKE, incoming_gradient, [[1.0, 1.0], [1.0, torch.nan]]),
        (RuntimeError, UNLIKE, incoming_gradient, [[1.0, 1.0], [1e200, 1.0]]),
        (RuntimeError, UNLIKE, incoming_gradient, [[1.0, 1.0], [1.0001, 1.0001]]),
        (RuntimeError, "passes in different orders", backward_in_another_order, []),
    ],
)
def test_an_error_in_a_pass_is_raised_on_all(teams, kind, text, run, args):
    for error in teams(3).errors(run, *args):
        assert isinstance(error, kind) and text in str(error), error


def outside_the_group(rank):
    group = dist.new_group([0])
    if rank == 1:
        distributed.product(*CASE.of(rank), group=group)


def test_a_process_without_a_group_raises(teams):
    with pytest.raises(ValueError, match="group: expected a process group that this process belongs"):
        teams(2).values(outside_the_group)
    with pytest.raises(RuntimeError, match="group: expected torch.distributed to be initialised"):
        distributed.product(*CASE.of(0))


def gone(rank, how):
    """A product for which rank 1 is killed from the start, or stalls after the forward pass."""
    group = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=30 if how == "killed" else 3))
    x, bulk, p0 = CASE.of(rank)
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    value = distributed.product(x.requires_grad_(), bulk, p0, group=group)
    if rank != 1:
        value.sum().backward()


@pytest.mark.parametrize(("how", "text"), [("killed", ""), ("stalls", "Timed out")])
def test_a_rank_that_is_gone_is_raised_on_the_others(teams, how, text):
    first, second, third = teams(3).errors(gone, how)
    assert isinstance(second, BrokenProcessPool) == (how == "killed")
    for error in first, third:
        assert isinstance(error, RuntimeError) and text in str(error), error
