/* One sequence of at most 16 states, in float32. */
#define BITS 32
#define ROW 16
#include "few_loops.h"
