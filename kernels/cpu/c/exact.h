/* Exact scans, forward and backward, see exact_step.h. */
#pragma once
#include "exact_step.h"

static void finish_scan(const Scan *w, Sequence *s) {
    double sum = sum_of_split_row(w->width, s->message, s->top);
    Sum log_norm = s->shift;
    add_powers(&log_norm, s->taken + (double)s->top), add(&log_norm, logarithm(sum));
    if (s->taken + (double)s->top > HUGE / 2) log_norm = (Sum){__builtin_inf(), 0};
    if (s->has_nan || sum == 0) log_norm = (Sum){s->has_nan ? __builtin_nan("") : -__builtin_inf(), 0};
    if (kind_of(w->a) == DENSE) finish_dense(w, s, sum, log_norm);
    else w->a->log_norm[s->place->index] = value_of(log_norm);
    fill_rows(w->a, s, w->a->log_forward, s->place->steps, w->a->steps, (operand)-INFINITE);
    fill_rows(w->a, s, w->a->filtered, s->place->steps, w->a->steps, 0);
}

static void scan_forward(Scan *w) {
    const Exact *a = w->a;
    for (int64_t f = 0; f < w->count && kind_of(a) == DENSE; f++)
        w->sequence[f].shift = log_norm_before(a->dense, w->sequence[f].place->index);
    for (int64_t step = 0; step < w->steps; step++) {
        if (step > 0) read_matrix(a, &w->matrix, w->sequence->place, step), sum_all(w, step);
        for (int64_t f = 0; f < w->count; f++) {
            Sequence *s = w->sequence + f;
            if (step >= s->place->steps) continue;
            s->has_nan |= step == 0 ? read_p0(a, s->place, s->sums) : w->matrix.has_nan;
            emit_split(w, s, step, forward_row(w, s->place, step));
            if (a->taken) a->taken[row_at(a, s->place, step)] = s->taken;
            write_forward(w, s, step);
            if (step + 1 == s->place->steps) finish_scan(w, s);
        }
    }
}

/* The gradient of p0, from T of step 0. */
static void write_p0_gradient(const Scan *w, const Sequence *s) {
    const Exact *a = w->a;
    double sum = 0, *out = a->grad_p0 + s->place->index * a->states;
    real top = 0;
    read_p0(a, s->place, s->sums);
    Mode mode = flush_to_zero(w->ordinary);
    top = top_of_products(w, &(Sequence){.sums = s->sums, .forward = s->message});
    for (int64_t j = 0; j < a->states; j += LANES) {
        Split t = load_split(s->message, j), p = load_split(s->sums, j);
        sum += (double)total(t.m * p.m * bounded_power((t.e + p.e) - top));
    }
    for (int64_t j = 0; j < a->states; j += LANES) {
        Split t = load_split(s->message, j), p = load_split(s->sums, j);
        Split value = {t.m * (real)(weight_of(a, s) / sum), t.e - top};
        if (a->logarithms || a->by_log) value.m *= p.m, value.e += p.e;
        value.m = where((p.e > -INFINITE) & (value.e > -INFINITE), value_of_split(value), splat(0));
        UNROLL for (int l = 0; l < LANES; l++) if (j + l < a->states) out[j + l] = (double)value.m[l];
    }
    set_mode(mode);
}

/* S of a step and how it is scaled, before the sums B of that step: by Z of the step before, or by the last S. */
static void begin_step(Scan *w, Sequence *s, int64_t step, real *counts) {
    const Exact *a = w->a;
    int last = step + 1 == s->place->steps;
    s->counting = (Counting){.counts = last ? 0 : counts, .lift = w->counts.lift};
    if (last) last_split_row(w, s);
    if (!a->log_norm) return;
    if (kind_of(a) == DENSE) return begin_dense(w, s, step);
    double taken = a->taken[row_at(a, s->place, step)];
    s->forward = forward_row(w, s->place, step);
    if (last) {
        real top = top_of_row(w->width, s->forward);
        s->sum = sum_of_split_row(w->width, s->forward, top), s->whole = taken + (double)top;
    }
    s->counting.shift = (real)(taken + s->taken - s->whole);
    s->counting.share = (real)(weight_of(a, s) / s->sum), s->counting.forward = s->forward;
}

