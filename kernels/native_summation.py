"""`kernels.summation` term by term, for loops that numba compiles."""

import numpy as np

from .native import inlined


@inlined
def added(total, lost, term):
    """A sum, and what its roundings lost, with another term (D. E. Knuth's two-sum)."""
    found = total + term
    part = found - total
    rounded = (total - (found - part)) + (term - part)
    # infinity less infinity is no rounding
    return found, lost + rounded if np.isfinite(found) else lost
