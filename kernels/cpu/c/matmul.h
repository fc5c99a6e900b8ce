/* Log-semiring matrix products of sets of matrices (rows, depth) and (depth, columns), and their gradients:

       c = log S + r_i + t_j      S = A B      A = exp(a - r_i)      B = exp(b - t_j)      r_i = max_k a, t_j = max_k b

       dA = (G B^T) A      dB = (A^T G) B      G = w / S

   A and B are 0 only where a and b are -inf; smaller values are raised to 2^-DEEPEST, see scale.h. An S below `least`
   may have lost terms, or gained by raised ones. Unless no path leads there, which the product of A > 0 and B > 0 tells,
   it is recomputed as a log-sum-exp of doubles, and so are its gradients.

   A thread has the rows from `first` to before `last` of all sets. It holds B of one set, and AT_ONCE rows at a time. */
#pragma once
#include "number.h"
#include "step.h"

enum { AT_ONCE = 48 };

/* The least S of one term that is exact to rounding in float32. It is that of float64 too: an entry D nats below its
   maxima has an error of D roundings. */
#define LEAST_TERM power_of_two(24 - 108)

/* Strides count entries. `out` is null where gradients are wanted. */
typedef struct {
    int64_t sets, rows, depth, columns, first, last;
    const real *a;           /* (sets, rows, depth) */
    int64_t a_set, a_row, a_k;
    const real *b;           /* (sets, depth, columns) */
    int64_t b_set, b_k, b_j;
    real *out;               /* (sets, rows, columns) or null: c */
    int64_t out_set, out_row, out_j;
    const real *weight;      /* (sets, rows, columns): w */
    int64_t weight_set, weight_row, weight_j;
    real *grad_a;            /* (sets, rows, depth) or null */
    int64_t grad_a_set, grad_a_row, grad_a_k;
    real *grad_b;            /* (sets, depth, columns) or null: of the thread's rows */
    int64_t grad_b_set, grad_b_k, grad_b_j;
    double scale;            /* a power of two near the largest weight */
    char *room;
} Operands;

/* Rows are whole vectors: `deep` for k, `wide` for j. In the columns that fill the last vector, B is 1 and G is 0. */
typedef struct {
    const Operands *p;
    int64_t set, deep, wide, rescued;
    real least;
    const real *held_b, *marked_b;  /* the b whose B, and B > 0, are below */
    real *a, *b, *transposed;       /* A (AT_ONCE, deep), B (deep, wide), B^T (wide, deep) */
    real *row_top, *column_top;     /* r (AT_ONCE), t (wide) */
    real *sums, *quotients;         /* S and G (AT_ONCE, wide) */
    real *positive_a, *positive_b;  /* A > 0 (AT_ONCE, deep), B > 0 (depth, wide) */
    real *paths;                    /* their product (AT_ONCE, wide) */
    real *row;                      /* a row of c (wide) */
    real *part;                     /* G B^T (AT_ONCE, deep) */
    real *sum_b, *rescued_b;        /* A^T G, and gradients of recomputed entries (depth, wide) */
} Matmul;

/* A row of whole vectors from `count` entries, `step` apart; and such entries from a row. */
INLINE void gather(int64_t count, int64_t width, const real *from, int64_t step, real fill, real *to) {
    int64_t j = 0;
    if (step == 1) for (; j + LANES <= count; j += LANES) store(to + j, load(from + j));
    for (; j < count; j++) to[j] = from[j * step];
    for (; j < width; j++) to[j] = fill;
}
INLINE void scatter(int64_t count, const real *from, int64_t step, real *to) {
    int64_t j = 0;
    if (step == 1) for (; j + LANES <= count; j += LANES) store(to + j, load(from + j));
    for (; j < count; j++) to[j * step] = from[j];
}

/* exp(a - top), 0 only where a is -inf: the difference may overflow. */
INLINE reals exponential_below(reals a, reals top) {
    return exponential(where(a == -INFINITE, a, larger(splat(LOG_DEEPEST), a - top)), NO_TAIL);
}

/* A and r of `rows` rows. */
static void exponentiate_rows(Matmul *w, const real *a, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        real *row = w->a + i * w->deep;
        gather(w->p->depth, w->deep, a + i * w->p->a_row, w->p->a_k, -INFINITE, row);
        real top = w->row_top[i] = top_of(row, w->deep);
        for (int64_t k = 0; k < w->deep; k += LANES) store(row + k, exponential_below(load(row + k), splat(top)));
    }
}

