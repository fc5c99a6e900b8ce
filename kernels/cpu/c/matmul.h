/* Log-semiring matrix products of sets of matrices (rows, depth) and (depth, columns), and their gradients:

       c = log S + r_i + t_j      S = A B      A = exp(a - r_i)      B = exp(b - t_j)      r_i = max_k a, t_j = max_k b

       dA = (G B^T) A      dB = (A^T G) B      G = w / S

   A and B are 0 only where a and b are -inf; smaller values are raised to 2^-DEEPEST, see scale.h. An S below `least`
   may lack terms, or be too large by raised ones. Unless no path leads there, which the product of A > 0 and B > 0
   tells, it is recomputed as a log-sum-exp of doubles, and so are its gradients.

   A thread has the rows from `first` to before `last` of all sets. It holds B of one set, and AT_ONCE rows at a time.
   Weights of so many rows are divided by a power of two near the largest; sums over more rows are doubles. */
#pragma once
#include "step.h"

enum { AT_ONCE = 48 };

/* The least S of one term that is exact to rounding in float32. It is that of float64 too: an entry D nats below its
   maxima has an error of D roundings. */
#define LEAST_TERM power_of_two(24 - 108)

/* Of a set, row and column; strides count entries. */
typedef struct { real *data; int64_t set, row, column; } Strided;
INLINE real *strided_row(const Strided *a, int64_t set, int64_t row) { return a->data + set * a->set + row * a->row; }

/* Data is null for what is not wanted: `out`, or gradients. */
typedef struct {
    int64_t sets, rows, depth, columns, first, last;
    Strided a, b;            /* (sets, rows, depth), (sets, depth, columns) */
    Strided out, weight;     /* (sets, rows, columns): c, w */
    Strided grad_a, grad_b;  /* of a and b */
    double *part_b;          /* (depth, columns) in place of grad_b, where several threads have rows of one set */
    char *scratch;
} Operands;

/* Rows are whole vectors: `deep` for k, `wide` for j. In the columns that fill the last vector, B is 1 and G is 0; in
   the rows of B that B^T is padded with, B is 0. */
typedef struct {
    const Operands *p;
    int64_t set, deep, wide, recomputed;
    real least, scale;              /* the least S; the factor of a block's weights */
    int ordinary;                   /* a block's weights are: see flush.h */
    const real *held_b, *marked_b;  /* the b whose B, and B > 0, are below */
    real *a, *b, *transposed;       /* A (AT_ONCE, deep), B (deep, wide), B^T (wide, deep) */
    real *row_top, *column_top;     /* r (AT_ONCE), t (wide) */
    real *sums, *quotients;         /* S and G (AT_ONCE, wide) */
    real *positive_a, *positive_b;  /* A > 0 (AT_ONCE, deep), B > 0 (depth, wide) */
    real *paths;                    /* their product (AT_ONCE, wide) */
    real *row;                      /* a row of c (wide) */
    real *part;                     /* G B^T (AT_ONCE, deep) */
    real *block_b;                  /* A^T G of a block (depth, wide) */
    double *sum_b, *recomputed_b;   /* their sum, and gradients of recomputed entries (depth, wide) */
} Matmul;

/* exp(a - top), 0 only where a is -inf: the difference may overflow. */
INLINE reals exponential_below(reals a, reals top) {
    return exponential(where(a == -INFINITE, a, larger(splat(LOG_DEEPEST), a - top)), NO_TAIL);
}

/* A and r of `rows` rows. */
static void exponentiate_rows(Matmul *w, const real *a, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        real *row = w->a + i * w->deep;
        read_row(w->p->depth, w->deep, a + i * w->p->a.row, w->p->a.column, -INFINITE, row);
        real top = w->row_top[i] = top_of(row, w->deep);
        for (int64_t k = 0; k < w->deep; k += LANES) store(row + k, exponential_below(load(row + k), splat(top)));
    }
}

/* B and t of a set, and B^T for gradients of a. */
static void exponentiate_columns(Matmul *w, const real *b) {
    int64_t depth = w->p->depth, deep = w->deep, wide = w->wide;
    if (w->held_b == b) return;
    for (int64_t k = 0; k < depth; k++)
        read_row(w->p->columns, wide, b + k * w->p->b.row, w->p->b.column, 0, w->b + k * wide);
    for (int64_t j = 0; j < wide; j += LANES) {
        reals top = splat(-INFINITE);
        for (int64_t k = 0; k < depth; k++) top = larger(load(w->b + k * wide + j), top);
        top = where(top == -INFINITE, (reals){0}, top);
        store(w->column_top + j, top);
        for (int64_t k = 0; k < depth; k++)
            store(w->b + k * wide + j, exponential_below(load(w->b + k * wide + j), top));
    }
    for (int64_t k = 0; k < deep && w->p->grad_a.data; k += LANES)
        for (int64_t j = 0; j < wide; j += LANES)
            transpose_block(w->b + k * wide + j, wide, w->transposed + j * deep + k, deep);
    w->held_b = b;
}

