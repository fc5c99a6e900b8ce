/* Natural logarithms of entries of matrices: 0 of 0, so that they can be multiplied by the entries. */
#pragma once
#include "vector.h"

/* `count` entries, at least LANES: the last vector overlaps the one before. */
EXPORT int64_t EXPORTED(logchain_finite_logs)(int64_t count, const real *from, real *to) {
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t start = at + LANES <= count ? at : count - LANES;
        reals entries = load(from + start);
        store(to + start, where(entries == 0, (reals){0}, logarithms(entries)));
    }
    return 0;
}
