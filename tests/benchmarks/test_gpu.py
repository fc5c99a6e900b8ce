"""The figures of a GPU are measured, in a dry run, where there is none."""

import functools
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
import torch

from tests.benchmarks import (
    aside,
    gpu,
    gpu_figures,
    kept,
    peers,
    peers_gpu,
    peers_gpu_case,
    results,
    session,
)
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import ONE, STEP, WORKLOADS, Workload
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured, OnGpu
from tests.conftest import INTERPRETED

# the two that are left out are of the kind of the main job, and a process each takes its time
OTHERS = [group for group in gpu.GROUPS if group not in ("own matrices", "one long chain", "peers")]


def call(*arguments):
    """`python -m tests.benchmarks gpu` in a process of its own that sees no device."""
    command = [sys.executable, "-m", "tests.benchmarks", "gpu", *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=results.ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_dry_run(tmp_path):
    pytest.importorskip("triton")
    before = [path.read_bytes() if path.exists() else None for path in (results.ON_GPU, results.LEFT_OUT)]
    folder, out = tmp_path / "folder", tmp_path / "out"
    run = call("--dry", "--folder", folder, "--out", out, "--only", *OTHERS)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    rows = results.read(out / "gpu.csv", OnGpu)
    kept_rows = folder / results.digest() / "gpu.csv"
    assert results.read(kept_rows, OnGpu) == rows
    assert {row.group for row in rows} == set(OTHERS) and {row.hardware for row in rows} == {"CPU, dry run"}
    assert all(row.value >= 0 for row in rows if row.metric not in ("mean signed error", "error"))
    promised = [row for row in rows if row.metric == "error" and row.floor]
    assert promised and all(abs(row.value) <= row.floor for row in promised)
    heads = [line for line in run.stdout.splitlines() if line.startswith("measuring: ")]
    assert [head.split()[1].rstrip(",") for head in heads][:2] == ["arithmetic", "floors"]
    assert len(run.stdout.split("\n\n")[-1]) < 12_000
    # a results file is written by a real run only
    assert [path.read_bytes() if path.exists() else None for path in (results.ON_GPU, results.LEFT_OUT)] == before
    # what has a row is not measured again, what lost its rows is
    finished = kept_rows.with_name("finished.jsonl")
    lines = [line for line in finished.read_text().splitlines(True) if "exp2 of" not in line]
    finished.write_text("".join(lines))
    again = call("--dry", "--folder", folder, "--only", "arithmetic", "floors")
    assert again.returncode == 0 and again.stdout.count("Item(") == 1
    assert len(results.read(kept_rows, OnGpu)) == len(rows)


def fails(this, item):
    """A measurement: of two figures one fails, and one ends its process."""
    if item.workload == "fails":
        raise RuntimeError("CUDA error: an illegal memory access")
    if item.workload == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    yield OnGpu("main job", item.workload, item.provider, item.mode, "", "time", 1.0, "ms")


def items(dry):
    return [Item(name, "logchain", FORWARD) for name in ("one", "fails", "two", "ends", "three")]


def every_fails():
    return {"main job": gpu_figures.Group(items, fails)}


def in_a_process(dry, name, end, floors, todo):
    """As `gpu.measured`, in a process that measures the figures above."""
    with mock.patch.object(gpu_figures, "every", every_fails):
        yield from gpu.measured(dry, name, end, floors, todo)


def test_what_fails_is_said_by_name_and_the_rest_is_measured(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_figures, "every", every_fails)
    monkeypatch.setattr(gpu, "measured", in_a_process)
    assert gpu.measure(folder=tmp_path, minutes=1, only=["main job"], dry=True) == gpu.FAILED
    said = capsys.readouterr().out.split("\n\n")[-1]
    assert "FAILED fails logchain forward: RuntimeError: CUDA error: an illegal memory access" in said
    assert "FAILED ends logchain forward: ended by SIGKILL" in said
    assert [row.workload for row in results.read(tmp_path / "dry" / "gpu.csv", OnGpu)] == ["one", "two", "three"]
    # what failed is tried again, and fails again: nothing of it is forgotten
    assert gpu.measure(folder=tmp_path, minutes=1, only=["main job"], dry=True) == gpu.FAILED
    said = capsys.readouterr().out
    assert "FAILED fails" in said and "FAILED ends" in said and said.count("Item(") == 2


@pytest.mark.skipif(not INTERPRETED, reason="shows what a device would, without one")
@pytest.mark.parametrize("truncating", [False, True])
def test_the_first_numbers_show_how_products_are_rounded(truncating, monkeypatch):
    builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    from tests.benchmarks import gpu_arithmetic
    from tests.kernels.gpu import interpreter

    for name, method in interpreter.methods(truncating=truncating).items():
        monkeypatch.setattr(builder, name, method)
    found, truth = gpu_arithmetic.product(64, "tf32x3", 2, "cpu")
    mean = (found / truth - 1).mean()
    assert mean < -1e-7 if truncating else abs(mean) < 2e-8
    found, truth = gpu_arithmetic.exp2(-torch.arange(2048) / 2048, "cpu")
    assert np.abs(found / truth - 1).max() <= 2.0**-23
    found, truth = gpu_arithmetic.chain(20, 4, "cpu")
    assert abs(truth) < 1e-5 and abs(found - truth) < 20 * (4 * 4 + 8) * 2.0**-24


def test_without_time_nothing_is_measured_and_nothing_failed(tmp_path, capsys, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(session, "hardware", lambda dry: "a GPU")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    assert gpu.measure(folder=tmp_path, minutes=0, only=["main job"]) == gpu.CUT
    said = "NO TIME FOR 4, the first of them product n=500 v=40 c=200, shared bulk logchain forward, highest"
    assert said in capsys.readouterr().out


def a_row(provider, device, *, value=2.0, error=None):
    return Measured(str(peers_gpu.TINY[0]), provider, FORWARD, device, value, 1.0, 3.0, 1.0, value_error=error)


def test_everybody_on_a_gpu_in_a_dry_run(tmp_path):
    tracked = [path.read_bytes() for path in (results.PEERS, results.LEFT_OUT)]
    out = tmp_path / "out"
    before = [a_row("torch loop", "CPU"), a_row("torch loop", "GPU", value=1e9), a_row("other", "GPU")]
    (tmp_path / "dry").mkdir()
    kept.keep(tmp_path / "dry" / "peers.csv", before)
    peers_gpu.measure(gpu.Files(tmp_path, out, True), True, time.monotonic() + 600, ["torch loop"])
    rows = results.read(out / "peers.csv", Measured)
    assert before[0] in rows and before[2] in rows and len(rows) == 2 + 2 * len(peers_gpu.TINY)
    new = [row for row in rows if row not in before]
    assert {row[:4] for row in new} == {
        (str(workload), "torch loop", mode, "GPU") for workload in peers_gpu.TINY for mode in (FORWARD, GRADIENTS)
    }
    for row in new:
        assert row.hardware == "CPU, dry run" and row.date and row.share == 1.0
        assert 0 < row.lower_ms <= row.median_ms <= row.upper_ms < 1e6 and row.logchain_ms > 0 and row.peak_mb > 0
        assert row.value_error < 1e-5 and (row.gradient_error is None) == (row.mode == FORWARD)
        assert row.gradient_error is None or row.gradient_error < 1e-5
    left_out = kept.left_out(out / "left_out.csv")
    assert [entry[:4] for entry in left_out] == [("peers on a GPU", "", "jax, dynamax, numpyro", "")]
    assert [path.read_bytes() for path in (results.PEERS, results.LEFT_OUT)] == tracked
    # all have their rows: nothing is measured again
    with mock.patch.object(aside, "measure") as measuring:
        peers_gpu.measure(gpu.Files(tmp_path, None, True), True, time.monotonic() + 600, ["torch loop"])
    measuring.assert_not_called()


def test_a_real_run_writes_results_and_copies_of_them(tmp_path, monkeypatch):
    folder, out = tmp_path / "results", tmp_path / "out"
    monkeypatch.setattr(results, "FOLDER", folder)
    monkeypatch.setattr(session, "hardware", lambda dry: "a GPU")
    folder.mkdir()
    kept.keep(folder / "peers.csv", [a_row("one", "CPU")])
    files = gpu.Files(tmp_path / "run", out, False)
    figure = OnGpu("main job", "a", "logchain", FORWARD, "highest", "time", 1.5, "ms", lower=1.0)
    late = Missing("", "a", "one", GRADIENTS, "no time left")
    for row in (a_row("one", "GPU"), figure):
        files.tell(row)
    files.leave_out(peers_gpu.GROUP, files.rows[:1], [late])
    assert {row.device: row.hardware for row in results.read(folder / "peers.csv", Measured)} == {
        "CPU": "",
        "GPU": "a GPU",
    }
    assert results.read(folder / "gpu.csv", OnGpu) == [figure._replace(hardware="a GPU")]
    assert kept.left_out(folder / "left_out.csv") == [late._replace(results="peers on a GPU")]
    for name in ("peers.csv", "left_out.csv", "gpu.csv"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    # the next call knows its rows, and puts them into a tree that came anew; after a change of a file it does not
    (folder / "gpu.csv").unlink()
    assert gpu.Files(tmp_path / "run", out, False).rows == [files.rows[1], files.rows[0]]
    assert results.read(folder / "gpu.csv", OnGpu) == [files.rows[1]]
    monkeypatch.setattr(results, "digest", lambda: "another")
    assert gpu.Files(tmp_path / "run", out, False).rows == []


def providers(asleep=()):
    """By name; one never wakes up in the modes that are given."""

    def make(case, mode):
        def run():
            time.sleep(60 if mode in asleep else 0)
            return None, None

        return run

    found = peers.Provider("one", make, "torch", floor=True)
    return {"one": found, "logchain": found._replace(make=lambda case, mode: lambda: (None, None))}


SMALL = [Workload(2, 5, 3, STEP), Workload(2, 6, 3, ONE)]
ITEMS = [Item(workload, "one", mode) for workload in SMALL for mode in (FORWARD, GRADIENTS)]


def asleep(folder, todo):
    """In a process of its own: gradients are never ready."""
    with (
        mock.patch.object(peers, "every", lambda: providers(asleep=[GRADIENTS])),
        mock.patch.object(peers_gpu, "STUCK", (5.0, 5.0)),
        mock.patch.object(session, "STUCK", (5.0, 5.0)),
    ):
        yield from peers_gpu.times(True, folder, 50.0, time.monotonic() + 300, todo)


def test_what_hangs_is_stopped_and_the_rest_goes_on(tmp_path):
    rows, missing = aside.measure("torch", ITEMS, functools.partial(asleep, tmp_path), words=session.WORDS)
    assert [row[:3] for row in rows] == [ITEMS[0].key, ITEMS[2].key]
    assert [entry[1:5] for entry in missing] == [(*item.key, "stopped, takes too long") for item in ITEMS[1::2]]


@pytest.mark.parametrize(("seconds", "alive"), [(60.0, True), (60.0, False), (-1.0, True)])
def test_a_process_ends_with_its_time_and_with_the_device(seconds, alive, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "every", providers)
    monkeypatch.setattr(session.Session, "answers", lambda _: alive)
    found = list(peers_gpu.times(True, tmp_path, seconds, time.monotonic() + 60, ITEMS))
    begun, said = found[::2], found[1::2]
    assert begun == (ITEMS if alive else ITEMS[:1])
    if seconds < 0:
        assert said == [Missing("", *item.key, "no time left") for item in ITEMS]
    else:
        assert [row[:3] for row in said] == [item.key for item in begun]


def test_logchain_and_the_floors_come_first():
    (package, items), *others = peers_gpu.processes(WORKLOADS)
    assert package == "torch" and {item.provider for item in items} == {"logchain", "GEMMs alone", "bytes copied"}
    assert items[0] == (Workload(500, 40, 200, STEP), "logchain", FORWARD)
    every = peers.every()
    for package, items in others:
        (name,) = {item.provider for item in items}
        assert peers.GPU in every[name].devices and every[name].package == package


def test_quartiles_of_few_times_lie_between_them():
    assert session._quartiles([5.0, 1.0]) == (3.0, 2.0, 4.0) and session._quartiles([2.0]) == (2.0, 2.0, 2.0)


class Event:
    """As of CUDA, by the host's clock."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_the_way_of_a_real_run_with_a_stand_in_for_cuda(tmp_path, monkeypatch):
    allocated = dict(memory_allocated=lambda: 5_000_000, max_memory_allocated=lambda: 8_000_000)
    quiet = dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    for name, stand_in in (allocated | quiet | {"Event": Event}).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = mock.Mock(side_effect=lambda call: call)
    monkeypatch.setattr(session, "_captured", graphs)
    real = session.Session(dry=False, end=time.monotonic() + 60)
    real.device = "cpu"
    for name, sets in (("torch loop", 0), ("GEMMs alone", 8)):
        item = Item(SMALL[0], name, GRADIENTS)
        (row,) = peers_gpu_case.measured(real, tmp_path, item)
        assert row[:4] == (*item.key, "GPU") and row.peak_mb == 3.0
        assert 0 < row.lower_ms <= row.median_ms <= row.upper_ms and row.logchain_ms > 0
        assert graphs.call_count == sets  # floors alone, on as many sets of inputs
    assert real.answers()
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("illegal memory access")))
    assert not real.answers()


def test_table_of_everybody():
    rows = [a_row("two", "GPU", value=30.0, error=float("nan")), a_row("logchain", "GPU", value=1.0, error=1e-6)]
    table = peers_gpu.table([*rows, rows[1]._replace(mode=GRADIENTS)])
    assert list(table) == [(str(peers_gpu.TINY[0]), GRADIENTS), (str(peers_gpu.TINY[0]), FORWARD)]
    assert list(table.values()) == [["logchain 1 ms"], ["logchain 1 ms", "two 30x?"]]
    assert f"{peers_gpu.TINY[0]} forward: logchain 1 ms; two 30x?" in gpu.summary(rows, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    run = call("--folder", tmp_path)
    assert run.returncode == 1 and "no GPU here" in run.stderr
