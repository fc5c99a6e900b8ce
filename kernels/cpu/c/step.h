/* What a step does to a row of sums, and which rows are to be believed.

       U_i = S_{i-1} P_i      S_i = U_i E_i 2^(TOP - k)      E_i = exp(x_i - max x_i), and max U_i is in [1/2, 1) 2^k

   An emission E is 0 only where x is -inf, and is raised to 2^-DEEPEST where it is less. So an S is 0, or at least
   TRUSTED 2^-DEEPEST / c, and a sum U that is 0 says that no path leads there, as long as no product S P underflows.
   What raised emissions add to a sum is at most 2^(TOP - DEEPEST) max P a term: sums above TRUSTED max P do not notice.
   A row with a sum between is lossy, and so is one with a 0 beside a matrix with positive entries below `ordinary`. */
#pragma once
#include "chain.h"
#include "product.h"
#include "scale.h"

/* The least entry of which every product with an S is a number: another one where denormal numbers are flushed. */
INLINE real ordinary(void) {
    volatile real tiny = power_of_two(1 - BIAS), half = 0.5;
    return power_of_two(1 - BIAS - (tiny * half > 0 ? FRACTION : 0) + 2 * DEEPEST - TOP - GUARD + 11);
}

/* exp(x - most) with the rounding of that difference, for logarithms of matrices. */
INLINE reals exponential_of_difference(reals x, real most) {
    reals a = x - most, back = a - x, rest = (x - (a - back)) - (most + back);
    return exponential(a, where(a >= LOG_DEEPEST, rest, (reals){0})); /* what is raised is no difference any more */
}

/* 2^k as two factors: it may be no number of the format, and 0 times it is 0. */
typedef struct { double first, second; } Factors;
INLINE Factors factors_of(int64_t k) {
    int64_t bits[] = {(k / 2 + 1023) << 52, (k - k / 2 + 1023) << 52};
    Factors factors;
    __builtin_memcpy(&factors, bits, sizeof factors);
    return factors;
}

/* The exponent k of a positive number in [1/2, 1) 2^k; 0 for 0 and infinity. */
INLINE int64_t exponent_above(double a) {
    int64_t exponent;
    mantissa(a, &exponent);
    return a > 0 && a < __builtin_inf() ? exponent + 1 : 0;
}

/* Entries that a vector takes from fewer places than it has, and gives to them. */
INLINE reals load_some(const real *from, int64_t step, int64_t count, real rest) {
    reals a = all(rest);
    UNROLL for (int j = 0; j < LANES; j++) if (j < count) a[j] = from[j * step];
    return a;
}
INLINE void store_some(real *to, reals a, int64_t count) {
    UNROLL for (int j = 0; j < LANES; j++) if (j < count) to[j] = a[j];
}

