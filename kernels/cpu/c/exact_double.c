/* Exact scans in float64. */
#define BITS 64
#include "recompute.h"
#include "structure_paths.h"
