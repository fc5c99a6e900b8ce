"""The GPU benchmark runs from its first line to its last where there is no GPU; the predictions are its model's."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import gpu, predictions, session

ROOT = Path(__file__).parents[1]


def test_dry_run(tmp_path):
    pytest.importorskip("triton")
    before = session.RESULTS.read_bytes() if session.RESULTS.exists() else None
    command = [sys.executable, "-m", "tests.benchmarks", "gpu", "--dry", f"--out={tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows} == {group.rstrip("s") for group in gpu.GROUPS}
    assert {row["device"] for row in rows} == {"CPU, dry run"}
    assert all(float(row["value"]) >= 0 for row in rows)
    promised = [row for row in rows if row["group"] == "accuracy" and row["floor"]]
    assert promised and all(float(row["value"]) <= float(row["floor"]) for row in promised)
    assert len(run.stdout.split("\n\n")[-1]) < 12_000
    # a results file is written by a real run only
    assert (session.RESULTS.read_bytes() if session.RESULTS.exists() else None) == before


def test_without_a_gpu_nothing_is_measured():
    if gpu.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu.main()


def test_predictions_are_up_to_date():
    with predictions.RESULTS.open(newline="") as file:
        assert list(map(tuple, csv.reader(file))) == [predictions.COLUMNS, *predictions.rows()]


def test_neighbours_of_a_tile():
    transitions = pytest.importorskip("logchain.kernels.gpu.transitions")
    tile = transitions.Tile(16, 16, 32, 1, 3)
    found = gpu.neighbours(tile)
    assert tile._replace(terms=64) in found and tile._replace(stages=2) in found and len(found) == 9