/* A row of c entries as one of `width`, of which the others are `rest`. */
INLINE void widen(int64_t c, int64_t width, const real *from, int64_t step, real rest, real *to) {
    if (c < LANES) store(to, load_some(from, step, c, rest));
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

/* A step's linear matrix (c, width): 2^exponent e^shift times it is the caller's. Bounds once it was looked at. */
typedef struct {
    const real *entries;
    int64_t row, width, c, exponent;
    double shift;
    int looked;
    real high, low; /* the largest entry, and the least positive one */
    real *room;     /* (width, width) */
} Matrix;

static void look(Matrix *a) {
    reals high = {0};
    naturals low = (naturals){0} - 1;
    for (int64_t k = 0; k < a->c; k++)
        for (int64_t b = 0; b < vectors_of(a->width); b++) {
            reals entry = load(a->entries + k * a->row + start_of(b, a->width));
            naturals bits = (naturals)entry - 1; /* 0 becomes the largest */
            high = where(entry > high, entry, high);
            low = (naturals)which(bits < low, (wholes)bits, (wholes)low);
        }
    natural bits = low[0];
    UNROLL for (int j = 1; j < LANES; j++) bits = low[j] < bits ? low[j] : bits;
    a->high = largest(high), a->looked = 1;
    a->low = bits >= (natural)bits_of(INFINITE) ? INFINITE : real_of((whole)bits + 1);
}

/* Whether a matrix's entries lie so far from 1 that sums may leave the format. */
INLINE int is_far(const Matrix *a) {
    return a->high > 0 && a->high < INFINITE && !(a->high >= (real)0x1p-16 && a->high <= (real)0x1p12) && !a->exponent;
}

/* Such a matrix becomes one whose largest entry is near 1; whether it was one. */
static int rescale(Matrix *a) {
    if (!is_far(a)) return 0;
    int64_t k = exponent_above(a->high);
    Factors scale = factors_of(-k);
    real first = (real)scale.first, second = (real)scale.second, low = a->low * first * second;
    for (int64_t i = 0; i < a->c; i++)
        for (int64_t b = 0; b < vectors_of(a->width); b++) {
            int64_t j = start_of(b, a->width), again = a->entries == a->room && j < b * LANES ? b * LANES - j : 0;
            reals entry = load(a->entries + i * a->row + j), scaled = entry * first * second;
            for (int64_t r = 0; r < again; r++) scaled[r] = entry[r]; /* what two vectors share is scaled once */
            store(a->room + i * a->width + j, scaled);
        }
    a->entries = a->room, a->row = a->width, a->exponent = k;
    look(a);
    if (low == 0) a->low = 0; /* an entry has become 0, which is none */
    return 1;
}

/* Whether loops in float64 read float32, and where an operand's entries then lie. */
INLINE int is_single(const Chain *a) { return BITS == 64 && a->single; }
INLINE const float *single_of(const real *operand, const real *from) {
    return (const float *)operand + (from - operand);
}
INLINE void widen_singles(int64_t c, int64_t width, const float *from, int64_t step, real rest, real *to) {
    if (step == 1) for (int64_t j = 0; j < c; j++) to[j] = (real)from[j];
    else for (int64_t j = 0; j < c; j++) to[j] = (real)from[j * step];
    for (int64_t j = c; j < width; j++) to[j] = rest;
}

/* The matrix into `step` as products take it: where it lies, or as a copy. */
static void prepare(const Chain *a, int64_t set, int64_t step, Matrix *out) {
    const real *from = a->bulk + first_matrix(a, set) + (a->one_matrix ? 0 : step - 1) * a->bulk_step;
    int64_t c = a->states;
    out->exponent = out->looked = 0, out->shift = 0;
    if (!a->logarithms && !is_single(a) && out->width == c && (a->bulk_to == 1 || c == 1)) {
        out->entries = from, out->row = a->bulk_from;
        return;
    }
    out->entries = out->room, out->row = out->width;
    real rest = a->logarithms ? -INFINITE : 0;
    if (is_single(a))
        for (int64_t k = 0; k < c; k++)
            widen_singles(c, out->width, single_of(a->bulk, from + k * a->bulk_from), a->bulk_to, rest,
                          out->room + k * out->width);
    else if (out->width == c && a->bulk_from == 1) transpose(c, from, a->bulk_to, out->room, c);
    else for (int64_t k = 0; k < c; k++) /* rows behind are 0 */
        widen(c, out->width, from + k * a->bulk_from, a->bulk_to, rest, out->room + k * out->width);
    if (!a->logarithms) return;
    reals high = all(-INFINITE);
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

/* 2^(TOP - k), within the format: what is beyond belongs to rows that are lossy. */
INLINE real scale_to_top(int64_t k) {
    int64_t power = TOP - k;
    return power_of_two(power > BIAS ? BIAS : power < 1 - BIAS ? 1 - BIAS : power);
}

/* What makes states of up to LANES rows of sums. */
typedef struct {
    real shift[LANES];                 /* max x */
    whole least[LANES], most[LANES];   /* bits of the least and of the largest sum */
    whole raised[LANES];               /* whether an emission was raised */
} Weighed;

/* S of up to LANES rows into `state`, from their sums and x. `single`: of one row. */
INLINE void weigh(const int single, int64_t rows, int64_t width, const real *const *x, const real *sums,
                  real *state, Weighed *out) {
    reals high[LANES] = {0};
    wholes low[LANES], tall[LANES], raised[LANES];
    UNROLL for (int r = 0; r < LANES; r++) if (!single) low[r] = tall[r] = raised[r] = (wholes){0};
    for (int64_t r = 0; r < rows; r++) {
        const real *row = x[r], *u = sums + r * width;
        high[r] = load(row + width - LANES);
        low[r] = tall[r] = (wholes)load(u + width - LANES);
        for (int64_t j = 0; j + LANES < width; j += LANES) {
            wholes bits = (wholes)load(u + j);
            high[r] = larger(high[r], load(row + j));
            low[r] = lower(low[r], bits), tall[r] = higher(tall[r], bits);
        }
    }
    if (single) {
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
        reals end = load(u + width - LANES) * factor * exponential(a, NO_REST);
        wholes deep = (a < LOG_DEEPEST) & (a > -INFINITE);
        for (int64_t j = 0; j + LANES < width; j += LANES) {
            reals b = load(row + j) - shift;
            store(to + j, load(u + j) * factor * exponential(b, NO_REST));
            deep |= (b < LOG_DEEPEST) & (b > -INFINITE);
        }
        store(to + width - LANES, end);
        raised[r] = deep;
    }
    if (single) out->raised[0] = any(raised[0]);
    else {
        wholes deep = any_of_each(raised);
        __builtin_memcpy(out->raised, &deep, sizeof deep);
    }
}

/* Whether a row of sums is to be looked at: `deep`, an emission of the message before was raised. */
INLINE int asks(int deep, whole least, whole most) {
    return deep || least < bits_of(TRUSTED) || most >= bits_of(INFINITE);
}

/* Whether a row of c sums times a power of two is lossy. `most`: bits of its largest before that. */
static int is_lossy(int64_t c, const real *sums, real scale, whole most, const Matrix *matrix, real common) {
    if (most >= bits_of(INFINITE) || most < 0) return 1;
    if (most != 0 && most < bits_of(power_of_two(1 - BIAS))) return 1;
    real limit = TRUSTED * matrix->high > SHALLOW ? TRUSTED * matrix->high : SHALLOW;
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
    return lost || (none && matrix->low < common);
}

/* A row of weights (p0, or the last states') as a row of sums with its largest near 2^TOP; whether that loses any.
   Logarithms are made linear: then `shift` is their largest. 2^exponent e^shift times the row are the weights. */
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
