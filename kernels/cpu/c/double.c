/* The loops in float64. */
#define BITS 64
#include "call.h"
#include "fold.h"
#include "matmul.h"
#include "means.h"
#include "sample.h"
#include "stretch.h"
#include "weigh.h"
