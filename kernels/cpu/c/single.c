/* The loops in float32. */
#define BITS 32
#include "call.h"
#include "tree.h"
#include "means.h"
#include "sample.h"
#include "stretch.h"
#include "weigh.h"
