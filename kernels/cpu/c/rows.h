/* Rows of numbers (number.h) times a matrix of numbers: a sum for each two digits that a row has, for most rows one. */
#pragma once
#include "chain.h"
#include "number.h"

enum { BLOCK = 16, PARTS = BLOCK / WIDE };   /* columns that are summed together, and their vectors */
enum { CHAINS = PARTS < 8 ? 8 / PARTS : 1 }; /* sums of a column that do not wait for each other */

/* Numbers next to each other, in whole blocks. */
typedef struct { double *m, *e; } Row;

INLINE Row row_from(Row row, int64_t j) { return (Row){row.m + j, row.e + j}; }
INLINE Number load_number(Row row, int64_t j) { return (Number){load_wide(row.m + j), load_wide(row.e + j)}; }
INLINE void store_number(Row row, int64_t j, Number a) { store_wide(row.m + j, a.m), store_wide(row.e + j, a.e); }
static void clear_numbers(int64_t count, Row row) {
    for (int64_t j = 0; j < count; j++) row.m[j] = 0, row.e[j] = NO_DIGIT;
}

/* Values of the caller's, linear or logarithms, as numbers. */
INLINE Number number_of(doubles value, int logarithms) {
    return logarithms ? exponential_number(value) : settled(settled((Number){value, both(0)}));
}

/* A matrix (c, across). For each block of columns, the rows from first[block] to before behind[block] have entries
   there. Sums of a column from `enough` (0 where it has no entry) are not touched by what lies two digits lower. */
typedef struct {
    int64_t c, across;
    Row all;
    double *plane, *enough; /* (c, across): entries of one digit */
    double low;             /* no positive entry is less */
    int64_t *first, *behind;
    int digits, nan;        /* a digit is other than 0; an entry is NaN */
} Numbers;

INLINE int has_entries(const double *block) {
    longs nonzero = {0};
    UNROLL for (int l = 0; l < PARTS; l++) nonzero |= load_wide(block + l * WIDE) != 0;
    return some(nonzero);
}

/* Where columns have entries, of numbers that have been read. */
static void find_entries(Numbers *out) {
    doubles low = both(BEYOND);
    for (int64_t j = 0; j < out->across; j += BLOCK) {
        int64_t first = 0, behind = out->c;
        while (first < behind && !has_entries(out->all.m + first * out->across + j)) first++;
        while (first < behind && !has_entries(out->all.m + (behind - 1) * out->across + j)) behind--;
        out->first[j / BLOCK] = first, out->behind[j / BLOCK] = behind;
        longs nonzero[PARTS] = {0};
        for (int64_t k = first; k < behind; k++)
            UNROLL for (int l = 0; l < PARTS; l++) {
                doubles entry = load_wide(out->all.m + k * out->across + j + l * WIDE);
                nonzero[l] |= entry != 0;
                low = choose((entry > 0) & (entry < low), entry, low);
            }
        UNROLL for (int l = 0; l < PARTS; l++)
            store_wide(out->enough + j + l * WIDE, choose(nonzero[l], both(0x1p-400), both(0)));
    }
    out->low = -highest_of(-low);
}

/* Linear entries as doubles, whose digits are 0; whether all are numbers so. */
INLINE int read_doubles(const real *from, int64_t row, int64_t column, Numbers *out) {
    longs far = {0};
    for (int64_t k = 0; k < out->c; k++)
        for (int64_t j = 0; j < out->across; j += WIDE) {
            doubles value = read_wide(from + k * row + j * column, column, out->c - j, 0);
            far |= ~((value == 0) | ((value >= LEAST) & (value < BEYOND)));
            store_wide(out->all.m + k * out->across + j, value);
        }
    return !some(far);
}

/* Entries of any size, or logarithms, as numbers. */
static void read_any(const real *from, int64_t row, int64_t column, int logarithms, Numbers *out) {
    double none = logarithms ? -__builtin_inf() : 0;
    longs digits = {0}, nan = {0};
    for (int64_t k = 0; k < out->c; k++)
        for (int64_t j = 0; j < out->across; j += WIDE) {
            doubles value = read_wide(from + k * row + j * column, column, out->c - j, none);
            Number entry = number_of(value, logarithms);
            digits |= (entry.m != 0) & (entry.e != 0), nan |= entry.m != entry.m;
            store_number(out->all, k * out->across + j, entry);
        }
    out->digits = some(digits), out->nan = some(nan);
}

