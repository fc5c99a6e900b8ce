/* Expected counts of arcs, from counts in the order of slices to gradients in the order of arcs. */
#pragma once
#include "arcs.h"

/* The counts of a thread: of a set's weights, or of those into one step. */
typedef struct {
    Weights weights;                   /* in the order of a->out */
    int64_t set;                       /* whose weights of one matrix these are; -1 for none */
    double *shares, *counts;           /* (entries of out, SLICE): counts over weights, and counts to add to these */
    const real *from;                  /* the weights that are counted */
    int64_t counted_set, counted_step; /* whose weights these are; nothing is counted at step 0 */
} ArcCounts;

/* Moves counts into the gradient: exactly 0 where a weight is 0. */
static void write_arc_counts(const ArcChain *a, ArcCounts *to) {
    const Weights *w = &to->weights;
    int by_log = a->logarithms || a->by_log;
    Factors scale = factors_of(by_log ? 0 : -w->exponent);
    for (int64_t k = 0; k < slots_of(&a->out) && to->counted_step; k++) {
        int64_t arc = a->out.arc[k], at = to->counted_set * a->arcs + arc;
        double share = to->shares[k], count = to->counts[k], value;
        to->shares[k] = to->counts[k] = 0;
        if (arc < 0) continue;
        double weight = to->from[arc * a->weight_arc];
        if (weight == (a->logarithms ? -__builtin_inf() : 0)) continue;
        if (by_log) value = (share == 0 ? 0 : share * w->entries[k]) + count;
        else value = share * scale.first * scale.second + (count == 0 ? 0 : count / weight);
        if (a->counts) a->counts[at] += value;
        else a->grad_weights[(to->counted_set * (a->steps - 1) + to->counted_step - 1) * a->arcs + arc] += (real)value;
    }
    to->counted_step = 0;
}

/* Notes that the counts have transitions of a sequence into a step; those of one step alone are moved at once. */
static void note_counts(const ArcChain *a, int64_t q, int64_t step, ArcCounts *to) {
    to->from = arc_weights_at(a, q, step), to->counted_set = a->set[q], to->counted_step = step;
    if (!a->one_matrix) write_arc_counts(a, to);
}
