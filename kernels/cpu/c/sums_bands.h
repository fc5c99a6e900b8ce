/* Sums over the bands of a matrix (entries.h): to_j = sum over bands d of from_{j + shift_d} P_d(j). Rows have zeros on
   both sides, as far as bands reach. */
#pragma once
#include "entries.h"

/* Sums of `held` bands for a block of states, from the state `from`; weights and counts are those of its entries. */
INLINE Split sum_some_bands(const int held, const int64_t *shift, Row weight, Row from, Split own, const Counting *n,
                            real *counts) {
    Split terms[8], weights[8];
    reals parts[8];
    UNROLL for (int k = 0; k < held; k++) {
        terms[k] = load_split(from, shift[k]);
        weights[k] = load_split(weight, k * LANES);
    }
    Split sum = sum_of_terms(held, terms, weights, parts);
    reals factor = n ? count_factor(n, own, sum.e) : sum.m;
    UNROLL for (int k = 0; k < held && n; k++) count_term(factor, parts[k], counts + k * LANES);
    return sum;
}

INLINE void sum_bands_by(const int held, const Matrix *m, const Factor *f, const int counted) {
    int64_t count = held < 8 ? held : m->start[1], blocks = m->blocks, shift[8];
    Row entries = m->entries, from = f->row, to = f->to;
    Counting counting = counted ? *f->counting : (Counting){0};
    const Counting *n = counted ? &counting : 0;
    for (int k = 0; k < held; k++) shift[k] = m->shift[k];
    for (int64_t block = 0; block < blocks; block++) {
        int64_t j = block * LANES, at = block * count * LANES;
        Split own = n ? load_split(counting.kept, j) : zero_split();
        Split sum = sum_some_bands(held, shift, row_from(entries, at), row_from(from, j), own, n, counting.counts + at);
        for (int64_t d = held; d < count; d += held) {
            Row weight = row_from(entries, at + d * LANES);
            real *counts = counting.counts + at + d * LANES;
            sum = plus_split(sum, sum_some_bands(held, m->shift + d, weight, row_from(from, j), own, n, counts));
        }
        store_split(to, j, sum);
    }
}

#define HELD(bands)                                    \
    case bands:                                        \
        if (f->counting) sum_bands_by(bands, m, f, 1); \
        else sum_bands_by(bands, m, f, 0);             \
        break
static void sum_bands(const Matrix *m, const Factor *f) {
    switch (smaller_of(m->start[1], 8)) {
        HELD(1); HELD(2); HELD(3); HELD(4); HELD(5); HELD(6); HELD(7); HELD(8);
    }
}
