/* Sequences whose sums a format's exponents cannot hold, redone: forward and backward as in forward.h and backward.h.

   Every entry of a message is a number of number.h. A row times a matrix is one sum for each two digits that the row
   has: for most rows, one. Nothing underflows, and nothing takes a logarithm but a message that is kept: in log space,
   its largest entry near 0. */
#pragma once
#include "backward.h"
#include "number.h"

enum { BLOCK = 16, PARTS = BLOCK / WIDE };   /* columns that are summed together, and their vectors */
enum { CHAINS = PARTS < 8 ? 8 / PARTS : 1 }; /* sums of a column that do not wait for each other */
enum { TOGETHER = 64 };                      /* sequences that take a step together */

/* ------------------------------------------------------------------------------------------------------ matrices */

/* A step's matrix as numbers (c, across), or its transpose; digits only where there is one other than 0. For each block
   of columns, the rows from first[block] to before behind[block] have entries there. Sums of a column from `enough` (0
   where it has no entry) are not touched by what lies two digits lower. */
typedef struct {
    int64_t c, across;
    double *m, *e, *plane, *enough;
    double low; /* no positive entry is less */
    int64_t *first, *behind;
    int digits, nan;
} Numbers;

/* Linear rows of the caller's that lie next to each other, read as doubles into `to`; false, and nothing is done, where
   an entry needs a digit. */
static int read_rows(const real *from, int64_t row, int64_t c, int64_t across, double *to) {
    longs far = {0};
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < across; j += WIDE) {
            doubles a = read_wide(from + k * row + j, 1, c - j, 0);
            far |= ~((a == 0) | ((a >= LEAST) & (a < BEYOND)));
            store_wide(to + k * across + j, a);
        }
    return !some(far);
}

INLINE int has_entries(const double *block) {
    longs found = {0};
    UNROLL for (int l = 0; l < PARTS; l++) found |= load_wide(block + l * WIDE) != 0;
    return some(found);
}

/* Where columns have entries, of numbers that have been read. */
static void find_entries(Numbers *out) {
    doubles low = both(BEYOND);
    for (int64_t j = 0; j < out->across; j += BLOCK) {
        int64_t first = 0, behind = out->c;
        while (first < behind && !has_entries(out->m + first * out->across + j)) first++;
        while (first < behind && !has_entries(out->m + (behind - 1) * out->across + j)) behind--;
        out->first[j / BLOCK] = first, out->behind[j / BLOCK] = behind;
        longs found[PARTS] = {0};
        for (int64_t k = first; k < behind; k++)
            UNROLL for (int l = 0; l < PARTS; l++) {
                doubles entry = load_wide(out->m + k * out->across + j + l * WIDE);
                found[l] |= entry != 0;
                low = choose((entry > 0) & (entry < low), entry, low);
            }
        UNROLL for (int l = 0; l < PARTS; l++)
            store_wide(out->enough + j + l * WIDE, choose(found[l], both(0x1p-400), both(0)));
    }
    out->low = -highest_of(-low);
}

static void read_numbers(const Chain *a, int64_t set, int64_t step, int turned, Numbers *out) {
    const real *from = a->bulk + first_matrix(a, set) + (a->one_matrix ? 0 : step - 1) * a->bulk_step;
    int64_t row = turned ? a->bulk_to : a->bulk_from, column = turned ? a->bulk_from : a->bulk_to, c = out->c;
    int64_t across = out->across, apart = a->bulk_to == 1 ? a->bulk_from : a->bulk_to; /* of rows, or of columns */
    int in_rows = column == 1;
    out->digits = out->nan = 0;
    if (!a->logarithms && (row == 1 || column == 1) &&
        read_rows(from, apart, c, across, in_rows ? out->m : out->plane)) {
        for (int64_t k = 0; k < c && !in_rows; k++)
            for (int64_t j = 0; j < across; j++) out->m[k * across + j] = j < c ? out->plane[j * across + k] : 0;
        find_entries(out);
        return;
    }
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < across; j += WIDE) {
            doubles raw = read_wide(from + k * row + j * column, column, c - j, a->logarithms ? -__builtin_inf() : 0);
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
    for (int64_t k = 0; k < p->c * p->across; k++)
        if (p->m[k] != 0 && p->e[k] < below && p->e[k] > found) found = p->e[k];
    for (int64_t k = 0; k < p->c * p->across && found > NO_DIGIT; k++) p->plane[k] = p->e[k] == found ? p->m[k] : 0;
    return found;
}

