/* log Z of any chain; gradients and posteriors of short ones; stretches, log messages and means: one call each. Flagged
   sequences are recomputed exactly, and results are rounded to `real`. */
#pragma once
#include "backward.h"

INLINE int64_t sequences_of(const Chain *a) { return a->sets * a->members; }

/* The chain with scratch in place of a `log_norm` and `flagged` that the caller does not want. */
static Chain with_defaults(const Chain *a, Scratch *scratch) {
    Chain chain = *a;
    double *log_norm = take(scratch, sequences_of(a) * 8);
    uint8_t *flagged = take(scratch, sequences_of(a));
    if (!a->log_norm) chain.log_norm = log_norm;
    if (!a->flagged) chain.flagged = flagged;
    chain.scratch = rest_of(scratch);
    return chain;
}

INLINE int is_negative(int64_t c, const real *from, int64_t step) {
    wholes below = {0};
    for (int64_t j = 0; j < c; j += LANES) below |= read_some(from + j * step, step, c - j, 0) < 0;
    return any(below);
}
/* Whether p0, or a matrix that serves all steps, has an entry below 0. */
EXPORT int64_t EXPORTED(logchain_has_negative)(const Chain *a) {
    int64_t c = a->states, from = a->bulk.from, to = a->bulk.to;
    if (a->logarithms) return 0;
    if (to != 1) from = a->bulk.to, to = a->bulk.from;
    for (int64_t set = 0; set < a->sets && a->one_matrix && a->steps > 1; set++)
        for (int64_t k = 0; k < c; k++)
            if (is_negative(c, matrix_at(&a->bulk, set, 1) + k * from, to)) return 1;
    for (int64_t q = 0; q < sequences_of(a); q++)
        if ((q == 0 || p0_at(a, q) != p0_at(a, q - 1)) && is_negative(c, p0_at(a, q), a->p0.step)) return 1;
    return 0;
}

/* Writes log Z, rounded, to `value`. */
static void write_values(const Chain *a) {
    for (int64_t place = a->first; place < a->last && a->value; place++) {
        int64_t q = sequence_in(a, place);
        a->value[q] = (real)a->log_norm[q];
    }
}

/* Writes log Z to log_norm and `value`; returns how many sequences were recomputed exactly. */
static int64_t find_value(const Chain *a) {
    int64_t flagged = EXPORTED(logchain_forward)(a);
    if (!a->scratch) return larger_of(flagged, EXPORTED(logchain_recompute_forward)(a));
    if (flagged) EXPORTED(logchain_recompute_forward)(a);
    write_values(a);
    return flagged;
}

/* Rounds the gradients of p0 (g, m, c) into its shape; those that share a row there are added in `sums`. */
static void write_p0_gradients(const Chain *a, const double *gradients, double *sums) {
    int64_t c = a->states, entries = sequences_of(a) * c;
    const Rows *to = &a->grad_p0_real;
    for (int64_t k = 0; k < entries; k++) sums[k] = 0;
    for (int64_t k = 0; k < entries; k++) sums[to->at[k / c] + k % c] += gradients[k];
    for (int64_t k = 0; k < entries; k++) to->data[to->at[k / c] + k % c] = (real)sums[to->at[k / c] + k % c];
}

/* Gradients in the operands' shapes, from the messages that `value` keeps; sums over sequences are float64. */
EXPORT int64_t EXPORTED(logchain_gradients)(const Chain *a) {
    Chain chain = *a;
    Scratch scratch = {.begin = a->scratch};
    int64_t square = a->states * a->states;
    uint8_t *flagged = take(&scratch, sequences_of(a)); /* a copy: the caller may ask for gradients again */
    double *counts = take(&scratch, a->sets * square * 8), *grad_p0 = take(&scratch, sequences_of(a) * a->states * 8);
    double *sums = take(&scratch, sequences_of(a) * a->states * 8);
    chain.flagged = flagged, chain.uncounted = take(&scratch, sequences_of(a) * 8), chain.scratch = rest_of(&scratch);
    if (!a->scratch)
        return scratch.bytes +
               larger_of(EXPORTED(logchain_backward)(&chain), EXPORTED(logchain_recompute_backward)(&chain));
    for (int64_t q = 0; q < sequences_of(a); q++) flagged[q] = a->flagged[q];
    if (a->grad_bulk.data && a->one_matrix) {
        chain.grad_bulk.data = 0, chain.counts = counts;
        for (int64_t k = 0; k < a->sets * square; k++) counts[k] = 0;
    }
    if (a->grad_p0_real.data) chain.grad_p0 = grad_p0;
    if (EXPORTED(logchain_backward)(&chain)) EXPORTED(logchain_recompute_backward)(&chain);
    for (int64_t k = 0; k < a->sets * square && chain.counts; k++)
        a->grad_bulk.data[a->grad_bulk.at[k / square] + k % square] = (real)counts[k];
    if (a->grad_p0_real.data) write_p0_gradients(a, grad_p0, sums);
    return 0;
}

