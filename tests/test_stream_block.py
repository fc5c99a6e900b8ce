"""However a piece is walked, it says the same: in blocks, or by a GPU's kernels."""

import pytest
import torch

from logchain import kernels as devices
from logchain.stream import Stream
from logchain.streams import filter as stream_filter
from tests.contract import Truth, assert_values
from tests.families import FAMILIES, Chain
from tests.streams import assert_posteriors, each_step, messages_of, prefixes, streamed

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("homogeneous", [False, True], ids=["each step", "one matrix"])
@pytest.mark.parametrize(
    "name", ["dense", "peaked", "bakis_jump", "one_dead", "abyss", "offsets", "sparse", "far_start"]
)
def test_a_piece_in_blocks(name, homogeneous, monkeypatch):
    """However a piece is cut inside, its values, posteriors and messages are those of the whole."""
    chain = FAMILIES[name](F64, each=True)
    if homogeneous:
        chain = chain._replace(bulk=chain.bulk[..., :1, :, :])
    v, truth, lengths = chain.x.shape[-2], Truth(chain), torch.full(chain.x.shape[:-2], chain.x.shape[-2])
    lengths[0, 0] = 1
    ending = Truth(chain, lengths.numpy())
    for block in (1, 3 * chain.x[..., 0, :].numel(), 10**9):
        monkeypatch.setattr(stream_filter, "_BLOCK", block)
        _, found = streamed(chain, [(0, v)], homogeneous=homogeneous, lag=2)
        assert_values(found.log_norm, truth.log_norm, truth.value_bound(F64))
        messages = 2.0**-50 * messages_of(chain)
        for states, lag in ((found.filtered, 0), (found.smoothed, 2)):
            exact = prefixes(chain, lag)
            assert_posteriors(states, exact, truth.gradient_bound(exact) + messages)
        _, found = streamed(chain, [(0, v)], homogeneous=homogeneous, lengths=lengths)
        assert_values(found.log_norm, ending.log_norm, ending.value_bound(F64))
        exact = prefixes(chain, 0, lengths.numpy())
        assert_posteriors(found.filtered, exact, ending.gradient_bound(exact) + messages)


@pytest.mark.parametrize("name", ["dense", "detour", "one_dead"])
def test_the_kernels_of_a_gpu(name, device, monkeypatch):
    """The same answers, and lengths that nobody looks at: one out of range makes its sequence NaN."""
    chain = FAMILIES[name](F32, v=4, n=2, t=1, c=3)
    options = {"lag": 1, "viterbi": True, "lengths": [[4], [3]]}
    _, expected = streamed(chain, [(0, 1), (1, 4)], **options)
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    there = Chain(*(tensor.to(device) for tensor in chain[:3]), chain.log_params)
    _, found = streamed(there, [(0, 1), (1, 4)], **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    stream = Stream(None, there.p0, log_params=chain.log_params)
    norm = stream.update(there.x, each_step(there), lengths=torch.tensor([1, 9], device=device)).log_norm
    assert norm[0].isfinite().all() and norm[1].isnan().all()
