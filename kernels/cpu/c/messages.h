/* Forward and backward messages, each entry a natural logarithm that is exact however far it lies below the others:

       forward_i = log(a_i) + what was taken out,  a_i = (a_{i-1} P_i) exp(x_i - max x_i)
       backward_{i-1} = log(b_{i-1}) + what was taken out,  b_{i-1} = P_i (exp(x_i - max x_i) b_i)

   by the loops of forward.h in float64, or in the numbers of exact.h where something may underflow. Backward messages
   are the sums of a walk from the end, under matrices that are turned. */
#pragma once
#include "exact.h"

static void walk_messages(Exact *w) {
    const Chain *a = w->a;
    walk_numbers_ahead(w);
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = (Sum){0, 0}, w->digits[f] = 0;
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        step_numbers_back(w, step);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f];
            real *out = logarithms_at(a, a->log_backward, w->set, q, step);
            if (step < steps_of(a, q)) write_log_numbers(w, f, out);
            else if (!a->starts) write_none(a, out);
        }
    }
}

/* Messages in float64 of sequences that all have as many steps; log Z. */
int64_t logchain_forward64(const Chain *), logchain_room64(const Chain *);
static void messages_of(const Chain *a, Chain back) {
    static const real one = 1, none = 0;
    Chain ahead = *a;
    int64_t last = a->steps - 1;
    ahead.single = back.single = BITS == 32;
    ahead.log_backward = back.log_forward = 0;
    back.x += last * a->x_step, back.x_step = -a->x_step;
    back.log_backward += last * a->grad_step, back.grad_step = -a->grad_step;
    back.bulk_from = a->bulk_to, back.bulk_to = a->bulk_from;
    if (last > 0 && !a->one_matrix) back.bulk += (last - 1) * a->bulk_step, back.bulk_step = -a->bulk_step;
    back.p0 = a->logarithms ? &none : &one, back.p0_set = back.p0_member = back.p0_state = 0;
    logchain_forward64(&ahead), logchain_forward64(&back);
    for (int64_t q = a->first; q < a->last; q++) a->lossy[q] |= back.lossy[q];
}

/* Messages and log Z of all sequences. */
EXPORT int64_t EXPORTED(logchain_messages)(const Chain *a) {
    Chain all = *a, back;
    int64_t sequences = a->sets * a->members;
    all.messages = 0, all.lossy = take(&all.room, sequences);
    if (!a->log_norm) all.log_norm = take(&all.room, sequences * 8);
    back = all;
    back.lossy = take(&all.room, sequences), back.log_norm = take(&all.room, sequences * 8);
    back.room = all.room;
    for (int64_t q = 0; q < sequences; q++) all.lossy[q] = 1;
    if (!a->ends && !a->starts) messages_of(&all, back);
    redo(&all, 1, walk_messages);
    for (int64_t q = a->first; q < a->last && a->value; q++) a->value[q] = (real)all.log_norm[q];
    return 0;
}

/* Bytes of scratch for them. */
EXPORT int64_t EXPORTED(logchain_messages_room)(const Chain *a) {
    int64_t plain = logchain_room64(a), redone = EXPORTED(logchain_redo_room)(a);
    return (plain > redone ? plain : redone) + 2 * a->sets * a->members * 17 + 6 * 64;
}
