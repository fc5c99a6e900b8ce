/* The arguments of chains whose transitions are arcs, which kernels/cpu/arcs.py mirrors field by field, and sums over
   arcs.

   Arcs are sorted by one of their ends into rows, and rows by length into slices of SLICE rows. An entry of a slice is
   a vector, one arc of each row: where it leads and its weight are whole vectors, and only messages are gathered. A
   state with more arcs than a row may have has several rows; a slice is filled up with arcs of weight 0.

   Shapes: v steps, n sequences, c states. A thread computes the places from `first` to before `last`, and `order` says
   which sequence is at a place; those that share their weights are neighbours. */
#pragma once
#include "number.h"
#include "step.h"

enum { SLICE = BYTES / 4, PARTS_OF_SLICE = SLICE / WIDE, LONGEST_ROW = 64 };

typedef struct {
    int64_t count;        /* slices */
    int64_t shared;       /* of which so many, from the first on, have rows of states that have several */
    const int64_t *start; /* (count + 1): first entry of each slice */
    const int32_t *state; /* (count, SLICE): the state of a row; 0 for no row */
    const int32_t *other; /* (entries, SLICE): the state at an arc's other end; 0 for no arc */
    const int32_t *arc;   /* (entries, SLICE): which arc; -1 for none */
} Slices;

typedef struct {
    int64_t steps, states, arcs, first, last;
    int64_t one_matrix, logarithms, by_log; /* all steps share weights; weights and p0 are logarithms; gradients are */
    int64_t degree;                         /* most arcs into a state */
    const real *x;                          /* (n, v, c): log emissions */
    int64_t x_step;
    const int64_t *x_at;                    /* (n): offset of each sequence in x */
    const real *weights;                    /* (sets, v - 1 or 1, arcs) */
    int64_t weight_step, weight_arc;
    const int64_t *weights_at;              /* (n): offset of each sequence's set */
    const real *p0;                         /* (n, c): initial weights */
    int64_t p0_state;
    const int64_t *p0_at;                   /* (n) */
    const int64_t *ends;                    /* (n): number of steps of each sequence; null for v */
    const int64_t *order;                   /* (n): the sequence at each place */
    Slices into, out;                       /* arcs by target, and by source */
    double *messages;                       /* (n, v, c): forward messages; null where they are not kept */
    double *powers;                         /* (n, v): of two that messages were multiplied by; null likewise */
    real *exponents;                        /* (n, v, c): in float64 of messages that were recomputed; or null */
    double *log_norm;                       /* (n): log Z */
    uint8_t *lossy;                         /* (n): underflow is possible: recompute exactly */
    const double *weight;                   /* (n): factor of each sequence's gradients */
    real *grad_x;                           /* (n, v, c) or null */
    double *counts;                         /* (sets, arcs) or null: the gradient of weights of all steps is added */
    real *grad_weights;                     /* (sets, v - 1, arcs) or null: that of weights of each step is added */
    const int64_t *set;                     /* (n): the set of each sequence */
    double *grad_p0;                        /* (n, c) or null: posteriors of the first step times weight */
    char *room;                             /* scratch of this thread; null asks for its size, see chain.h */
} ArcChain;

INLINE int64_t steps_of_arcs(const ArcChain *a, int64_t q) { return a->ends ? a->ends[q] : a->steps; }
INLINE const real *arc_x_at(const ArcChain *a, int64_t q, int64_t step) { return a->x + a->x_at[q] + step * a->x_step; }
INLINE double *arc_message_at(const ArcChain *a, int64_t q, int64_t step) {
    return a->messages + (q * a->steps + step) * a->states;
}
INLINE const real *arc_weights_at(const ArcChain *a, int64_t q, int64_t step) {
    return a->arcs ? a->weights + a->weights_at[q] + (a->one_matrix ? 0 : step - 1) * a->weight_step : 0;
}
INLINE int64_t slots_of(const Slices *slices) { return slices->start[slices->count] * SLICE; }
INLINE int64_t padded_states(int64_t states) { return (states + LANES - 1) / LANES * LANES; }

/* ------------------------------------------------------------------------------------------------------- weights */

/* The weights of one step in the order of slices: the caller's are 2^exponent times them. */
typedef struct {
    const Slices *slices;
    real *entries;    /* (entries of slices, SLICE) */
    int64_t exponent;
    double least;     /* the least positive entry */
    int bad, lost;    /* one is infinite or NaN; a positive one may have underflowed */
} Weights;

/* The largest weight, and the least that is not zero, of which there may be none; whether all are finite weights. */
static int bounds_of_weights(const ArcChain *a, const real *from, double *high, double *least) {
    real none = a->logarithms ? -INFINITE : 0, top = none, low = INFINITE;
    int bad = 0;
    for (int64_t k = 0; k < a->arcs; k++) {
        real w = from[k * a->weight_arc];
        bad |= !(w < INFINITE);
        top = w > top ? w : top;
        low = w < low && w != none ? w : low;
    }
    *high = top, *least = low;
    return !bad && !(low < none);
}

/* Weights or their logarithms over 2^exponent; what is below e^-700 is too large. */
INLINE doubles scaled_weights(doubles a, int logarithms, double exponent, Factors scale) {
    if (!logarithms) return a * scale.first * scale.second;
    longs none = a == -__builtin_inf();
    a = choose(none, splat_wide(0), (a - exponent * 0x1.62e42feep-1) - exponent * 0x1.a39ef35793c76p-33);
    return choose(none, splat_wide(0), exponential_of(choose(a < -700, splat_wide(-700), a)));
}

