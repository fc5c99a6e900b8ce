/* The scale 2^TOP of messages, the least emission 2^-DEEPEST, and exponentials raised to that: see step.h. */
#pragma once
#include "doubles.h"

#if BITS == 32 || defined(FLOAT32_OPERANDS)
enum { TOP = 100, DEEPEST = 108, GUARD = 26 };
#else
enum { TOP = 900, DEEPEST = 960, GUARD = 55 };
#endif

/* Sums above TRUSTED times the largest matrix entry do not change by raised emissions. */
#define TRUSTED power_of_two(TOP - DEEPEST + GUARD)

/* A sum above SHALLOW times any emission is a normal number. */
#define SHALLOW power_of_two(DEEPEST + 1 - BIAS)
#define LOG_DEEPEST ((real)(-DEEPEST * 0.69314718055994531))

/* Whether the largest entry of a matrix is so far from 1 that sums may overflow or underflow. */
INLINE int is_far_from_one(real high) {
    return high > 0 && high < INFINITE && !(high >= (real)0x1p-16 && high <= (real)0x1p12);
}

/* The least sum that raised emissions do not change. */
INLINE real least_unchanged(real high) { return TRUSTED * high > SHALLOW ? TRUSTED * high : SHALLOW; }

/* Sources w T / sum S B of counts.h are scaled by 2^(TOP - HALF), so that their products with S do not overflow: these
   are at most 2^SPARE over the least entry of P on a path. Sources below 2^-FADED would be denormal, and become 0. */
#if BITS == 32
enum { SPARE = 30, FADED = 54 };
#else
enum { SPARE = 64, FADED = 180 };
#endif
enum { HALF = TOP - SPARE };
#define UNSHARE power_of_two(-SPARE)

/* The k of a largest sum in [1/2, 1) 2^k, from its bits; TOP for 0, denormal numbers, infinity and NaN. */
INLINE int64_t exponent_of(whole bits) {
    whole exponent = bits >> FRACTION;
    return exponent > 0 && exponent < 2 * BIAS + 1 ? exponent - (BIAS - 1) : TOP;
}

/* A power of two times which a row's largest weight is near 1. */
INLINE real factor_to_one(real top) {
    if (!(top < INFINITE)) return 1;
    return power_of_two(top < power_of_two(1 - BIAS) ? BIAS - 1 : 2 - exponent_of(bits_of(top)));
}

#define NO_TAIL splat((real)-0.0) /* adding it changes nothing, not even a -0 */

/* exp(a + tail) raised to at least 2^-DEEPEST; 0 where a is -inf. `tail`: the rounding error of a. */
INLINE reals exponential(reals a, reals tail) {
    reals b = where(a < LOG_DEEPEST, splat(LOG_DEEPEST), a), rounded = b * LOG2_E + ROUNDER, k = rounded - ROUNDER;
    reals r = (b - k * LN2_HIGH) - k * LN2_LOW + tail;
    reals power = (reals)(((wholes)rounded << FRACTION) + bits_of(1)); /* NaN * power is NaN */
    return (reals)((wholes)(near_exponential(r) * power) & (a != -INFINITE));
}

/* Natural logarithms of a row of sums times 2^exponent e^taken, plus x unless it is null. */
INLINE void write_logarithms(int64_t c, const real *row, Sum taken, int64_t exponent, const real *x, real *out) {
    add_exponent(&taken, exponent + TOP);
    doubles scale = splat_wide(taken.sum), rest = splat_wide(taken.error == taken.error ? taken.error : 0);
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles emission = x ? read_wide(x + j, 1, c - j, 0) : splat_wide(0);
        doubles sum = scale + emission; /* either may be large, and their sum small */
        doubles logs = logarithm_of(read_wide(row + j, 1, c - j, 0), TOP);
        write_wide(out + j, sum + (logs + rounding_errors(scale, emission, sum) + rest), c - j);
    }
}
