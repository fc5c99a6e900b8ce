/* Sequences whose sums a format's exponents cannot hold, redone: forward and backward as in forward.h and backward.h.

   Every entry of a message is a number m 2^(512 e), m a double from 2^-256 to 2^256 and e an integer, its digit. A row
   times a matrix is one sum a digit that the row has: the largest, and what the next adds. Nothing underflows, and
   nothing takes a logarithm but a message that is kept: in log space, its largest entry near 0. */
#pragma once
#include "backward.h"

typedef double doubles __attribute__((vector_size(BYTES)));
typedef int64_t longs __attribute__((vector_size(BYTES)));
enum { WIDE = BYTES / 8, BLOCK = 16, PARTS = BLOCK / WIDE };

#define DIGIT 0x1p512
#define NO_DIGIT -0x1p900 /* of 0 */
#define DIGIT_LN2_HIGH 0x1.62e42feep8
#define DIGIT_LN2_LOW 0x1.a39ef35793c76p-24

INLINE doubles load_wide(const double *from) { doubles a; __builtin_memcpy(&a, from, sizeof a); return a; }
INLINE void store_wide(double *to, doubles a) { __builtin_memcpy(to, &a, sizeof a); }
INLINE doubles both(double a) { return a - (doubles){0}; }
INLINE doubles choose(longs condition, doubles a, doubles b) { return (doubles)((condition & (longs)a) | (~condition & (longs)b)); }

typedef struct { doubles m, e; } Number;

/* The same number with its m in range, if it was not farther off than a digit. */
INLINE Number settled(Number a) {
    longs large = a.m >= 0x1p256, small = (a.m < 0x1p-256) & (a.m > 0);
    a.m *= choose(large, both(1 / DIGIT), choose(small, both(DIGIT), both(1)));
    a.e += choose(large, both(1), choose(small, both(-1), both(0)));
    a.e = choose(a.m == 0, both(NO_DIGIT), a.e);
    return a;
}

/* What a number is to one whose digit is `ahead` larger: 0 if that is two or more. */
INLINE doubles lowered(doubles m, doubles ahead) {
    return m * choose(ahead < 0.5, both(1), choose(ahead < 1.5, both(1 / DIGIT), both(0)));
}

INLINE Number plus_number(Number a, Number b) {
    doubles top = choose(a.e > b.e, a.e, b.e);
    return settled((Number){lowered(a.m, top - a.e) + lowered(b.m, top - b.e), top});
}

