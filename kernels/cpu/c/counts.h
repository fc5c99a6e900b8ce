/* Expected counts of transitions, from S and T of backward.h:

       d/dP_i = w S_{i-1}^T T_i / sum S_{i-1} B_{i-1}        of each step, or summed over steps under one matrix

   The row w T / sum S B is called a source; it is scaled so that its products with S do not overflow (HALF in scale.h).
   The sources of several sequences, or steps, are the rows of one matrix product with their S.

   The mean of log P over transitions is S (P log P) T / sum S B, or of all steps of one sequence from its counts. */
#pragma once
#include "forward.h"

/* rows of `partial` before a flush to float64: the rounding of their sum stays below 2^-20 */
enum { ADDED = 256 };

typedef struct {
    real *partial;                    /* (c, padded width): S^T times sources of `added` rows; padding is undefined */
    double *total;                    /* (c, padded width): the rows before those, if there were any */
    real *terms;                      /* (c, width): P log P, for means */
    int has_terms;                    /* they are those of the one matrix */
    real *held_forward, *held_source; /* (most_held, width): `held` rows of S and of sources for the next product */
    int64_t added, held, most_held;
    int flushed;                      /* there are rows in `total` */
    double weight;                    /* power of two near the largest weight; sources are divided by it */
    int ordinary;                     /* weights are: see flush.h */
    Mode mode;                        /* of the caller */
    int unsafe_matrix;                /* sources rounded to 0 may matter for entries so large: check every matrix */
} Counts;

INLINE int has_counts(const Chain *a) { return a->counts || a->grad_bulk.data || a->means.data; }

/* Whether counts are added up over steps. */
INLINE int adds_counts(const Walk *w) {
    return w->a->counts || (w->a->means.data && w->a->one_matrix && w->count == 1);
}
INLINE int logs(const Chain *a) { return a->by_log || a->logarithms; }

/* 1 in the lanes of a row's last vector that do not overlap the one before it, 0 in others. */
INLINE reals fresh_lanes(int64_t width) {
    reals fresh = {0};
    for (int64_t j = 0; j < LANES; j++) fresh[j] = j >= LANES - 1 - (width - 1) % LANES;
    return fresh;
}

/* T into a source: 0 where it has faded, clamped where no path leads. Two factors, applied one after the other where
   their product overflows or underflows. */
INLINE void scale_source(int64_t width, real *source, real inverse_sum, real scale, real weight) {
    real down = scale * power_of_two(-HALF), factor = down * inverse_sum;
    int apart = !(factor > power_of_two(30 - BIAS) && factor < power_of_two(BIAS - 30));
    real first = apart ? down : factor, second = apart ? inverse_sum : 1;
    real limit = apart ? 0 : power_of_two(-HALF - FADED) / factor,
         least = limit > power_of_two(1 - BIAS) ? limit : power_of_two(1 - BIAS);
    reals most = splat(power_of_two(BIAS - 1)), end = load(source + width - LANES);
    end = smaller(smaller(where(end < least, (reals){0}, end) * first, most) * second, most) * weight;
    for (int64_t j = 0; j + LANES < width; j += LANES) {
        reals t = load(source + j);
        store(source + j, smaller(smaller(where(t < least, (reals){0}, t) * first, most) * second, most) * weight);
    }
    store(source + width - LANES, end);
}

/* A faded source times an entry above LARGE may be a likely transition. */
#define LARGE power_of_two(FADED - GUARD)
INLINE void check_large(Counts *t, reals high) { t->unsafe_matrix |= largest(high) > LARGE; }

