/* Products of stacks of matrices of logarithms on a binary tree, in linear numbers with scales; and their gradients.

       S = A' B      A'_ik = A_ik 2^(b_k - t_i)      V_i = S_i 2^-h_i      v_i = a_i + t_i + h_i - CENTER - base

   A node of the tree is a matrix V with log V_ij + (v_i - CENTER) log 2 + offset as its logarithms. Mostly all exponents
   v are 0, and A' is A; `base`, the largest v, goes into the offset. The tree is that of kernels/order.py, depth first.
   With w the gradients of the logarithms of a product, G_ij = w_ij / V_ij is that of V, 0 where V is:

       W_ij = G_ij 2^(CENTER - h_i)      w of A = (W B^T) A' 2^-CENTER      w of B = (A'^T W) B 2^-CENTER

   V is 0 only where no path leads. Leaves, and A', are raised to RAISED, so that products are normal numbers. A raised
   term adds at most RAISED 2^(CENTER + 1) to a sum. If a sum below c LEAST_SUM is not 0, rows of A and B are scaled one
   by one; if one is left, or an exponent is beyond FARTHEST, the product is lossy. */
#pragma once
#include "matmul.h"

enum { CENTER = TOP / 2, FARTHEST = 1 << 22 };
#define RAISED power_of_two(CENTER - DEEPEST)
#define LEAST_SUM power_of_two(2 * CENTER - DEEPEST + GUARD + 3)
#define IMPOSSIBLE ((real)(-2 * FARTHEST)) /* the exponent of a row of zeros */

/* A unit is one of the `segments` of a set's matrices; a thread computes those from `first` to before `last`. */
typedef struct {
    int64_t matrices, states, segments, prefixes, first, last; /* prefixes: the tree has matrix i right of product i - 1 */
    const real *stack;         /* (sets, matrices, c, c) */
    int64_t stack_set, stack_step, stack_row, stack_column;
    real *out;                 /* (sets, c, c) or (sets, matrices, c, c): logarithms of products */
    int64_t out_set, out_step;
    double *products, *offset; /* (units, c, c), (units, 2): those of segments less the offset, and that; or null */
    const real *weights;       /* as out, or (units, c, c): w of products; null unless gradients are wanted */
    int64_t weight_set, weight_step;
    const double *scale;       /* factor of the gradients */
    real *grad;                /* (sets, matrices, c, c) */
    uint8_t *lossy;            /* (units) */
    char *room;
} Stack;

typedef struct {
    real *values, *exponents; /* V (c, c); v (c), and base */
    Sum offset;
} Node;

/* Where gradients are wanted, a product is in the slot of the first matrix of its right operand, and leaves are in the
   memory of gradients. Otherwise nodes are in as many slots as are waiting for a right operand. */
typedef struct {
    const Stack *a;
    int64_t set, unit, first, last;                /* matrices of the unit */
    real *values, *exponents;                      /* nodes */
    real *shifts, *scaled, *sums, *transposed, *w; /* t; A'; S; B^T; W */
    int lossy;
} Tree;

INLINE real *row_at(real *matrix, int64_t c, int64_t r) { return matrix + r * c; }

INLINE Node node_in(const Tree *t, int64_t slot) {
    int64_t c = t->a->states;
    return (Node){t->values + slot * c * c, t->exponents + slot * (c + 1), {0, 0}};
}

/* The first matrix of the right operand of a product: the left one has a power of two of matrices, or all but one. */
INLINE int64_t middle_of(const Tree *t, int64_t first, int64_t last) {
    int64_t half = 1;
    while (2 * half < last - first) half *= 2;
    return t->a->prefixes ? last - 1 : first + half;
}
INLINE Node node_at(const Tree *t, int64_t first, int64_t last, int64_t slot) {
    int64_t c = t->a->states;
    if (!t->a->grad) return node_in(t, slot);
    if (last - first > 1) return node_in(t, middle_of(t, first, last) - t->first);
    Node leaf = node_in(t, t->last + first - 2 * t->first);
    leaf.values = t->a->grad + (t->set * t->a->matrices + first) * c * c;
    return leaf;
}

/* Vectors of a row: of `few` states, fewer than a vector's lanes, one; of many, for `few` = 0, the last overlaps. */
INLINE int64_t count_of(const int64_t few, int64_t c) { return few ? 1 : vectors_of(c); }
INLINE int64_t column(const int64_t few, int64_t k, int64_t c) { return few ? 0 : start_of(k, c); }
INLINE reals read_states(const int64_t few, const real *from, real fill) {
    return few ? load_some(from, 1, few, fill) : load(from);
}
INLINE void write_states(const int64_t few, real *to, reals a) {
    if (few) store_some(to, a, few);
    else store(to, a);
}