/* Posteriors, counts of dense matrices, and T. */
static void end_step(Scan *w, Sequence *s, int64_t step) {
    const Exact *a = w->a;
    operand *logs = output_row(a, a->log_backward, s, step), *out = output_row(a, a->grad_x, s, step);
    if (logs) write_whole_logs(w, s, s->sums, logs);
    if (a->log_norm && kind_of(a) == DENSE) end_dense(w, s, step, out);
    else if (a->log_norm) {
        double sum = write_posteriors(w, s, out);
        double change = sum / s->sum - 1;
        if (change > -0x1p-12 && change < 0x1p-12) s->sum = sum;
        else find_posteriors(w, s, out); /* exponents beyond EXACT */
    }
    emit_split(w, s, step, (Row){0, 0});
}

/* Gradients of a sequence that has none, or NaN where log Z is NaN; of others zeros after the end. */
static void fill_gradients(Scan *w, Sequence *s, real *counts) {
    const Exact *a = w->a;
    double log_norm = a->log_norm[s->place->index], weight = weight_of(a, s);
    int64_t c = a->states, steps = s->place->steps;
    s->idle = weight == 0 || !(log_norm > -__builtin_inf());
    real none = s->idle && weight != 0 && log_norm != log_norm ? (real)log_norm : 0;
    fill_rows(a, s, a->grad_x, 0, s->idle ? steps : 0, (operand)none);
    fill_rows(a, s, a->grad_x, steps, a->steps, 0);
    double *leaving = kind_of(a) == DENSE && s->idle ? leaving_backward(a->dense) : 0;
    for (int64_t j = 0; j < c && leaving; j++) leaving[s->place->index * c + j] = (double)none;
    for (int64_t j = 0; j < c && a->grad_p0; j++) a->grad_p0[s->place->index * c + j] = (double)none;
    for (int64_t step = 1; step < steps && none != none && counts; step++) {
        read_matrix(a, &w->matrix, s->place, step);
        for (int64_t k = 0; k < w->counts.entries * LANES; k++) counts[k] = none;
        if (a->one_matrix) return add_recent(&w->counts);
        write_entry_counts(a, &w->matrix, s->place, step, &w->counts);
    }
}

/* Whether two sequences share weights, and their counts. */
INLINE int share_weights(const Place *a, const Place *b) { return a->weights == b->weights && a->counts == b->counts; }

/* Whether the next sequences, of this thread, have other weights. */
INLINE int ends_weights(const Scan *w) {
    const Place *next = w->sequence[w->count - 1].place + 1;
    return next == w->a->places + w->a->last || !share_weights(next, next - 1);
}

static void scan_backward(Scan *w) {
    const Exact *a = w->a;
    real *counts = a->counts || a->grad_weights ? w->counts.recent : 0;
    for (int64_t f = 0; f < w->count; f++) {
        Sequence *s = w->sequence + f;
        if (a->log_norm) fill_gradients(w, s, counts);
        fill_rows(a, s, a->log_backward, s->place->steps, a->steps, (operand)-INFINITE);
    }
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        for (int64_t f = 0; f < w->count; f++)
            if (is_active(w->sequence + f, step)) begin_step(w, w->sequence + f, step, counts);
        if (step + 1 < w->steps) read_matrix(a, &w->matrix, w->sequence->place, step + 1), sum_all(w, step + 1);
        Mode mode = flush_to_zero(w->ordinary);
        for (int64_t f = 0; f < w->count; f++) {
            Sequence *s = w->sequence + f;
            if (!is_active(s, step)) continue;
            w->counts.steps += s->counting.counts != 0, s->has_nan |= step + 1 < w->steps && w->matrix.has_nan;
            end_step(w, s, step);
        }
        if (a->one_matrix && w->counts.steps >= COUNTED_TOGETHER) add_recent(&w->counts);
        if (!a->one_matrix && w->counts.steps)
            write_entry_counts(a, &w->matrix, w->sequence->place, step + 1, &w->counts);
        set_mode(mode);
    }
    for (int64_t f = 0; f < w->count && a->grad_p0; f++)
        if (!w->sequence[f].idle) write_p0_gradient(w, w->sequence + f);
    if (!a->one_matrix || !counts || !w->matrix.of || !ends_weights(w)) return;
    Mode mode = flush_to_zero(w->ordinary);
    write_entry_counts(a, &w->matrix, w->sequence->place, 1, &w->counts);
    set_mode(mode);
}

