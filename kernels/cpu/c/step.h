/* One step of a row: sums U become the next scaled message S, and the test whether underflow can have lost a path.

       U_i = S_{i-1} P_i      S_i = U_i E_i 2^(TOP - k)      E_i = exp(x_i - max x_i), and max U_i is in [1/2, 1) 2^k

   E is 0 only where x is -inf; smaller values are raised to 2^-DEEPEST. Hence S is 0 or at least TRUSTED 2^-DEEPEST /
   c, and U is exactly 0 only where no path leads, provided that no product S P underflows. A raised emission adds at
   most 2^(TOP - DEEPEST) max P to a sum, which does not change sums above TRUSTED max P. A row is lossy, and its
   sequence is recomputed exactly by exact.h, if it has a positive sum below that limit, or a sum of 0 while the matrix
   has a positive entry below least_safe_entry(). */
#pragma once
#include "chain.h"
#include "flush.h"
#include "product.h"
#include "scale.h"

/* The least matrix entry whose product with any S is not 0; larger where the caller's mode flushes denormal numbers. */
INLINE real least_safe_entry(void) {
    int lost = mode_now() & ANY_FLUSH ? 0 : FRACTION;
    return power_of_two(1 - BIAS - lost + 2 * DEEPEST - TOP - GUARD + 11);
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

/* Vectors from and to `count` entries, `step` apart; further lanes are `fill`, or are not stored. */
INLINE reals load_some(const real *from, int64_t step, int64_t count, real fill) {
    reals a = splat(fill);
    UNROLL for (int j = 0; j < LANES; j++) if (j < count) a[j] = from[j * step];
    return a;
}
INLINE void store_some(real *to, reals a, int64_t count) {
    UNROLL for (int j = 0; j < LANES; j++) if (j < count) to[j] = a[j];
}

/* A vector of entries of which `left` remain. */
INLINE reals read_some(const real *from, int64_t left, real fill) {
    return left < LANES ? load_some(from, 1, left, fill) : load(from);
}
INLINE void write_some(real *to, reals a, int64_t left) {
    if (left < LANES) store_some(to, a, left);
    else store(to, a);
}

/* A row of c entries copied into one of `width`, further entries being `fill`; and back. */
INLINE void widen(int64_t c, int64_t width, const real *from, int64_t step, real fill, real *to) {
    if (c < LANES) store(to, load_some(from, step, c, fill));
    else if (step == 1)
        for (int64_t k = 0; k < vectors_of(c); k++) store(to + start_of(k, c), load(from + start_of(k, c)));
    else for (int64_t j = 0; j < width; j++) to[j] = from[j * step];
}
INLINE void narrow(int64_t c, const real *from, real *to) {
    if (c < LANES) store_some(to, load(from), c);
    else for (int64_t k = 0; k < vectors_of(c); k++) store(to + start_of(k, c), load(from + start_of(k, c)));
}
INLINE void clear(int64_t count, real *to) {
    for (int64_t j = 0; j < count; j++) to[j] = 0;
}

/* ------------------------------------------------------------------------------------------------------ matrices */

/* A step's matrix (c, width), linear: the caller's is 2^exponent e^shift times it. */
typedef struct {
    const real *entries;
    int64_t row, width, c, exponent;
    double shift;
    int has_high, has_low; /* are known: */
    real high, low;        /* the largest entry, and the least positive one */
    real *room;            /* (width, width): scratch for a copy */
} Matrix;

static void find_high(Matrix *a) {
    reals high[4] = {0}; /* four rows at a time: a maximum waits for the one before it */
    if (a->has_high) return;
    for (int64_t k = 0; k < a->c; k += 4) {
        const real *row[4];
        UNROLL for (int r = 0; r < 4; r++) row[r] = a->entries + (k + r < a->c ? k + r : k) * a->row;
        for (int64_t j = 0; j < a->width - LANES; j += LANES)
            UNROLL for (int r = 0; r < 4; r++) high[r] = larger(load(row[r] + j), high[r]);
        UNROLL for (int r = 0; r < 4; r++) high[r] = larger(load(row[r] + a->width - LANES), high[r]);
    }
    a->high = largest(larger(larger(high[0], high[1]), larger(high[2], high[3]))), a->has_high = 1;
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
            low = (naturals)where_whole(bits < low, (wholes)bits, (wholes)low);
        }
    natural bits = low[0];
    UNROLL for (int j = 1; j < LANES; j++) bits = low[j] < bits ? low[j] : bits;
    a->low = bits >= (natural)bits_of(INFINITE) ? INFINITE : real_of((whole)bits + 1), a->has_low = 1;
}