/* Weights into a step, the largest near 1. */
static void read_weights(const ArcChain *a, int64_t q, int64_t step, Weights *w) {
    const real *from = arc_weights_at(a, q, step);
    double high, least, none = a->logarithms ? -__builtin_inf() : 0;
    w->bad = !bounds_of_weights(a, from, &high, &least);
    w->exponent = exponent_above(high), w->lost = a->logarithms && !(high < 0x1p49 && least > -0x1p49);
    if (a->logarithms) w->exponent = high > none && !w->lost ? (int64_t)(high * 1.4426950408889634) : 0;
    w->lost &= least < __builtin_inf();
    if (w->bad || w->lost) return;
    Factors scale = factors_of(a->logarithms ? 0 : -w->exponent);
    for (int64_t k = 0; k < slots_of(w->slices); k += WIDE) {
        const int32_t *arc = w->slices->arc + k;
        doubles entry;
        UNROLL for (int l = 0; l < WIDE; l++) entry[l] = arc[l] < 0 ? none : (double)from[arc[l] * a->weight_arc];
        write_wide(w->entries + k, scaled_weights(entry, (int)a->logarithms, (double)w->exponent, scale), WIDE);
    }
    w->least = scaled_weights(splat_wide(least), (int)a->logarithms, (double)w->exponent, scale)[0];
    w->lost = w->least < power_of_two(1 - BIAS) || (a->logarithms && w->least < 0x1p-1000);
    if (least == __builtin_inf()) w->least = least, w->lost = 0;
}

/* ---------------------------------------------------------------------------------------------------------- sums */

INLINE doubles gather_doubles(const double *from, const int32_t *index) {
    doubles a;
    UNROLL for (int l = 0; l < WIDE; l++) a[l] = from[index[l]];
    return a;
}

/* Whether states of a slice may have several rows, or a row no state. */
INLINE int is_shared(const Slices *s, int64_t slice) { return slice < s->shared || slice + 1 == s->count; }

/* The sums of a slice's rows, to those of their states, or in place of them. */
INLINE void scatter_sums(double *to, const int32_t *state, int shared, const doubles *sum) {
    UNROLL for (int p = 0; p < PARTS_OF_SLICE; p++)
        UNROLL for (int l = 0; l < WIDE; l++) {
            double *place = to + state[p * WIDE + l];
            *place = shared ? *place + sum[p][l] : sum[p][l];
        }
}

/* Clears what the states of shared slices have; those without an arc have nothing. */
static void clear_shared(const Slices *s, double *sums) {
    for (int64_t slice = 0; slice < s->count; slice++)
        for (int l = 0; l < SLICE && is_shared(s, slice); l++) sums[s->state[slice * SLICE + l]] = 0;
}

/* The sum over the arcs of each state that has one: of weights times messages. */
static void sum_over_arcs(const Weights *w, const double *message, double *sums) {
    const Slices *s = w->slices;
    clear_shared(s, sums);
    for (int64_t slice = 0; slice < s->count; slice++) {
        doubles sum[PARTS_OF_SLICE] = {0};
        for (int64_t k = s->start[slice] * SLICE; k < s->start[slice + 1] * SLICE; k += SLICE)
            UNROLL for (int p = 0; p < PARTS_OF_SLICE; p++) {
                doubles weight = read_wide(w->entries + k + p * WIDE, 1, WIDE, 0);
                sum[p] += weight * gather_doubles(message, s->other + k + p * WIDE);
            }
        if (is_shared(s, slice)) scatter_sums(sums, s->state + slice * SLICE, 1, sum);
        else scatter_sums(sums, s->state + slice * SLICE, 0, sum);
    }
}

/* As sum_over_arcs, and adds source_i message_j to the share of each arc from i to j. Sources are kept messages times
   both factors. */
static void sum_and_count(const Weights *w, const double *message, const double *kept, Factors factors, double *sums,
                          double *shares) {
    const Slices *s = w->slices;
    clear_shared(s, sums);
    for (int64_t slice = 0; slice < s->count; slice++) {
        const int32_t *state = s->state + slice * SLICE;
        doubles sum[PARTS_OF_SLICE] = {0}, source[PARTS_OF_SLICE];
        UNROLL for (int p = 0; p < PARTS_OF_SLICE; p++)
            source[p] = gather_doubles(kept, state + p * WIDE) * factors.first * factors.second;
        for (int64_t k = s->start[slice] * SLICE; k < s->start[slice + 1] * SLICE; k += SLICE)
            UNROLL for (int p = 0; p < PARTS_OF_SLICE; p++) {
                doubles to = gather_doubles(message, s->other + k + p * WIDE);
                sum[p] += read_wide(w->entries + k + p * WIDE, 1, WIDE, 0) * to;
                store_wide(shares + k + p * WIDE, load_wide(shares + k + p * WIDE) + source[p] * to);
            }
        if (is_shared(s, slice)) scatter_sums(sums, state, 1, sum);
        else scatter_sums(sums, state, 0, sum);
    }
}

/* Rows of a slice, by which the caller arranges arcs. */
EXPORT int64_t EXPORTED(logchain_arcs_slice)(void) { return SLICE; }
