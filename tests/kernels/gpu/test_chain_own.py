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


def posteriors(chain: chains.Operands, final=None):
    """Those of states (v, g, 1, c) and of transitions (v - 1, g, c, c), by definition, in float64; NaN for no path."""
    x, bulk, start = (tensor.detach().double().cpu() for tensor in (chain.x, chain.bulk, chain.start))
    v, g, _, c = x.shape
    states, pairs = torch.zeros(v, g, 1, c, dtype=F64), torch.zeros(v - 1, g, c, c, dtype=F64)
    logs = (bulk if chain.log_params else bulk.log()).expand(v - 1, g, c, c)
    for z in range(g):
        last = v if chain.ends is None else int(chain.ends[z])
        a, b = [start[z, 0] + x[0, z, 0]], torch.zeros(c, dtype=F64) if final is None else final[z, 0].double().cpu()
        for i in range(1, last):
            a.append(torch.logsumexp(a[-1][:, None] + logs[i - 1, z], 0) + x[i, z, 0])
        for i in reversed(range(last)):
            states[i, z, 0] = torch.softmax(a[i] + b, 0)
            if i:
                joint = a[i - 1][:, None] + logs[i - 1, z] + (x[i, z, 0] + b)
                pairs[i - 1, z] = torch.softmax(joint.flatten(), 0).view(c, c)
                b = torch.logsumexp(logs[i - 1, z] + (x[i, z, 0] + b), 1)
    return states, pairs


class Gradients:
    """All gradients of a chain, from memory that held NaN; with parts each program is a process."""

    def __init__(self, chain, *, weight=None, final=None, by_log=True, redone=None, log_norm=None, parts=None):
        v, g, m, c = chain.shape
        found, forward_doubt, messages = run(chain)
        device = chain.x.device
        self.log_norm = found if log_norm is None else log_norm
        self.weight = torch.ones(g, m, device=device) if weight is None else weight
        same = len(chain.bulk) == 1
        self.messages, self.same, self.chain = messages, same, chain
        self.x, self.start, self.r = (torch.full((n, g, m, c), NAN, dtype=chain.dtype, device=device) for n in (v, 1, v))
        self.x, self.start = self.x.transpose(0, 1).contiguous().transpose(0, 1), self.start[0]
        self.bulk = torch.full((v - 1, g, c, c), NAN, dtype=chain.dtype, device=device)
        redone = torch.zeros(g, m, dtype=torch.bool, device=device) if redone is None else redone
        options = {"grad_x": self.x, "grad_start": self.start, "r": self.r if same else None, "final": final}
        options |= {"grad_bulk": None if same else self.bulk, "by_log": by_log}
        arguments = chain, messages, redone, self.log_norm, self.weight
        if parts is None:
            self.doubt = chain_own.backward(*arguments, **options) | forward_doubt
            return
        ready, between = chain_own.prepared(chain, parts, end=True), chain_own.scratch(chain, parts)
        shared([self.x, self.start, self.r, self.bulk, *ready[0], ready[1], *between])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain_own, "prepared", lambda *_, **__: ready)
            patch.setattr(chain_own, "scratch", lambda *_: between)
            together(g * parts, lambda: chain_own.backward(*arguments, **options, parts=parts, programs=1))
        self.doubt = ready[0].doubt | forward_doubt

    def transitions(self):
        """Expected transitions (v - 1, g, c, c)."""
        if not self.same:
            return self.bulk.double().cpu()
        p, bound = self.chain.bulk.double(), chains.room(self.chain, 0).bound[0] >> 1
        p = (p.exp() if self.chain.log_params else p) / torch.exp2(bound.double())[:, None, None]
        outer = self.messages[:-1, :, 0, :, None].double() * self.r[1:, :, 0, None, :].double()
        return (outer * p * self.weight[..., None].double()).cpu()

    def check(self, *, states=None, pairs=None, final=None, atol=2e-6):
        """What is not doubtful lies near the truth."""
        if states is None:
            states, pairs = posteriors(self.chain, final)
        weight, sure = self.weight.double().cpu(), (~self.doubt).cpu()[:, 0]
        for found, truth in [
            (self.x.double().cpu(), states * weight[..., None]),
            (self.start[None].double().cpu(), states[:1] * weight[..., None]),
            (self.transitions(), pairs * weight[..., None]),
        ]:
            torch.testing.assert_close(found[:, sure], truth[:, sure].nan_to_num(0.0), rtol=atol * 10, atol=atol)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_gradients_of_families(device, name, dtype):
    chain = operands(FAMILIES[name](dtype=dtype, each=True), device=device)
    if chain.shape[2] > 1:
        pytest.skip("shares its matrices")
    found = Gradients(chain)
    found.check(atol=1e-5 if dtype == F32 else 1e-13)
    assert not found.doubt.any() or name in DOUBTFUL