static void clear_numbers(int64_t count, double *m, double *e) {
    for (int64_t j = 0; j < count; j++) m[j] = 0, e[j] = NO_DIGIT;
}

/* The largest digit below `below` of a row's entries from `first` to before `behind`, and of some beside them. */
static double next_digit(const double *e, int64_t first, int64_t behind, double below) {
    doubles found = both(NO_DIGIT);
    for (int64_t k = first / WIDE * WIDE; k < behind; k += WIDE) {
        doubles digit = load_wide(e + k);
        found = choose((digit < below) & (digit > found), digit, found);
    }
    return highest_of(found);
}

/* Entries of a digit, and of the one below it, as doubles; 0 for others. */
static void read_digits(int64_t first, int64_t behind, double digit, const double *m, const double *e, double *out) {
    for (int64_t k = first / WIDE * WIDE; k < behind; k += WIDE) {
        doubles ahead = digit - load_wide(e + k);
        store_wide(out + k, lowered(load_wide(m + k), choose(ahead < -0.5, both(2), ahead)));
    }
}

enum { NOTHING, WHOLE, PARTED }; /* a row: without entries, with digits 0 and -1 alone, with others */

/* Adds to a block of columns j of a row (om, oe), which is 0 if `fresh`, what a row times entries of one digit is.
   `values`: of a row that is whole, its entries as doubles; otherwise scratch. */
static void add_block(const Numbers *p, const double *entries, double digit, int fresh, int64_t j, int64_t kind,
                      const double *m, const double *e, double *values, double *om, double *oe) {
    int64_t first = p->first[j / BLOCK], behind = p->behind[j / BLOCK], across = p->across;
    double base = kind == WHOLE ? 0 : next_digit(e, first, behind, -NO_DIGIT);
    while (base > NO_DIGIT) {
        doubles sum[CHAINS][PARTS] = {0};
        longs small = {0};
        int64_t k = first;
        if (kind != WHOLE) read_digits(first, behind, base, m, e, values);
        for (; k + CHAINS <= behind && !p->digits; k += CHAINS)
            UNROLL for (int r = 0; r < CHAINS; r++)
                UNROLL for (int l = 0; l < PARTS; l++)
                    sum[r][l] += values[k + r] * load_wide(entries + (k + r) * across + j + l * WIDE);
        for (; k < behind; k++) {
            if (p->digits && values[k] == 0) continue; /* an entry may be infinite */
            UNROLL for (int l = 0; l < PARTS; l++)
                sum[0][l] += values[k] * load_wide(entries + k * across + j + l * WIDE);
        }
        UNROLL for (int l = 0; l < PARTS; l++) {
            UNROLL for (int r = 1; r < CHAINS; r++) sum[0][l] += sum[r][l];
            small |= sum[0][l] < load_wide(p->enough + j + l * WIDE);
        }
        int again = p->digits || some(small);
        UNROLL for (int l = 0; l < BLOCK; l += WIDE) {
            Number found = settled((Number){sum[0][l / WIDE], both(base + digit)});
            if (again) found = settled(found);
            if (!fresh) found = plus_number((Number){load_wide(om + j + l), load_wide(oe + j + l)}, found);
            store_wide(om + j + l, found.m), store_wide(oe + j + l, found.e);
        }
        fresh = 0;
        base = again && kind != WHOLE ? next_digit(e, first, behind, base - 1.5) : NO_DIGIT;
    }
}

