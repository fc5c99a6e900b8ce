"""A stream refuses wrong arguments by name."""

import pytest
import torch

from logchain.stream import Stream
from tests.families import FAMILIES
from tests.streams import each_step

F32 = torch.float32
NAN = float("nan")


def test_wrong_arguments_are_named():
    chain = FAMILIES["dense"](F32)
    into = each_step(chain)
    stream = Stream(None, chain.p0)
    with pytest.raises(RuntimeError, match="expected an update before"):
        _ = stream.log_norm
    wrong = [
        (TypeError, "lag: expected an integer, got True", lambda: Stream(None, chain.p0, lag=True)),
        (ValueError, "lag: expected 0 or more, got -1", lambda: Stream(None, chain.p0, lag=-1)),
        (TypeError, "viterbi: expected True or False", lambda: Stream(None, chain.p0, viterbi=1)),
        (ValueError, r"bulk: expected shape \[..., 1, 6, 6\]", lambda: Stream(chain.bulk, chain.p0)),
        (ValueError, "bulk_piece: expected a torch.Tensor", lambda: stream.update(chain.x)),
        (ValueError, r"bulk_piece: .* got \[1, 1, 16, 6, 6\]", lambda: stream.update(chain.x, into[..., 1:, :, :])),
        (
            ValueError,
            "p0: expected leading axes of 1",
            lambda: Stream(None, chain.p0.expand(5, 1, 6)).update(chain.x, into),
        ),
        (
            ValueError,
            "lengths: expected values from 0 to k = 17, got 18",
            lambda: stream.update(chain.x, into, lengths=[18] * 3),
        ),
        (TypeError, "lengths: expected integers", lambda: stream.update(chain.x, into, lengths=[1.5] * 3)),
        (ValueError, "mask: expected shape None", lambda: stream.reset(torch.tensor([True]))),
        (TypeError, "mask: expected a torch.Tensor of bool", lambda: stream.reset([True])),
        (
            ValueError,
            "state: expected that of a stream",
            lambda: stream.load_state_dict(Stream(None, chain.p0, lag=1).state_dict()),
        ),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    stream.update(chain.x, into)
    with pytest.raises(ValueError, match=r"x_piece: expected shape \[3, 2, k, 6\], got \[2, 17, 6\]"):
        stream.update(chain.x[0], into)
    own = Stream(chain.bulk[..., :1, :, :], chain.p0)
    with pytest.raises(ValueError, match="bulk_piece: expected None"):
        own.update(chain.x, into)


def test_validate():
    chain = FAMILIES["dense"](F32)
    into = each_step(chain)
    stream = Stream(None, chain.p0, validate=True)
    stream.update(chain.x[..., :3, :], into[..., :3, :, :])  # what is not used may be NaN
    with pytest.raises(ValueError, match="bulk_piece: expected non-negative"):
        stream.update(chain.x, -chain.bulk[..., :1, :, :])
    x = chain.x.clone()
    x[..., -1, 0] = NAN
    with pytest.raises(ValueError, match="^x_piece: expected no NaN"):
        stream.update(x, chain.bulk[..., :1, :, :])
    for name, own, given in (("bulk_piece", None, into * NAN), ("bulk", chain.bulk[..., :1, :, :] * NAN, None)):
        with pytest.raises(ValueError, match=f"^{name}: expected no NaN"):
            Stream(own, chain.p0, validate=True).update(chain.x, given)
    stream.update(x, chain.bulk[..., :1, :, :], lengths=[16] * 3)
