/* Passes over rows of messages between matrix products that the caller makes: chains whose matrices are products of
   factors, see products.py.

   Forward, from the sums U = S P of a step, with E, k and the scale of step.h:

       S = U E 2^(TOP - k)

   Backward, from B = P T of the step behind, for rows with a possible path:

       posterior = S B / sum S B        T = B E 2^(TOP - k) 2^SPARE / sum S B where S > 0, and 0 elsewhere

   so that sum U T = 2^SPARE in each step. What T and B lose by underflow is then below 2^-54 of the posterior, and no
   test is needed backward. Forward, a factor's entries are at most some power of two, and logarithms are raised like
   emissions are. A message with raised emissions, and factors with raised entries, add at most 2^(TOP - DEEPEST) bound
   GUARD bits below a sum above TRUSTED bound; `bound` is the largest sum of S P for S = 1, over the number of terms in
   a path. A sum of 0 means no path unless products of small entries underflowed: the caller is told, and `verify`
   compares S with the states that sums of zeros and ones reach. */
#pragma once
#include "step.h"

enum { LOSSY = 1, NO_SUMS = 2, UNVERIFIED = 4 }; /* bits of marks: redo; all sums are 0; some are, and may be wrong */

typedef struct {
    int64_t first, last;            /* the rows of this thread */
    int64_t step, steps, rows, states, members; /* rows: of all sequences; members: of a set */
    const real *x;                  /* row q of a step lies at x_at[q] + step x_step; its entries are contiguous */
    const int64_t *x_at;
    int64_t x_step;
    const int64_t *ends;            /* (rows): number of steps of each sequence; null for `steps` */
    const real *p0;                 /* entries p0_state apart, from p0_at[q] on */
    const int64_t *p0_at;
    int64_t p0_state, logarithms;
    const real *sums;               /* U or B without what the diagonal adds, of sequences by `together`:
                                       (groups, blocks, together, states / blocks) */
    int64_t blocks, together;
    const real *before;             /* (rows, c): what the diagonal multiplies: S of the step before, T of that behind */
    const real *diagonal;           /* (sets, c), `diagonal_set` apart; or null */
    int64_t diagonal_set;
    const double *bounds, *shifts;  /* (sets): see above; P is exp(shift) 2^exponent times the factors' product */
    const int64_t *exponents;
    real *state;                    /* (rows, c): S */
    real *scales;                   /* (2, rows): max x, and 2^(TOP - k) */
    Sum *taken;                     /* (rows): logarithms taken out of messages */
    int64_t *taken_exponents;       /* (rows): powers of two taken out of them */
    uint8_t *marks;                 /* (rows): bits, see above */
    double *log_norm;               /* (rows) */
    const uint8_t *live;            /* (rows): backward: whether a row has gradients */
    const double *weight;           /* (rows): factor of posteriors */
    const double *count_weight;     /* (rows): factor of counts of the diagonal */
    real *source;                   /* (rows, c): T; or null */
    real *grad_x;                   /* posteriors times weight, at grad_at[q] + step grad_step; or null */
    const int64_t *grad_at;
    int64_t grad_step;
    real *grad_diagonal;            /* (counted_sets, c), all or 1: this thread's sum of count_weight S T; or null */
    int64_t counted_sets;
    real *room;                     /* scratch of this thread, in whole vectors */
} Pass;

INLINE int64_t end_of(const Pass *a, int64_t q) { return a->ends ? a->ends[q] : a->steps; }
INLINE const real *x_of(const Pass *a, int64_t q) { return a->x + a->x_at[q] + a->step * a->x_step; }

/* A vector from entry j of c on; lanes beyond are `fill`, or are not stored. */
INLINE reals vector_at(const real *row, int64_t j, int64_t c, real fill) {
    return j + LANES <= c ? load(row + j) : load_some(row + j, 1, c - j, fill);
}
INLINE void put_vector(real *row, int64_t j, int64_t c, reals a) {
    if (j + LANES <= c) store(row + j, a);
    else store_some(row + j, a, c - j);
}

