"""The call for a GPU machine in a dry run: rows of correct and wrong results, and groups that hang."""

import json
import subprocess
import sys

import pytest

from tests.benchmarks import gpu_day

pytest.importorskip("triton")


def dry(folder, *groups):
    """The exit code and the rows of a dry run."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu_day", "dry", "--out", str(folder), "--only", *groups]
    process = subprocess.run(command, cwd=gpu_day.ROOT, capture_output=True, text=True, check=False)
    assert not process.stderr
    return process.returncode, list(map(json.loads, (folder / "rows.jsonl").read_text().splitlines()))


@pytest.mark.slow
def test_correct_group_is_ok(tmp_path):
    code, rows = dry(tmp_path, "matmul")
    assert code == 0 and all(row["ok"] and row["group"] == "matmul" for row in rows)
    checked = [row for row in rows if "errors" in row]
    assert len(checked) == 4 and all(row["differ"] == 0 and max(row["errors"]) < 1e-4 for row in checked)


def test_wrong_result_is_not_ok(tmp_path):
    code, rows = dry(tmp_path, "wrong")
    checked = [row for row in rows if "errors" in row]
    assert code == 1 and len(checked) == 2 and not any(row["ok"] for row in checked)


def test_group_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "HIDDEN", {"hang": 1.0})
    assert gpu_day.main(["dry", "--out", str(tmp_path), "--only", "hang"]) == 1
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])
    assert row["killed"] and not row["ok"] and row["seconds"] < 30


def test_decision_follows_times():
    rows = [{"group": "times", "case": gpu_day.MAIN, "halved_ms": ours, "one_way_ms": 1.0} for ours in (0.5, 0.9)]
    decided = [gpu_day.decisions([row])[0] for row in rows]
    assert [row["decision"] for row in decided] == ["stays", "delete them"] and decided[0]["ratio"] == 0.5
    assert not gpu_day.decisions([])
