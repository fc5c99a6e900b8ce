/* The scale of sums and what emissions are beside it: step.h says why. */
#pragma once
#include "vector.h"

#if BITS == 32
enum { TOP = 100, DEEPEST = 108, GUARD = 26 };
#else
enum { TOP = 900, DEEPEST = 960, GUARD = 55 };
#endif

/* Sums above it, times the matrix's largest entry, are not touched by what was raised. */
#define TRUSTED power_of_two(TOP - DEEPEST + GUARD)

/* Sums above it are still normal numbers after an emission. */
#define SHALLOW power_of_two(DEEPEST + 1 - BIAS)
#define LOG_DEEPEST ((real)(-DEEPEST * 0.69314718055994531))

/* A source w T / sum S B is multiplied by 2^(TOP - HALF), so that its products with S are within the format: they are
   at most 2^SPARE over the least entry of P that a path may take. Those below 2^-FADED would be denormal, and are 0. */
#if BITS == 32
enum { SPARE = 30, FADED = 54 };
#else
enum { SPARE = 64, FADED = 180 };
#endif
enum { HALF = TOP - SPARE };
#define UNSHARE power_of_two(-SPARE)

/* The exponent k of which the largest sum, of these bits, is in [1/2, 1) 2^k; TOP where there is none. */
INLINE int64_t exponent_of(whole bits) {
    whole exponent = bits >> FRACTION;
    return exponent > 0 && exponent < 2 * BIAS + 1 ? exponent - (BIAS - 1) : TOP;
}

#define NO_REST all((real)-0.0) /* what is added is nothing, not even of a -0 */

/* exp(a + rest), at least 2^-DEEPEST, and 0 for a of -inf. */
INLINE reals exponential(reals a, reals rest) {
    reals b = where(a < LOG_DEEPEST, all(LOG_DEEPEST), a), rounded = b * LOG2_E + ROUNDER, k = rounded - ROUNDER;
    reals r = (b - k * LN2_HIGH) - k * LN2_LOW + rest;
    reals power = (reals)(((wholes)rounded << FRACTION) + bits_of(1)); /* a NaN stays one by being multiplied */
    return (reals)((wholes)(near_exponential(r) * power) & (a != -INFINITE));
}
