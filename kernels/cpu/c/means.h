/* Means under posteriors g for kernels/plain/entropy.py: sums over steps and states, to which g = 0 adds nothing. */
#pragma once
#include "step.h"

typedef struct {
    int64_t steps, sequences, states;
    const real *posteriors, *x, *base; /* (steps, sequences, c): g, log emissions, and those that g is computed from */
    int64_t x_step, x_sequence, base_step, base_sequence;
    const real *arrived, *weighted;    /* (steps, sequences, c): sums U, and what they divide, in the halves of rows */
    const uint8_t *exact;              /* (sequences): no emission was raised */
    double *mean, *error;              /* (sequences): added to: means, and their rounding errors */
} Means;

INLINE reals some_of(const real *from, int64_t left, real fill) {
    return left >= LANES ? load(from) : load_some(from, 1, left, fill);
}

static real largest_of_row(int64_t c, const real *x) {
    reals most = splat(-INFINITE);
    for (int64_t j = 0; j < c; j += LANES) most = larger(most, some_of(x + j, c - j, -INFINITE));
    return largest(most);
}

/* Means of x, or if that is null, of weighted / arrived: U is 0 or trusted in step.h, or else a mean is NaN. */
EXPORT int64_t EXPORTED(logchain_means)(const Means *a) {
    int64_t c = a->states;
    for (int64_t row = 0; row < a->steps * a->sequences; row++) {
        int64_t step = row / a->sequences, q = row % a->sequences;
        const real *x = a->x + step * a->x_step + q * a->x_sequence,
                   *base = a->base + step * a->base_step + q * a->base_sequence;
        real top = a->x ? largest_of_row(c, x) : 0, high = a->x && base != x ? largest_of_row(c, base) : top;
        reals sum = {0};
        wholes counted = {0};
        for (int64_t j = 0; j < c; j += LANES) {
            reals share = some_of(a->posteriors + row * c + j, c - j, 0), term;
            if (a->x) {
                reals below = some_of(base + j, c - j, 0) - high;
                wholes raised = (share > 0) & (below < LOG_DEEPEST); /* g is too large by as much as the emission is */
                if (any(raised) && !a->exact[q]) {
                    reals down = where(below < 2 * LOG_DEEPEST, (reals){0}, exponential(below - LOG_DEEPEST, NO_TAIL));
                    share *= where(raised, down, splat(1));
                }
                term = some_of(x + j, c - j, 0) - top;
            } else {
                term = some_of(a->weighted + 2 * row * c + j, c - j, 0);
                term /= some_of(a->arrived + 2 * row * c + j, c - j, 1);
            }
            sum += where(share > 0, share * term, (reals){0}), counted |= share > 0;
        }
        Sum mean = {a->mean[q], a->error[q]};
        if (any(counted)) add(&mean, top), add(&mean, (double)total(sum));
        a->mean[q] = mean.sum, a->error[q] = mean.error;
    }
    return 0;
}

/* P of matrices x (steps, sequences, c, c) and P log P, or P log(base / P) unless `base` is null, into halves of rows:
   0 where a weight is 0. Returns 1 if a row is not near 1. */
EXPORT int64_t EXPORTED(logchain_by_logs)(const Means *a) {
    int64_t c = a->states;
    for (int64_t row = 0; row < a->steps * a->sequences * c; row++) {
        int64_t step = row / c / a->sequences, q = row / c % a->sequences, k = row % c * c;
        const real *x = a->x + step * a->x_step + q * a->x_sequence + k,
                   *base = a->base ? a->base + step * a->base_step + q * a->base_sequence + k : x;
        real *to = (real *)a->arrived + 2 * row * c, *by_logs = (real *)a->weighted + 2 * row * c;
        reals most = {0};
        for (int64_t j = 0; j < c; j += LANES) {
            reals p = some_of(x + j, c - j, 0), other = some_of(base + j, c - j, 0), logs = logarithms(other);
            if (a->base) logs -= logarithms(p);
            logs = where((p == 0) | (other == 0), (reals){0}, p * logs), most = larger(most, larger(p, other));
            if (c - j < LANES) store_some(to + j, p, c - j), store_some(by_logs + j, logs, c - j);
            else store(to + j, p), store(by_logs + j, logs);
        }
        real high = largest(most);
        if (!(high < (real)0x1p7) || (high > 0 && high < (real)0x1p-16)) return 1;
    }
    return 0;
}
