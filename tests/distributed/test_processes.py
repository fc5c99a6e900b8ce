"""The harness itself: values, errors, deaths and stalls of ranks, none of which hangs."""

import os
import signal
import time

import torch
import torch.distributed as dist


def total(rank, factor):
    value = torch.tensor([float(factor * (rank + 1))])
    dist.all_reduce(value)
    return value


def fails(rank):
    if rank == 1:
        raise ValueError("of this rank")
    return rank


def dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def stalls(rank, seconds):
    if rank == 1:
        time.sleep(seconds)
        return
    dist.all_reduce(torch.zeros(1))


def test_each_rank_returns_a_value(teams):
    assert [value.item() for value in teams(2).values(total, 5)] == [15.0, 15.0]
    assert [value.item() for value in teams(3).values(total, 1)] == [6.0] * 3


def test_an_error_is_that_of_its_rank(teams):
    first, second = teams(2).run(fails)
    assert first.value == 0 and first.error is None
    assert isinstance(second.error, ValueError) and "of this rank" in str(second.error)
    assert [value.item() for value in teams(2).values(total, 2)] == [6.0, 6.0]


def test_others_learn_of_a_death(teams):
    first, second = teams(2).run(dies)
    assert isinstance(first.error, RuntimeError)
    assert second.exit == -signal.SIGKILL
    assert [value.item() for value in teams(2).values(total, 1)] == [3.0, 3.0]  # of a new team


def test_others_wait_no_longer_than_the_timeout(teams):
    begin = time.monotonic()
    first, _ = teams(2).run(stalls, 4.5)
    assert isinstance(first.error, RuntimeError) and "Timed out" in str(first.error)
    assert time.monotonic() - begin > 2
