/* The arguments of every loop: one pointer to this struct, which library.py mirrors field by field.

   Sequence q = (set, member) of g sets of matrices and m members that share one; c states, v steps. Strides are in
   entries. The states of a row of x, of its gradient and of a message lie next to each other. A thread walks the
   places from `first` to before `last` of the g m; `order` says which member stands in which place of its set. */
#pragma once
#include "vector.h"

typedef struct {
    int64_t steps, sets, members, states, first, last;
    int64_t one_matrix, logarithms; /* all steps have one matrix; `bulk` and `p0` are logarithms */
    const real *x;                  /* (v, g, m, c) */
    int64_t x_step, x_set, x_member;
    const int64_t *x_at;            /* (g, m): where sequences begin, if no two strides say so; or null */
    const real *bulk;               /* (v - 1 or 1, g, from, to) */
    int64_t bulk_step, bulk_set, bulk_from, bulk_to;
    const int64_t *bulk_at;         /* (g): where the matrices of a set begin, if no stride says so; or null */
    const real *p0;                 /* (g, m, c) */
    int64_t p0_set, p0_member, p0_state;
    const double *following;        /* (g, m, c): logarithms of the backward messages of last steps; null for zeros */
    const int64_t *ends;            /* (g, m): steps of each sequence; null for v */
    const int64_t *order;           /* (g, m): members with more steps first; null where all have as many */
    real *messages;                 /* (v, g, m, c); null where they are not kept */
    double *log_norm;               /* (g, m) */
    uint8_t *lossy;                 /* (g, m): 1, forward is to be redone; 2, backward is */
    int64_t *uncounted;             /* (g, m): where it is, the last step whose transitions have not been counted yet */
    char *room;                     /* scratch of this thread, see `room` in library.py */
    const double *weight;           /* (g, m): what multiplies each sequence's gradients */
    real *grad_x;                   /* (v, g, m, c) or null */
    int64_t grad_step, grad_set, grad_member;
    const int64_t *grad_at;         /* as x_at */
    real *grad_bulk;                /* (v - 1, g, from, to) or null: what each step's transitions add up to */
    int64_t count_step, count_set;
    const int64_t *count_at;        /* as bulk_at */
    double *counts;                 /* (g, from, to) or null: what all steps' transitions add up to, added to */
    double *grad_p0;                /* (g, m, c) or null */
    real *value;                    /* (g, m): log Z in the format, or null */
    real *start;                    /* gradients of p0 where it has one for several sequences or sets, or null */
    int64_t start_set, start_member;
    real *log_forward, *log_backward; /* (v, g, m, c): messages, where gradients of x would lie */
    int64_t by_log;                 /* gradients are those of the logarithms of bulk and p0 */
    const int64_t *starts;          /* (g, m): the rows at which sequences begin in x, its gradient and messages, all of
                                       which are (rows, c), with one sequence behind the other; or null */
    /* a stretch of a longer chain: leaving is null where nothing is to leave it */
    double *leaving;                /* (g, m, c): logarithms of the shares of the last states; of a backward call those
                                       of the backward message of the step that entered */
    const real *entering;           /* (g, m, c): such ones as they came in, the x of a step ahead of x; or null */
    const double *taken, *lacking;  /* (g, m): what log_norm adds to, and what that lacks */
    const double *arriving;         /* (g, m, c): what enters, in float64: see stretch.h */
    double *lost;                   /* (g, m): what log_norm lacks */
    real *shares;                   /* (v, g, m, c), with the strides of grad_x: of forward messages; or null */
    int64_t single;                 /* x, bulk, p0 and logarithms of messages are float32, whatever is computed in */
    const void *other;              /* another chain of as many steps, sequences and states, or null */
    real *factors;                  /* of stacks of matrices, see fold.h: what rows were scaled by */
    const real *final_weights;      /* of stacks: weights of the last products, beside x; or null */
    /* state paths: the best, the `ranks` best, or as many that are drawn */
    int64_t *paths;                 /* (ranks, g, m, path_steps), or (ranks, rows) where there are `starts`; -1 for no
                                       state. Drawn ones come in as numbers in [0, 1), float64 */
    int64_t path_steps, path_rank, path_sequence, ranks; /* path_rank, path_sequence: strides */
} Chain;

/* Where the first matrix of a set lies, and its gradient. */
INLINE int64_t first_matrix(const Chain *a, int64_t set) { return a->bulk_at ? a->bulk_at[set] : set * a->bulk_set; }
INLINE int64_t first_count(const Chain *a, int64_t set) { return a->count_at ? a->count_at[set] : set * a->count_set; }

/* The sequence in a place of the g m. */
INLINE int64_t sequence_in(const Chain *a, int64_t place) {
    return a->order ? place - place % a->members + a->order[place] : place;
}

/* Of sequence q of a set: its steps, its initial weights, and its row of a step in each operand and result. What came
   in as `entering` is step 0, which has no gradient: x and what lies as x does begin at step 1. */
INLINE int64_t steps_of(const Chain *a, int64_t q) { return a->ends ? a->ends[q] : a->steps; }
INLINE const real *p0_at(const Chain *a, int64_t q) {
    return a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member;
}
INLINE const real *x_at(const Chain *a, int64_t set, int64_t q, int64_t step) {
    int64_t member = q - set * a->members;
    if (a->entering && step-- == 0) return a->entering + q * a->states;
    if (a->starts) return a->x + (a->starts[q] + step) * a->x_step;
    return a->x + step * a->x_step + (a->x_at ? a->x_at[q] : set * a->x_set + member * a->x_member);
}
INLINE real *message_at(const Chain *a, int64_t q, int64_t step) {
    return a->messages + (a->starts ? a->starts[q] + step : step * a->sets * a->members + q) * a->states;
}

/* Entries ahead of a row of the gradient of x, behind a message that entered. */
INLINE int64_t gradient_offset(const Chain *a, int64_t set, int64_t q, int64_t step) {
    int64_t member = q - set * a->members;
    if (a->starts) return (a->starts[q] + step) * a->grad_step;
    return step * a->grad_step + (a->grad_at ? a->grad_at[q] : set * a->grad_set + member * a->grad_member);
}
INLINE real *row_or_null(const Chain *a, real *all, int64_t set, int64_t q, int64_t step) {
    if (!all || (a->entering && step-- == 0)) return 0;
    return all + gradient_offset(a, set, q, step);
}
INLINE real *gradient_at(const Chain *a, int64_t set, int64_t q, int64_t step) {
    return row_or_null(a, a->grad_x, set, q, step);
}
INLINE real *shares_at(const Chain *a, int64_t q, int64_t step) {
    return row_or_null(a, a->shares, q / a->members, q, step);
}

/* Places of scratch are handed out one after the other, each on its own cache lines. */
INLINE void *take(char **room, int64_t bytes) {
    char *begin = *room;
    *room += (bytes + 63) / 64 * 64;
    return begin;
}
