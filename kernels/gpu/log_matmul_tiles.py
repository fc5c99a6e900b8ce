"""The tiles of the log-semiring matrix product, for each chip and shape of the result.

From a model of issue slots and tensor core rates on sm_90, among tiles that compile without spilled registers and fit
into shared memory; not measured yet.
"""

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """The sizes of a program's tiles, its warps and its pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# by chip and by the shape of the result: at most 16 x 16 (`tiny`) or 32 x 32 (`small`), at most 16 rows (`wide`) or
# columns (`tall`), at most 64 (`medium`; `short` where k is too), at most 128 columns (`middle`), more (`large`); `odd`
# where loads are not of four entries, so that every entry needs an address
TILES = {
    "sm_80": {
        "tiny": Tiles(16, 16, 16, 1, 2),
        "small": Tiles(32, 32, 32, 4, 2),
        "wide": Tiles(16, 64, 32, 4, 3),
        "tall": Tiles(64, 16, 32, 4, 3),
        "odd": Tiles(64, 64, 16, 4, 2),
        "short": Tiles(64, 64, 64, 8, 1),
        "medium": Tiles(64, 64, 32, 4, 3),
        "middle": Tiles(64, 128, 32, 8, 3),
        "large": Tiles(64, 128, 32, 8, 3),
        "tiny double": Tiles(16, 16, 16, 1, 2),
        "double": Tiles(32, 32, 16, 4, 2),
    },
    "sm_90": {
        "tiny": Tiles(16, 16, 16, 1, 2),
        "small": Tiles(32, 32, 32, 4, 2),
        "wide": Tiles(16, 64, 32, 4, 3),
        "tall": Tiles(64, 16, 32, 4, 3),
        "odd": Tiles(64, 64, 16, 4, 2),
        "short": Tiles(64, 64, 64, 4, 1),
        "medium": Tiles(64, 64, 32, 4, 3),
        "middle": Tiles(64, 128, 32, 4, 2),
        "large": Tiles(128, 128, 32, 8, 2),
        "tiny double": Tiles(16, 16, 16, 1, 2),
        "double": Tiles(32, 32, 16, 4, 2),
    },
    "gfx942": {
        "tiny": Tiles(16, 16, 16, 1, 2),
        "small": Tiles(32, 32, 32, 4, 2),
        "wide": Tiles(16, 64, 32, 4, 2),
        "tall": Tiles(64, 16, 32, 4, 2),
        "odd": Tiles(64, 64, 16, 4, 2),
        "short": Tiles(64, 64, 64, 4, 1),
        "medium": Tiles(64, 64, 32, 4, 2),
        "middle": Tiles(64, 128, 32, 8, 2),
        "large": Tiles(128, 128, 32, 8, 2),
        "tiny double": Tiles(16, 16, 16, 1, 2),
        "double": Tiles(32, 32, 16, 4, 2),
    },
}


def tiles(m: int, n: int, k: int, dtype: torch.dtype, chip: str, *, aligned: bool) -> Tiles:
    """The tiles for results (m, n) of sums of k terms, not much larger than needed.

    `aligned`: all loads are of four entries.
    """
    few, many = sorted((m, n))
    if dtype == torch.float64:
        shape = "tiny double" if many <= 16 else "double"
    elif many <= 32:
        shape = "tiny" if many <= 16 else "small"
    elif few <= 16:
        shape = "tall" if m > n else "wide"
    elif not aligned:
        shape = "odd"
    elif few <= 64:
        shape = "short" if k <= 64 else "medium"
    else:
        shape = "middle" if n <= 128 else "large"
    return TILES[chip][shape]
