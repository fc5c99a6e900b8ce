/* Products of rows with matrices, in tiles of registers.

       multiply         out (rows, width) = a (rows, depth) b (depth, width)
       multiply_add     out += a b
       multiply_best    out[r, j] = the largest a[r, k] + b[k, j]: the product of logarithms for best paths

   Widths are at least LANES, in multiply_add multiples of LANES. The last vector of a row overlaps the one before it
   instead of leaving columns over: columns in both are computed twice. `best` selects additions and maxima. */
#pragma once
#include "vector.h"

INLINE int64_t padded(int64_t width) { return vectors_of(width) * LANES; }

/* out (rows, width) = a (rows, depth) b (depth, width): a[r, k] lies at r a_row + k a_k. */
typedef struct {
    int64_t rows, depth, width;
    const real *a;
    int64_t a_row, a_k;
    const real *b;
    int64_t b_row;
    real *out;
    int64_t out_row;
} Product;

/* `vectors` registers of columns from `first` on, the last one `end` columns further. `b` points to these columns, in
   rows `b_row` apart, the last vector at `b_end`. Columns at `prefetched` are for a later tile. */
typedef struct {
    int64_t first, end;
    const real *b;
    int64_t b_row, b_end;
    const real *prefetched;
} Columns;

/* An empty sum, a sum with one more term, and a sum of two sums. */
INLINE reals nothing(const int best) { return best ? splat(-INFINITE) : (reals){0}; }
INLINE reals with_term(const int best, reals before, reals a, reals b) {
    return best ? larger(a + b, before) : before + a * b;
}
INLINE reals joined(const int best, reals a, reals b) { return best ? larger(a, b) : a + b; }

