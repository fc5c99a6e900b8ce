"""The packaged example reports the same numbers whether a rank dies in the middle or not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import logchain

# where the library lies that is tested here
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(logchain.__file__).parents[1])}


def run(folder, *options):
    """What the example prints with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "logchain.distributed.example", "--folder", str(folder), "--timeout", "60", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed has no gloo here")
def test_a_killed_rank_changes_no_log_likelihood(tmp_path):
    whole = run(tmp_path, "--steps", "20000", "--iterations", "4")
    broken = run(tmp_path, "--steps", "20000", "--iterations", "4", "--kill", "3")
    assert "Signal 9" in broken or "exitcode: -9" in broken
    numbers = [re.findall(r"iteration (\d): log-likelihood (-[\d.]+) nats", text) for text in (whole, broken)]
    assert [iteration for iteration, _ in numbers[0]] == ["1", "2", "3", "4"]
    assert numbers[1] == numbers[0]
    assert float(numbers[0][-1][1]) > float(numbers[0][0][1])
    assert not (tmp_path / "checkpoints").exists()
