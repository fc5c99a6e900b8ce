"""Numbers that differ from step to step, so that a chain of equal steps is not rounded equally in each of them.

Where x and the matrix are the same in every step, the message comes to rest, and from then on each step makes the same
rounding error: v of them add up to v times one, not to its sqrt(v)-fold. So what is taken out of a step differs a
little, and so do the bits of what is left. It costs nothing, for it goes into a shift that is subtracted anyway and
whose exact value is added up anyway.

The numbers are multiples of the golden ratio less their integer part (H. Weyl's sequence), in integer arithmetic, the
same on every device. They fill an interval more evenly than random ones. Of one state nothing is rounded, and its
numbers are 0.
"""

import math
from typing import Any

# the golden ratio's fractional part times 2^32 (D. E. Knuth's multiplicative hashing)
GOLDEN = 2654435769

# how far a shift is moved at most
WIDTH, OCTAVE = 2.0**-6, math.log(2)

# for how many steps what all of them share is rounded once
ROUNDED_ANEW = 128


def phase(step: Any) -> Any:
    """A number in [0, 1) for a step: an integer (also in numba's loops), or int64 arrays and tensors of them."""
    return ((step * GOLDEN) & 0xFFFFFFFF) * 2.0**-32


def moved(block: Any) -> Any:
    """What to add to the bits of a float64 before it is cut off to a float32: between 0 and 2^29, the last one's place.

    With it a number that is rounded anew for every block of steps is the float64, on an average over blocks. The first
    one is rounded to nearest.
    """
    return ((block * GOLDEN + 2**31) & 0xFFFFFFFF) >> 3


def jitter(step: Any, c: int) -> Any:
    """What to add to the shift of a step: in [0, 2^-6), many roundings wide, and of no weight for what underflows."""
    return phase(step) * (WIDTH if c > 1 else 0.0)


def octave(number: Any, c: int) -> Any:
    """The same in [0, log 2), for exponentials and sums that are wrong alike over a part of an octave."""
    return phase(number) * (OCTAVE if c > 1 else 0.0)
