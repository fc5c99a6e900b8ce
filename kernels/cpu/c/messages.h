/* Forward and backward messages, each entry a natural logarithm that is exact however far it lies below the others:

       forward_i = log(a_i) + what was taken out,  a_i = (a_{i-1} P_i) exp(x_i - max x_i)
       backward_{i-1} = log(b_{i-1}) + what was taken out,  b_{i-1} = P_i (exp(x_i - max x_i) b_i)

   by the loops of forward.h in float64, or in the numbers of exact.h where something may underflow. Backward messages
   are the sums of a walk from the end, under matrices that are turned. */
#pragma once
#include "exact.h"

/* A sequence's row as logarithms, with what has been taken out of it. One that holds a NaN is NaN, and so are the next:
   the sum of what has been taken out keeps it, for a row of zeros could not. */
static void write_log_numbers(const Exact *w, int64_t f, real *out) {
    const double *m = w->m + f * w->across, *e = w->e + f * w->across, digits = w->digits[f];
    Sum taken = w->shifts[f];
    longs nan = {0};
    int64_t c = w->a->states, some = 0;
    if (digits < 0x1p40 && digits > -0x1p40) add_exponent(&taken, (int64_t)digits * 512);
    else add(&taken, digits * (512 * 0.69314718055994531));
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles value = load_wide(m + j), digit = load_wide(e + j);
        doubles found = choose(value < __builtin_inf(), logarithm_of(value, 0), value);
        found += choose(value == 0, both(0), digit * DIGIT_LN2_HIGH + digit * DIGIT_LN2_LOW);
        found = taken.sum + (taken.lost + found);
        nan |= found != found;
        store_wide(w->um + j, found);
    }
    UNROLL for (int l = 0; l < WIDE; l++) some |= nan[l];
    if (some) w->shifts[f].sum = __builtin_nan("");
    for (int64_t j = 0; j < c; j++) out[j] = (real)(some ? __builtin_nan("") : w->um[j]);
}

/* A sequence's row times exp(x) of a step. */
static void emit_into(Exact *w, int64_t f, int64_t step) {
    double digit;
    const real *x = x_at(w->a, w->set, w->chosen[f], step);
    add(&w->shifts[f], emit_numbers(w, x, w->m + f * w->across, w->e + f * w->across, &digit));
    w->digits[f] += digit;
}

/* A sequence's row times the matrix that has been read. */
static void multiply_into(Exact *w, int64_t f) {
    double *m = w->m + f * w->across, *e = w->e + f * w->across;
    row_of_numbers(&w->matrix, m, e, w->scratch, w->rows, w->um, w->ue);
    for (int64_t j = 0; j < w->across; j++) m[j] = w->um[j], e[j] = w->ue[j];
}

static void none_at(const Chain *a, real *out) {
    for (int64_t j = 0; j < a->states; j++) out[j] = -INFINITE;
}

static void messages_ahead(Exact *w) {
    const Chain *a = w->a;
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = (Sum){0, 0}, w->digits[f] = 0;
    for (int64_t step = 0; step < w->steps; step++) {
        if (step == 1 || (step > 1 && !a->one_matrix)) read_numbers(a, w->set, step, 0, &w->matrix);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f], row = f * w->across;
            real *out = logarithms_at(a, a->log_forward, w->set, q, step);
            if (step >= steps_of(a, q)) {
                if (!a->starts) none_at(a, out);
                continue;
            }
            const real *p0 = a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member;
            if (step == 0) read_row(w, p0, a->p0_state, (int)a->logarithms, w->m + row, w->e + row);
            else multiply_into(w, f);
            emit_into(w, f, step);
            write_log_numbers(w, f, out);
            if (step + 1 == steps_of(a, q)) finish_numbers(w, f, w->m + row, w->e + row);
        }
    }
}

static void messages_back(Exact *w) {
    const Chain *a = w->a;
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = (Sum){0, 0}, w->digits[f] = 0;
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        int64_t ahead = step + 1;
        if (ahead < w->steps && (!a->one_matrix || ahead + 1 == w->steps))
            read_numbers(a, w->set, ahead, 1, &w->matrix);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f], row = f * w->across;
            real *out = logarithms_at(a, a->log_backward, w->set, q, step);
            if (step >= steps_of(a, q)) {
                if (!a->starts) none_at(a, out);
                continue;
            }
            if (ahead == steps_of(a, q))
                for (int64_t j = 0; j < w->across; j++)
                    w->m[row + j] = j < a->states, w->e[row + j] = j < a->states ? 0 : NO_DIGIT;
            else emit_into(w, f, ahead), multiply_into(w, f);
            write_log_numbers(w, f, out);
        }
    }
}

static void messages_both(Exact *w) { messages_ahead(w), messages_back(w); }

/* Messages in float64 of sequences that all have as many steps; log Z. */
int64_t logchain_forward64(const Chain *), logchain_room64(const Chain *);
static void messages_of(const Chain *a, Chain back) {
    static const real one = 1, none = 0;
    Chain ahead = *a;
    int64_t last = a->steps - 1;
    ahead.single = back.single = BITS == 32;
    ahead.log_backward = back.log_forward = ahead.messages = back.messages = 0;
    back.x += last * a->x_step, back.x_step = -a->x_step;
    back.log_backward += last * a->grad_step, back.grad_step = -a->grad_step;
    back.bulk_from = a->bulk_to, back.bulk_to = a->bulk_from;
    if (last > 0 && !a->one_matrix) back.bulk += (last - 1) * a->bulk_step, back.bulk_step = -a->bulk_step;
    back.p0 = a->logarithms ? &none : &one, back.p0_set = back.p0_member = back.p0_state = 0;
    logchain_forward64(&ahead), logchain_forward64(&back);
    for (int64_t q = a->first; q < a->last; q++) a->lossy[q] |= back.lossy[q];
}

/* Messages and log Z of all sequences. */
EXPORT int64_t EXPORTED(logchain_messages)(const Chain *a) {
    Chain all = *a, back = *a;
    int64_t sequences = a->sets * a->members;
    Chain *both[] = {&all, &back};
    for (int k = 0; k < 2; k++) {
        both[k]->room = all.room, both[k]->lossy = take(&both[k]->room, sequences);
        if (k || !a->log_norm) both[k]->log_norm = take(&both[k]->room, sequences * 8);
        all.room = both[k]->room;
    }
    for (int64_t q = a->first; q < a->last; q++) all.lossy[q] = 1;
    if (!a->ends && !a->starts) messages_of(&all, back);
    redo(&all, 1, messages_both);
    for (int64_t q = a->first; q < a->last && a->value; q++) a->value[q] = (real)all.log_norm[q];
    return 0;
}

/* Bytes of scratch for them. */
EXPORT int64_t EXPORTED(logchain_messages_room)(const Chain *a) {
    int64_t plain = logchain_room64(a), redone = EXPORTED(logchain_redo_room)(a);
    return (plain > redone ? plain : redone) + 2 * a->sets * a->members * 17 + 6 * 64;
}
