/* Products of stacks of matrices of logarithms on a binary tree, in linear numbers with scales; and their gradients.

       S = A' B     A'_ik = A_ik 2^(b_k - t_i)     V = S 2^-h     v_i = a_i + t_i - rise     base = rise + h - CENTER

   A node is a matrix V of numbers near 2^CENTER or less. Its logarithms are log V_ij + (v_i - CENTER) log 2 + offset,
   and `base` log 2 is part of the offset. Mostly all exponents v of rows are 0, and A' is A. The tree is that of
   `write_product` in kernels/tree.py, depth first. With w the gradients of a product's logarithms, G = w / V, or 0
   where V is:

       W_ij = G_ij 2^(CENTER - h)      G of A = (W B^T) 2^-CENTER A' / A      G of B = (A'^T W) 2^-CENTER

   V is 0 only where no path leads. Leaves and A' are raised to RAISED, so that products are normal numbers. A raised
   term adds at most RAISED 2^(CENTER + 1) to a sum. Where a sum below c LEAST_SUM is not 0, rows of A and B are scaled
   to near 2^CENTER. If there still is one, or an exponent is beyond FARTHEST, the product is flagged. */
#pragma once
#include "matmul.h"

enum { CENTER = TOP / 2, FARTHEST = 1 << 22 };
#define RAISED power_of_two(CENTER - DEEPEST)
#define LEAST_SUM power_of_two(2 * CENTER - DEEPEST + GUARD + 3)
#define IMPOSSIBLE ((real)(-2 * FARTHEST)) /* the exponent of a row of zeros */

/* A unit is one of the `segments` of a set's matrices; a thread computes those from `first` to before `last`. */
typedef struct {
    int64_t matrices, states, segments, prefixes, first, last; /* prefixes: right operands are single matrices */
    const real *stack;         /* (sets, matrices, c, c) */
    int64_t stack_set, stack_step, stack_row, stack_column;
    const real *weights;       /* (units, c, c), or of prefixes (sets, matrices, c, c): w */
    const double *scale;       /* factor of gradients */
    real *out;                 /* (units, c, c), or of prefixes (sets, matrices, c, c): logarithms; or null */
    double *products, *offset; /* (units, c, c), (units, 2): logarithms less the offset, and that; if `out` is null */
    real *grad;                /* (sets, matrices, c, c): gradients of the stack; or null */
    uint8_t *flagged;            /* (units) */
    char *scratch;
} Stack;

typedef struct {
    real *values, *exponents; /* V (c, c); v (c), and base */
    Sum offset;
    int64_t power; /* the sum of all base */
} Node;

typedef struct {
    const Stack *a;
    int64_t set, unit, first, last;                      /* matrices of the unit */
    real *values, *exponents;                            /* nodes */
    real *shifts, *scaled, *sums, *transposed, *sources; /* t; A'; S; B^T; W */
    int flagged, grown; /* grown: what an entry of A was raised by is larger in A', or one is NaN */
} Tree;

/* The first matrix of the right operand of a product: the left one has a power of two of matrices, or all but one. */
INLINE int64_t middle_of(const Tree *t, int64_t first, int64_t last) {
    int64_t half = 1;
    while (2 * half < last - first) half *= 2;
    return t->a->prefixes ? last - 1 : first + half;
}

/* The memory of the product of some matrices. All are saved for gradients, and leaves where their gradients go;
   otherwise those that wait for a right operand. */
static Node node_of(const Tree *t, int64_t first, int64_t last, int64_t slot) {
    int64_t c = t->a->states, one = last - first == 1;
    if (t->a->grad) slot = one ? t->last + first - 2 * t->first : middle_of(t, first, last) - t->first;
    Node n = {t->values + slot * c * c, t->exponents + slot * (c + 1), {0, 0}, 0};
    if (t->a->grad && one) n.values = t->a->grad + (t->set * t->a->matrices + first) * c * c;
    return n;
}

INLINE void scale(int64_t count, const real *from, real factor, real *to) {
    for (int64_t j = 0; j < count; j += LANES)
        write_some(to + j, read_some(from + j, 1, count - j, 0) * factor, count - j);
}
INLINE int are_zero(int64_t count, const real *from) {
    wholes other = {0};
    for (int64_t j = 0; j < count; j += LANES) other |= read_some(from + j, 1, count - j, 0) != 0;
    return !any(other);
}

