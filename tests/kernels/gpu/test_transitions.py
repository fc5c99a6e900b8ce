"""The gradient of the transitions from messages, against the sum over sequences in float64.

Messages are drawn, not computed: log-probabilities `joint` of transitions (steps, g, m, c, c), a message `alpha`, a
matrix, and `r` with `alpha + log P + r = joint` would be a chain's; here `r` is chosen below what makes a term of the
sum exceed its sequence's weight.
"""

import pytest
import torch

from tests.contract import TENSOR_CORES, of_steps, poisoned_memory, unit

transitions = pytest.importorskip("logchain.kernels.gpu.transitions")

INF = float("inf")


def draw(v, g, m, c, s=None, *, spread=3.0, zeros=0.0, near=True, seed=0):
    """Float64 log matrices (s, g, c, c), messages and remainders (v, g, m, c), weights (g, m)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    s = v - 1 if s is None else s
    logs = spread * normal(s, g, c, c)
    logs[torch.rand(s, g, c, c, generator=generator) < zeros] = -INF
    alpha, r = spread * normal(v, g, m, c), spread * normal(v, g, m, c)
    if near:
        alpha -= alpha.amax(-1, keepdim=True)
    # the paths of each living sequence through a step sum to 1
    joint = alpha[:-1, ..., :, None] + logs[:, :, None] + r[1:, ..., None, :]
    total = joint.flatten(-2).logsumexp(-1)
    r[1:] -= torch.where(total == -INF, 0.0, total)[..., None]
    r[1:][total == -INF] = -INF
    return alpha, r, normal(g, m), logs


def truth(alpha, r, weight, bulk, log_params):
    """By definition, in float64; also every sequence's largest possible share of an entry."""
    alpha, r, weight, bulk = (tensor.double().cpu() for tensor in (alpha, r, weight, bulk))
    joint = alpha[:-1, ..., :, None] + r[1:, ..., None, :]
    if log_params:
        joint = joint + bulk[:, :, None]
    terms = torch.where(weight[..., None, None] == 0, 0.0, joint.exp() * weight[..., None, None])
    terms = torch.where(joint == -INF, 0.0, terms).sum(2)
    terms = terms.sum(0, keepdim=True) if len(bulk) == 1 else terms
    return torch.where(bulk == (-INF if log_params else 0.0), 0.0, terms)


def check(alpha, r, weight, logs, device, dtype=torch.float32, log_params=True, bulk_dtype=None, out=None, high=False):
    """The gradient lies within the contract of a step."""
    bulk = (logs if log_params else logs.exp()).to(bulk_dtype or dtype).to(device)
    alpha, r, weight = (tensor.to(dtype).to(device) for tensor in (alpha, r, weight))
    if out is None:
        with poisoned_memory():
            out = torch.empty(bulk.shape, dtype=dtype, device=device)
            transitions.gradient(alpha, r, weight, bulk, out, log_params=log_params)
    else:
        transitions.gradient(alpha, r, weight, bulk, out, log_params=log_params)
    expected = truth(alpha, r, weight, bulk, log_params)
    found = out.double().cpu()
    zero = bulk.cpu() == (-INF if log_params else 0.0)
    assert (found[zero] == 0).all(), "a zero has a gradient"
    # of the expected number of transitions: the gradient of a linear matrix times the matrix
    scale = 1.0 if log_params else bulk.double().cpu()
    finite = torch.stack([alpha.double(), r.double()])[..., None].cpu()
    size = torch.where(finite.isfinite(), finite, 0.0).abs().amax()
    counts = truth(alpha, r, torch.where(weight.isnan(), 0.0, weight).abs(), bulk, log_params) * scale
    c = alpha.shape[-1]
    share = 2 * of_steps(1, c, size, dtype=dtype, k=TENSOR_CORES) + (2.0**-10 if high else 0.0)
    error = ((found - expected) * scale).abs()
    allowed = share * counts + c * unit(dtype) / 4 * weight.abs().sum().item()
    assert found.isnan().equal(expected.isnan())
    inside = ~expected.isnan()
    assert (error <= allowed)[inside].all(), f"{(error / allowed)[inside].max():.3g} times the bound"
    return out


@pytest.fixture
def high():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


