/* Numbers with an exponent of their own, vectors of them: m 2^e with a real m, 1 at least and below 2, and a whole e.

       exp(x) = exp(x - k log 2) 2^k                      k = rint(x log2 e)
       sum of m_d 2^e_d = (sum of m_d 2^(e_d - e)) 2^e    e = max e_d

   Exponents count from the largest of a message or of a matrix, or from one that is near it; what is taken out of them
   is added to an int64. Where DEPTH bits are not enough a number is lost: it becomes 0, and the caller is told. 0 is
   m = 0 with e = NOTHING, so far below that sums of three exponents, 0 or not, neither overflow nor meet. */
#pragma once
#include "vector.h"

/* float32: DEPTH is 46 million nats. float64: exponents of 4 million steps of DEPTH each fit into an int64. A product
   with log2 e is rounded by less than 1/16 up to NEAR. */
#if BITS == 32
enum { DEPTH = 1 << 26, NOTHING = -(1 << 29), NEAR = 1 << 20 };
#else
#define DEPTH ((int64_t)1 << 40)
#define NOTHING (-((int64_t)1 << 60))
#define NEAR DEPTH
#endif
#define LN2 ((real)0.69314718055994531)

typedef struct { reals m; wholes e; } Split;

INLINE wholes load_whole(const whole *from) { wholes a; __builtin_memcpy(&a, from, sizeof a); return a; }
INLINE void store_whole(whole *to, wholes a) { __builtin_memcpy(to, &a, sizeof a); }
INLINE wholes splat_whole(whole a) { return a - (wholes){0}; }
INLINE int64_t whole_vectors(int64_t c) { return (c + LANES - 1) / LANES * LANES; }

INLINE Split load_split(const real *m, const whole *e) { return (Split){load(m), load_whole(e)}; }
INLINE void store_split(real *m, whole *e, Split a) { store(m, a.m), store_whole(e, a.e); }

/* Copies `left` numbers, fewer than LANES, in parts whose sizes a compiler knows. */
INLINE void copy_some(void *to, const void *from, int64_t left) {
    UNROLL for (int64_t part = LANES / 2 * (int64_t)sizeof(real); part >= (int64_t)sizeof(real); part /= 2) {
        if (!(left * (int64_t)sizeof(real) & part)) continue;
        __builtin_memcpy(to, from, (unsigned long)part);
        to = (char *)to + part, from = (const char *)from + part;
    }
}

/* The next entries of a row, `step` apart, of which `left` remain; further lanes are `fill`. */
INLINE reals read_some(const real *from, int64_t step, int64_t left, real fill) {
    if (step == 1 && left >= LANES) return load(from);
    real some[LANES];
    store(some, splat(fill));
    if (step == 1) copy_some(some, from, left);
    else for (int l = 0; l < LANES && l < left; l++) some[l] = from[l * step];
    return load(some);
}
INLINE wholes read_some_whole(const whole *from, int64_t left, whole fill) {
    if (left >= LANES) return load_whole(from);
    whole some[LANES];
    store_whole(some, splat_whole(fill));
    copy_some(some, from, left);
    return load_whole(some);
}
/* Stores the first `left` lanes. */
INLINE void write_some(real *to, reals a, int64_t left) {
    if (left >= LANES) store(to, a);
    else copy_some(to, &a, left);
}
INLINE void write_some_whole(whole *to, wholes a, int64_t left) {
    if (left >= LANES) store_whole(to, a);
    else copy_some(to, &a, left);
}

/* 2^(e - top) for e up to top + BIAS; 0 where that is not a normal number. */
INLINE reals power_beside(wholes e, wholes top) {
    return (reals)((naturals)larger_whole(e - (top - BIAS), (wholes){0}) << FRACTION);
}
INLINE reals power(wholes e) { return power_beside(e, (wholes){0}); }

