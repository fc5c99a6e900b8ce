/* Sums over the entries of a dense matrix (entries.h): to_j = sum over k of from_k P_kj, for a block of states j:

       by one exponent e      (sum of m_k 2^(e_k - e) P_kj) 2^e: right if all sums of a block come out at 1 or above
       by their own           first e_j = max e_k + e_kj, then (sum of m_k m_kj 2^(e_k + e_kj - e_j)) 2^e_j */
#pragma once
#include "entries.h"

enum { CHAINS = 4, TILED = 4 }; /* independent partial results, to hide latency; rows that share a load of an entry */

/* The largest exponents of the terms of a block. */
INLINE reals highest_terms(const Matrix *m, int64_t begin, int64_t end, const real *from_e) {
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
INLINE Split sum_dense_terms(const Matrix *m, int64_t begin, int64_t end, Row from) {
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
INLINE void sum_aligned(const int rows, const Matrix *m, int64_t begin, int64_t end, Factor *const *from, reals *to) {
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
INLINE void sum_block(const Matrix *m, int64_t block, Factor *from, reals aligned) {
    Split sum = {aligned, splat(from->e)};
    if (!from->aligned || !is_right(aligned))
        sum = sum_dense_terms(m, m->start[block], m->start[block + 1], from->row), from->failed++;
    store_split(from->to, block * LANES, sum);
}

/* Products of `count` rows, aligned ones first: a block stays in the first-level cache for all of them. */
static void sum_dense(const Matrix *m, int64_t count, Factor **from) {
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
static void count_dense(const Matrix *m, const Factor *from, const Counting *n) {
    for (int64_t block = 0; block < m->blocks; block++) {
        reals high = load(from->to.e + block * LANES);
        reals factor = count_factor(n, load_split(n->kept, block * LANES), high);
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
