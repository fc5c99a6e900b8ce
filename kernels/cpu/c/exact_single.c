/* Exact scans in float32. */
#define BITS 32
#include "structure_paths.h"