/* One block of a row of `sums`. */
INLINE const real *part_of(const Pass *a, int64_t q, int64_t block) {
    int64_t group = q / a->together, member = q % a->together;
    return a->sums + ((group * a->blocks + block) * a->together + member) * (a->states / a->blocks);
}

/* A row of `sums` in room, plus the diagonal's; lanes beyond c repeat the first sum. */
static real *sums_of(const Pass *a, int64_t q) {
    int64_t c = a->states, part = c / a->blocks;
    real *room = a->room;
    for (int64_t block = 0; block < a->blocks; block++) {
        const real *from = part_of(a, q, block);
        real *to = room + block * part;
        if (part < LANES) for (int64_t j = 0; j < part; j++) to[j] = from[j];
        else for (int64_t k = 0; k < vectors_of(part); k++) store(to + start_of(k, part), load(from + start_of(k, part)));
    }
    if (a->diagonal) {
        const real *before = a->before + q * c, *diagonal = a->diagonal + q / a->members * a->diagonal_set;
        for (int64_t j = 0; j < c; j += LANES)
            store(room + j, load(room + j) + vector_at(before, j, c, 0) * vector_at(diagonal, j, c, 0));
    }
    for (int64_t j = c; j < padded(c); j++) room[j] = room[0];
    return room;
}

/* ------------------------------------------------------------------------------------------------------- forward */

/* Marks a row that has a positive sum below `limit`, or none that is finite, or a sum of 0. */
static void mark_row(const Pass *a, int64_t q, const real *sums, real limit, whole most) {
    wholes small = {0}, zero = {0};
    for (int64_t j = 0; j < a->states; j += LANES) {
        reals u = load(sums + j);
        zero |= u == 0, small |= (u != 0) & ~(u >= limit);
    }
    uint8_t *mark = a->marks + q;
    if (most >= bits_of(INFINITE) || !(limit < INFINITE) || any(small)) *mark |= LOSSY;
    else if (any(zero) && !(*mark & NO_SUMS)) *mark |= UNVERIFIED;
    if (most == 0) *mark |= NO_SUMS;
}

/* S of a row from its sums, which are at least `limit` or 0; P is exp(shift) 2^exponent times what made them. */
static void weigh_row(const Pass *a, int64_t q, const real *sums, real limit, double shift, int64_t exponent) {
    int64_t c = a->states;
    const real *x = x_of(a, q);
    real *state = a->state + q * c;
    reals high = splat(-INFINITE);
    wholes low = (wholes)load(sums), tall = low;
    for (int64_t j = 0; j < c; j += LANES) {
        wholes bits = (wholes)load(sums + j);
        high = larger(high, vector_at(x, j, c, -INFINITE));
        low = smaller_whole(low, bits), tall = larger_whole(tall, bits);
    }
    real top = largest(high);
    whole most = highest(tall);
    if (top == -INFINITE) top = 0;
    if (!(lowest(low) >= bits_of(limit)) || most >= bits_of(INFINITE)) mark_row(a, q, sums, limit, most);
    if (a->marks[q] & LOSSY) return clear(c, state);
    int64_t k = exponent_of(most);
    real factor = scale_to_top(k);
    for (int64_t j = 0; j < c; j += LANES) {
        reals emission = exponential(vector_at(x, j, c, -INFINITE) - top, NO_TAIL);
        put_vector(state, j, c, load(sums + j) * factor * emission);
    }
    a->scales[q] = top, a->scales[a->rows + q] = factor;
    add(a->taken + q, (double)top), add(a->taken + q, shift);
    a->taken_exponents[q] += exponent + k - TOP;
}

/* How many rows of a thread have sums of 0 that may be wrong. */
INLINE int64_t unverified_rows(const Pass *a) {
    int64_t count = 0;
    for (int64_t q = a->first; q < a->last; q++) count += (a->marks[q] & UNVERIFIED) != 0;
    return count;
}

