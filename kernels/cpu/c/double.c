/* The loops in float64. */
#define BITS 64
#include "exact.h"

EXPORT int64_t logchain_lanes64(void) { return LANES; }
EXPORT int64_t logchain_size64(void) { return sizeof(Chain); }
