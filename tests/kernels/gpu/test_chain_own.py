"""Chains with matrices of their own: right where nothing is doubtful, and doubtful where they would not be."""

import numpy as np
import pytest
import torch

from tests.families import FAMILIES, dense
from tests.kernels.gpu.processes import shared, together
from tests.kernels.gpu.test_chain_forward import DOUBTFUL, assert_filtered, assert_right, operands, spaced

chain_own = pytest.importorskip("logchain.kernels.gpu.chain_own")
chains = pytest.importorskip("logchain.kernels.gpu.chains")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["held", "tiles"])
def tiles(request, monkeypatch):
    """Matrices in one tile, and in several."""
    if request.param == "tiles":
        monkeypatch.setattr(chain_own, "_HELD", {False: 0, True: 0})
        monkeypatch.setattr(chain_own, "_TILE", {False: 64, True: 64})
    return request.param


def run(chain: chains.Operands, *, keep: bool = True, parts: int | None = None):
    """log_norm, doubt and messages, from memory that held NaN; with parts each program is a process."""
    v, g, m, c = chain.shape
    device = chain.x.device
    messages = torch.full((v if keep else min(v, 2), g, m, c), NAN, dtype=chain.dtype, device=device)
    log_norm = torch.full((g, m), NAN, dtype=F64, device=device)
    if parts is None:
        return log_norm, chain_own.forward(chain, messages, log_norm), messages
    # all programs of a launch see what is prepared once
    ready = chain_own.prepared(chain, parts)
    shared([messages, log_norm, *ready[0], ready[1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_own, "prepared", lambda *_: ready)
        together(g * parts, lambda: chain_own.forward(chain, messages, log_norm, parts=parts, programs=1))
    return log_norm, ready[0].doubt, messages


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_families(device, name, dtype):
    family = FAMILIES[name](dtype=dtype, each=True)
    chain = operands(family, device=device)
    if chain.shape[2] > 1:
        pytest.skip("shares its matrices")
    log_norm, doubt, messages = run(chain)
    assert_right(family, log_norm, doubt, k=1)
    assert not doubt.any() or name in DOUBTFUL
    if not doubt.any():
        assert_filtered(chain, messages)
