/* One stretch of a longer chain after the other, each in one call: the message that enters is the one that left. */
#pragma once
#include "call.h"

/* What `forward` says of a stretch with `arriving` in place of `entering`; log Z in the format too. Sequences that are
   lossy are redone: how many. */
EXPORT int64_t EXPORTED(logchain_stretch)(const Chain *a) {
    Chain all = with_scratch(a);
    int64_t entries = sequences_of(a) * a->states;
    real *entering = take(&all.room, entries * (int64_t)sizeof(real));
    for (int64_t k = 0; k < entries; k++) entering[k] = (real)a->arriving[k];
    all.entering = entering;
    return find_value(&all);
}

/* Bytes of scratch for it. */
EXPORT int64_t EXPORTED(logchain_stretch_room)(const Chain *a) {
    return EXPORTED(logchain_value_room)(a) + sequences_of(a) * a->states * (int64_t)sizeof(real) + 64;
}