/* to = factor row, which may be the same. */
INLINE void scale_row(const int64_t few, int64_t c, const real *row, real factor, real *to) {
    int64_t last = few ? 0 : c - LANES;
    reals end = read_states(few, row + last, 0) * factor;
    for (int64_t j = 0; j < last; j += LANES) store(to + j, load(row + j) * factor);
    write_states(few, to + last, end);
}

INLINE int is_even(const int64_t few, int64_t c, Node n) {
    wholes uneven = {0};
    for (int64_t k = 0; k < count_of(few, c); k++) uneven |= read_states(few, n.exponents + column(few, k, c), 0) != 0;
    return !any(uneven);
}

INLINE reals highest_in_row(const int64_t few, int64_t c, const real *row, real fill) {
    reals high = splat(fill);
    for (int64_t k = 0; k < count_of(few, c); k++) high = larger(read_states(few, row + column(few, k, c), fill), high);
    return high;
}

/* out = a b, with a[r, k] at r a_row + k a_k. */
INLINE void multiply_states(const int64_t few, int64_t c, const real *a, int64_t a_row, int64_t a_k, const real *b,
                            real *out) {
    reals rows[LANES], sums[LANES];
    if (!few) {
        multiply((Product){c, c, c, a, a_row, a_k, b, c, out, c});
        return;
    }
    for (int64_t k = 0; k < few; k++) rows[k] = load_some(b + k * few, 1, few, 0);
    for (int64_t r = 0; r < few; r++) {
        sums[r] = a[r * a_row] * rows[0];
        for (int64_t k = 1; k < few; k++) sums[r] += a[r * a_row + k * a_k] * rows[k];
    }
    for (int64_t r = 0; r < few; r++) store_some(out + r * few, sums[r], few);
}

/* V of a leaf whose rows are far apart, from logarithms less their largest. */
INLINE void scale_leaf(const int64_t few, Tree *t, const real *from, int64_t row, real top, Node n) {
    int64_t c = t->a->states;
    for (int64_t r = 0; r < c; r++) {
        const real *x = from + r * row;
        real high = largest(highest_in_row(few, c, x, -INFINITE)) - top, exponent = 0;
        if (high < -FARTHEST / 2 && high > -INFINITE) t->lossy = 1;
        else if (high <= 0) exponent = high == -INFINITE ? IMPOSSIBLE : (real)(int64_t)(high * LOG2_E);
        real up = exponent == IMPOSSIBLE ? 0 : exponent;
        for (int64_t k = 0; k < count_of(few, c); k++) {
            reals log = read_states(few, x + column(few, k, c), -INFINITE), below = log - top - up * LN2_HIGH - up * LN2_LOW;
            reals v = exponential(where(log == -INFINITE, log, larger(splat(LOG_DEEPEST), below)), NO_TAIL);
            write_states(few, row_at(n.values, c, r) + column(few, k, c), v * power_of_two(CENTER));
        }
        n.exponents[r] = exponent;
    }
}

INLINE void write_leaf(const int64_t few, Tree *t, int64_t index, Node *n) {
    const Stack *a = t->a;
    int64_t c = a->states, row = a->stack_row;
    const real *from = a->stack + t->set * a->stack_set + index * a->stack_step;
    if (a->stack_column != 1) {
        for (int64_t r = 0; r < c; r++)
            for (int64_t j = 0; j < c; j++) t->sums[r * c + j] = from[r * row + j * a->stack_column];
        from = t->sums, row = c;
    }
    reals high = splat(-INFINITE), low = splat(INFINITE);
    for (int64_t r = 0; r < c; r++) high = larger(highest_in_row(few, c, from + r * row, -INFINITE), high);
    real top = largest(high);
    n->offset = (Sum){top == -INFINITE ? top = 0 : top, 0};
    for (int64_t r = 0; r < c; r++)
        for (int64_t k = 0; k < count_of(few, c); k++) {
            reals x = read_states(few, from + r * row + column(few, k, c), -INFINITE);
            reals v = exponential_below(x, splat(top)) * power_of_two(CENTER);
            write_states(few, row_at(n->values, c, r) + column(few, k, c), v);
            low = smaller(where(v > 0, v, splat(INFINITE)), low);
        }
    clear(c + 1, n->exponents);
    if (least(low) < 2 * RAISED) scale_leaf(few, t, from, row, top, *n);
}

