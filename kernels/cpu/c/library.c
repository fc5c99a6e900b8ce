/* The library in units, since vectors and numbers differ between them: build.py compiles this file once for each. */
#if !defined(BITS)
#include "system.h"
#include "team.h"
#elif defined(ROW) /* sequences of at most ROW states */
#include "few_loops.h"
#elif defined(SCALED) /* chains and products of matrices in scaled numbers */
#include "call.h"
#include "tree.h"
#include "sample.h"
#include "weigh.h"
#elif defined(SPLIT) /* exact scans in split numbers: dense chains, in float64 alone, and structures */
#if BITS == 64
#include "recompute.h"
#endif
#if !defined(FLOAT32_OPERANDS)
#include "structure_paths.h"
#endif
#endif
