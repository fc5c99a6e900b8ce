/* The arguments of every exported loop: one pointer to this struct, which arguments.py mirrors field by field.

   Shapes: v steps, g sets of matrices, m members of each set, c states; sequence q = set m + member. Strides count
   entries; the states of a row of x, of its gradient and of a message are contiguous. A thread computes the places
   from `first` to before `last` of the g m; `order` maps a place of a set to a member. */
#pragma once
#include "vector.h"

typedef struct Chain {
    int64_t steps, sets, members, states, first, last;
    int64_t one_matrix, logarithms; /* all steps have one matrix; `bulk` and `p0` are logarithms */
    const operand *x;               /* (v, g, m, c): log emissions */
    int64_t x_step, x_set, x_member;
    const int64_t *x_at;            /* (g, m): offset of each sequence in x, in place of x_set and x_member; or null */
    const operand *bulk;            /* (v - 1 or 1, g, from, to): transitions */
    int64_t bulk_step, bulk_set, bulk_from, bulk_to;
    const int64_t *bulk_at;         /* (g): offset of each set in bulk, in place of bulk_set; or null */
    const operand *p0;              /* (g, m, c): initial weights */
    int64_t p0_set, p0_member, p0_state;
    const double *following;        /* (g, m, c): log backward messages of the last steps; null for zeros */
    const int64_t *ends;            /* (g, m): number of steps of each sequence; null for v */
    const int64_t *order;           /* (g, m): members of each set, the longest first; null where all have v steps */
    operand *messages;              /* (v, g, m, c): forward messages; null where they are not kept */
    double *log_norm;               /* (g, m): log Z */
    uint8_t *lossy;                 /* (g, m), bits: underflow is possible, 1 forward, 2 backward: recompute exactly */
    int64_t *uncounted;             /* (g, m): last step whose expected transitions are not in the counts yet */
    char *room;                     /* scratch of this thread; null asks for its size, see Room */
    const double *weight;           /* (g, m): factor of each sequence's gradients */
    operand *grad_x;                /* (v, g, m, c) or null: posteriors times weight */
    int64_t grad_step, grad_set, grad_member;
    const int64_t *grad_at;         /* (g, m): as x_at */
    operand *grad_bulk;             /* (v - 1, g, from, to) or null: summed over the members of each set */
    int64_t count_step, count_set;  /* strides of grad_bulk */
    const int64_t *count_at;        /* (g): as bulk_at, of grad_bulk */
    double *counts;                 /* (g, from, to) or null: the gradient of one matrix for all steps is added to it */
    double *grad_p0;                /* (g, m, c) or null */
    double *means;                  /* (g, m) or null: mean log-weights of paths, see means.h; then there are no counts */
    const struct Chain *second;     /* means are those of log-weights less those of this chain; or null */
    operand *value;                 /* (g, m) or null: log Z rounded to `real` */
    operand *grad_p0_real;          /* gradient of p0 in its own shape, stride 0 on axes that it shares; or null */
    int64_t grad_p0_set, grad_p0_member;
    operand *log_forward, *log_backward;/* (v, g, m, c) or null: log messages, with the strides of grad_x */
    int64_t by_log;                 /* gradients are those of the logarithms of bulk and p0 */
    const int64_t *starts;          /* null, or (g, m) for packed sequences: x, its gradient and messages are (rows, c),
                                       and a sequence has the rows from its start on */
    /* a stretch of a longer chain: a message enters ahead of its first step, and one leaves */
    double *leaving;                /* (g, m, c) or null: log of the last forward message, with sum 1; in a backward
                                       call, log of the backward message at the step that entered */
    const operand *entering;        /* (g, m, c) or null: such a message; it is step 0, and x begins at step 1 */
    const double *entering_log_norm, *entering_error; /* (g, m): log Z of the steps before, and its rounding error */
    const double *entering_double;  /* (g, m, c): `entering` in float64, see stretch.h */
    double *log_norm_error;         /* (g, m) or null: the rounding error of log_norm */
    operand *filtered;              /* (v, g, m, c) or null: forward messages with sum 1, with the strides of grad_x */
    int64_t *paths;                 /* (ranks, g, m, path_steps), packed (ranks, rows): states of paths, -1 for none. On
                                       entry of `sample` they are the float64 numbers of sample.h, and of `viterbi_backward`
                                       the last of each sequence is the state it ends in, or negative for any */
    int64_t path_steps, path_rank, path_sequence, ranks; /* steps of `paths`; two of its strides; paths per sequence */
} Chain;