/* Scales each row of V to near 2^CENTER. */
INLINE void scale_rows(const int64_t few, int64_t c, Node n) {
    for (int64_t r = 0; r < c; r++) {
        real *row = row_at(n.values, c, r), high = largest(highest_in_row(few, c, row, 0));
        if (!(high > 0 && high < INFINITE)) {
            n.exponents[r] = IMPOSSIBLE;
            continue;
        }
        int64_t exponent = exponent_of(bits_of(high)) - CENTER;
        scale_row(few, c, row, power_of_two(-exponent), row);
        n.exponents[r] += (real)exponent;
    }
}

/* A' and t; A where exponents b are all 0. */
INLINE const real *scale_left(const int64_t few, Tree *t, Node left, Node right) {
    int64_t c = t->a->states;
    clear(c, t->shifts);
    if (is_even(few, c, right)) return left.values;
    for (int64_t r = 0; r < c; r++) {
        wholes high = (wholes){0} + 4 * (whole)IMPOSSIBLE, exponents;
        for (int64_t k = 0; k < count_of(few, c); k++) {
            reals v = read_states(few, row_at(left.values, c, r) + column(few, k, c), 0);
            exponents = __builtin_convertvector(read_states(few, right.exponents + column(few, k, c), 0), wholes);
            high = larger_whole(where_whole(v == 0, high, ((wholes)v >> FRACTION) + exponents), high);
        }
        whole shift = highest(high) - (BIAS + CENTER);
        for (int64_t k = 0; k < count_of(few, c); k++) {
            reals v = read_states(few, row_at(left.values, c, r) + column(few, k, c), 0);
            exponents = __builtin_convertvector(read_states(few, right.exponents + column(few, k, c), 0), wholes) - shift;
            t->lossy |= any((v != 0) & (v < 4 * RAISED) & (exponents > 1));
            wholes raised = ((wholes)v >> FRACTION) + exponents < BIAS + CENTER - DEEPEST;
            reals shifted = where(raised, splat(RAISED), (reals)((wholes)v + (exponents << FRACTION)));
            write_states(few, row_at(t->scaled, c, r) + column(few, k, c), where(v == 0, (reals){0}, shifted));
        }
        t->shifts[r] = (real)shift;
    }
    return t->scaled;
}

/* The largest of S; whether all are 0 or trusted. */
INLINE int are_trusted(const int64_t few, int64_t c, const real *sums, real *most) {
    reals high = {0}, limit = splat((real)c * LEAST_SUM);
    wholes doubtful = {0};
    for (int64_t r = 0; r < c; r++)
        for (int64_t k = 0; k < count_of(few, c); k++) {
            reals s = read_states(few, sums + r * c + column(few, k, c), 0);
            doubtful |= ~((s >= limit) & (s < INFINITE)) & (s != 0), high = larger(s, high);
        }
    *most = largest(high);
    return !any(doubtful);
}

/* V and v of a product of nodes whose rows are scaled one by one. */
INLINE void multiply_scaled(const int64_t few, Tree *t, Node left, Node right, Node *out) {
    int64_t c = t->a->states;
    real base = IMPOSSIBLE, most;
    scale_rows(few, c, left), scale_rows(few, c, right);
    multiply_states(few, c, scale_left(few, t, left, right), c, 1, right.values, t->sums);
    t->lossy |= !are_trusted(few, c, t->sums, &most);
    for (int64_t r = 0; r < c; r++) {
        real high = largest(highest_in_row(few, c, t->sums + r * c, 0));
        int64_t exponent = exponent_of(bits_of(high)) - CENTER;
        scale_row(few, c, t->sums + r * c, power_of_two(-exponent), row_at(out->values, c, r));
        real sum = left.exponents[r] + t->shifts[r] + (real)(exponent - CENTER);
        t->shifts[r] = high > 0 ? sum : IMPOSSIBLE;
        t->lossy |= high > 0 && !(sum <= FARTHEST && sum >= -FARTHEST);
        base = t->shifts[r] > base ? t->shifts[r] : base;
    }
    base = base == IMPOSSIBLE ? 0 : base;
    for (int64_t r = 0; r < c; r++) out->exponents[r] = t->shifts[r] == IMPOSSIBLE ? IMPOSSIBLE : t->shifts[r] - base;
    out->exponents[c] = base;
}

