"""The exact recomputation of marked sequences: within the contract on all families, and no other sequence is touched."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.contract import Truth, assert_values, drawn, poisoned_memory
from tests.families import FAMILIES, PAIRS, Chain, Draw, dense
from tests.layouts import poisoned, strange

chain_exact = pytest.importorskip("logchain.kernels.gpu.chain_exact")
chain_forward = pytest.importorskip("logchain.kernels.gpu.chain_forward")

from logchain.kernels.gpu.chains import Operands  # noqa: E402
from logchain.kernels.gpu.scaled import target  # noqa: E402

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


def operands(chain: Chain, lengths=None, device: str = "cpu") -> Operands:
    """The chain's batch [n, t] as g = 1 set of n t sequences, or as n t sets of one."""
    *batch, v, c = chain.x.shape
    g = int(np.prod(chain.bulk.shape[:-3]))
    x = chain.x.movedim(-2, 0).reshape(v, g, -1, c).to(device)
    bulk = chain.bulk.movedim(-3, 0).reshape(-1, g, c, c).to(device)
    p0 = chain.p0.double() if chain.log_params else chain.p0.double().log()
    start = p0.expand(*batch, c).reshape(g, -1, c).contiguous().to(device)
    ends = None if lengths is None else torch.tensor(lengths, device=device).reshape(g, -1)
    dtype = F64 if F64 in (chain.x.dtype, chain.bulk.dtype) else F32
    return Operands(x, bulk, start, ends, chain.log_params, dtype)


@dataclass
class Found:
    """What the kernels wrote, in the shapes of the kernels."""

    messages: torch.Tensor
    log_norm: torch.Tensor
    grad_x: torch.Tensor
    grad_start: torch.Tensor
    counts: torch.Tensor
    r: torch.Tensor


def run(chain: Operands, weight, marks=None, redone=None, messages=None, log_norm=None, final=None) -> Found:
    """Forward, unless messages are given, backward and counts of marked sequences, all by default."""
    v, g, m, c = chain.shape
    like = {"dtype": chain.dtype, "device": chain.x.device}
    marks = torch.ones(g, m, dtype=torch.bool, device=chain.x.device) if marks is None else marks
    with poisoned_memory():
        if messages is None:
            messages = torch.empty(v, g, m, c, **like)
            log_norm = torch.empty(g, m, dtype=F64, device=chain.x.device)
            chain_exact.forward(chain, messages, log_norm, marks)
        grad_x, r, grad_start = torch.empty(v, g, m, c, **like), torch.empty(v, g, m, c, **like), torch.empty(g, m, c, **like)
        redone = marks if redone is None else redone
        options = {"grad_x": grad_x, "grad_start": grad_start, "r": r, "final": final}
        chain_exact.backward(chain, messages, redone, marks, log_norm, weight, **options)
        counts = torch.zeros(len(chain.bulk), g, c, c, **like)
        chain_exact.counts(chain, messages, redone, marks, r, weight, counts)
    return Found(messages, log_norm, grad_x, grad_start, counts, r)


def weights(chain: Operands) -> torch.Tensor:
    g, m = chain.shape[1:3]
    return torch.arange(g * m, dtype=chain.dtype, device=chain.x.device).cos().reshape(g, m)


def assert_right(chain: Chain, truth: Truth, found: Found, weight: torch.Tensor, k: int = 1) -> None:
    """Everything lies within the contract, and is exactly 0 where no path passes."""
    batch = chain.x.shape[:-2]
    assert_values(found.log_norm.reshape(batch), truth.log_norm, truth.value_bound(F64, k))
    scale = weight.double().cpu().reshape(batch).numpy()[..., None, None]
    states, counts = scale * truth.states, scale[..., None] * truth.transitions
    _close(found.grad_x.movedim(0, 2), states, truth.gradient_bound(states, k), truth.reach.states)
    first = states[..., 0, :]
    _close(found.grad_start, first, truth.gradient_bound(first, k), truth.reach.states[..., 0, :])
    out = found.counts.double().cpu().movedim(0, -3)
    if not chain.log_params:
        out = out * chain.bulk.double().reshape(out.shape)
    axes = tuple(i for i, size in enumerate(chain.bulk.shape[:-2]) if size != counts.shape[i])
    bound, reach = truth.gradient_bound(counts, k), truth.reach.transitions
    counts, bound, reach = (array.sum(axes, keepdims=True) for array in (counts, bound, reach))
    if counts.size:
        _close(out, counts, bound, reach)


def _close(found: torch.Tensor, expected: np.ndarray, bound: np.ndarray, reach: np.ndarray) -> None:
    array = found.double().cpu().numpy().reshape(expected.shape)
    assert (array[reach == 0] == 0).all(), "the impossible has a gradient"
    error = np.abs(array - expected)
    assert (error <= bound).all(), f"error {np.nanmax(error):.3g}, {np.nanmax(error / bound):.3g} times the bound"


def check(chain: Chain, lengths=None, truth: Truth | None = None, device: str = "cpu") -> Found:
    ops = operands(chain, lengths, device)
    weight = weights(ops)
    found = run(ops, weight)
    assert_right(chain, truth or Truth(chain, lengths), found, weight)
    return found


@PAIRS
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_families(device, name, dtype, each, log):
    chain, truth = drawn(name, dtype, each, log)
    check(chain, truth=truth, device=device)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("c301", "v1", "far_start1")])
def test_after_the_fast_kernel(device, name):
    """Only what it doubts is redone; linear messages of others lead back too."""
    chain, truth = drawn(name, F32)
    ops = operands(chain, device=device)
    messages, log_norm = torch.empty(ops.shape, device=device), torch.empty(ops.shape[1:3], dtype=F64, device=device)
    doubt = chain_forward.forward(ops, messages, log_norm)
    before, norms = messages.clone(), log_norm.clone()
    chain_exact.forward(ops, messages, log_norm, doubt)
    assert torch.equal(messages[:, ~doubt], before[:, ~doubt]) and torch.equal(log_norm[~doubt], norms[~doubt])
    if name in ("dense", "peaked", "one_hot"):
        assert not doubt.any()
    weight = weights(ops)
    every = torch.ones_like(doubt)
    assert_right(chain, truth, run(ops, weight, every, doubt, messages, log_norm), weight, k=4)
