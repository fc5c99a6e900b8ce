"""All kernels compile for two devices by the pinned Triton, and some of them by an older one; see `compiled`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton")

# target: the bytes of shared memory that one program may use
SHARED = {"sm_90": 227 * 1024, "gfx942": 64 * 1024}

pytestmark = pytest.mark.slow


# a Triton of another version, which compiles one call in so many
OLDER, EVERY = "triton==3.6.0", 3


@pytest.fixture(scope="module", params=["pinned", OLDER])
def compiling(request):
    """A running process for each target, or by the older Triton for sm_90 alone, and the path of its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = {target: [target] for target in SHARED}
    with tempfile.TemporaryDirectory() as folder:
        if request.param == OLDER:
            environment["PYTHONPATH"], arguments = folder, {"sm_90": ["sm_90", str(EVERY)]}
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, OLDER]
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip(f"pip cannot install {OLDER}")
        processes = {}
        for target, some in arguments.items():
            path, command = Path(folder, target), [sys.executable, "-m", "tests.kernels.gpu.compiled", *some]
            with path.open("w") as file:
                options = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.DEVNULL}
                processes[target] = subprocess.Popen(command, **options), path
        yield processes
        for process, _ in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile_and_fit(compiling, target):
    if target not in compiling:
        pytest.skip("the older Triton compiles for sm_90 alone")
    process, path = compiling[target]
    exit_code = process.wait()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert exit_code == 0, f"the process died after {rows[-1:]}; run python -m tests.kernels.gpu.compiled {target}"
    assert "scan_kernel" in {row["kernel"] for row in rows}
    defects = [row for row in rows if "error" in row or row["shared"] > SHARED[target]]
    assert not defects, "\n".join(map(str, defects))