/* A step's gradient from `total` if there are rows, or else `partial`; exactly 0 where the matrix is 0. */
static void write_counts(Counts *t, const Walk *w, real *out) {
    const Matrix *m = &w->matrix;
    reals high = {0};
    int64_t c = m->c, across = padded(w->width);
    int by_log = logs(w->a);
    Factors unscale = factors_of(by_log ? 0 : -m->exponent);
    double factor = (double)UNSHARE * t->weight;
    Mode before = mode_now();
    if (m->exponent != 0 && !by_log) set_mode(t->mode); /* likely transitions over large entries are denormal numbers */
    for (int64_t k = 0; k < c; k++) {
        const real *p = m->entries + k * m->row, *sums = t->partial + k * across;
        if (t->flushed || c < LANES || !(m->exponent == 0 || by_log)) {
            for (int64_t j = 0; j < c; j++) {
                high[0] = p[j] > high[0] ? p[j] : high[0];
                double count = (t->flushed ? t->total[k * across + j] : (double)sums[j]) * factor;
                double value = count * (by_log ? (double)p[j] : 1) * unscale.first * unscale.second;
                out[k * c + j] = bits_of(p[j]) << 1 == 0 ? 0 : (real)value;
            }
        } else
            for (int64_t v = 0; v < vectors_of(c); v++) {
                int64_t j = start_of(v, c);
                reals entries = load(p + j), count = load(sums + j) * (real)factor;
                high = larger(entries, high);
                store(out + k * c + j, where(is_zero(entries), (reals){0}, by_log ? count * entries : count));
            }
    }
    check_large(t, high);
    set_mode(before);
}

static void flush(Counts *t, const Walk *w) {
    for (int64_t k = 0; k < w->a->states * padded(w->width); k++)
        t->total[k] = (t->flushed ? t->total[k] : 0) + (double)t->partial[k];
    t->added = 0, t->flushed = 1;
}

/* Zeros after the last of `count` rows, into which its last vector reaches: the memory may hold anything. */
INLINE void clear_rest(const Walk *w, int64_t count, real *source) {
    clear(padded(w->width) - w->width, source + count * w->width);
}

/* Adds S^T times sources of `count` rows. */
static void add_rows(Counts *t, const Walk *w, int64_t count, const real *forward, real *source) {
    int64_t width = w->width, across = padded(width);
    clear_rest(w, count, source);
    for (int64_t row = 0; row < count;) {
        int64_t rows = count - row < ADDED - t->added ? count - row : ADDED - t->added;
        Product p = {w->a->states, rows, across, forward + row * width, 1, width,
                     source + row * width, width, t->partial, across};
        if (t->added) multiply_add(p);
        else multiply(p);
        t->added += rows, row += rows;
        if (t->added == ADDED) flush(t, w);
    }
}

static void add_held_rows(Counts *t, const Walk *w) {
    Mode before = flush_to_zero(t->ordinary);
    add_rows(t, w, t->held, t->held_forward, t->held_source);
    t->held = 0;
    set_mode(before);
}

/* Collects few rows, for a product with up to `most_held` of them: each product reads and writes all of `partial`. */
static void hold_rows(Counts *t, const Walk *w, int64_t count, const real *forward, const real *source) {
    int64_t width = w->width;
    if (t->held + count > t->most_held) add_held_rows(t, w);
    for (int64_t row = 0; row < count; row++)
        for (int64_t k = 0; k < vectors_of(width); k++) {
            int64_t from = row * width + start_of(k, width), to = t->held * width + from;
            store(t->held_forward + to, load(forward + from)), store(t->held_source + to, load(source + from));
        }
    t->held += count;
}

/* The gradient of the matrix into a step. */
INLINE real *counts_at(const Walk *w, int64_t step) {
    return matrix_at(&w->a->grad_bulk, w->set, step);
}

/* Logarithms of up to LANES weights, of which `left` are a row's; the weights themselves if they are logarithms. */
INLINE reals row_of_logs(int are_logs, const real *from, int64_t step, int64_t left) {
    reals weight = step == 1 && left >= LANES ? load(from) : load_some(from, step, left < LANES ? left : LANES, 0);
    return are_logs ? weight : logarithms(weight);
}
INLINE const real *entry_at(const Chain *a, int64_t set, int64_t step, int64_t k, int64_t j) {
    return matrix_at(&a->bulk, set, step) + k * a->bulk.from + j * a->bulk.to;
}

