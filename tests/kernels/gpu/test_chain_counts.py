"""The gradient of matrices from linear messages, against the sum over sequences in float64."""

import pytest
import torch

from tests.contract import TENSOR_CORES, of_steps, poisoned_memory, unit

chain_counts = pytest.importorskip("logchain.kernels.gpu.chain_counts")

from logchain.kernels.gpu.chains import Operands  # noqa: E402

INF = float("inf")
F32, F64 = torch.float32, torch.float64


def draw(v, g, m, c, s=None, *, dtype=F32, bulk_dtype=None, zeros=0.2, log_params=False, size=1.0, seed=0):
    """A chain's matrices, and messages and r as a chain of that size leaves them: the counts of a step sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=F64)

    s = v - 1 if s is None else s
    bulk = uniform(s, g, c, c)
    bulk[uniform(s, g, c, c) < zeros] = 0.0
    bulk = size * bulk
    bulk = (bulk.log() if log_params else bulk).to(bulk_dtype or dtype)
    messages, r = 2.0 ** (80 * uniform(v, g, m, c) - 20), 2.0 ** (-60 * uniform(v, g, m, c))
    messages[uniform(v, g, m, c) < zeros] = 0.0
    counts = (messages[:-1, ..., None] * linear(bulk, log_params)[:, :, None] * r[1:, ..., None, :]).sum((-1, -2))
    r[1:] /= torch.where(counts == 0, INF, counts)[..., None]
    chain = Operands(
        torch.zeros(v, g, m, c, dtype=dtype), bulk, torch.zeros(g, m, c, dtype=F64), None, log_params, dtype
    )
    return chain, messages.to(dtype), r.to(dtype), torch.randn(g, m, generator=generator).to(dtype)


def exponents(bulk, log_params):
    """k of each matrix (s, g, 1, 1)."""
    top = bulk.double().amax((-1, -2), keepdim=True)
    if log_params:
        return torch.where(top.isfinite(), torch.ceil(top / torch.tensor(2.0, dtype=F64).log()), 0.0)
    return torch.floor(torch.log2(torch.where(top > 0, top, 2.0**-126)))


def linear(bulk, log_params):
    """P / 2^k in float64."""
    k = exponents(bulk, log_params) * torch.tensor(2.0, dtype=F64).log()
    return ((bulk.double() if log_params else bulk.double().log()) - k).exp()


def check(chain, messages, r, weight, left_out=None, *, by_log=False, out=None, high=False):
    """The gradient lies within the contract of one step."""
    left_out = torch.zeros(weight.shape, dtype=torch.bool) if left_out is None else left_out
    with poisoned_memory():
        out = torch.empty(chain.bulk.shape, dtype=chain.dtype) if out is None else out
        chain_counts.gradient(chain, messages, r, weight, left_out, out, by_log=by_log)
    counted, p = by_log or chain.log_params, linear(chain.bulk, chain.log_params)
    kept = weight.double().masked_fill(left_out, 0.0)[..., None, None]
    terms = messages[:-1].double()[..., None] * r[1:].double()[..., None, :]  # (v - 1, g, m, c, c)
    terms = torch.where(kept == 0, 0.0, terms) * p[:, :, None]
    want, size = ((terms * factor).sum(2) for factor in (kept, kept.abs()))
    if len(chain.bulk) == 1:
        want, size = want.sum(0, keepdim=True), size.sum(0, keepdim=True)
    found = out.double()
    assert (found[p == 0] == 0).all(), "a zero has a gradient"
    found = found if counted else found * p * 2.0 ** exponents(chain.bulk, chain.log_params)
    c, terms = chain.x.shape[-1], 1 if len(chain.bulk) > 1 else len(chain.x) - 1
    share = 2 * of_steps(1, c, 0.0, dtype=chain.dtype, k=TENSOR_CORES) + (2.0**-9 if high else 0.0)
    allowed = share * size + terms * c * unit(chain.dtype) / 4 * kept.abs().sum(1).squeeze(-1)[:, None]
    assert found.isnan().equal(want.isnan())
    assert ((found - want).abs() <= allowed)[~want.isnan()].all(), ((found - want).abs() / allowed).max()
    return out


SIZES = {
    "few": (3, 2, 3, 5),
    "few, one state": (4, 1, 1, 1),
    "few, columns over tiles": (2, 1, 1, 300),
    "matrices over tiles": (5, 3, 1, 33),
    "product, 16 states": (3, 2, 17, 13),
    "product, 32 states": (2, 1, 33, 17),
    "product, tiles": (2, 2, 9, 70),
    "product, one state": (2, 1, 40, 1),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("log_params", [False, True])
def test_each_step_has_a_matrix(device, name, log_params):
    check(*draw(*SIZES[name], log_params=log_params))


@pytest.mark.parametrize("v, g, m, c", [(4, 2, 2, 5), (3, 2, 9, 17), (12, 1, 3, 7), (12, 3, 1, 7), (20, 1, 20, 33)])
@pytest.mark.parametrize("log_params", [False, True])
def test_one_matrix_for_all_steps(device, v, g, m, c, log_params):
    check(*draw(v, g, m, c, 1, log_params=log_params))


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("s", [2, 1])
def test_float64(device, m, s):
    check(*draw(3, 2, m, 33, s, dtype=F64))


@pytest.mark.parametrize("m", [3, 20])
def test_bfloat16_matrices(device, m):
    check(*draw(3, 2, m, 17, bulk_dtype=torch.bfloat16))


@pytest.mark.parametrize("m", [3, 20])
def test_by_log(device, m):
    check(*draw(3, 2, m, 17), by_log=True)


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("scale", [1e-30, 1e36])
def test_weights_and_matrices_of_any_size(device, m, size, scale):
    chain, messages, r, weight = draw(3, 2, m, 17, size=size)
    check(chain, messages, r, scale * weight, by_log=True)
    if (scale < 1) == (size < 1):  # otherwise the gradient is 0 or infinite
        check(chain, messages, r, scale * weight)


@pytest.mark.parametrize("m", [4, 20])
@pytest.mark.parametrize("s", [3, 1])
def test_sequences_that_are_left_out(device, m, s):
    chain, messages, r, weight = draw(4, 2, m, 17, s)
    left_out = torch.rand(2, m) < 0.4
    weight[:, 0], left_out[:, 0], left_out[1, :] = 0.0, False, True
    wrong = left_out | (weight == 0)
    messages[:, wrong] = -INF
    r[:, wrong] = float("nan")
    assert (check(chain, messages, r, weight, left_out)[:, 1] == 0).all()


@pytest.mark.parametrize("m", [2, 20])
def test_nan_reaches_its_own_matrix_only(device, m):
    chain, messages, r, weight = draw(3, 2, m, 17, zeros=0.0)
    r[2, 1, 0] = float("nan")
    found = check(chain, messages, r, weight)
    assert found[1, 1].isnan().all() and found.isnan().sum() == 17 * 17


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("s", [2, 1])
def test_strides(device, m, s):
    chain, messages, r, weight = draw(3, 2, m, 20, s)
    bulk = chain.bulk.mT.contiguous().mT
    weight = weight[:1, :1].expand(2, m)
    plain = check(chain, messages, r, weight)
    out = torch.full((2, 20, 2, 20), float("nan")).permute(0, 2, 3, 1)[:s]
    assert check(chain._replace(bulk=bulk), messages, r, weight, out=out).equal(plain)


def test_bound_that_is_at_hand(device):
    chain, messages, r, weight = draw(3, 2, 3, 5)
    out = torch.empty(chain.bulk.shape)
    bound = (2 * exponents(chain.bulk, False)[..., 0, 0]).int()
    chain_counts.gradient(chain, messages, r, weight, torch.zeros(2, 3, dtype=torch.bool), out, bound=bound)
    assert out.equal(check(chain, messages, r, weight))


def test_tf32(device):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check(*draw(3, 1, 20, 33), high=True)
    finally:
        torch.set_float32_matmul_precision(before)


def test_nothing_to_count(device):
    chain, messages, r, weight = draw(2, 2, 3, 5)
    out = torch.full((1, 2, 5, 5), float("nan"))
    alone = chain._replace(x=chain.x[:1])
    chain_counts.gradient(alone, messages[:1], r[:1], weight, torch.zeros(2, 3, dtype=torch.bool), out)
    assert (out == 0).all()
