/* One sequence of at most 16 states, in float64. */
#define BITS 64
#define ROW 16
#include "few_loops.h"
