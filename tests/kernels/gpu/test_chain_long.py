"""Long chains in segments: the log-partition is right where it is not doubtful, and doubtful where it would not be."""

import numpy as np
import pytest
import torch

from tests.contract import TENSOR_CORES, Truth, poisoned_memory
from tests.families import FAMILIES, Chain, dense
from tests.kernels.gpu.test_chain_forward import DOUBTFUL, operands
from tests.layouts import poisoned, strange

chain_long = pytest.importorskip("logchain.kernels.gpu.chain_long")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# rows of products with sums that cannot be trusted
DOUBTFUL = DOUBTFUL | {"sharp", "one_hot"}


def assert_right(chain: Chain, device: str, segments: int, lengths=None) -> torch.Tensor:
    """Which sequences [n, t] are doubtful; all others are within the contract."""
    with poisoned_memory():
        log_norm, doubt = chain_long.log_norm(operands(chain, lengths, device), segments)
    truth = Truth(chain, lengths)
    found, trusted = (value.cpu().numpy().reshape(truth.log_norm.shape) for value in (log_norm, ~doubt))
    assert (np.isneginf(found) == np.isneginf(truth.log_norm))[trusted].all()
    with np.errstate(invalid="ignore"):
        wrong = np.abs(found - truth.log_norm) > truth.value_bound(F64, TENSOR_CORES)
    assert not (wrong & trusted & np.isfinite(truth.log_norm)).any()
    assert np.isfinite(found[trusted & np.isfinite(truth.log_norm)]).all()
    return doubt.cpu().reshape(truth.log_norm.shape)


@pytest.mark.parametrize(("each", "log"), [(False, True), (True, False)], ids=["shared, logs", "each"])
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"c301"}))
def test_families(name, each, log, device):
    chain = FAMILIES[name](F32, each=each, n=2, t=1, v=9)
    doubt = assert_right(chain.logs() if log else chain, device, segments=4)
    assert not doubt.any() or name in DOUBTFUL


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("v", [1, 2, 8])
def test_every_cut(v, segments, device):
    assert not assert_right(dense(F32, n=1, t=2, v=v, c=3), device, segments).any()


@pytest.mark.parametrize(("dtype", "log"), [(F32, True), (F64, False)])
@pytest.mark.parametrize("c", [1, 7, 17, 33])
def test_any_number_of_states(c, dtype, log, device):
    chain = dense(dtype, n=1, t=1, v=6, c=c, each=True)
    assert not assert_right(chain.logs() if log else chain, device, segments=3).any()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_one_matrix_for_all_steps(dtype, device):
    chain = dense(dtype, n=1, t=2, v=12, c=5)
    chain = chain._replace(bulk=chain.bulk[..., :1, :, :])
    for variant in (chain, chain.logs()):
        assert not assert_right(variant, device, segments=4).any()


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("segments", [2, 5])
def test_lengths(each, segments, device):
    """What lies behind the end is not read, even where it is NaN."""
    lengths = torch.tensor([[1, 2], [5, 12], [7, 11]])
    chain = dense(F32, n=3, t=2, v=12, c=4, each=each)
    assert not assert_right(chain, device, segments, lengths).any()
    found, expected = (
        chain_long.log_norm(operands(one, lengths, device), segments)[0] for one in (poisoned(chain, lengths), chain)
    )
    assert torch.equal(found, expected)


def test_half_precision_and_strides(device):
    chain = dense(F32, n=2, t=2, v=9, c=5, each=True)
    for how in ("transposed", "expanded"):
        assert not assert_right(strange(chain, how), device, segments=3).any()
    half = chain._replace(x=chain.x.bfloat16(), bulk=chain.bulk.bfloat16())
    assert not assert_right(half, device, segments=3).any()


@pytest.mark.parametrize(("shift", "factor"), [(1e5, 1e-30), (-1e5, 1e30)])
def test_scales(shift, factor, device):
    chain = dense(F32, n=1, t=2, v=9, c=5)
    assert not assert_right(chain._replace(x=chain.x + shift, bulk=chain.bulk * factor), device, segments=3).any()


def test_impossible_chains_are_certain(device):
    """Their log-partition is -inf without a second look, whichever segment has no path."""
    chain = dense(F32, n=2, t=2, v=9, c=5)
    for step in range(9):
        x = chain.x.clone()
        x[0, 0, step] = -INF
        assert not assert_right(chain._replace(x=x), device, segments=3).any()
    bulk = chain.bulk.clone()
    bulk[..., 3, :, :] = 0.0
    assert not assert_right(chain._replace(bulk=bulk), device, segments=3).any()


@pytest.mark.parametrize("step", range(9))
def test_nan_stays_in_its_sequence(step, device):
    """Even where no path meets it: the start and the matrices do not lead to a state, and x does not admit one."""
    chain = dense(F32, n=4, t=1, v=9, c=4, each=True)
    x, bulk, p0 = chain.x.clone(), chain.bulk.clone(), chain.p0.expand(4, 1, 4).clone()
    x[0, 0, step, 1] = NAN
    p0[1, 0, 1], bulk[1, ..., 1], x[1, 0, step, 1] = 0.0, 0.0, NAN
    x[2, 0, step, 2] = -INF
    bulk[2, 0, min(step, 7), 2, 2] = NAN
    doubt = assert_right(chain._replace(x=x, bulk=bulk, p0=p0), device, segments=3)
    assert doubt[:3].all() and not doubt[3].any()


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("log", [False, True])
def test_underflow_is_doubtful(segments, log, device):
    """Every path pays for a detour that no float32 holds, within a segment or where two meet."""
    chain = FAMILIES["detour"](F32, n=2, t=1, v=9, c=5)
    assert assert_right(chain.logs() if log else chain, device, segments).all()


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_what_x_loses_is_doubtful(segments, device):
    """States that keep to themselves, each in turn 100 nats below the other: what is raised is needed later."""
    chain = dense(F32, n=2, t=1, v=9, c=2)
    x = torch.zeros_like(chain.x)
    x[0, :, 1::2, 0], x[0, :, 2::2, 1] = -100.0, -100.0
    doubt = assert_right(chain._replace(x=x, bulk=torch.eye(2).expand_as(chain.bulk)), device, segments)
    assert doubt[:, 0].tolist() == [True, False]


def test_what_x_loses_where_segments_meet_is_doubtful(device):
    """The same, but x falls only behind the products of segments of two steps."""
    chain = dense(F32, n=2, t=1, v=9, c=2)
    x = torch.zeros_like(chain.x)
    x[0, :, 2, 0], x[0, :, 4, 1] = -100.0, -100.0
    doubt = assert_right(chain._replace(x=x, bulk=torch.eye(2).expand_as(chain.bulk)), device, 4)
    assert doubt[:, 0].tolist() == [True, False]


@pytest.mark.parametrize("segments", [1, 4])
def test_tiny_entries_are_doubtful_or_right(segments, device):
    """Entries that beside the largest lie outside of float32, some of which the only path needs."""
    chain = dense(F32, n=4, t=1, v=9, c=4, each=True)
    bulk = chain.bulk.clone()
    for n in range(4):
        bulk[n, :, 2 * n] *= torch.where(torch.eye(4) > 0, 1.0, 1e-25)
        bulk[n, :, 2 * n, 1] *= 1e-12
    assert_right(chain._replace(bulk=bulk), device, segments)
