"""Products of float32 matrices as tensor cores compute them, which see ten fraction bits of a number.

How Hopper sums is the model of Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004.
"""

import numpy as np

# the number of terms that are summed at once
_GROUP = 8
# the last bit of an addend, relative to the power of two of the largest one: two bits beyond float32's
_LAST_BIT = 2.0**-25
# masks of a float64: its exponent, and the bits that a float32 has too
_EXPONENT, _FLOAT32 = 0x7FF << 52, -1 << 29


@np.errstate(invalid="ignore", over="ignore")
def tf32(a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Returns `sums + a @ b`: addends are cut to the grid of the largest in their group, and their sum to float32.

    In float64, where products of TF32 and sums of a group are exact. Infinities and NaN pass as IEEE has them.

    >>> def gain(count, bits):  # of 1 by so many terms, in its last bit
    ...     terms = np.full((1, 8), 2.0**-bits), np.arange(8)[:, None] < count
    ...     return (tf32(*terms, np.ones((1, 1))).item() - 1) / 2**-23
    >>> gain(8, 25), gain(3, 25), gain(8, 26)
    (2.0, 0.0, 0.0)
    """
    rows = np.moveaxis(_truncated(a), -1, 0)[..., None]  # (k, ..., m, 1)
    columns = np.moveaxis(_truncated(b), -2, 0)[..., None, :]  # (k, ..., 1, n)
    addends, cut = np.empty((2, _GROUP + 1, *sums.shape))
    addends[_GROUP] = sums
    for first in range(0, len(rows), _GROUP):
        group = slice(first, first + _GROUP)
        if not (rows[group].any() or columns[group].any()):
            continue
        np.multiply(rows[group], columns[group], out=addends[:_GROUP])
        largest = np.abs(addends, out=cut).max(0)
        # no finer than the grid of denormal float32, and finite
        grid = np.clip((largest.view(np.int64) & _EXPONENT).view(np.float64) * _LAST_BIT, 2.0**-149, 2.0**900)
        whole = np.trunc(np.divide(addends, grid, out=cut), out=cut).sum(0)
        np.multiply((whole.view(np.int64) & _FLOAT32).view(np.float64), grid, out=addends[_GROUP])
    return addends[_GROUP].astype(np.float32)


def _truncated(x: np.ndarray) -> np.ndarray:
    """What a tensor core sees of a float32: the low 13 bits are ignored."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)
