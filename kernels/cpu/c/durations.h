/* Sums over segments with durations: state (s, r), number s D + r of c, is the state s of a segment with r steps left.

       forward     E(s') = sum over s of from(s, 0) P(s, s')       to(s, r) = from(s, r + 1) + E(s) d(s, r)
       backward    G(s) = sum over r of d(s, r) from(s, r)         to(s, r) = from(s, r - 1)
                                                                   to(s, 0) = sum over s' of P(s, s') G(s')

   P: the matrix of segments; d: the durations; S: the forward message. A step takes c + (segments)^2 products.
   Counts of a backward step:

       of P(s, s')    S(s, 0) P(s, s') G(s')
       of d(s, r)     (sum over s' of S(s', 0) P(s', s)) d(s, r) from(s, r)

   Rows have a vector of zeros on both sides, since the last vector of a segment's state ends in the next one. */
#pragma once
#include "sums.h"

INLINE Row durations_of(const BlockMatrix *m) { return row_from(m->entries, m->start[m->matrix_blocks] * LANES); }

/* The first states (s, 0) of a row, as a row. */
static void gather_ends(const BlockMatrix *m, Row from, Row to) {
    for (int64_t s = 0; s < m->segments; s++) to.m[s] = from.m[s * m->longest], to.e[s] = from.e[s * m->longest];
}

/* Writes the sum of the products of two rows of `count` vectors, those of `b` that many entries apart, to index j. */
INLINE void sum_products(int64_t count, Row a, Row b, int64_t apart, Row to, int64_t j) {
    reals tops = splat(-INFINITE), sum = {0};
    for (int64_t t = 0; t < count; t++)
        tops = larger(load(a.e + t * LANES) + load(b.e + t * apart * LANES), tops);
    real high = largest(tops) - LIFT;
    for (int64_t t = 0; t < count; t++) {
        Split x = load_split(a, t * LANES), y = load_split(b, t * apart * LANES);
        sum += x.m * power(x.e + y.e - high) * y.m;
    }
    to.m[j] = total(sum), to.e[j] = high;
}

static void settle_row(int64_t width, Row row) {
    for (int64_t j = 0; j < width; j += LANES) {
        Split a = load_split(row, j);
        store_split(row, j, settled(a.m, a.e));
    }
}

static void extend_segments(const BlockMatrix *m, Row from, Row entering, Row to) {
    Row weight = durations_of(m);
    int64_t longest = m->longest;
    for (int64_t s = 0; s < m->segments; s++) {
        Split enters = {splat(entering.m[s]), splat(entering.e[s])};
        for (int64_t r = 0; r < longest; r += LANES, weight = row_from(weight, LANES)) {
            Split after = load_split(from, s * longest + r + 1), duration = load_split(weight, 0);
            if (r + LANES >= longest)
                after.e = where(lane_numbers() < (whole)(longest - 1 - r), after.e, splat(-INFINITE));
            Split entered = {enters.m * duration.m, enters.e + duration.e};
            store_split(to, s * longest + r, plus_split(after, entered));
        }
    }
}

/* Counts both parameters; `inner`: the product of the matrix of segments with G. */
static void count_durations(const BlockMatrix *m, const BlockMatrix *square, const RowProduct *inner,
                            const RowProduct *f) {
    Counting n = *f->counting;
    Row weight = durations_of(m), forward = m->forward, entering = m->sums;
    real *counts = n.counts + m->start[m->matrix_blocks] * LANES;
    gather_ends(m, n.forward, forward);
    n.forward = forward, count_dense(square, inner, &n);
    for (int64_t s = 0; s < m->segments; s++)
        sum_products(m->matrix_blocks, forward, row_from(m->entries, s * LANES), m->segments, entering, s);
    settle_row(m->matrix_blocks * LANES, entering);
    for (int64_t s = 0; s < m->segments; s++) {
        reals high = splat(m->ends.e[s] - LIFT);
        reals factor = count_factor(&n, (Split){splat(entering.m[s]), splat(entering.e[s])}, high);
        for (int64_t r = 0; r < m->longest; r += LANES, weight = row_from(weight, LANES), counts += LANES) {
            Split from = load_split(f->row, s * m->longest + r);
            count_term(factor, from.m * power(from.e + load(weight.e) - high), counts);
        }
    }
}

/* The product of the matrix of segments with `ends`, which are settled. */
static void sum_segments(const BlockMatrix *square, RowProduct *f) {
    int64_t width = square->blocks * LANES;
    f->row = square->ends, f->to = square->sums;
    if (square->is_near) {
        f->e = align(width, f->row, top_of_row(width, f->row), square->aligned);
        f->aligned = square->aligned;
    }
    sum_dense(square, 1, &f);
}

static void sum_durations(const BlockMatrix *m, const RowProduct *f) {
    Row row = f->row, to = f->to, weight = durations_of(m);
    int64_t longest = m->longest, vectors = vectors_of(longest);
    BlockMatrix square = *m;
    RowProduct inner = {0};
    square.blocks = m->matrix_blocks;
    if (!m->backward) {
        gather_ends(m, row, m->ends), sum_segments(&square, &inner);
        return extend_segments(m, row, m->sums, to);
    }
    for (int64_t s = 0; s < m->segments; s++)
        sum_products(vectors, row_from(row, s * longest), row_from(weight, s * vectors * LANES), 1, m->ends, s);
    settle_row(m->matrix_blocks * LANES, m->ends), sum_segments(&square, &inner);
    for (int64_t j = 0; j < m->segments * longest; j += LANES) store_split(to, j, load_split(row, j - 1));
    for (int64_t s = 0; s < m->segments; s++) to.m[s * longest] = m->sums.m[s], to.e[s * longest] = m->sums.e[s];
    if (f->counting) count_durations(m, &square, &inner, f);
}
