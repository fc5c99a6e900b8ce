/* The loops in float64. */
#define BITS 64
#include "call.h"
#include "tree.h"
#include "means.h"
#include "sample.h"
#include "stretch.h"
#include "weigh.h"
