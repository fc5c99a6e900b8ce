/* One step of a row: sums U become the next scaled message S, and the test whether underflow can have removed a path.

       U_i = S_{i-1} P_i      S_i = U_i E_i 2^(TOP - k)      E_i = exp(x_i - max x_i), and max U_i is in [1/2, 1) 2^k

   E is 0 only where x is -inf; smaller values are raised to 2^-DEEPEST. Hence S is 0 or at least TRUSTED 2^-DEEPEST /
   c, and U is exactly 0 only where no path leads, provided that no product S P underflows. A raised emission adds at
   most 2^(TOP - DEEPEST) max P to a sum, which does not change sums above TRUSTED max P. A row is flagged, and its
   sequence is recomputed exactly by exact.h, if it has a positive sum below that limit, or a sum of 0 while the matrix
   has a positive entry below least_safe_entry(). */
#pragma once
#include "chain.h"
#include "flush.h"
#include "product.h"
#include "scale.h"

/* The least matrix entry whose product with any S is not 0; larger where the caller's mode flushes denormal numbers. */
INLINE real least_safe_entry(void) {
    int denormal_bits = mode_now() & ANY_FLUSH ? 0 : FRACTION;
    return power_of_two(1 - BIAS - denormal_bits + 2 * DEEPEST - TOP - GUARD + 11);
}

/* exp(x - most) corrected for the rounding of that difference, for matrices of logarithms. */
INLINE reals exponential_of_difference(reals x, real most) {
    reals a = x - most, back = a - x, tail = (x - (a - back)) - (most + back);
    return exponential(a, where(a >= LOG_DEEPEST, tail, (reals){0})); /* raised: no correction */
}

/* 2^k as two factors, for k beyond the range of doubles. */
typedef struct { double first, second; } Factors;
INLINE Factors factors_of(int64_t k) {
    int64_t bits[] = {(k / 2 + 1023) << 52, (k - k / 2 + 1023) << 52};
    Factors factors;
    __builtin_memcpy(&factors, bits, sizeof factors);
    return factors;
}

/* The k of a positive number in [1/2, 1) 2^k; 0 for 0 and infinity. */
INLINE int64_t exponent_above(double a) {
    int64_t exponent;
    mantissa(a, &exponent);
    return a > 0 && a < __builtin_inf() ? exponent + 1 : 0;
}

/* The largest of some entries and `high`, which a NaN is not. */
INLINE real largest_in(int64_t count, const real *from, real high) {
    reals top = splat(high);
    if (count < LANES) return largest(larger(read_some(from, 1, count, high), top));
    for (int64_t k = 0; k < vectors_of(count); k++) top = larger(load(from + start_of(k, count)), top);
    return largest(top);
}

/* A step's matrix (c, width), linear: the caller's is 2^exponent e^shift times it. */
typedef struct {
    const real *entries;
    int64_t row, width, c, exponent;
    double shift;
    int has_high, has_low; /* are known: */
    real high, low;        /* the largest entry, and the least positive one */
    real *copy;            /* (width, width): scratch */
} Matrix;

static void find_high(Matrix *a) {
    if (a->has_high) return;
    a->high = 0, a->has_high = 1;
    for (int64_t k = 0; k < a->c; k++) {
        real high = largest_in(a->width, a->entries + k * a->row, 0);
        a->high = high > a->high ? high : a->high;
    }
}

/* The same, or a little more, from the LARGEST words of entries that a product has seen, unless one has a sign. */
INLINE void note_high(Matrix *a, natural bits) {
    if ((whole)bits >= 0) a->high = real_of((whole)bits), a->has_high = 1;
}

static void find_low(Matrix *a) {
    naturals low = (naturals){0} - 1;
    if (a->has_low) return;
    for (int64_t k = 0; k < a->c; k++)
        for (int64_t b = 0; b < vectors_of(a->width); b++) {
            naturals bits = (naturals)load(a->entries + k * a->row + start_of(b, a->width)) - 1; /* 0 wraps around */
            low = __builtin_elementwise_min(low, bits);
        }
    natural bits = __builtin_reduce_min(low);
    a->low = bits >= (natural)bits_of(INFINITE) ? INFINITE : real_of((whole)bits + 1), a->has_low = 1;
}

/* Whether the largest entry, which is known, is far from 1 in a matrix that has not been divided yet. */
INLINE int needs_rescaling(const Matrix *a) { return is_far_from_one(a->high) && !a->exponent; }

/* Divides a matrix that needs it by a power of two near its largest entry; returns whether it did. */
static int rescale(Matrix *a) {
    find_high(a);
    if (!needs_rescaling(a)) return 0;
    find_low(a);
    int64_t k = exponent_above(a->high);
    Factors scale = factors_of(-k);
    real first = (real)scale.first, second = (real)scale.second, low = a->low * first * second;
    for (int64_t i = 0; i < a->c; i++)
        for (int64_t j = 0; j < a->width; j += LANES) {
            reals entry = read_some(a->entries + i * a->row + j, 1, a->width - j, 0);
            write_some(a->copy + i * a->width + j, entry * first * second, a->width - j);
        }
    a->entries = a->copy, a->row = a->width, a->exponent = k, a->has_high = a->has_low = 0;
    find_high(a), find_low(a);
    if (low == 0) a->low = 0; /* a positive entry has become 0 */
    return 1;
}