/* m 2^e for any e, as near as a double comes. */
INLINE double value_of_split(double m, int64_t e) {
    e = e < -3000 ? -3000 : e > 3000 ? 3000 : e;
    for (int k = 4; k > 0; k--) {
        int64_t part = e / k, bits = (part + 1023) << 52;
        double factor;
        __builtin_memcpy(&factor, &bits, 8);
        m *= factor, e -= part;
    }
    return m;
}

/* m 2^e with m brought to 1 at least and below 2. `lost`: lanes where it is no 0, but becomes one. */
INLINE Split settled_split(reals m, wholes e, wholes *lost) {
    wholes bits = (wholes)m;
    e += (wholes)((naturals)bits >> FRACTION) - BIAS;
    wholes some = e > (whole)-DEPTH, settled = (bits & (((whole)1 << FRACTION) - 1)) | bits_of(1);
    *lost |= (m > 0) & ~some;
    return (Split){(reals)(some & settled), where_whole(some, e, splat_whole(NOTHING))};
}

/* The sum, with a mantissa up to the sum of both. */
INLINE Split plus_split(Split a, Split b) {
    wholes e = larger_whole(a.e, b.e);
    return (Split){a.m * power_beside(a.e, e) + b.m * power_beside(b.e, e), e};
}

/* x - k log 2 for an integer k that is near x / log 2. Fused, the first difference is exact; if products are rounded,
   those with parts of few digits are exact up to k = 2^16, or 2^21 in float64. */
INLINE reals less_doublings(reals x, reals k) {
#if BITS == 64
    return (x - k * LN2_HIGH) - k * LN2_LOW;
#elif defined(__FMA__) || defined(__aarch64__)
    return (x - k * 0x1.62e43p-1f) + k * 0x1.05c61p-29f;
#else
    return ((x - k * 0x1.62p-1f) - k * 0x1.c8p-10f) - k * 0x1.7f7d1cp-20f;
#endif
}

/* exp(x) with a mantissa between the roots of 1/2 and of 2. `far`: x may be beyond NEAR log 2, up to 2 DEPTH log 2. */
INLINE Split exponential_split(reals x, int far) {
    wholes e = {0};
    if (far && NEAR < DEPTH) { /* a multiple of log 2 that may be a few off */
        reals first = __builtin_elementwise_rint(x * LOG2_E);
        x = less_doublings(x, first);
        e = __builtin_convertvector(larger(first, splat(-4 * (real)DEPTH)), wholes);
    }
    reals rounded = x * LOG2_E + ROUNDER, k = rounded - ROUNDER;
    return (Split){near_exponential(less_doublings(x, k)), e + ((wholes)rounded - bits_of(ROUNDER))};
}

/* A weight of 0 at least and below infinity: its digits, and its exponent. */
INLINE Split weight_split(reals a) {
    wholes denormal = a < power_of_two(1 - BIAS);
    wholes bits = (wholes)where(denormal, a * power_of_two(FRACTION + 1), a);
    wholes e = (bits >> FRACTION) - BIAS - (denormal & (whole)(FRACTION + 1)), some = a > 0;
    wholes m = some & ((bits & (((whole)1 << FRACTION) - 1)) | bits_of(1));
    return (Split){(reals)m, where_whole(some, e, splat_whole(NOTHING))};
}

/* What entries span that stand for weights: the largest, the least that is not weight 0, and whether some are no
   weights: NaN, infinite, or negative if they are no logarithms. */
typedef struct { real largest, least; int bad; } Span;

INLINE Span no_span(int logarithms) { return (Span){logarithms ? -INFINITE : 0, INFINITE, 0}; }