/* B and t of a set, and B^T for gradients of a. */
static void exponentiate_columns(Matmul *w, const real *b) {
    int64_t depth = w->p->depth, deep = w->deep, wide = w->wide;
    if (w->held_b == b) return;
    for (int64_t k = 0; k < depth; k++)
        gather(w->p->columns, wide, b + k * w->p->b_k, w->p->b_j, 0, w->b + k * wide);
    for (int64_t j = 0; j < wide; j += LANES) {
        reals top = splat(-INFINITE);
        for (int64_t k = 0; k < depth; k++) top = larger(load(w->b + k * wide + j), top);
        top = where(top == -INFINITE, (reals){0}, top);
        store(w->column_top + j, top);
        for (int64_t k = 0; k < depth; k++)
            store(w->b + k * wide + j, exponential_below(load(w->b + k * wide + j), top));
    }
    for (int64_t k = 0; k < deep && w->p->grad_a; k += LANES)
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
    multiply_by_b(w, rows, w->a, w->b, w->sums);
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

/* Terms a_k + b_kj of a vector of columns, `left` of which exist; their largest, and the sum of exp(term - top). */
typedef struct { const real *a, *b; int64_t left; doubles top, sum; } Terms;

INLINE doubles term(const Operands *p, const Terms *t, int64_t k) {
    return (double)t->a[k * p->a_k] + read_wide(t->b + k * p->b_k, p->b_j, t->left, -__builtin_inf());
}
INLINE doubles relative_term(const Operands *p, const Terms *t, int64_t k) {
    doubles below = term(p, t, k) - t->top;
    return choose(below < -178, splat_wide(0), exponential_of(choose(below < -178, splat_wide(0), below)));
}
static Terms terms_of(const Operands *p, const real *a, const real *b, int64_t left) {
    Terms t = {.a = a, .b = b, .left = left, .top = splat_wide(-__builtin_inf()), .sum = {0}};
    for (int64_t k = 0; k < p->depth; k++) {
        doubles each = term(p, &t, k);
        t.top = choose(each > t.top, each, t.top);
    }
    t.top = choose(t.top == -__builtin_inf(), splat_wide(0), t.top);
    for (int64_t k = 0; k < p->depth; k++) t.sum += relative_term(p, &t, k);
    return t;
}

/* c of a block. */
static void write_logarithms_of_sums(Matmul *w, const real *a, const real *b, int64_t rows, int lossy, real *out) {
    const Operands *p = w->p;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < w->wide; j += WIDE) {
            doubles sums = read_wide(w->sums + i * w->wide + j, 1, WIDE, 0);
            doubles logs = logarithm_of(sums, 0) + ((double)w->row_top[i] + read_wide(w->column_top + j, 1, WIDE, 0));
            longs again = lossy ? is_recomputed(w, i * w->wide + j) : (longs){0};
            if (lossy && any_wide(again)) {
                Terms t = terms_of(p, a + i * p->a_row, b + j * p->b_j, p->columns - j);
                logs = choose(again, logarithm_of(t.sum, 0) + t.top, logs);
                UNROLL for (int l = 0; l < WIDE; l++) w->rescued += j + l < p->columns && again[l];
            }
            write_wide(w->row + j, logs, WIDE);
        }
        scatter(p->columns, w->row, p->out_j, out + i * p->out_row);
    }
}

/* G of a block, 0 where S is too small. */
static void divide(Matmul *w, const real *weight, int64_t rows) {
    real inverse = (real)(1 / w->p->scale);
    for (int64_t i = 0; i < rows; i++) {
        real *sums = w->sums + i * w->wide, *quotients = w->quotients + i * w->wide;
        gather(w->p->columns, w->wide, weight + i * w->p->weight_row, w->p->weight_j, 0, quotients);
        for (int64_t j = 0; j < w->wide; j += LANES) {
            reals quotient = load(quotients + j) * inverse / load(sums + j);
            store(quotients + j, where(load(sums + j) < w->least, (reals){0}, quotient));
        }
    }
}

/* Adds the gradients of recomputed entries of a block. */
static void add_rescued(Matmul *w, const real *a, const real *b, const real *weight, int64_t rows, real *grad_a) {
    const Operands *p = w->p;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < p->columns; j += WIDE) {
            longs again = is_recomputed(w, i * w->wide + j);
            if (!any_wide(again)) continue;
            Terms t = terms_of(p, a + i * p->a_row, b + j * p->b_j, p->columns - j);
            const real *from = weight + i * p->weight_row + j * p->weight_j;
            doubles weights = read_wide(from, p->weight_j, p->columns - j, 0) / p->scale;
            weights = choose(again, weights / t.sum, splat_wide(0));
            for (int64_t k = 0; k < p->depth; k++) {
                doubles gradients = relative_term(p, &t, k) * weights;
                real *to = w->rescued_b + k * w->wide + j;
                double sum = 0;
                UNROLL for (int l = 0; l < WIDE; l++) sum += gradients[l];
                if (grad_a) grad_a[i * p->grad_a_row + k * p->grad_a_k] += (real)(sum * p->scale);
                if (p->grad_b) write_wide(to, read_wide(to, 1, WIDE, 0) + gradients, WIDE);
            }
        }
}

