/* The loops in float32. */
#define BITS 32
#include "exact.h"

EXPORT int64_t logchain_lanes32(void) { return LANES; }
EXPORT int64_t logchain_size32(void) { return sizeof(Chain); }
