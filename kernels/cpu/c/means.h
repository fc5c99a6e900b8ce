/* Means of logarithms under shares, which need not add up to 1, for kernels/plain/entropy.py.

   Loops raise emissions, and weights given as logarithms, to 2^-DEEPEST times the largest, which is near 1: shares that
   come from these are too large by as much, unless a sequence was recomputed exactly, and are corrected. */
#pragma once
#include "step.h"

typedef struct {
    int64_t first, last, steps, sequences, entries, logarithms;
    const real *weights, *others; /* (steps, sequences, entries); the mean is that of log(weight / other) */
    int64_t weights_step, weights_sequence, others_step, others_sequence;
    real *shares, *products;      /* the same, contiguous; each share times its logarithm */
    const uint8_t *exact;         /* (sequences): shares are not raised; null: none are */
    double *means;                /* (sequences): sums over steps, of which those without shares count 0 */
    void *room;
} Means;

INLINE reals log_of(const Means *a, const real *from, int64_t left) {
    reals entry = read_some(from, left, 0);
    return a->logarithms ? entry : logarithms(entry);
}

/* The mean of a step, or 0. */
static double mean_of(const Means *a, int64_t step, int64_t q) {
    enum { ADDED = 64 * LANES }; /* entries that are added in `real` */
    const real *weights = a->weights + step * a->weights_step + q * a->weights_sequence,
               *others = a->others ? a->others + step * a->others_step + q * a->others_sequence : weights;
    int64_t n = a->entries, row = (step * a->sequences + q) * n;
    double sum = 0, all = 0;
    for (int64_t start = 0; start < n; start += ADDED) {
        reals part = {0}, whole_part = {0};
        for (int64_t j = start; j < n && j < start + ADDED; j += LANES) {
            real *shares = a->shares + row + j;
            reals share = read_some(shares, n - j, 0);
            reals terms = log_of(a, weights + j, n - j), deep = terms - LOG_DEEPEST;
            if (a->exact && any((share > 0) & (deep < 0)) && !a->exact[q]) {
                share *= where(deep < LOG_DEEPEST, (reals){0}, exponential(smaller(deep, (reals){0}), NO_TAIL));
                write_some(shares, share, n - j);
            }
            if (a->others) terms -= log_of(a, others + j, n - j);
            terms = where(share > 0, share * terms, (reals){0});
            if (a->products) write_some(a->products + row + j, terms, n - j);
            part += terms, whole_part += where(share > 0, share, (reals){0});
        }
        sum += total(part), all += total(whole_part);
    }
    return all > 0 ? sum / all : 0;
}

EXPORT int64_t EXPORTED(logchain_means)(const Means *a) {
    for (int64_t q = a->first; q < a->last && a->room; q++) {
        double sum = 0;
        for (int64_t step = 0; step < a->steps; step++) sum += mean_of(a, step, q);
        a->means[q] = sum;
    }
    return 0;
}
