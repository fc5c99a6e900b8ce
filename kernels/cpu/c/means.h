/* Means of log-weights of paths, or of what they are more than those of another chain, for kernels/plain/entropy.py:

       sum over steps of <posterior_i, x_i> + <posterior_0, log p0> + the means of log P, see counts.h

   Loops raise emissions, and weights given as logarithms, to 2^-DEEPEST times the largest, which is near 1: posteriors
   that come from these are too large by as much, and are corrected. */
#pragma once
#include "backward.h"

/* The mean of c logarithms, or of those of weights, `step` apart, less those of `minus`, under shares that need not add up
   to 1; 0 if there are none. */
static double mean_of(const Chain *a, int are_logs, const real *from, int64_t step, const real *minus,
                      int64_t minus_step, real *shares) {
    reals sum = {0}, all = {0};
    for (int64_t j = 0, c = a->states; j < c; j += LANES) {
        reals share = row_of_logs(1, shares + j, 1, c - j), terms = row_of_logs(are_logs, from + j * step, step, c - j);
        reals deep = terms - LOG_DEEPEST;
        if (are_logs && any((share > 0) & (deep < 0))) {
            share *= where(deep < LOG_DEEPEST, (reals){0}, exponential(smaller(deep, (reals){0}), NO_TAIL));
            store_some(shares + j, share, c - j);
        }
        if (minus) terms -= row_of_logs(are_logs, minus + j * minus_step, minus_step, c - j);
        sum += where(share > 0, share * terms, (reals){0}), all += where(share > 0, share, (reals){0});
    }
    real whole_sum = total(all);
    return whole_sum > 0 ? (double)total(sum) / (double)whole_sum : 0;
}

/* log Z and `means` of a thread's sequences, NaN for lossy ones; posteriors are left in grad_x. */
EXPORT int64_t EXPORTED(logchain_means)(const Chain *a) {
    int64_t forward = EXPORTED(logchain_forward)(a), backward = EXPORTED(logchain_backward)(a);
    const Chain *second = a->means.less;
    for (int64_t place = a->first; place < a->last && a->room; place++) {
        int64_t q = sequence_in(a, place);
        if (a->lossy[q]) a->means.data[q] = (double)__builtin_nanf("");
        if (!has_gradient(a, q) || a->means.data[q] != a->means.data[q]) continue;
        double sum = 0; /* small, and log P may be large */
        for (int64_t step = 0; step < steps_of(a, q); step++) {
            const real *minus = second ? x_at(second, q, step) : 0;
            sum += mean_of(a, 1, x_at(a, q, step), 1, minus, 1, gradient_at(a, q, step));
        }
        sum += mean_of(a, (int)a->logarithms, p0_at(a, q), a->p0.step, second ? p0_at(second, q) : 0,
                       second ? second->p0.step : 0, gradient_at(a, q, 0));
        a->means.data[q] += sum;
    }
    return larger_of(forward, backward);
}
