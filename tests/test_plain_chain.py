"""torch's own recursion keeps the contract, where no compiled loops are to be had."""

import pytest
import torch

from logchain import _device
from tests.contract import assert_contract, drawn
from tests.families import FAMILIES

pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(_device, "native", lambda tensor: False)


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_the_contract(name, each, dtype, log):
    chain, truth = drawn(name, dtype, each, log)
    assert_contract(chain, truth=truth, strategy="sequential")