/* Rows (count, across), of which 0 is the largest digit, times the matrix: block by block of it, which then stays in
   the first-level cache. `values` (count, across) and `kinds` (count): scratch. */
static void rows_of_numbers(Numbers *p, int64_t count, const double *m, const double *e, double *values, int64_t *kinds,
                            double *om, double *oe) {
    int64_t across = p->across;
    clear_numbers(count * across, om, oe);
    for (int64_t f = 0; f < count; f++) {
        double below = next_digit(e + f * across, 0, across, -1.5), top = next_digit(e + f * across, 0, across, 1);
        kinds[f] = top == NO_DIGIT ? NOTHING : below == NO_DIGIT ? WHOLE : PARTED;
        if (kinds[f] == WHOLE) read_digits(0, across, 0, m + f * across, e + f * across, values + f * across);
    }
    const double *entries = p->digits ? p->plane : p->m;
    double digit = p->digits ? next_plane(p, -NO_DIGIT) : 0;
    for (int fresh = 1; digit > NO_DIGIT; digit = p->digits ? next_plane(p, digit) : NO_DIGIT, fresh = 0)
        for (int64_t j = 0; j < across; j += BLOCK)
            for (int64_t f = 0, at = 0; f < count; f++, at += across)
                if (kinds[f] != NOTHING)
                    add_block(p, entries, digit, fresh, j, kinds[f], m + at, e + at, values + at, om + at, oe + at);
    for (double *to = om, *digits = oe; to < om + count * across; to += across, digits += across) {
        for (int64_t j = 0; j < p->c && p->nan; j++) to[j] = __builtin_nan(""), digits[j] = 0;
        clear_numbers(across - p->c, to + p->c, digits + p->c); /* infinite entries times 0 */
    }
}

/* One row times the matrix. */
INLINE void row_of_numbers(Numbers *p, const double *m, const double *e, double *values, int64_t *kind, double *om,
                           double *oe) {
    rows_of_numbers(p, 1, m, e, values, kind, om, oe);
}

/* ---------------------------------------------------------------------------------------------------------- rows */

typedef struct {
    const Chain *a;
    int64_t set, count, across;
    int64_t steps;             /* of the longest of the sequences */
    int64_t *chosen;           /* (count): sequences of the set */
    Numbers matrix;
    double *m, *e, *um, *ue;   /* (count, across): messages, and sums */
    double *am, *ae;           /* (count, across): kept messages */
    double *gm, *ge;           /* (across): posteriors */
    double *digits;            /* (count): what has been taken out of messages */
    Sum *shifts;
    double *scratch;           /* (count, across) */
    int64_t *rows;             /* (count, across) */
    double *entered, *total;   /* (count, across): posteriors of the step after; (c, across): counts by (to, from) */
} Exact;

/* exp(x - max x) times a row, in place; the row's largest digit is taken out. Returns max x, and NaN of a row with a
   NaN: what has been taken out keeps it, for a step without a path may follow. */
static double emit_numbers(const Exact *w, const real *x, double *m, double *e, double *digit) {
    doubles high = both(-__builtin_inf()), low = both(__builtin_inf()), top = both(NO_DIGIT);
    longs nan = {0};
    int64_t c = w->a->states;
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -__builtin_inf());
        nan |= (a != a) | (load_wide(m + j) != load_wide(m + j));
        high = choose(a > high, a, high), low = choose((a < low) & (a > -__builtin_inf()), a, low);
    }
    double most = some(nan) ? __builtin_nan("") : highest_of(high);
    if (most == -__builtin_inf()) most = 0;
    int near = most + highest_of(-low) <= 178;
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -__builtin_inf()) - most;
        Number emission = {choose(a == -__builtin_inf(), both(0), exponential_of(a)), both(0)};
        if (!near) emission = exponential_number(a);
        Number found = settled((Number){load_wide(m + j) * emission.m, load_wide(e + j) + emission.e});
        if (most != most) found.e = both(0); /* 0 times a NaN counts */
        top = choose(found.e > top, found.e, top);
        store_wide(m + j, found.m), store_wide(e + j, found.e);
    }
    double taken = highest_of(top);
    *digit = taken > NO_DIGIT ? taken : 0;
    for (int64_t j = 0; j < c && *digit != 0; j += WIDE)
        store_wide(e + j, choose(load_wide(m + j) == 0, both(NO_DIGIT), load_wide(e + j) - taken));
    return most;
}

