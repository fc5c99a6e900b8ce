/* log Z of any chain, and gradients and posteriors of short ones, in one call each. Lossy sequences are recomputed
   exactly, and results are rounded to `real`. */
#pragma once
#include "messages.h"

INLINE int64_t sequences_of(const Chain *a) { return a->sets * a->members; }

/* The chain with scratch where the caller wants no log_norm and no lossy. */
static Chain with_scratch(const Chain *a, Room *room) {
    Chain chain = *a;
    double *log_norm = take(room, sequences_of(a) * 8);
    uint8_t *lossy = take(room, sequences_of(a));
    if (!a->log_norm) chain.log_norm = log_norm;
    if (!a->lossy) chain.lossy = lossy;
    chain.room = rest_of(room);
    return chain;
}

INLINE real least_of(int64_t c, const real *from, int64_t step) {
    real least = 0;
    if (step == 1) for (int64_t j = 0; j < c; j++) least = from[j] < least ? from[j] : least;
    else for (int64_t j = 0; j < c; j++) least = from[j * step] < least ? from[j * step] : least;
    return least;
}
/* Whether p0, or a matrix that serves all steps, has an entry below 0. */
EXPORT int64_t EXPORTED(logchain_has_negative)(const Chain *a) {
    int64_t c = a->states, from = a->bulk.from, to = a->bulk.to;
    if (a->logarithms) return 0;
    if (to != 1) from = a->bulk.to, to = a->bulk.from;
    for (int64_t set = 0; set < a->sets && a->one_matrix && a->steps > 1; set++)
        for (int64_t k = 0; k < c; k++)
            if (least_of(c, matrix_at(&a->bulk, set, 1) + k * from, to) < 0) return 1;
    for (int64_t q = 0; q < sequences_of(a); q++)
        if ((q == 0 || p0_at(a, q) != p0_at(a, q - 1)) && least_of(c, p0_at(a, q), a->p0.step) < 0) return 1;
    return 0;
}

/* log Z into log_norm, and rounded into `value`; how many sequences were recomputed exactly. */
static int64_t find_value(const Chain *a) {
    int64_t lossy = EXPORTED(logchain_forward)(a);
    if (!a->room) return larger_of(lossy, EXPORTED(logchain_redo_forward)(a));
    if (lossy) EXPORTED(logchain_redo_forward)(a);
    for (int64_t place = a->first; place < a->last && a->value; place++) {
        int64_t q = sequence_in(a, place);
        a->value[q] = (real)a->log_norm[q];
    }
    return lossy;
}

/* Rounds the gradients of p0 (g, m, c) into its own shape; those that share a row there are added in `sums`. */
static void write_p0_gradients(const Chain *a, const double *gradients, double *sums) {
    int64_t c = a->states, entries = sequences_of(a) * c;
    const Rows *to = &a->grad_p0_real;
    for (int64_t k = 0; k < entries; k++) sums[k] = 0;
    for (int64_t k = 0; k < entries; k++) sums[to->at[k / c] + k % c] += gradients[k];
    for (int64_t k = 0; k < entries; k++) to->data[to->at[k / c] + k % c] = (real)sums[to->at[k / c] + k % c];
}

/* Gradients in the operands' own shapes, from the messages that `value` keeps; sums over sequences are float64. */
EXPORT int64_t EXPORTED(logchain_gradients)(const Chain *a) {
    Chain chain = *a;
    Room room = {.begin = a->room};
    int64_t square = a->states * a->states;
    uint8_t *lossy = take(&room, sequences_of(a)); /* a copy: the caller may ask for gradients again */
    double *counts = take(&room, a->sets * square * 8), *grad_p0 = take(&room, sequences_of(a) * a->states * 8);
    double *sums = take(&room, sequences_of(a) * a->states * 8);
    chain.lossy = lossy, chain.uncounted = take(&room, sequences_of(a) * 8), chain.room = rest_of(&room);
    if (!a->room)
        return room.bytes + larger_of(EXPORTED(logchain_backward)(&chain), EXPORTED(logchain_redo_backward)(&chain));
    for (int64_t q = 0; q < sequences_of(a); q++) lossy[q] = a->lossy[q];
    if (a->grad_bulk.data && a->one_matrix) {
        chain.grad_bulk.data = 0, chain.counts = counts;
        for (int64_t k = 0; k < a->sets * square; k++) counts[k] = 0;
    }
    if (a->grad_p0_real.data) chain.grad_p0 = grad_p0;
    if (EXPORTED(logchain_backward)(&chain)) EXPORTED(logchain_redo_backward)(&chain);
    for (int64_t k = 0; k < a->sets * square && chain.counts; k++)
        a->grad_bulk.data[a->grad_bulk.at[k / square] + k % square] = (real)counts[k];
    if (a->grad_p0_real.data) write_p0_gradients(a, grad_p0, sums);
    return 0;
}

EXPORT int64_t EXPORTED(logchain_value)(const Chain *a) {
    Room room = {.begin = a->room};
    Chain chain = with_scratch(a, &room);
    int64_t lossy = find_value(&chain);
    return a->room ? lossy : room.bytes + lossy;
}

/* `value` and then `gradients`, for weights of one; how many sequences were recomputed exactly forward. */
EXPORT int64_t EXPORTED(logchain_posteriors)(const Chain *a) {
    Room room = {.begin = a->room};
    Chain chain = with_scratch(a, &room);
    double *weight = take(&room, sequences_of(a) * 8);
    chain.messages.data = take(&room, a->steps * sequences_of(a) * a->states * (int64_t)sizeof(real));
    chain.weight = weight, chain.room = rest_of(&room);
    for (int64_t q = 0; q < sequences_of(a) && a->room; q++) weight[q] = 1;
    int64_t lossy = find_value(&chain);
    int64_t gradients = EXPORTED(logchain_gradients)(&chain);
    return a->room ? lossy : room.bytes + larger_of(lossy, gradients);
}

/* The size of the struct, which other languages compare with their own. */
EXPORT int64_t EXPORTED(logchain_size)(void) { return sizeof(Chain); }