/* e to the power a: 0 for -inf. */
INLINE Number exponential_number(doubles a) {
    longs none = a == -__builtin_inf();
    doubles b = choose(none, both(0), a), e = (b * (1.4426950408889634 / 512) + 0x1.8p52) - 0x1.8p52;
    e = choose((b > 1e15) | (b < -1e15), b * (1.4426950408889634 / 512), e); /* beyond what can be rounded */
    doubles r = (b - e * DIGIT_LN2_HIGH) - e * DIGIT_LN2_LOW;
    r = choose(r > 178, both(178), choose(r < -178, both(-178), r));
    doubles rounded = r * 1.4426950408889634 + 0x1.8p52, k = rounded - 0x1.8p52;
    r = (r - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
    doubles q = r * 2.07977146532679341e-9 + 2.5112254608742596e-8;
    q = q * r + 2.75576912069113884e-7, q = q * r + 2.75572341705423482e-6, q = q * r + 2.48015867702574306e-5;
    q = q * r + 1.98412698971676727e-4, q = q * r + 1.3888888889219606e-3, q = q * r + 8.33333333331666335e-3;
    q = q * r + 4.16666666666657806e-2, q = q * r + 0.16666666666666684, q = q * r + 0.500000000000000008;
    doubles m = (doubles)((longs)((q * r) * r + r + 1) + ((longs)rounded << 52));
    longs number = a < __builtin_inf(); /* neither infinite nor NaN, which stay what they are */
    m = choose(number, choose(none, both(0), m), a);
    return settled((Number){m, choose(number, e, both(0))});
}

/* The natural logarithms of m in range, -inf of 0. */
INLINE doubles logarithm_of(doubles m) {
    longs bits = (longs)m, more = (bits - 0x3fe6a09e667f3bcd) >> 52;
    doubles f = (doubles)(bits - (more << 52)), k = __builtin_convertvector(more, doubles);
    doubles t = (f - 1) / (f + 1), square = t * t, series = both(0);
    UNROLL for (int j = 21; j > 1; j -= 2) series = (series + 1.0 / j) * square;
    doubles found = k * 0x1.62e42feep-1 + (k * 0x1.a39ef35793c76p-33 + 2 * t * (1 + series));
    return choose(m > 0, found, choose(m == 0, both(-__builtin_inf()), m));
}

/* ------------------------------------------------------------------------------------------------------ matrices */

/* A step's matrix as numbers (c, across), or its transpose; digits only where there is one other than 0. For each block
   of columns, the rows from first[block] to before behind[block] have entries there. */
typedef struct {
    int64_t c, across;
    double *m, *e, *plane;
    int64_t *first, *behind;
    int digits, nan;
} Numbers;

/* Linear rows of the caller's that lie next to each other, read as doubles into `to`; false, and nothing is done, where
   an entry needs a digit. */
static int read_rows(const real *from, int64_t row, int64_t c, int64_t across, double *to) {
    typedef real part __attribute__((vector_size(WIDE * sizeof(real))));
    longs far = {0};
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < across; j += WIDE) {
            doubles a = both(0);
            if (j + WIDE <= c) {
                part read;
                __builtin_memcpy(&read, from + k * row + j, sizeof read);
                a = __builtin_convertvector(read, doubles);
            } else
                UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) a[l] = (double)from[k * row + j + l];
            far |= ~((a == 0) | ((a >= 0x1p-256) & (a < 0x1p256)));
            store_wide(to + k * across + j, a);
        }
    int64_t some = 0;
    UNROLL for (int l = 0; l < WIDE; l++) some |= far[l];
    return !some;
}

/* Where columns have entries, of numbers that have been read. */
static void find_entries(Numbers *out) {
    for (int64_t j = 0; j < out->across; j += BLOCK) {
        int64_t first = out->c, behind = 0;
        for (int64_t k = 0; k < out->c; k++) {
            longs some = {0};
            int64_t found = 0;
            UNROLL for (int l = 0; l < PARTS; l++) some |= load_wide(out->m + k * out->across + j + l * WIDE) != 0;
            UNROLL for (int l = 0; l < WIDE; l++) found |= some[l];
            if (found) first = first < k ? first : k, behind = k + 1;
        }
        out->first[j / BLOCK] = first, out->behind[j / BLOCK] = behind;
    }
}

static void read_numbers(const Chain *a, int64_t set, int64_t step, int turned, Numbers *out) {
    const real *from = a->bulk + set * a->bulk_set + (a->one_matrix ? 0 : step - 1) * a->bulk_step;
    int64_t row = turned ? a->bulk_to : a->bulk_from, column = turned ? a->bulk_from : a->bulk_to, c = out->c;
    int64_t across = out->across, apart = a->bulk_to == 1 ? a->bulk_from : a->bulk_to; /* of rows, or of columns */
    int in_rows = column == 1;
    out->digits = out->nan = 0;
    if (!a->logarithms && (row == 1 || column == 1) && read_rows(from, apart, c, across, in_rows ? out->m : out->plane)) {
        for (int64_t k = 0; k < c && !in_rows; k++)
            for (int64_t j = 0; j < across; j++) out->m[k * across + j] = j < c ? out->plane[j * across + k] : 0;
        find_entries(out);
        return;
    }
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < across; j += WIDE) {
            doubles raw = both(a->logarithms ? -__builtin_inf() : 0);
            UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) raw[l] = (double)from[k * row + (j + l) * column];
            Number entry = a->logarithms ? exponential_number(raw) : settled(settled((Number){raw, both(0)}));
            store_wide(out->m + k * across + j, entry.m), store_wide(out->e + k * across + j, entry.e);
            UNROLL for (int l = 0; l < WIDE; l++) {
                if (entry.m[l] == 0) continue;
                out->digits |= entry.e[l] != 0, out->nan |= entry.m[l] != entry.m[l];
            }
        }
    find_entries(out);
}

