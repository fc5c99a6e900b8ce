"""A stream that does not end keeps its accuracy, in constant memory."""

import io

import numpy as np
import pytest
import scipy.special
import torch

import logchain
from logchain import reference
from logchain.memory import peak_bytes
from logchain.stream import Stream
from tests.contract import Truth, assert_values
from tests.families import Chain

F64 = torch.float64


@pytest.mark.parametrize("filtered", [False, True])
def test_memory_does_not_grow(filtered):
    draw = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(300, 8, generator=draw), torch.softmax(torch.randn(1, 8, 8, generator=draw), -1)

    def run(updates: int) -> list[torch.Tensor]:
        stream = Stream(bulk, torch.ones(8), filtered=filtered)
        for _ in range(updates):
            stream.update(x)
        return [stream.log_norm]

    run(1)
    assert peak_bytes(lambda: run(40)) <= peak_bytes(lambda: run(5))


def test_a_long_stream_keeps_its_scale_and_its_memory():
    """|log Z| of 5e5, what is held does not grow, and posteriors stay good."""
    draw = torch.Generator().manual_seed(0)
    v, c = 2000, 4
    x = torch.randn(v, c, generator=draw) + 250.0
    bulk, p0 = torch.softmax(torch.randn(1, c, c, generator=draw), -1), torch.full((c,), 0.25)
    stream, states, sizes, smooth = Stream(bulk, p0, lag=5, viterbi=True), [], [], []
    for start in range(0, v, 100):
        update = stream.update(x[start : start + 100])
        states.append(update.states)
        smooth.append(update.smoothed)
        stored = io.BytesIO()
        torch.save(stream.state_dict(), stored)
        sizes.append(len(stored.getvalue()))
    last = stream.flush()
    truth = reference.forward_backward(x, bulk, p0)
    assert_values(last.log_norm, truth.log_norm, np.spacing(np.float32(truth.log_norm)))
    assert torch.equal(torch.cat([*states, last.states]), logchain.viterbi(x.double(), bulk.double(), p0).states)
    emissions, ahead = np.exp(x.double().numpy() - 250), np.ones((v, c))
    for lag in range(5, 0, -1):
        ahead[:-lag] = (emissions[lag:] * ahead[:-lag]) @ bulk[0].double().numpy().T
    posteriors = scipy.special.softmax(truth.forward + np.log(ahead), -1)
    assert (np.abs(torch.cat([*smooth, last.smoothed]).numpy() - posteriors) < 1e-5).all()
    assert max(sizes) < min(sizes) + 4000


def test_what_rounding_loses_between_pieces_is_kept():
    stream = Stream(torch.ones(1, 1, 1), torch.ones(1), dtype=F64)
    for value in (1e16, 1.0, -1e16):
        stream.update(torch.tensor([[value]]))
    # float32 rounds 1e16 on the way in, the same both times
    assert stream.log_norm == 1.0


@pytest.mark.parametrize("filtered", [False, True])
def test_many_pieces_keep_the_contract(filtered):
    """Messages tens of nats wide are rounded to float32 on the way into each piece, and the sum is still good."""
    draw, v, c = torch.Generator().manual_seed(0), 1500, 4
    x, p0 = 10 * torch.randn(v, c, generator=draw), torch.ones(c)
    bulk = torch.softmax(4 * torch.randn(1, c, c, generator=draw), -1)
    stream = Stream(bulk, p0, filtered=filtered)
    for part in x.split(3):
        stream.update(part)
    truth = reference.forward_backward(x, bulk, p0)
    bound = Truth(Chain(x, bulk, p0)).value_bound()
    assert_values(stream.log_norm, truth.log_norm, bound)
    last = scipy.special.softmax(truth.forward[-1])
    assert (np.abs(stream.filtered.numpy() - last) < 1e-5).all()


def test_large_pieces_that_cancel():
    """Each piece's log-partition is near 2^41, and known to 2^-13 if it is rounded; their sum is good to float64."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-4096, 4096, (4, 3), generator=draw).double() / 4096  # exact beside 2^40
    bulk, p0 = torch.rand(1, 3, 3, generator=draw, dtype=F64), torch.ones(3, dtype=F64)
    stream = Stream(bulk, p0)
    for i, sign in ((0, 1.0), (2, -1.0)):
        stream.update(x[i : i + 2] + sign * 2.0**40)
    torch.testing.assert_close(stream.log_norm, logchain.product(x, bulk, p0), rtol=0, atol=1e-14)
