"""Each provider in a process of its own: what ends one is named, and the rest goes on."""

import os
import signal
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from tests.benchmarks import aside
from tests.benchmarks.aside import Item
from tests.benchmarks.results import FORWARD, GRADIENTS
from tests.benchmarks.test_kept import row

ITEMS = [Item(workload, "one", mode) for workload in ("a", "b", "c") for mode in (FORWARD, GRADIENTS)]


def half_of_it(todo):
    """In a process of its own: a row, an error, then the end, or silence for ever, as an item says."""

    def one(item):
        if item.key == ITEMS[1].key:
            raise ArithmeticError("cannot\n  do this")
        if item.key == ITEMS[2].key:
            os.kill(os.getpid(), signal.SIGPROF)
        if item.key == ITEMS[4].key:
            signal.pause()
        yield row(*item.key, value=len(todo))

    return aside.attempts(todo, one)


@pytest.fixture
def impatient(monkeypatch):
    """Waits for a process as long as it takes, but not for the item that never ends."""
    poll, recv, said = Connection.poll, Connection.recv, []

    def receive(connection):
        said.append(recv(connection))
        return said[-1]

    def wait(connection, patience):
        if said[-1:] == ITEMS[4:5]:
            said.clear()
            return False
        return poll(connection, None)

    monkeypatch.setattr(Connection, "recv", receive)
    monkeypatch.setattr(Connection, "poll", wait)


@pytest.mark.skipif(sys.platform != "linux", reason="ends processes as Linux does")
@pytest.mark.usefixtures("impatient")
def test_what_ends_a_process_is_named_and_the_rest_goes_on():
    rows, missing = aside.measure("torch", ITEMS, half_of_it, silence=40.0, words={"SIGPROF": "longer than 60 s"})
    assert [found[:5] for found in rows] == [
        ("a", "one", FORWARD, "time", 6),
        ("b", "one", GRADIENTS, "time", 3),
        ("c", "one", GRADIENTS, "time", 1),
    ]
    assert rows[0].versions.count(f"torch {torch.__version__}") == 1 and rows[0].hardware and rows[0].date
    assert [entry[1:5] for entry in missing] == [
        (*ITEMS[1].key, "ArithmeticError: cannot do this"),
        (*ITEMS[2].key, "longer than 60 s"),
        (*ITEMS[4].key, "stopped, silent for 40 s"),
    ]
    assert all(entry.versions == rows[0].versions for entry in missing)


def broken(todo):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("package", "task", "reason"),
    [("no-such-package", half_of_it, "no-such-package is not installed"), ("torch", broken, "ended with code 3")],
)
def test_what_does_not_begin_is_reported_once(package, task, reason):
    rows, missing = aside.measure(package, ITEMS, task)
    assert not rows and [entry[:5] for entry in missing] == [("", "", "one", "", reason)]
