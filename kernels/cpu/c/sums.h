/* Sums over the entries of a matrix (entries.h): to_j = sum over k of from_k P_kj, for a block of states j.

       bands    from_{j + shift_d} P_d(j) of each band d: rows have zeros on both sides, as far as bands reach
       arcs     gathered from an aligned row as it is, otherwise pairs of mantissa and exponent are
       dense    by one exponent e      (sum of m_k 2^(e_k - e) P_kj) 2^e: right if all sums of a block are 1 at least
                by their own           first e_j = max e_k + e_kj, then (sum of m_k m_kj 2^(e_k + e_kj - e_j)) 2^e_j */
#pragma once
#include "entries.h"

/* Sums of `held` bands for a block of states, from the state `from`; weights and counts are those of its entries. */
INLINE Split sum_some_bands(const int held, const int64_t *shift, Row weight, Row from, Split forward,
                            const Counting *n, real *counts) {
    Split terms[8], weights[8];
    UNROLL for (int k = 0; k < held; k++) {
        terms[k] = load_split(from, shift[k]);
        weights[k] = load_split(weight, k * LANES);
    }
    return sum_of_terms(held, terms, weights, n, forward, counts);
}

INLINE void sum_bands_by(const int held, const BlockMatrix *m, const RowProduct *f, const int counted) {
    int64_t count = held < 8 ? held : m->start[1], blocks = m->blocks, shift[8];
    Row entries = m->entries, from = f->row, to = f->to;
    Counting counting = counted ? *f->counting : (Counting){0};
    const Counting *n = counted ? &counting : 0;
    for (int k = 0; k < held; k++) shift[k] = m->shift[k];
    for (int64_t block = 0; block < blocks; block++) {
        int64_t j = block * LANES, at = block * count * LANES;
        Split forward = n ? load_split(counting.forward, j) : zero_split();
        Row weight = row_from(entries, at), near = row_from(from, j);
        Split sum = sum_some_bands(held, shift, weight, near, forward, n, counting.counts + at);
        for (int64_t d = held; d < count; d += held) {
            weight = row_from(entries, at + d * LANES);
            real *counts = counting.counts + at + d * LANES;
            sum = plus_split(sum, sum_some_bands(held, m->shift + d, weight, near, forward, n, counts));
        }
        store_split(to, j, sum);
    }
}

#define HELD(bands)                                    \
    case bands:                                        \
        if (f->counting) sum_bands_by(bands, m, f, 1); \
        else sum_bands_by(bands, m, f, 0);             \
        break
static void sum_bands(const BlockMatrix *m, const RowProduct *f) {
    switch (smaller_of(m->start[1], 8)) {
        HELD(1); HELD(2); HELD(3); HELD(4); HELD(5); HELD(6); HELD(7); HELD(8);
    }
}

typedef struct { real m, e; } Pair;

#if BITS == 32
typedef int64_t Halves __attribute__((vector_size(BYTES)));
enum { HALF_LANES = LANES / 2 };
/* A pair is one load: two halves of the lanes, whose even entries are mantissas. */
INLINE Split gather_split(const Pair *from, const int32_t *index) {
    Halves low, high;
    UNROLL for (int l = 0; l < HALF_LANES; l++) {
        __builtin_memcpy((char *)&low + 8 * l, from + index[l], 8);
        __builtin_memcpy((char *)&high + 8 * l, from + index[l + HALF_LANES], 8);
    }
    Split a;
    reals first = (reals)low, second = (reals)high;
    UNROLL for (int l = 0; l < HALF_LANES; l++) {
        a.m[l] = first[2 * l], a.e[l] = first[2 * l + 1];
        a.m[l + HALF_LANES] = second[2 * l], a.e[l + HALF_LANES] = second[2 * l + 1];
    }
    return a;
}
#else
INLINE Split gather_split(const Pair *from, const int32_t *index) {
    Split a;
    UNROLL for (int l = 0; l < LANES; l++) a.m[l] = from[index[l]].m, a.e[l] = from[index[l]].e;
    return a;
}
#endif
INLINE reals gather_reals(const real *from, const int32_t *index) {
    reals a;
    UNROLL for (int l = 0; l < LANES; l++) a[l] = from[index[l]];
    return a;
}

