/* Rows of numbers m 2^(512 e) (number.h) times a matrix of such numbers.

       out_j = sum over k of row_k P_kj

   Entries of two neighbouring digits are added up in doubles. Most rows and matrices have no others, and take one sum
   for each column; further digits take one sum for each pair of digits, which are then added as numbers. */
#pragma once
#include "chain.h"
#include "number.h"

enum { BLOCK = 16, PARTS = BLOCK / WIDE };   /* columns that are summed together; vectors of them */
enum { CHAINS = PARTS < 8 ? 8 / PARTS : 1 }; /* independent partial sums of a column, to hide latency */

/* An array of numbers, of whole blocks. */
typedef struct { double *m, *e; } Row;

INLINE Row row_from(Row row, int64_t j) { return (Row){row.m + j, row.e + j}; }
INLINE Number load_number(Row row, int64_t j) { return (Number){load_wide(row.m + j), load_wide(row.e + j)}; }
INLINE void store_number(Row row, int64_t j, Number a) { store_wide(row.m + j, a.m), store_wide(row.e + j, a.e); }
static void clear_numbers(int64_t count, Row row) {
    for (int64_t j = 0; j < count; j++) row.m[j] = 0, row.e[j] = NO_DIGIT;
}

/* The caller's values, linear or logarithms, as numbers. */
INLINE Number number_of(doubles value, int logarithms) {
    if (logarithms) return exponential_number(value);
    value = choose(value < 0, splat_wide(__builtin_nan("")), value);
    return settled(settled((Number){value, splat_wide(0)}));
}

/* A matrix (c, across). For each block of columns, rows outside first[block] .. stop[block] - 1 are 0. A sum of at
   least enough[column] is not changed by terms two digits lower; 0 for an empty column. */
typedef struct {
    int64_t c, across;
    Row entries;
    double *plane, *enough; /* (c, across): entries of one digit; (across) */
    double low;             /* the least positive m */
    int64_t *first, *stop;
    int digits, nan;        /* some digit is not 0; some entry is NaN */
} Numbers;

INLINE int has_entries(const double *block) {
    longs nonzero = {0};
    UNROLL for (int l = 0; l < PARTS; l++) nonzero |= load_wide(block + l * WIDE) != 0;
    return any_wide(nonzero);
}

/* Sets first, stop, enough and low. */
static void find_entries(Numbers *out) {
    doubles low = splat_wide(BEYOND);
    for (int64_t j = 0; j < out->across; j += BLOCK) {
        int64_t first = 0, stop = out->c;
        while (first < stop && !has_entries(out->entries.m + first * out->across + j)) first++;
        while (first < stop && !has_entries(out->entries.m + (stop - 1) * out->across + j)) stop--;
        out->first[j / BLOCK] = first, out->stop[j / BLOCK] = stop;
        longs nonzero[PARTS] = {0};
        for (int64_t k = first; k < stop; k++)
            UNROLL for (int l = 0; l < PARTS; l++) {
                doubles entry = load_wide(out->entries.m + k * out->across + j + l * WIDE);
                nonzero[l] |= entry != 0;
                low = choose((entry > 0) & (entry < low), entry, low);
            }
        UNROLL for (int l = 0; l < PARTS; l++)
            store_wide(out->enough + j + l * WIDE, choose(nonzero[l], splat_wide(0x1p-400), splat_wide(0)));
    }
    out->low = -highest_of(-low);
}

/* Reads linear entries as numbers of digit 0; whether all are. */
INLINE int read_doubles(const real *from, int64_t row, int64_t column, Numbers *out) {
    longs far = {0};
    for (int64_t k = 0; k < out->c; k++)
        for (int64_t j = 0; j < out->across; j += WIDE) {
            doubles value = read_wide(from + k * row + j * column, column, out->c - j, 0);
            far |= ~((value == 0) | ((value >= LEAST) & (value < BEYOND)));
            store_wide(out->entries.m + k * out->across + j, value);
        }
    return !any_wide(far);
}

/* Reads entries of any size, or logarithms. */
static void read_any(const real *from, int64_t row, int64_t column, int logarithms, Numbers *out) {
    double none = logarithms ? -__builtin_inf() : 0;
    longs digits = {0}, nan = {0};
    for (int64_t k = 0; k < out->c; k++)
        for (int64_t j = 0; j < out->across; j += WIDE) {
            doubles value = read_wide(from + k * row + j * column, column, out->c - j, none);
            Number entry = number_of(value, logarithms);
            digits |= (entry.m != 0) & (entry.e != 0), nan |= entry.m != entry.m;
            store_number(out->entries, k * out->across + j, entry);
        }
    out->digits = any_wide(digits), out->nan = any_wide(nan);
}

