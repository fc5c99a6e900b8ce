"""The GPU benchmark runs from its first line to its last where there is no GPU; the predictions are its model's."""

import csv
import functools
import re
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.benchmarks import aside, gpu, kept, peers, peers_gpu, peers_gpu_case, predictions, results, session, wheels
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import ONE, STEP, WORKLOADS, Workload
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured

ROOT = Path(__file__).parents[1]
OTHERS = [group for group in gpu.GROUPS if group != "peers"]


def test_dry_run(tmp_path):
    pytest.importorskip("triton")
    before = session.RESULTS.read_bytes() if session.RESULTS.exists() else None
    command = [sys.executable, "-m", "tests.benchmarks", "gpu", "--dry", f"--out={tmp_path}", "--only", *OTHERS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows} == {group.rstrip("s") for group in OTHERS}
    assert {row["device"] for row in rows} == {"CPU, dry run"}
    assert all(float(row["value"]) >= 0 for row in rows)
    promised = [row for row in rows if row["group"] == "accuracy" and row["floor"]]
    assert promised and all(float(row["value"]) <= float(row["floor"]) for row in promised)
    assert len(run.stdout.split("\n\n")[-1]) < 12_000
    # a results file is written by a real run only
    assert (session.RESULTS.read_bytes() if session.RESULTS.exists() else None) == before


@pytest.fixture
def dry(tmp_path):
    """A dry session that writes into this test's folder."""
    return session.Session(dry=True, minutes=5, out=tmp_path)


def a_row(provider, device, *, value=2.0, error=None):
    return Measured(str(peers_gpu.TINY[0]), provider, FORWARD, device, value, 1.0, 3.0, 1.0, value_error=error)


def test_everybody_on_a_gpu_in_a_dry_run(dry):
    tracked = [path.read_bytes() for path in (results.PEERS, results.LEFT_OUT)]
    before = [a_row("torch loop", "CPU"), a_row("torch loop", "GPU", value=1e9), a_row("other", "GPU")]
    kept.keep(dry.out / "peers.csv", before)
    peers_gpu.measure(dry, ["torch loop"])
    rows = results.read(dry.out / "peers.csv", Measured)
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
    left_out = kept.left_out(dry.out / "left_out.csv")
    assert [entry[:4] for entry in left_out] == [("peers on a GPU", "", "jax, dynamax, numpyro", "")]
    assert [path.read_bytes() for path in (results.PEERS, results.LEFT_OUT)] == tracked


def test_a_real_run_writes_results_and_copies_of_them(tmp_path, monkeypatch):
    folder, out = tmp_path / "results", tmp_path / "out"
    for name, path in (("FOLDER", folder), ("PEERS", folder / "peers.csv"), ("LEFT_OUT", folder / "left_out.csv")):
        monkeypatch.setattr(results, name, path)
    folder.mkdir()
    kept.keep(results.PEERS, [a_row("one", "CPU")])
    late = Missing("", "a", "one", GRADIENTS, "no time left")
    peers_gpu.write(session.Session(dry=False, minutes=1, out=out), [a_row("one", "GPU")], [late])
    assert set(results.read(results.PEERS, Measured)) == {a_row("one", "CPU"), a_row("one", "GPU")}
    assert kept.left_out() == [late._replace(results="peers on a GPU")]
    for name in ("peers.csv", "left_out.csv"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


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
        mock.patch.object(peers_gpu, "_STUCK", (5.0, 5.0)),
    ):
        yield from peers_gpu.times(True, folder, [], 50.0, time.monotonic() + 300, todo)


def test_what_hangs_is_stopped_and_the_rest_goes_on(tmp_path):
    rows, missing = aside.measure("torch", ITEMS, functools.partial(asleep, tmp_path), words=peers_gpu.WORDS)
    assert [row[:3] for row in rows] == [ITEMS[0].key, ITEMS[2].key]
    assert [entry[1:5] for entry in missing] == [(*item.key, "stopped, takes too long") for item in ITEMS[1::2]]


