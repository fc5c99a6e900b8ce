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
INLINE int adds_counts(const Pass *w) {
    return w->a->counts || (w->a->means.data && w->a->one_matrix && w->count == 1);
}
INLINE int logs(const Chain *a) { return a->by_log || a->logarithms; }

/* T into a source: 0 where it has faded, clamped where no path leads. Two factors, applied one after the other where
   their product overflows or underflows. */
INLINE void scale_source(int64_t width, real *source, Member member, real weight) {
    real inverse_sum = member.inverse_sum, part = member.scale * power_of_two(-HALF), factor = part * inverse_sum;
    int apart = !(factor > power_of_two(30 - BIAS) && factor < power_of_two(BIAS - 30));
    real first = apart ? part : factor, second = apart ? inverse_sum : 1;
    real limit = apart ? 0 : power_of_two(-HALF - FADED) / factor,
         least = limit > power_of_two(1 - BIAS) ? limit : power_of_two(1 - BIAS);
    reals most = splat(power_of_two(BIAS - 1));
    for (int64_t j = 0; j < width; j += LANES) {
        reals t = read_some(source + j, 1, width - j, 0);
        t = smaller(smaller(where(t < least, (reals){0}, t) * first, most) * second, most) * weight;
        write_some(source + j, t, width - j);
    }
}

/* A faded source times an entry above LARGE may be a likely transition. */
#define LARGE power_of_two(FADED - GUARD)
INLINE void check_large(Counts *t, reals high) { t->unsafe_matrix |= largest(high) > LARGE; }

/* Counts of an entry, without its factor P; and its gradient, exactly 0 where the matrix is 0. `unscale`: of the
   matrix's scale, unless gradients are those of logarithms. */
INLINE double count_of_entry(const Counts *t, const Pass *w, int64_t k, int64_t j) {
    int64_t at = k * padded(w->width) + j;
    return (t->flushed ? t->total[at] : 0) + (t->added ? (double)t->partial[at] : 0);
}
INLINE double gradient_of_entry(const Counts *t, const Pass *w, Factors unscale, int64_t k, int64_t j) {
    real p = w->matrix.entries[k * w->matrix.row + j];
    double count = count_of_entry(t, w, k, j) * ((double)UNSHARE * t->weight) * (logs(w->a) ? (double)p : 1);
    return bits_of(p) << 1 == 0 ? 0 : count * unscale.first * unscale.second;
}
INLINE Factors unscale_of(const Pass *w) { return factors_of(logs(w->a) ? 0 : -w->matrix.exponent); }

static void flush(Counts *t, const Pass *w) {
    for (int64_t k = 0; k < w->a->states * padded(w->width); k++)
        t->total[k] = (t->flushed ? t->total[k] : 0) + (double)t->partial[k];
    t->added = 0, t->flushed = 1;
}

