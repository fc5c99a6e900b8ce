"""Products a step: right where nothing is doubtful, and doubtful where they would not be."""

import numpy as np
import pytest
import torch

from tests.contract import TENSOR_CORES, Truth
from tests.families import FAMILIES
from tests.kernels.gpu.processes import shared, together
from tests.kernels.gpu.test_chain_forward import DOUBTFUL, spaced

chain_wide = pytest.importorskip("logchain.kernels.gpu.chain_wide")
chains = pytest.importorskip("logchain.kernels.gpu.chains")
launch = pytest.importorskip("logchain.kernels.gpu.launch")
tiles = pytest.importorskip("logchain.kernels.gpu.chain_wide_tiles")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
SMALL = tiles.Tile(16, 16, 16, 4, 2)


def chain(v=4, g=1, m=5, c=20, *, dtype=F32, each=True, logs=False, lengths=False, scale=3.0, device="cpu"):
    random = torch.Generator().manual_seed(v + m + c)
    x = torch.randn(v, g, m, c, dtype=F64, generator=random) * scale
    bulk = torch.rand(max(v - 1, 1) if each else 1, g, c, c, dtype=F64, generator=random)
    start = torch.randn(g, m, c, dtype=F64, generator=random)
    ends = torch.arange(g * m).reshape(g, m) * 7 // 3 % v + 1 if lengths else None
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


