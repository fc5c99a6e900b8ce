"""Few long chains cut into segments keep the accuracy contract, for any number of segments."""

import pytest
import torch

from tests.contract import Truth, assert_values
from tests.families import FAMILIES

F32, F64 = torch.float32, torch.float64


@pytest.fixture
def segments(device, monkeypatch):
    pytest.importorskip("triton")
    from logchain.kernels.gpu import segments

    monkeypatch.setattr(segments, "_SHORTEST", 2)
    monkeypatch.setattr(segments, "_SHORT", 3)
    return segments


def log_norm(kernel, chain, device, **options):
    """Sequences with matrices of their own are sets, others members of one set."""
    n, t, v, c = chain.x.shape
    x = chain.x.reshape(n * t, v, c).to(device)
    bulk = chain.bulk.reshape(-1, *chain.bulk.shape[2:]).to(device)
    start = chain.p0.expand(n, t, c).reshape(n * t, c).double().to(device)
    start = start if chain.log_params else start.log()
    own = len(bulk) > 1 or n * t == 1
    x, start = (tensor.unsqueeze(1 if own else 0) for tensor in (x, start))  # (g, m, ...)
    rescued = torch.zeros(1, dtype=torch.int64, device=device)
    found = kernel.log_norm(
        x.permute(2, 0, 1, 3), bulk.transpose(0, 1), start, log_params=chain.log_params, rescued=rescued, **options
    )
    return found.reshape(n, t), rescued.item()


@pytest.mark.parametrize("count", [2, 100])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "left_to_right", "one_dead", "offsets"])
def test_segments_keep_the_contract(segments, device, name, each, count):
    chain = FAMILIES[name](F32, each=each, n=2, t=1, v=12)
    truth = Truth(chain)
    found, _ = log_norm(segments, chain, device, segments=count)
    # a product of two matrices is rounded once more a level than a vector's
    assert_values(found.float(), truth.log_norm, truth.value_bound() + 4 * 2.0**-17)


@pytest.mark.parametrize("v", [2, 3, 4, 5, 8, 17])
def test_any_length(segments, device, v):
    chain = FAMILIES["dense"](F64, n=1, t=1, v=v, c=3)
    truth = Truth(chain)
    found, rescued = log_norm(segments, chain, device, segments=4)
    assert_values(found, truth.log_norm, truth.value_bound())
    assert rescued == 0


def test_one_matrix_for_every_step_and_logarithms(segments, device):
    chain = FAMILIES["dense"](F32, n=2, t=1, v=20, c=5)
    chain = chain._replace(bulk=chain.bulk[..., :1, :, :])
    for variant in (chain, chain.logs()):
        truth = Truth(variant)
        assert_values(log_norm(segments, variant, device)[0].float(), truth.log_norm, truth.value_bound())


def test_rescues_are_counted(segments, device):
    assert log_norm(segments, FAMILIES["detour"](F32, n=1, t=1, v=9), device)[1] > 0


def test_it_is_for_few_long_chains(segments, monkeypatch):
    monkeypatch.setattr(segments, "processors", lambda like: 132)

    def worthwhile(v, g, m, c):
        return segments.worthwhile(torch.empty(v, g, m, c, device="meta"), torch.empty(0))

    assert worthwhile(100_000, 1, 1, 16) and worthwhile(1000, 1, 8, 64)
    assert not worthwhile(1000, 1, 500, 16) and not worthwhile(1000, 1, 1, 65)
    assert not worthwhile(1000, 2, 3, 4) and not worthwhile(8, 1, 1, 4)
