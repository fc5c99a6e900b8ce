/* Exact scans in float64. */
#define BITS 64
#include "best.h"
#include "draws.h"
#include "recompute.h"
