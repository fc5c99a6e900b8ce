/* Forward and backward log messages, each entry exact however far it lies below the others:

       log_forward_i = log a_i + scales      a_i = (a_{i-1} P_i) exp(x_i - max x_i)
       log_backward_{i-1} = log b_{i-1} + scales      b_{i-1} = P_i (exp(x_i - max x_i) b_i)

   by the loops of forward.h in float64, and by those of exact.h for lossy sequences, and for all with `ends` or
   `starts`. Backward messages are the sums U of a forward pass over the reversed chain with transposed matrices. */
#pragma once
#include "exact.h"

static void walk_messages(Exact *w) {
    const Chain *a = w->a;
    walk_numbers_forward(w);
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = (Sum){0, 0}, w->digits[f] = 0;
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        step_numbers_backward(w, step);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f];
            real *out = logarithms_at(a, a->log_backward, w->set, q, step);
            if (step < steps_of(a, q)) write_log_numbers(w, f, out);
            else if (!a->starts) fill_impossible(a, out);
        }
    }
}

/* Log messages and log Z by forward passes in float64, of sequences that all have v steps. */
int64_t logchain_forward64(const Chain *);
static void messages_in_float64(Chain forward, Chain backward) {
    static const real one = 1, none = 0;
    int64_t last = forward.steps - 1;
    forward.float32 = backward.float32 = BITS == 32;
    forward.log_backward = backward.log_forward = 0;
    backward.x += last * forward.x_step, backward.x_step = -forward.x_step;
    backward.log_backward += last * forward.grad_step, backward.grad_step = -forward.grad_step;
    backward.bulk_from = forward.bulk_to, backward.bulk_to = forward.bulk_from;
    if (last > 0 && !forward.one_matrix)
        backward.bulk += (last - 1) * forward.bulk_step, backward.bulk_step = -forward.bulk_step;
    backward.p0 = forward.logarithms ? &none : &one, backward.p0_set = backward.p0_member = backward.p0_state = 0;
    logchain_forward64(&forward), logchain_forward64(&backward);
    for (int64_t q = forward.first; q < forward.last; q++) forward.lossy[q] |= backward.lossy[q];
}

EXPORT int64_t EXPORTED(logchain_messages)(const Chain *a) {
    Chain forward = *a, backward;
    Room room = {.begin = a->room};
    int64_t sequences = a->sets * a->members;
    double *log_norm = take(&room, sequences * 8), *unused = take(&room, sequences * 8);
    uint8_t *lossy = take(&room, sequences), *lossy_backward = take(&room, sequences);
    forward.messages = 0, forward.lossy = lossy, forward.room = rest_of(&room);
    if (!a->log_norm) forward.log_norm = log_norm;
    backward = forward;
    backward.log_norm = unused, backward.lossy = lossy_backward;
    if (!a->room)
        return room.bytes + larger_of(logchain_forward64(&forward), EXPORTED(logchain_redo_forward)(&forward));
    for (int64_t q = 0; q < sequences; q++) lossy[q] = 1;
    if (!a->ends && !a->starts) messages_in_float64(forward, backward);
    recompute(&forward, 1, walk_messages);
    for (int64_t q = a->first; q < a->last && a->value; q++) a->value[q] = (real)forward.log_norm[q];
    return 0;
}
