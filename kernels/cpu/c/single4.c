/* One sequence of at most 4 states, in float32. */
#define BITS 32
#define ROW 4
#include "few_loops.h"
