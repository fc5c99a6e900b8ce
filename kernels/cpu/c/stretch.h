/* One stretch of a longer chain after the other, each in one call: the message that enters is the one that left. */
#pragma once
#include "call.h"

/* Shares of last states, from their logarithms: an emission may have been raised. */
static void share_last(const Chain *a) {
    for (int64_t q = 0; q < sequences_of(a); q++) {
        real *out = shares_at(a, q, a->steps - 1);
        const double *leaving = a->leaving + q * a->states;
        for (int64_t j = 0; j < a->states && out; j += WIDE) {
            doubles logs = both(-__builtin_inf());
            UNROLL for (int l = 0; l < WIDE; l++) if (j + l < a->states) logs[l] = leaving[j + l];
            write_wide(out + j, value_of_number(exponential_number(logs)), a->states - j);
        }
    }
}

/* What `forward` says of a stretch with `arriving` in place of `entering`; log Z in the format too. Sequences that are
   lossy are redone: how many. */
EXPORT int64_t EXPORTED(logchain_stretch)(const Chain *a) {
    Chain all = with_scratch(a);
    int64_t entries = sequences_of(a) * a->states;
    real *entering = take(&all.room, entries * (int64_t)sizeof(real));
    for (int64_t k = 0; k < entries; k++) entering[k] = (real)a->arriving[k];
    all.entering = entering;
    int64_t lossy = find_value(&all);
    share_last(&all);
    return lossy;
}

/* Bytes of scratch for it. */
EXPORT int64_t EXPORTED(logchain_stretch_room)(const Chain *a) {
    return EXPORTED(logchain_value_room)(a) + sequences_of(a) * a->states * (int64_t)sizeof(real) + 64;
}
