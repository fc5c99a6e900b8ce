/* The loops in float32. */
#define BITS 32
#include "call.h"
#include "fold.h"
#include "sample.h"
#include "stretch.h"

/* Of the struct, which another language has to have the same. */
EXPORT int64_t logchain_size32(void) { return sizeof(Chain); }
