"""Calls of `python -m tests.benchmarks gpu`, in processes of their own that see no device."""

import os
import subprocess
import sys

from tests.benchmarks.results import ROOT

COMMAND = [sys.executable, "-m", "tests.benchmarks", "gpu"]


def environment() -> dict[str, str]:
    """This process's, as if nothing had been decided about devices yet."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def call(*arguments) -> subprocess.CompletedProcess[str]:
    """One call, to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment())