/* The largest digit below `below` of a matrix's entries; NO_DIGIT for none. */
static double next_plane(Numbers *p, double below) {
    double found = NO_DIGIT;
    for (int64_t k = 0; k < p->c * p->across; k++) if (p->m[k] != 0 && p->e[k] < below && p->e[k] > found) found = p->e[k];
    for (int64_t k = 0; k < p->c * p->across && found > NO_DIGIT; k++) p->plane[k] = p->e[k] == found ? p->m[k] : 0;
    return found;
}

/* Adds to a row (om, oe) what a row times entries of one digit is. `values`, `rows`: scratch (c). */
static void add_products(const Numbers *p, const double *entries, double digit, const double *m, const double *e,
                         double *values, int64_t *rows, double *om, double *oe) {
    double level = NO_DIGIT;
    for (int64_t k = 0; k < p->c; k++) if (m[k] != 0 && e[k] > level) level = e[k];
    while (level > NO_DIGIT) {
        double next = NO_DIGIT;
        int64_t count = 0;
        for (int64_t k = 0; k < p->c; k++) {
            if (m[k] == 0) continue;
            if (e[k] == level) values[count] = m[k], rows[count++] = k;
            else if (e[k] < level && e[k] > next) next = e[k];
        }
        for (int64_t j = 0; j < p->across; j += BLOCK) {
            int64_t t = 0, end = count, first = p->first[j / BLOCK], behind = p->behind[j / BLOCK];
            while (t < end && rows[t] < first) t++;
            while (end > t && rows[end - 1] >= behind) end--;
            if (t == end) continue;
            doubles sum[2][PARTS] = {0};
            for (; t + 2 <= end; t += 2)
                UNROLL for (int l = 0; l < PARTS; l++) {
                    sum[0][l] += values[t] * load_wide(entries + rows[t] * p->across + j + l * WIDE);
                    sum[1][l] += values[t + 1] * load_wide(entries + rows[t + 1] * p->across + j + l * WIDE);
                }
            if (t < end)
                UNROLL for (int l = 0; l < PARTS; l++) sum[0][l] += values[t] * load_wide(entries + rows[t] * p->across + j + l * WIDE);
            UNROLL for (int l = 0; l < PARTS; l++) {
                Number found = settled((Number){sum[0][l] + sum[1][l], both(level + digit)});
                Number before = {load_wide(om + j + l * WIDE), load_wide(oe + j + l * WIDE)};
                found = plus_number(before, found);
                store_wide(om + j + l * WIDE, found.m), store_wide(oe + j + l * WIDE, found.e);
            }
        }
        level = next;
    }
}

/* A row times the matrix. */
static void row_of_numbers(Numbers *p, const double *m, const double *e, double *values, int64_t *rows, double *om, double *oe) {
    for (int64_t j = 0; j < p->across; j++) om[j] = 0, oe[j] = NO_DIGIT;
    if (!p->digits) add_products(p, p->m, 0, m, e, values, rows, om, oe);
    else for (double digit = next_plane(p, -NO_DIGIT); digit > NO_DIGIT; digit = next_plane(p, digit))
        add_products(p, p->plane, digit, m, e, values, rows, om, oe);
    for (int64_t j = 0; j < p->c && p->nan; j++) om[j] = __builtin_nan(""), oe[j] = 0;
}

/* ---------------------------------------------------------------------------------------------------------- rows */

