/* The loops in float32. */
#define BITS 32
#include "call.h"
#include "fold.h"
#include "logs.h"
#include "matmul.h"
#include "sample.h"
#include "stretch.h"
#include "weigh.h"