/* Whether the largest entry, which is known, is far from 1, and that has not been mended yet. */
INLINE int needs_rescaling(const Matrix *a) { return is_far_from_one(a->high) && !a->exponent; }

/* Divides a matrix that needs it by a power of two near its largest entry; whether it did. */
static int rescale(Matrix *a) {
    find_high(a);
    if (!needs_rescaling(a)) return 0;
    find_low(a);
    int64_t k = exponent_above(a->high);
    Factors scale = factors_of(-k);
    real first = (real)scale.first, second = (real)scale.second, low = a->low * first * second;
    for (int64_t i = 0; i < a->c; i++)
        for (int64_t b = 0; b < vectors_of(a->width); b++) {
            int64_t j = start_of(b, a->width), again = a->entries == a->room && j < b * LANES ? b * LANES - j : 0;
            reals entry = load(a->entries + i * a->row + j), scaled = entry * first * second;
            for (int64_t r = 0; r < again; r++) scaled[r] = entry[r]; /* scaled already, by the vector before */
            store(a->room + i * a->width + j, scaled);
        }
    a->entries = a->room, a->row = a->width, a->exponent = k, a->has_high = a->has_low = 0;
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
    out->entries = out->room, out->row = out->width;
    real fill = a->logarithms ? -INFINITE : 0;
    if (out->width == c && a->bulk.from == 1) transpose(c, from, a->bulk.to, out->room, c);
    else for (int64_t k = 0; k < c; k++)
        widen(c, out->width, from + k * a->bulk.from, a->bulk.to, fill, out->room + k * out->width);
    if (!a->logarithms) return;
    reals high = splat(-INFINITE);
    for (int64_t k = 0; k < c; k++)
        for (int64_t b = 0; b < vectors_of(out->width); b++) {
            reals entry = load(out->room + k * out->width + start_of(b, out->width));
            high = where(entry > high, entry, high);
        }
    real most = largest(high);
    if (most == -INFINITE) most = 0;
    out->shift = most;
    for (int64_t k = 0; k < c; k++) {
        real *row = out->room + k * out->width;
        int64_t last = out->width - LANES;
        reals end = exponential_of_difference(load(row + last), most);
        for (int64_t j = 0; j < last; j += LANES) store(row + j, exponential_of_difference(load(row + j), most));
        store(row + last, end);
    }
}

/* ---------------------------------------------------------------------------------------------------------- rows */

INLINE real top_of(const real *a, int64_t width) {
    reals high = load(a + width - LANES);
    for (int64_t j = 0; j + LANES < width; j += LANES) high = larger(high, load(a + j));
    real top = largest(high);
    return top == -INFINITE ? 0 : top;
}

/* 2^(TOP - k), clamped to the range of `real`: rows beyond are lossy anyway. */
INLINE real scale_to_top(int64_t k) {
    int64_t power = TOP - k;
    return power_of_two(power > BIAS ? BIAS : power < 1 - BIAS ? 1 - BIAS : power);
}

/* Results of `weigh` for up to LANES rows. */
typedef struct {
    real shift[LANES];               /* max x */
    whole least[LANES], most[LANES]; /* bits of the least and of the largest sum */
    whole raised[LANES];             /* not 0 where an emission was raised */
} Weighed;