INLINE void multiply_nodes(const int64_t few, Tree *t, Node left, Node right, Node *out) {
    int64_t c = t->a->states;
    real most;
    int even = is_even(few, c, right);
    if (even) multiply_states(few, c, left.values, c, 1, right.values, t->sums);
    if (even && are_trusted(few, c, t->sums, &most)) {
        int64_t exponent = exponent_of(bits_of(most)) - CENTER;
        for (int64_t r = 0; r < c; r++)
            scale_row(few, c, t->sums + r * c, power_of_two(-exponent), row_at(out->values, c, r));
        scale_row(few, c, left.exponents, 1, out->exponents);
        out->exponents[c] = (real)(exponent - CENTER);
    } else multiply_scaled(few, t, left, right, out);
    out->offset = left.offset;
    add(&out->offset, right.offset.sum);
    out->offset.error += right.offset.error;
    add_exponent(&out->offset, (int64_t)out->exponents[c]);
}

/* Gradients of V, or of the logarithms of a leaf, in the place of V: from `sums` times `factors`, and w or null. */
INLINE reals gradient_of(reals v, reals sum, reals factor, reals w, real scale) {
    reals share = sum * power_of_two(-CENTER) * factor + w;
    return where(v == 0, (reals){0}, scale != 0 ? share * scale : share / v);
}
INLINE void write_gradient(const int64_t few, Tree *t, Node n, const real *factors, const real *w, real scale) {
    int64_t c = t->a->states, last = few ? 0 : c - LANES;
    for (int64_t r = 0; r < c; r++) {
        real *v = row_at(n.values, c, r);
        const real *sums = t->sums + r * c, *factor = factors + r * c, *own = w ? w + r * c : 0;
        reals end = gradient_of(read_states(few, v + last, 0), read_states(few, sums + last, 0), read_states(few, factor + last, 0),
                                own ? read_states(few, own + last, 0) : (reals){0}, scale);
        for (int64_t j = 0; j < last; j += LANES)
            store(v + j, gradient_of(load(v + j), load(sums + j), load(factor + j),
                                     own ? load(own + j) : (reals){0}, scale));
        write_states(few, v + last, end);
    }
}

/* Gradients of both operands, which are leaves where a factor for these is not 0, from G of their product. */
INLINE void divide_gradient(const int64_t few, Tree *t, Node out, Node left, Node right, const real *w, real of_left,
                           real of_right) {
    int64_t c = t->a->states;
    const real *scaled = scale_left(few, t, left, right);
    for (int64_t r = 0; r < c; r++) {
        real power = left.exponents[r] + t->shifts[r] - out.exponents[r] - out.exponents[c];
        power = power > BIAS - 1 ? BIAS - 1 : power < 1 - BIAS ? 1 - BIAS : power;
        scale_row(few, c, row_at(out.values, c, r), power_of_two((int64_t)power), t->w + r * c);
    }
    if (few) for (int64_t i = 0; i < few * few; i++) t->transposed[i] = right.values[i % few * few + i / few];
    else transpose(c, right.values, c, t->transposed, c);
    multiply_states(few, c, scaled, 1, c, t->w, t->sums);
    write_gradient(few, t, right, right.values, 0, of_right);
    multiply_states(few, c, t->w, c, 1, t->transposed, t->sums);
    write_gradient(few, t, left, scaled, w, of_left);
}

/* Calls `name` with the number of few states, up to 8 of them as a constant for the compiler, or 0 for many. */
#define OF_STATES(name, c, ...)                                                         \
    ((c) >= LANES ? name(0, __VA_ARGS__)         : (c) == 2 ? name(2, __VA_ARGS__)      \
     : LANES > 3 && (c) == 3 ? name(3, __VA_ARGS__) : LANES > 4 && (c) == 4 ? name(4, __VA_ARGS__) \
     : LANES > 5 && (c) == 5 ? name(5, __VA_ARGS__) : LANES > 6 && (c) == 6 ? name(6, __VA_ARGS__) \
     : LANES > 7 && (c) == 7 ? name(7, __VA_ARGS__) : LANES > 8 && (c) == 8 ? name(8, __VA_ARGS__) \
                             : name((c), __VA_ARGS__))

static void start_leaf(Tree *t, int64_t index, Node *n) { OF_STATES(write_leaf, t->a->states, t, index, n); }
static void join(Tree *t, Node left, Node right, Node *out) {
    OF_STATES(multiply_nodes, t->a->states, t, left, right, out);
}
static void write_root_gradient(Tree *t, Node n, const real *w) {
    clear(t->a->states * t->a->states, t->sums);
    OF_STATES(write_gradient, t->a->states, t, n, n.values, w, 0);
}
static void split_gradient(Tree *t, Node out, Node left, Node right, const real *w, real of_left, real of_right) {
    OF_STATES(divide_gradient, t->a->states, t, out, left, right, w, of_left, of_right);
}