/* S of step 0, from p0. */
EXPORT int64_t EXPORTED(logchain_enter_rows)(const Pass *a) {
    for (int64_t q = a->first; q < a->last; q++) {
        int64_t exponent, c = a->states;
        double shift;
        int lost = start_row(c, padded(c), a->p0 + a->p0_at[q], a->p0_state, (int)a->logarithms, a->room, &exponent,
                             &shift);
        a->taken[q] = (Sum){0, 0}, a->taken_exponents[q] = 0;
        a->marks[q] = lost ? LOSSY : 0;
        for (int64_t j = c; j < padded(c); j++) a->room[j] = a->room[0];
        weigh_row(a, q, a->room, power_of_two(1 - BIAS), shift, exponent);
        a->marks[q] &= ~UNVERIFIED; /* the sums are p0 itself */
    }
    return 0;
}

/* S of a later step; how many rows have to be verified. */
EXPORT int64_t EXPORTED(logchain_weigh_rows)(const Pass *a) {
    for (int64_t q = a->first; q < a->last; q++) {
        int64_t set = q / a->members;
        double limit = (double)TRUSTED * a->bounds[set];
        if (limit < (double)SHALLOW) limit = (double)SHALLOW;
        if (end_of(a, q) <= a->step || (a->marks[q] & LOSSY)) clear(a->states, a->state + q * a->states);
        else weigh_row(a, q, sums_of(a, q), (real)limit, a->shifts[set], a->exponents[set]);
    }
    return unverified_rows(a);
}

/* Marks rows to be verified whose S is 0 at a state that is reached; `sums` and `before` are of zeros and ones. */
EXPORT int64_t EXPORTED(logchain_verify_rows)(const Pass *a) {
    int64_t c = a->states;
    for (int64_t q = a->first; q < a->last; q++) {
        if (!(a->marks[q] & UNVERIFIED)) continue;
        const real *x = x_of(a, q), *state = a->state + q * c, *reached = sums_of(a, q);
        wholes lost = {0};
        for (int64_t j = 0; j < c; j += LANES)
            lost |= (load(reached + j) > 0) & (vector_at(state, j, c, 1) == 0) &
                    (vector_at(x, j, c, -INFINITE) != -INFINITE);
        a->marks[q] &= ~UNVERIFIED;
        if (!any(lost)) continue;
        a->marks[q] |= LOSSY;
        clear(c, a->state + q * c);
    }
    return 0;
}

