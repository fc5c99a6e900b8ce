/* One sequence of few states, its message in registers: the steps, ahead and back, that ask for no care. One that does
   is left to the loops of forward.h and backward.h, which say what is believed and why.

   A row is `vectors` registers, of which the last overlaps the one before it. It is `narrow` where it has fewer states
   than a register: then what lies behind it is read along, and taken out again. */
#pragma once
#include "step.h"

enum { FEW = 4 * LANES < 16 ? 4 * LANES : 16, MOST_VECTORS = (FEW + LANES - 1) / LANES };

typedef struct {
    int64_t c;
    const real *x;                         /* of step 0 */
    const real *entries;                   /* the matrix into step 1, or the one of all steps */
    const real *turned;                    /* its transpose, rows one after the other, where all steps have one */
    real *messages;                        /* of step 0; null where they are not kept */
    real *gradient;                        /* of x at step 0, or null */
    real *outer;                           /* gradient of the matrix into step 1, or null */
    real *held_ahead, *held_source;        /* rows (HELD, width) that are to be multiplied, or null */
    int64_t x_step, row, entries_step, message_step, gradient_step, outer_step, held, most_held;
    real limits[2];                        /* of sums that are believed; the second, where an emission was raised */
    int one, zeros, by_log;                /* all steps have one matrix; sums may be 0; gradients are of logarithms */
    real state[MOST_VECTORS * LANES];      /* S of the step before, or B of this one */
    int deep;                              /* the last emission was raised */
    double matrix_shift;
    int64_t matrix_exponent, exponent;
    Sum shift;
    real weight, source_weight, unshare;   /* of posteriors, of sources, and what makes transitions of those */
} Lone;

INLINE int64_t offset(const int vectors, int v, int64_t end) { return v + 1 < vectors ? v * LANES : end; }
INLINE wholes lanes(void) {
    wholes found = {0};
    UNROLL for (int j = 0; j < LANES; j++) found[j] = j;
    return found;
}

/* Rows of c entries, and where the last vector of one begins. */
INLINE int64_t end_of(const int narrow, int64_t c) { return narrow ? 0 : c - LANES; }
INLINE void read(const int vectors, const int narrow, int64_t c, const real *from, real rest, reals *row) {
    UNROLL for (int v = 0; v < vectors; v++) row[v] = load(from + offset(vectors, v, end_of(narrow, c)));
    if (narrow) row[0] = where(lanes() < (whole)c, row[0], all(rest));
}
INLINE void write(const int vectors, const int narrow, int64_t c, const reals *row, real *to) {
    if (!narrow) UNROLL for (int v = 0; v < vectors; v++) store(to + offset(vectors, v, c - LANES), row[v]);
    else {
        int64_t done = 0;
        UNROLL for (int part = LANES / 2; part > 0; part /= 2)
            if (c & part) {
                __builtin_memcpy(to + done, (const real *)row + done, (uint64_t)part * sizeof(real));
                done += part;
            }
    }
}

/* exp(x - max x), max x, and whether any was raised. */
INLINE int emissions(const int vectors, const int narrow, int64_t c, const real *x, reals *out, real *shift) {
    reals row[MOST_VECTORS];
    read(vectors, narrow, c, x, -INFINITE, row);
    reals top = row[vectors - 1];
    UNROLL for (int v = 0; v + 1 < vectors; v++) top = larger(top, row[v]);
    FOLDED(top, larger);
    top = where(top == -INFINITE, (reals){0}, top);
    wholes raised = {0};
    UNROLL for (int v = 0; v < vectors; v++) {
        reals a = row[v] - top;
        out[v] = exponential(a, (reals){0});
        raised |= (a < LOG_DEEPEST) & (a > -INFINITE);
    }
    *shift = top[0];
    return any(raised);
}

/* A row times a matrix: four sums that do not wait for each other. */
INLINE void times(const int vectors, int64_t c, int64_t end, const real *a, const real *entries, int64_t row,
                  reals *out) {
    reals sum[4][MOST_VECTORS] = {0};
    int64_t k = 0;
    for (; k + 4 <= c; k += 4)
        UNROLL for (int part = 0; part < 4; part++)
            UNROLL for (int v = 0; v < vectors; v++)
                sum[part][v] += a[k + part] * load(entries + (k + part) * row + offset(vectors, v, end));
    for (; k < c; k++)
        UNROLL for (int v = 0; v < vectors; v++) sum[0][v] += a[k] * load(entries + k * row + offset(vectors, v, end));
    UNROLL for (int v = 0; v < vectors; v++) out[v] = (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]);
}