/* out = a b, with a[r, k] at r a_row + k a_k. */
INLINE void multiply_states(const int64_t c, const real *a, int64_t a_row, int64_t a_k, const real *b, real *out) {
    reals rows[LANES], sum;
    if (c > LANES || (c == LANES && c > 8)) {
        multiply((Product){c, c, c, a, a_row, a_k, b, c, out, c});
        return;
    }
    for (int64_t k = 0; k < c; k++) rows[k] = read_some(b + k * c, 1, c, 0);
    for (int64_t r = 0; r < c; r++, out += c) {
        sum = a[r * a_row] * rows[0];
        for (int64_t k = 1; k < c; k++) sum += a[r * a_row + k * a_k] * rows[k];
        write_some(out, sum, c);
    }
}

/* V of logarithms of which the largest is `top`; whether an entry is raised. */
INLINE int write_linear(int64_t count, const real *from, real top, real exponent, real *to) {
    wholes raised = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        reals x = read_some(from + j, 1, count - j, -INFINITE);
        reals below = x - top - exponent * LN2_HIGH - exponent * LN2_LOW;
        reals v = exponential(where(x == -INFINITE, x, larger(splat(LOG_DEEPEST), below)), NO_TAIL);
        raised |= (v > 0) & (v < power_of_two(1 - DEEPEST));
        write_some(to + j, v * power_of_two(CENTER), count - j);
    }
    return any(raised);
}

/* V of a leaf, with exponents where an entry is raised otherwise. */
INLINE void write_leaf(const int64_t c, Tree *t, int64_t index, Node *n) {
    const Stack *a = t->a;
    const real *from = a->stack + t->set * a->stack_set + index * a->stack_step;
    if (a->stack_column != 1 || a->stack_row != c) {
        for (int64_t r = 0; r < c; r++) read_row(c, c, from + r * a->stack_row, a->stack_column, 0, t->sums + r * c);
        from = t->sums;
    }
    real top = largest_in(c * c, from, -INFINITE);
    top = top == -INFINITE ? 0 : top, n->offset = (Sum){(double)top, 0};
    clear(c + 1, n->exponents);
    if (!write_linear(c * c, from, top, 0, n->values)) return;
    for (int64_t r = 0; r < c; r++) {
        real high = largest_in(c, from + r * c, -INFINITE), below = high - top;
        int is_far = !(below >= -FARTHEST / 2), is_zero = high == -INFINITE;
        real exponent = is_far ? 0 : (real)(int64_t)(below * LOG2_E);
        write_linear(c, from + r * c, top, exponent, n->values + r * c);
        n->exponents[r] = is_zero ? IMPOSSIBLE : exponent;
        t->flagged |= is_far && !is_zero;
    }
}

/* Scales each row of V to near 2^CENTER. */
INLINE void scale_rows(const int64_t c, Node n) {
    for (int64_t r = 0; r < c; r++) {
        real high = largest_in(c, n.values + r * c, -INFINITE);
        int64_t exponent = high > 0 ? exponent_of(bits_of(high)) - CENTER : 0;
        scale(c, n.values + r * c, power_of_two(-exponent), n.values + r * c);
        n.exponents[r] = high > 0 ? n.exponents[r] + (real)exponent : IMPOSSIBLE;
    }
}

/* A' and t; A and 0 where exponents b are all 0. */
INLINE const real *scale_left(const int64_t c, Tree *t, Node left, Node right) {
    clear(c, t->shifts), t->grown = 0;
    if (are_zero(c, right.exponents)) return left.values;
    for (int64_t r = 0; r < c; r++) {
        const real *row = left.values + r * c;
        wholes high = (wholes){0} + 4 * (whole)IMPOSSIBLE;
        for (int64_t j = 0; j < c; j += LANES) {
            reals v = read_some(row + j, 1, c - j, 0), powers = read_some(right.exponents + j, 1, c - j, 0);
            wholes sums = ((wholes)v >> FRACTION) + __builtin_convertvector(powers, wholes);
            high = __builtin_elementwise_max(where_whole(v == 0, high, sums), high);
        }
        whole shift = highest(high) - (BIAS + CENTER);
        for (int64_t j = 0; j < c; j += LANES) {
            reals v = read_some(row + j, 1, c - j, 0);
            wholes powers = __builtin_convertvector(read_some(right.exponents + j, 1, c - j, 0), wholes) - shift;
            wholes raised = ((wholes)v >> FRACTION) + powers < BIAS + CENTER - DEEPEST;
            reals scaled = where(raised, splat(RAISED), (reals)((naturals)v + ((naturals)powers << FRACTION)));
            write_some(t->scaled + r * c + j, where(v == 0, v, scaled), c - j);
            t->grown |= any(((v != 0) & (v < 4 * RAISED) & (powers > 1)) | ~(v < INFINITE));
        }
        t->shifts[r] = (real)shift;
    }
    return t->scaled;
}

