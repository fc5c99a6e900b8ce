"""Walks along chains that are computed at once: each asks for calls of the C library, which one team makes together."""

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import torch

from .arguments import run_each

Result = TypeVar("Result")


class Calls(NamedTuple):
    """An array of arguments for a function of the library, each to be called on a thread of its own."""

    name: str
    dtype: torch.dtype
    arguments: Any


# gives the calls that it needs, is sent the sum of what they return, and returns a result
Walk = Generator[Calls, int, Result]


def at_once(*walks: Walk[Result]) -> list[Result]:
    """The results of walks that ask for the same functions, on as many threads as all of their calls."""
    results: dict[int, Result] = {}
    sums: dict[int, Any] = dict.fromkeys(range(len(walks)))  # a walk begins when it is sent None
    while sums:
        asked: dict[int, Calls] = {}
        for i, total in sums.items():
            try:
                asked[i] = walks[i].send(total)
            except StopIteration as done:
                results[i] = done.value
        sums = _sums(asked)
    return [results[i] for i in range(len(walks))]


def _sums(asked: dict[int, Calls]) -> dict[int, int]:
    """The sums of what the calls of each walk return."""
    if not asked:
        return {}
    name, dtype, first = next(iter(asked.values()))
    assert all((calls.name, calls.dtype) == (name, dtype) for calls in asked.values())
    arguments = first
    if len(asked) > 1:
        every = [one for calls in asked.values() for one in calls.arguments]
        arguments = (type(every[0]) * len(every))(*every)
    returned = iter(run_each(arguments, dtype, name))
    return {i: sum(next(returned) for _ in calls.arguments) for i, calls in asked.items()}
