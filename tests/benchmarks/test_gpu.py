"""Everybody is measured on a GPU, in a dry run, where there is none."""

import time
from unittest import mock

import pytest
import torch

from tests.benchmarks import __main__ as program
from tests.benchmarks import aside, device, gpu, kept, peers, results
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import ONE, STEP, WORKLOADS, Workload
from tests.benchmarks.device import Device
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured

SMALL = [Workload(2, 5, 3, STEP), Workload(2, 6, 3, ONE)]
ITEMS = [Item(workload, "one", mode) for workload in SMALL for mode in (FORWARD, GRADIENTS)]


def a_row(provider, device, *, value=2.0, error=None):
    return Measured(str(gpu.TINY[0]), provider, FORWARD, device, value, 1.0, 3.0, 1.0, value_error=error)


@pytest.mark.slow
def test_everybody_in_a_dry_run(tmp_path):
    tracked = [path.read_bytes() for path in (results.PEERS, results.LEFT_OUT)]
    before = [a_row("torch loop", "CPU"), a_row("torch loop", "GPU", value=1e9), a_row("other", "GPU")]
    kept.keep(tmp_path / "peers.csv", before)
    assert gpu.measure(tmp_path, 10, ["torch loop"], dry=True) == gpu.DONE
    rows = results.read(tmp_path / "peers.csv", Measured)
    assert before[0] in rows and before[2] in rows and len(rows) == 2 + 2 * len(gpu.TINY)
    new = [row for row in rows if row not in before]
    assert {row[:4] for row in new} == {
        (str(workload), "torch loop", mode, "GPU") for workload in gpu.TINY for mode in (FORWARD, GRADIENTS)
    }
    for row in new:
        assert row.hardware == "CPU, dry run" and row.date and row.share == 1.0
        assert 0 < row.lower_ms <= row.median_ms <= row.upper_ms and row.logchain_ms > 0 and row.peak_mb > 0
        assert row.value_error < 1e-5 and (row.gradient_error is None) == (row.mode == FORWARD)
        assert row.gradient_error is None or row.gradient_error < 1e-5
    left_out = kept.left_out(tmp_path / "left_out.csv")
    assert [entry[:4] for entry in left_out] == [("peers on a GPU", "", "jax, dynamax, numpyro", "")]
    assert [path.read_bytes() for path in (results.PEERS, results.LEFT_OUT)] == tracked
    # all have their rows: nothing is measured again
    with mock.patch.object(aside, "measure") as measuring:
        assert gpu.measure(tmp_path, 10, ["torch loop"], dry=True) == gpu.DONE
    measuring.assert_not_called()


def test_a_call_goes_on_with_what_has_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "hardware", lambda dry: "a GPU")
    monkeypatch.setattr(gpu, "machine", lambda: {"commit": "now"})
    late = Missing("", "a", "one", GRADIENTS, aside.LATE, commit="now")
    failed = Missing("", "a", "two", FORWARD, "no", commit="now")
    files = gpu.Files(tmp_path, False)
    files.tell(a_row("one", "GPU")._replace(commit="now"))
    files.tell_missing(files.rows, [late, failed])
    again = gpu.Files(tmp_path, False)
    assert again.rows == files.rows and again.rows[0].hardware == "a GPU"
    assert again.known == {files.rows[0][:3], failed[1:4]}
    monkeypatch.setattr(gpu, "machine", lambda: {"commit": "later"})
    assert not gpu.Files(tmp_path, False).known


@pytest.mark.parametrize(("late", "alive"), [(False, True), (False, False), (True, True)])
def test_a_process_ends_with_its_time_and_with_the_device(late, alive, tmp_path, monkeypatch):
    one = peers.Provider("one", lambda case, mode: lambda: (None, None), "torch", floor=True)
    monkeypatch.setattr(peers, "every", lambda: {"one": one, "logchain": one})
    monkeypatch.setattr(Device, "answers", lambda _: alive)
    told = list(gpu.times(True, tmp_path, time.monotonic() + (-1.0 if late else 1e6), ITEMS))
    begun, said = told[::2], told[1::2]
    assert begun == (ITEMS if alive else ITEMS[:1])
    if late:
        assert said == [Missing("", *item.key, "no time left") for item in ITEMS]
    else:
        assert [row[:3] for row in said] == [item.key for item in begun]


def test_logchain_and_the_floors_come_first():
    (package, items), *others = gpu.processes(WORKLOADS)
    assert package == "torch" and {item.provider for item in items} == {"logchain", "GEMMs alone", "bytes copied"}
    assert items[0] == (Workload(500, 40, 200, STEP), "logchain", FORWARD)
    every = peers.every()
    for package, items in others:
        (name,) = {item.provider for item in items}
        assert peers.GPU in every[name].devices and every[name].package == package


class Event:
    """As of CUDA; every call takes a millisecond."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_the_way_of_a_real_run_with_a_stand_in_for_cuda(tmp_path, monkeypatch):
    allocated = dict(memory_allocated=lambda: 5_000_000, max_memory_allocated=lambda: 8_000_000)
    quiet = dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    for name, stand_in in (allocated | quiet | {"Event": Event}).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = mock.Mock(side_effect=lambda call: call)
    monkeypatch.setattr(device, "_captured", graphs)
    # however slow this machine is, eight sets of inputs are prepared
    monkeypatch.setattr(Device, "seconds", lambda _, call: 1e-6)
    monkeypatch.setattr(gpu, "_MADE", 1e6)
    real = Device(dry=False)
    real.name = "cpu"
    for name, sets in (("torch loop", 0), ("GEMMs alone", 8)):
        item = Item(SMALL[0], name, GRADIENTS)
        (row,) = gpu.measured(real, tmp_path, item)
        assert row[:4] == (*item.key, "GPU") and row.peak_mb == 3.0
        assert row.lower_ms == row.median_ms == row.upper_ms == row.logchain_ms == 1.0
        assert graphs.call_count == sets  # floors alone, on as many sets of inputs
    assert real.answers()
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("illegal memory access")))
    assert not real.answers()


def test_table_of_everybody():
    rows = [a_row("two", "GPU", value=30.0, error=float("nan")), a_row("logchain", "GPU", value=1.0, error=1e-6)]
    lines = gpu.table([*rows, rows[1]._replace(mode=GRADIENTS)])
    assert lines == [f"{gpu.TINY[0]} {GRADIENTS}: logchain 1 ms", f"{gpu.TINY[0]} {FORWARD}: logchain 1 ms; two 30x?"]


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^no GPU here"):
        program.main(["gpu", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="^--dry: expected --results"):
        program.main(["gpu", "--dry"])
