/* One sequence of at most 8 states, in float64. */
#define BITS 64
#define ROW 8
#include "few_loops.h"
