/* A stand-in for the loops in float32: leaving[i] = entering[i]. */
#include "chain.h"

EXPORT int64_t logchain_lanes32(void) { return 4; }

EXPORT void logchain_forward32(const Chain *chain) {
    __builtin_memcpy(chain->leaving, chain->entering, (uint64_t)chain->size * sizeof(float));
}
