"""Few sequences, of many kinds, to be cut into segments."""

import math

import torch


def drawn(kind: str, seed: int, *, each: bool, log_params: bool, lengths: bool, dtype: torch.dtype):
    """Operands of a few sequences, with sets of their own and members of sets, and their lengths or None."""
    generator = torch.Generator().manual_seed(seed)
    g, m, v = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 3), (1, 4), (30, 90)))
    c = (1, 2, 3, 5, 8, 15, 16, 17, 33)[seed]
    x = torch.randn(g, m, v, c, generator=generator, dtype=dtype)
    bulk = torch.rand(g, 1, v - 1 if each else 1, c, c, generator=generator, dtype=dtype)
    p0 = torch.rand(g, m, c, generator=generator, dtype=dtype)
    if kind == "ties":
        x, bulk = (2 * x).round(), (3 * bulk).round() + 1
    if kind == "sparse":
        bulk *= torch.rand(bulk.shape, generator=generator) < 0.5
    if kind == "sticky":
        x, bulk = 0.01 * x, 0.001 * bulk + torch.eye(c, dtype=dtype)
    if kind == "peaked":
        x = 30 * x
    if kind == "impossible":
        x[0, 0, v // 2] = -math.inf
    if kind == "never":
        x[-1, 0, -1] = -math.inf
    if kind == "unknown":
        x[-1, -1, 2 * v // 3, 0] = math.nan
    if kind == "left-to-right":
        bulk = bulk.triu()
    if kind == "permutation":
        bulk = (0 * bulk + torch.eye(c, dtype=dtype)).roll(1, -1)
    ends = torch.randint(1, v + 1, (g, m), generator=generator) if lengths else None
    return x, bulk.log() if log_params else bulk, p0.log() if log_params else p0, ends
