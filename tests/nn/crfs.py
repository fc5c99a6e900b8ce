"""Linear-chain conditional random fields that the tests of the layer share, with emissions, tags and masks."""

import torch

from logchain.nn import LinearChainCRF
from tests.seeded import seeded

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
REDUCTIONS = ["none", "sum", "mean", "token_mean"]
# masks that leave the same variables wherever they stand, and none
HOLES = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool
)


def layer(num_tags=4, dtype=F64, batch_first=True, size=1.0, seed=0, strict_mask=False):
    crf = LinearChainCRF(num_tags, batch_first=batch_first, strict_mask=strict_mask).to(dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=seeded(seed), dtype=F64))
            seed += 1
    return crf


def batch(n=5, v=7, c=4, dtype=F64, seed=8):
    """Emissions, tags, and a mask whose sequences have v, 1, v - 2, v - 3, ... variables, at least one."""
    emissions = (2 * torch.randn(n, v, c, generator=seeded(seed), dtype=F64)).to(dtype)
    tags = torch.randint(c, (n, v), generator=seeded(seed))
    lengths = (v - torch.arange(n)).clamp(min=1)
    lengths[1:2] = 1
    return emissions, tags, torch.arange(v) < lengths[:, None]


def turned(crf, *tensors):
    """Tensors (n, v, ...) in the layer's layout."""
    return [tensor if crf.batch_first or tensor is None else tensor.transpose(0, 1) for tensor in tensors]


def gradients(crf, emissions, out):
    return torch.autograd.grad(out.sum(), [emissions, *crf.parameters()])
