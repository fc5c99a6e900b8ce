/* Sums over the arcs of each state (entries.h): to_j = sum over arcs k -> j of from_k P_kj. An aligned row is gathered
   as it is, and otherwise pairs of mantissa and exponent are. */
#pragma once
#include "entries.h"

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
INLINE Split sum_some_arcs(const int count, const Matrix *m, int64_t entry, const Pair *from, Split own,
                           const Counting *n) {
    Split terms[4], weights[4];
    reals parts[4];
    UNROLL for (int t = 0; t < count; t++) {
        terms[t] = gather_split(from, m->slices->other + (entry + t) * LANES);
        weights[t] = load_split(m->entries, (entry + t) * LANES);
    }
    Split sum = sum_of_terms(count, terms, weights, parts);
    reals factor = n ? count_factor(n, own, sum.e) : sum.m;
    UNROLL for (int t = 0; t < count && n; t++) count_term(factor, parts[t], n->counts + (entry + t) * LANES);
    return sum;
}
INLINE Split sum_arcs_of(const Matrix *m, int64_t t, int64_t end, const Pair *from, Split own, const Counting *n) {
    Split sum = zero_split();
    for (; t + 4 <= end; t += 4) sum = plus_split(sum, sum_some_arcs(4, m, t, from, own, n));
    if (t + 2 <= end) sum = plus_split(sum, sum_some_arcs(2, m, t, from, own, n)), t += 2;
    return t < end ? plus_split(sum, sum_some_arcs(1, m, t, from, own, n)) : sum;
}

/* The same from an aligned row; whether that is right. */
INLINE int sum_aligned_arcs(const Matrix *m, int64_t begin, int64_t end, const Factor *from, Split own,
                            const Counting *n, Split *to) {
    *to = (Split){{0}, splat(from->e)};
    for (int64_t t = begin; t < end; t++)
        to->m += gather_reals(from->aligned, m->slices->other + t * LANES) * load(m->linear + t * LANES);
    if (!is_right(to->m)) return 0;
    reals factor = n ? count_factor(n, own, to->e) : to->m;
    for (int64_t t = begin; t < end && n; t++) {
        reals part = gather_reals(from->aligned, m->slices->other + t * LANES) * power_in(load(m->linear + t * LANES));
        count_term(factor, part, n->counts + t * LANES);
    }
    return 1;
}

/* `pairs` (width): scratch. */
INLINE void sum_arcs_by(const int counted, const Matrix *m, int64_t width, Factor *from, Pair *pairs) {
    const Slices *s = m->slices;
    const Counting *n = counted ? from->counting : 0;
    clear_row(width, from->to);
    for (int64_t block = 0; block < m->blocks; block++) {
        const int32_t *state = s->state + block * LANES;
        Split own = zero_split(), sum;
        if (n) own = (Split){gather_reals(n->kept.m, state), gather_reals(n->kept.e, state)};
        if (!from->aligned || !sum_aligned_arcs(m, m->start[block], m->start[block + 1], from, own, n, &sum)) {
            for (int64_t j = 0; j < width && !from->failed; j++) pairs[j] = (Pair){from->row.m[j], from->row.e[j]};
            from->failed++;
            sum = sum_arcs_of(m, m->start[block], m->start[block + 1], pairs, own, n);
        }
        write_sums(state, block < s->shared || block + 1 == s->blocks, sum, from->to);
    }
}

static void sum_arcs(const Matrix *m, int64_t width, Factor *from, Pair *pairs) {
    if (from->counting) sum_arcs_by(1, m, width, from, pairs);
    else sum_arcs_by(0, m, width, from, pairs);
}