static void mark_positive(int64_t count, const real *from, real *to) {
    for (int64_t j = 0; j < count; j += LANES) store(to + j, where(load(from + j) == 0, (reals){0}, splat(1)));
}

/* out (rows, wide) = a (rows, depth) b */
INLINE void multiply_by_b(const Matmul *w, int64_t rows, const real *a, const real *b, real *out) {
    if (rows == 1) row_times(w->p->depth, w->wide, a, b, w->wide, out);
    else multiply((Product){rows, w->p->depth, w->wide, a, w->deep, 1, b, w->wide, out, w->wide});
}

/* S of a block; whether an entry is to be recomputed, which `is_recomputed` then tells. */
static int find_sums(Matmul *w, const real *a, const real *b, int64_t rows) {
    wholes small = {0};
    exponentiate_rows(w, a, rows);
    Mode before = flush_to_zero(1); /* what is flushed is far below `least`, and `paths` tells what is 0 */
    multiply_by_b(w, rows, w->a, w->b, w->sums);
    set_mode(before);
    for (int64_t j = 0; j < rows * w->wide; j += LANES) small |= load(w->sums + j) < w->least;
    if (!any(small)) return 0;
    if (w->marked_b != b) mark_positive(w->p->depth * w->wide, w->b, w->positive_b), w->marked_b = b;
    mark_positive(rows * w->deep, w->a, w->positive_a);
    multiply_by_b(w, rows, w->positive_a, w->positive_b, w->paths);
    return 1;
}
INLINE longs is_recomputed(const Matmul *w, int64_t at) {
    return (read_wide(w->sums + at, 1, WIDE, 0) < (double)w->least) & (read_wide(w->paths + at, 1, WIDE, 0) > 0);
}

/* Terms a_k + b_kj of a vector of columns, `left` of which exist; the largest; and the sum of exp(term - largest), from
   terms less r + t, whose differences have no rounding errors of a common offset. Quarters of them do not overflow. */
typedef struct { const real *a, *b; int64_t left; double row_top; doubles column_top, top, nearest, sum; } Terms;

INLINE doubles quarter(doubles a, doubles top) { return a * 0.25 - top * 0.25; }
INLINE doubles relative_term(const Operands *p, const Terms *t, int64_t k, doubles *term) {
    double a = (double)t->a[k * p->a.column];
    doubles b = read_wide(t->b + k * p->b.row, p->b.column, t->left, -__builtin_inf());
    *term = a + b;
    return quarter(splat_wide(a), splat_wide(t->row_top)) + quarter(b, t->column_top);
}
INLINE doubles share_of_term(const Operands *p, const Terms *t, int64_t k) {
    doubles term;
    return exponential_or_zero((relative_term(p, t, k, &term) - t->nearest) * 4);
}
static Terms terms_of(const Matmul *w, int64_t row, const real *a, const real *b, int64_t j) {
    const Operands *p = w->p;
    doubles none = splat_wide(-__builtin_inf()), term;
    Terms t = {a + row * p->a.row, b + j * p->b.column, p->columns - j, (double)w->row_top[row],
               read_wide(w->column_top + j, 1, WIDE, 0), none, none, {0}};
    for (int64_t k = 0; k < p->depth; k++) {
        doubles relative = relative_term(p, &t, k, &term);
        t.top = choose(term > t.top, term, t.top), t.nearest = choose(relative > t.nearest, relative, t.nearest);
    }
    t.nearest = choose(t.nearest == none, splat_wide(0), t.nearest);
    for (int64_t k = 0; k < p->depth; k++) t.sum += share_of_term(p, &t, k);
    return t;
}