/* A row times the transpose of a matrix, `once` being 0 for the lanes that two vectors share. */
INLINE void times_transposed(const int vectors, const int narrow, int64_t c, reals once, const reals *a,
                             const real *entries, int64_t row, reals *out) {
    int64_t end = end_of(narrow, c);
    UNROLL for (int block = 0; block < vectors; block++) {
        reals sum[LANES];
        UNROLL for (int r = 0; r < LANES; r++) {
            sum[r] = (reals){0};
            if (narrow && r >= c) continue;
            UNROLL for (int v = 0; v < vectors; v++) {
                reals b = load(entries + (offset(vectors, block, end) + r) * row + offset(vectors, v, end));
                if (narrow) b = where(lanes() < (whole)c, b, (reals){0});
                sum[r] += (v + 1 < vectors ? a[v] : a[v] * once) * b;
            }
        }
        out[block] = total_of_each(sum);
    }
}

/* The bits of a row's largest sum, in all lanes, if all sums are believed; 0 otherwise. */
INLINE wholes believed(const int vectors, const int narrow, const Lone *l, int deep, reals *sums) {
    wholes zeros = l->zeros ? (wholes){0} - 1 : (wholes){0}, bad = {0}, most = {0}, within = lanes() < (whole)l->c;
    reals limit = narrow ? where(within, all(l->limits[deep]), (reals){0}) : all(l->limits[deep]);
    UNROLL for (int v = 0; v < vectors; v++) {
        if (narrow) sums[v] = where(within, sums[v], (reals){0});
        bad |= (~(sums[v] >= limit) & ~((sums[v] == 0) & zeros)) | ~(sums[v] < INFINITE);
        most = higher(most, (wholes)sums[v]);
    }
    FOLDED(most, higher);
    return any(bad) ? (wholes){0} : most;
}

/* 2^(TOP - k) for largest sums in [1/2, 1) 2^k that are believed. */
INLINE reals to_top(wholes most) {
    naturals exponent = (naturals)most & ((natural)(2 * BIAS + 1) << FRACTION);
    return (reals)(((naturals){0} + ((natural)(TOP + 2 * BIAS - 1) << FRACTION)) - exponent);
}

/* Steps ahead from `step` to before `behind`; the first that was not taken. */
INLINE int64_t stride_ahead(const int vectors, const int narrow, const int one, Lone *l, int64_t step, int64_t behind) {
    int64_t c = l->c, end = end_of(narrow, c), exponent = l->exponent;
    real state[MOST_VECTORS * LANES];
    __builtin_memcpy(state, l->state, sizeof state);
    Sum shift = l->shift;
    int deep = l->deep;
    for (; step < behind; step++) {
        const real *entries = one ? l->entries : l->entries + (step - 1) * l->entries_step;
        reals sums[MOST_VECTORS], emission[MOST_VECTORS];
        times(vectors, c, end, state, entries, l->row, sums);
        wholes most = believed(vectors, narrow, l, deep, sums);
        if (most[0] == 0) break;
        real top;
        deep = emissions(vectors, narrow, c, l->x + step * l->x_step, emission, &top);
        reals factor = to_top(most);
        UNROLL for (int v = 0; v < vectors; v++) {
            sums[v] = sums[v] * emission[v] * factor;
            store(state + offset(vectors, v, end), sums[v]);
        }
        if (l->messages) write(vectors, narrow, c, sums, l->messages + step * l->message_step);
        add(&shift, top);
        if (l->matrix_shift != 0) add(&shift, l->matrix_shift);
        exponent += exponent_of(most[0]) - TOP + l->matrix_exponent;
    }
    __builtin_memcpy(l->state, state, sizeof state);
    l->shift = shift, l->exponent = exponent, l->deep = deep;
    return step;
}

/* The gradient of a matrix: an outer product of S and a source, exactly 0 where the matrix is. */
INLINE void write_transitions(const int vectors, const int narrow, const Lone *l, const real *ahead,
                              const reals *source, const real *entries, real *to) {
    int64_t c = l->c, end = end_of(narrow, c);
    reals tiny = all(power_of_two(1 - BIAS));
    for (int64_t k = 0; k < c; k++) {
        reals found[MOST_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) {
            reals entry = load(entries + k * l->row + offset(vectors, v, end)), both = source[v] * ahead[k];
            found[v] = where((both < tiny) & (both > -tiny), (reals){0}, both) * l->unshare;
            found[v] = where(entry == 0, (reals){0}, l->by_log ? found[v] * entry : found[v]);
        }
        write(vectors, narrow, c, found, to + k * c);
    }
}

