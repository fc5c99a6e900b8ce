/* Forward and backward log messages, each entry exact however far it lies below the others:

       log_forward_i = log a_i + scales      a_i = (a_{i-1} P_i) exp(x_i - max x_i)
       log_backward_{i-1} = log b_{i-1} + scales      b_{i-1} = P_i (exp(x_i - max x_i) b_i)

   by the loops of forward.h, and by exact scans for lossy sequences, and for all with `ends` or `starts`. Backward
   messages are the sums U of a forward pass over the reversed chain with transposed matrices. */
#pragma once
#include "backward.h"

/* The chain and the reversed one, of sequences that all have v steps: forward passes over them write their log messages,
   log Z and `lossy`. */
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

/* The messages of one direction, that for which there is memory. The number of lossy sequences. */
EXPORT int64_t EXPORTED(logchain_messages_one_way)(const Chain *a) {
    Chain chain = a->out.log_forward ? onward(*a) : reversed(*a);
    return EXPORTED(logchain_forward)(&chain);
}

EXPORT int64_t EXPORTED(logchain_messages)(const Chain *a) {
    Chain forward = *a;
    Room room = {.begin = a->room};
    int64_t sequences = a->sets * a->members;
    double *log_norm = take(&room, sequences * 8), *unused = take(&room, sequences * 8);
    uint8_t *lossy = take(&room, sequences), *lossy_backward = take(&room, sequences);
    forward.messages.data = 0, forward.lossy = lossy, forward.room = rest_of(&room);
    if (!a->log_norm) forward.log_norm = log_norm;
    Chain one = onward(forward), other = reversed(forward);
    other.log_norm = unused, other.lossy = lossy_backward;
    if (!a->room)
        return room.bytes + larger_of(EXPORTED(logchain_forward)(&one), EXPORTED(logchain_redo_messages)(&forward));
    for (int64_t q = 0; q < sequences; q++) lossy[q] = 1;
    if (!a->ends && !a->packed) {
        EXPORTED(logchain_forward)(&one);
        EXPORTED(logchain_forward)(&other);
        for (int64_t q = a->first; q < a->last; q++) lossy[q] |= lossy_backward[q];
    }
    EXPORTED(logchain_redo_messages)(&forward);
    for (int64_t q = a->first; q < a->last && a->value; q++) a->value[q] = (real)forward.log_norm[q];
    return 0;
}
