"""A forward message that leaves a stretch of a chain enters the next one, whichever kernels compute either."""

from dataclasses import replace

import pytest
import torch

from logchain.kernels.chain import Chain
from logchain.kernels.cpu.forward import forward as cpu_forward
from logchain.kernels.plain.forward import forward as plain_forward

FORWARD = {"plain": plain_forward, "cpu": cpu_forward}
F64 = torch.float64


@pytest.mark.parametrize("ends", [False, True], ids=["whole", "ends"])
@pytest.mark.parametrize("one_matrix", [False, True], ids=["each", "one"])
@pytest.mark.parametrize("second", FORWARD)
@pytest.mark.parametrize("first", FORWARD)
def test_a_message_passes_between_kernels(first, second, one_matrix, ends):
    """One sequence is redone, one is impossible, and some have ended before."""
    v, g, m, c = 6, 2, 3, 5
    draw = torch.Generator().manual_seed(0)
    x, p0 = 9 * torch.randn(v, g, m, c, generator=draw, dtype=F64), torch.rand(g, m, c, generator=draw, dtype=F64)
    bulk = torch.rand(1 if one_matrix else v - 1, g, c, c, generator=draw, dtype=F64)
    x[:, 0, 1] *= 300
    x[1, 1, 1] = -torch.inf
    lengths = torch.tensor([[6, 3, 1], [2, 5, 6]])[..., None] if ends else None
    whole = Chain(x, bulk, p0, lengths, False, F64)
    kept, expected = plain_forward(whole, leave=True)
    assert kept.redone.any() and kept.log_norm[1, 1] == -torch.inf
    head = replace(whole, x=x[:2], bulk=bulk[:1], ends=lengths.clamp(max=2) if ends else None)
    tail = replace(whole, x=x[2:], bulk=bulk[-4:], ends=(lengths - 2).clamp(min=0) if ends else None)
    entering = FORWARD[first](head, leave=True)[1]
    after, leaving = FORWARD[second](tail, entering, leave=True)
    torch.testing.assert_close(after.log_norm, kept.log_norm, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(leaving.scale.sum(0), expected.scale.sum(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(leaving.values.exp(), expected.values.exp(), rtol=1e-12, atol=1e-12)