/* The matrix into a step, or its transpose. */
static void read_numbers(const Chain *a, int64_t set, int64_t step, int turned, Numbers *out) {
    const real *from = a->bulk + first_matrix(a, set) + (a->one_matrix ? 0 : step - 1) * a->bulk_step;
    int64_t row = turned ? a->bulk_to : a->bulk_from, column = turned ? a->bulk_from : a->bulk_to;
    int read = 0;
    if (!a->logarithms && column == 1) read = read_doubles(from, row, 1, out);
    else if (!a->logarithms) read = read_doubles(from, row, column, out);
    out->digits = out->nan = 0;
    if (!read) read_any(from, row, column, (int)a->logarithms, out);
    find_entries(out);
}

/* The largest digit below `below` of a matrix's entries, which become the plane; NO_DIGIT for none. */
static double next_plane(Numbers *p, double below) {
    double digit = NO_DIGIT;
    for (int64_t k = 0; k < p->c * p->across; k++)
        if (p->all.m[k] != 0 && p->all.e[k] < below && p->all.e[k] > digit) digit = p->all.e[k];
    for (int64_t k = 0; k < p->c * p->across && digit > NO_DIGIT; k++)
        p->plane[k] = p->all.e[k] == digit ? p->all.m[k] : 0;
    return digit;
}

/* The largest digit below `below` of a row's entries from `first` to before `behind`, and of some beside them. */
static double next_digit(const double *e, int64_t first, int64_t behind, double below) {
    doubles highest = both(NO_DIGIT);
    for (int64_t k = first / WIDE * WIDE; k < behind; k += WIDE) {
        doubles digit = load_wide(e + k);
        highest = choose((digit < below) & (digit > highest), digit, highest);
    }
    return highest_of(highest);
}

/* Entries of a digit, and of the one below it, as doubles; 0 for others. */
static void read_digits(int64_t first, int64_t behind, double digit, Row row, double *out) {
    for (int64_t k = first / WIDE * WIDE; k < behind; k += WIDE) {
        Number entry = load_number(row, k);
        doubles ahead = digit - entry.e;
        store_wide(out + k, lowered(entry.m, choose(ahead < -0.5, both(2), ahead)));
    }
}

enum { NOTHING, WHOLE, PARTED }; /* a row: without entries, with digits 0 and -1 alone, with others */

/* Adds to a block of columns j of a row, which is 0 if `fresh`, what a row times entries of one digit is. `values`: of
   a row that is whole, its entries as doubles; otherwise scratch. */
static void add_block(const Numbers *p, const double *entries, double digit, int fresh, int64_t j, int64_t kind,
                      Row row, double *values, Row out) {
    int64_t first = p->first[j / BLOCK], behind = p->behind[j / BLOCK], across = p->across;
    double base = kind == WHOLE ? 0 : next_digit(row.e, first, behind, -NO_DIGIT);
    while (base > NO_DIGIT) {
        doubles sum[CHAINS][PARTS] = {0};
        longs small = {0};
        int64_t k = first;
        if (kind != WHOLE) read_digits(first, behind, base, row, values);
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
        int more = p->digits || some(small);
        UNROLL for (int l = 0; l < BLOCK; l += WIDE) {
            Number added = settled((Number){sum[0][l / WIDE], both(base + digit)});
            if (more) added = settled(added);
            if (!fresh) added = plus_number(load_number(out, j + l), added);
            store_number(out, j + l, added);
        }
        fresh = 0;
        base = more && kind != WHOLE ? next_digit(row.e, first, behind, base - 1.5) : NO_DIGIT;
    }
}

/* Rows (count, across), of which 0 is the largest digit, times the matrix: block by block of it, which then stays in
   the first-level cache. `values` (count, across) and `kinds` (count): scratch. */
