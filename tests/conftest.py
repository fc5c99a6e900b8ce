"""Kernels run on the device where there is one, otherwise in Triton's interpreter on CPU tensors."""

import importlib.util
import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of triton

if INTERPRETED and importlib.util.find_spec("triton"):
    from tests import interpreter

    interpreter.install()

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core to itself
    torch.set_num_threads(1)


@pytest.fixture(params=["interpreted"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel is tested: on CPU tensors in the interpreter, or on the device."""
    pytest.importorskip("triton")
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device whose tensors the Triton kernels compute for."""
    from logchain import _device  # not before triton is to be interpreted

    monkeypatch.setattr(_device, "on_gpu", lambda tensor: True)
    return device
