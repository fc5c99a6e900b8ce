/* Split numbers, vectors of them: m 2^e with a mantissa m and a whole exponent e, both `real`.

       a b = (m_a m_b) 2^(e_a + e_b)        sum of a_t = (sum of m_t 2^(e_t - e)) 2^e,  e = max e_t
       exp(x) = exp(x - k log 2) 2^k,       k = rint(x log2 e)

   A number is settled if 1 <= m < 2. Zero has e = -inf and any finite m: 2^(-inf - e) is an exact 0, so that no
   operation needs a mask for it. Exponents are exact up to EXACT; beyond, they round as a logarithm of that size would.
   Hence nothing overflows or underflows. */
#pragma once
#include "chain.h"

typedef struct { reals m, e; } Split;
typedef struct { real *m, *e; } Row; /* split numbers, whole vectors */

/* Sums of products with linear weights between 2^-SMALL and 2^LARGE are exact where they are 1 at least, if the largest
   term of a row is near 2^HIGHEST. Sums are multiplied by 2^LIFT, and what they are counted with by 2^COUNT_LIFT: the
   count of a tiny weight, by which it is divided in the end, is then a normal number. */
#if BITS == 32
#define NEAR ((real)(1 << 18)) /* rounding x log2 e errs by less than 1/20 for |x| below it */
#define EXACT 0x1p24f
#define HUGE 0x1p100f
enum { LIFT = 60, COUNT_LIFT = 30, HIGHEST = 100, SMALL = 100, LARGE = 4 };
#else
#define NEAR ((real)(1 << 20))
#define EXACT 0x1p53
#define HUGE 0x1p900
enum { LIFT = 500, COUNT_LIFT = 400, HIGHEST = 900, SMALL = 1000, LARGE = 64 };
#endif
#define LN2 0.69314718055994531

INLINE int64_t whole_vectors(int64_t c) { return (c + LANES - 1) / LANES * LANES; }
INLINE Row row_from(Row row, int64_t j) { return (Row){row.m + j, row.e + j}; }
INLINE Split load_split(Row row, int64_t j) { return (Split){load(row.m + j), load(row.e + j)}; }
INLINE void store_split(Row row, int64_t j, Split a) { store(row.m + j, a.m), store(row.e + j, a.e); }
INLINE Split zero_split(void) { return (Split){splat(1), splat(-INFINITE)}; }
static void clear_row(int64_t width, Row row) {
    for (int64_t j = 0; j < width; j += LANES) store_split(row, j, zero_split());
}

/* Lanes that are no weights: NaN, or below 0 without being logarithms. */
INLINE wholes is_no_weight(reals a, int logarithms) { return ~(a >= (logarithms ? -INFINITE : 0)); }

/* 2^e for a whole e up to BIAS; 0 where that is not a normal number, or e is NaN: the difference of two zeros' e. */
INLINE reals power(reals e) {
    e = where(e > -BIAS, e, splat(-BIAS)) + (ROUNDER + BIAS);
    return (reals)((naturals)e << FRACTION);
}

/* The same for an e that is BIAS at most but for rounding beyond EXACT. */
INLINE reals bounded_power(reals e) { return power(smaller(e, splat(BIAS))); }

/* m 2^e for any whole e, by two factors: as near as `real` comes. */
INLINE reals value_of_split(Split a) {
    reals e = smaller(larger(a.e, splat(-2 * BIAS)), splat(2 * BIAS)), half = __builtin_elementwise_rint(e * (real)0.5);
    return a.m * power(half) * power(e - half);
}

/* A number of mantissa 1 at least and below 2; m is a normal number, or anything of a zero. */
INLINE Split settled(reals m, reals e) {
    wholes bits = (wholes)m;
    reals more = (reals)((wholes)((naturals)bits >> FRACTION) | bits_of(ROUNDER)) - (ROUNDER + BIAS);
    return (Split){(reals)((bits & (((whole)1 << FRACTION) - 1)) | bits_of(1)), e + more};
}

