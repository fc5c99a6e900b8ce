/* One sequence of at most 8 states, in float32. */
#define BITS 32
#define ROW 8
#include "few_loops.h"