/* The matrix into a step, or its transpose. */
static void read_numbers(const Chain *a, int64_t set, int64_t step, int transposed, Numbers *out) {
    const real *from = a->bulk + first_matrix(a, set) + (a->one_matrix ? 0 : step - 1) * a->bulk_step;
    int64_t row = transposed ? a->bulk_to : a->bulk_from, column = transposed ? a->bulk_from : a->bulk_to;
    int read = 0;
    if (!a->logarithms && column == 1) read = read_doubles(from, row, 1, out);
    else if (!a->logarithms) read = read_doubles(from, row, column, out);
    out->digits = out->nan = 0;
    if (!read) read_any(from, row, column, (int)a->logarithms, out);
    find_entries(out);
}

/* The largest digit below `below` in a matrix, or NO_DIGIT; copies its entries into the plane, others as 0. */
static double next_plane(Numbers *p, double below) {
    double digit = NO_DIGIT;
    for (int64_t k = 0; k < p->c * p->across; k++)
        if (p->entries.m[k] != 0 && p->entries.e[k] < below && p->entries.e[k] > digit) digit = p->entries.e[k];
    for (int64_t k = 0; k < p->c * p->across && digit > NO_DIGIT; k++)
        p->plane[k] = p->entries.e[k] == digit ? p->entries.m[k] : 0;
    return digit;
}

/* The largest digit below `below` in a row, from the vector of `first` to that of stop - 1. */
static double next_digit(const double *e, int64_t first, int64_t stop, double below) {
    doubles highest = splat_wide(NO_DIGIT);
    for (int64_t k = first / WIDE * WIDE; k < stop; k += WIDE) {
        doubles digit = load_wide(e + k);
        highest = choose((digit < below) & (digit > highest), digit, highest);
    }
    return highest_of(highest);
}

/* Entries of a digit and of the one below it as doubles over 2^(512 digit); others as 0. */
static void read_digits(int64_t first, int64_t stop, double digit, Row row, double *out) {
    for (int64_t k = first / WIDE * WIDE; k < stop; k += WIDE) {
        Number entry = load_number(row, k);
        doubles lower_by = digit - entry.e;
        store_wide(out + k, lowered(entry.m, choose(lower_by < -0.5, splat_wide(2), lower_by)));
    }
}

enum { EMPTY, ADJACENT, SPREAD }; /* digits of a row: none, only 0 and -1, others */

/* Adds a row times matrix entries of one digit to the block of columns j of `out`, which is 0 if `fresh`. `values`: the
   row as doubles if its kind is ADJACENT, otherwise scratch. */
static void add_block(const Numbers *p, const double *entries, double digit, int fresh, int64_t j, int64_t kind,
                      Row row, double *values, Row out) {
    int64_t first = p->first[j / BLOCK], stop = p->stop[j / BLOCK], across = p->across;
    double base = kind == ADJACENT ? 0 : next_digit(row.e, first, stop, -NO_DIGIT);
    while (base > NO_DIGIT) {
        doubles sum[CHAINS][PARTS] = {0};
        longs small = {0};
        int64_t k = first;
        if (kind != ADJACENT) read_digits(first, stop, base, row, values);
        for (; k + CHAINS <= stop && !p->digits; k += CHAINS)
            UNROLL for (int r = 0; r < CHAINS; r++)
                UNROLL for (int l = 0; l < PARTS; l++)
                    sum[r][l] += values[k + r] * load_wide(entries + (k + r) * across + j + l * WIDE);
        for (; k < stop; k++) {
            if (p->digits && values[k] == 0) continue; /* 0 times an infinite entry is no term */
            UNROLL for (int l = 0; l < PARTS; l++)
                sum[0][l] += values[k] * load_wide(entries + k * across + j + l * WIDE);
        }
        UNROLL for (int l = 0; l < PARTS; l++) {
            UNROLL for (int r = 1; r < CHAINS; r++) sum[0][l] += sum[r][l];
            small |= sum[0][l] < load_wide(p->enough + j + l * WIDE);
        }
        int more = p->digits || any_wide(small);
        UNROLL for (int l = 0; l < BLOCK; l += WIDE) {
            Number added = settled((Number){sum[0][l / WIDE], splat_wide(base + digit)});
            if (more) added = settled(added);
            if (!fresh) added = plus_number(load_number(out, j + l), added);
            store_number(out, j + l, added);
        }
        fresh = 0;
        base = more && kind != ADJACENT ? next_digit(row.e, first, stop, base - 1.5) : NO_DIGIT;
    }
}

/* out = rows (count, across) times the matrix, where the largest digit of a row is 0; by blocks of columns, which stay
   in the first-level cache. `values` (count, across) and `kinds` (count): scratch. */
