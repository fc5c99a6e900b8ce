"""Tests on all cores, in calls that go on where the last was cut; kernels that are compiled without a device."""

import json
import re
import signal
import subprocess
import time
from unittest import mock

import pytest

from tests.benchmark_calls import COMMAND, call, environment
from tests.benchmarks import gpu_tests, gpu_worker, results
from tests.benchmarks.gpu_shared import Line, Shared

SUITE = """
import os, signal, time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
GO = Path(__file__).with_name("go")


def test_passes():
    pass


def test_fails():
    assert GO.exists(), "not before it may"


@pytest.mark.skip(reason="as it should")
def test_skips():
    pass


def test_dies():
    GO.exists() or os.kill(os.getpid(), signal.SIGSEGV)


def test_hangs():
    GO.exists() or time.sleep(300)


def test_the_rest():
    pass
"""


@pytest.fixture
def suite(tmp_path):
    """A file of tests of which three fail until another file is there."""
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE)
    return path


def outcomes(folder):
    lines = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    return [(line["name"].rpartition("::test_")[2], line["outcome"]) for line in lines]


def test_every_test_has_a_line_and_what_failed_is_run_again(suite, tmp_path):
    options = ["test", "--dry", "--folder", tmp_path, "--out", tmp_path / "out", "--paths", suite, "--workers", 2]
    run = call(*options, "--patience", 5)
    assert run.returncode == gpu_tests.FAILED, run.stdout + run.stderr
    first = {"passes": "passed", "fails": "failed", "skips": "skipped", "dies": "ended", "hangs": "ended"}
    assert dict(outcomes(tmp_path)) == first | {"the_rest": "passed"} and len(outcomes(tmp_path)) == 6
    for text in (
        "test_fails\n",
        "not before it may",
        "test_dies\nended its process, code -11",
        "test_hangs\ntook too long",
    ):
        assert text in run.stdout
    assert "0 done before" in run.stdout and re.search(r"2 passed, 2 ended.*1 skipped|2 ended, 2 passed", run.stdout)
    assert (tmp_path / "out" / "test.jsonl").read_bytes() == (tmp_path / "test.jsonl").read_bytes()
    suite.with_name("go").touch()
    again = call(*options)
    assert (
        again.returncode == gpu_tests.DONE and "3 done before" in again.stdout and "5 passed, 1 skipped" in again.stdout
    )
    assert sorted(outcomes(tmp_path)[6:]) == [("dies", "passed"), ("fails", "passed"), ("hangs", "passed")]


def test_a_call_that_is_cut_says_so_and_the_next_goes_on(suite, tmp_path):
    paths = [f"{suite}::test_{name}" for name in ("passes", "hangs")]
    command = [*COMMAND, "test", "--dry", "--folder", tmp_path, "--workers", "1", "--paths", *paths]
    process = subprocess.Popen(command, cwd=results.ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "test.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == gpu_tests.CUT and "CUT" in said and "1 passed" in said
    suite.with_name("go").touch()
    again = call("test", "--dry", "--folder", tmp_path, "--workers", 1, "--minutes", 5, "--paths", suite)
    assert again.returncode == gpu_tests.DONE and "1 done before" in again.stdout
    assert [name for name, _ in outcomes(tmp_path)].count("passes") == 1


def test_tests_that_cannot_be_collected_end_the_call(tmp_path):
    (tmp_path / "test_suite.py").write_text("import no_such_package")
    run = call("test", "--dry", "--folder", tmp_path / "folder", "--workers", 1, "--paths", tmp_path / "test_suite.py")
    assert run.returncode == gpu_tests.FAILED and "No module named 'no_such_package'" in run.stdout


def test_a_lost_device_ends_its_process_alone(tmp_path, monkeypatch):
    shared = Shared(tmp_path)
    shared.begin([])
    walk = gpu_worker.Walk(shared, "test", "abc", 60.0)
    report = mock.Mock(failed=True, longreprtext="CUDA error: an illegal memory access")
    item = mock.Mock(nodeid="one")
    item.config.hook.pytest_runtest_protocol = lambda **_: walk.pytest_runtest_logreport(report)
    monkeypatch.setattr(gpu_worker, "answers", lambda: False)
    walk.pytest_runtestloop(mock.Mock(items=[item, mock.Mock(nodeid="two")], testsfailed=0))
    assert walk.lost and outcomes(tmp_path) == [("one", "failed")]
    assert shared.take("two") and not shared.take("one")


def test_lines_of_other_files_do_not_count(tmp_path):
    shared = Shared(tmp_path)
    (tmp_path / "test.jsonl").write_text('{"name": "a line that was cut\n')
    for sources in ("older", results.digest()):
        shared.tell("test", Line(f"with {sources}", "passed", 1.0, "", sources))
    assert list(shared.told("test")) == [f"with {results.digest()}"]


def test_kernels_are_compiled_once(tmp_path):
    pytest.importorskip("triton")
    folder = tmp_path / "folder"
    options = ["compile", "--target", "sm_90", "--folder", folder, "--workers", 2]
    paths = ["--paths", "tests/test_gpu_max_matmul.py::test_every_case"]
    run = call(*options, *paths)
    assert run.returncode == gpu_tests.DONE, run.stdout + run.stderr
    kernels = [json.loads(line) for line in (folder / "kernels-sm_90.jsonl").read_text().splitlines()]
    assert len(kernels) == len({line["name"] for line in kernels}) == gpu_tests.compiled(folder) > 5
    assert {line["outcome"] for line in kernels} == {"compiled"}
    assert f"{len(kernels)} kernels for sm_90" in run.stdout and "ENDED" not in run.stdout
    again = call(*options, *paths)
    assert again.returncode == gpu_tests.DONE and " 0 done before" not in again.stdout
    assert gpu_tests.compiled(folder) == len(kernels)