SIZES = {
    "few": (3, 2, 3, 5),
    "few, one state": (4, 1, 1, 1),
    "few, many columns": (2, 1, 1, 132),
    "matrices over tiles": (5, 3, 1, 33),
    "product, 16 states": (3, 2, 17, 13),
    "product, 32 states": (2, 1, 33, 17),
    "product, tiles": (2, 2, 9, 70),
    "product, one state": (2, 1, 40, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_each_step_has_a_matrix(device, name):
    for log_params in (True, False):
        check(*draw(*SIZES[name], zeros=0.2), device, log_params=log_params)


@pytest.mark.parametrize("v, g, m, c", [(4, 2, 2, 5), (3, 2, 9, 17), (12, 1, 3, 7)])
def test_one_matrix_for_all_steps(device, v, g, m, c):
    for log_params in (True, False):
        check(*draw(v, g, m, c, 1, zeros=0.2), device, log_params=log_params)


@pytest.mark.parametrize("m", [3, 20])
def test_float64(device, m):
    for log_params in (True, False):
        check(*draw(3, 2, m, 17, zeros=0.2), device, torch.float64, log_params=log_params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [3, 20])
def test_half_precision_matrices(device, m, dtype):
    for log_params in (True, False):
        check(*draw(3, 2, m, 17, spread=1.0), device, log_params=log_params, bulk_dtype=dtype)


def test_tf32(device, high):
    check(*draw(3, 2, 40, 20), device, high=True)


@pytest.mark.parametrize("m", [2, 20])
def test_paths_far_below_the_maximum_are_redone(device, m):
    """The only way on leaves states 100 nats below the maximum, for every other sequence."""
    alpha, r, weight, logs = draw(3, 1, m, 33)
    alpha[0, 0, ::2, 20:] -= 100.0
    logs[0, 0, :20, 7:] = -INF
    r[1, 0, ::2, :7] = -INF
    weight[0, 1], r[1, 0, 1, 0] = 0.0, float("nan")
    joint = (alpha[0, 0, :, :, None] + logs[0, 0] + r[1, 0, :, None, :]).flatten(-2).logsumexp(-1)
    r[1] -= joint[:, None]
    for log_params in (True, False):
        out = check(alpha, r, weight, logs, device, log_params=log_params)
        assert (out[0, 0, 20:, 7:] != 0).any()


@pytest.mark.parametrize("m", [2, 20])
def test_maxima_of_messages_and_matrices_far_from_zero(device, m):
    """Messages relative to another step's maximum, and matrices that are not normalised."""
    alpha, r, weight, logs = draw(3, 2, m, 17, near=False)
    top = torch.linspace(-300, 300, m, dtype=torch.float64)[:, None]
    column = torch.linspace(-60, 70, 17, dtype=torch.float64)
    for log_params, bulk, moved in ((True, logs + 5 * column, r - 5 * column), (False, logs + column, r - column)):
        check(alpha + top, moved - top, weight, bulk, device, log_params=log_params)


@pytest.mark.parametrize("m, v, s", [(2, 3, 2), (20, 3, 2), (7, 4, 1)])
@pytest.mark.parametrize("log_params", [True, False])
def test_dead_sequences_and_weights_of_zero(device, m, v, s, log_params):
    """What a sequence of weight 0 holds is not looked at, and what has ended or is impossible adds exactly 0."""
    alpha, r, weight, logs = draw(v, 2, m, 5, s)
    weight[:, 0] = 0.0
    alpha[:, 0, 0], alpha[:, 1, 0], r[:, :, 0] = float("nan"), 0.0, INF
    r[1:, :, 1] = -INF
    alpha[0, 0, 1], alpha[1, 1, 1] = -INF, -INF
    out = check(alpha, r, weight, logs, device, log_params=log_params)
    assert out.isfinite().all()
    r[:] = -INF
    logs[..., 2] = float("nan")
    weight[:, 0] = 1.0
    alpha[:, :, 0] = 0.0
    bulk = (logs if log_params else logs.exp()).float().to(device)
    transitions.gradient(*(t.float().to(device) for t in (alpha, r, weight)), bulk, out, log_params=log_params)
    assert (out == 0).all()


@pytest.mark.parametrize("m", [2, 20])
def test_nan_stays_in_its_set(device, m):
    alpha, r, weight, logs = draw(3, 2, m, 5)
    r[1:, 1, 1] = float("nan")
    out = check(alpha, r, weight, logs, device)
    assert out[:, 0].isfinite().all() and out[:, 1].isnan().all()


@pytest.mark.parametrize("m", [2, 20])
def test_strides(device, m):
    """Transposed and expanded matrices, a transposed weight, and a gradient between other numbers."""
    alpha, r, weight, logs = draw(4, 2, m, 6, 1)
    alpha, r, weight = (tensor.float().to(device) for tensor in (alpha, r, weight.T.contiguous().T))
    bulk = logs.float().mT.contiguous().mT.to(device).expand(3, 2, 6, 6)
    room = torch.full((3, 12, 2, 8), 7.0, device=device)
    out = room[:, ::2, :, 1:7].permute(0, 2, 1, 3)
    transitions.gradient(alpha, r, weight, bulk, out, log_params=True)
    # bitwise what contiguous operands give
    plain = torch.empty(3, 2, 6, 6, device=device)
    transitions.gradient(alpha, r, weight.contiguous(), bulk.contiguous(), plain, log_params=True)
    assert out.equal(plain)
    out.fill_(7.0)
    assert (room == 7.0).all(), "wrote outside"
    check(alpha.double(), r.double(), weight.double(), bulk.double(), device)


@pytest.mark.parametrize("v, g, s", [(2, 1, 1), (3, 2, 1), (3, 1, 2)])
def test_split_sums_are_the_same_every_time(device, v, g, s, monkeypatch):
    monkeypatch.setattr(transitions, "_SHORTEST", 32)
    alpha, r, weight, logs = draw(v, g, 140, 6, s)
    first = check(alpha, r, weight, logs, device)
    assert check(alpha, r, weight, logs, device).equal(first)
    for log_params in (True, False):
        alpha[:, :, 130:] = -INF  # the last part holds nothing
        check(alpha, r, weight, logs, device, log_params=log_params)


def test_one_step(device):
    """Without a transition there is nothing to add."""
    out = torch.full((1, 2, 3, 3), float("nan"), device=device)
    empty = torch.zeros(1, 2, 4, 3, device=device)
    transitions.gradient(empty, empty, torch.ones(2, 4, device=device), torch.zeros_like(out), out, log_params=True)
    assert (out == 0).all()