@pytest.mark.parametrize(("seconds", "alive"), [(60.0, True), (60.0, False), (-1.0, True)])
def test_a_process_ends_with_its_time_and_with_the_device(seconds, alive, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "every", providers)
    monkeypatch.setattr(peers_gpu, "answers", lambda _: alive)
    found = list(peers_gpu.times(True, tmp_path, [], seconds, time.monotonic() + 60, ITEMS))
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
    real = session.Session(dry=False, minutes=1, out=None)
    real.device = "cpu"
    for name, sets in (("torch loop", 0), ("GEMMs alone", 8)):
        item = Item(SMALL[0], name, GRADIENTS)
        (row,) = peers_gpu_case.measured(real, tmp_path, item)
        assert row[:4] == (*item.key, "GPU") and row.peak_mb == 3.0
        assert 0 < row.lower_ms <= row.median_ms <= row.upper_ms and row.logchain_ms > 0
        assert graphs.call_count == sets  # floors alone, on as many sets of inputs
    assert peers_gpu.answers(real)
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("illegal memory access")))
    assert not peers_gpu.answers(real)


def test_table_of_everybody():
    rows = [a_row("two", "GPU", value=30.0, error=float("nan")), a_row("logchain", "GPU", value=1.0, error=1e-6)]
    table = peers_gpu.table([*rows, rows[1]._replace(mode=GRADIENTS)])
    assert list(table) == [(str(peers_gpu.TINY[0]), GRADIENTS), (str(peers_gpu.TINY[0]), FORWARD)]
    assert list(table.values()) == [["logchain 1 ms"], ["logchain 1 ms", "two 30x?"]]
    run = session.Session(dry=True, minutes=1, out=None)
    run.peers = rows
    assert f"{peers_gpu.TINY[0]} forward: logchain 1 ms; two 30x?" in gpu.summary(run)


def a_wheel(folder, name, text):
    """A package of one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": text,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


def test_wheels_are_collected_and_installed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pip")
    wheel, folder, nothing = a_wheel(tmp_path, "logchain_carried", "ANSWER = 42\n"), tmp_path / "all", "./nothing.whl"
    missing = wheels.collect(folder, [str(wheel), nothing])
    assert [file.name for file in folder.iterdir()] == [wheel.name] and list(missing) == [nothing] and missing[nothing]
    monkeypatch.setattr(wheels, "MOST", 100)
    assert "with it the folder would be" in wheels.collect(tmp_path / "small", [str(wheel)])[str(wheel)]
    (folder / "broken-1.0-py3-none-any.whl").write_bytes(b"")
    with wheels.installed(folder):
        # in a process that is spawned too: it is told this one's paths
        import logchain_carried

        assert logchain_carried.ANSWER == 42
    assert "not installed: broken-1.0-py3-none-any.whl" in capsys.readouterr().out
    assert str(Path(logchain_carried.__file__).parent) not in sys.path
    with pytest.raises(SystemExit, match="no wheels in"), wheels.installed(tmp_path / "small"):
        pass


def test_wheels_are_of_everybody_with_what_they_need():
    names = {re.split("[<=]", requirement)[0] for requirement in wheels.requirements()}
    assert len(names) == len(wheels.requirements())
    on_a_gpu = {one.package for one in peers.every().values() if peers.GPU in one.devices} - {"torch", "logchain"}
    assert on_a_gpu <= set(wheels.PEERS)
    there = {"torch", "triton", "numpy", "scipy", "numba", "matplotlib", "typing"}
    for peer in wheels.PEERS:
        try:
            needs = metadata.requires(peer) or []
        except metadata.PackageNotFoundError:
            continue
        needed = {
            re.split("[^A-Za-z0-9_.-]", need)[0].lower().replace("_", "-") for need in needs if "extra" not in need
        }
        assert needed - there <= names, peer


def test_wheels_have_the_versions_of_the_tests():
    lines = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line.split("==")[0] in wheels.PEERS]
    assert pinned and set(pinned) <= set(wheels.requirements())


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
