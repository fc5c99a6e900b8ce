"""Kernels run on the device where there is one, otherwise in Triton's interpreter on CPU tensors."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# read at the first import of triton
INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1") == "1"

ROOT = Path(__file__).resolve().parents[1]

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core to itself
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Find what is to be tested; make the interpreter strict before a test imports a kernel."""
    # An unpacked sdist that was not built in place has no kernels below `logchain`: the installed package is tested.
    if not (ROOT / "logchain" / "kernels").is_dir():
        config.option.importmode = "append"
        sys.path[:] = [*(folder for folder in sys.path if Path(folder).resolve() != ROOT), str(ROOT)]
    if INTERPRETED and importlib.util.find_spec("triton"):
        from tests.kernels.gpu import interpreter  # not before triton is to be interpreted

        interpreter.install()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """A test draws the same numbers in every run, also through packages that take them from numpy."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def no_templates() -> None:
    """Templates of arguments depend on what a test has replaced, too."""
    if template := sys.modules.get("logchain.kernels.cpu.template"):
        template._templates.clear()


@pytest.fixture(params=["cpu", "plain"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device on which loops in C or torch operations compute, or Triton where a test names it."""
    from tests.backends import on  # which imports this file

    with on(request.param) as device:
        yield device


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """A function that sets the number of torch's threads in the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["interpreted"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel is tested: on CPU tensors in the interpreter, or on the device."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture
def kernels(device: str) -> Iterator[str]:
    """The device on which Triton's kernels compute, or interpret."""
    from logchain.kernels import use  # not before triton is to be interpreted

    with use("triton", device):
        yield device


@pytest.fixture
def both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's scans begin at both ends and meet in the middle, of short chains too."""
    from logchain.kernels.gpu import chains

    monkeypatch.setattr(chains, "_SHORT", 3)
    monkeypatch.setattr(chains, "num_processors", lambda device: 1000)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's products of 17 rows, columns or terms have several tiles."""
    from logchain.kernels.gpu import log_matmul

    tiles = log_matmul.tiles
    monkeypatch.setattr(log_matmul, "tiles", lambda *sizes: tiles(*sizes[:4], (16, 16, 16)))


@pytest.fixture
def plain() -> Iterator[None]:
    """Chains are computed as on a device that has no kernels of its own."""
    from logchain import kernels

    with kernels.use("plain", "cpu"):
        yield


# parameters that stand for Triton's kernels need a device where they are not interpreted
ON_GPU = [] if INTERPRETED else [pytest.mark.gpu]