static void multiply_rows(Numbers *p, int64_t count, Row rows, double *values, int64_t *kinds, Row out) {
    int64_t across = p->across;
    clear_numbers(count * across, out);
    for (int64_t f = 0; f < count; f++) {
        Row row = row_from(rows, f * across);
        double below = next_digit(row.e, 0, across, -1.5), top = next_digit(row.e, 0, across, 1);
        kinds[f] = top == NO_DIGIT ? EMPTY : below == NO_DIGIT ? ADJACENT : SPREAD;
        if (kinds[f] == ADJACENT) read_digits(0, across, 0, row, values + f * across);
    }
    const double *entries = p->digits ? p->plane : p->entries.m;
    double digit = p->digits ? next_plane(p, -NO_DIGIT) : 0;
    for (int fresh = 1; digit > NO_DIGIT; digit = p->digits ? next_plane(p, digit) : NO_DIGIT, fresh = 0)
        for (int64_t j = 0; j < across; j += BLOCK)
            for (int64_t f = 0, at = 0; f < count; f++, at += across) {
                Row row = row_from(rows, at), to = row_from(out, at);
                if (kinds[f] != EMPTY) add_block(p, entries, digit, fresh, j, kinds[f], row, values + at, to);
            }
    for (int64_t f = 0; f < count; f++) {
        Row row = row_from(out, f * across);
        for (int64_t j = 0; j < p->c && p->nan; j++) row.m[j] = __builtin_nan(""), row.e[j] = 0;
        clear_numbers(across - p->c, row_from(row, p->c)); /* padding may be NaN, of infinite entries times 0 */
    }
}

/* Multiplies a row of c states by exp(x - max x), and divides it by 2^(512 digit), its largest digit. Returns max x;
   NaN for a row with NaN, whose log Z has to be NaN even if a later step has no path. */
static double emit_numbers(int64_t c, const real *x, Row row, double *digit) {
    doubles high = splat_wide(-__builtin_inf()), low = splat_wide(__builtin_inf()), top = splat_wide(NO_DIGIT);
    longs nan = {0};
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -__builtin_inf());
        nan |= (a != a) | (load_wide(row.m + j) != load_wide(row.m + j));
        high = choose(a > high, a, high), low = choose((a < low) & (a > -__builtin_inf()), a, low);
    }
    double most = any_wide(nan) ? __builtin_nan("") : highest_of(high);
    if (most == -__builtin_inf()) most = 0;
    int near = most + highest_of(-low) <= 178;
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -__builtin_inf()) - most;
        Number emission = {choose(a == -__builtin_inf(), splat_wide(0), exponential_of(a)), splat_wide(0)};
        if (!near) emission = exponential_number(a);
        Number state = settled(times_number(load_number(row, j), emission));
        if (most != most) state.e = splat_wide(0); /* keeps NaN where the state is 0 */
        top = choose(state.e > top, state.e, top);
        store_number(row, j, state);
    }
    double taken = highest_of(top);
    *digit = taken > NO_DIGIT ? taken : 0;
    for (int64_t j = 0; j < c && *digit != 0; j += WIDE)
        store_wide(row.e + j, choose(load_wide(row.m + j) == 0, splat_wide(NO_DIGIT), load_wide(row.e + j) - taken));
    return most;
}

/* out_j = a_j b_j. */
static void multiply_numbers(int64_t across, Row a, Row b, Row out) {
    for (int64_t j = 0; j < across; j += WIDE)
        store_number(out, j, settled(times_number(load_number(a, j), load_number(b, j))));
}

/* The sum of a row over 2^(512 digit), its largest digit. */
static double sum_of(int64_t across, Row row, double *digit) {
    double top = *digit = next_digit(row.e, 0, across, -NO_DIGIT), sum = 0;
    doubles parts = {0};
    for (int64_t j = 0; j < across; j += WIDE) parts += lowered(load_wide(row.m + j), top - load_wide(row.e + j));
    UNROLL for (int l = 0; l < WIDE; l++) sum += parts[l];
    return sum;
}

/* m 2^(512 e) over a row's `sum` 2^(512 digit). */
INLINE double share_of(double m, double e, double sum, double digit) {
    if (sum != sum) return sum;
    return m == 0 || sum == 0 || digit - e >= 1.5 ? 0 : digit - e < 0.5 ? m / sum : m / sum / DIGIT;
}

/* Natural logarithms of a row of c states; returns the largest, 0 if all are -inf. */
static double log_numbers(int64_t c, Row row, double *out) {
    doubles high = splat_wide(-__builtin_inf());
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles logs = logarithm_of(load_wide(row.m + j), 0), digit = load_wide(row.e + j);
        logs += choose(digit == NO_DIGIT, splat_wide(0), digit * DIGIT_LN2_HIGH + digit * DIGIT_LN2_LOW);
        high = choose(logs > high, logs, high);
        store_wide(out + j, logs);
    }
    double top = highest_of(high);
    return top > -__builtin_inf() ? top : 0;
}
