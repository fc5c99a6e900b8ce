/* Exact scans in float32. */
#define BITS 32
#include "best.h"
#include "draws.h"
