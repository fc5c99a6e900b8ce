"""The best path of a stream comes as soon as its states are final."""

import torch

import logchain
from logchain.stream import Stream
from logchain.streams import paths as stream_paths

F64 = torch.float64
INF = float("inf")


def test_states_are_returned_as_soon_as_paths_merge():
    """A forced state settles all before it; two lanes that never meet settle nothing until flush."""
    x = torch.zeros(6, 3)
    x[3, [0, 2]] = -INF
    uniform = Stream(torch.rand(1, 3, 3), torch.ones(3), viterbi=True)
    counts = [len(uniform.update(x[i : i + 1]).states) for i in range(4)]
    assert sum(counts) == 4
    lanes = Stream(torch.eye(2)[None], torch.tensor([0.4, 0.6]), viterbi=True)
    assert all(len(lanes.update(torch.zeros(1, 2)).states) == 0 for _ in range(5))
    assert lanes.flush().states.tolist() == [1] * 5
    lanes.reset()
    other = torch.tensor([1.0, 0.0]).expand(4, 2)
    assert lanes.update(other, lengths=3).states.tolist() == [0, 0, 0, -1], "an end leaves one path"


def test_best_paths_of_long_pieces(monkeypatch):
    """By compiled loops or step by step, in blocks or not: ties aside, the same states as soon."""
    draw = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(2, 90, 4, generator=draw, dtype=F64), torch.rand(1, 4, 4, generator=draw, dtype=F64) ** 4
    bulk[0, 0, 1:] = 0.0
    x[1, 50, :3] = -INF
    found = []
    for long, terms in ((1, 2**20), (1, 300), (1000, 2**20)):
        monkeypatch.setattr(stream_paths, "_LONG", long)
        monkeypatch.setattr(stream_paths, "_TERMS", terms)
        stream = Stream(bulk, torch.ones(4, dtype=F64), viterbi=True)
        found.append([stream.update(part).states for part in x.split(40, 1)] + [stream.flush().states])
    for other in found[:2]:
        assert all(torch.equal(one, two) for one, two in zip(found[2], other, strict=True))
    assert torch.equal(torch.cat(found[0], -1), logchain.viterbi(x, bulk, torch.ones(4, dtype=F64)).states)


def test_an_impossible_segment_does_not_spoil_the_one_before():
    lanes = Stream(torch.eye(2)[None], torch.tensor([[0.4, 0.6]]).expand(2, 2), viterbi=True)
    lanes.update(torch.zeros(2, 3, 2))
    lanes.reset(torch.tensor([True, False]))
    first = lanes.update(torch.full((2, 2, 2), 0.0).index_fill(0, torch.tensor([0]), -INF)).states
    found = torch.cat([first, lanes.flush().states], -1)
    assert found.tolist() == [[1, 1, 1, -1, -1], [1] * 5]