/* A row of c values of the format, linear or logarithms, as numbers. */
static void read_row(const Exact *w, const real *from, int64_t step, int logarithms, double *m, double *e) {
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles raw = read_wide(from + j * step, step, w->a->states - j, logarithms ? -__builtin_inf() : 0);
        Number found = logarithms ? exponential_number(raw) : settled(settled((Number){raw, both(0)}));
        store_wide(m + j, found.m), store_wide(e + j, found.e);
    }
}

/* A backward message that enters, logarithms of which the largest is taken out, as numbers. */
static void read_following(const Exact *w, const double *from, double *m, double *e) {
    double top = largest_log(w->a->states, from);
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles raw = both(-__builtin_inf());
        UNROLL for (int l = 0; l < WIDE; l++) if (j + l < w->a->states) raw[l] = from[j + l] - top;
        Number value = exponential_number(raw);
        store_wide(m + j, value.m), store_wide(e + j, value.e);
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
    double top = *digit = next_digit(e, 0, w->across, -NO_DIGIT), sum = 0;
    doubles parts = {0};
    for (int64_t j = 0; j < w->across; j += WIDE) parts += lowered(load_wide(m + j), top - load_wide(e + j));
    UNROLL for (int l = 0; l < WIDE; l++) sum += parts[l];
    return sum;
}

/* Natural logarithms of a row. */
static void log_numbers(const Exact *w, const double *m, const double *e, double *out) {
    for (int64_t j = 0; j < w->a->states; j += WIDE) {
        doubles found = logarithm_of(load_wide(m + j), 0), digit = load_wide(e + j);
        store_wide(out + j, found + choose(digit == NO_DIGIT, both(0), digit * DIGIT_LN2_HIGH + digit * DIGIT_LN2_LOW));
    }
}

/* Natural logarithms of a row in `gm`; the largest of them, or 0 where there is none. */
static double top_of_logs(const Exact *w, const double *m, const double *e) {
    doubles high = both(-__builtin_inf());
    log_numbers(w, m, e, w->gm);
    for (int64_t j = 0; j < w->a->states; j += WIDE) {
        doubles value = load_wide(w->gm + j);
        high = choose(value > high, value, high);
    }
    double top = highest_of(high);
    return top > -__builtin_inf() ? top : 0;
}

/* A kept message: natural logarithms, the largest of them near 0. */
static void keep_numbers(const Exact *w, const double *m, const double *e, real *out) {
    double top = top_of_logs(w, m, e);
    for (int64_t j = 0; j < w->a->states; j += WIDE)
        write_wide(out + j, load_wide(w->gm + j) - top, w->a->states - j);
}

/* The same of a backward message that leaves. */
static void leave_numbers(const Exact *w, const double *m, const double *e, double *out) {
    double top = top_of_logs(w, m, e);
    for (int64_t j = 0; j < w->a->states; j++) out[j] = w->gm[j] - top;
}

/* An entry over the row's sum, of which `digit` is the largest. */
INLINE double share_of(double m, double e, double sum, double digit) {
    if (sum != sum) return sum;
    return m == 0 || sum == 0 || digit - e >= 1.5 ? 0 : digit - e < 0.5 ? m / sum : m / sum / DIGIT;
}

