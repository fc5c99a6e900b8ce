/* The loops in float32. */
#define BITS 32
#include "call.h"
#include "tree.h"
#include "sample.h"
#include "weigh.h"
