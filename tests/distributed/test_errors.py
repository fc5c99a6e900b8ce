"""What one rank does wrong is raised on all, by name; a rank that is gone or stalls makes the others raise, in time."""

import datetime
import os
import signal
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from logchain import distributed

LENGTHS = torch.tensor([11, 5])


def operands_of(rank):
    return torch.zeros(2, (4, 3, 5)[rank], 3), torch.ones(1, 3, 3), torch.ones(3)


def product(x, bulk, p0, **options):
    return distributed.product(x, bulk, p0, **{"lengths": LENGTHS, **options})


def of_a_mesh(x, *others):
    product(DTensor.from_local(x, DeviceMesh("cpu", [1], _init_backend=False), [Replicate()]), *others)


def log_prob(change):  # of paths of state 0
    return lambda x, *others: distributed.log_prob(x, *others, change(torch.zeros(x.shape[:-1], dtype=torch.int64)))


def with_gradients(function):
    return lambda x, *others: function(x.requires_grad_(), *others)


def negative(operand, place, *operands):
    operands[operand][place] = -2.0
    product(*operands)


def second_derivative(function, x, *others):
    (gradient,) = torch.autograd.grad(function(x.requires_grad_(), *others).sum(), x, create_graph=True)
    gradient.sum().backward()


draw, count = partial(partial, distributed.sample), partial(partial, distributed.marginals)
OF_SEQUENCES, LONG = torch.vmap(distributed.product, (0, None, None)), torch.tensor([3, 13])
NO_GRADIENTS = "expected no gradients, as it has no derivative; use torch.no_grad()"

# the error on all ranks, the call of rank 1, and that of the others if it is not `product`
ERRORS = [
    (TypeError, "rank 1: x: expected a torch.Tensor, got list", lambda x, *others: product([1.0], *others)),
    (TypeError, "rank 1: x: expected a tensor of this rank alone, got a DTensor", of_a_mesh),
    (ValueError, "rank 1: x: expected at least 2 axes", lambda x, *others: product(x[0, 0], *others)),
    (ValueError, "rank 1: x: expected shape [2, v, 3] of torch.float32", lambda x, *o: product(x.double(), *o)),
    (NotImplementedError, "rank 1: logchain.distributed: expected no transform of", OF_SEQUENCES),
    (ValueError, "rank 1: gradients: expected False, as on", with_gradients(product)),
    (ValueError, "rank 1: bulk: expected shape", lambda x, bulk, p0: product(x, bulk[..., :2], p0)),
    (ValueError, "rank 1: bulk: expected axes [] before its", lambda x, bulk, p0: product(x, bulk[None], p0)),
    (ValueError, "rank 1: bulk: expected non-negative weights, got -2 at [0, 1, 0]", partial(negative, 1, (0, 1, 0))),
    (ValueError, "rank 0: bulk: expected 3 matrices, or 1 on", *[partial(product, one_matrix=False)] * 2),
    (ValueError, "rank 0: bulk: expected 3 matrices, or 1 on", lambda x, b, p0: product(x, b.expand(2, 3, 3), p0)),
    (ValueError, "rank 1: p0: expected non-negative weights, got -2 at [1]", partial(negative, 2, 1)),
    (TypeError, "rank 1: log_params: expected True or False, got 1", partial(product, log_params=1)),
    (ValueError, "rank 1: log_params: expected False, as on rank 0, got True", partial(product, log_params=True)),
    (ValueError, "rank 1: lengths: expected [", partial(product, lengths=LENGTHS.flip(0))),
    (TypeError, "rank 1: lengths: expected integers", partial(product, lengths=LENGTHS.double())),
    (ValueError, "lengths: expected values from 1 to v = 12, got 3 to 13", *[partial(product, lengths=LONG)] * 2),
    (ValueError, "lengths: expected values from 1 to v = 12, got 0 to 3", *[partial(product, lengths=[0, 3])] * 2),
    (ValueError, "rank 1: one_matrix: expected one of None, False, True,", partial(product, one_matrix="yes")),
    (ValueError, "rank 1: one_matrix: expected None, as on rank 0, got True", partial(product, one_matrix=True)),
    (ValueError, "rank 1: function: expected product, as on rank 0, got marginals", distributed.marginals),
    (ValueError, "rank 1: transitions: expected one of None, 'sum', 'full',", count(transitions="all"), count()),
    (ValueError, "rank 1: transitions: expected None, as on rank 0, got sum", count(transitions="sum"), count()),
    (ValueError, "rank 1: num_samples: expected 0 or more, got -1", draw(num_samples=-1), draw(num_samples=2)),
    (ValueError, "rank 1: num_samples: expected 2, as on rank 0, got 3", draw(num_samples=3), draw(num_samples=2)),
    (TypeError, "rank 1: states: expected integers", log_prob(torch.Tensor.double)),
    (ValueError, "rank 1: states: expected values from -1 to c - 1 = 2", log_prob(lambda z: z + 3), log_prob(abs)),
    (ValueError, "rank 1: states: expected axes [2]", log_prob(lambda z: z[None]), log_prob(abs)),
    *[
        (NotImplementedError, f"rank 0: {function.__name__}: {NO_GRADIENTS}", *[with_gradients(function)] * 2)
        for function in (distributed.marginals, distributed.viterbi, distributed.entropy)
    ],
    *[
        (RuntimeError, "logchain.distributed: expected one derivative", *[partial(second_derivative, function)] * 2)
        for function in (product, log_prob(abs))
    ],
    (ValueError, "x: expected at least one variable on some rank", *[lambda x, *o: product(x[:, :0], *o)] * 2),
    # of several wrong ranks the first
    (ValueError, "rank 0: p0: expected shape", lambda *_: product([], [], []), lambda x, b, p0: product(x, b, p0[:2])),
]  # fmt: skip


def with_error(rank, index):
    _, _, of_rank_1, *of_others = ERRORS[index]
    (of_rank_1 if rank == 1 else (*of_others, product)[0])(*operands_of(rank))


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=lambda index: ERRORS[index][1])
def test_an_error_on_one_rank_is_raised_on_all(teams, index):
    kind, text, *_ = ERRORS[index]
    for error in teams(3).errors(with_error, index):
        assert type(error) is kind and str(error).startswith(text), error


def outside_the_group(rank):
    group = dist.new_group([0])
    if rank == 1:
        distributed.product(*operands_of(rank), group=group)


def test_a_process_without_a_group_raises(teams):
    with pytest.raises(ValueError, match="group: expected a process group that contains this process"):
        teams(2).values(outside_the_group)
    with pytest.raises(RuntimeError, match="group: expected torch.distributed to be initialized"):
        distributed.product(*operands_of(0))


def gone(rank, how):
    """A product for which rank 1 is killed from the start, or stalls after the forward pass."""
    group = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=30 if how == "killed" else 3))
    x, bulk, p0 = operands_of(rank)
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