/* x - k log 2 for a whole k near x / log 2. Fused, the first difference is exact; otherwise it is up to k = 2^16. */
INLINE reals less_doublings(reals x, reals k) {
#if BITS == 64
    return (x - k * LN2_HIGH) - k * LN2_LOW;
#elif defined(__FMA__) || defined(__aarch64__)
    return (x - k * 0x1.62e43p-1f) + k * 0x1.05c61p-29f;
#else
    return ((x - k * 0x1.62p-1f) - k * 0x1.c8p-10f) - k * 0x1.7f7d1cp-20f;
#endif
}

INLINE wholes is_far(reals x) { return (x >= NEAR) | ((x <= -NEAR) & (x > -INFINITE)); }

/* exp(x) for x below infinity, not settled. `far`: some x is beyond NEAR. */
INLINE Split exponential_split(reals x, const int far) {
    wholes some = x > -INFINITE;
    reals e = {0};
    if (far) { /* first a multiple of log 2, which is inexact: so is what it leaves over */
        e = __builtin_elementwise_rint(where(some, x, splat(0)) * LOG2_E), x = less_doublings(x, e);
        x = where(some & is_far(x), splat(0), x);
    }
    reals k = (x * LOG2_E + ROUNDER) - ROUNDER;
    return (Split){(reals)((wholes)near_exponential(less_doublings(x, k)) & some), e + k};
}

/* Weights, or logarithms of weights, settled. An infinite one has a finite exponent beyond all others. */
INLINE Split weight_split(reals a, int logarithms) {
    Split b;
    if (logarithms) {
        b = any(is_far(a)) ? exponential_split(a, 1) : exponential_split(a, 0);
        b = settled(b.m, b.e);
    } else {
        wholes denormal = a < power_of_two(1 - BIAS);
        b = settled(where(denormal, a * power_of_two(FRACTION + 1), a), splat(0));
        b.e -= where(denormal, splat(FRACTION + 1), splat(0));
        b.e = where(a > 0, b.e, splat(-INFINITE));
    }
    wholes infinite = a == INFINITE;
    return (Split){where(infinite, splat(1), b.m), where(infinite, splat(HUGE), b.e)};
}

INLINE Split plus_split(Split a, Split b) {
    reals e = larger(a.e, b.e);
    return (Split){a.m * power(a.e - e) + b.m * power(b.e - e), e};
}

/* The largest exponent of a row; 0 if all numbers are 0. */
INLINE real top_of_row(int64_t width, Row row) {
    reals top = splat(-INFINITE);
    for (int64_t j = 0; j < width; j += LANES) top = larger(load(row.e + j), top);
    real high = largest(top);
    return high > -INFINITE ? high : 0;
}

/* The sum of a row over 2^top, its largest exponent. */
INLINE double sum_of_split_row(int64_t width, Row row, real top) {
    reals sum = {0};
    for (int64_t j = 0; j < width; j += LANES) sum += load(row.m + j) * power(load(row.e + j) - top);
    return (double)total(sum);
}

/* A row relative to the exponent that is returned: its largest number, of exponent `top`, is near 2^HIGHEST. */
INLINE real align(int64_t width, Row row, real top, real *to) {
    for (int64_t j = 0; j < width; j += LANES)
        store(to + j, load(row.m + j) * power(load(row.e + j) - (top - HIGHEST)));
    return top - HIGHEST;
}

/* Whether sums of an aligned row are right: see SMALL. */
INLINE int is_right(reals sum) { return !any(~(sum >= 1)); }

/* 2^e of numbers m 2^e, by their bits. */
INLINE reals power_in(reals a) { return (reals)((wholes)a & bits_of(INFINITE)); }

/* Adds k log 2 for a whole k. */
INLINE void add_powers(Sum *to, double k) {
    if (k < 0x1p52 && k > -0x1p52) add_exponent(to, (int64_t)k);
    else add(to, k * LN2);
}