EXPORT int64_t EXPORTED(logchain_value)(const Chain *a) {
    Scratch scratch = {.begin = a->scratch};
    Chain chain = with_defaults(a, &scratch);
    int64_t flagged = find_value(&chain);
    return a->scratch ? flagged : scratch.bytes + flagged;
}

/* `value` and then `gradients`, for weights of one; returns how many sequences were recomputed exactly forward. */
EXPORT int64_t EXPORTED(logchain_posteriors)(const Chain *a) {
    Scratch scratch = {.begin = a->scratch};
    Chain chain = with_defaults(a, &scratch);
    double *weight = take(&scratch, sequences_of(a) * 8);
    chain.messages.data = take(&scratch, a->steps * sequences_of(a) * a->states * (int64_t)sizeof(real));
    chain.weight = weight, chain.scratch = rest_of(&scratch);
    for (int64_t q = 0; q < sequences_of(a) && a->scratch; q++) weight[q] = 1;
    int64_t flagged = find_value(&chain);
    int64_t gradients = EXPORTED(logchain_gradients)(&chain);
    return a->scratch ? flagged : scratch.bytes + larger_of(flagged, gradients);
}

/* Last forward messages of a stretch, with sum 1, from their logarithms: an emission may have been raised. */
static void share_last(const Chain *a) {
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = sequence_in(a, place);
        real *out = output_at(a, a->out.filtered, q, steps_of(a, q) - 1);
        const double *leaving = a->boundary.leaving + q * a->states;
        for (int64_t j = 0; j < a->states && out; j += WIDE) {
            doubles logs = read_doubles(leaving + j, a->states - j, 0);
            write_wide(out + j, exponential_or_zero(logs), a->states - j);
        }
    }
}

/* `value` of a stretch of a longer chain: the message that leaves one enters the next, as `entering_double`. */
EXPORT int64_t EXPORTED(logchain_stretch)(const Chain *a) {
    Scratch scratch = {.begin = a->scratch};
    Chain chain = with_defaults(a, &scratch);
    int64_t entries = sequences_of(a) * a->states;
    real *entering = take(&scratch, entries * (int64_t)sizeof(real));
    chain.boundary.entering = entering, chain.scratch = rest_of(&scratch);
    if (!a->scratch) return scratch.bytes + find_value(&chain);
    for (int64_t place = a->first, c = a->states; place < a->last; place++)
        for (int64_t q = sequence_in(a, place), j = q * c; j < (q + 1) * c; j++)
            entering[j] = (real)a->boundary.entering_double[j];
    int64_t flagged = find_value(&chain);
    share_last(&chain);
    return flagged;
}

/* Forward and backward log messages, each entry exact however far it lies below the others:

       log_forward_i = log a_i + scales      a_i = (a_{i-1} P_i) exp(x_i - max x_i)
       log_backward_{i-1} = log b_{i-1} + scales      b_{i-1} = P_i (exp(x_i - max x_i) b_i)

   by the loops of forward.h, and by exact scans for flagged sequences, and for all with `ends` or if `packed`. Backward
   messages are the sums U of a forward pass over the reversed chain with transposed matrices. */

/* The chain and the reversed one, of sequences that all have v steps: forward passes over them write their log
   messages, log Z and `flagged`. */
static Chain onward(Chain a) {
    a.messages.data = 0, a.out.log_backward = 0;
    return a;
}
static Chain reversed(Chain a) {
    static real one = 1, none = 0;
    int64_t last = a.steps - 1, from = a.bulk.from;
    a.messages.data = 0, a.out.log_forward = 0;
    a.x.data += last * a.x.step, a.x.step = -a.x.step;
    a.out.log_backward += last * a.out.step, a.out.step = -a.out.step;
    a.bulk.from = a.bulk.to, a.bulk.to = from;
    if (last > 0) a.bulk.data += (last - 1) * a.bulk.step, a.bulk.step = -a.bulk.step;
    a.p0 = (Rows){.data = a.logarithms ? &none : &one};
    return a;
}