/* The matrix into `step`, ready for products: in place where it is linear with contiguous rows, otherwise a copy. */
static void prepare(const Chain *a, int64_t set, int64_t step, Matrix *out) {
    const real *from = matrix_at(&a->bulk, set, step);
    int64_t c = a->states;
    out->exponent = out->has_high = out->has_low = 0, out->shift = 0;
    if (!a->logarithms && out->width == c && (a->bulk.to == 1 || c == 1)) {
        out->entries = from, out->row = a->bulk.from;
        return;
    }
    out->entries = out->copy, out->row = out->width;
    real fill = a->logarithms ? -INFINITE : 0;
    if (out->width == c && a->bulk.from == 1) transpose(c, from, a->bulk.to, out->copy, c);
    else for (int64_t k = 0; k < c; k++)
        read_row(c, out->width, from + k * a->bulk.from, a->bulk.to, fill, out->copy + k * out->width);
    if (!a->logarithms) return;
    real most = -INFINITE;
    for (int64_t k = 0; k < c; k++) most = largest_in(out->width, out->copy + k * out->width, most);
    if (most == -INFINITE) most = 0;
    out->shift = most;
    for (int64_t k = 0; k < c; k++) {
        real *row = out->copy + k * out->width;
        for (int64_t j = 0, left = out->width; left > 0; j += LANES, left -= LANES)
            write_some(row + j, exponential_of_difference(read_some(row + j, 1, left, 0), most), left);
    }
}

/* The largest of a row, or 0 if all are -inf. */
INLINE real top_of(const real *a, int64_t count) {
    real top = largest_in(count, a, -INFINITE);
    return top == -INFINITE ? 0 : top;
}

/* 2^(TOP - k), clamped to the range of `real`: rows beyond are flagged anyway. */
INLINE real scale_to_top(int64_t k) {
    int64_t power = TOP - k;
    return power_of_two(power > BIAS ? BIAS : power < 1 - BIAS ? 1 - BIAS : power);
}

/* T = U E factor of a row into another one, for c potentials x less `top`; whether an emission was raised. */
INLINE wholes emit_vector(reals x, real top, const real *sums, real factor, real *to) {
    reals a = x - top;
    store(to, load(sums) * factor * exponential(a, NO_TAIL));
    return (a < LOG_DEEPEST) & (a > -INFINITE);
}
INLINE int emit(int64_t c, const real *x, real top, const real *sums, real factor, real *to) {
    wholes raised = {0};
    if (c < LANES) return any(emit_vector(read_some(x, 1, c, -INFINITE), top, sums, factor, to));
    for (int64_t k = 0; k < vectors_of(c); k++) {
        int64_t j = start_of(k, c);
        raised |= emit_vector(load(x + j), top, sums + j, factor, to + j);
    }
    return any(raised);
}

/* Bits of the largest of a row of sums, and whether one is below TRUSTED. */
typedef struct { whole most; int small; } Range;
INLINE Range range_of(int64_t width, const real *sums) {
    wholes tall = (wholes)load(sums), small = tall < bits_of(TRUSTED);
    for (int64_t k = 1; k < vectors_of(width); k++) {
        wholes bits = (wholes)load(sums + start_of(k, width));
        tall = __builtin_elementwise_max(tall, bits), small |= bits < bits_of(TRUSTED);
    }
    return (Range){highest(tall), any(small)};
}

/* Whether a row of sums has to be tested by is_inexact. `raised`: the message before has a raised emission. */
INLINE int needs_check(int raised, Range sums) {
    return raised || sums.small || sums.most >= bits_of(INFINITE);
}

/* Whether underflow can have changed a row of c sums, which have been multiplied by the power of two `scale`. `most`:
   bits of the largest before that. The matrix's largest entry is known; its least is determined where a sum is 0. */
static int is_inexact(int64_t c, const real *sums, real scale, whole most, Matrix *matrix) {
    if (most >= bits_of(INFINITE) || most < 0) return 1;
    if (most != 0 && most < bits_of(power_of_two(1 - BIAS))) return 1;
    real limit = least_unchanged(matrix->high);
    if (!(limit < INFINITE)) return 1;
    limit = limit * scale < INFINITE ? limit * scale : INFINITE;
    wholes small = {0}, zero = {0};
    for (int64_t j = 0; j < c; j += LANES) {
        reals u = read_some(sums + j, 1, c - j, INFINITE);
        wholes is_zero = u == 0;
        zero |= is_zero, small |= ~is_zero & ~(u >= limit);
    }
    if (any(small) || !any(zero)) return any(small);
    find_low(matrix);
    return matrix->low < least_safe_entry();
}

/* Initial weights p0 as a linear row of sums, the largest near 2^TOP: the weights are 2^exponent e^shift times the row.
   Returns whether one may underflow. */
static int start_row(int64_t c, int64_t width, const real *from, int64_t step, int logarithms, real *row,
                     int64_t *exponent, double *shift) {
    real zero = logarithms ? -INFINITE : 0, high;
    wholes small = {0};
    read_row(c, width, from, step, zero, row);
    high = largest_in(width, row, zero), high = high == -INFINITE ? 0 : high;
    *shift = logarithms ? high : 0, *exponent = (logarithms ? 1 : exponent_above(high)) - TOP;
    Factors scale = factors_of(-*exponent);
    for (int64_t left = width; left > 0; row += LANES, left -= LANES) {
        reals p = read_some(row, 1, left, zero), u = p * (real)scale.first * (real)scale.second;
        if (logarithms) u = exponential_of_difference(p, high) * power_of_two(TOP - 1);
        small |= (p != zero) & ~((u >= TRUSTED) & (u < INFINITE));
        write_some(row, u, left);
    }
    return any(small);
}
