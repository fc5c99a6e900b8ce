/* The arguments of the loops over dense chains: a pointer to this struct, which arguments.py mirrors field by field.

   Shapes: v steps, g sets of matrices, m members of each set, c states; sequence q = set m + member. Batches, views and
   packed sequences differ in where the arrays of a sequence begin and in the strides between its steps, which count
   entries. A thread computes the places from `first` to before `last` of the g m; `order` maps a place of a set to a
   member. */
#pragma once
#include "doubles.h"

/* (v, g, m, c): the row of a step of sequence q begins at data + at[q] + step `step`; its entries are contiguous. */
typedef struct { operand *data; int64_t step; const int64_t *at; } Rows;

/* (v - 1 or 1, g, from, to): the matrix into step i of a set begins at data + at[set] + (i - 1) `step`; `step` is 0 if
   all steps have one matrix. */
typedef struct { operand *data; int64_t step, from, to; const int64_t *at; } Matrices;

/* States of paths, -1 for none: of step i of path r of sequence q that at data + at[q] + r `rank` + i. On entry of
   `sample` they are the float64 numbers of sample.h, and of `viterbi_backward` the last of each sequence is the state
   that it ends in, or negative for any. */
typedef struct { int64_t *data, rank, ranks, steps; const int64_t *at; } Paths;

/* Arrays (v, g, m, c) with the strides of Rows, each of them null where it is not wanted. */
typedef struct {
    operand *grad_x;                        /* posteriors times weight */
    operand *log_forward, *log_backward;    /* log messages */
    operand *filtered;                      /* forward messages with sum 1 */
    int64_t step;
    const int64_t *at;
} Outputs;

/* Messages that a stretch of a longer chain takes from its neighbors, and those for them; each may be null. */
typedef struct {
    const operand *entering;           /* (g, m, c): log of a forward message with sum 1; x begins at step 1 then */
    const double *entering_double;     /* the same in float64, see call.h */
    const double *entering_log_norm, *entering_error; /* (g, m): log Z of the steps before, and its rounding error */
    double *leaving;                   /* (g, m, c): log of the last forward message, with sum 1; in a backward call,
                                          log of the backward message at the step that entered */
    double *log_norm_error;            /* (g, m): the rounding error of log_norm */
    const double *following;           /* (g, m, c): log backward messages of the last steps; null for zeros */
} Boundary;

/* Mean log-weights of paths (g, m), less those of a second chain, see call.h; both may be null. */
typedef struct { double *data; const struct Chain *second; } Means;

typedef struct Chain {
    int64_t steps, sets, members, states, first, last;
    int64_t one_matrix, logarithms; /* all steps have one matrix; `bulk` and `p0` are logarithms */
    int64_t by_log;                 /* gradients are those of the logarithms of bulk and p0 */
    int64_t packed;                 /* rows after the end of a sequence are those of others */
    Rows x;                         /* log emissions */
    Matrices bulk;                  /* transitions */
    Rows p0;                        /* (g, m, c): initial weights, `step` apart; `at` is null where all share a row */
    const int64_t *ends;            /* (g, m): number of steps of each sequence; null for v */
    const int64_t *order;           /* (g, m): members of each set, the longest first; null where all have v steps */
    Boundary boundary;
    Rows messages;                  /* forward messages; null where they are not kept */
    double *log_norm;               /* (g, m): log Z */
    operand *value;                 /* (g, m) or null: log Z rounded to `real` */
    uint8_t *flagged;               /* (g, m), bits: underflow is possible, 1 forward, 2 backward: recompute exactly */
    int64_t *uncounted;             /* (g, m): last step whose expected transitions are not in the counts yet */
    char *scratch;                  /* of this thread; null asks for its size, see Scratch */
    const double *weight;           /* (g, m): factor of each sequence's gradients */
    Outputs out;
    Matrices grad_bulk;             /* summed over the members of each set; or null */
    double *counts;                 /* (g, from, to): the gradient of one matrix of all steps is added to it; or null */
    double *grad_p0;                /* (g, m, c) or null */
    Rows grad_p0_real;              /* the same in the shape of p0, whose rows sequences may share; or null */
    Means means;                    /* where these are wanted, there are no counts */
    Paths paths;
} Chain;

/* The matrix into a step, and its gradient. */
INLINE operand *matrix_at(const Matrices *a, int64_t set, int64_t step) {
    return a->data + a->at[set] + (step - 1) * a->step;
}