/* S, and its largest; whether all are 0 or trusted. */
INLINE int find_products(const int64_t c, Tree *t, Node left, Node right, real *most) {
    reals high = {0}, limit = splat((real)c * LEAST_SUM);
    wholes inexact = {0};
    multiply_states(c, scale_left(c, t, left, right), c, 1, right.values, t->sums);
    for (int64_t j = 0; j < c * c; j += LANES) {
        reals s = read_some(t->sums + j, 1, c * c - j, 0);
        inexact |= ~((s >= limit) & (s < INFINITE)) & (s != 0), high = larger(s, high);
    }
    *most = largest(high);
    return !any(inexact) && !t->grown;
}

/* Moves the largest exponent to base; false if one is too small for a row that is not 0. */
INLINE int level_exponents(const int64_t c, Node n) {
    real rise = largest_in(c, n.exponents, -INFINITE);
    int flagged = 0;
    rise = rise < -FARTHEST ? 0 : rise;
    for (int64_t r = 0; r < c; r++) {
        n.exponents[r] -= rise;
        if (n.exponents[r] >= -FARTHEST) continue;
        flagged |= !are_zero(c, n.values + r * c);
        n.exponents[r] = IMPOSSIBLE;
    }
    n.exponents[c] += rise;
    return !flagged;
}

INLINE void multiply_nodes(const int64_t c, Tree *t, Node left, Node right, Node *out) {
    real most;
    if (!find_products(c, t, left, right, &most)) {
        scale_rows(c, left), scale_rows(c, right);
        t->flagged = !find_products(c, t, left, right, &most);
        if (t->flagged) return;
    }
    int64_t exponent = exponent_of(bits_of(most)) - CENTER;
    scale(c * c, t->sums, power_of_two(-exponent), out->values);
    for (int64_t r = 0; r < c; r++) out->exponents[r] = left.exponents[r] + t->shifts[r];
    out->exponents[c] = (real)(exponent - CENTER);
    if (!are_zero(c, out->exponents)) t->flagged |= !level_exponents(c, *out);
    out->offset = left.offset;
    add(&out->offset, right.offset.sum);
    out->offset.error += right.offset.error;
    out->power = left.power + right.power + (int64_t)out->exponents[c];
}

/* Writes G over V, or for a scale other than 0, gradients of a leaf's logarithms; w is that of prefixes, or null. */
INLINE void write_gradient(const int64_t c, Tree *t, real *values, const real *scaled, const real *w, real scale) {
    for (int64_t j = 0, left = c * c; left > 0; j += LANES, left -= LANES) {
        reals v = read_some(values + j, 1, left, 0), g = read_some(t->sums + j, 1, left, 0) * power_of_two(-CENTER);
        if (scaled != values) g *= read_some(scaled + j, 1, left, 0) / v;
        if (w) g += read_some(w + j, 1, left, 0) / v;
        write_some(values + j, where(v == 0, v, scale != 0 ? g * v * scale : g), left);
    }
}

/* Gradients of the operands from that of their product. */
INLINE void write_gradients_of(const int64_t c, Tree *t, Node out, Node left, Node right, const real *w, real of_left,
                               real of_right) {
    const real *scaled = scale_left(c, t, left, right);
    for (int64_t r = 0; r < c; r++) {
        real power = left.exponents[r] + t->shifts[r] - out.exponents[r] - out.exponents[c]; /* CENTER - h */
        power = power > BIAS - 1 ? BIAS - 1 : power < 1 - BIAS ? 1 - BIAS : power;           /* of a row of zeros */
        scale(c, out.values + r * c, power_of_two((int64_t)power), t->sources + r * c);
    }
    if (c >= LANES) transpose(c, right.values, c, t->transposed, c);
    else for (int64_t i = 0; i < c * c; i++) t->transposed[i] = right.values[i % c * c + i / c];
    multiply_states(c, scaled, 1, c, t->sources, t->sums);
    write_gradient(c, t, right.values, right.values, 0, of_right);
    multiply_states(c, t->sources, c, 1, t->transposed, t->sums);
    write_gradient(c, t, left.values, scaled, w, of_left);
}

/* Calls a function with the number of states, if it is small as a constant for the compiler. */
#define OF(n, f, c, ...) (c) == n ? f(n, __VA_ARGS__)
#define OF_STATES(f, c, ...)                                                                               \
    (OF(2, f, c, __VA_ARGS__) : OF(3, f, c, __VA_ARGS__) : OF(4, f, c, __VA_ARGS__) : OF(5, f, c, __VA_ARGS__) \
     : OF(6, f, c, __VA_ARGS__) : OF(7, f, c, __VA_ARGS__) : OF(8, f, c, __VA_ARGS__) : f(c, __VA_ARGS__))

/* Offset of the product of a unit, or of its matrices up to `index`, among products and their weights. */
INLINE int64_t place_of(const Tree *t, int64_t index) {
    return (t->a->prefixes ? t->set * t->a->matrices + index : t->unit) * t->a->states * t->a->states;
}

