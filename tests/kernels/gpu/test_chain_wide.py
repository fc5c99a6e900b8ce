"""Products a step: right where nothing is doubtful, and doubtful where they would not be."""

import pytest
import torch

from logchain.kernels.gpu import launch
from tests.kernels.gpu.processes import shared, together

chain_wide = pytest.importorskip("logchain.kernels.gpu.chain_wide")
chains = pytest.importorskip("logchain.kernels.gpu.chains")
tiles = pytest.importorskip("logchain.kernels.gpu.chain_wide_tiles")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
SMALL = tiles.Tile(16, 16, 16, 4, 2)


def chain(v=4, g=1, m=5, c=20, *, dtype=F32, each=True, logs=False, lengths=False, scale=3.0, device="cpu"):
    random = torch.Generator().manual_seed(v + m + c)
    x = torch.randn(v, g, m, c, dtype=F64, generator=random) * scale
    bulk = torch.rand(max(v - 1, 1) if each else 1, g, c, c, dtype=F64, generator=random)
    start = torch.randn(g, m, c, dtype=F64, generator=random)
    ends = torch.arange(g * m).reshape(g, m) * 3 % v + 1 if lengths else None
    operands = chains.Operands(x.to(dtype), (bulk.log() if logs else bulk).to(dtype), start, ends, logs, dtype)
    return on(operands, device)


def on(operands, device):
    return chains.Operands(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in operands))


def truth(operands):
    """The logarithms of messages (v, g, m, c) and log_norm (g, m), in float64."""
    v = operands.shape[0]
    x, bulk = operands.x.double().cpu(), operands.bulk.double().cpu()
    logs = bulk if operands.log_params else bulk.log()
    messages = [operands.start.cpu() + x[0]]
    for i in range(1, v):
        p = logs[min(i, len(logs)) - 1] if len(logs) > 1 else logs[0]
        messages.append(torch.logsumexp(messages[-1][..., :, None] + p[:, None], -2) + x[i])
    ends = torch.full(x.shape[1:3], v) if operands.ends is None else operands.ends.cpu()
    messages = torch.stack(messages)
    last = messages.gather(0, (ends - 1)[None, ..., None].expand(1, *x.shape[1:]))[0]
    return messages, torch.logsumexp(last, -1), ends


def bound(operands, k=4):
    v, _, _, c = operands.shape
    unit, k = (2.0**-53, 1) if operands.dtype == F64 else (2.0**-24, k)
    return v * (k * c + 8) * unit


def run(operands, *, keep=True, tile=SMALL, apart=True):
    """log_norm, doubt and messages, from memory that held NaN; if not apart, each program is a process."""
    v, g, m, c = operands.shape
    device = operands.x.device
    messages = torch.full((v if keep else min(v, 2), g, m, c), NAN, dtype=operands.dtype, device=device)
    log_norm = torch.full((g, m), NAN, dtype=F64, device=device)
    with pytest.MonkeyPatch.context() as patch:
        if not apart:
            patch.setattr(launch, "run", as_processes)
        doubt = chain_wide.forward(operands, messages, log_norm, tile=tile, together=not apart)
    return log_norm, doubt, messages


def as_processes(kernel, grid, *arguments, **options):
    """A launch whose programs are processes, if they wait for each other."""
    fixed = options.get("L")
    if fixed is None or not fixed.together:
        kernel[grid](*arguments, **options)
    else:
        shared(value for value in arguments if isinstance(value, torch.Tensor))
        together(grid[0], lambda: kernel[(1,)](*arguments, **options))


def assert_right(operands, found):
    log_norm, doubt, messages = found
    logs, expected, ends = truth(operands)
    assert not doubt.any()
    torch.testing.assert_close(log_norm.cpu(), expected, rtol=2.0**-52, atol=bound(operands))
    if len(messages) == len(logs):
        for i, message in enumerate(messages.double().cpu()):
            there = (i < ends)[..., None] & (logs[i].amax(-1, keepdim=True) > -INF)
            shares = message / message.sum(-1, keepdim=True).clamp(min=1e-300)
            expected = torch.softmax(logs[i], -1).where(there, torch.zeros(()).double())
            torch.testing.assert_close(shares, expected, rtol=2 * bound(operands), atol=1e-17)
            assert ((message == 0) == ((logs[i] == -INF) | ~there)).all()


