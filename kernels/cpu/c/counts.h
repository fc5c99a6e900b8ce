/* Expected counts of transitions, from S and T of backward.h:

       d/dP_i = w S_{i-1}^T T_i / sum S_{i-1} B_{i-1}        of each step, or added up over steps

   A source is w T / sum S B, so scaled that its products with S are within the format. Sources of sequences are rows,
   and their counts one product of matrices. */
#pragma once
#include "forward.h"

/* So many products are added up in a `real` before they go into a double: what that rounds stays below 2^-20. */
enum { ADDED = 256 };

typedef struct {
    real *partial;                    /* (c, padded width): sums of S^T T of some rows; what pads them is anything */
    double *total;                    /* the same of all rows */
    real *held_ahead, *held_source;   /* (GROUP, width): S and sources of some steps of few sequences */
    int64_t added, held;              /* rows in `partial`; rows that are held */
    double weight;                    /* a power of two near the largest weight, which sources are without */
    int wary;                         /* every matrix is to be looked at */
} Counts;

INLINE int logs(const Chain *a) { return a->by_log || a->logarithms; }

/* T as a source: 0 where that has faded, and within the format where no path is. The two factors are applied one after
   the other where their product may be no number. */
INLINE void share_out(int64_t width, real *source, real share, real scale, real weight) {
    real down = scale * power_of_two(-HALF), factor = down * share;
    int apart = !(factor > power_of_two(30 - BIAS) && factor < power_of_two(BIAS - 30));
    real first = apart ? down : factor, second = apart ? share : 1;
    real limit = apart ? 0 : power_of_two(-HALF - FADED) / factor,
         least = limit > power_of_two(1 - BIAS) ? limit : power_of_two(1 - BIAS);
    reals most = all(power_of_two(BIAS - 1)), end = load(source + width - LANES);
    end = smaller(smaller(where(end < least, (reals){0}, end) * first, most) * second, most) * weight;
    for (int64_t j = 0; j + LANES < width; j += LANES) {
        reals t = load(source + j);
        store(source + j, smaller(smaller(where(t < least, (reals){0}, t) * first, most) * second, most) * weight);
    }
    store(source + width - LANES, end);
}

/* Sources of transitions by entries far above 1 may be gone where those transitions are the likely ones. */
#define LARGE power_of_two(FADED - GUARD)
INLINE void beware(Counts *t, reals high) { t->wary |= largest(high) > LARGE; }

/* A step's gradient from sums of products in `partial`, and those in `total` if there are any: exactly 0 where the
   matrix is. */
static void write_counts(Counts *t, const Walk *w, const double *total, real *out) {
    const Matrix *m = &w->matrix;
    reals high = {0};
    int64_t c = m->c, across = padded(w->width);
    int by_log = logs(w->a);
    Factors unscale = factors_of(by_log ? 0 : -m->exponent);
    double factor = (double)UNSHARE * t->weight;
    for (int64_t k = 0; k < c; k++) {
        const real *p = m->entries + k * m->row, *sums = t->partial + k * across;
        if (total || c < LANES || !(m->exponent == 0 || by_log)) {
            for (int64_t j = 0; j < c; j++) {
                high[0] = p[j] > high[0] ? p[j] : high[0];
                double count = ((total ? total[k * across + j] : 0) + (double)sums[j]) * factor;
                double value = count * (by_log ? (double)p[j] : 1) * unscale.first * unscale.second;
                out[k * c + j] = p[j] == 0 ? 0 : (real)value;
            }
        } else
            for (int64_t v = 0; v < vectors_of(c); v++) {
                int64_t j = start_of(v, c);
                reals entries = load(p + j), count = load(sums + j) * (real)factor;
                high = larger(entries, high);
                store(out + k * c + j, where(entries == 0, (reals){0}, by_log ? count * entries : count));
            }
    }
    beware(t, high);
}

static void flush(Counts *t, const Walk *w) {
    for (int64_t k = 0; k < w->a->states * padded(w->width) && t->added; k++)
        t->total[k] += (double)t->partial[k], t->partial[k] = 0;
    t->added = 0;
}

/* Adds S^T T of some rows. */
static void add_rows(Counts *t, const Walk *w, int64_t count, const real *ahead, const real *source) {
    int64_t width = w->width, across = padded(width);
    for (int64_t row = 0; row < count;) {
        int64_t rows = count - row < ADDED - t->added ? count - row : ADDED - t->added;
        multiply_add((Product){w->a->states, rows, across, ahead + row * width, 1, width,
                              source + row * width, width, t->partial, across});
        t->added += rows, row += rows;
        if (t->added == ADDED) flush(t, w);
    }
}

static void release(Counts *t, const Walk *w) {
    add_rows(t, w, t->held, t->held_ahead, t->held_source);
    t->held = 0;
}

/* The same of few rows, but not before there are some. */
static void hold_rows(Counts *t, const Walk *w, int64_t count, const real *ahead, const real *source) {
    int64_t width = w->width;
    if (t->held + count > GROUP) release(t, w);
    for (int64_t row = 0; row < count; row++)
        for (int64_t k = 0; k < vectors_of(width); k++) {
            int64_t from = row * width + start_of(k, width), to = t->held * width + from;
            store(t->held_ahead + to, load(ahead + from)), store(t->held_source + to, load(source + from));
        }
    t->held += count;
}

/* Where gradients of the matrix into a step are written. */
INLINE real *counts_at(const Walk *w, int64_t step) {
    return w->a->grad_bulk + first_count(w->a, w->set) + (step - 1) * w->a->count_step;
}

/* The transitions into a step: S^T T of the first `count` places. */
static void count_step(Counts *t, const Walk *w, int64_t count, const real *ahead, const real *source, int64_t step) {
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width, across = padded(width);
    if (a->counts) {
        if (count <= GROUP / 4) hold_rows(t, w, count, ahead, source);
        else add_rows(t, w, count, ahead, source);
    } else if (count == 0) clear(c * c, counts_at(w, step));
    else if (count <= ADDED) {
        multiply((Product){c, count, across, ahead, 1, width, source, width, t->partial, across});
        write_counts(t, w, 0, counts_at(w, step));
    } else {
        for (int64_t k = 0; k < c * across; k++) t->partial[k] = 0, t->total[k] = 0;
        add_rows(t, w, count, ahead, source);
        write_counts(t, w, t->total, counts_at(w, step));
        t->added = 0;
    }
}

/* Adds what all steps' transitions add up to, under the one matrix of all. */
static void add_counts(Counts *t, const Walk *w) {
    const Chain *a = w->a;
    Factors unscale = factors_of(logs(a) ? 0 : -w->matrix.exponent);
    release(t, w), flush(t, w);
    for (int64_t k = 0; k < a->states; k++)
        for (int64_t j = 0; j < a->states; j++) {
            double p = w->matrix.entries[k * w->matrix.row + j];
            double count = t->total[k * padded(w->width) + j] * ((double)UNSHARE * t->weight);
            count = count * (logs(a) ? p : 1) * unscale.first * unscale.second;
            if (p != 0) a->counts[(w->set * a->states + k) * a->states + j] += count;
        }
}

INLINE void clear_counts(Counts *t, const Walk *w) {
    for (int64_t k = 0; k < w->a->states * padded(w->width); k++) t->partial[k] = 0, t->total[k] = 0;
}
