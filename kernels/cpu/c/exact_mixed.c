/* Exact scans in float64 of chains in float32. */
#define BITS 64
#define FLOAT32_OPERANDS
#include "recompute.h"