static void multiply_rows(Numbers *p, int64_t count, Row rows, double *values, int64_t *kinds, Row out) {
    int64_t across = p->across;
    clear_numbers(count * across, out);
    for (int64_t f = 0; f < count; f++) {
        Row row = row_from(rows, f * across);
        double below = next_digit(row.e, 0, across, -1.5), top = next_digit(row.e, 0, across, 1);
        kinds[f] = top == NO_DIGIT ? NOTHING : below == NO_DIGIT ? WHOLE : PARTED;
        if (kinds[f] == WHOLE) read_digits(0, across, 0, row, values + f * across);
    }
    const double *entries = p->digits ? p->plane : p->all.m;
    double digit = p->digits ? next_plane(p, -NO_DIGIT) : 0;
    for (int fresh = 1; digit > NO_DIGIT; digit = p->digits ? next_plane(p, digit) : NO_DIGIT, fresh = 0)
        for (int64_t j = 0; j < across; j += BLOCK)
            for (int64_t f = 0, at = 0; f < count; f++, at += across) {
                Row row = row_from(rows, at), to = row_from(out, at);
                if (kinds[f] != NOTHING) add_block(p, entries, digit, fresh, j, kinds[f], row, values + at, to);
            }
    for (int64_t f = 0; f < count; f++) {
        Row row = row_from(out, f * across);
        for (int64_t j = 0; j < p->c && p->nan; j++) row.m[j] = __builtin_nan(""), row.e[j] = 0;
        clear_numbers(across - p->c, row_from(row, p->c)); /* infinite entries times 0 */
    }
}

/* exp(x - max x) times a row of c states, in place; the row's largest digit is taken out. Returns max x, and NaN of a
   row with a NaN: what has been taken out keeps it, for a step without a path may follow. */
static double emit_numbers(int64_t c, const real *x, Row row, double *digit) {
    doubles high = both(-__builtin_inf()), low = both(__builtin_inf()), top = both(NO_DIGIT);
    longs nan = {0};
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -__builtin_inf());
        nan |= (a != a) | (load_wide(row.m + j) != load_wide(row.m + j));
        high = choose(a > high, a, high), low = choose((a < low) & (a > -__builtin_inf()), a, low);
    }
    double most = some(nan) ? __builtin_nan("") : highest_of(high);
    if (most == -__builtin_inf()) most = 0;
    int near = most + highest_of(-low) <= 178;
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -__builtin_inf()) - most;
        Number emission = {choose(a == -__builtin_inf(), both(0), exponential_of(a)), both(0)};
        if (!near) emission = exponential_number(a);
        Number state = settled(times_number(load_number(row, j), emission));
        if (most != most) state.e = both(0); /* 0 times a NaN counts */
        top = choose(state.e > top, state.e, top);
        store_number(row, j, state);
    }
    double taken = highest_of(top);
    *digit = taken > NO_DIGIT ? taken : 0;
    for (int64_t j = 0; j < c && *digit != 0; j += WIDE)
        store_wide(row.e + j, choose(load_wide(row.m + j) == 0, both(NO_DIGIT), load_wide(row.e + j) - taken));
    return most;
}

/* Rows of numbers, entry by entry. */
static void multiply_numbers(int64_t across, Row a, Row b, Row out) {
    for (int64_t j = 0; j < across; j += WIDE)
        store_number(out, j, settled(times_number(load_number(a, j), load_number(b, j))));
}

/* The sum of a row over its largest digit. */
static double sum_of(int64_t across, Row row, double *digit) {
    double top = *digit = next_digit(row.e, 0, across, -NO_DIGIT), sum = 0;
    doubles parts = {0};
    for (int64_t j = 0; j < across; j += WIDE) parts += lowered(load_wide(row.m + j), top - load_wide(row.e + j));
    UNROLL for (int l = 0; l < WIDE; l++) sum += parts[l];
    return sum;
}

/* An entry over the row's sum, of which `digit` is the largest. */
INLINE double share_of(double m, double e, double sum, double digit) {
    if (sum != sum) return sum;
    return m == 0 || sum == 0 || digit - e >= 1.5 ? 0 : digit - e < 0.5 ? m / sum : m / sum / DIGIT;
}

/* Natural logarithms of a row of c states; the largest of them, or 0 where there is none. */
static double log_numbers(int64_t c, Row row, double *out) {
    doubles high = both(-__builtin_inf());
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles logs = logarithm_of(load_wide(row.m + j), 0), digit = load_wide(row.e + j);
        logs += choose(digit == NO_DIGIT, both(0), digit * DIGIT_LN2_HIGH + digit * DIGIT_LN2_LOW);
        high = choose(logs > high, logs, high);
        store_wide(out + j, logs);
    }
    double top = highest_of(high);
    return top > -__builtin_inf() ? top : 0;
}