typedef struct {
    const Chain *a;
    int64_t set, count, across;
    int64_t *chosen;          /* (count): sequences of the set */
    Numbers matrix;
    double *m, *e, *um, *ue;  /* (count, across): messages; (across): a row of sums */
    double *am, *ae, *gm, *ge; /* (across): kept messages, and posteriors */
    double *values, *digits;  /* (count): what has been taken out of messages */
    Sum *shifts;
    double *scratch;
    int64_t *rows;
    double *total;            /* (c, across): counts by (to, from) */
} Exact;

/* exp(x - max x) times a row, in place; the row's largest digit is taken out. Returns max x. */
static double emit_numbers(const Exact *w, const real *x, double *m, double *e, double *digit) {
    double most = -__builtin_inf(), top = NO_DIGIT;
    int64_t c = w->a->states;
    for (int64_t j = 0; j < c; j++) most = (double)x[j] > most || x[j] != x[j] ? (double)x[j] : most;
    if (most == -__builtin_inf()) most = 0;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles raw = both(-__builtin_inf());
        UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) raw[l] = (double)x[j + l];
        Number emission = exponential_number(raw - most);
        Number found = settled((Number){load_wide(m + j) * emission.m, load_wide(e + j) + emission.e});
        store_wide(m + j, found.m), store_wide(e + j, found.e);
    }
    for (int64_t j = 0; j < c; j++) if (m[j] != 0 && e[j] > top) top = e[j];
    for (int64_t j = 0; j < c && top > NO_DIGIT; j++) if (m[j] != 0) e[j] -= top;
    *digit = top > NO_DIGIT ? top : 0;
    return most;
}

/* A row of c values of the format, linear or logarithms, as numbers. */
static void read_row(const Exact *w, const real *from, int64_t step, int logarithms, double *m, double *e) {
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles raw = both(logarithms ? -__builtin_inf() : 0);
        UNROLL for (int l = 0; l < WIDE; l++) if (j + l < w->a->states) raw[l] = (double)from[(j + l) * step];
        Number found = logarithms ? exponential_number(raw) : settled(settled((Number){raw, both(0)}));
        store_wide(m + j, found.m), store_wide(e + j, found.e);
    }
}

/* Rows of numbers, entry by entry; the result may lie where a factor does. */
static void multiply_numbers(int64_t across, const double *am, const double *ae, const double *bm, const double *be,
                             double *m, double *e) {
    for (int64_t j = 0; j < across; j += WIDE) {
        Number found = {load_wide(am + j) * load_wide(bm + j), load_wide(ae + j) + load_wide(be + j)};
        found = settled(found);
        store_wide(m + j, found.m), store_wide(e + j, found.e);
    }
}

/* The sum of a row over its largest digit. */
static double sum_of(const Exact *w, const double *m, const double *e, double *digit) {
    double top = NO_DIGIT, sum = 0;
    int64_t c = w->a->states;
    for (int64_t j = 0; j < c; j++) if (m[j] != 0 && e[j] > top) top = e[j];
    *digit = top;
    for (int64_t j = 0; j < c; j++) {
        if (m[j] != m[j]) return m[j];
        if (m[j] != 0 && top - e[j] < 1.5) sum += top - e[j] < 0.5 ? m[j] : m[j] / DIGIT;
    }
    return sum;
}

/* Natural logarithms of a row. */
static void log_numbers(const Exact *w, const double *m, const double *e, double *out) {
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles found = logarithm_of(load_wide(m + j));
        doubles digit = load_wide(e + j);
        found += choose(digit == NO_DIGIT, both(0), digit * DIGIT_LN2_HIGH + digit * DIGIT_LN2_LOW);
        store_wide(out + j, found);
    }
}

/* A kept message: natural logarithms, the largest of them near 0. */
static void keep_numbers(const Exact *w, const double *m, const double *e, real *out) {
    double top = -__builtin_inf();
    int64_t c = w->a->states;
    log_numbers(w, m, e, w->um);
    for (int64_t j = 0; j < c; j++) top = w->um[j] > top ? w->um[j] : top;
    for (int64_t j = 0; j < c; j++) out[j] = (real)(top > -__builtin_inf() ? w->um[j] - top : w->um[j]);
}

