"""Whole steps on a device give what the CPU gives; the guard against waiting for it ends with its body."""

import warnings

import pytest
import torch

from logchain import kernels as devices
from tests.conftest import INTERPRETED
from tests.kernels.gpu import steps


@pytest.mark.skipif(INTERPRETED, reason="needs a device: others hold the interpreter to more than this")
@pytest.mark.parametrize("name", steps.STEPS)
def test_a_step_gives_what_the_cpu_gives(name, kernels):
    step, operands = steps.case(name, kernels)
    found = step(operands)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "on_gpu", lambda tensor: tensor.is_cuda)
        expected = step([operand.detach().cpu().requires_grad_() for operand in operands])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=2.0**-20, atol=4e-5)


@pytest.fixture
def modes(monkeypatch):
    """The modes that were set, by a function that warns the first time as torch's does."""
    found = []

    def set_mode(mode):
        found.append(mode)
        if len(found) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return found


def test_the_guard_ends_with_an_error(modes):
    with pytest.raises(ValueError, match="in the body"), steps.waiting_raises():
        assert modes == ["error"]
        raise ValueError("in the body")
    assert modes == ["error", "default"]


def test_the_guard_does_not_outlast_a_mode_that_cannot_be_set(modes, monkeypatch):
    def refuse(mode):
        modes.append(mode)
        if mode == "error":
            raise RuntimeError("refused")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", refuse)
    with pytest.raises(RuntimeError, match="refused"), steps.waiting_raises():
        pass
    assert modes == ["error", "default"]