/* Offsets of the first matrix of a set, and of its gradient. */
INLINE int64_t first_matrix(const Chain *a, int64_t set) { return a->bulk_at ? a->bulk_at[set] : set * a->bulk_set; }
INLINE int64_t first_count(const Chain *a, int64_t set) { return a->count_at ? a->count_at[set] : set * a->count_set; }

INLINE int64_t sequence_in(const Chain *a, int64_t place) {
    return a->order ? place - place % a->members + a->order[place] : place;
}

/* Number of steps of sequence q, its initial weights, and its row at a step of x, of kept messages and of gradients.
   With `entering`, step 0 is the message that entered: it has no gradient, and x begins at step 1. */
INLINE int64_t steps_of(const Chain *a, int64_t q) { return a->ends ? a->ends[q] : a->steps; }
INLINE const operand *p0_at(const Chain *a, int64_t q) {
    return a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member;
}
INLINE const operand *x_at(const Chain *a, int64_t set, int64_t q, int64_t step) {
    int64_t member = q - set * a->members;
    if (a->entering && step-- == 0) return a->entering + q * a->states;
    if (a->starts) return a->x + (a->starts[q] + step) * a->x_step;
    return a->x + step * a->x_step + (a->x_at ? a->x_at[q] : set * a->x_set + member * a->x_member);
}
INLINE operand *message_at(const Chain *a, int64_t q, int64_t step) {
    return a->messages + (a->starts ? a->starts[q] + step : step * a->sets * a->members + q) * a->states;
}

/* Offset of the row of a sequence's step, not counting an entered message, in arrays with the strides of grad_x. */
INLINE int64_t gradient_offset(const Chain *a, int64_t set, int64_t q, int64_t step) {
    int64_t member = q - set * a->members;
    if (a->starts) return (a->starts[q] + step) * a->grad_step;
    return step * a->grad_step + (a->grad_at ? a->grad_at[q] : set * a->grad_set + member * a->grad_member);
}
INLINE operand *row_or_null(const Chain *a, operand *rows, int64_t set, int64_t q, int64_t step) {
    if (!rows || (a->entering && step-- == 0)) return 0;
    return rows + gradient_offset(a, set, q, step);
}
INLINE operand *gradient_at(const Chain *a, int64_t set, int64_t q, int64_t step) {
    return row_or_null(a, a->grad_x, set, q, step);
}
INLINE operand *filtered_at(const Chain *a, int64_t q, int64_t step) {
    return row_or_null(a, a->filtered, q / a->members, q, step);
}

/* log Z of the stretches before this one. */
INLINE Sum log_norm_before(const Chain *a, int64_t q) {
    return a->entering_log_norm ? (Sum){a->entering_log_norm[q], a->entering_error[q]} : (Sum){0, 0};
}

INLINE void write_log_norm(const Chain *a, int64_t q, Sum log_norm) {
    double value = value_of(log_norm), lost = (log_norm.sum - value) + log_norm.error;
    a->log_norm[q] = value;
    if (a->log_norm_error) a->log_norm_error[q] = lost == lost ? lost : 0;
}

/* Whether gradients may differ from 0: those of an impossible sequence are 0. */
INLINE int has_gradient(const Chain *a, int64_t q) { return a->weight[q] != 0 && a->log_norm[q] != -__builtin_inf(); }

/* Starts reading a row of c entries into the cache. */
INLINE void fetch_row(int64_t c, const real *row) {
    for (int64_t j = 0; j < c; j += 64 / (int64_t)sizeof(real)) __builtin_prefetch(row + j);
}

/* Scratch of a call: arrays are handed out one after the other, each on its own cache lines. Every exported loop that
   is called with a null `room` returns the bytes of scratch that it needs, and does nothing else. */
typedef struct { char *begin; int64_t bytes; } Room;

INLINE char *rest_of(const Room *room) { return room->begin ? room->begin + room->bytes : 0; }
INLINE void *take(Room *room, int64_t bytes) {
    char *array = rest_of(room);
    room->bytes += (bytes + 63) / 64 * 64;
    return array;
}
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Exact recomputation of lossy sequences, see recompute.h. */
int64_t EXPORTED(logchain_redo_forward)(const Chain *);
int64_t EXPORTED(logchain_redo_backward)(const Chain *);
int64_t EXPORTED(logchain_redo_messages)(const Chain *);
