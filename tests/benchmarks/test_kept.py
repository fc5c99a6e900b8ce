"""Results files: rows of the same case are replaced, reasons forgotten, and all is read as it was written."""

import math

from tests.benchmarks import kept, results
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import FORWARD, Measured, Row


def row(workload, provider, mode=FORWARD, metric="time", value=1.0):
    return Row(workload, provider, mode, metric, value, "ms")


def test_rows_of_the_same_case_are_replaced_and_others_stay(files):
    path = files / "some.csv"
    kept.keep(path, [row("b", "one"), row("a", "one"), row("a", "one", metric="share"), row("a", "two")], ["a", "b"])
    kept.keep(path, [row("a", "one", value=2.0)], ["a", "b"])
    assert [(*r[:4], r.value) for r in results.read(path)] == [
        ("a", "two", FORWARD, "time", 1.0),
        ("a", "one", FORWARD, "time", 2.0),
        ("b", "one", FORWARD, "time", 1.0),
    ]


def test_reasons_are_replaced_and_forgotten_once_there_is_a_number(files):
    absent, failed = Missing("", "", "one", "", "not installed"), Missing("", "a", "two", FORWARD, "NaN")
    kept.leave_out("memory", [], [absent, failed])
    kept.leave_out("accuracy", [], [absent])
    kept.leave_out("memory", [], [failed._replace(reason="too slow")])
    assert [entry.reason for entry in kept.left_out()] == ["not installed", "not installed", "too slow"]
    kept.leave_out("memory", [row("a", "one"), row("a", "two")], [])
    assert kept.left_out() == [absent._replace(results="accuracy")]


def test_files_without_a_commit_are_read(files):
    path = files / "old.csv"
    path.write_text("workload,provider,mode,metric,value,unit\na,one,forward,time,1.5,ms\n")
    assert results.read(path) == [Row("a", "one", "forward", "time", 1.5, "ms")]


def test_rows_are_read_as_they_were_written(files):
    rows = [
        Measured("a", "one", FORWARD, "CPU", 1.5, 1.0, 2.0, 0.5),
        Measured(
            "a", "one", FORWARD, "GPU", 1.5, 1.0, 2.0, 0.5, 0.25, 3.0, math.inf, 0.0, "cpu", "torch", "today", "c"
        ),
    ]
    kept.keep(results.PEERS, rows)
    assert results.read(results.PEERS, Measured) == rows
    kept.keep(results.PEERS, [rows[0]._replace(median_ms=3.0)])
    assert [(row.device, row.ratio) for row in results.read(results.PEERS, Measured)] == [("GPU", 3.0), ("CPU", 6.0)]