/* Logarithms of a product, the one of all matrices up to `index`. */
static void write_product(const Tree *t, Node n, int64_t index) {
    const Stack *a = t->a;
    int64_t c = a->states, even = 1;
    for (int64_t r = 0; r < c; r++) even &= n.exponents[r] == 0;
    for (int64_t r = 0, width = even ? c * c : c; r < c * c; r += width) {
        Sum taken = a->products ? (Sum){0, 0} : n.offset;
        add_exponent(&taken, (int64_t)n.exponents[r / c]);
        double error = taken.error == taken.error ? taken.error : 0;
        for (int64_t j = r; j < r + width; j += WIDE) {
            doubles logs = logarithm_of(read_wide(n.values + j, 1, r + width - j, 0), CENTER) + error + taken.sum;
            if (a->out) write_wide(a->out + t->set * a->out_set + index * a->out_step + j, logs, r + width - j);
            else UNROLL for (int l = 0; l < WIDE; l++)
                if (j + l < r + width) a->products[t->unit * c * c + j + l] = logs[l];
        }
    }
    if (a->products) a->offset[2 * t->unit] = n.offset.sum, a->offset[2 * t->unit + 1] = n.offset.error;
}

/* The product of the matrices from `first` to before `last`, and of prefixes all that begin there. */
static Node product_of(Tree *t, int64_t first, int64_t last, int64_t slot) {
    Node n = node_at(t, first, first + 1, slot);
    start_leaf(t, first, &n);
    for (int64_t middle = first + 1, end; middle < last && !t->lossy; middle = end) {
        end = t->a->prefixes ? middle + 1 : 2 * middle - first < last ? 2 * middle - first : last;
        Node right = product_of(t, middle, end, slot + 1), left = n;
        n = node_at(t, first, end, slot);
        join(t, left, right, &n);
        if (t->a->prefixes && t->a->out) write_product(t, n, middle);
    }
    return n;
}

INLINE const real *weights_at(const Tree *t, int64_t index) {
    int64_t place = t->a->segments > 1 ? t->unit : t->set;
    return t->a->weights + place * t->a->weight_set + index * t->a->weight_step;
}

/* Gradients of the matrices from `first` to before `last`, of whose product there is one. */
static void write_gradients(Tree *t, int64_t first, int64_t last) {
    real scale = (real)*t->a->scale;
    for (int64_t middle; last - first > 1; last = middle) {
        middle = middle_of(t, first, last);
        Node out = node_at(t, first, last, 0), left = node_at(t, first, middle, 0), right = node_at(t, middle, last, 0);
        split_gradient(t, out, left, right, t->a->prefixes ? weights_at(t, middle - 1) : 0,
                       middle - first == 1 ? scale : 0, last - middle == 1 ? scale : 0);
        write_gradients(t, middle, last);
    }
}

/* Products of units, or their gradients; how many units are lossy. */
EXPORT int64_t EXPORTED(logchain_tree)(const Stack *a) {
    Room room = {.begin = a->room};
    int64_t c = a->states, square = c * c * (int64_t)sizeof(real), row = (c + 1) * (int64_t)sizeof(real), lossy = 0;
    int64_t longest = (a->matrices + a->segments - 1) / a->segments, slots = 2;
    for (int64_t size = 1; size < longest; size *= 2) slots++;
    Tree t = {.a = a, .shifts = take(&room, row), .scaled = take(&room, square), .sums = take(&room, square)};
    t.transposed = take(&room, square), t.w = take(&room, square);
    t.values = take(&room, (a->grad ? longest : slots) * square);
    t.exponents = take(&room, (a->grad ? 2 * longest : slots) * row);
    if (!a->room) return room.bytes;
    for (t.unit = a->first; t.unit < a->last; t.unit++) {
        int64_t segment = t.unit % a->segments;
        t.set = t.unit / a->segments, t.lossy = 0;
        t.first = a->matrices * segment / a->segments, t.last = a->matrices * (segment + 1) / a->segments;
        Node root = product_of(&t, t.first, t.last, 0);
        t.lossy |= !(root.offset.sum < __builtin_inf() && root.offset.sum > -__builtin_inf());
        lossy += a->lossy[t.unit] = (uint8_t)t.lossy;
        if (t.lossy) continue;
        if (!a->grad) {
            if (!a->prefixes) write_product(&t, root, 0);
            continue;
        }
        Mode before = flush_to_zero(1);
        write_root_gradient(&t, root, weights_at(&t, a->prefixes ? t.last - 1 : 0));
        write_gradients(&t, t.first, t.last);
        set_mode(before);
    }
    return lossy;
}