static void write_product(const Tree *t, Node n, int64_t index) {
    const Stack *a = t->a;
    int64_t c = a->states;
    for (int64_t r = 0, width = are_zero(c, n.exponents) ? c * c : c; r < c * c; r += width) {
        Sum taken = a->out ? n.offset : (Sum){0, 0};
        add_exponent(&taken, (int64_t)n.exponents[r / c] + (a->out ? n.power : 0));
        for (int64_t j = r, left = width; left > 0; j += WIDE, left -= WIDE) {
            doubles logs = logarithm_of(read_wide(n.values + j, 1, left, 0), CENTER) + taken.error + taken.sum;
            if (a->out) write_wide(a->out + place_of(t, index) + j, logs, left);
            else write_doubles(a->products + place_of(t, index) + j, logs, left);
        }
    }
    if (a->out) return;
    add_exponent(&n.offset, n.power);
    a->offset[2 * t->unit] = n.offset.sum, a->offset[2 * t->unit + 1] = n.offset.error;
}

/* The product of the matrices from `first` to before `last`. */
static Node product_of(Tree *t, int64_t first, int64_t last, int64_t slot) {
    Node n = node_of(t, first, first + 1, slot);
    OF_STATES(write_leaf, t->a->states, t, first, &n);
    for (int64_t middle = first + 1, end; middle < last; middle = end) {
        end = t->a->prefixes ? middle + 1 : 2 * middle - first < last ? 2 * middle - first : last;
        Node left = n, right = product_of(t, middle, end, slot + 1);
        if (t->flagged) break;
        n = node_of(t, first, end, slot);
        OF_STATES(multiply_nodes, t->a->states, t, left, right, &n);
        if (t->a->prefixes && !t->a->grad) write_product(t, n, middle);
    }
    return n;
}

/* Gradients of these matrices, from that of their product. */
static void gradients_below(Tree *t, int64_t first, int64_t last) {
    const Stack *a = t->a;
    real scale = (real)*a->scale;
    for (int64_t middle; last - first > 1; last = middle) {
        middle = middle_of(t, first, last);
        const real *w = a->prefixes ? a->weights + place_of(t, middle - 1) : 0;
        Node out = node_of(t, first, last, 0), left = node_of(t, first, middle, 0), right = node_of(t, middle, last, 0);
        real of_left = middle - first == 1 ? scale : 0, of_right = last - middle == 1 ? scale : 0;
        OF_STATES(write_gradients_of, a->states, t, out, left, right, w, of_left, of_right);
        gradients_below(t, middle, last);
    }
}
static void write_gradients(Tree *t, Node root) {
    const Stack *a = t->a;
    const real *w = a->weights + place_of(t, t->last - 1);
    Mode before = flush_to_zero(1);
    real *v = root.values;
    for (int64_t i = 0; i < a->states * a->states; i++) v[i] = v[i] == 0 ? 0 : w[i] / v[i];
    gradients_below(t, t->first, t->last);
    set_mode(before);
}

/* Products of units, or gradients; how many units are flagged. */
EXPORT int64_t EXPORTED(logchain_tree)(const Stack *a) {
    Scratch scratch = {.begin = a->scratch};
    int64_t c = a->states, square = c * c, row = c + 1, flagged = 0;
    int64_t longest = (a->matrices + a->segments - 1) / a->segments, slots = 2;
    for (int64_t size = 1; size < longest; size *= 2) slots++;
    if (a->grad) slots = longest;
    Tree t = {.a = a, .shifts = take_reals(&scratch, row), .scaled = take_reals(&scratch, square)};
    t.sums = take_reals(&scratch, square), t.transposed = take_reals(&scratch, square);
    t.sources = take_reals(&scratch, square);
    t.values = take_reals(&scratch, slots * square), t.exponents = take_reals(&scratch, 2 * slots * row);
    for (t.unit = a->first; t.unit < a->last && a->scratch; t.unit++) {
        int64_t segment = t.unit % a->segments;
        t.set = t.unit / a->segments, t.flagged = 0;
        t.first = a->matrices * segment / a->segments, t.last = a->matrices * (segment + 1) / a->segments;
        Node root = product_of(&t, t.first, t.last, 0);
        t.flagged |= !(root.offset.sum < __builtin_inf() && root.offset.sum > -__builtin_inf());
        flagged += a->flagged[t.unit] = (uint8_t)t.flagged;
        if (!t.flagged && a->grad) write_gradients(&t, root);
        else if (!t.flagged && !a->prefixes) write_product(&t, root, 0);
    }
    return a->scratch ? flagged : scratch.bytes;
}