/* Writes the sums of a block. States of `shared` blocks may have several rows, or a row no state: sums are added. */
INLINE void write_sums(const int32_t *state, int shared, Split sum, Row to) {
    for (int l = 0; l < LANES && shared; l++) {
        int64_t j = state[l];
        if (!(sum.e[l] > -INFINITE)) continue;
        Split both = plus_split((Split){splat(to.m[j]), splat(to.e[j])}, (Split){splat(sum.m[l]), splat(sum.e[l])});
        to.m[j] = both.m[0], to.e[j] = both.e[0];
    }
    UNROLL for (int l = 0; l < LANES && !shared; l++) to.m[state[l]] = sum.m[l], to.e[state[l]] = sum.e[l];
}

/* Sums of `count` entries of a block. */
INLINE Split sum_some_arcs(const int count, const BlockMatrix *m, int64_t entry, const Pair *from, Split forward,
                           const Counting *n) {
    Split terms[4], weights[4];
    UNROLL for (int t = 0; t < count; t++) {
        terms[t] = gather_split(from, m->slices->other + (entry + t) * LANES);
        weights[t] = load_split(m->entries, (entry + t) * LANES);
    }
    return sum_of_terms(count, terms, weights, n, forward, n ? n->counts + entry * LANES : 0);
}
INLINE Split sum_arcs_of(const BlockMatrix *m, int64_t t, int64_t end, const Pair *from, Split forward,
                         const Counting *n) {
    Split sum = zero_split();
    for (; t + 4 <= end; t += 4) sum = plus_split(sum, sum_some_arcs(4, m, t, from, forward, n));
    if (t + 2 <= end) sum = plus_split(sum, sum_some_arcs(2, m, t, from, forward, n)), t += 2;
    return t < end ? plus_split(sum, sum_some_arcs(1, m, t, from, forward, n)) : sum;
}

/* The same from an aligned row; whether that is right. */
INLINE int sum_aligned_arcs(const BlockMatrix *m, int64_t begin, int64_t end, const RowProduct *from, Split forward,
                            const Counting *n, Split *to) {
    *to = (Split){{0}, splat(from->e)};
    for (int64_t t = begin; t < end; t++)
        to->m += gather_reals(from->aligned, m->slices->other + t * LANES) * load(m->linear + t * LANES);
    if (!is_right(to->m)) return 0;
    reals factor = n ? count_factor(n, forward, to->e) : to->m;
    for (int64_t t = begin; t < end && n; t++) {
        reals part = gather_reals(from->aligned, m->slices->other + t * LANES) * power_in(load(m->linear + t * LANES));
        count_term(factor, part, n->counts + t * LANES);
    }
    return 1;
}

/* `pairs` (width): scratch. */
INLINE void sum_arcs_by(const int counted, const BlockMatrix *m, int64_t width, RowProduct *from, Pair *pairs) {
    const Slices *s = m->slices;
    const Counting *n = counted ? from->counting : 0;
    clear_row(width, from->to);
    for (int64_t block = 0; block < m->blocks; block++) {
        const int32_t *state = s->state + block * LANES;
        Split forward = zero_split(), sum;
        if (n) forward = (Split){gather_reals(n->forward.m, state), gather_reals(n->forward.e, state)};
        if (!from->aligned || !sum_aligned_arcs(m, m->start[block], m->start[block + 1], from, forward, n, &sum)) {
            for (int64_t j = 0; j < width && !from->failed; j++) pairs[j] = (Pair){from->row.m[j], from->row.e[j]};
            from->failed++;
            sum = sum_arcs_of(m, m->start[block], m->start[block + 1], pairs, forward, n);
        }
        write_sums(state, block < s->shared || block + 1 == s->blocks, sum, from->to);
    }
}

static void sum_arcs(const BlockMatrix *m, int64_t width, RowProduct *from, Pair *pairs) {
    if (from->counting) sum_arcs_by(1, m, width, from, pairs);
    else sum_arcs_by(0, m, width, from, pairs);
}

enum { CHAINS = 4, TILED = 4 }; /* independent partial results, to hide latency; rows that share a load of an entry */