/* Writes the messages of one direction, that for which there is memory; returns the number of flagged sequences. */
EXPORT int64_t EXPORTED(logchain_messages_one_way)(const Chain *a) {
    Chain chain = a->out.log_forward ? onward(*a) : reversed(*a);
    return EXPORTED(logchain_forward)(&chain);
}

EXPORT int64_t EXPORTED(logchain_messages)(const Chain *a) {
    Scratch scratch = {.begin = a->scratch};
    Chain chain = with_defaults(a, &scratch);
    int64_t sequences = sequences_of(a);
    double *unused = take(&scratch, sequences * 8);
    uint8_t *flagged = take(&scratch, sequences), *flagged_backward = take(&scratch, sequences);
    chain.messages.data = 0, chain.flagged = flagged, chain.scratch = rest_of(&scratch);
    Chain forward = onward(chain), backward = reversed(chain);
    backward.log_norm = unused, backward.flagged = flagged_backward;
    if (!a->scratch)
        return scratch.bytes +
               larger_of(EXPORTED(logchain_forward)(&forward), EXPORTED(logchain_recompute_messages)(&chain));
    for (int64_t q = 0; q < sequences; q++) flagged[q] = 1;
    if (!a->ends && !a->packed) {
        EXPORTED(logchain_forward)(&forward);
        EXPORTED(logchain_forward)(&backward);
        for (int64_t q = a->first; q < a->last; q++) flagged[q] |= flagged_backward[q];
    }
    EXPORTED(logchain_recompute_messages)(&chain);
    write_values(&chain);
    return 0;
}

/* Means of log-weights of paths, or of their differences from those of a second chain, for kernels/plain/entropy.py:

       sum over steps of <posterior_i, x_i> + <posterior_0, log p0> + the means of log P, see counts.h

   Loops raise emissions, and weights that are logarithms, to 2^-DEEPEST times the largest, which is near 1: posteriors
   that come from these are too large by as much, and are corrected. */

/* The mean of c logarithms, or of those of weights, `step` apart, less those of `minus`, under shares that need not add
   up to 1; 0 if there are none. */
static double mean_of(const Chain *a, int are_logs, const real *from, int64_t step, const real *minus,
                      int64_t minus_step, real *shares) {
    reals sum = {0}, norm = {0};
    for (int64_t j = 0, c = a->states; j < c; j += LANES) {
        reals share = read_some(shares + j, 1, c - j, 0);
        reals terms = logs_of_weights(are_logs, from + j * step, step, c - j);
        reals deep = terms - LOG_DEEPEST;
        if (are_logs && any((share > 0) & (deep < 0))) {
            share *= where(deep < LOG_DEEPEST, (reals){0}, exponential(smaller(deep, (reals){0}), NO_TAIL));
            write_some(shares + j, share, c - j);
        }
        if (minus) terms -= logs_of_weights(are_logs, minus + j * minus_step, minus_step, c - j);
        sum += where(share > 0, share * terms, (reals){0}), norm += where(share > 0, share, (reals){0});
    }
    real whole = total(norm);
    return whole > 0 ? (double)total(sum) / (double)whole : 0;
}

/* log Z and `means` of a thread's sequences, NaN for flagged ones; posteriors are left in grad_x. */
EXPORT int64_t EXPORTED(logchain_means)(const Chain *a) {
    int64_t forward = EXPORTED(logchain_forward)(a), backward = EXPORTED(logchain_backward)(a);
    const Chain *second = a->means.second;
    for (int64_t place = a->first; place < a->last && a->scratch; place++) {
        int64_t q = sequence_in(a, place);
        if (a->flagged[q]) a->means.data[q] = (double)__builtin_nanf("");
        if (!has_gradient(a, q) || a->means.data[q] != a->means.data[q]) continue;
        double sum = 0; /* small, and log P may be large */
        for (int64_t step = 0; step < steps_of(a, q); step++) {
            const real *minus = second ? x_at(second, q, step) : 0;
            sum += mean_of(a, 1, x_at(a, q, step), 1, minus, 1, output_at(a, a->out.grad_x, q, step));
        }
        sum += mean_of(a, (int)a->logarithms, p0_at(a, q), a->p0.step, second ? p0_at(second, q) : 0,
                       second ? second->p0.step : 0, output_at(a, a->out.grad_x, q, 0));
        a->means.data[q] += sum;
    }
    return larger_of(forward, backward);
}

/* The size of the struct, which other languages compare with their own. */
EXPORT int64_t EXPORTED(logchain_size)(void) { return sizeof(Chain); }