/* log Z of rows whose last step this is. */
EXPORT int64_t EXPORTED(logchain_finish_rows)(const Pass *a) {
    int64_t c = a->states, exponent;
    for (int64_t q = a->first; q < a->last; q++) {
        if (end_of(a, q) != a->step + 1 || (a->marks[q] & LOSSY)) continue;
        double sum = 0;
        for (int64_t j = 0; j < c; j++) sum += (double)a->state[q * c + j];
        Sum log_norm = a->taken[q];
        double part = mantissa(sum, &exponent);
        /* raised emissions add at most c 2^(TOP - DEEPEST) */
        if (sum != 0 && !(sum >= (double)TRUSTED * (double)c && sum < __builtin_inf())) a->marks[q] |= LOSSY;
        add_exponent(&log_norm, a->taken_exponents[q] + exponent);
        add(&log_norm, logarithm(part));
        a->log_norm[q] = sum == 0 ? -__builtin_inf() : value_of(log_norm);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ backward */

/* B of a row, the sum of S B; adds S T of the step behind to the diagonal's counts. */
static real *backward_row(const Pass *a, int64_t q, int enters, double *sum) {
    int64_t c = a->states, set = q / a->members;
    const real *state = a->state + q * c;
    real *row = a->room;
    reals terms = {0};
    if (enters) for (int64_t j = 0; j < padded(c); j++) row[j] = power_of_two(-TOP);
    else row = sums_of(a, q);
    for (int64_t j = 0; j < c; j += LANES) terms += vector_at(state, j, c, 0) * load(row + j);
    *sum = (double)total(terms);
    if (!enters && a->grad_diagonal) {
        const real *behind = a->before + q * c;
        real *counts = a->grad_diagonal + (a->counted_sets > 1 ? set : 0) * c, weight = (real)a->count_weight[q];
        for (int64_t j = 0; j < c; j += LANES) {
            reals count = vector_at(state, j, c, 0) * vector_at(behind, j, c, 0) * weight;
            put_vector(counts, j, c, vector_at(counts, j, c, 0) + count);
        }
    }
    return row;
}

/* The least T that is not flushed, by the scale 2^(TOP - k) of the step: times a U of at most 2^k it is 2^-GUARD / 256 of
   sum U T. Products of T with factors, which torch computes, are hence seldom denormal. */
INLINE real least_kept_source(real scale) {
    real least = scale * power_of_two(SPARE - GUARD - 8 - TOP), normal = power_of_two(1 - BIAS);
    return least > normal ? least : normal;
}

/* Posteriors of a row, and T. */
static void meet_row(const Pass *a, int64_t q, const real *row, double sum) {
    int64_t c = a->states;
    const real *x = x_of(a, q), *state = a->state + q * c;
    real top = a->scales[q], factor = a->scales[a->rows + q], share = (real)(1 / sum);
    real weight = (real)a->weight[q], *source = a->source ? a->source + q * c : 0, least = least_kept_source(factor);
    real *posterior = a->grad_x ? a->grad_x + a->grad_at[q] + a->step * a->grad_step : 0;
    for (int64_t j = 0; j < c; j += LANES) {
        reals s = vector_at(state, j, c, 0), b = load(row + j) * share;
        if (posterior) put_vector(posterior, j, c, s * b * weight);
        if (!source) continue;
        reals emission = exponential(vector_at(x, j, c, -INFINITE) - top, NO_TAIL);
        reals entry = b * power_of_two(SPARE) * (emission * factor);
        put_vector(source, j, c, where((s > 0) & (entry >= least), entry, (reals){0}));
    }
}

/* Posteriors and T of a step; how many rows turned out to be lossy. */
EXPORT int64_t EXPORTED(logchain_meet_rows)(const Pass *a) {
    int64_t c = a->states, lost = 0;
    for (int64_t q = a->first; q < a->last; q++) {
        int64_t end = end_of(a, q);
        int inside = a->live[q] && end > a->step, enters = end == a->step + 1;
        double sum = 0;
        real *row = inside ? backward_row(a, q, enters, &sum) : 0;
        /* it is 2^SPARE, but for roundings, where nothing overflowed */
        int fine = enters ? sum > 0 : sum > (double)power_of_two(SPARE - 4) && sum < (double)power_of_two(SPARE + 4);
        if (inside && fine) {
            meet_row(a, q, row, sum);
            continue;
        }
        if (inside) a->marks[q] |= LOSSY, lost++;
        if (a->source) clear(c, a->source + q * c);
        if (a->grad_x) clear(c, a->grad_x + a->grad_at[q] + a->step * a->grad_step);
    }
    return lost;
}

/* ----------------------------------------------------------------------------------------------- layout, factors */

/* Rows of sums as (part, blocks) in `state`. */
EXPORT int64_t EXPORTED(logchain_turn_rows)(const Pass *a) {
    int64_t blocks = a->blocks, part = a->states / blocks, apart = a->together * part;
    for (int64_t q = a->first; q < a->last; q++) {
        const real *from = part_of(a, q, 0);
        real *to = a->state + q * a->states;
        if (blocks >= LANES && part >= LANES)
            for (int64_t i = 0; i < vectors_of(blocks); i++)
                for (int64_t k = 0; k < vectors_of(part); k++) {
                    int64_t block = start_of(i, blocks), j = start_of(k, part);
                    transpose_block(from + block * apart + j, apart, to + j * blocks + block, blocks);
                }
        else
            for (int64_t block = 0; block < blocks; block++)
                for (int64_t j = 0; j < part; j++) to[j * blocks + block] = from[block * apart + j];
    }
    return 0;
}

/* exp(logarithm - shift) of factors, in place in `state`; shifts are floats. */
EXPORT int64_t EXPORTED(logchain_exponentiate_rows)(const Pass *a) {
    int64_t c = a->states;
    for (int64_t q = a->first; q < a->last; q++) {
        real *row = a->state + q * c, most = (real)a->shifts[q / a->members];
        for (int64_t j = 0; j < c; j += LANES)
            put_vector(row, j, c, exponential_of_difference(vector_at(row, j, c, -INFINITE), most));
    }
    return 0;
}
