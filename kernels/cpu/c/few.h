/* One sequence of at most FEW states: steps with its message in registers.

       forward    U_i = S_{i-1} P_i, S_i = U_i E_i 2^(TOP - k_i)           backward    B_{i-1} = (B_i E_i) P_i^T

   as in forward.h and backward.h, which continue from the first step whose sums fail the underflow test of step.h.
   few_loops.h is compiled for rows of 4, 8 and 16 states; a sequence takes the smallest row that holds its states. */
#pragma once
#include "chain.h"

enum { FEW = 16 };

typedef struct {
    int64_t c, row;                      /* row: from a row of a matrix to the next */
    Steps x, entries;                    /* the one matrix of all steps is padded with zeros to row_of(c), and
                                            transposed for backward steps */
    Steps messages, filtered;            /* forward messages, and those with sum 1; or null */
    Steps logs;                          /* log sums U, plus x if with_x, or null */
    Steps gradient, outer;               /* of x, and of matrices; or null */
    Steps held_forward, held_source;     /* `most_held` rows of S and of sources for counts.h; or null */
    int64_t first_step;                  /* backward steps stop there */
    int64_t with_x, held, most_held;
    real high;                           /* largest matrix entry that a gradient was written for */
    real limits[2];                      /* least sums that pass; [1] after a raised emission, under one matrix */
    int one, zeros, by_log, ordinary;    /* one matrix for all steps; sums of 0 pass; gradients of logarithms; weights
                                            are ordinary, see flush.h */
    real state[FEW];                     /* S of the step before, or B of this step */
    int raised;                          /* the last step raised an emission */
    double matrix_shift;                 /* the caller's matrix is e^matrix_shift 2^matrix_exponent times `entries` */
    int64_t matrix_exponent, exponent;   /* exponent: power of two taken out of S so far */
    Sum shift;                           /* logarithm taken out of S so far */
    real weight, source_weight, unshare; /* factors of posteriors, of sources, and of source-times-S */
} Few;

INLINE int64_t row_of(int64_t c) { return c <= 4 ? 4 : c <= 8 ? 8 : 16; }

/* Rows at the end of an array, of c entries and `step` apart, that cannot be read as whole vectors inside it. */
INLINE int64_t unpadded_rows(int64_t c, int64_t step) {
    return c == row_of(c) ? 0 : step == 0 ? INT64_MAX / 2 : (row_of(c) - c + step - 1) / step;
}

/* steps_forward: steps from `step` to before `stop`; returns the first that was not computed. steps_backward: from B at
   `step` down to first_step; returns the step at which it stopped, whose B is in `state`. */
#define OF_ROW(row)                                                               \
    int64_t EXPORTED(steps_forward_##row##_)(Few *l, int64_t step, int64_t stop); \
    int64_t EXPORTED(steps_backward_##row##_)(Few *l, int64_t step)
OF_ROW(4);
OF_ROW(8);
OF_ROW(16);
#define BY_ROW(name, ...)                                    \
    return l->c <= 4   ? EXPORTED(name##_4_)(l, __VA_ARGS__) \
           : l->c <= 8 ? EXPORTED(name##_8_)(l, __VA_ARGS__) \
                       : EXPORTED(name##_16_)(l, __VA_ARGS__)
INLINE int64_t steps_forward(Few *l, int64_t step, int64_t stop) { BY_ROW(steps_forward, step, stop); }
INLINE int64_t steps_backward(Few *l, int64_t step) { BY_ROW(steps_backward, step); }