/* Whether what is flushed to zero is negligible, see flush.h, and the lift of counts, which large weights lower. */
static void read_weights(Scan *w) {
    const Exact *a = w->a;
    double least = __builtin_inf(), most = 0;
    for (int64_t place = a->first; place < a->last && a->weight; place++) {
        double weight = a->weight[a->places[place].index], size = weight < 0 ? -weight : weight;
        least = size > 0 && size < least ? size : least, most = size > most ? size : most;
    }
    w->ordinary = are_ordinary(least, most), w->counts.lift = LIFT + COUNT_LIFT;
    for (; most > 1 && most < __builtin_inf(); most /= 2) w->counts.lift -= 1;
}

/* How far sums reach from a state, in whole vectors. */
static int64_t reach_of(const Exact *a) {
    int64_t reach = kind_of(a) == DURATIONS;
    for (int64_t d = 0; d < a->terms && kind_of(a) == BANDS; d++) {
        int64_t o = ((const int64_t *)a->pattern)[d];
        reach = larger_of(reach, o < 0 ? -o : o);
    }
    return whole_vectors(reach);
}

/* Runs `scan` on the sequences of a thread: on those of one matrix one by one, unless it is dense, on others in groups
   that share the matrix of each step. Returns in how many exponents beyond EXACT matter. */
static int64_t scan_all(const Exact *a, int backward, void scan(Scan *)) {
    Scratch scratch = {.begin = a->scratch};
    int64_t reach = reach_of(a), together = a->one_matrix ? 1 : a->last - a->first, inexact = 0;
    if (kind_of(a) == DENSE) together = a->dense->members;
    int64_t count = larger_of(1, smaller_of(together, TOGETHER)), bytes = (int64_t)sizeof(real);
    Scan w = {.a = a, .width = whole_vectors(a->states), .next_row = backward ? -a->x.step : a->x.step};
    w.matrix = new_matrix(a, backward, &scratch);
    w.pairs = take(&scratch, kind_of(a) == ARCS ? w.width * (int64_t)sizeof(Pair) : 0);
    w.counts.entries = backward ? entries_of(a, &w.matrix) : 0;
    w.counts.recent = take(&scratch, w.counts.entries * LANES * bytes);
    if (a->one_matrix) w.counts.total = take(&scratch, w.counts.entries * LANES * 8);
    Sequence sequences[TOGETHER], current[TOGETHER];
    for (int64_t f = 0; f < count; f++) {
        Row row = take_row(&scratch, w.width + 2 * reach), sums = take_row(&scratch, w.width + LANES);
        Row forward = take_row(&scratch, kind_of(a) == DENSE ? w.width : 0);
        real *aligned = take(&scratch, kind_of(a) == BANDS || kind_of(a) == DURATIONS ? 0 : w.width * bytes);
        sequences[f] =
            (Sequence){.message = row_from(row, reach), .sums = sums, .forward = forward, .aligned = aligned};
        if (!a->scratch) continue;
        clear_row(w.width + 2 * reach, row), clear_row(w.width, sums);
        if (kind_of(a) == DENSE) clear_row(w.width, forward);
    }
    if (!a->scratch) return scratch.bytes;
    read_weights(&w), clear_counts(&w.counts), w.sequence = current;
    for (int64_t place = a->first; place < a->last; place += w.count) {
        const Place *first = a->places + place;
        w.steps = w.count = 0;
        while (w.count < count && place + w.count < a->last && share_weights(first + w.count, first)) {
            current[w.count] = sequences[w.count], current[w.count].place = first + w.count, current[w.count].sum = 1;
            current[w.count].level = -__builtin_inf();
            w.steps = larger_of(w.steps, first[w.count++].steps);
        }
        scan(&w);
        for (int64_t f = 0; f < w.count; f++) inexact += current[f].inexact;
    }
    return inexact;
}

/* log Z, and messages where they are kept; gradients from these. Both return in how many sequences exponents beyond
   EXACT matter. The wide ones compute in float64 with operands in float32. */
#if defined(FLOAT32_OPERANDS)
EXPORT int64_t EXPORTED(logchain_wide_forward)(const Exact *a) { return scan_all(a, 0, scan_forward); }
EXPORT int64_t EXPORTED(logchain_wide_backward)(const Exact *a) { return scan_all(a, 1, scan_backward); }
#else
EXPORT int64_t EXPORTED(logchain_exact_forward)(const Exact *a) { return scan_all(a, 0, scan_forward); }
EXPORT int64_t EXPORTED(logchain_exact_backward)(const Exact *a) { return scan_all(a, 1, scan_backward); }
/* Entries of a vector: rows of messages are whole vectors, and those of best paths at least one. */
EXPORT int64_t EXPORTED(logchain_lanes)(void) { return LANES; }
#endif