@pytest.mark.parametrize("v, g, m, c", [(1, 1, 1, 1), (2, 1, 5, 7), (4, 2, 17, 20), (3, 1, 1, 33), (5, 3, 3, 16)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_sizes(device, dtype, v, g, m, c):
    operands = chain(v, g, m, c, dtype=dtype, each=v != 5, logs=c == 20, lengths=m > 1, device=device)
    found = run(operands)
    assert_right(operands, found)
    alike = run(operands, keep=False)
    assert torch.equal(alike[0], found[0]) and not alike[1].any()


def gradients(operands, found, weight=None, *, final=None, redone=None, tile=SMALL, apart=True, out=F32, r=True):
    """grad_x, grad_start, r and doubt."""
    log_norm, _, messages = found
    device = messages.device
    weight = torch.ones_like(log_norm) if weight is None else weight
    redone = torch.zeros_like(log_norm, dtype=torch.bool) if redone is None else redone
    grad_x = None if out is None else torch.full(messages.shape, NAN, dtype=out, device=device)
    grad_start = torch.full(messages.shape[1:], NAN, dtype=operands.dtype, device=device)
    r = torch.full_like(messages, NAN) if r else None
    with pytest.MonkeyPatch.context() as patch:
        if not apart:
            patch.setattr(launch, "run", as_processes)
        doubt = chain_wide.backward(
            operands, messages, redone, log_norm, weight, grad_x=grad_x, grad_start=grad_start, r=r, final=final,
            tile=tile, together=not apart,
        )  # fmt: skip
    return grad_x, grad_start, r, doubt


def posteriors(operands, final=None):
    """Of states (v, g, m, c) and of transitions (v, g, m, c, c), the first of which are zeros."""
    forward, _, ends = truth(operands)
    v, g, m, c = operands.shape
    x, bulk = operands.x.double().cpu(), operands.bulk.double().cpu()
    logs = bulk if operands.log_params else bulk.log()
    last = torch.zeros(g, m, c).double() if final is None else final.double().cpu()
    states, counts = torch.zeros(v, g, m, c).double(), torch.zeros(v, g, m, c, c).double()
    b = last
    for i in reversed(range(v)):
        b = torch.where((i == ends - 1)[..., None], last, b)
        there = (i < ends)[..., None]
        states[i] = torch.softmax(forward[i] + b, -1).nan_to_num(0.0) * there
        if i:
            p = logs[i - 1 if len(logs) > 1 else 0][:, None]
            pair = forward[i - 1][..., None] + p + (x[i] + b)[..., None, :]
            counts[i] = torch.softmax(pair.flatten(-2), -1).nan_to_num(0.0).view_as(pair) * there[..., None]
            b = torch.logsumexp(p + (x[i] + b)[..., None, :], -1)
    return states, counts


def assert_gradients(operands, messages, found, weight=None, final=None):
    grad_x, grad_start, r, doubt = found
    assert not doubt.any()
    states, counts = posteriors(operands, final)
    weight = torch.ones(states.shape[1:3]).double() if weight is None else weight.double().cpu()
    near = {"rtol": 4 * bound(operands), "atol": operands.shape[3] * 2.0**-26}
    torch.testing.assert_close(grad_start.double().cpu(), weight[..., None] * states[0], **near)
    if grad_x is not None:
        rounding = torch.finfo(grad_x.dtype).eps
        expected = weight[..., None] * states
        torch.testing.assert_close(grad_x.double().cpu(), expected, **near | {"rtol": near["rtol"] + rounding})
        assert (grad_x.cpu()[states == 0] == 0).all()
    if r is not None:
        ready = chains.room(operands, 1).bound.double().cpu()  # 2 k + low
        p = operands.bulk.double().cpu()
        p = (p.exp() if operands.log_params else p) / 2.0 ** (ready / 2).floor()[..., None, None]
        for i in range(1, len(r)):
            pair = messages[i - 1].double().cpu()[..., None] * p[i - 1 if len(p) > 1 else 0][:, None]
            shares = pair * r[i].double().cpu()[..., None, :]
            torch.testing.assert_close(shares * (weight != 0)[..., None, None], counts[i] * (weight != 0)[..., None, None], **near)


@pytest.mark.parametrize("v, g, m, c", [(1, 1, 1, 1), (2, 1, 5, 7), (4, 2, 17, 20), (3, 1, 1, 33), (5, 3, 3, 16)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_gradients(device, dtype, v, g, m, c):
    operands = chain(v, g, m, c, dtype=dtype, each=v != 5, logs=c == 20, lengths=m > 1, device=device)
    found = run(operands)
    final = torch.randn(g, m, c).to(device, dtype) * 5 + 1e3 if g > 1 else None
    weight = torch.arange(g * m, device=device).sub(1).to(dtype).reshape(g, m)
    result = gradients(operands, found, weight, final=final, out=torch.bfloat16 if c == 7 else dtype)
    assert_gradients(operands, found[2], result, weight, final)
    alike = gradients(operands, found, weight, final=final, out=None, r=False)
    assert torch.equal(alike[1], result[1]) and not alike[3].any()
