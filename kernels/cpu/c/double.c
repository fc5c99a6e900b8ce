/* The loops in float64. */
#define BITS 64
#include "call.h"
#include "tree.h"
#include "sample.h"
#include "weigh.h"