/* A tile: `rows` rows from `row` r on, by `vectors` registers. */
INLINE void tile(const int best, const int rows, const int vectors, const int adds,
                 const int fetches, Product p, Columns j, int64_t r) {
    reals sum[ROWS][VECTORS];
    const real *a = p.a + r * p.a_row, *b = j.b;
    real *out = p.out + r * p.out_row + j.first;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int k = 0; k < vectors; k++)
            sum[i][k] = adds ? load(out + i * p.out_row + (k + 1 < vectors ? k * LANES : j.end)) : nothing(best);
    for (int64_t d = 0; d < p.depth; d++, a += p.a_k, b += j.b_row) {
        reals columns[VECTORS];
        if (fetches) __builtin_prefetch(j.prefetched + d * p.b_row);
        UNROLL for (int k = 0; k < vectors; k++) columns[k] = load(b + (k + 1 < vectors ? k * LANES : j.b_end));
        UNROLL for (int i = 0; i < rows; i++) {
            reals entry = splat(a[i * p.a_row]);
            UNROLL for (int k = 0; k < vectors; k++) sum[i][k] = with_term(best, sum[i][k], entry, columns[k]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int k = 0; k < vectors; k++)
            store(out + i * p.out_row + (k + 1 < vectors ? k * LANES : j.end), sum[i][k]);
}

INLINE void column_of_tiles(const int best, const int vectors, const int adds, Product p, Columns j) {
    int64_t r = 0;
    if (j.prefetched && p.rows >= ROWS) tile(best, ROWS, vectors, adds, 1, p, j, 0), r = ROWS;
    for (; r + ROWS <= p.rows; r += ROWS) tile(best, ROWS, vectors, adds, 0, p, j, r);
    if (ROWS > 4 && r + 4 <= p.rows) tile(best, 4, vectors, adds, 0, p, j, r), r += 4;
    for (; r + 2 <= p.rows; r += 2) tile(best, 2, vectors, adds, 0, p, j, r);
    if (r < p.rows) tile(best, 1, vectors, adds, 0, p, j, r);
}

/* Registers of columns for the next tiles: VECTORS, or fewer so that no single vector is left over. */
INLINE int64_t vectors_from(int64_t first, int64_t width) {
    int64_t left = vectors_of(width - first);
    return left == VECTORS + 1 ? 2 : left < VECTORS ? left : VECTORS;
}
INLINE Columns columns_from(Product p, int64_t first, int64_t vectors) {
    int64_t end = first + vectors * LANES > p.width ? p.width - LANES - first : (vectors - 1) * LANES;
    return (Columns){first, end, p.b + first, p.b_row, end, 0};
}

/* The same for a number of vectors that a compiler does not know. */
INLINE void tiles_of(const int best, int64_t vectors, const int adds, Product p, Columns j) {
    if (vectors == 3) column_of_tiles(best, VECTORS, adds, p, j);
    if (vectors == 2) column_of_tiles(best, 2, adds, p, j);
    if (vectors == 1) column_of_tiles(best, 1, adds, p, j);
}

INLINE void all_tiles(const int best, const int adds, Product p) {
    for (int64_t first = 0, vectors; first < p.width; first += vectors * LANES) {
        vectors = vectors_from(first, p.width);
        tiles_of(best, vectors, adds, p, columns_from(p, first, vectors));
    }
}

/* Rows of b per copy: VECTORS columns of them stay in the first-level cache while all rows use them. */
enum { DEEP = BYTES * 4 };

/* Whether copies are worth their time: rows of b are in different memory pages, and enough rows of a use each copy. */
INLINE int is_packed(int64_t rows, int64_t width) { return rows >= 3 * ROWS && width * (int64_t)sizeof(real) >= 2048; }

/* All tiles, from copies of columns. A single last vector overlaps columns that are accumulated over parts of the
   depth: it is computed at once, without a copy. */
INLINE void packed_tiles(const int best, const int adds, Product p) {
    real packed[DEEP * VECTORS * LANES] __attribute__((aligned(64)));
    for (int64_t done = 0; done < p.depth; done += DEEP) {
        Product part = p;
        part.depth = p.depth - done < DEEP ? p.depth - done : DEEP;
        part.a += done * p.a_k, part.b += done * p.b_row;
        for (int64_t first = 0, vectors; first < p.width; first += vectors * LANES) {
            vectors = vectors_from(first, p.width);
            if (vectors == 1) {
                if (done + part.depth == p.depth) column_of_tiles(best, 1, adds, p, columns_from(p, first, 1));
                continue;
            }
            Columns j = columns_from(part, first, vectors);
            for (int64_t d = 0; d < part.depth; d++)
                for (int64_t k = 0; k < vectors; k++)
                    store(packed + (d * vectors + k) * LANES,
                          load(j.b + d * p.b_row + (k + 1 < vectors ? k * LANES : j.end)));
            if (first + 2 * vectors * LANES <= p.width) j.prefetched = j.b + vectors * LANES;
            j.b = packed, j.b_row = vectors * LANES, j.b_end = (vectors - 1) * LANES;
            if (adds || done) tiles_of(best, vectors, 1, part, j);
            else tiles_of(best, vectors, 0, part, j);
        }
    }
}

INLINE void multiply_by(const int best, const int adds, Product p) {
    if (is_packed(p.rows, p.width)) packed_tiles(best, adds, p);
    else all_tiles(best, adds, p);
}
static void multiply(Product p) { multiply_by(0, 0, p); }
static void multiply_best(Product p) { multiply_by(1, 0, p); }
static void multiply_add(Product p) { multiply_by(0, 1, p); }

/* A product of one row may find the largest of each of the words of b, as natural numbers, while it reads them. They
   have a sign where an entry has one; otherwise they are those of the largest entry, or of a double that is larger by
   up to 2^-20 of it. */
enum { UNSEEN, LARGEST };
typedef uint32_t words __attribute__((vector_size(BYTES)));
INLINE naturals larger_words(naturals a, naturals b) {
    return (naturals)__builtin_elementwise_max((words)a, (words)b);
}

/* A tile of one row: four independent partial sums over the depth hide latency. */
INLINE void row_tile(const int best, const int seen, const int vectors, int64_t depth, const real *a, const real *b,
                     int64_t b_row, real *out, int64_t end, naturals *bits) {
    enum { APART = BYTES < 64 ? 1 : 4 };
    naturals highest[APART] = {0};
    reals sum[4][4];
    int64_t d = 0;
    UNROLL for (int part = 0; part < 4; part++) UNROLL for (int k = 0; k < vectors; k++) sum[part][k] = nothing(best);
    for (; d + 4 <= depth; d += 4)
        UNROLL for (int part = 0; part < 4; part++)
            UNROLL for (int k = 0; k < vectors; k++) {
                reals entry = load(b + (d + part) * b_row + (k + 1 < vectors ? k * LANES : end));
                if (seen) highest[part % APART] = larger_words(highest[part % APART], (naturals)entry);
                sum[part][k] = with_term(best, sum[part][k], splat(a[d + part]), entry);
            }
    for (; d < depth; d++)
        UNROLL for (int k = 0; k < vectors; k++) {
            reals entry = load(b + d * b_row + (k + 1 < vectors ? k * LANES : end));
            if (seen) highest[0] = larger_words(highest[0], (naturals)entry);
            sum[0][k] = with_term(best, sum[0][k], splat(a[d]), entry);
        }
    UNROLL for (int part = 0; part < APART && seen; part++) *bits = larger_words(*bits, highest[part]);
    UNROLL for (int k = 0; k < vectors; k++)
        store(out + (k + 1 < vectors ? k * LANES : end),
              joined(best, joined(best, sum[0][k], sum[1][k]), joined(best, sum[2][k], sum[3][k])));
}

/* A product of one row; returns the LARGEST words of b, or 0 UNSEEN. */
INLINE natural row_tiles(const int best, const int seen, int64_t depth, int64_t width, const real *a, const real *b,
                         int64_t b_row, real *out) {
    naturals bits = {0};
    for (int64_t j = 0; j < width;) {
        int64_t most = seen && BYTES < 64 ? 3 : 4; /* registers hold the bits, too */
        int64_t left = vectors_of(width - j), vectors = left < most ? left : most;
        int64_t end = j + vectors * LANES > width ? width - LANES - j : (vectors - 1) * LANES;
        if (vectors == 4) row_tile(best, seen, 4, depth, a, b + j, b_row, out + j, end, &bits);
        if (vectors == 3) row_tile(best, seen, 3, depth, a, b + j, b_row, out + j, end, &bits);
        if (vectors == 2) row_tile(best, seen, 2, depth, a, b + j, b_row, out + j, end, &bits);
        if (vectors == 1) row_tile(best, seen, 1, depth, a, b + j, b_row, out + j, end, &bits);
        j += vectors * LANES;
    }
    return seen ? __builtin_reduce_max(bits) : 0;
}

static void row_times(int64_t depth, int64_t width, const real *a, const real *b, int64_t b_row, real *out) {
    row_tiles(0, UNSEEN, depth, width, a, b, b_row, out);
}

/* out (width) = a (width) times the transpose of b (width, width). Columns that two vectors of `a` share count once. */
INLINE natural row_times_rows(const int seen, int64_t width, const real *a, const real *b, int64_t b_row, real *out) {
    int64_t even = width / LANES * LANES, end = width - LANES;
    naturals bits = {0};
    real tail[LANES] = {0};
    for (int64_t j = even; j < width; j++) tail[j - end] = a[j];
    reals last = load(tail);
    for (int64_t block = 0; block < vectors_of(width); block++) {
        int64_t k = start_of(block, width);
        reals sum[LANES] = {0};
        UNROLL for (int r = 0; r < LANES && even < width; r++) {
            reals entry = load(b + (k + r) * b_row + end);
            if (seen) bits = larger_words(bits, (naturals)entry);
            sum[r] = last * entry;
        }
        for (int64_t j = 0; j < even; j += LANES) {
            reals entries = load(a + j);
            UNROLL for (int r = 0; r < LANES; r++) {
                reals entry = load(b + (k + r) * b_row + j);
                if (seen) bits = larger_words(bits, (naturals)entry);
                sum[r] += entries * entry;
            }
        }
        store(out + k, total_of_each(sum));
    }
    return seen ? __builtin_reduce_max(bits) : 0;
}

/* The lower, and the upper, halves of two vectors with lanes interleaved. */
#if BYTES * 8 / BITS == 16
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif BYTES * 8 / BITS == 8
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif BYTES * 8 / BITS == 4
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#else
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 2)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 1, 3)
#endif

/* A block of LANES by LANES entries. */
INLINE void transpose_block(const real *from, int64_t from_row, real *to, int64_t to_row) {
    reals a[LANES], b[LANES];
    UNROLL for (int k = 0; k < LANES; k++) a[k] = load(from + k * from_row);
    UNROLL for (int done = 1; done < LANES; done *= 2) {
        UNROLL for (int k = 0; k < LANES / 2; k++) {
            b[2 * k] = ZIP_LOW(a[k], a[k + LANES / 2]);
            b[2 * k + 1] = ZIP_HIGH(a[k], a[k + LANES / 2]);
        }
        UNROLL for (int k = 0; k < LANES; k++) a[k] = b[k];
    }
    UNROLL for (int k = 0; k < LANES; k++) store(to + k * to_row, a[k]);
}

/* to (width, width) = the transpose of `from`. */
static void transpose(int64_t width, const real *from, int64_t from_row, real *to, int64_t to_row) {
    for (int64_t i = 0; i < vectors_of(width); i++)
        for (int64_t j = 0; j < vectors_of(width); j++) {
            int64_t row = start_of(i, width), column = start_of(j, width);
            transpose_block(from + row * from_row + column, from_row, to + column * to_row + row, to_row);
        }
}
