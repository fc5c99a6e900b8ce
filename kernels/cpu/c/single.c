/* The loops in float32. */
#define BITS 32
#include "call.h"
#include "fold.h"
#include "matmul.h"
#include "means.h"
#include "sample.h"
#include "stretch.h"
#include "weigh.h"