/* An entry over the row's sum, of which `digit` is the largest. */
INLINE double share_of(double m, double e, double sum, double digit) {
    if (sum != sum) return sum;
    return m == 0 || sum == 0 || digit - e >= 1.5 ? 0 : digit - e < 0.5 ? m / sum : m / sum / DIGIT;
}

static void finish_numbers(Exact *w, int64_t f, const double *m, const double *e) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f];
    double digit, sum;
    if (a->final) {
        read_row(w, a->final + q * a->states, 1, 0, w->um, w->ue);
        multiply_numbers(w->across, m, e, w->um, w->ue, w->um, w->ue);
        sum = sum_of(w, w->um, w->ue, &digit);
    } else sum = sum_of(w, m, e, &digit);
    Sum found = w->shifts[f];
    if (a->leaving) {
        log_numbers(w, m, e, w->um);
        double total = sum > 0 ? logarithm(sum) + digit * 512 * 0.69314718055994531 : sum;
        for (int64_t j = 0; j < a->states; j++) a->leaving[q * a->states + j] = w->um[j] - total;
    }
    digit += w->digits[f];
    a->sums[q] = sum > 0 ? 1 : sum != sum ? (real)sum : 0;
    if (sum == 0 || sum != sum) {
        tell(a, q, (Sum){sum == 0 && found.sum == found.sum ? -__builtin_inf() : __builtin_nan(""), 0});
        return;
    }
    int64_t exponent;
    double rest = mantissa(sum, &exponent);
    if (digit < 0x1p40 && digit > -0x1p40) add_exponent(&found, (int64_t)digit * 512 + exponent);
    else add(&found, (digit * 512 + (double)exponent) * 0.69314718055994531);
    add(&found, logarithm(rest));
    tell(a, q, found);
}

