/* Gradients of chains of arcs: by arcs_linear.h as far down as it comes, and by numbers of arcs_wide.h from there, or
   from the end where the forward messages are such numbers. */
#pragma once
#include "arcs_wide.h"

/* The message that was kept of a step, into w->rows. */
static WideRow kept_message(WideWalk *w, int64_t q, int64_t step) {
    const ArcChain *a = w->a;
    int64_t c = a->states;
    if (a->lossy[q]) return wide_message_at(a, q, step);
    WideRow to = wide_row(w->rows, padded_states(c));
    const double *from = arc_message_at(a, q, step);
    for (int64_t j = 0; j < c; j += WIDE) store_number_of(to, j, wide_of(read_message(from + j, c - j)), c - j);
    return to;
}

/* Posteriors of a step times weight, from S, B and the sum of their products. */
static void write_wide_posteriors(const WideWalk *w, int64_t q, int64_t step, WideRow kept, Total total) {
    const ArcChain *a = w->a;
    int64_t c = a->states;
    real *gradient = a->grad_x ? a->grad_x + (q * a->steps + step) * c : 0;
    double *first = step == 0 && a->grad_p0 ? a->grad_p0 + q * c : 0, factor = a->weight[q] / total.part;
    for (int64_t j = 0; j < c && (gradient || first); j += WIDE) {
        Wide s = load_number_of(kept, j, c - j), b = load_number_of(w->sums, j, c - j);
        doubles posterior = s.m * b.m * wide_power_of(s.e + b.e - total.exponent) * factor;
        if (gradient) write_wide(gradient + j, posterior, c - j);
        if (first) write_message(first + j, posterior, c - j);
    }
}

/* Gradients of a sequence from a step down, where B is `backward`. `to`: null where weights have no gradient. */
static void walk_wide_arcs_backward(WideWalk *w, int64_t q, int64_t step, const double *backward, ArcCounts *to) {
    const ArcChain *a = w->a;
    int64_t c = a->states;
    WideRow source = w->rows, kept = kept_message(w, q, step);
    for (int64_t j = 0; j < c; j += WIDE)
        store_number_of(w->sums, j, wide_of(read_message(backward + j, c - j)), c - j);
    for (; step >= 0; step--) {
        Total total = total_of_products(c, kept, w->sums);
        write_wide_posteriors(w, q, step, kept, total);
        if (step == 0) return;
        double top = top_of_x(c, kept.m, arc_x_at(a, q, step)), highest = highest_exponent(c, w->sums);
        emit_wide(c, w->sums, kept.m, arc_x_at(a, q, step), top, -highest, source);
        wide_weights_into(w, q, step);
        total.exponent += -highest - a->powers[q * a->steps + step];
        kept = kept_message(w, q, step - 1);
        wide_sums(&w->weights, source, c, w->sums, to ? &kept : 0, LIFT - total.exponent,
                  a->weight[q] / total.part * double_power(-LIFT), to ? to->counts : 0);
        if (to) note_counts(a, q, step, to);
    }
}

static void fill_gradients(const ArcChain *a, int64_t q, int64_t begin, int64_t end, real value) {
    int64_t at = q * a->steps * a->states;
    for (int64_t k = begin * a->states; k < end * a->states && a->grad_x; k++) a->grad_x[at + k] = value;
    for (int64_t j = 0; j < a->states && a->grad_p0 && begin == 0; j++) a->grad_p0[q * a->states + j] = value;
}

/* Counts of a sequence whose log Z is NaN. */
static void count_not_a_number(const ArcChain *a, int64_t q, ArcCounts *to) {
    for (int64_t step = 1; step < steps_of_arcs(a, q); step++) {
        for (int64_t k = 0; k < slots_of(&a->out); k++) to->counts[k] = __builtin_nan("");
        note_counts(a, q, step, to);
        if (a->one_matrix) return;
    }
}

/* Gradients of a thread's sequences, those of weights added to what is there. */
EXPORT int64_t EXPORTED(logchain_arcs_backward)(const ArcChain *a) {
    Room room = {.begin = a->room};
    int64_t row = padded_states(a->states) * 8, slots = slots_of(&a->out), counted = a->counts || a->grad_weights;
    ArcBack b = {.a = a, .to = {.weights = {.slices = &a->out}, .set = -1}};
    b.to.weights.entries = take(&room, slots * (int64_t)sizeof(real));
    b.to.shares = take(&room, slots * 8), b.to.counts = take(&room, slots * 8);
    b.backward = take(&room, row), b.source = take(&room, row);
    WideWalk wide = new_wide_walk(a, &a->out, &room);
    if (!a->room) return room.bytes;
    for (int64_t k = 0; k < slots; k++) b.to.shares[k] = b.to.counts[k] = 0;
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = a->order[place], steps = steps_of_arcs(a, q);
        if (a->set[q] != b.to.counted_set) write_arc_counts(a, &b.to);
        if (a->weight[q] == 0 || a->log_norm[q] == -__builtin_inf()) {
            fill_gradients(a, q, 0, a->steps, 0);
            continue;
        }
        fill_gradients(a, q, steps, a->steps, 0);
        if (a->log_norm[q] != a->log_norm[q]) {
            fill_gradients(a, q, 0, steps, (real)__builtin_nan(""));
            if (counted) count_not_a_number(a, q, &b.to);
            continue;
        }
        for (int64_t j = 0; j < a->states; j++) b.backward[j] = 1;
        int64_t step = a->lossy[q] ? steps - 1 : walk_arcs_backward(&b, q);
        if (step >= 0) walk_wide_arcs_backward(&wide, q, step, b.backward, counted ? &b.to : 0);
    }
    write_arc_counts(a, &b.to);
    return 0;
}