/* P log P of the matrix into a step; 0 where P is. */
static void find_terms(Counts *t, const Walk *w, int64_t step) {
    const Chain *a = w->a, *second = a->means.less;
    int are_logs = (int)a->logarithms;
    real taken = (real)((double)w->matrix.exponent * 0.69314718055994531);
    reals high = {0};
    for (int64_t k = 0; k < a->states; k++)
        for (int64_t v = 0; v < vectors_of(w->width); v++) {
            int64_t j = start_of(v, w->width), left = a->states - j;
            reals p = load(w->matrix.entries + k * w->matrix.row + j);
            reals log = logarithms(p) + taken;
            if (are_logs) log = row_of_logs(1, entry_at(a, w->set, step, k, j), a->bulk.to, left);
            if (second) log -= row_of_logs(are_logs, entry_at(second, w->set, step, k, j), second->bulk.to, left);
            store(t->terms + k * w->width + j, where(p > 0, p * log, (reals){0}));
            high = larger(p, high);
        }
    check_large(t, high);
    t->has_terms = (int)a->one_matrix;
}

/* Adds the means of log P over the transitions into a step of the first `count` places. */
static void add_means(Counts *t, const Walk *w, int64_t count, const real *forward, const real *source) {
    int64_t width = w->width, group = group_of(w->a);
    reals fresh = fresh_lanes(width);
    real *sums = w->padded_x; /* which no step needs now */
    for (int64_t place = 0; place < count; place += group, forward += group * width, source += group * width) {
        int64_t rows = count - place < group ? count - place : group;
        if (rows == 1) row_times(w->a->states, width, forward, t->terms, width, sums);
        else multiply((Product){rows, w->a->states, width, forward, width, 1, t->terms, width, sums, width});
        for (int64_t r = 0; r < rows; r++) {
            const real *row = sums + r * width, *from = source + r * width;
            reals mean = load(row + width - LANES) * load(from + width - LANES) * fresh;
            for (int64_t j = 0; j + LANES < width; j += LANES) mean += load(row + j) * load(from + j);
            w->a->means.data[sequence_of(w, place + r)] += (double)total(mean) * (double)UNSHARE * t->weight;
        }
    }
}

/* The same of held rows, the last of which is the transition into the step after `step`. */
static void add_held_means(Counts *t, Walk *w, int64_t step) {
    for (; t->held > 0; step++) {
        int64_t row = --t->held * w->width;
        prepare(w->a, w->set, step + 1, &w->matrix);
        find_terms(t, w, step + 1);
        add_means(t, w, 1, t->held_forward + row, t->held_source + row);
    }
}

/* Counts the transitions into a step of the first `count` places. */
static void count_step(Counts *t, const Walk *w, int64_t count, const real *forward, real *source, int64_t step) {
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width, across = padded(width);
    if (a->means.data && !t->has_terms) find_terms(t, w, step);
    if (a->means.data && !adds_counts(w)) add_means(t, w, count, forward, source);
    else if (adds_counts(w)) {
        if (count <= t->most_held / 4) hold_rows(t, w, count, forward, source);
        else add_rows(t, w, count, forward, source);
    } else if (count == 0) clear(c * c, counts_at(w, step));
    else if (count <= ADDED) {
        clear_rest(w, count, source);
        multiply((Product){c, count, across, forward, 1, width, source, width, t->partial, across});
        write_counts(t, w, counts_at(w, step));
    } else {
        add_rows(t, w, count, forward, source);
        if (t->added) flush(t, w);
        write_counts(t, w, counts_at(w, step));
        t->flushed = 0;
    }
}

/* Adds the sum over all steps to the gradient of their one matrix. */
static void add_counts(Counts *t, const Walk *w) {
    const Chain *a = w->a;
    Factors unscale = factors_of(logs(a) ? 0 : -w->matrix.exponent);
    double mean = 0, all = 0;
    add_held_rows(t, w);
    for (int64_t k = 0; k < a->states; k++)
        for (int64_t j = 0; j < a->states; j++) {
            double p = w->matrix.entries[k * w->matrix.row + j], count = 0;
            int64_t at = k * padded(w->width) + j;
            if (t->added) count = (double)t->partial[at];
            if (t->flushed) count += t->total[at];
            if (a->means.data) mean += p != 0 ? count * (double)t->terms[k * w->width + j] : 0, all += count * p;
            count = count * ((double)UNSHARE * t->weight) * (logs(a) ? p : 1) * unscale.first * unscale.second;
            if (p != 0 && a->counts) a->counts[(w->set * a->states + k) * a->states + j] += count;
        }
    int64_t q = sequence_of(w, 0);
    if (a->means.data && all > 0) a->means.data[q] += mean / all * (double)(steps_of(a, q) - 1);
}