/* c of a block. */
static void write_logarithms_of_sums(Matmul *w, const real *a, const real *b, int64_t rows, int flagged, real *out) {
    const Operands *p = w->p;
    for (int64_t i = 0; i < rows; i++) {
        doubles row_top = splat_wide((double)w->row_top[i]);
        for (int64_t j = 0; j < w->wide; j += WIDE) {
            doubles column_top = read_wide(w->column_top + j, 1, WIDE, 0), tops = row_top + column_top;
            doubles logs = logarithm_of(read_wide(w->sums + i * w->wide + j, 1, WIDE, 0), 0);
            logs += rounding_errors(row_top, column_top, tops), logs += tops;
            longs again = flagged ? is_recomputed(w, i * w->wide + j) : (longs){0};
            if (flagged && any_wide(again)) {
                Terms t = terms_of(w, i, a, b, j);
                logs = choose(again, logarithm_of(t.sum, 0) + t.top, logs);
                UNROLL for (int l = 0; l < WIDE; l++) w->recomputed += j + l < p->columns && again[l];
            }
            write_wide(w->row + j, logs, WIDE);
        }
        write_row(p->columns, w->row, p->out.column, out + i * p->out.row);
    }
}

/* A power of two near the largest finite weight of a block; 1 for what is neither large nor small. */
static real scale_of(int64_t count, const real *weights, int *ordinary) {
    reals most = {0}, low = splat(INFINITE);
    for (int64_t j = 0; j < count; j += LANES) {
        reals size = larger(load(weights + j), -load(weights + j));
        most = larger(where(size < INFINITE, size, (reals){0}), most);
        low = smaller(where(size > 0, size, splat(INFINITE)), low);
    }
    double top = (double)largest(most);
    *ordinary = are_ordinary((double)least(low), top);
    int64_t exponent = exponent_above(top), most_exponent = BIAS - 1;
    if (top == 0 || (exponent <= 20 && exponent >= -20)) return 1;
    return power_of_two(larger_of(smaller_of(exponent, most_exponent), -most_exponent));
}

/* G of a block, 0 where S is too small. */
static void divide(Matmul *w, const real *weight, int64_t rows) {
    const Operands *p = w->p;
    for (int64_t i = 0; i < rows; i++)
        read_row(p->columns, w->wide, weight + i * p->weight.row, p->weight.column, 0, w->quotients + i * w->wide);
    w->scale = scale_of(rows * w->wide, w->quotients, &w->ordinary);
    real inverse = 1 / w->scale;
    for (int64_t j = 0; j < rows * w->wide; j += LANES) {
        reals sums = load(w->sums + j), quotient = load(w->quotients + j) * inverse / sums;
        store(w->quotients + j, where(sums < w->least, (reals){0}, quotient));
    }
}

/* Adds the gradients of recomputed entries of a block to those of a and b. */
static void add_recomputed(Matmul *w, const real *a, const real *b, const real *weight, int64_t rows) {
    const Operands *p = w->p;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < p->columns; j += WIDE) {
            longs again = is_recomputed(w, i * w->wide + j);
            if (!any_wide(again)) continue;
            Terms t = terms_of(w, i, a, b, j);
            const real *from = weight + i * p->weight.row + j * p->weight.column;
            doubles weights = read_wide(from, p->weight.column, p->columns - j, 0) / (double)w->scale;
            weights = choose(again, weights / t.sum, splat_wide(0));
            for (int64_t k = 0; k < p->depth; k++) {
                doubles gradients = share_of_term(p, &t, k) * weights;
                double sum = 0, *to = w->recomputed_b + k * w->wide + j;
                UNROLL for (int l = 0; l < WIDE; l++) sum += gradients[l];
                if (p->grad_a.data) w->part[i * w->deep + k] += (real)sum;
                if (w->recomputed_b) store_wide(to, load_wide(to) + gradients * (double)w->scale);
            }
        }
}

/* Gradients of a block: of its rows of a, and what it adds to those of b. */
static void write_block_gradients(Matmul *w, const real *a, const real *b, const real *weight, int64_t rows,
                                  int flagged, real *grad_a) {
    const Operands *p = w->p;
    int64_t deep = w->deep, wide = w->wide;
    divide(w, weight, rows);
    Mode before = flush_to_zero(w->ordinary);
    if (w->sum_b) {
        multiply((Product){p->depth, rows, wide, w->a, 1, deep, w->quotients, wide, w->block_b, wide});
        for (int64_t j = 0; j < p->depth * wide; j += WIDE) {
            doubles sums = read_wide(w->block_b + j, 1, WIDE, 0) * (double)w->scale;
            store_wide(w->sum_b + j, load_wide(w->sum_b + j) + sums);
        }
    }
    if (grad_a) {
        multiply((Product){rows, p->columns, deep, w->quotients, wide, 1, w->transposed, deep, w->part, deep});
        for (int64_t k = 0; k < rows * deep; k += LANES) store(w->part + k, load(w->part + k) * load(w->a + k));
    }
    if (flagged) add_recomputed(w, a, b, weight, rows);
    for (int64_t i = 0; i < rows && grad_a; i++) {
        for (int64_t k = i * deep; k < (i + 1) * deep; k += LANES) store(w->part + k, load(w->part + k) * w->scale);
        write_row(p->depth, w->part + i * deep, p->grad_a.column, grad_a + i * p->grad_a.row);
    }
    set_mode(before);
}