static void walk_numbers_ahead(Exact *w) {
    const Chain *a = w->a;
    int64_t c = a->states;
    double digit;
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = begun(a, w->chosen[f]), w->digits[f] = 0;
    for (int64_t step = 0; step < a->steps; step++) {
        if (step == 1 || (step > 1 && !a->one_matrix)) read_numbers(a, w->set, step, 0, &w->matrix);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f];
            double *m = w->m + f * w->across, *e = w->e + f * w->across;
            real *shares = shares_at(a, q, step);
            if (step >= steps_of(a, q)) {
                if (a->messages && !a->starts) clear(c, message_at(a, q, step));
                if (shares) clear(c, shares);
                continue;
            }
            if (step == 0) read_row(w, a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member, a->p0_state, (int)a->logarithms, m, e);
            else {
                row_of_numbers(&w->matrix, m, e, w->scratch, w->rows, w->um, w->ue);
                for (int64_t j = 0; j < w->across; j++) m[j] = w->um[j], e[j] = w->ue[j];
            }
            add(&w->shifts[f], emit_numbers(w, x_at(a, w->set, q, step), m, e, &digit));
            w->digits[f] += digit;
            if (a->messages) keep_numbers(w, m, e, message_at(a, q, step));
            double sum = shares ? sum_of(w, m, e, &digit) : 0;
            for (int64_t j = 0; j < c && shares; j++) shares[j] = (real)share_of(m[j], e[j], sum, digit);
            if (step + 1 == steps_of(a, q)) finish_numbers(w, f, m, e);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------ gradients */

/* m 2^(512 e) as a double: a digit at a time, for a gradient may be within the format where 2^(512 e) is not. */
INLINE doubles value_of_number(Number a) {
    doubles m = a.m * choose(a.e > 0.5, both(DIGIT), choose(a.e < -0.5, both(1 / DIGIT), both(1)));
    m *= choose(a.e > 1.5, both(DIGIT), choose(a.e < -1.5, both(1 / DIGIT), both(1)));
    return m * choose(a.e > 2.5, both(DIGIT), choose(a.e < -2.5, both(0), both(1)));
}

/* Adds the transitions into a step, of which (tm, te) are the sources: those into states that are hardly ever entered
   are left out. `entered` (across): posteriors of the step's states over their sum, before the weight. */
static void count_numbers(Exact *w, const double *sm, const double *se, const double *tm, const double *te,
                          const double *entered, double weight, double sum, double digit, double *into) {
    const Numbers *p = &w->matrix; /* the transpose */
    int by_log = logs(w->a);
    double sign = weight < 0 ? -1 : 1;
    Number size = settled(settled((Number){both(weight * sign), both(0)}));
    for (int64_t j = 0; j < p->c; j++) {
        if (entered[j] < 0x1p-120 || tm[j] == 0) continue;
        Number share = settled((Number){both(tm[j] / sum), both(te[j] - digit)});
        share = settled((Number){share.m * size.m, share.e + size.e});
        for (int64_t k = 0; k < p->across; k += WIDE) {
            doubles entry = load_wide(p->m + j * p->across + k);
            Number found = {load_wide(sm + k) * share.m, load_wide(se + k) + share.e};
            if (by_log) {
                found = settled(found);
                found.m *= entry;
                if (p->digits) found.e += load_wide(p->e + j * p->across + k);
            }
            doubles value = choose((entry == 0) | (found.m == 0), both(0), value_of_number(found) * sign);
            store_wide(into + j * p->across + k, load_wide(into + j * p->across + k) + value);
        }
    }
}

static void walk_numbers_back(Exact *w) {
    const Chain *a = w->a;
    int64_t c = a->states;
    double digit;
    int counted = (a->counts || a->grad_bulk) && a->steps > 1;
    for (int64_t k = 0; k < c * w->across && counted; k++) w->total[k] = 0;
    for (int64_t step = a->steps - 1; step >= 0; step--) {
        if (step + 1 < a->steps && (!a->one_matrix || step + 2 == a->steps)) read_numbers(a, w->set, step + 1, 1, &w->matrix);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f], steps = steps_of(a, q);
            double *bm = w->m + f * w->across, *be = w->e + f * w->across, *tm = w->um, *te = w->ue;
            real *gradient = gradient_at(a, w->set, q, step);
            if (step >= steps) {
                if (gradient && !a->starts) clear(c, gradient);
                continue;
            }
            if (step + 1 == steps) {
                for (int64_t j = 0; j < w->across; j++) bm[j] = j < c, be[j] = j < c ? 0 : NO_DIGIT;
                if (a->final) read_row(w, a->final + q * c, 1, 0, bm, be);
            } else {
                for (int64_t j = 0; j < w->across; j++) tm[j] = bm[j], te[j] = be[j];
                emit_numbers(w, x_at(a, w->set, q, step + 1), tm, te, &digit);
                row_of_numbers(&w->matrix, tm, te, w->scratch, w->rows, bm, be);
            }
            const real *kept = message_at(a, q, step);
            int in_logs = a->lossy[q] & 1;
            read_row(w, kept, 1, in_logs, w->am, w->ae);
            double *entered = w->values; /* of the step after */
            if (step + 1 < steps && counted) for (int64_t j = 0; j < w->across; j++) entered[j] = w->total[(c + f) * w->across + j];
            multiply_numbers(w->across, w->am, w->ae, bm, be, w->gm, w->ge);
            double sum = sum_of(w, w->gm, w->ge, &digit), weight = a->weight[q];
            for (int64_t j = 0; j < c; j++) {
                double share = share_of(w->gm[j], w->ge[j], sum, digit);
                if (gradient) gradient[j] = (real)(share * weight);
                if (counted) w->total[(c + f) * w->across + j] = share;
            }
            if (counted && step + 1 < steps && sum != 0)
                count_numbers(w, w->am, w->ae, tm, te, entered, weight, sum, digit, w->total);
            if (step > 0 || !a->grad_p0) continue;
            double *out = a->grad_p0 + q * c;
            const real *p0 = a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member;
            emit_numbers(w, x_at(a, w->set, q, 0), bm, be, &digit);
            read_row(w, p0, a->p0_state, (int)a->logarithms, w->am, w->ae);
            multiply_numbers(w->across, w->am, w->ae, bm, be, w->gm, w->ge);
            sum = sum_of(w, w->gm, w->ge, &digit);
            for (int64_t j = 0; j < c; j++) {
                double m = logs(a) ? w->gm[j] : bm[j], e = (logs(a) ? w->ge[j] : be[j]) - digit;
                double found = value_of_number((Number){both(m / sum), both(e)})[0];
                out[j] = sum != sum ? sum : w->am[j] == 0 || m == 0 || sum == 0 ? 0 : found * weight;
            }
        }
        if (step + 1 < a->steps && a->grad_bulk && counted)
            for (int64_t j = 0; j < c; j++)
                for (int64_t k = 0; k < c; k++) {
                    double *found = w->total + j * w->across + k;
                    if (*found != 0) a->grad_bulk[step * a->count_step + w->set * a->count_set + k * c + j] += (real)*found;
                    *found = 0;
                }
    }
    if (!a->counts || !counted) return;
    for (int64_t j = 0; j < c; j++)
        for (int64_t k = 0; k < c; k++) a->counts[(w->set * c + k) * c + j] += w->total[j * w->across + k];
}

