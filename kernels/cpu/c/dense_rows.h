/* Messages that exact scans write as logarithms or divided by their sums, and what those of dense chains read and write
   at a step: rows of `Chain`, in its layout. */
#pragma once
#include "exact_step.h"
#include "scale.h"

/* Natural logarithms of numbers over 2^base. */
INLINE reals logarithms_of_split(Split a, real base) {
    reals e = a.e - base, log = e * LN2_HIGH + (e * LN2_LOW + logarithms(a.m));
    return where(a.e > -INFINITE, log, splat(-INFINITE));
}

/* The row of a step in an array with the strides of grad_x; null where there is none. */
INLINE operand *output_row(const Exact *a, operand *rows, const Sequence *s, int64_t step) {
    return row_or_null(a->dense, rows, s->place->index, step);
}

/* A row as logarithms, with all that it lacks or with the largest near 0; NaN if an operand was no number. */
static void write_logs(const Scan *w, const Sequence *s, Row row, real base, Sum shift, operand *out) {
    for (int64_t j = 0; j < w->a->states; j += LANES) {
        reals logs = (real)shift.sum + ((real)shift.error + logarithms_of_split(load_split(row, j), base));
        write_some(out + j, s->has_nan ? splat((real)__builtin_nan("")) : logs, w->a->states - j);
    }
}
static void write_whole_logs(const Scan *w, const Sequence *s, Row row, operand *out) {
    Sum shift = s->shift;
    add_powers(&shift, s->taken);
    write_logs(w, s, row, 0, shift, out);
}

/* The message of a step divided by its sum. */
static void write_shares(const Scan *w, const Sequence *s, operand *out) {
    double sum = sum_of_split_row(w->width, s->message, s->top);
    real share = s->has_nan ? (real)__builtin_nan("") : sum > 0 ? (real)(1 / sum) : 0;
    for (int64_t j = 0; j < w->a->states; j += LANES) {
        Split b = load_split(s->message, j);
        write_some(out + j, b.m * power(b.e - s->top) * share, w->a->states - j);
    }
}

/* A message that leaves: logarithms of a row over 2^base, less `less`. */
static void write_leaving_logs(const Scan *w, const Sequence *s, Row row, real base, double less) {
    int64_t c = w->a->states;
    double *out = w->a->dense->around.leaving + s->place->index * c;
    for (int64_t j = 0; j < c; j += LANES) {
        reals logs = logarithms_of_split(load_split(row, j), base);
        UNROLL for (int l = 0; l < LANES; l++) if (j + l < c) out[j + l] = (double)logs[l] - less;
    }
}

static void fill_row(int64_t c, operand value, operand *row) {
    for (int64_t j = 0; j < c && row; j++) row[j] = value;
}

/* The message of a step: as it is kept, in logarithms, and divided by its sum. */
static void write_dense_forward(const Scan *w, const Sequence *s, int64_t step) {
    const Chain *a = w->a->dense;
    operand *logs = output_row(w->a, a->out.log_forward, s, step), *shares = output_row(w->a, a->out.filtered, s, step);
    if (a->messages.data) write_logs(w, s, s->message, s->top, (Sum){0, 0}, message_at(a, s->place->index, step));
    if (logs) write_whole_logs(w, s, s->message, logs);
    if (shares) write_shares(w, s, shares);
}

/* Results after the last step; `sum`: that of the message over 2^top. */
static void finish_dense(const Scan *w, const Sequence *s, double sum, Sum log_norm) {
    const Chain *a = w->a->dense;
    int64_t q = s->place->index;
    write_log_norm(a, q, log_norm);
    double log_sum = s->has_nan ? log_norm.sum : sum == 0 ? 0 : logarithm(sum);
    if (a->around.leaving) write_leaving_logs(w, s, s->message, s->top, log_sum);
    for (int64_t step = s->place->steps; step < a->steps && !a->packed; step++) {
        if (a->messages.data) fill_row(a->states, 0, message_at(a, q, step));
        fill_row(a->states, (operand)-INFINITE, output_row(w->a, a->out.log_forward, s, step));
        fill_row(a->states, 0, output_row(w->a, a->out.filtered, s, step));
    }
}

/* Backward messages after the last step. */
static void fill_backward_logs(const Scan *w, const Sequence *s) {
    const Chain *a = w->a->dense;
    for (int64_t step = s->place->steps; step < a->steps && !a->packed; step++)
        fill_row(a->states, (operand)-INFINITE, output_row(w->a, a->out.log_backward, s, step));
}

/* Undoes the raising of emissions in a kept linear message of a last step: no sum has been tested for it. */
static void lower_raised(const Scan *w, const Sequence *s, int64_t step) {
    const operand *x = x_row(w->a, s->place, step);
    int64_t c = w->a->states;
    real top = -INFINITE;
    for (int64_t j = 0; j < c; j++) top = (real)x[j] > top ? (real)x[j] : top;
    for (int64_t j = 0; j < c; j += LANES) {
        reals below = read_some(x + j, 1, c - j, top) - top - LOG_DEEPEST;
        Split factor = exponential_split(smaller(below, splat(0)), 1), kept = load_split(s->kept, j);
        store_split(s->kept, j, settled(kept.m * factor.m, kept.e + factor.e));
    }
}

/* S of a step as it was kept: logarithms if the sequence was recomputed, otherwise linear. */
static void begin_dense(const Scan *w, Sequence *s, int64_t step) {
    const Chain *a = w->a->dense;
    int64_t q = s->place->index;
    int logs = a->lossy[q] & 1, last = step + 1 == s->place->steps;
    if (step + 1 > a->uncounted[q]) s->counting.counts = 0;
    for (int64_t j = 0; j < a->states; j += LANES) {
        reals kept = read_some(message_at(a, q, step) + j, 1, a->states - j, logs ? -INFINITE : 0);
        store_split(s->kept, j, weight_split(kept, logs));
    }
    if (a->around.following && last && !logs) lower_raised(w, s, step);
}

/* B at a last step: ones, or the exponentials of `following` less its largest. */
static void last_dense(const Scan *w, Sequence *s) {
    int64_t c = w->a->states;
    const double *following = w->a->dense->around.following ? w->a->dense->around.following + s->place->index * c : 0;
    double top = -__builtin_inf();
    for (int64_t j = 0; j < c && following; j++) top = following[j] > top ? following[j] : top;
    top = top > -__builtin_inf() ? top : 0;
    for (int64_t j = 0; j < c; j += LANES) {
        reals logs = splat(-INFINITE);
        UNROLL for (int l = 0; l < LANES; l++)
            if (j + l < c) logs[l] = following ? (real)(following[j + l] - top) : 0;
        store_split(s->sums, j, weight_split(logs, 1));
    }
}

/* Posteriors and counts of a step, or its backward messages in logarithms. */
static void end_dense(const Scan *w, Sequence *s, int64_t step) {
    const Chain *a = w->a->dense;
    operand *logs = output_row(w->a, a->out.log_backward, s, step);
    if (logs) write_whole_logs(w, s, s->sums, logs);
    if (!w->a->log_norm) return;
    find_posteriors(w, s, output_row(w->a, a->out.grad_x, s, step));
    if (s->counting.counts && s->sum > 0) s->counting.kept = s->kept, count_dense(&w->matrix, &s->factor, &s->counting);
    if (step == 0 && leaving_backward(a)) write_leaving_logs(w, s, s->sums, top_of_row(w->width, s->sums), 0);
}