/* Gradients of a block of a, and what the block adds to A^T G. */
static void write_block_gradients(Matmul *w, int64_t rows, real *grad_a) {
    const Operands *p = w->p;
    int64_t deep = w->deep, wide = w->wide;
    if (p->grad_b)
        multiply_add((Product){p->depth, rows, wide, w->a, 1, deep, w->quotients, wide, w->sum_b, wide});
    if (!grad_a) return;
    multiply((Product){rows, p->columns, deep, w->quotients, wide, 1, w->transposed, deep, w->part, deep});
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = i * deep; k < (i + 1) * deep; k += LANES)
            store(w->part + k, load(w->part + k) * load(w->a + k) * (real)p->scale);
        scatter(p->depth, w->part + i * deep, p->grad_a_k, grad_a + i * p->grad_a_row);
    }
}

static void write_grad_b(Matmul *w) {
    const Operands *p = w->p;
    for (int64_t k = 0; k < p->depth; k++) {
        for (int64_t j = k * w->wide; j < (k + 1) * w->wide; j += LANES) {
            reals gradient = load(w->sum_b + j) * load(w->b + j) + load(w->rescued_b + j);
            store(w->sum_b + j, gradient * (real)p->scale);
        }
        real *to = p->grad_b + w->set * p->grad_b_set + k * p->grad_b_k;
        scatter(p->columns, w->sum_b + k * w->wide, p->grad_b_j, to);
    }
}

/* The rows from `row` to before `stop` of a set. */
static void walk_rows(Matmul *w, int64_t row, int64_t stop) {
    const Operands *p = w->p;
    const real *b = p->b + w->set * p->b_set;
    exponentiate_columns(w, b);
    if (p->grad_b) clear(p->depth * w->wide, w->sum_b), clear(p->depth * w->wide, w->rescued_b);
    for (int64_t rows; row < stop; row += rows) {
        rows = stop - row < AT_ONCE ? stop - row : AT_ONCE;
        const real *a = p->a + w->set * p->a_set + row * p->a_row;
        int lossy = find_sums(w, a, b, rows);
        if (p->out) {
            write_logarithms_of_sums(w, a, b, rows, lossy, p->out + w->set * p->out_set + row * p->out_row);
            continue;
        }
        const real *weight = p->weight + w->set * p->weight_set + row * p->weight_row;
        real *grad_a = p->grad_a ? p->grad_a + w->set * p->grad_a_set + row * p->grad_a_row : 0;
        divide(w, weight, rows);
        write_block_gradients(w, rows, grad_a);
        if (lossy) add_rescued(w, a, b, weight, rows, grad_a);
    }
    if (p->grad_b) write_grad_b(w);
}

/* Products or gradients; how many entries of `out` were recomputed. */
EXPORT int64_t EXPORTED(logchain_matmul)(const Operands *p) {
    Room room = {.begin = p->room};
    int64_t deep = padded(p->depth), wide = padded(p->columns);
    int64_t block_deep = AT_ONCE * deep * (int64_t)sizeof(real), block_wide = AT_ONCE * wide * (int64_t)sizeof(real);
    int64_t matrix = deep * wide * (int64_t)sizeof(real);
    Matmul w = {.p = p, .deep = deep, .wide = wide, .least = (real)p->depth * LEAST_TERM};
    w.a = take(&room, block_deep), w.b = take(&room, matrix);
    w.row_top = take(&room, AT_ONCE * (int64_t)sizeof(real)), w.column_top = take(&room, wide * (int64_t)sizeof(real));
    w.row = take(&room, wide * (int64_t)sizeof(real));
    w.sums = take(&room, block_wide), w.paths = take(&room, block_wide);
    w.positive_a = take(&room, block_deep), w.positive_b = take(&room, matrix);
    if (!p->out) w.quotients = take(&room, block_wide), w.part = take(&room, block_deep);
    if (p->grad_a) w.transposed = take(&room, matrix);
    if (p->grad_b) w.sum_b = take(&room, matrix), w.rescued_b = take(&room, matrix);
    if (!p->room) return room.bytes;
    for (int64_t row = p->first; row < p->last;) {
        int64_t begin = row % p->rows, left = p->last - row, stop = begin + left < p->rows ? begin + left : p->rows;
        w.set = row / p->rows;
        walk_rows(&w, begin, stop);
        row += stop - begin;
    }
    return w.rescued;
}
