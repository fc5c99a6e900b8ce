"""Launches are timed by both ways for each kernel of the main job, in a process where Triton is not interpreted."""

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks import results
from tests.benchmarks.launches import BAR

pytest.importorskip("triton")

KERNELS = {"forward", "backward", "counts", "posteriors", "chains"}


def test_every_kernel_is_launched_both_ways():
    code = "import json; from tests.benchmarks import launches; print(json.dumps([*launches.measured(2, 3)]))"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=results.ROOT, env=environment)
    rows = [results.Row(*row) for row in json.loads(printed)]
    assert {row.workload.split(".")[0].removeprefix("chain_") for row in rows} == KERNELS
    for name in {row.workload for row in rows}:
        for provider in ("logchain", "triton"):
            low, middle, high = (row.value for row in rows if (row.workload, row.provider) == (name, provider))
            assert 0 < low <= middle <= high
    assert {row.metric for row in rows if row.bar == BAR} == {"median"}
    assert sum(bool(row.bar) for row in rows) == len(KERNELS)