static void finish_numbers(Exact *w, int64_t f, const double *m, const double *e) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f];
    double digit, sum = sum_of(w, m, e, &digit);
    Sum found = w->shifts[f];
    if (a->leaving) {
        log_numbers(w, m, e, w->um);
        double total = sum > 0 ? logarithm(sum) + digit * 512 * 0.69314718055994531 : sum;
        for (int64_t j = 0; j < a->states; j++) a->leaving[q * a->states + j] = w->um[j] - total;
    }
    digit += w->digits[f];
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

/* Messages become what they were times the matrix. */
static void multiply_all(Exact *w) {
    double *m = w->m, *e = w->e;
    rows_of_numbers(&w->matrix, w->count, m, e, w->scratch, w->rows, w->um, w->ue);
    w->m = w->um, w->e = w->ue, w->um = m, w->ue = e;
}

INLINE const real *p0_at(const Chain *a, int64_t q) {
    return a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member;
}

static void walk_numbers_ahead(Exact *w) {
    const Chain *a = w->a;
    double digit;
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = begun(a, w->chosen[f]), w->digits[f] = 0;
    for (int64_t step = 0; step < w->steps; step++) {
        if (step == 1 || (step > 1 && !a->one_matrix)) read_numbers(a, w->set, step, 0, &w->matrix);
        if (step > 0) multiply_all(w);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f];
            double *m = w->m + f * w->across, *e = w->e + f * w->across;
            real *shares = shares_at(a, q, step);
            if (step >= steps_of(a, q)) {
                clear_numbers(w->across, m, e);
                if (a->messages && !a->starts) clear(a->states, message_at(a, q, step));
                if (shares) clear(a->states, shares);
                continue;
            }
            if (step == 0) read_row(w, p0_at(a, q), a->p0_state, (int)a->logarithms, m, e);
            add(&w->shifts[f], emit_numbers(w, x_at(a, w->set, q, step), m, e, &digit));
            w->digits[f] += digit;
            if (a->messages) keep_numbers(w, m, e, message_at(a, q, step));
            double sum = shares ? sum_of(w, m, e, &digit) : 0;
            for (int64_t j = 0; j < a->states && shares; j++) shares[j] = (real)share_of(m[j], e[j], sum, digit);
            if (step + 1 == steps_of(a, q)) finish_numbers(w, f, m, e);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------ gradients */

/* Whether S T / sum S B of transitions are doubles, which are multiplied by P when all have been added up. */
static int plain_counts(const Exact *w) {
    int plain = !w->matrix.digits;
    for (int64_t f = 0; f < w->count; f++) {
        double weight = w->a->weight[w->chosen[f]];
        plain &= weight * weight > 0x1p-128 && weight * weight < 0x1p128;
    }
    return plain;
}

INLINE Number size_of_weight(double weight) {
    return settled(settled((Number){both(weight < 0 ? -weight : weight), both(0)}));
}

/* The states that a step enters, and their T times the weight over sum S B: in place of T, next to each other, with the
   states in `states`. How many; states that are hardly ever entered are left out. */
static int64_t share_numbers(const Exact *w, const double *entered, double weight, double sum, double digit, double *tm,
                             double *te, int64_t *states) {
    const Numbers *p = &w->matrix;
    int64_t count = 0;
    double sign = weight < 0 ? -1 : 1, least = power_of_two(-FADED); /* of S T / sum S B, or of that times P */
    if (p->digits) least = 0x1p-120;
    else if (!logs(w->a) && p->low < 1) least *= p->low;
    Number size = size_of_weight(weight);
    for (int64_t j = 0; j < p->c; j++) {
        double m = tm[j], e = te[j];
        tm[count] = m, te[count] = e, states[count] = j;
        count += !(entered[j] < least) & (m != 0);
    }
    for (int64_t k = 0; k < count; k += WIDE) {
        Number share = settled((Number){load_wide(tm + k) / sum, load_wide(te + k) - digit});
        share = settled((Number){share.m * size.m, share.e + size.e});
        store_wide(tm + k, share.m * sign), store_wide(te + k, share.e);
    }
    return count;
}

/* Adds a sequence's transitions from a block of states, of which (sm, se) are the kept messages: sums as doubles. */
static void count_block(const Exact *w, int64_t k, int64_t count, const double *sm, const double *se, const double *tm,
                        const double *te, const int64_t *states) {
    const Numbers *p = &w->matrix; /* the transpose */
    int64_t first = p->first[k / BLOCK], behind = p->behind[k / BLOCK], begin = 0;
    while (begin < count && states[begin] < first) begin++;
    while (begin < count && states[count - 1] >= behind) count--;
    if (begin == count) return;
    double level = next_digit(se, k, k + BLOCK, -NO_DIGIT);
    for (; level > NO_DIGIT; level = next_digit(se, k, k + BLOCK, level)) {
        doubles source[PARTS];
        UNROLL for (int l = 0; l < PARTS; l++) {
            int64_t at = k + l * WIDE;
            source[l] = choose(load_wide(se + at) == level, load_wide(sm + at), both(0));
        }
        for (int64_t t = begin; t < count; t++) {
            double digit = te[t] + level, *to = w->total + states[t] * p->across + k;
            if (tm[t] == tm[t] && (digit < -1.5 || digit > 1.5)) continue; /* nothing; no path */
            double share = digit == 0 ? tm[t] : digit > 0 ? tm[t] * DIGIT : tm[t] / DIGIT;
            UNROLL for (int l = 0; l < PARTS; l++)
                store_wide(to + l * WIDE, load_wide(to + l * WIDE) + share * source[l]);
        }
    }
}

/* The same of all states, with P where gradients are those of logarithms, and each product a number. */
static void count_numbers(const Exact *w, int64_t count, const double *sm, const double *se, const double *tm,
                          const double *te, const int64_t *states) {
    const Numbers *p = &w->matrix;
    int by_log = logs(w->a);
    for (int64_t t = 0; t < count; t++) {
        double *into = w->total + states[t] * p->across, size = tm[t] < 0 ? -tm[t] : tm[t];
        for (int64_t k = 0; k < p->across; k += WIDE) {
            doubles entry = load_wide(p->m + states[t] * p->across + k);
            Number found = {load_wide(sm + k) * size, load_wide(se + k) + te[t]};
            if (by_log) {
                found = settled(found);
                found.m *= entry;
                if (p->digits) found.e += load_wide(p->e + states[t] * p->across + k);
            }
            doubles value = choose((entry == 0) | (found.m == 0), both(0), value_of_number(found));
            store_wide(into + k, load_wide(into + k) + (tm[t] < 0 ? -value : value));
        }
    }
}

/* Adds what has been counted to a gradient (from, to), exactly 0 where the matrix is, or where no path is: behind all
   ends a matrix may be NaN. `times`: after a product with P. */
static void write_counted(Exact *w, int64_t step, int times) {
    const Chain *a = w->a;
    const Numbers *p = &w->matrix;
    int64_t c = a->states;
    for (int64_t k = 0; k < c * w->across; k += WIDE) {
        doubles entry = load_wide(p->m + k), found = load_wide(w->total + k);
        store_wide(w->total + k, choose((entry == 0) | (found == 0), both(0), times ? found * entry : found));
    }
    for (int64_t k = 0; k < c && a->counts; k++)
        for (int64_t j = 0; j < c; j++) a->counts[(w->set * c + k) * c + j] += w->total[j * w->across + k];
    for (int64_t k = 0; k < c && !a->counts; k += BLOCK)
        for (int64_t j = p->first[k / BLOCK]; j < p->behind[k / BLOCK]; j += BLOCK) {
            int64_t rows = c - j < BLOCK ? c - j : BLOCK, columns = c - k < BLOCK ? c - k : BLOCK;
            real tile[BLOCK * BLOCK] = {0}, turned[BLOCK * BLOCK];
            real *to = a->grad_bulk + first_count(a, w->set) + step * a->count_step + k * c + j;
            for (int64_t r = 0; r < rows * BLOCK; r += WIDE)
                write_wide(tile + r, load_wide(w->total + (j + r / BLOCK) * w->across + k + r % BLOCK), WIDE);
            UNROLL for (int r = 0; r < BLOCK; r += LANES)
                UNROLL for (int l = 0; l < BLOCK; l += LANES)
                    transpose_block(tile + r * BLOCK + l, BLOCK, turned + l * BLOCK + r, BLOCK);
            for (int64_t r = 0; r < columns; r++)
                for (int64_t l = 0; l < rows; l++) to[r * c + l] += turned[r * BLOCK + l];
        }
    for (int64_t k = 0; k < c * w->across; k++) w->total[k] = 0;
}

/* The gradient of the initial weights, from B at the first step. */
static void start_numbers(const Exact *w, int64_t f, double *bm, double *be) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], c = a->states, at = f * w->across;
    double *out = a->grad_p0 + q * c, digit;
    emit_numbers(w, x_at(a, w->set, q, 0), bm, be, &digit);
    read_row(w, p0_at(a, q), a->p0_state, (int)a->logarithms, w->am + at, w->ae + at);
    multiply_numbers(w->across, w->am + at, w->ae + at, bm, be, w->gm, w->ge);
    double sum = sum_of(w, w->gm, w->ge, &digit), weight = a->weight[q];
    Number size = size_of_weight(weight);
    for (int64_t j = 0; j < c; j++) {
        double m = logs(a) ? w->gm[j] : bm[j], e = (logs(a) ? w->ge[j] : be[j]) - digit;
        Number share = settled((Number){both(m / sum), both(e)});
        double found = value_of_number((Number){share.m * size.m, share.e + size.e})[0];
        out[j] = sum != sum ? sum : w->am[at + j] == 0 || m == 0 || sum == 0 ? 0 : weight < 0 ? -found : found;
    }
}

