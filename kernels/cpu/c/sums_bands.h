/* Sums over the bands of a matrix (entries.h): to_j = sum over bands d of from_{j + shift_d} P_d(j). Rows have zeros on
   both sides, as far as bands reach. */
#pragma once
#include "entries.h"

/* Sums of `held` bands from band d on, for the block of states j. */
INLINE Split sum_some_bands(const int held, const Matrix *m, int64_t d, int64_t entry, int64_t j, Row from, Split own,
                            const Counting *n) {
    Split terms[8], weights[8];
    reals parts[8];
    UNROLL for (int k = 0; k < held; k++) {
        terms[k] = load_split(from, j + m->shift[d + k]);
        weights[k] = load_split(m->entries, (entry + k) * LANES);
    }
    Split sum = sum_of_terms(held, terms, weights, parts);
    reals factor = n ? count_factor(n, own, sum.e) : sum.m;
    UNROLL for (int k = 0; k < held && n; k++) count_term(factor, parts[k], n->counts + (entry + k) * LANES);
    return sum;
}

INLINE void sum_bands_by(const int held, const Matrix *m, const Factor *f, const Counting *n) {
    int64_t count = held < 8 ? held : m->start[1];
    for (int64_t block = 0; block < m->blocks; block++) {
        int64_t j = block * LANES, entry = block * count;
        Split own = n ? load_split(n->kept, j) : zero_split();
        Split sum = sum_some_bands(held, m, 0, entry, j, f->row, own, n);
        for (int64_t d = held; d < count; d += held)
            sum = plus_split(sum, sum_some_bands(held, m, d, entry + d, j, f->row, own, n));
        store_split(f->to, j, sum);
    }
}

#define HELD(bands)                                          \
    case bands:                                              \
        if (f->counting) sum_bands_by(bands, m, f, f->counting); \
        else sum_bands_by(bands, m, f, 0);                   \
        break
static void sum_bands(const Matrix *m, const Factor *f) {
    switch (smaller_of(m->start[1], 8)) {
        HELD(1); HELD(2); HELD(3); HELD(4); HELD(5); HELD(6); HELD(7); HELD(8);
    }
}
