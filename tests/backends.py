"""The backends as rows of tables: torch operations and loops in C on a CPU, Triton on a GPU or in its interpreter."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import logchain
from tests.conftest import INTERPRETED, ROOT


@contextlib.contextmanager
def on(backend: str) -> Iterator[str]:
    """The device of a backend, which computes inside."""
    if backend == "gpu":
        pytest.importorskip("triton")
        with logchain.kernels.use("triton", "cpu" if INTERPRETED else "cuda"):
            yield "cpu" if INTERPRETED else "cuda"
    else:
        with logchain.kernels.use({"cpu": "auto", "plain": "plain"}[backend], "cpu"):
            yield "cpu"


def parameter(backend: str, *values):
    """A row of a table whose first column is the backend."""
    marks = [pytest.mark.gpu] if backend == "gpu" and not INTERPRETED else []
    names = [getattr(value, "__name__", str(value)) for value in values]
    return pytest.param(backend, *values, marks=marks, id="-".join([backend, *names]))


def run_python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh process, by the library that is tested here, which need not lie beside the tests."""
    code = f"import sys; sys.path.append({str(ROOT)!r}); {code}"
    environment = {**os.environ, "PYTHONPATH": str(Path(logchain.__file__).parents[1]), **environment}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
