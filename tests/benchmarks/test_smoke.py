"""Cases are measured, kept, and refused if they are wrong; tables and plots are written; the GPU call runs dry."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.benchmarks import cases, gpu_day, report, run, structures
from tests.benchmarks.cases import FULL, GRADIENTS, STEP, Comparison, Part, Workload
from tests.benchmarks.run import RATIO, TIME, Row, Task

TINY = Workload(2, 5, 3, STEP)


def test_peer_in_a_process_has_times_and_ratios(tmp_path):
    path = tmp_path / "results.csv"
    rows = run.measure(Task("peers/tiny/torch loop", run.peer, ("peers", TINY, "torch loop")))
    assert [row[:3] for row in rows] == [
        (f"peers/{TINY}/{GRADIENTS}", "torch loop", metric) for metric in (TIME, RATIO)
    ]
    assert all(0 < row.lower <= row.value <= row.upper and row.version and row.hardware and row.date for row in rows)
    old = Row(rows[0].case, "torch loop", run.SHARE, 0.5), Row(rows[0].case, "pyro", TIME, 1.0)
    run.keep(old, path)
    run.keep(rows, path)
    kept = run.read(path)
    assert [row[:3] for row in kept] == [old[1][:3], *(row[:3] for row in rows)]
    assert [row.value for row in kept[1:]] == pytest.approx([row.value for row in rows], rel=1e-5)


@pytest.mark.parametrize("matrices", [STEP, FULL])
def test_values_that_disagree_with_float64_exceed_their_tolerance(matrices):
    case = cases.draw(TINY._replace(matrices=matrices))
    exact = cases.truth(case)
    values, gradients = run.PEERS["logchain"].make(case)()
    assert run.excess((values, gradients), exact) < 0.01
    for wrong in ((values * 1.01, gradients), (values * math.nan, gradients), (values, gradients + 20)):
        assert not run.excess(wrong, exact) <= 1


def test_peer_with_wrong_values_is_not_timed(monkeypatch):
    wrong = run.PEERS["torch loop"]._replace(make=lambda case: lambda: (case.x[:, 0, 0], case.x))
    monkeypatch.setitem(run.PEERS, "torch loop", wrong)
    assert [row.metric for row in run.peer("peers", TINY, "torch loop")] == [run.EXCESS]


def test_comparison_has_a_time_and_a_ratio_by_provider():
    """A ratio is large where logchain is faster; the time of a part of the work counts as that of all."""
    short = lambda: sum(range(1000))  # noqa: E731
    calls = {"logchain": short, "slow": lambda: sum(range(100_000)), "part": Part(short, 0.01)}
    rows = {row[1:3]: row.value for row in run.compare(Comparison("kind/size/mode", calls))}
    metrics = {"logchain": [TIME], "slow": [TIME, RATIO], "part": [TIME, RATIO, run.SHARE]}
    assert list(rows) == [(name, metric) for name in metrics for metric in metrics[name]]
    for name in ("slow", "part"):
        assert rows[name, RATIO] > 10 and rows[name, TIME] > 10 * rows["logchain", TIME]


def test_comparison_of_different_values_is_refused():
    assert next(structures.ctc(steps=8, labels=2, n=2, classes=4)).calls
    with pytest.raises(AssertionError):
        cases.agree(torch.ones(2), np.array([1.0, 1.01]))


@pytest.mark.filterwarnings("ignore:.* does not define `arg_constraints`")
def test_durations_agree_with_a_recursion_and_have_times_and_memory():
    pytest.importorskip("torch_struct", exc_type=ImportError)
    comparison, *peaks = itertools.islice(run.of_durations(3, 4, n=2, v=9), 3)
    assert {"logchain", "torch segment recursion"} <= set(comparison.calls)
    assert [row[1:3] for row in peaks] == [(name, run.PEAK) for name in ("logchain", "torch segment recursion")]


def test_every_kind_of_case_has_rows_and_tables_have_text():
    assert {task.name.partition("/")[0] for task in run.tasks()} == {row.case.partition("/")[0] for row in run.read()}
    assert all(write().startswith("Measured on ") for write in report.TABLES.values())


def test_plots_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "PICTURES", tmp_path)
    report.plot_jobs()
    report.plot_scaling()
    assert "best paths" in (tmp_path / "jobs.svg").read_text() and "states c" in (tmp_path / "scaling.svg").read_text()


@pytest.mark.parametrize(("group", "ok"), [("wrong", False), pytest.param("matmul", True, marks=pytest.mark.slow)])
def test_group_of_a_dry_run_is_ok_if_its_results_are_correct(group, ok, tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.benchmarks.gpu_day", "dry", "--out", str(tmp_path), "--only", group]
    process = subprocess.run(command, cwd=gpu_day.ROOT, capture_output=True, text=True, check=False)
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    checked = [row for row in rows if "errors" in row]
    assert not process.stderr and process.returncode == (not ok) and {row["group"] for row in rows} == {group}
    assert len(checked) == (4 if ok else 2) and all(row["ok"] == ok for row in checked)
    if ok:
        assert all(row["ok"] for row in rows)
        assert all(row["differ"] == 0 and max(row["errors"]) < 1e-4 for row in checked)


def test_group_that_hangs_is_killed(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_day, "HIDDEN", {"hang": 1.0})
    assert gpu_day.main(["dry", "--out", str(tmp_path), "--only", "hang"]) == 1
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])
    assert row["killed"] and not row["ok"] and row["seconds"] < 30


def test_decision_follows_times():
    rows = [{"group": "times", "case": gpu_day.MAIN, "halved_ms": ours, "one_way_ms": 1.0} for ours in (0.5, 0.9)]
    decided = [gpu_day.decisions([row])[0] for row in rows]
    assert [row["decision"] for row in decided] == ["stays", "delete them"] and decided[0]["ratio"] == 0.5
    assert not gpu_day.decisions([])
