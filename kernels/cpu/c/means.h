/* Means under posteriors g for kernels/plain/entropy.py: each is a sum over steps and states, and g = 0 adds nothing. */
#pragma once
#include "scale.h"
#include "step.h"

typedef struct {
    int64_t steps, sequences, states;
    const real *posteriors;         /* (steps, sequences, c) */
    const real *x, *base;           /* (steps, sequences, c): log emissions, and those that g is computed from */
    int64_t x_step, x_sequence, base_step, base_sequence;
    const real *arrived, *weighted; /* (steps, sequences, c): sums U, and those that are divided by them */
    int64_t apart;                  /* entries between two rows of these */
    const uint8_t *exact;           /* (sequences): no emission was raised */
    double *mean, *error;           /* (sequences): added to: means, and their rounding errors */
    double limit;                   /* means are NaN where a sum U below this one counts */
} Means;

INLINE reals some_of(const real *from, int64_t left, real fill) {
    return left >= LANES ? load(from) : load_some(from, 1, left, fill);
}

INLINE void store_up_to(real *to, reals a, int64_t left) {
    if (left >= LANES) store(to, a);
    else store_some(to, a, left);
}

static real largest_of_row(int64_t c, const real *x) {
    reals most = splat(-INFINITE);
    for (int64_t j = 0; j < c; j += LANES) most = larger(most, some_of(x + j, c - j, -INFINITE));
    return largest(most);
}

INLINE void add_mean(const Means *a, int64_t q, double term) {
    Sum mean = {a->mean[q], a->error[q]};
    add(&mean, term);
    a->mean[q] = mean.sum, a->error[q] = mean.error;
}

/* Means of x. */
EXPORT int64_t EXPORTED(logchain_mean_potentials)(const Means *a) {
    int64_t c = a->states;
    for (int64_t row = 0; row < a->steps * a->sequences; row++) {
        int64_t step = row / a->sequences, q = row % a->sequences;
        const real *g = a->posteriors + row * c, *x = a->x + step * a->x_step + q * a->x_sequence,
                   *base = a->base + step * a->base_step + q * a->base_sequence;
        real top = largest_of_row(c, x), top_of_base = base == x ? top : largest_of_row(c, base);
        reals sum = {0};
        wholes counted = {0};
        for (int64_t j = 0; j < c; j += LANES) {
            reals share = some_of(g + j, c - j, 0), below = some_of(base + j, c - j, 0) - top_of_base;
            wholes counts = share > 0, raised = counts & (below < LOG_DEEPEST);
            if (any(raised) && !a->exact[q]) { /* the posterior is too large by as much as the emission is */
                reals down = exponential(below - LOG_DEEPEST, (reals){0});
                share = where(raised, where(below < 2 * LOG_DEEPEST, (reals){0}, share * down), share);
            }
            sum += where(share > 0, share * (some_of(x + j, c - j, 0) - top), (reals){0}), counted |= counts;
        }
        if (!any(counted)) continue;
        add_mean(a, q, top), add_mean(a, q, (double)total(sum));
    }
    return 0;
}

/* Means of weighted / arrived. */
EXPORT int64_t EXPORTED(logchain_mean_quotients)(const Means *a) {
    int64_t c = a->states;
    for (int64_t row = 0; row < a->steps * a->sequences; row++) {
        reals sum = {0};
        wholes few = {0};
        for (int64_t j = 0; j < c; j += LANES) {
            reals share = some_of(a->posteriors + row * c + j, c - j, 0);
            reals below = some_of(a->arrived + row * a->apart + j, c - j, 1);
            wholes counts = share > 0;
            few |= counts & ~(below >= (real)a->limit);
            sum += where(counts, share * (some_of(a->weighted + row * a->apart + j, c - j, 0) / below), (reals){0});
        }
        add_mean(a, row % a->sequences, any(few) ? __builtin_nan("") : (double)total(sum));
    }
    return 0;
}

/* P of matrices x (steps, sequences, c, c) and P log P, or P log(base / P) unless `base` is null, 0 where a weight is 0, into halves of rows of
   `apart` entries. Returns 1 if a matrix is not near 1. */
EXPORT int64_t EXPORTED(logchain_by_logs)(const Means *a) {
    int64_t c = a->states;
    for (int64_t set = 0; set < a->steps * a->sequences; set++) {
        int64_t step = set / a->sequences, q = set % a->sequences;
        const real *x = a->x + step * a->x_step + q * a->x_sequence,
                   *base = a->base ? a->base + step * a->base_step + q * a->base_sequence : x;
        real *to = (real *)a->arrived + set * c * a->apart, *by_logs = (real *)a->weighted + set * c * a->apart;
        reals most = {0};
        for (int64_t k = 0; k < c; k++, x += c, base += c, to += a->apart, by_logs += a->apart)
            for (int64_t j = 0; j < c; j += LANES) {
                reals p = some_of(x + j, c - j, 0), other = some_of(base + j, c - j, 0), logs = logarithms(other);
                if (a->base) logs -= logarithms(p);
                logs = where((p == 0) | (other == 0), (reals){0}, p * logs), most = larger(most, larger(p, other));
                store_up_to(to + j, p, c - j), store_up_to(by_logs + j, logs, c - j);
            }
        if (!(largest(most) > (real)0x1p-7 && largest(most) < (real)0x1p7)) return 1;
    }
    return 0;
}
