"""Forward messages in linear numbers: right where nothing is doubtful, and doubtful where they would not be."""

import numpy as np
import pytest
import torch

from tests.contract import TENSOR_CORES, Truth, of_steps
from tests.families import FAMILIES, Chain, dense
from tests.kernels.gpu.processes import shared, together

chain_forward = pytest.importorskip("logchain.kernels.gpu.chain_forward")
chains = pytest.importorskip("logchain.kernels.gpu.chains")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# whose sums cannot all be trusted in linear numbers
DOUBTFUL = {"detour", "detour2", "abyss", "detour_linear", "left_to_right", "bakis_jump", "log_far", "banded"}
DOUBTFUL |= {"tiny_transitions"}


def operands(chain: Chain, lengths=None, device: str = "cpu") -> chains.Operands:
    """A family's chain [n, t, v, c] as (v, g, m, c): one set where all sequences share matrices, else one for each."""
    x, bulk, p0 = (tensor.to(device) for tensor in chain[:3])
    n, t, v, c = x.shape
    x, bulk = x.permute(2, 0, 1, 3), bulk.permute(2, 0, 1, 3, 4)
    shared_matrices = bulk.shape[1] * bulk.shape[2] == 1
    grid = (1, n * t) if shared_matrices else (n * t, 1)
    start = p0.double() if chain.log_params else p0.double().log()
    start = start.expand(n, t, c).reshape(*grid, c).contiguous()
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=device).flatten().expand(n * t).reshape(grid).contiguous()
    dtype = F64 if F64 in (x.dtype, bulk.dtype) else F32
    x, bulk = x.reshape(v, *grid, c), bulk.reshape(-1, grid[0], c, c)
    return chains.Operands(x, bulk, start, lengths, chain.log_params, dtype)


def run(chain: chains.Operands, *, keep: bool = True, parts: int | None = None):
    """log_norm, doubt and messages, from memory that held NaN; with parts each program is a process."""
    v, g, m, c = chain.shape
    device = chain.x.device
    messages = torch.full((v if keep else min(v, 2), g, m, c), NAN, dtype=chain.dtype, device=device)
    log_norm = torch.full((g, m), NAN, dtype=F64, device=device)
    if parts is None:
        return log_norm, chain_forward.forward(chain, messages, log_norm), messages
    # all programs of a launch see what is prepared once
    groups = g * -(-m // chain_forward.GROUP.value)
    ready = chains.room(chain, chain_forward.words(groups))
    shared([messages, log_norm, *ready])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_forward, "room", lambda *_, **__: ready)
        together(groups * parts, lambda: chain_forward.forward(chain, messages, log_norm, parts=parts, programs=1))
    return log_norm, ready.doubt, messages


def assert_right(family: Chain, log_norm, doubt, lengths=None, k: int = TENSOR_CORES):
    truth = Truth(family, lengths)
    found, trusted = (value.cpu().numpy().reshape(truth.log_norm.shape) for value in (log_norm, ~doubt))
    assert (np.isneginf(found) == np.isneginf(truth.log_norm))[trusted].all()
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(found - truth.log_norm))
    assert (error <= truth.value_bound(k=k))[trusted].all(), (error / truth.value_bound(k=k)).max()


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_families(device, name, dtype):
    sizes = {} if name[-1].isdigit() else {"v": 7}
    family = FAMILIES[name](dtype=dtype, each=len(name) % 2 == 0, n=3, t=1, **sizes)
    chain = operands(family, device=device)
    log_norm, doubt, messages = run(chain)
    assert_right(family, log_norm, doubt)
    assert not doubt.any() or name in DOUBTFUL
    alike = run(chain, keep=False)
    assert torch.equal(alike[0], log_norm) and torch.equal(alike[1], doubt)
    if not doubt.any():
        assert_filtered(chain, messages)


def filtered(chain: chains.Operands) -> list[torch.Tensor]:
    """The messages (g, m, c) of all steps as logarithms, by definition."""
    messages = [chain.start + chain.x[0].double()]
    for i in range(1, len(chain.x)):
        p = chain.bulk[(i - 1) % len(chain.bulk)].double()
        p = p if chain.log_params else p.log()
        messages.append(torch.logsumexp(messages[-1][..., :, None] + p[:, None], -2) + chain.x[i].double())
    return messages