/* S of up to LANES rows into `state`, from their sums U and x. `one_row`: a variant for one row alone. */
INLINE void weigh(const int one_row, int64_t rows, int64_t width, const real *const *x, const real *sums,
                  real *state, Weighed *out) {
    reals high[LANES] = {0};
    wholes low[LANES], tall[LANES];
    UNROLL for (int r = 0; r < LANES; r++) if (!one_row) low[r] = tall[r] = (wholes){0};
    for (int64_t r = 0; r < rows; r++) {
        const real *row = x[r], *u = sums + r * width;
        high[r] = load(row + width - LANES);
        low[r] = tall[r] = (wholes)load(u + width - LANES);
        for (int64_t j = 0; j + LANES < width; j += LANES) {
            wholes bits = (wholes)load(u + j);
            high[r] = larger(high[r], load(row + j));
            low[r] = smaller_whole(low[r], bits), tall[r] = larger_whole(tall[r], bits);
        }
    }
    if (one_row) {
        real top = largest(high[0]);
        out->shift[0] = top == -INFINITE ? 0 : top;
        out->least[0] = lowest(low[0]), out->most[0] = highest(tall[0]);
    } else {
        reals top = largest_of_each(high);
        store(out->shift, where(top == -INFINITE, (reals){0}, top));
        wholes least = lowest_of_each(low), most = highest_of_each(tall);
        __builtin_memcpy(out->least, &least, sizeof least);
        __builtin_memcpy(out->most, &most, sizeof most);
    }
    for (int64_t r = 0; r < rows; r++) {
        const real *row = x[r], *u = sums + r * width;
        real *to = state + r * width, factor = scale_to_top(exponent_of(out->most[r])), shift = out->shift[r];
        reals a = load(row + width - LANES) - shift;
        reals end = load(u + width - LANES) * factor * exponential(a, NO_TAIL);
        wholes raised = (a < LOG_DEEPEST) & (a > -INFINITE);
        for (int64_t j = 0; j + LANES < width; j += LANES) {
            reals b = load(row + j) - shift;
            store(to + j, load(u + j) * factor * exponential(b, NO_TAIL));
            raised |= (b < LOG_DEEPEST) & (b > -INFINITE);
        }
        store(to + width - LANES, end);
        out->raised[r] = any(raised);
    }
}

/* Whether a row of sums has to be tested by is_lossy. `raised`: the message before has a raised emission. */
INLINE int needs_check(int raised, whole least, whole most) {
    return raised || least < bits_of(TRUSTED) || most >= bits_of(INFINITE);
}

/* Whether a row of c sums is lossy. The sums have been multiplied by the power of two `scale`; `most`: bits of the
   largest before that. The matrix's largest entry is known, its least is looked for where a sum is 0. */
static int is_lossy(int64_t c, const real *sums, real scale, whole most, Matrix *matrix, real safe_entry) {
    if (most >= bits_of(INFINITE) || most < 0) return 1;
    if (most != 0 && most < bits_of(power_of_two(1 - BIAS))) return 1;
    real limit = least_unchanged(matrix->high);
    if (!(limit < INFINITE)) return 1;
    limit = limit * scale < INFINITE ? limit * scale : INFINITE;
    int lost = 0, none = 0;
    if (c < LANES) {
        for (int64_t j = 0; j < c; j++) none |= sums[j] == 0, lost |= sums[j] != 0 && !(sums[j] >= limit);
    } else {
        wholes small = {0}, zero = {0};
        for (int64_t b = 0; b < vectors_of(c); b++) {
            reals u = load(sums + start_of(b, c));
            wholes is_zero = u == 0;
            zero |= is_zero, small |= ~is_zero & ~(u >= limit);
        }
        lost = any(small), none = any(zero);
    }
    if (lost || !none) return lost;
    find_low(matrix);
    return matrix->low < safe_entry;
}

/* Initial weights p0 as a linear row of sums, the largest near 2^TOP: the weights are 2^exponent e^shift times the row.
   Whether one may be lost by underflow. */
static int start_row(int64_t c, int64_t width, const real *from, int64_t step, int logarithms, real *row,
                     int64_t *exponent, double *shift) {
    double high = logarithms ? -__builtin_inf() : 0;
    int bad = 0, lossy = 0;
    for (int64_t j = 0; j < c; j++) {
        double entry = from[j * step];
        bad |= entry != entry;
        high = entry > high ? entry : high;
    }
    if (logarithms && high == -__builtin_inf()) high = 0;
    *shift = logarithms ? high : 0, *exponent = 0;
    if (bad || high == __builtin_inf()) {
        for (int64_t j = 0; j < width; j++) row[j] = 0;
        return 1;
    }
    if (logarithms) {
        for (int64_t b = 0; b < vectors_of(width); b++) {
            int64_t j = start_of(b, width), count = c - j < LANES ? c - j : LANES;
            reals x = load_some(from + j * step, step, count, -INFINITE);
            reals u = exponential_of_difference(x, (real)high) * power_of_two(TOP - 1);
            lossy |= any((u != 0) & ~(u >= TRUSTED));
            store(row + j, u);
        }
        *exponent = 1 - TOP;
        return lossy;
    }
    *exponent = exponent_above(high) - TOP;
    Factors scale = factors_of(-*exponent);
    for (int64_t j = 0; j < width; j++) {
        double u = j < c ? (double)from[j * step] * scale.first * scale.second : 0;
        row[j] = (real)u;
        lossy |= j < c && from[j * step] != 0 && !(u >= (double)TRUSTED);
    }
    return lossy;
}
