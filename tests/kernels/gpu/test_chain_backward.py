"""Posteriors and the factors of transitions' counts, in linear messages, against log-sum-exp in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.contract import TENSOR_CORES, gradient_bound, poisoned_memory

chain_backward = pytest.importorskip("logchain.kernels.gpu.chain_backward")

from logchain.kernels.gpu.chain_forward import forward  # noqa: E402
from logchain.kernels.gpu.chains import Operands  # noqa: E402
from tests.kernels.gpu.processes import shared, together  # noqa: E402

INF = float("inf")
F32, F64 = torch.float32, torch.float64


def draw(v, g, m, c, s=None, *, dtype=F32, spread=3.0, zeros=0.0, lengths=False, log_params=False, seed=0, x_dtype=None):
    """A batch of chains."""
    generator = torch.Generator().manual_seed(seed)
    s = max(v - 1, 1) if s is None else s
    x = (spread * torch.randn(v, g, m, c, generator=generator)).to(x_dtype or dtype)
    bulk = torch.rand(s, g, c, c, generator=generator, dtype=F64)
    bulk[torch.rand(bulk.shape, generator=generator) < zeros] = 0.0
    x[torch.rand(x.shape, generator=generator) < zeros / 2] = -INF
    bulk = (bulk.log() if log_params else bulk).to(dtype)
    start = torch.randn(g, m, c, generator=generator, dtype=F64)
    ends = torch.randint(1, v + 1, (g, m), generator=generator) if lengths else None
    return Operands(x, bulk, start, ends, log_params, dtype)


class Found(NamedTuple):
    """What the kernels computed, and the operands."""

    chain: Operands
    messages: Tensor
    log_norm: Tensor
    weight: Tensor
    grad_x: Tensor
    grad_start: Tensor
    r: Tensor
    doubt: Tensor


def run(chain, weight=None, final=None, *, grad_x=None, parts=1, redone=None, change=None) -> Found:
    """Forward and backward; `change(messages, log_norm)` between them."""
    v, g, m, c = chain.shape
    weight = torch.randn(g, m, generator=torch.Generator().manual_seed(1)).to(chain.dtype) if weight is None else weight
    final = None if final is None else final.to(chain.dtype)
    with poisoned_memory():
        messages, log_norm = torch.empty(v, g, m, c, dtype=chain.dtype), torch.empty(g, m, dtype=F64)
        doubt = forward(chain, messages, log_norm, parts=1)
        if final is not None:
            log_norm = truth(chain, torch.ones(g, m), final)[0]
        if change is not None:
            change(messages, log_norm)
        grad_x = torch.empty(chain.x.shape, dtype=chain.dtype) if grad_x is None else grad_x
        grad_start, r = torch.empty(g, m, c, dtype=chain.dtype), torch.empty(v, g, m, c, dtype=chain.dtype)
        redone = torch.zeros(g, m, dtype=torch.bool) if redone is None else redone

        def launch(programs=None):
            return chain_backward.backward(
                chain, messages, redone, log_norm, weight, grad_x=grad_x, grad_start=grad_start, r=r, final=final,
                parts=parts, programs=programs,
            )  # fmt: skip

        if parts == 1:
            doubt = doubt | launch()
    return Found(chain, messages, log_norm, weight, grad_x, grad_start, r, doubt)


def truth(chain, weight, final=None):
    """log Z (g, m), weight times posteriors (v, g, m, c), and of transitions (v - 1, g, m, c, c)."""
    x = chain.x.double()
    v, g, m, c = x.shape
    logs = chain.bulk.double() if chain.log_params else chain.bulk.double().log()
    logs = logs.expand(max(v - 1, 1), g, c, c)
    ends = torch.full((g, m), v) if chain.ends is None else chain.ends
    last = torch.zeros(g, m, c, dtype=F64) if final is None else final.double()
    alpha, beta = [chain.start + x[0]], [last] * v
    for i in range(1, v):
        alpha.append(torch.logsumexp(alpha[-1][..., :, None] + logs[i - 1][:, None], -2) + x[i])
    for i in reversed(range(1, v)):
        b = torch.logsumexp(logs[i - 1][:, None] + (x[i] + beta[i])[..., None, :], -1)
        beta[i - 1] = torch.where((i < ends)[..., None], b, last)
    log_norm = torch.logsumexp(torch.stack([torch.where((ends == i + 1)[..., None], alpha[i], -INF) for i in range(v)]) + last, (0, -1))
    weight = weight.double()

    def share(joint, i, unit):
        shape = (...,) + (None,) * unit
        possible = (log_norm > -INF) & (i < ends) & (weight != 0)
        return torch.where(possible[shape], (joint - log_norm[shape]).exp() * weight[shape], 0.0)

    states = torch.stack([share(alpha[i] + beta[i], i, 1) for i in range(v)])
    pairs = [
        share(alpha[i - 1][..., :, None] + logs[i - 1][:, None] + (x[i] + beta[i])[..., None, :], i, 2) for i in range(1, v)
    ]
    return log_norm, states, torch.stack(pairs) if pairs else states.new_zeros(0, g, m, c, c)


def factors(found: Found) -> Tensor:
    """Posteriors of transitions (v - 1, g, m, c, c), times the weight, as whoever reads r computes them."""
    chain, v = found.chain, len(found.chain.x)
    logs = chain.bulk.double() if chain.log_params else chain.bulk.double().log()
    top = logs.amax((-1, -2), keepdim=True) / torch.log(torch.tensor(2.0, dtype=F64))
    k = torch.where(top.isfinite(), torch.ceil(top) if chain.log_params else torch.floor(top), 0.0)
    p = (logs - k * torch.log(torch.tensor(2.0, dtype=F64))).exp().expand(max(v - 1, 1), *logs.shape[1:])[: v - 1]
    counts = found.messages[:-1].double()[..., :, None] * p[:, :, None] * found.r[1:].double()[..., None, :]
    return torch.where(found.weight.double()[..., None, None] == 0, 0.0, counts * found.weight.double()[..., None, None])


def check(found: Found, final=None, doubtful=None, units=1.0) -> None:
    """Posteriors and factors lie within the contract; only `doubtful` sequences are so."""
    v, g, m, c = found.chain.shape
    assert found.doubt.equal(torch.zeros(g, m, dtype=torch.bool) if doubtful is None else doubtful)
    _, states, pairs = truth(found.chain, found.weight, final)
    good = ~found.doubt
    size = found.weight.double().abs()[..., None]
    depth = found.chain.x.double()
    depth = torch.where(depth.isfinite(), depth - depth.amax(-1, keepdim=True), 0.0).abs().max()
    for got, want, scale in (
        (found.grad_x, states, size), (found.grad_start[None], states[:1], size), (factors(found), pairs, size[..., None]),
    ):  # fmt: skip
        assert not got[:, good].isnan().any()
        bound = gradient_bound((want / scale).numpy(), v, c, depth.item(), dtype=found.chain.dtype, k=TENSOR_CORES) * units
        error = ((got.double() - want) / scale).abs()
        assert (error <= torch.from_numpy(bound))[:, good].all(), (error / torch.from_numpy(bound))[:, good].max()
        assert (got[:, good][want[:, good] == 0] == 0).all(), "nothing has a gradient"


@pytest.mark.parametrize("v, g, m, c", [(1, 1, 1, 1), (2, 2, 5, 7), (4, 1, 17, 17), (5, 2, 1, 33), (3, 1, 2, 1), (2, 1, 18, 40)])
@pytest.mark.parametrize("log_params", [False, True])
def test_gradients(device, v, g, m, c, log_params):
    check(run(draw(v, g, m, c, log_params=log_params)))
