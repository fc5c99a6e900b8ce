/* Consecutive stretches of a longer chain, one call each: the message that leaves one enters the next. */
#pragma once
#include "call.h"

/* Last forward messages with sum 1, from their logarithms: an emission may have been raised. */
static void share_last(const Chain *a) {
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = sequence_in(a, place);
        real *out = filtered_at(a, q, steps_of(a, q) - 1);
        const double *leaving = a->around.leaving + q * a->states;
        for (int64_t j = 0; j < a->states && out; j += WIDE) {
            doubles logs = splat_wide(-__builtin_inf());
            UNROLL for (int l = 0; l < WIDE; l++) if (j + l < a->states) logs[l] = leaving[j + l];
            doubles shares = exponential_of(choose(logs < -708, splat_wide(-708), logs));
            shares = choose(logs == logs, choose(logs <= -708, splat_wide(0), shares), logs);
            write_wide(out + j, shares, a->states - j);
        }
    }
}

/* `value` of a stretch, with `entering_double` in place of `entering`. */
EXPORT int64_t EXPORTED(logchain_stretch)(const Chain *a) {
    Room room = {.begin = a->room};
    Chain chain = with_scratch(a, &room);
    int64_t entries = sequences_of(a) * a->states;
    real *entering = take(&room, entries * (int64_t)sizeof(real));
    chain.around.entering = entering, chain.room = rest_of(&room);
    if (!a->room) return room.bytes + find_value(&chain);
    for (int64_t place = a->first, c = a->states; place < a->last; place++)
        for (int64_t q = sequence_in(a, place), j = q * c; j < (q + 1) * c; j++)
            entering[j] = (real)a->around.entering_double[j];
    int64_t lossy = find_value(&chain);
    share_last(&chain);
    return lossy;
}