def assert_filtered(chain: chains.Operands, messages: torch.Tensor):
    """Each message is the filtered posterior up to a factor; zeros after the end."""
    for i, a in enumerate(filtered(chain)):
        there = torch.ones_like(a[..., :1]) if chain.ends is None else (i < chain.ends)[..., None].double()
        found = messages[i].double() / messages[i].double().sum(-1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(found, torch.softmax(a, -1).nan_to_num(0.0) * there, rtol=0, atol=1e-5)


@pytest.mark.parametrize("m, c", [(1, 1), (17, 2), (5, 17), (16, 33)])
def test_sizes_and_lengths(device, m, c):
    family = dense(F32, n=m, t=1, v=5, c=c)
    lengths = [1 + 3 * i % 5 for i in range(m)]
    chain = operands(family, lengths, device)
    log_norm, doubt, messages = run(chain)
    assert not doubt.any()
    assert_right(family, log_norm, doubt, lengths)
    assert_filtered(chain, messages)
    assert torch.equal(run(chain, keep=False)[0], log_norm)


@pytest.mark.parametrize("lengths", [None, [1, 2, 5]])
def test_the_message_that_leaves_is_exact_where_others_are_raised(device, lengths):
    chain = operands(FAMILIES["peaked"](F32, n=3, t=1, v=5, c=7), lengths, device)
    messages, log_norm = torch.empty(2, 1, 3, 7, device=device), torch.empty(1, 3, dtype=F64, device=device)
    leaving = torch.full((1, 3, 7), NAN, device=device)
    assert not chain_forward.forward(chain, messages, log_norm, leaving).any()
    for i, end in enumerate(lengths or [5] * 3):
        one = torch.log_softmax(filtered(chain)[end - 1][0, i], -1)
        torch.testing.assert_close(torch.log_softmax(leaving[0, i].double(), -1), one, rtol=1e-6, atol=1e-5)
        assert one.min() < -200


def test_one_matrix_for_all_steps(device):
    family = dense(F32, v=6)
    family = family._replace(bulk=family.bulk[..., :1, :, :])
    for one in (family, family.logs()):
        log_norm, doubt, _ = run(operands(one, device=device))
        assert not doubt.any()
        assert_right(one, log_norm, doubt)


@pytest.mark.parametrize("x_type, bulk_type", [(torch.bfloat16, F32), (torch.float16, torch.bfloat16), (F32, F64)])
def test_narrow_and_mixed_types(device, x_type, bulk_type):
    chain = operands(dense(F64, n=4, t=1, v=4, c=7), device=device)
    dtype = torch.promote_types(bulk_type, F32)
    chain = chain._replace(x=chain.x.to(x_type), bulk=chain.bulk.to(bulk_type), dtype=dtype)
    wide = chain._replace(x=chain.x.double(), bulk=chain.bulk.double(), dtype=F64)
    torch.testing.assert_close(run(chain)[0], run(wide)[0], rtol=1e-6, atol=0)


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with NaN between them."""
    wide = torch.full([2 * size + 1 for size in tensor.shape], NAN, dtype=tensor.dtype, device=tensor.device)
    return wide[tuple(slice(1, None, 2) for _ in tensor.shape)].copy_(tensor)


def test_strides(device):
    chain = operands(dense(F32, n=5, t=1, v=4, c=8), device=device)
    expected = run(chain)[0]
    for x, bulk in [
        (spaced(chain.x), chain.bulk),
        (chain.x, chain.bulk.mT.contiguous().mT),
        (chain.x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), spaced(chain.bulk)),
    ]:
        assert torch.equal(run(chain._replace(x=x, bulk=bulk))[0], expected)
    start = chain.start[:, :1].expand_as(chain.start).clone()
    alike = chain._replace(x=chain.x[:, :, :1].expand_as(chain.x), start=start)
    assert run(alike)[0].unique().numel() == 1


def test_large_offsets_are_taken_out(device):
    chain = operands(dense(F64, n=3, t=1, v=5, c=7), device=device)
    chain = chain._replace(x=chain.x.round(), bulk=(1024 * chain.bulk).round())  # exact in what follows
    single = chain._replace(x=chain.x.float(), bulk=chain.bulk.float(), dtype=F32)
    expected = run(single)[0]
    for shift, scale in [(2.0**17, 1.0), (-(2.0**17), 2.0**-115), (0.0, 2.0**90)]:
        moved = single._replace(x=single.x + shift, bulk=single.bulk * scale)
        log_norm, doubt, _ = run(moved)
        assert not doubt.any()
        torch.testing.assert_close(log_norm - 5 * shift - 4 * np.log(scale), expected, rtol=0, atol=1e-6)


def test_a_nan_stays_in_its_sequence(device):
    chain = operands(dense(F32, n=6, t=1, v=4, c=7), device=device)
    expected = run(chain)[0]
    x = chain.x.clone()
    x[2, 0, 3, 5] = NAN
    log_norm, doubt, _ = run(chain._replace(x=x))
    others = [0, 1, 2, 4, 5]
    assert doubt[0, 3] and not doubt[0, others].any()
    assert torch.equal(log_norm[0, others], expected[0, others])


def test_a_nan_that_no_path_meets_is_not_forgotten(device):
    """In x of a state that is not reached, and in a column of a matrix whose state x forbids."""
    x, bulk = torch.zeros(3, 1, 2, 5, device=device), torch.rand(2, 1, 5, 5, device=device)
    bulk[0, :, :, 2] = 0.0
    x[1, 0, 1, 2] = NAN
    start = torch.zeros(1, 2, 5, dtype=F64, device=device)
    chain = chains.Operands(x, bulk, start, None, False, F32)
    log_norm, doubt, _ = run(chain)
    assert log_norm[0, 0].isfinite() and not doubt[0, 0] and (log_norm[0, 1].isnan() or doubt[0, 1])
    x, bulk = torch.zeros(3, 1, 2, 5, device=device), torch.rand(2, 1, 5, 5, device=device)
    x[1, 0, :, 3] = -INF
    bulk[0, 0, 1, 3] = NAN
    log_norm, doubt, _ = run(chain._replace(x=x, bulk=bulk))
    assert (log_norm.isnan() | doubt).all()


def test_a_flushed_exponential_loses_nothing_beside_a_large_sum(device):
    """State 0 falls by 2^-122 in one step, which its large sum makes up for, and only state 0 goes on."""
    bits = torch.tensor([[0.0, 0.0], [-40.0, -40.0], [0.0, 0.0], [-122.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    x = (bits * np.log(2)).float()[:, None, None].to(device)
    bulk = torch.eye(2, device=device).expand(5, 1, 2, 2).clone()
    bulk[2, 0, 0, 0] = 2.0**20
    bulk[3, 0, 1, 1] = 2.0**-20
    chain = chains.Operands(x, bulk, torch.zeros(1, 1, 2, dtype=F64, device=device), None, False, F32)
    family = Chain(x[:, 0].transpose(0, 1)[:, None], bulk[:, 0][None, None], torch.ones(1, 1, 2))
    log_norm, doubt, messages = run(chain)
    assert_right(family.to(F32), log_norm, doubt)
    if not doubt.any():
        assert_filtered(chain, messages)


def test_what_underflows_is_doubtful(device):
    """Only state 0 is left, and all ways out of it but one are 1e-30."""
    c = 18
    x = torch.zeros(4, 1, 5, c)
    x[0, :, :, 1:] = -300.0
    x[1, 0, 3, 0] = -INF
    x[2, 0, 4] = -INF
    bulk = (torch.eye(c) + 1e-30).repeat(3, 1, 1, 1)
    chain = chains.Operands(x, bulk, torch.zeros(1, 5, c, dtype=F64), None, False, F32)
    chain = chains.Operands(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in chain))
    log_norm, doubt, _ = run(chain)
    assert doubt[0, 3]
    assert log_norm[0, 4] == -INF or doubt[0, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a launch has programs that wait for each other")
@pytest.mark.parametrize("dtype, c, parts, same", [(F32, 40, 3, False), (F32, 21, 2, True), (F64, 10, 2, False)])
def test_parts_that_meet(dtype, c, parts, same):
    family = dense(dtype, n=18, t=1, v=4, c=c)
    if same:
        family = family._replace(bulk=family.bulk[..., :1, :, :])
    lengths = [1 + i % 4 for i in range(18)]
    chain = operands(family, lengths)
    log_norm, doubt, messages = run(chain, parts=parts)
    assert not doubt.any()
    assert_right(family, log_norm, doubt, lengths)
    assert_filtered(chain, messages)
    expected = run(chain)
    near = 2 * of_steps(4, c, dtype=dtype)  # the order of sums is that of numpy's products, which differs between CPUs
    torch.testing.assert_close(log_norm, expected[0], rtol=0, atol=near)
    torch.testing.assert_close(messages, expected[2], rtol=near, atol=0)
