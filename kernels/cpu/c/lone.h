/* One sequence of few states: few.h takes the steps that ask for no care, its message in registers; step.h says what is
   believed and why; a step that asks is left to the loops of forward.h and backward.h.

   few.h is compiled for rows of 4, 8 and 16 states: a sequence has the least that holds its own. */
#pragma once
#include "vector.h"

enum { FEW = 16 };

typedef struct {
    int64_t c;
    const real *x;                  /* of step 0 */
    const real *entries;            /* the matrix into step 1; where all steps have one, that one or, for steps back,
                                       its transpose, with zeros up to the length of a row of few.h */
    real *messages, *shares;        /* of step 0, and those over their sums; null where they are not kept */
    real *gradient;                 /* of x at step 0, or null */
    real *outer;                    /* gradient of the matrix into step 1, or null */
    real *held_ahead, *held_source; /* rows that are to be multiplied, or null */
    int64_t until;                  /* steps back stop there */
    int64_t x_step, row, entries_step, message_step, share_step, gradient_step, outer_step, held_step, held, most_held;
    real high;                      /* the largest entry that a gradient was written for */
    real limits[2];                 /* of sums that are believed; the second, where an emission was raised */
    int one, zeros, by_log;         /* all steps have one matrix; sums may be 0; gradients are of logarithms */
    real state[FEW];                /* S of the step before, or B of this one */
    int deep;                       /* the last emission was raised */
    double matrix_shift;
    int64_t matrix_exponent, exponent;
    Sum shift;
    real weight, source_weight, unshare; /* of posteriors, of sources, and what makes transitions of those */
} Lone;

/* States of the row that holds c. */
INLINE int64_t row_of(int64_t c) { return c <= 4 ? 4 : c <= 8 ? 8 : 16; }

/* Steps at a sequence's end of which rows cannot be read to their ends: rows of c entries lie `step` apart. */
INLINE int64_t steps_kept_back(int64_t c, int64_t step) {
    return c == row_of(c) ? 0 : step <= 0 ? INT64_MAX / 2 : (row_of(c) - c + step - 1) / step;
}

/* Steps ahead from `step` to before `behind`; the first that was not taken. Steps back from `step` on, whose B is
   known; the first whose transitions were not taken, or 0. */
#define OF_ROW(row)                                                             \
    int64_t EXPORTED(steps_ahead_##row##_)(Lone *l, int64_t step, int64_t behind); \
    int64_t EXPORTED(steps_back_##row##_)(Lone *l, int64_t step)
OF_ROW(4);
OF_ROW(8);
OF_ROW(16);
#define OF_LEAST_ROW(name, ...)                                     \
    return l->c <= 4   ? EXPORTED(name##_4_)(l, __VA_ARGS__)        \
           : l->c <= 8 ? EXPORTED(name##_8_)(l, __VA_ARGS__)        \
                       : EXPORTED(name##_16_)(l, __VA_ARGS__)
INLINE int64_t steps_ahead(Lone *l, int64_t step, int64_t behind) { OF_LEAST_ROW(steps_ahead, step, behind); }
INLINE int64_t steps_back(Lone *l, int64_t step) { OF_LEAST_ROW(steps_back, step); }
