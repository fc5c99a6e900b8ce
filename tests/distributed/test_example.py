"""The example gives the same numbers whether a rank dies in the middle or not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import logchain

# where the library lies that is tested here
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(logchain.__file__).parents[1])}

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed has no gloo here"
)


def run(folder: Path, *options: str) -> str:
    """What the example prints with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "logchain.distributed.example", "--folder", str(folder), "--timeout", "20", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, cwd=folder, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def numbers(text: str) -> list[tuple[str, str]]:
    return re.findall(r"iteration (\d): log-likelihood (-[\d.]+) nats", text)


def test_a_killed_rank_changes_nothing(tmp_path):
    whole = run(tmp_path, "--steps", "20000", "--iterations", "4")
    broken = run(tmp_path, "--steps", "20000", "--iterations", "4", "--kill", "3")
    assert "Signal 9" in broken or "exitcode: -9" in broken
    assert [iteration for iteration, _ in numbers(whole)] == ["1", "2", "3", "4"]
    assert numbers(broken) == numbers(whole)
    assert float(numbers(whole)[-1][1]) > float(numbers(whole)[0][1])
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_is_not_whole_is_left_out(tmp_path):
    from logchain.distributed.example import _restore, _save

    saved, found = ([torch.nn.Linear(2, 1, bias=False)] for _ in range(2))
    for one in saved, found:
        one.append(torch.optim.Adam(one[0].parameters(), 0.1))
    saved[0](torch.ones(2)).sum().backward()
    saved[1].step()
    _save(tmp_path, 3, *saved)
    (tmp_path / "checkpoints" / "7").mkdir()
    (tmp_path / "checkpoints" / "7" / "__0_0.distcp").touch()
    assert _restore(tmp_path, *found) == 3
    assert torch.equal(found[0].weight, saved[0].weight)
    one, other = (next(iter(optimiser.state.values())) for _, optimiser in (found, saved))
    assert one["step"] == other["step"] == 1 and torch.equal(one["exp_avg"], other["exp_avg"])


def test_it_says_how_to_start_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "logchain.distributed.example"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.returncode == 2 and "torchrun --nproc-per-node 2" in done.stderr