/* Whether c contiguous logarithms are all finite. If so, their extent is added. */
INLINE int extend_by_finite(Span *to, int64_t c, const real *from) {
    reals top[2], low[2], zero[2] = {{0}};
    int64_t j = 0;
    top[0] = top[1] = splat(to->largest), low[0] = low[1] = splat(to->least);
    for (; j + 2 * LANES <= c; j += 2 * LANES)
        UNROLL for (int k = 0; k < 2; k++) {
            reals a = load(from + j + k * LANES);
            top[k] = larger(a, top[k]), low[k] = smaller(a, low[k]), zero[k] += a * 0;
        }
    for (; j < c; j += LANES) {
        reals a = read_some(from + j, 1, c - j, from[0]);
        top[0] = larger(a, top[0]), low[0] = smaller(a, low[0]), zero[0] += a * 0;
    }
    if (total(zero[0] + zero[1]) != 0) return 0; /* NaN: 0 times infinity, or NaN */
    to->largest = largest(larger(top[0], top[1])), to->least = least(smaller(low[0], low[1]));
    return 1;
}

static void extend(Span *to, int64_t c, const real *from, int64_t step, int logarithms) {
    if (logarithms && step == 1 && extend_by_finite(to, c, from)) return;
    real zero = logarithms ? -INFINITE : 0;
    reals top = splat(to->largest), low = splat(to->least);
    wholes good = ~(wholes){0};
    for (int64_t j = 0; j < c; j += LANES) {
        reals a = read_some(from + j * step, step, c - j, zero);
        good &= (a >= zero) & (a < INFINITE);
        top = larger(top, a), low = smaller(low, where(a > zero, a, splat(INFINITE)));
    }
    to->largest = largest(top), to->least = least(low), to->bad |= any(~good);
}

/* What is taken out of all entries: exp(shift) 2^exponent, so that the largest has the exponent 0. `lowest`: what is
   below it is lost. `range`: by how much the least exponent is lower. A row of logarithms that are not huge has no
   shift, so that a number far below the largest is as exact as that. */
typedef struct { real shift, lowest; whole exponent; int logarithms, far, lost; int64_t range; } Level;

INLINE whole exponent_at(real a, const Level *level) {
    Split split = level->logarithms ? exponential_split(splat(a - level->shift), level->far) : weight_split(splat(a));
    return split.e[0];
}

static Level level_of(Span extent, int logarithms) {
    const real most = NEAR / 2 * LN2;
    Level level = {.logarithms = logarithms};
    if (extent.bad || extent.least == INFINITE) return level;
    if (logarithms) {
        int huge = extent.largest > most || extent.largest < -most;
        level.shift = huge ? extent.largest : 0;
        level.lowest = extent.largest - level.shift - DEPTH * LN2;
        level.far = extent.least - level.shift < -NEAR * LN2;
        level.lost = extent.least - level.shift < level.lowest;
    }
    level.exponent = exponent_at(extent.largest, &level);
    level.range = level.lost ? DEPTH : level.exponent - exponent_at(extent.least, &level);
    return level;
}

INLINE void split_logarithms(int64_t c, const real *from, int64_t step, const Level *level, int far, real *m,
                             whole *e) {
    for (int64_t j = 0; j < c; j += LANES) {
        reals x = read_some(from + j * step, step, c - j, -INFINITE) - level->shift;
        wholes some = (x >= level->lowest) & (x > -INFINITE);
        Split a = exponential_split(x, far);
        a = (Split){(reals)(some & (wholes)a.m), where_whole(some, a.e - level->exponent, splat_whole(NOTHING))};
        store_split(m + j, e + j, a);
    }
}

/* Splits the c entries of a row, with zeros up to a whole vector. */
static void split_row(int64_t c, const real *from, int64_t step, const Level *level, real *m, whole *e) {
    if (level->logarithms && level->far) split_logarithms(c, from, step, level, 1, m, e);
    else if (level->logarithms) split_logarithms(c, from, step, level, 0, m, e);
    else
        for (int64_t j = 0; j < c; j += LANES) {
            Split a = weight_split(read_some(from + j * step, step, c - j, 0));
            a.e = where_whole(a.e > (whole)NOTHING, a.e - level->exponent, a.e);
            store_split(m + j, e + j, a);
        }
}
