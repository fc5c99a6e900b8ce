/* Products of rows with matrices, in tiles of registers.

       out (rows, width) = a (rows, depth) b (depth, width)

   Widths are at least LANES. The last vector of a row overlaps the one before it, so that no column is left over: what
   lies in both is computed twice. Where a product is added to what is there, widths are multiples of LANES. */
#pragma once
#include "vector.h"

/* Where the k-th vector of a row begins. */
INLINE int64_t start_of(int64_t k, int64_t width) { return (k + 1) * LANES > width ? width - LANES : k * LANES; }
INLINE int64_t vectors_of(int64_t width) { return (width + LANES - 1) / LANES; }
INLINE int64_t padded(int64_t width) { return vectors_of(width) * LANES; }

/* Entries of a matrix that are copied next to each other, and stay in the first-level cache while all rows meet them. */
enum { DEEP = BYTES * 4, PACKED = DEEP * VECTORS * LANES };

/* `rows` by `vectors` registers; the last vector of columns begins at `end`, in b at `b_end`. a[r, k] lies at
   r a_row + k a_k. What lies at `ahead`, as b does in rows of `ahead_row`, is fetched for later, if anything is. */
INLINE void tile(const int rows, const int vectors, const int adds, int64_t depth, const real *a, int64_t a_row,
                 int64_t a_k, const real *b, int64_t b_row, int64_t b_end, real *out, int64_t out_row, int64_t end,
                 const real *ahead, int64_t ahead_row) {
    reals sum[ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int k = 0; k < vectors; k++)
            sum[r][k] = adds ? load(out + r * out_row + (k + 1 < vectors ? k * LANES : end)) : (reals){0};
    for (int64_t d = 0; d < depth; d++, a += a_k, b += b_row) {
        reals columns[VECTORS];
        if (ahead) __builtin_prefetch(ahead + d * ahead_row);
        UNROLL for (int k = 0; k < vectors; k++) columns[k] = load(b + (k + 1 < vectors ? k * LANES : b_end));
        UNROLL for (int r = 0; r < rows; r++) {
            reals entry = all(a[r * a_row]);
            UNROLL for (int k = 0; k < vectors; k++) sum[r][k] += entry * columns[k];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int k = 0; k < vectors; k++)
            store(out + r * out_row + (k + 1 < vectors ? k * LANES : end), sum[r][k]);
}

INLINE void column_of_tiles(const int vectors, const int adds, int64_t rows, int64_t depth, const real *a,
                            int64_t a_row, int64_t a_k, const real *b, int64_t b_row, int64_t b_end, real *out,
                            int64_t out_row, int64_t end, const real *ahead, int64_t ahead_row) {
    int64_t r = 0;
    if (ahead && rows >= ROWS) {
        tile(ROWS, vectors, adds, depth, a, a_row, a_k, b, b_row, b_end, out, out_row, end, ahead, ahead_row);
        r = ROWS;
    }
    for (; r + ROWS <= rows; r += ROWS)
        tile(ROWS, vectors, adds, depth, a + r * a_row, a_row, a_k, b, b_row, b_end, out + r * out_row, out_row, end, 0, 0);
    for (; r + 2 <= rows; r += 2)
        tile(2, vectors, adds, depth, a + r * a_row, a_row, a_k, b, b_row, b_end, out + r * out_row, out_row, end, 0, 0);
    if (r < rows) tile(1, vectors, adds, depth, a + r * a_row, a_row, a_k, b, b_row, b_end, out + r * out_row, out_row, end, 0, 0);
}

/* The same, from a copy of the columns. */
INLINE void packed_column(const int vectors, const int adds, int64_t rows, int64_t depth, const real *a, int64_t a_row,
                          int64_t a_k, const real *b, int64_t b_row, real *out, int64_t out_row, int64_t end,
                          const real *ahead, real *packed) {
    for (int64_t d = 0; d < depth; d++)
        UNROLL for (int k = 0; k < vectors; k++)
            store(packed + (d * vectors + k) * LANES, load(b + d * b_row + (k + 1 < vectors ? k * LANES : end)));
    column_of_tiles(vectors, adds, rows, depth, a, a_row, a_k, packed, vectors * LANES, (vectors - 1) * LANES, out, out_row,
                    end, ahead, b_row);
}

/* Columns are taken VECTORS at a time, but not so that one vector alone is left over. */
#define FOR_COLUMNS(...)                                                                                              \
    for (int64_t j = 0; j < width;) {                                                                                 \
        int64_t left = vectors_of(width - j), vectors = left == VECTORS + 1 ? 2 : left < VECTORS ? left : VECTORS;    \
        int64_t end = j + vectors * LANES > width ? width - LANES - j : (vectors - 1) * LANES;                        \
        __VA_ARGS__                                                                                                   \
        j += vectors * LANES;                                                                                         \
    }

/* A matrix of which a row's columns lie in other pages than those of the next row is copied, as far as rows repay it. */
INLINE int is_packed(int64_t rows, int64_t width) { return rows >= 3 * ROWS && width * (int64_t)sizeof(real) >= 2048; }

static void packed_tiles(const int adds, int64_t rows, int64_t depth, int64_t width, const real *a, int64_t a_row,
                         int64_t a_k, const real *b, int64_t b_row, real *out, int64_t out_row) {
    real packed[PACKED] __attribute__((aligned(64)));
    for (int64_t done = 0; done < depth; done += DEEP, a += DEEP * a_k, b += DEEP * b_row) {
        int64_t deep = depth - done < DEEP ? depth - done : DEEP;
        int more = adds || done > 0;
        FOR_COLUMNS(
            const real *ahead = j + 2 * vectors * LANES <= width ? b + j + vectors * LANES : 0;
            if (vectors == 3 && more) packed_column(VECTORS, 1, rows, deep, a, a_row, a_k, b + j, b_row, out + j, out_row, end, ahead, packed);
            if (vectors == 3 && !more) packed_column(VECTORS, 0, rows, deep, a, a_row, a_k, b + j, b_row, out + j, out_row, end, ahead, packed);
            if (vectors == 2 && more) packed_column(2, 1, rows, deep, a, a_row, a_k, b + j, b_row, out + j, out_row, end, ahead, packed);
            if (vectors == 2 && !more) packed_column(2, 0, rows, deep, a, a_row, a_k, b + j, b_row, out + j, out_row, end, ahead, packed);
            if (vectors == 1 && done + deep == depth) /* it may overlap the columns before it, and so is made at once */
                column_of_tiles(1, adds, rows, depth, a - done * a_k, a_row, a_k, b - done * b_row + j, b_row, end, out + j, out_row, end, 0, 0);
        )
    }
}

INLINE void all_tiles(const int adds, int64_t rows, int64_t depth, int64_t width, const real *a, int64_t a_row,
                      int64_t a_k, const real *b, int64_t b_row, real *out, int64_t out_row) {
    FOR_COLUMNS(
        if (vectors == 3) column_of_tiles(VECTORS, adds, rows, depth, a, a_row, a_k, b + j, b_row, end, out + j, out_row, end, 0, 0);
        if (vectors == 2) column_of_tiles(2, adds, rows, depth, a, a_row, a_k, b + j, b_row, end, out + j, out_row, end, 0, 0);
        if (vectors == 1) column_of_tiles(1, adds, rows, depth, a, a_row, a_k, b + j, b_row, end, out + j, out_row, end, 0, 0);
    )
}

static void multiply(int64_t rows, int64_t depth, int64_t width, const real *a, int64_t a_row, int64_t a_k,
                     const real *b, int64_t b_row, real *out, int64_t out_row) {
    if (is_packed(rows, width)) packed_tiles(0, rows, depth, width, a, a_row, a_k, b, b_row, out, out_row);
    else all_tiles(0, rows, depth, width, a, a_row, a_k, b, b_row, out, out_row);
}

static void multiply_add(int64_t rows, int64_t depth, int64_t width, const real *a, int64_t a_row, int64_t a_k,
                         const real *b, int64_t b_row, real *out, int64_t out_row) {
    if (is_packed(rows, width)) packed_tiles(1, rows, depth, width, a, a_row, a_k, b, b_row, out, out_row);
    else all_tiles(1, rows, depth, width, a, a_row, a_k, b, b_row, out, out_row);
}

/* One row: the sum over the depth is four, none of which waits for another. */
INLINE void row_tile(const int vectors, int64_t depth, const real *a, const real *b, int64_t b_row, real *out,
                     int64_t end) {
    reals sum[4][4] = {0};
    int64_t d = 0;
    for (; d + 4 <= depth; d += 4)
        UNROLL for (int part = 0; part < 4; part++)
            UNROLL for (int k = 0; k < vectors; k++)
                sum[part][k] += a[d + part] * load(b + (d + part) * b_row + (k + 1 < vectors ? k * LANES : end));
    for (; d < depth; d++)
        UNROLL for (int k = 0; k < vectors; k++)
            sum[0][k] += a[d] * load(b + d * b_row + (k + 1 < vectors ? k * LANES : end));
    UNROLL for (int k = 0; k < vectors; k++)
        store(out + (k + 1 < vectors ? k * LANES : end), (sum[0][k] + sum[1][k]) + (sum[2][k] + sum[3][k]));
}

static void row_times(int64_t depth, int64_t width, const real *a, const real *b, int64_t b_row, real *out) {
    for (int64_t j = 0; j < width;) {
        int64_t left = vectors_of(width - j), vectors = left < 4 ? left : 4;
        int64_t end = j + vectors * LANES > width ? width - LANES - j : (vectors - 1) * LANES;
        if (vectors == 4) row_tile(4, depth, a, b + j, b_row, out + j, end);
        if (vectors == 3) row_tile(3, depth, a, b + j, b_row, out + j, end);
        if (vectors == 2) row_tile(2, depth, a, b + j, b_row, out + j, end);
        if (vectors == 1) row_tile(1, depth, a, b + j, b_row, out + j, end);
        j += vectors * LANES;
    }
}

/* out (width) = a (width) times the transpose of b (width, width). What two vectors of `a` share counts once. */
static void row_times_transposed(int64_t width, const real *a, const real *b, int64_t b_row, real *out) {
    int64_t even = width / LANES * LANES, end = width - LANES;
    real rest[LANES] = {0};
    for (int64_t j = even; j < width; j++) rest[j - end] = a[j];
    reals last = load(rest);
    for (int64_t block = 0; block < vectors_of(width); block++) {
        int64_t k = start_of(block, width);
        reals sum[LANES];
        UNROLL for (int r = 0; r < LANES; r++) sum[r] = even < width ? last * load(b + (k + r) * b_row + end) : (reals){0};
        for (int64_t j = 0; j < even; j += LANES) {
            reals entries = load(a + j);
            UNROLL for (int r = 0; r < LANES; r++) sum[r] += entries * load(b + (k + r) * b_row + j);
        }
        store(out + k, total_of_each(sum));
    }
}

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
