/* One sequence of at most 4 states, in float64. */
#define BITS 64
#define ROW 4
#include "few_loops.h"
