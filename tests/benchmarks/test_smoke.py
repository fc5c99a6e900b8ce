"""One case of a peer is measured, kept and refused if it is wrong; reports are written from what is kept."""

import math

import numpy as np
import pytest
import torch

from tests.benchmarks import comparisons, report, run
from tests.benchmarks.cases import FULL, GRADIENTS, MODES, STEP, Workload, accuracy, draw, truth
from tests.benchmarks.run import RATIO, TIME, Row, Task


def test_peer_in_a_process_has_times_and_ratios(tmp_path):
    workload, path = Workload(2, 5, 3, STEP), tmp_path / "results.csv"
    rows = run.measure(Task("peers/tiny/torch loop", run.peer, ("peers", workload, "torch loop")))
    assert [row[:3] for row in rows] == [
        (f"peers/{workload}/{mode}", "torch loop", metric) for mode in MODES for metric in (TIME, RATIO)
    ]
    assert all(0 < row.lower <= row.value <= row.upper and row.version and row.hardware and row.date for row in rows)
    old = Row(rows[0].case, "torch loop", run.SHARE, 0.5), Row(rows[0].case, "pyro", TIME, 1.0)
    run.keep(old, path)
    run.keep(rows, path)
    kept = run.read(path)
    assert [row[:3] for row in kept] == [old[1][:3], *(row[:3] for row in rows)]
    assert [row.value for row in kept[1:]] == pytest.approx([row.value for row in rows], rel=1e-5)


def test_peer_that_ends_its_process_has_no_row(capfd):
    assert run.measure(Task("accuracy/dense/none", run.errors, ("dense", "none"))) == []
    assert "accuracy/dense/none: ended with 1" in capfd.readouterr().out


@pytest.mark.parametrize("matrices", [STEP, FULL])
def test_values_that_disagree_with_float64_are_not_timed(matrices):
    case = draw(Workload(2, 4, 3, matrices))
    exact = truth(case)
    answer = run.PEERS["logchain"].make(case, GRADIENTS)()
    run.check(answer, exact)
    for wrong in ((answer[0] * 1.01, None), (answer[0] * math.nan, None), (answer[0], answer[1] + 20)):
        with pytest.raises(ArithmeticError):
            run.check(wrong, exact)


def test_errors_of_logchain_are_within_its_contract():
    """Of a family where float32 underflows."""
    errors = {row.metric: row.value for row in run.errors("misaligned maxima: two peaks", "logchain")}
    assert errors[run.VALUE_ERROR] < 1e-6 and errors[run.GRADIENT_ERROR] < 1e-6
    assert errors[run.VALUE] == pytest.approx(-69.0776, abs=1e-4) and len(accuracy()) == 10


def test_comparison_has_a_time_and_a_ratio_by_provider():
    tiny = next(comparisons.ctc(steps=8, labels=2, n=2, classes=4))
    assert [row[1:3] for row in run.compare(tiny)] == [
        ("logchain", TIME), ("torch's ctc_loss", TIME), ("torch's ctc_loss", RATIO)
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        comparisons.agree(torch.ones(2), np.array([1.0, 1.01]))


def test_every_kind_of_case_has_rows_and_a_table():
    assert {task.name.partition("/")[0] for task in run.tasks()} == {row.case.partition("/")[0] for row in run.read()}
    assert all(write().startswith("Measured on ") for write in report.TABLES.values())
