/* The loops in float64. */
#define BITS 64
#include "call.h"
#include "entropy.h"
#include "fold.h"
#include "sample.h"
#include "stretch.h"

/* Of the struct, which another language has to have the same. */
EXPORT int64_t logchain_size64(void) { return sizeof(Chain); }