static void write_grad_b(Matmul *w) {
    const Operands *p = w->p;
    for (int64_t k = 0; k < p->depth; k++) {
        double *sums = w->sum_b + k * w->wide;
        for (int64_t j = 0; j < w->wide; j += WIDE) {
            doubles b = read_wide(w->b + k * w->wide + j, 1, WIDE, 0);
            store_wide(sums + j, load_wide(sums + j) * b + load_wide(w->recomputed_b + k * w->wide + j));
            write_wide(w->row + j, load_wide(sums + j), WIDE);
        }
        if (p->grad_b.data) write_row(p->columns, w->row, p->grad_b.column, strided_row(&p->grad_b, w->set, k));
        for (int64_t j = 0; j < p->columns && p->part_b; j++) p->part_b[k * p->columns + j] = sums[j];
    }
}

static void clear_wide(int64_t count, double *to) {
    for (int64_t j = 0; j < count && to; j++) to[j] = 0;
}

/* The rows from `row` to before `stop` of a set. */
static void compute_rows(Matmul *w, int64_t row, int64_t stop) {
    const Operands *p = w->p;
    const real *b = strided_row(&p->b, w->set, 0);
    int ordinary = 1;
    exponentiate_columns(w, b);
    clear_wide(p->depth * w->wide, w->sum_b), clear_wide(p->depth * w->wide, w->recomputed_b);
    for (int64_t rows; row < stop; row += rows) {
        rows = stop - row < AT_ONCE ? stop - row : AT_ONCE;
        const real *a = strided_row(&p->a, w->set, row);
        int flagged = find_sums(w, a, b, rows);
        if (p->out.data) {
            write_logarithms_of_sums(w, a, b, rows, flagged, strided_row(&p->out, w->set, row));
            continue;
        }
        const real *weight = strided_row(&p->weight, w->set, row);
        real *grad_a = p->grad_a.data ? strided_row(&p->grad_a, w->set, row) : 0;
        write_block_gradients(w, a, b, weight, rows, flagged, grad_a);
        ordinary &= w->ordinary;
    }
    if (!w->sum_b) return;
    Mode before = flush_to_zero(ordinary);
    write_grad_b(w);
    set_mode(before);
}

/* Products or gradients; how many entries of `out` were recomputed. */
EXPORT int64_t EXPORTED(logchain_matmul)(const Operands *p) {
    Scratch scratch = {.begin = p->scratch};
    int64_t deep = padded(p->depth), wide = padded(p->columns);
    Matmul w = {.p = p, .deep = deep, .wide = wide, .least = (real)p->depth * LEAST_TERM};
    w.a = take_reals(&scratch, AT_ONCE * deep), w.b = take_reals(&scratch, deep * wide);
    w.row_top = take_reals(&scratch, AT_ONCE), w.column_top = take_reals(&scratch, wide);
    w.row = take_reals(&scratch, wide);
    w.sums = take_reals(&scratch, AT_ONCE * wide), w.paths = take_reals(&scratch, AT_ONCE * wide);
    w.positive_a = take_reals(&scratch, AT_ONCE * deep), w.positive_b = take_reals(&scratch, deep * wide);
    if (!p->out.data) w.quotients = take_reals(&scratch, AT_ONCE * wide), w.part = take_reals(&scratch, AT_ONCE * deep);
    if (p->grad_a.data) w.transposed = take_reals(&scratch, deep * wide);
    if (p->grad_b.data || p->part_b) {
        w.block_b = take_reals(&scratch, deep * wide);
        w.sum_b = take(&scratch, deep * wide * 8), w.recomputed_b = take(&scratch, deep * wide * 8);
    }
    if (!p->scratch) return scratch.bytes;
    clear((deep - p->depth) * wide, w.b + p->depth * wide);
    for (int64_t row = p->first; row < p->last;) {
        int64_t begin = row % p->rows, left = p->last - row, stop = begin + left < p->rows ? begin + left : p->rows;
        w.set = row / p->rows;
        compute_rows(&w, begin, stop);
        row += stop - begin;
    }
    return w.recomputed;
}
