"""`kernels.dither` in loops that numba compiles."""

import numpy as np

from . import dither
from .native import called, inlined
from .native_exp import bits, from_bits

_phase, _moved = called(dither.phase), called(dither.moved)
_WIDTH, _OCTAVE = dither.WIDTH, dither.OCTAVE

# the last 29 bits are what a float64 has and a float32 has not
_CUT = -(2**29)


@inlined
def jitter(step, c):
    """See `kernels.dither`."""
    return _phase(step) * _WIDTH if c > 1 else 0.0


@inlined
def octave(number, c):
    """See `kernels.dither`."""
    return _phase(number) * _OCTAVE if c > 1 else 0.0


@called
def round_anew(exact, block, flush, out):
    """`out` float32 = `exact` float64, rounded as a block of steps has it; 0 where that is below `flush`."""
    more = np.int64(_moved(block))
    for e in range(len(out)):
        found = from_bits((bits(exact[e]) + more) & np.int64(_CUT))
        out[e] = 0.0 if found < flush else found