@pytest.mark.parametrize("v, g, m, c", [(1, 1, 1, 1), (2, 1, 5, 7), (4, 1, 17, 20), (3, 1, 1, 33), (5, 2, 2, 16)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_sizes(device, dtype, v, g, m, c):
    operands = chain(v, g, m, c, dtype=dtype, each=v != 5, logs=c == 20, lengths=m > 1, device=device)
    found = run(operands)
    assert_right(operands, found)
    if c != 20:
        assert torch.equal(run(operands, keep=False)[0], found[0])


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
            torch.testing.assert_close(
                shares * (weight != 0)[..., None, None], counts[i] * (weight != 0)[..., None, None], **near
            )


@pytest.mark.parametrize("v, g, m, c", [(1, 1, 1, 1), (2, 1, 5, 7), (4, 1, 17, 20), (3, 1, 1, 33), (5, 2, 2, 16)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_gradients(device, dtype, v, g, m, c):
    operands = chain(v, g, m, c, dtype=dtype, each=v != 5, logs=c == 20, lengths=m > 1, device=device)
    found = run(operands)
    final = torch.randn(g, m, c).to(device, dtype) * 5 + 1e3 if g > 1 else None
    weight = torch.arange(g * m, device=device).sub(1).to(dtype).reshape(g, m)
    result = gradients(operands, found, weight, final=final, out=torch.bfloat16 if c == 7 else dtype)
    assert_gradients(operands, found[2], result, weight, final)
    if c != 20:
        alike = gradients(operands, found, weight, final=final, out=None, r=False)
        assert torch.equal(alike[1], result[1]) and not alike[3].any()


def family_chain(name, device):
    """A family's chain [n, t, v, c], and that as (v, g, m, c): one set."""
    family = FAMILIES[name](dtype=F32)
    x, bulk, p0 = family[:3]
    n, t, v, c = x.shape
    start = (p0.double() if family.log_params else p0.double().log()).expand(n, t, c).reshape(1, n * t, c).contiguous()
    x, bulk = x.permute(2, 0, 1, 3).reshape(v, 1, n * t, c), bulk.permute(2, 0, 1, 3, 4).reshape(-1, 1, c, c)
    return family, on(chains.Operands(x, bulk, start, None, family.log_params, F32), device)


@pytest.mark.parametrize("name", ["v2", "peaked", "sharp", *sorted(DOUBTFUL)])
def test_families(device, name):
    family, operands = family_chain(name, device)
    log_norm, doubt, messages = found = run(operands)
    truth = Truth(family)
    value, trusted = log_norm.cpu().numpy().ravel(), ~doubt.cpu().numpy().ravel()
    expected, allowed = truth.log_norm.ravel(), truth.value_bound(k=TENSOR_CORES).ravel()
    assert (np.isneginf(value) == np.isneginf(expected))[trusted].all()
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(value - expected))
    assert (error <= allowed)[trusted].all()
    assert trusted.all() or name in DOUBTFUL

    grad_x, _, _, doubt = gradients(operands, found, redone=doubt)
    trusted &= ~doubt.cpu().numpy().ravel()
    assert trusted.all() or name in DOUBTFUL
    states = truth.states.reshape(len(expected), *truth.states.shape[-2:]).transpose(1, 0, 2)
    allowed = truth.gradient_bound(truth.states, k=TENSOR_CORES).reshape(len(expected), *truth.states.shape[-2:])
    error = np.abs(grad_x[:, 0].double().cpu().numpy() - states)
    assert (error <= allowed.transpose(1, 0, 2))[:, trusted].all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a launch has programs that wait for each other")
@pytest.mark.parametrize(
    "dtype, c, logs, keep", [(F32, 20, True, True), (F32, 35, False, False), (F64, 20, False, True)]
)
def test_programs_that_meet(dtype, c, logs, keep):
    operands = chain(3, 1, 17, c, dtype=dtype, logs=logs, lengths=True)
    found, expected = run(operands, apart=False), run(operands)
    assert_right(operands, found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(run(operands, apart=False, keep=False)[0], expected[0])
    weight = torch.rand(1, 17) - 0.5
    met, apart = (gradients(operands, found, weight, apart=way, r=keep) for way in (False, True))
    assert_gradients(operands, found[2], met, weight)
    assert all(torch.equal(one, other) for one, other in zip(met, apart, strict=True) if one is not None)


def test_the_tile_of_wide_chains(device):
    operands = chain(3, 1, 3, 260, each=False, device=device)
    found = run(operands, tile=None)
    assert_right(operands, found)
    assert_gradients(operands, found[2], gradients(operands, found, tile=None, r=False))


def test_strides(device):
    operands = chain(3, 2, 2, 20, device=device)
    expected = run(operands)
    states = gradients(operands, expected)[0]
    for x, bulk in [
        (spaced(operands.x), operands.bulk),
        (operands.x, operands.bulk.mT.contiguous().mT),
        (operands.x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), spaced(operands.bulk)),
    ]:
        other = operands._replace(x=x, bulk=bulk)
        assert all(torch.equal(one, two) for one, two in zip(run(other), expected, strict=True))
        assert torch.equal(gradients(other, expected)[0], states)
    grad_x, weight = spaced(states), spaced(torch.ones(2, 2, device=device))
    start, none = torch.empty_like(states[0]), torch.zeros(2, 2, dtype=torch.bool, device=device)
    chain_wide.backward(
        operands, expected[2], none, expected[0], weight, grad_x=grad_x.zero_(), grad_start=start, r=None, final=None,
        tile=SMALL,
    )  # fmt: skip
    assert torch.equal(grad_x, states) and torch.equal(start, states[0])
    assert grad_x._base.isnan().sum() == grad_x._base.numel() - grad_x.numel()
    one = operands._replace(
        x=operands.x[:, :, :1].expand_as(operands.x), start=operands.start[:, :1].expand_as(operands.start).contiguous()
    )
    assert (run(one)[0] == run(one)[0][:, :1]).all()


@pytest.mark.parametrize(
    "x_type, bulk_type", [(torch.bfloat16, F32), (torch.float16, torch.bfloat16), (F32, F64), (torch.float16, F64)]
)
def test_narrow_and_mixed_types(device, x_type, bulk_type):
    operands = chain(3, 1, 4, 7, dtype=F64, device=device)
    dtype = torch.promote_types(bulk_type, F32)
    operands = operands._replace(x=operands.x.to(x_type), bulk=operands.bulk.to(bulk_type), dtype=dtype)
    found = run(operands)
    assert_right(operands, found)
    assert_gradients(operands, found[2], gradients(operands, found, out=x_type))


def test_large_offsets_are_taken_out(device):
    operands = chain(5, 1, 3, 7, device=device)
    operands = operands._replace(x=operands.x.round(), bulk=(1024 * operands.bulk).round() + 1)  # exact in what follows
    expected = run(operands)
    states = gradients(operands, expected)[0]
    for shift, scale in [(2.0**17, 1.0), (-(2.0**17), 2.0**-115), (0.0, 2.0**90)]:
        moved = operands._replace(x=operands.x + shift, bulk=operands.bulk * scale)
        found = run(moved)
        assert not found[1].any()
        torch.testing.assert_close(found[0] - 5 * shift - 4 * np.log(scale), expected[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(gradients(moved, expected)[0], states, rtol=1e-5, atol=1e-7)


def test_what_is_impossible(device):
    """Zeros in matrices and -inf in x: no doubt, exact zeros, and sequences without a path."""
    operands = chain(4, 1, 6, 20, device=device)
    x, bulk = operands.x.clone(), operands.bulk * (torch.arange(20, device=device) % 3 > 0)
    x[1, 0, 2], x[2, 0, 3, 4:], x[0, 0, 4] = -INF, -INF, -INF
    x[3, 0, 5, 1:] = -INF
    operands = operands._replace(x=x, bulk=bulk)
    found = run(operands)
    assert (found[0].isneginf().nonzero()[:, 1].cpu() == torch.tensor([2, 4, 5])).all()
    assert_right(operands, found)
    result = gradients(operands, found)
    assert_gradients(operands, found[2], result)
    assert all((value[..., [2, 4, 5], :] == 0).all() for value in (result[0], result[1], result[2][1:]))


def test_a_nan_stays_in_its_sequence(device):
    operands = chain(3, 2, 4, 20, lengths=True, device=device)
    expected = run(operands)
    states = gradients(operands, expected)[0]
    others = torch.ones(2, 4, dtype=torch.bool, device=device)
    others[0, 3] = False  # which has two steps
    x = operands.x.clone()
    x[1, 0, 3, 5] = NAN
    found = run(operands._replace(x=x))
    assert found[1][0, 3] and not found[1][others].any()
    assert torch.equal(found[0][others], expected[0][others])
    log_norm = expected[0].clone()
    log_norm[0, 3] = NAN
    grad_x, grad_start, r, doubt = gradients(operands, (log_norm, *expected[1:]))
    assert grad_x[:2, 0, 3].isnan().all() and grad_start[0, 3].isnan().all() and r[1, 0, 3].isnan().all()
    assert (grad_x[2, 0, 3] == 0).all() and (r[2, 0, 3] == 0).all()
    assert torch.equal(grad_x[:, others], states[:, others]) and not doubt[others].any()

    bulk = operands.bulk.clone()
    bulk[1, 0, 5, 5] = NAN
    dirty = operands._replace(bulk=bulk)
    found = run(dirty)
    others = (torch.arange(2, device=device)[:, None] == 1) | (operands.ends < 3)
    assert (found[1] == ~others).all() and not others.all()
    assert torch.equal(found[0][others], expected[0][others])
    grad_x, _, r, doubt = gradients(dirty, found, redone=found[1])
    assert torch.equal(grad_x[:, others], states[:, others]) and not doubt.any() and not r[1:].isnan().any()


def test_sequences_without_a_share(device):
    """Redone ones, whose messages are logarithms, and those of weight 0."""
    operands = chain(4, 1, 5, 20, device=device)
    log_norm, doubt, messages = run(operands)
    expected = gradients(operands, (log_norm, doubt, messages))
    redone = torch.tensor([[False, True, False, False, False]], device=device)
    weight = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]], device=device)
    dirty, norms = messages.clone(), log_norm.clone()
    dirty[:, 0, 1] = -1e30
    dirty[1, 0, 1, 3] = NAN
    dirty[:, 0, 2], norms[0, 2] = NAN, NAN
    norms[0, 3] = -INF
    result = gradients(operands, (norms, doubt, dirty), weight, redone=redone)
    assert not result[3].any()
    for value, other in zip(result[:3], expected, strict=False):
        value, other = (value[1:], other[1:]) if value is result[2] else (value, other)
        assert (value[..., [1, 2, 3], :] == 0).all()
        assert torch.equal(value[..., [0, 4], :], other[..., [0, 4], :])


def test_what_underflows_is_doubtful(device):
    """Forward: only state 0 is left, and all ways out of it but one are 1e-30. Backward: likewise, from the end."""
    c = 18
    x = torch.zeros(4, 1, 5, c)
    x[0, :, :, 1:] = -300.0
    x[1, 0, 3, 0] = -INF
    bulk = (torch.eye(c) + 1e-30).repeat(3, 1, 1, 1)
    operands = on(chains.Operands(x, bulk, torch.zeros(1, 5, c, dtype=F64), None, False, F32), device)
    assert run(operands)[1][0, 3]

    # what the forward messages say is likely is what the backward messages say is not
    x = torch.zeros(2, 1, 5, c)
    x[1, 0, :4, 1:] = -110.0
    x[0, 0, :4, 0] = -110.0
    operands = operands._replace(x=x.to(device), bulk=(torch.eye(c, device=device) + 1e-15)[None, None])
    found = run(operands)
    final = torch.zeros(1, 5, c, device=device)
    final[0, :4, 0] = -200.0
    doubt = gradients(operands, found, final=final)[3] | found[1]
    assert doubt[0, :4].all() and not doubt[0, 4]


def test_the_message_that_leaves(device):
    operands = chain(4, 1, 5, 20, lengths=True, device=device)
    expected = run(operands)
    leaving = torch.full((1, 5, 20), NAN, device=device)
    log_norm = torch.empty_like(expected[0])
    chain_wide.forward(operands, torch.empty_like(expected[2][:2]), log_norm, leaving, tile=SMALL)
    assert torch.equal(log_norm, expected[0])
    logs, _, ends = truth(operands)
    last = logs.gather(0, (ends - 1)[None, ..., None].expand(1, 1, 5, 20))[0]
    found = torch.log_softmax(leaving.double().cpu(), -1)
    torch.testing.assert_close(found, torch.log_softmax(last, -1), rtol=1e-6, atol=1e-5)


def test_a_final_message_of_states_without_a_path(device):
    operands = chain(3, 1, 2, 20, device=device)
    operands.x[2, 0, 0, 4:] = -INF
    found = run(operands)
    final = torch.zeros(1, 2, 20, device=device)
    final[..., 10:] = 1000.0
    final[0, 1] *= 0.01
    assert_gradients(operands, found[2], gradients(operands, found, final=final), final=final)


def test_a_sum_over_states_that_is_small_is_doubtful(device):
    """All sums are exact, but what is likely before a step is not what is likely after it."""
    x = torch.zeros(2, 1, 3, 20)
    x[0, :, :, 1], x[0, :, :, 2:] = -66.0, -INF
    operands = chains.Operands(x, torch.eye(20)[None, None], torch.zeros(1, 3, 20, dtype=F64), None, False, F32)
    operands = on(operands, device)
    found = run(operands)
    final = torch.zeros(1, 3, 20, device=device)
    final[0, 0, 0], final[0, 1, 0] = -66.0, -20.0
    assert not found[1].any()
    assert gradients(operands, found, final=final)[3].tolist() == [[True, False, False]]
