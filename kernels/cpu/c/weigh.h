/* One step of scaled messages between matrix products that the caller makes, see kernels/plain/scaled.py:

       S = max(U E f, floor) where U E > 0        E = exp(x - max x), raised to 2^-DEEPEST        f = 2^min(TOP - k, ...)

   for sums U and max U E in [1/2, 1) 2^k. f is smaller where f times a raised E would be above the floor. A row is flagged
   if a sum is positive and below `limit`, negative, or not finite, or if an emission is not finite. */
#pragma once
#include "step.h"

typedef struct {
    int64_t first, last;         /* the rows of this thread */
    int64_t step, rows, states;
    const real *sums;            /* U (blocks, rows, states / blocks) */
    int64_t blocks;
    const real *x;               /* row q of a step is at x_at[q] + step x_step; its entries are contiguous */
    const int64_t *x_at;
    int64_t x_step;
    const int64_t *ends;         /* (rows): number of steps; or null */
    double limit, floor;
    int64_t spread;              /* k of U may exceed that of U E by so much without a smaller f */
    real *state;                 /* S (rows, states) */
    real *tops, *factors;        /* (rows): max x and f */
    uint8_t *flagged, *rough;      /* (rows): see above; whether S has an entry that is 0 or raised */
    real *scratch;                  /* (states) of this thread */
} Weigh;

/* A vector from entry j of c on; lanes beyond are `fill`, or are not stored. */
INLINE reals vector_at(const real *row, int64_t j, int64_t c, real fill) {
    return j + LANES <= c ? load(row + j) : load_some(row + j, 1, c - j, fill);
}
INLINE void put_vector(real *row, int64_t j, int64_t c, reals a) {
    if (j + LANES <= c) store(row + j, a);
    else store_some(row + j, a, c - j);
}

/* U of a row, contiguous. */
INLINE const real *sums_of(const Weigh *a, int64_t q) {
    int64_t part = a->states / a->blocks;
    if (a->blocks == 1) return a->sums + q * part;
    for (int64_t block = 0; block < a->blocks; block++)
        __builtin_memcpy(a->scratch + block * part, a->sums + (block * a->rows + q) * part, part * sizeof(real));
    return a->scratch;
}

static void weigh_row(const Weigh *a, int64_t q) {
    int64_t c = a->states;
    const real *u = sums_of(a, q), *x = a->x + a->x_at[q] + a->step * a->x_step;
    real *s = a->state + q * c, top, factor, floor = (real)a->floor;
    reals high = splat(-INFINITE);
    naturals least = (naturals){0} - 1, most = {0}, heaviest = {0};
    for (int64_t j = 0; j < c; j += LANES) high = larger(high, vector_at(x, j, c, -INFINITE));
    top = largest(high), top = top == -INFINITE ? 0 : top;
    for (int64_t j = 0; j < c; j += LANES) {
        reals sum = vector_at(u, j, c, 0), product = sum * exponential(vector_at(x, j, c, -INFINITE) - top, NO_TAIL);
        naturals bits = (naturals)sum - 1; /* 0 wraps around */
        least = __builtin_elementwise_min(least, bits), most = __builtin_elementwise_max(most, (naturals)sum);
        heaviest = __builtin_elementwise_max(heaviest, (naturals)product);
        put_vector(s, j, c, product);
    }
    natural low = __builtin_reduce_min(least), tall = __builtin_reduce_max(most), heavy = __builtin_reduce_max(heaviest);
    natural limit = (natural)bits_of((real)a->limit), infinite = (natural)bits_of(INFINITE); /* negative: larger */
    a->flagged[q] = tall >= infinite || heavy >= infinite || (low + 1 != 0 && low + 1 < limit);
    if (a->flagged[q]) return clear(c, s);
    int64_t power = TOP - exponent_of((whole)heavy), bound = TOP - exponent_of((whole)tall) + a->spread;
    power = heavy == 0 ? 0 : power < bound ? power : bound;
    factor = power_of_two(power > BIAS ? BIAS : power < 1 - BIAS ? 1 - BIAS : power);
    wholes rough = {0};
    for (int64_t j = 0; j < c; j += LANES) {
        reals scaled = vector_at(s, j, c, 2 * floor) * (j + LANES <= c ? splat(factor) : load_some(&factor, 0, c - j, 1));
        rough |= scaled <= floor;
        put_vector(s, j, c, where((scaled > 0) & (scaled < floor), splat(floor), scaled));
    }
    a->rough[q] = any(rough) != 0, a->tops[q] = top, a->factors[q] = factor;
}

EXPORT int64_t EXPORTED(logchain_weigh)(const Weigh *a) {
    for (int64_t q = a->first; q < a->last; q++) {
        int inside = !a->flagged[q] && !(a->ends && a->ends[q] <= a->step);
        a->tops[q] = 0, a->factors[q] = 1, a->rough[q] = 0;
        if (inside) weigh_row(a, q);
        else clear(a->states, a->state + q * a->states);
    }
    return 0;
}