/* Steps back from `step` on, whose B is known; the first whose transitions were not taken, or 0. */
INLINE int64_t stride_back(const int vectors, const int narrow, const int one, Lone *l, int64_t step) {
    int64_t c = l->c, end = end_of(narrow, c);
    reals behind[MOST_VECTORS], once = {0};
    real row[MOST_VECTORS * LANES], top;
    UNROLL for (int v = 0; v < vectors; v++) behind[v] = load(l->state + offset(vectors, v, end));
    UNROLL for (int j = 0; j < LANES; j++) once[j] = narrow || j >= LANES - 1 - (c - 1) % LANES;
    int counts = l->outer || l->held_ahead;
    for (; step > 0 && (!l->held_ahead || l->held < l->most_held); step--) {
        const real *entries = one ? l->entries : l->entries + (step - 1) * l->entries_step;
        reals source[MOST_VECTORS], sums[MOST_VECTORS], ahead[MOST_VECTORS], both[MOST_VECTORS];
        int deep = emissions(vectors, narrow, c, l->x + step * l->x_step, source, &top);
        UNROLL for (int v = 0; v < vectors; v++) source[v] *= behind[v];
        if (one) {
            UNROLL for (int v = 0; v < vectors; v++) store(row + offset(vectors, v, end), source[v]);
            times(vectors, c, end, row, l->turned, narrow ? LANES : c, sums);
        } else times_transposed(vectors, narrow, c, once, source, entries, l->row, sums);
        wholes most = believed(vectors, narrow, l, deep, sums);
        reals factor = to_top(most), meeting = {0};
        read(vectors, narrow, c, l->messages + (step - 1) * l->message_step, 0, ahead);
        UNROLL for (int v = 0; v < vectors; v++) {
            sums[v] *= factor;
            both[v] = ahead[v] * (sums[v] * power_of_two(-TOP));
            meeting += v + 1 < vectors ? both[v] : both[v] * once;
        }
        real sum = total(meeting), share = 1 / sum, least_seen = sum * power_of_two(1 - BIAS);
        real down = factor[0] * power_of_two(-HALF);
        if (most[0] < (counts ? bits_of(power_of_two(TOP - 24)) : 1) ||
            !(share > 0 && share < power_of_two(TOP))) break;
        if (counts && !(share < 1)) break;
        if (l->gradient) {
            UNROLL for (int v = 0; v < vectors; v++)
                both[v] = where(both[v] < least_seen, (reals){0}, both[v] * share * l->weight);
            write(vectors, narrow, c, both, l->gradient + (step - 1) * l->gradient_step);
        }
        UNROLL for (int v = 0; v < vectors; v++) behind[v] = sums[v];
        if (!counts) continue;
        reals least = all(power_of_two(1 - BIAS) / down / share); /* of which the source is still a normal number */
        UNROLL for (int v = 0; v < vectors; v++) {
            reals t = where(source[v] < least, (reals){0}, source[v]) * down;
            source[v] = smaller(t * share, all(power_of_two(BIAS - 1))) * l->source_weight;
        }
        if (l->outer) {
            UNROLL for (int v = 0; v < vectors; v++) store(row + offset(vectors, v, end), ahead[v]);
            write_transitions(vectors, narrow, l, row, source, entries, l->outer + (step - 1) * l->outer_step);
        } else {
            int64_t at = l->held++ * (narrow ? LANES : c);
            UNROLL for (int v = 0; v < vectors; v++) {
                store(l->held_ahead + at + offset(vectors, v, end), ahead[v]);
                store(l->held_source + at + offset(vectors, v, end), source[v]);
            }
        }
    }
    UNROLL for (int v = 0; v < vectors; v++) store(l->state + offset(vectors, v, end), behind[v]);
    return step;
}

/* Each is compiled for each number of vectors, and for one matrix or many. */
#define OF_VECTORS(name, vectors, narrow, ...) \
    return l->one ? stride_##name(vectors, narrow, 1, __VA_ARGS__) : stride_##name(vectors, narrow, 0, __VA_ARGS__)
#define OF_FEW(name, arguments, ...)                                                             \
    static int64_t name arguments {                                                              \
        int64_t vectors = vectors_of(l->c);                                                      \
        if (l->c < LANES) OF_VECTORS(name, 1, 1, __VA_ARGS__);                                   \
        if (vectors == 1) OF_VECTORS(name, 1, 0, __VA_ARGS__);                                   \
        if (vectors == 2 && MOST_VECTORS > 2) OF_VECTORS(name, 2, 0, __VA_ARGS__);               \
        if (vectors == 3 && MOST_VECTORS > 3) OF_VECTORS(name, 3, 0, __VA_ARGS__);               \
        OF_VECTORS(name, MOST_VECTORS, 0, __VA_ARGS__);                                          \
    }
OF_FEW(ahead, (Lone *l, int64_t step, int64_t behind), l, step, behind)
OF_FEW(back, (Lone *l, int64_t step), l, step)

/* Steps at a sequence's end of which rows cannot be read as wide as a register: rows of c entries lie `step` apart. */
INLINE int64_t steps_kept_back(int64_t c, int64_t step) {
    return c >= LANES ? 0 : step <= 0 ? INT64_MAX / 2 : (LANES - c + step - 1) / step;
}