INLINE int64_t sequence_in(const Chain *a, int64_t place) {
    return a->order ? place - place % a->members + a->order[place] : place;
}

/* The number of steps of sequence q, its initial weights, and its row at a step of kept messages and of x. With
   `entering`, step 0 is the message that entered: it has no gradient, and x begins at step 1. */
INLINE int64_t steps_of(const Chain *a, int64_t q) { return a->ends ? a->ends[q] : a->steps; }
INLINE const operand *p0_at(const Chain *a, int64_t q) { return a->p0.data + (a->p0.at ? a->p0.at[q] : 0); }
INLINE operand *row_at_step(const Rows *a, int64_t q, int64_t step) { return a->data + a->at[q] + step * a->step; }
INLINE operand *message_at(const Chain *a, int64_t q, int64_t step) { return row_at_step(&a->messages, q, step); }
INLINE const operand *x_at(const Chain *a, int64_t q, int64_t step) {
    const operand *entering = a->boundary.entering;
    if (entering && step-- == 0) return entering + q * a->states;
    return row_at_step(&a->x, q, step);
}

/* Rows of a sequence: that of step i begins at data + i step. */
typedef struct { operand *data; int64_t step; } Steps;
INLINE operand *at_step(Steps rows, int64_t step) { return rows.data + step * rows.step; }

/* The rows of one of the outputs; null where it is not wanted. */
INLINE Steps output_of(const Chain *a, operand *rows, int64_t q) {
    if (rows) rows += a->out.at[q] - (a->boundary.entering ? a->out.step : 0);
    return (Steps){rows, a->out.step};
}
INLINE operand *output_at(const Chain *a, operand *rows, int64_t q, int64_t step) {
    return rows && !(a->boundary.entering && step == 0) ? at_step(output_of(a, rows, q), step) : 0;
}

/* log Z of the stretches before this one. */
INLINE Sum log_norm_before(const Chain *a, int64_t q) {
    const Boundary *before = &a->boundary;
    return before->entering_log_norm ? (Sum){before->entering_log_norm[q], before->entering_error[q]} : (Sum){0, 0};
}

/* Where a backward call writes the message at the step that entered; or null. */
INLINE double *leaving_backward(const Chain *a) { return a->boundary.entering ? a->boundary.leaving : 0; }

/* The largest of c logarithms; 0 if all are -inf. */
INLINE double largest_log(int64_t c, const double *from) {
    double top = -__builtin_inf();
    for (int64_t j = 0; j < c; j++) top = from[j] > top ? from[j] : top;
    return top > -__builtin_inf() ? top : 0;
}

INLINE void write_log_norm(const Chain *a, int64_t q, Sum log_norm) {
    double value = value_of(log_norm), error = (log_norm.sum - value) + log_norm.error;
    a->log_norm[q] = value;
    if (a->boundary.log_norm_error) a->boundary.log_norm_error[q] = error == error ? error : 0;
}

/* Whether gradients may differ from 0: those of an impossible sequence are 0. */
INLINE int has_gradient(const Chain *a, int64_t q) { return a->weight[q] != 0 && a->log_norm[q] != -__builtin_inf(); }

/* Starts reading a row of c entries into the cache. */
INLINE void fetch_row(int64_t c, const real *row) {
    for (int64_t j = 0; j < c; j += 64 / (int64_t)sizeof(real)) __builtin_prefetch(row + j);
}

/* Scratch of a call, from which arrays are taken, each on separate cache lines. Every exported loop that is called with
   a null `scratch` returns the bytes of scratch that it needs, and does nothing else. */
typedef struct { char *begin; int64_t bytes; } Scratch;

INLINE char *rest_of(const Scratch *scratch) { return scratch->begin ? scratch->begin + scratch->bytes : 0; }
INLINE void *take(Scratch *scratch, int64_t bytes) {
    char *array = rest_of(scratch);
    scratch->bytes += (bytes + 63) / 64 * 64;
    return array;
}
INLINE real *take_reals(Scratch *scratch, int64_t count) { return take(scratch, count * (int64_t)sizeof(real)); }
INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Exact recomputation of flagged sequences, see recompute.h. */
int64_t EXPORTED(logchain_recompute_forward)(const Chain *);
int64_t EXPORTED(logchain_recompute_backward)(const Chain *);
int64_t EXPORTED(logchain_recompute_messages)(const Chain *);
