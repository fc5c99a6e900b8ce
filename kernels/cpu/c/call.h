/* A short chain's question in one call: what is lossy is redone, and results are rounded to the format. What the caller
   has no use for lies in scratch. */
#pragma once
#include "messages.h"

INLINE int64_t sequences_of(const Chain *a) { return a->sets * a->members; }
INLINE int64_t message_entries(const Chain *a) { return a->steps * sequences_of(a) * a->states; }

static Chain with_scratch(const Chain *a) {
    Chain all = *a;
    if (!a->log_norm) all.log_norm = take(&all.room, sequences_of(a) * 8);
    if (!a->lossy) all.lossy = take(&all.room, sequences_of(a));
    return all;
}

static int64_t find_value(const Chain *a) {
    int64_t lossy = EXPORTED(logchain_forward)(a);
    if (lossy) EXPORTED(logchain_redo_forward)(a);
    for (int64_t place = a->first; place < a->last && a->value; place++) {
        int64_t q = sequence_in(a, place);
        a->value[q] = (real)a->log_norm[q];
    }
    return lossy;
}

/* Gradients in the operands' own shapes: what sequences share is added up in float64. */
static void find_gradients(const Chain *a) {
    Chain all = *a;
    int64_t c = a->states, square = c * c;
    uint8_t *lossy = all.lossy = take(&all.room, sequences_of(a)); /* that of the caller may be asked again */
    for (int64_t q = 0; q < sequences_of(a); q++) lossy[q] = a->lossy[q];
    all.uncounted = take(&all.room, sequences_of(a) * 8);
    if (a->grad_bulk && a->one_matrix) {
        all.grad_bulk = 0, all.counts = take(&all.room, a->sets * square * 8);
        for (int64_t k = 0; k < a->sets * square; k++) all.counts[k] = 0;
    }
    if (a->start) all.grad_p0 = take(&all.room, sequences_of(a) * c * 8);
    if (EXPORTED(logchain_backward)(&all)) EXPORTED(logchain_redo_backward)(&all);
    for (int64_t k = 0; k < a->sets * square && all.counts; k++)
        a->grad_bulk[k / square * a->count_set + k % square] = (real)all.counts[k];
    if (!a->start) return;
    /* the first sequence of those that share a place adds up the others */
    for (int64_t q = 0; q < sequences_of(a); q++) {
        int64_t set = q / a->members, member = q % a->members;
        int64_t first = (a->start_set ? set : 0) * a->members + (a->start_member ? member : 0);
        for (int64_t j = 0; j < c && first < q; j++) all.grad_p0[first * c + j] += all.grad_p0[q * c + j];
    }
    for (int64_t q = sequences_of(a) - 1; q >= 0; q--) /* it comes last here */
        for (int64_t j = 0; j < c; j++)
            a->start[q / a->members * a->start_set + q % a->members * a->start_member + j] =
                (real)all.grad_p0[q * c + j];
}

/* log Z, and how many sequences were redone. */
EXPORT int64_t EXPORTED(logchain_value)(const Chain *a) {
    Chain all = with_scratch(a);
    return find_value(&all);
}

/* The gradients of what `value` has left, for given weights. */
EXPORT int64_t EXPORTED(logchain_gradients)(const Chain *a) {
    find_gradients(a);
    return 0;
}

/* Both, for weights of one; how many sequences were redone forward. */
EXPORT int64_t EXPORTED(logchain_posteriors)(const Chain *a) {
    Chain all = with_scratch(a);
    double *weight = take(&all.room, sequences_of(a) * 8);
    for (int64_t q = 0; q < sequences_of(a); q++) weight[q] = 1;
    all.weight = weight, all.messages = take(&all.room, message_entries(a) * (int64_t)sizeof(real));
    int64_t lossy = find_value(&all);
    find_gradients(&all);
    return lossy;
}

/* Bytes of scratch for any of them, and for messages of numbers. */
EXPORT int64_t EXPORTED(logchain_value_room)(const Chain *a) {
    int64_t plain = EXPORTED(logchain_room)(a), redone = EXPORTED(logchain_redo_room)(a);
    return (plain > redone ? plain : redone) + sequences_of(a) * (int64_t)(9 + sizeof(real)) + 3 * 64;
}
EXPORT int64_t EXPORTED(logchain_gradients_room)(const Chain *a) {
    int64_t doubles_ = a->sets * a->states * a->states + sequences_of(a) * a->states;
    return EXPORTED(logchain_value_room)(a) + sequences_of(a) * 9 + doubles_ * 8 + 4 * 64;
}
EXPORT int64_t EXPORTED(logchain_posteriors_room)(const Chain *a) {
    return EXPORTED(logchain_gradients_room)(a) + sequences_of(a) * 8
           + message_entries(a) * (int64_t)sizeof(real) + 2 * 64;
}