/* The largest exponents of the terms of a block. */
INLINE reals highest_terms(const BlockMatrix *m, int64_t begin, int64_t end, const real *from_e) {
    reals top[CHAINS];
    int64_t t = begin;
    UNROLL for (int r = 0; r < CHAINS; r++) top[r] = splat(-INFINITE);
    for (; t + CHAINS <= end; t += CHAINS)
        UNROLL for (int r = 0; r < CHAINS; r++)
            top[r] = larger(from_e[m->other[t + r]] + load(m->entries.e + (t + r) * LANES), top[r]);
    for (; t < end; t++) top[0] = larger(from_e[m->other[t]] + load(m->entries.e + t * LANES), top[0]);
    return larger(larger(top[0], top[1]), larger(top[2], top[3]));
}

/* Sums of the entries of a block, each by its own exponent. */
INLINE Split sum_dense_terms(const BlockMatrix *m, int64_t begin, int64_t end, Row from) {
    reals high = highest_terms(m, begin, end, from.e) - LIFT, sum[CHAINS] = {0};
    for (int64_t t = begin; t < end; t += CHAINS)
        UNROLL for (int r = 0; r < CHAINS; r++) {
            if (t + r >= end) break;
            Split weight = load_split(m->entries, (t + r) * LANES);
            int64_t k = m->other[t + r];
            sum[r] += from.m[k] * power(from.e[k] + weight.e - high) * weight.m;
        }
    return (Split){(sum[0] + sum[1]) + (sum[2] + sum[3]), high};
}

/* Sums of a block for `rows` aligned rows. */
INLINE void sum_aligned(const int rows, const BlockMatrix *m, int64_t begin, int64_t end, RowProduct *const *from,
                        reals *to) {
    enum { PARTS = 2 };
    reals sum[TILED][PARTS] = {0};
    const real *row[TILED];
    UNROLL for (int f = 0; f < rows; f++) row[f] = from[f]->aligned;
    int64_t t = begin;
    for (; t + PARTS <= end; t += PARTS)
        UNROLL for (int r = 0; r < PARTS; r++) {
            reals entry = load(m->linear + (t + r) * LANES);
            UNROLL for (int f = 0; f < rows; f++) sum[f][r] += row[f][m->other[t + r]] * entry;
        }
    UNROLL for (int f = 0; f < rows; f++) {
        if (t < end) sum[f][0] += row[f][m->other[t]] * load(m->linear + t * LANES);
        to[f] = sum[f][0] + sum[f][1];
    }
}

/* A block of a row; its `aligned` sums are taken where they are right. */
INLINE void sum_block(const BlockMatrix *m, int64_t block, RowProduct *from, reals aligned) {
    Split sum = {aligned, splat(from->e)};
    if (!from->aligned || !is_right(aligned))
        sum = sum_dense_terms(m, m->start[block], m->start[block + 1], from->row), from->failed++;
    store_split(from->to, block * LANES, sum);
}

/* Products of `count` rows, aligned ones first: a block stays in the first-level cache for all of them. */
static void sum_dense(const BlockMatrix *m, int64_t count, RowProduct **from) {
    int64_t aligned = 0;
    while (aligned < count && from[aligned]->aligned) aligned++;
    for (int64_t block = 0; block < m->blocks; block++) {
        int64_t f = 0, begin = m->start[block], end = m->start[block + 1];
        reals sum[TILED] = {0};
        for (; f + TILED <= aligned; f += TILED) {
            sum_aligned(TILED, m, begin, end, from + f, sum);
            for (int r = 0; r < TILED; r++) sum_block(m, block, from[f + r], sum[r]);
        }
        for (; f < count; f++) {
            if (f < aligned) sum_aligned(1, m, begin, end, from + f, sum);
            sum_block(m, block, from[f], sum[0]);
        }
    }
}

/* Counts the entries of a matrix from the row that was multiplied: its sums tell by which exponents. */
static void count_dense(const BlockMatrix *m, const RowProduct *from, const Counting *n) {
    for (int64_t block = 0; block < m->blocks; block++) {
        reals high = load(from->to.e + block * LANES);
        reals factor = count_factor(n, load_split(n->forward, block * LANES), high);
        int aligned = from->aligned && !any(high != splat(from->e));
        for (int64_t t = m->start[block]; t < m->start[block + 1]; t++) {
            int64_t k = m->other[t];
            reals e = load(m->entries.e + t * LANES), part;
            if (aligned) part = from->aligned[k] * power(e);
            else part = from->row.m[k] * power(from->row.e[k] + e - high);
            count_term(factor, part, n->counts + t * LANES);
        }
    }
}