/* Adds S^T times sources of `count` rows. */
static void add_rows(Counts *t, const Pass *w, int64_t count, const real *forward, real *source) {
    int64_t width = w->width, across = padded(width);
    clear(across - width, source + count * width); /* into which the last vector reaches: it may hold anything */
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

INLINE const real *entry_at(const Chain *a, int64_t set, int64_t step, int64_t k, int64_t j) {
    return matrix_at(&a->bulk, set, step) + k * a->bulk.from + j * a->bulk.to;
}

/* The gradient of the matrix into a step, from the rows of S and of sources of `count` places. */
static void write_counts(Counts *t, const Pass *w, int64_t count, const real *forward, real *source, int64_t step) {
    const Chain *a = w->a;
    const Matrix *m = &w->matrix;
    real *out = matrix_at(&a->grad_bulk, w->set, step);
    reals high = {0};
    int64_t c = m->c, across = padded(w->width);
    int by_log = logs(a), scaled = m->exponent != 0 && !by_log, by_entry = count >= ADDED || c < LANES || scaled;
    int single = count == 1 && !by_entry; /* the products of one row need no sums */
    Factors unscale = unscale_of(w);
    real factor = UNSHARE * (real)t->weight;
    if (!single) add_rows(t, w, count, forward, source);
    Mode before = scaled ? mode_now() : 0;
    if (scaled) set_mode(t->mode); /* likely transitions over large entries are denormal numbers */
    for (int64_t k = 0; k < c; k++) {
        const real *p = m->entries + k * m->row, *sums = single ? source : t->partial + k * across;
        real share = single ? forward[k] : 1;
        if (step > 1) fetch_row(c, entry_at(a, w->set, step - 1, k, 0)), fetch_row(c, out + k * c - a->grad_bulk.step);
        for (int64_t v = 0; v < vectors_of(m->width); v++) {
            int64_t j = start_of(v, m->width);
            reals entries = load(p + j), counts = load(sums + j) * share * factor;
            high = larger(entries, high);
            if (!by_entry) store(out + k * c + j, where(is_zero(entries), (reals){0}, by_log ? counts * entries : counts));
        }
        for (int64_t j = 0; j < c && by_entry; j++) out[k * c + j] = (real)gradient_of_entry(t, w, unscale, k, j);
    }
    check_large(t, high);
    if (scaled) set_mode(before);
    t->added = t->flushed = 0;
}

/* P log P of the matrix into a step; 0 where P is. */
static void find_terms(Counts *t, const Pass *w, int64_t step) {
    const Chain *a = w->a, *second = a->means.second;
    int are_logs = (int)a->logarithms;
    real taken = (real)((double)w->matrix.exponent * 0.69314718055994531);
    reals high = {0};
    for (int64_t k = 0; k < a->states; k++)
        for (int64_t v = 0; v < vectors_of(w->width); v++) {
            int64_t j = start_of(v, w->width), left = a->states - j;
            reals p = load(w->matrix.entries + k * w->matrix.row + j);
            reals log = logarithms(p) + taken;
            if (are_logs) log = logs_of_weights(1, entry_at(a, w->set, step, k, j), a->bulk.to, left);
            if (second) log -= logs_of_weights(are_logs, entry_at(second, w->set, step, k, j), second->bulk.to, left);
            store(t->terms + k * w->width + j, where(p > 0, p * log, (reals){0}));
            high = larger(p, high);
        }
    check_large(t, high);
    t->has_terms = (int)a->one_matrix;
}

/* Adds the means of log P over the transitions of `count` rows. */
static void add_means(Counts *t, const Pass *w, int64_t count, const real *forward, const real *source) {
    int64_t width = w->width, group = group_of(w->a);
    for (int64_t place = 0; place < count; place += group, forward += group * width, source += group * width) {
        int64_t rows = count - place < group ? count - place : group;
        if (rows == 1) row_times(w->a->states, width, forward, t->terms, width, w->sums);
        else multiply((Product){rows, w->a->states, width, forward, width, 1, t->terms, width, w->sums, width});
        for (int64_t r = 0; r < rows; r++) {
            const real *row = w->sums + r * width, *from = source + r * width;
            reals mean = {0};
            for (int64_t j = 0; j < width; j += LANES)
                mean += read_some(row + j, 1, width - j, 0) * read_some(from + j, 1, width - j, 0);
            w->a->means.data[sequence_of(w, place + r)] += (double)total(mean) * (double)UNSHARE * t->weight;
        }
    }
}

/* Adds the counts or means of held rows, the last of which is the transition into the step after `step`. */
static void add_held_rows(Counts *t, Pass *w, int64_t step) {
    const Chain *a = w->a;
    Mode before = flush_to_zero(t->ordinary);
    if (adds_counts(w)) add_rows(t, w, t->held, t->held_forward, t->held_source);
    else for (; t->held > 0; step++) {
        int64_t row = --t->held * w->width;
        prepare(a, w->set, step + 1, &w->matrix);
        find_terms(t, w, step + 1);
        add_means(t, w, 1, t->held_forward + row, t->held_source + row);
    }
    t->held = 0;
    set_mode(before);
}

/* Collects few rows, for a product with up to `most_held` of them: each product reads and writes all of `partial`. */
static void hold_rows(Counts *t, Pass *w, int64_t count, const real *forward, const real *source) {
    int64_t entries = count * w->width;
    if (t->held + count > t->most_held) add_held_rows(t, w, 0);
    write_row(entries, forward, 1, t->held_forward + t->held * w->width);
    write_row(entries, source, 1, t->held_source + t->held * w->width);
    t->held += count;
}

/* Counts the transitions into a step of the first `count` places. */
static void count_step(Counts *t, Pass *w, int64_t count, const real *forward, real *source, int64_t step) {
    const Chain *a = w->a;
    if (a->means.data && !t->has_terms) find_terms(t, w, step);
    if (adds_counts(w)) {
        if (count <= t->most_held / 4) hold_rows(t, w, count, forward, source);
        else add_rows(t, w, count, forward, source);
    } else if (a->means.data) add_means(t, w, count, forward, source);
    else if (count == 0) clear(w->matrix.c * w->matrix.c, matrix_at(&a->grad_bulk, w->set, step));
    else write_counts(t, w, count, forward, source, step);
}

/* Adds the sum over all steps to the gradient of their one matrix, or their mean. */
static void add_counts(Counts *t, const Pass *w) {
    const Chain *a = w->a;
    int64_t c = a->states, q = sequence_of(w, 0);
    Factors unscale = unscale_of(w);
    double mean = 0, norm = 0;
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < c; j++) {
            double count = count_of_entry(t, w, k, j);
            if (a->counts) a->counts[(w->set * c + k) * c + j] += gradient_of_entry(t, w, unscale, k, j);
            if (!a->counts) mean += count * (double)t->terms[k * w->width + j];
            if (!a->counts) norm += count * (double)w->matrix.entries[k * w->matrix.row + j];
        }
    if (a->means.data && norm > 0) a->means.data[q] += mean / norm * (double)(steps_of(a, q) - 1);
}