/* Posteriors of a sequence at a step, from what was kept and from B. Returns their sum. */
static double meet_numbers(Exact *w, int64_t f, int64_t step, const double *bm, const double *be, double *digit) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], at = f * w->across;
    real *gradient = gradient_at(a, w->set, q, step);
    read_row(w, message_at(a, q, step), 1, a->lossy[q] & 1, w->am + at, w->ae + at);
    multiply_numbers(w->across, w->am + at, w->ae + at, bm, be, w->gm, w->ge);
    double sum = sum_of(w, w->gm, w->ge, digit), over = sum == 0 ? 0 : 1 / sum;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles share = lowered(load_wide(w->gm + j), *digit - load_wide(w->ge + j)) * over;
        store_wide(w->entered + at + j, share);
        if (gradient) write_wide(gradient + j, share * a->weight[q], a->states - j);
    }
    return sum;
}

static void walk_numbers_back(Exact *w) {
    const Chain *a = w->a;
    int64_t c = a->states, counts[TOGETHER];
    int counted = (a->counts || a->grad_bulk) && w->steps > 1, plain = 0;
    for (int64_t k = 0; k < c * w->across && counted; k++) w->total[k] = 0;
    clear_numbers(w->count * w->across, w->m, w->e);
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        double digit;
        int64_t ahead = step + 1;
        if (ahead < w->steps) {
            if (!a->one_matrix || ahead + 1 == w->steps) read_numbers(a, w->set, ahead, 1, &w->matrix);
            for (int64_t f = 0; f < w->count; f++) {
                int64_t q = w->chosen[f], at = f * w->across;
                if (ahead < steps_of(a, q)) emit_numbers(w, x_at(a, w->set, q, ahead), w->m + at, w->e + at, &digit);
            }
            multiply_all(w);
            plain = plain_counts(w);
        }
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f], steps = steps_of(a, q), at = f * w->across;
            double *bm = w->m + at, *be = w->e + at;
            counts[f] = 0;
            if (step >= steps) {
                clear_numbers(w->across, bm, be);
                if (gradient_at(a, w->set, q, step) && !a->starts) clear(c, gradient_at(a, w->set, q, step));
                continue;
            }
            if (ahead == steps) {
                for (int64_t j = 0; j < w->across; j++) bm[j] = j < c, be[j] = j < c ? 0 : NO_DIGIT;
                if (a->following) read_following(w, a->following + q * c, bm, be);
            }
            for (int64_t j = 0; j < w->across; j++) w->scratch[j] = w->entered[at + j];
            double sum = meet_numbers(w, f, step, bm, be, &digit);
            if (counted && ahead < steps && ahead <= a->uncounted[q] && sum != 0)
                counts[f] = share_numbers(w, w->scratch, a->weight[q], sum, digit,
                                          w->um + at, w->ue + at, w->rows + at);
        }
        for (int64_t f = 0; f < w->count && !plain; f++) {
            int64_t at = f * w->across;
            count_numbers(w, counts[f], w->am + at, w->ae + at, w->um + at, w->ue + at, w->rows + at);
        }
        for (int64_t k = 0; k < w->across && plain; k += BLOCK)
            for (int64_t f = 0, at = 0; f < w->count; f++, at += w->across)
                count_block(w, k, counts[f], w->am + at, w->ae + at, w->um + at, w->ue + at, w->rows + at);
        if (counted && ahead < w->steps && (a->grad_bulk || step == 0)) write_counted(w, step, plain && logs(a));
    }
    for (int64_t f = 0; f < w->count && a->entering && a->leaving; f++)
        leave_numbers(w, w->m + f * w->across, w->e + f * w->across, a->leaving + w->chosen[f] * c);
    for (int64_t f = 0; f < w->count && a->grad_p0; f++)
        start_numbers(w, f, w->m + f * w->across, w->e + f * w->across);
}

