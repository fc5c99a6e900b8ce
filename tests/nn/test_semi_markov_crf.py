"""Segments of tags begin where tags change or `begins` says so, and have a largest duration; see also test_crf."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from logchain.nn import SemiMarkovCRF, semi_markov_crf
from tests.nn.test_crf import INF, layer
from tests.seeded import seeded


def emissions_of(*shape):
    return torch.randn(*shape, generator=seeded(9), dtype=torch.float64)


def test_change_of_tag_begins_a_segment_without_begins():
    crf, emissions = layer(3, longest=3), emissions_of(1, 5, 3)
    tags, begins = torch.tensor([[0, 0, 2, 2, 1]]), torch.tensor([[True, False, True, False, True]])
    assert crf(emissions, tags) == crf(emissions, tags, begins=begins) == crf(emissions, tags, begins=begins & False)
    begins[0, 3] = True
    assert crf(emissions, tags, begins=begins) != crf(emissions, tags)


def test_segment_that_is_too_long_is_impossible_where_values_are_not_read(monkeypatch):
    crf, emissions, tags = layer(3, longest=3), emissions_of(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="tags: expected segments of at most 3 steps, got one of 5; pass a larger"):
        crf(emissions, tags)
    mask = torch.tensor([[True, True, True, False, False]] * 2)  # three steps
    assert crf(emissions, tags, mask).isfinite()
    monkeypatch.setattr(semi_markov_crf, "is_readable", lambda _: False)
    assert (crf(emissions, tags, reduction="none") == -INF).all()
    with (mode := FakeTensorMode()):
        crf = SemiMarkovCRF(3, 3, batch_first=True)
        assert crf(mode.from_tensor(emissions), mode.from_tensor(tags)).shape == ()
