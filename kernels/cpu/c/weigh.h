/* The steps of scaled messages between matrix products that the caller makes, see kernels/cpu/products.py:

       S = max(U E f, floor) where U E > 0      E = exp(x - max x), raised to 2^-DEEPEST      f = 2^(TOP - k)

   for sums U and max U in [1/2, 1) 2^k, so that f times a raised E is at most the floor. A row is flagged if a sum is
   positive and below `limit`, negative, or not finite, or if an emission is not finite. Backward

       gradient of x = weight S B / sum S B      T = scale E B f / sum S B where S > 0; 0 if that is at most `least` */
#pragma once
#include "step.h"

typedef struct {
    int64_t first, last, shares; /* of this thread */
    int64_t step, count;         /* the first `count` rows are computed */
    int64_t rows, states, slots, slot;
    const real *sums;            /* U (count, states); or B, which is 1 in rows that end with this step */
    const real *x;               /* row q of a step is at x_at[q] + step states x_step; its entries are contiguous */
    const int64_t *x_at;
    int64_t x_step;
    const int64_t *ends;         /* (rows): number of steps */
    double limit, floor, scale, least;
    real *state;                 /* S (rows, states) of a step is in slot step % slots, of `slot` entries */
    real *tops, *powers;         /* (steps, rows): max x and f */
    uint8_t *flagged;            /* (rows) */
    const uint8_t *live;         /* (rows), backward: whether T is computed; 0 elsewhere */
    const double *weight;
    double *inverse;             /* (rows): 1 / sum S B, or 0 */
    real *source;                /* T (count, states), of step 0 S B; null: forward */
    real *grad;                  /* the gradient of x: row q of a step is at grad_at[q] + step states; or null */
    const int64_t *grad_at;
} Weigh;

INLINE const real *x_of(const Weigh *a, int64_t q) { return a->x + a->x_at[q] + a->step * a->x_step; }
INLINE real *state_of(const Weigh *a, int64_t q) { return a->state + a->step % a->slots * a->slot + q * a->states; }

static void weigh_row(const Weigh *a, int64_t q, int64_t place) {
    int64_t c = a->states;
    const real *x = x_of(a, q);
    real *s = state_of(a, q), top = top_of(x, c), factor, floor = (real)a->floor;
    const real *u = a->sums + q * c;
    naturals least = (naturals){0} - 1, most = {0}, peak = {0};
    for (int64_t j = 0; j < c; j += LANES) {
        reals sum = read_some(u + j, 1, c - j, 0), potential = read_some(x + j, 1, c - j, -INFINITE);
        reals product = sum * exponential(potential - top, NO_TAIL);
        naturals bits = (naturals)sum - 1; /* 0 wraps around */
        least = __builtin_elementwise_min(least, bits), most = __builtin_elementwise_max(most, (naturals)sum);
        peak = __builtin_elementwise_max(peak, (naturals)product);
        write_some(s + j, product, c - j);
    }
    natural low = __builtin_reduce_min(least), tall = __builtin_reduce_max(most), heavy = __builtin_reduce_max(peak);
    natural limit = (natural)bits_of((real)a->limit), infinite = (natural)bits_of(INFINITE); /* negative: larger */
    a->flagged[q] = tall >= infinite || heavy >= infinite || (low + 1 != 0 && low + 1 < limit);
    if (a->flagged[q]) return clear(c, s);
    factor = scale_to_top(exponent_of((whole)tall));
    for (int64_t j = 0; j < c; j += LANES) {
        reals scaled = read_some(s + j, 1, c - j, 0) * factor;
        write_some(s + j, where((scaled > 0) & (scaled < floor), splat(floor), scaled), c - j);
    }
    a->tops[place] = top, a->powers[place] = factor;
}

static void source_row(const Weigh *a, int64_t q, int64_t place) {
    enum { CHUNK = 64 * LANES }; /* entries of a partial sum */
    int64_t c = a->states;
    const real *s = state_of(a, q), *x = x_of(a, q), *b;
    real *t = a->source + q * c, top = a->tops[place], *grad = a->grad ? a->grad + a->grad_at[q] + a->step * c : 0;
    int last = a->ends[q] == a->step + 1;
    for (int64_t j = 0; last && j < c; j++) t[j] = 1;
    b = last ? t : a->sums + q * c;
    reals sum = {0};
    for (int64_t begin = 0; begin < c; begin += CHUNK) {
        reals part = {0};
        for (int64_t j = begin; j < c && j < begin + CHUNK; j += LANES)
            part += read_some(s + j, 1, c - j, 0) * read_some(b + j, 1, c - j, 0);
        sum += part;
    }
    double inverse = 1 / (double)total(sum);
    real share = (real)inverse, weight = (real)a->weight[q], scale = (real)(inverse * a->powers[place] * a->scale);
    a->inverse[q] = inverse;
    for (int64_t j = 0; j < c; j += LANES) {
        reals state = read_some(s + j, 1, c - j, 0), after = read_some(b + j, 1, c - j, 0), posterior = state * after;
        if (grad) write_some(grad + j, posterior * share * weight, c - j); /* weights may be large or small */
        reals source = exponential(read_some(x + j, 1, c - j, -INFINITE) - top, NO_TAIL) * after * scale;
        if (a->step) posterior = where((state > 0) & (source > (real)a->least), source, (reals){0});
        write_some(t + j, posterior, c - j);
    }
}

EXPORT int64_t EXPORTED(logchain_weigh)(const Weigh *a) {
    for (int64_t q = a->count * a->first / a->shares; q < a->count * a->last / a->shares; q++) {
        int inside = a->ends[q] > a->step;
        if (!a->source && inside && !a->flagged[q]) weigh_row(a, q, a->step * a->rows + q);
        else if (!a->source) clear(a->states, state_of(a, q));
        else if (inside && a->live[q]) source_row(a, q, a->step * a->rows + q);
        else {
            a->inverse[q] = 0, clear(a->states, a->source + q * a->states);
            if (a->grad) clear(a->states, a->grad + a->grad_at[q] + a->step * a->states);
        }
    }
    return 0;
}