static int64_t redo(const Chain *a, int which, void walk(Exact *)) {
    for (int64_t q = a->first; q < a->last;) {
        int64_t begin = q, c = a->states, across = (c + BLOCK - 1) / BLOCK * BLOCK;
        char *room = a->room;
        Exact w = {.a = a, .set = q / a->members, .across = across};
        w.chosen = take(&room, a->members * 8);
        for (; q < a->last && q / a->members == begin / a->members; q++)
            if ((a->lossy[q] & which) && (which == 1 || (a->weight[q] != 0 && a->log_norm[q] != -__builtin_inf()))) w.chosen[w.count++] = q;
        if (!w.count) continue;
        w.matrix = (Numbers){.c = c, .across = across, .m = take(&room, c * across * 8), .e = take(&room, c * across * 8),
                             .plane = take(&room, c * across * 8), .first = take(&room, across), .behind = take(&room, across)};
        w.m = take(&room, w.count * across * 8), w.e = take(&room, w.count * across * 8);
        w.um = take(&room, across * 8), w.ue = take(&room, across * 8), w.am = take(&room, across * 8), w.ae = take(&room, across * 8);
        w.gm = take(&room, across * 8), w.ge = take(&room, across * 8), w.values = take(&room, across * 8);
        w.scratch = take(&room, across * 8), w.rows = take(&room, across * 8);
        w.digits = take(&room, w.count * 8), w.shifts = take(&room, w.count * (int64_t)sizeof(Sum));
        w.total = take(&room, (c + w.count) * across * 8);
        walk(&w);
    }
    return 0;
}

/* Sequences of which the forward pass is lossy: their values, and their messages in log space. */
EXPORT int64_t EXPORTED(logchain_redo_forward)(const Chain *a) { return redo(a, 1, walk_numbers_ahead); }

/* Gradients of sequences that are lossy in either direction: written, or added to what others share. */
EXPORT int64_t EXPORTED(logchain_redo_backward)(const Chain *a) { return redo(a, 3, walk_numbers_back); }

/* Bytes of scratch for as many sequences of a set. */
EXPORT int64_t EXPORTED(logchain_redo_room)(const Chain *a) {
    int64_t across = (a->states + BLOCK - 1) / BLOCK * BLOCK;
    return (4 * a->states + 3 * a->members + 16) * across * 8 + a->members * 40 + 40 * 64;
}