INLINE int64_t together_of(const Chain *a) { return a->members < TOGETHER ? a->members : TOGETHER; }

static int64_t redo(const Chain *a, int which, void walk(Exact *)) {
    for (int64_t q = a->first; q < a->last;) {
        int64_t c = a->states, across = (c + BLOCK - 1) / BLOCK * BLOCK;
        int64_t together = together_of(a), matrix = c * across * 8, row = across * 8, rows = together * row;
        char *room = a->room;
        Exact w = {.a = a, .set = q / a->members, .across = across};
        w.chosen = take(&room, together * 8);
        for (; q < a->last && q / a->members == w.set && w.count < together; q++)
            if ((a->lossy[q] & which) && (which == 1 || (a->weight[q] != 0 && a->log_norm[q] != -__builtin_inf())))
                w.chosen[w.count++] = q;
        w.steps = a->starts ? 0 : a->steps;
        for (int64_t f = 0; f < w.count && a->starts; f++)
            if (steps_of(a, w.chosen[f]) > w.steps) w.steps = steps_of(a, w.chosen[f]);
        if (!w.count) continue;
        w.matrix = (Numbers){.c = c, .across = across, .m = take(&room, matrix), .e = take(&room, matrix),
                             .plane = take(&room, matrix), .enough = take(&room, row), .first = take(&room, across),
                             .behind = take(&room, across)};
        w.m = take(&room, rows), w.e = take(&room, rows), w.um = take(&room, rows), w.ue = take(&room, rows);
        w.am = take(&room, rows), w.ae = take(&room, rows), w.gm = take(&room, row), w.ge = take(&room, row);
        w.entered = take(&room, rows), w.scratch = take(&room, rows), w.rows = take(&room, rows);
        w.digits = take(&room, together * 8), w.shifts = take(&room, together * (int64_t)sizeof(Sum));
        w.total = take(&room, matrix);
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
    return (4 * a->states + 9 * together_of(a) + 5) * across * 8 + together_of(a) * 40 + 20 * 64;
}
