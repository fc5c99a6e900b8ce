/* Prefix products of a stack of matrices M_i of logarithms, computed linearly with scales; and their gradients.

       P_0 = exp(M_0 - t_0)      P_i = D_i P_{i-1} E_i      E_i = exp(M_i - t_i)      log product = log P_i + scales

   t_i is the largest entry of M_i, of each row of M_0; D_i are powers of two, one for each row, mostly 1. With w_i the
   gradients of the logarithms of the products, or only w of the last one, entry by entry where no matrix is multiplied:

       G_i = w_i / P_i + G'_i      dM_i = (P_{i-1}^T D_i G_i) E_i      G'_{i-1} = (D_i G_i) E_i^T      dM_0 = P_0 G_0

   E is 0 only where M is -inf; smaller values are raised to 2^-DEEPEST, as in step.h. Hence a P of 0 means that no path
   leads there, provided that products are normal numbers; a raised term adds at most 2^-DEEPEST times the row's largest
   P. Rows with all entries 0 or from LOW to HIGH pass without further tests. Others are scaled to near 2^MIDDLE, and
   are lossy where an entry is not far above what raised terms add. Weights w may have any sign: no sum of them is a
   divisor. G is 0 where P is, and P G is at most a row's sum of weights, so that neither overflows. */
#pragma once
#include "forward.h"

enum { HIGHEST = TOP + 8, LOWEST = HIGHEST - DEEPEST + FRACTION + 5 + 18 }; /* at most 2^18 raised terms */
enum { MIDDLE = TOP - 16 };
#define HIGH power_of_two(HIGHEST)
#define LOW power_of_two(LOWEST)

/* Factor of all weights: G of a large P stays a normal number, P G of a small P does not overflow. */
#if BITS == 32
#define LIFT power_of_two(24)
#else
#define LIFT power_of_two(97)
#endif

/* Rows `row` to row + rows - 1 of the products of one set. In the Chain, p0 is M_0 (set, member = row, state) and
   bulk holds the other M. If products are kept, `messages` holds P (sets, steps, c, c), with LANES more entries
   after each set for whole vectors; `factors` D (sets, steps, c), where D[0] = 0 stands for all ones; and
   `grad_bulk` E, later dM. */
typedef struct {
    const Chain *a;
    int64_t set, row, rows; /* few states: always all rows of the set */
    real *kept, *factors;   /* P (steps, c, c) and D (steps, c) of the set, or null */
    real *slots;            /* P of the current and the last step, unless kept */
    real *exponentials;     /* (c, c): E, unless kept */
    Sum shift;              /* sum of t_1, t_2, ... */
    double *shifts;         /* (rows): t_0 */
    int64_t *exponents;     /* (rows): powers of two taken out of P_0, and by D */
} Fold;

/* P after a step (rows, c). */
INLINE real *product_at(const Fold *f, int64_t step) {
    int64_t square = f->rows * f->a->states;
    if (f->kept) return f->kept + step * square;
    return f->slots + (step & 1) * (square + LANES);
}

INLINE real *factors_at(const Fold *f, int64_t step) {
    return f->kept ? f->factors + step * f->a->states : 0;
}

INLINE real *matrix_slot(const Fold *f, int64_t step) {
    return f->a->grad_bulk + f->set * f->a->count_set + step * f->a->count_step;
}

INLINE const real *matrix_at(const Fold *f, int64_t step) {
    return f->a->bulk + first_matrix(f->a, f->set) + (step - 1) * f->a->bulk_step;
}

/* E of a step (c, c); returns t. */
static real exponentiate(const Fold *f, int64_t step, real *out) {
    const Chain *a = f->a;
    int64_t c = a->states, count = c * c;
    const real *from = matrix_at(f, step);
    if (a->bulk_to != 1 || a->bulk_from != c) {
        for (int64_t k = 0; k < c; k++)
            for (int64_t j = 0; j < c; j++) out[k * c + j] = from[k * a->bulk_from + j * a->bulk_to];
        from = out;
    }
    real most = top_of(from, count);
    reals end = exponential(load(from + count - LANES) - most, NO_TAIL); /* computed before it is overwritten */
    for (int64_t j = 0; j + LANES < count; j += LANES) store(out + j, exponential(load(from + j) - most, NO_TAIL));
    store(out + count - LANES, end);
    return most;
}

/* The range of bits of entries: `low` is the least positive minus 1, for 0 wraps around to the largest. */
typedef struct { naturals low, high; } Extent;

INLINE void add_to_extent(Extent *seen, reals entries) {
    naturals bits = (naturals)entries, below = bits - 1;
    seen->high = larger_bits(bits, seen->high);
    seen->low = (naturals)where_whole(below < seen->low, (wholes)below, (wholes)seen->low);
}

/* Whether all entries are 0 or from LOW to HIGH. */
INLINE int is_in_range(const Extent *seen) {
    return !any((wholes)((seen->low < (natural)bits_of(LOW) - 1) | (seen->high > (natural)bits_of(HIGH))));
}

static int are_in_range(const real *p, int64_t count) {
    Extent seen = {(naturals){0} - 1, {0}};
    for (int64_t b = 0; b < vectors_of(count); b++)
        add_to_extent(&seen, load(p + (count < LANES ? 0 : start_of(b, count))));
    return is_in_range(&seen);
}

/* Bits of the largest entry of a row, and of the least positive one; of the largest number if all are 0. */
static natural extremes(const real *row, int64_t c, natural *least) {
    natural most = 0, low = (natural)-1;
    for (int64_t j = 0; j < c; j++) {
        natural bits = (natural)bits_of(row[j]), below = bits - 1;
        most = bits > most ? bits : most, low = below < low ? below : low;
    }
    *least = low + 1;
    return most;
}

/* Scales the rows of a step to near 2^MIDDLE; false if one is lossy. */
static int scale_rows(Fold *f, int64_t step) {
    int64_t c = f->a->states;
    real *p = product_at(f, step), *factors = factors_at(f, step);
    const real *before = step > 0 ? product_at(f, step - 1) : 0;
    for (int64_t r = 0; r < f->rows; r++) {
        real *row = p + r * c;
        natural least, unused, most = extremes(row, c, &least);
        if (factors) factors[r] = 1;
        if (most == 0) continue;
        if (most >= (natural)bits_of(INFINITE)) return 0;
        real factor = scale_to_top(exponent_of((whole)most) + TOP - MIDDLE), low = real_of((whole)least), limit = 0;
        if (before) limit = real_of((whole)extremes(before + r * c, c, &unused)) * power_of_two(FRACTION + 2 - DEEPEST);
        if (!(low >= limit * (real)c)) return 0; /* above it, products with raised exponentials are normal numbers */
        for (int64_t j = 0; j < c; j++) row[j] *= factor;
        f->exponents[r] += exponent_of((whole)most) - MIDDLE;
        if (factors) factors[r] = factor;
    }
    return 1;
}

/* The logarithm taken out of a row of P 2^-TOP. */
static Sum taken_out(const Fold *f, int64_t r) {
    Sum taken = f->shift;
    add(&taken, f->shifts[r]);
    add_exponent(&taken, f->exponents[r] + TOP);
    return taken;
}

/* Logarithms of a step's products; with grad_step 0, callers write the last step only. */
static void write_products(const Fold *f, int64_t step) {
    const Chain *a = f->a;
    for (int64_t r = 0; r < f->rows; r++) {
        const real *row = product_at(f, step) + r * a->states;
        real *out = logarithms_at(a, a->log_forward, f->set, f->set * a->states + f->row + r, step);
        Sum taken = taken_out(f, r);
        for (int64_t j = 0; j < a->states; j += WIDE) {
            doubles small = logarithm_of(read_wide(row + j, 1, a->states - j, 0), TOP) + taken.error;
            write_wide(out + j, small + taken.sum, a->states - j);
        }
    }
}

/* Logarithms of the last products less the scale of the first row, which is the set's log_norm. */
static void write_leaving_products(const Fold *f) {
    const Chain *a = f->a;
    int64_t c = a->states;
    Sum first = taken_out(f, 0);
    for (int64_t r = 0; r < f->rows; r++) {
        const real *row = product_at(f, a->steps - 1) + r * c;
        double *out = a->leaving + (f->set * c + r) * c;
        Sum taken = taken_out(f, r);
        double relative = (taken.sum - first.sum) + (taken.error - first.error);
        for (int64_t j = 0; j < c; j += WIDE) {
            doubles logs = logarithm_of(read_wide(row + j, 1, c - j, 0), TOP) + relative;
            UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) out[j + l] = logs[l];
        }
    }
    write_log_norm(a, f->set, first);
}

/* P_0; false if underflow may lose an entry. */
static int start_rows(Fold *f) {
    const Chain *a = f->a;
    for (int64_t r = 0; r < f->rows; r++) {
        const real *from = a->p0 + f->set * a->p0_set + (f->row + r) * a->p0_member;
        if (start_row(a->states, width_of(a), from, a->p0_state, 1, product_at(f, 0) + r * a->states,
                      &f->exponents[r], &f->shifts[r]))
            return 0;
    }
    f->shift = (Sum){0, 0};
    return 1;
}

/* P of a step for many states; whether it is in range. */
INLINE int step_of_many(Fold *f, int64_t step, real *top) {
    const Chain *a = f->a;
    int64_t c = a->states;
    real *out = product_at(f, step), *exponentials = f->kept ? matrix_slot(f, step) : f->exponentials;
    if (step == 1 || f->kept || !a->one_matrix) *top = exponentiate(f, step, exponentials);
    add(&f->shift, *top);
    multiply((Product){f->rows, c, c, product_at(f, step - 1), c, 1, exponentials, c, out, c});
    return are_in_range(out, f->rows * c);
}

/* The rows of a matrix (c, c) of few states, or of its transpose, as vectors padded with zeros. */
INLINE void load_rows(const int64_t c, const real *from, int64_t row, int64_t step, reals *out) {
    for (int64_t k = 0; k < c; k++)
        out[k] = step == 1 ? load_some(from + k * row, 1, c, 0) : load_some(from + k * row, step, c, 0);
}

/* out (c, c) = a (c, c) b (c, c), with a[r, k] at r a_row + k a_k. */
INLINE void multiply_few(const int64_t c, const real *a, int64_t a_row, int64_t a_k, const reals *b, reals *out) {
    for (int64_t r = 0; r < c; r++) {
        out[r] = a[r * a_row] * b[0];
        for (int64_t k = 1; k < c; k++) out[r] += a[r * a_row + k * a_k] * b[k];
    }
}

/* P of a step for few states, each row one vector; whether it is in range. */
INLINE int step_of_few(const int64_t c, Fold *f, int64_t step) {
    reals entries[LANES], products[LANES], high = splat(-INFINITE);
    wholes beyond;
    Extent seen = {(naturals){0} - 1, {0}};
    real *kept = f->kept ? matrix_slot(f, step) : 0, *out = product_at(f, step);
    UNROLL for (int j = 0; j < LANES; j++) beyond[j] = j < c ? 0 : -1;
    load_rows(c, matrix_at(f, step), f->a->bulk_from, f->a->bulk_to, entries);
    for (int64_t k = 0; k < c; k++) {
        entries[k] = where(beyond, splat(-INFINITE), entries[k]);
        high = larger(entries[k], high);
    }
    real most = largest(high);
    most = most == -INFINITE ? 0 : most;
    for (int64_t k = 0; k < c; k++) {
        entries[k] = exponential(entries[k] - most, NO_TAIL);
        if (kept) store_some(kept + k * c, entries[k], c);
    }
    multiply_few(c, product_at(f, step - 1), c, 1, entries, products);
    for (int64_t r = 0; r < c; r++) store_some(out + r * c, products[r], c), add_to_extent(&seen, products[r]);
    add(&f->shift, most);
    return is_in_range(&seen);
}

/* All products of some rows; false if one is lossy, or a scale not finite. `few`: number of states, or 0 for many. */
INLINE int fold_rows(const int64_t few, Fold *f) {
    const Chain *a = f->a;
    real top = 0;
    if (!start_rows(f)) return 0;
    for (int64_t step = 0; step < a->steps; step++) {
        real *factors = factors_at(f, step);
        int plain = step == 0 ? are_in_range(product_at(f, 0), f->rows * a->states)
                    : few     ? step_of_few(few, f, step)
                              : step_of_many(f, step, &top);
        if (factors) factors[0] = 0;
        if (!plain && !scale_rows(f, step)) return 0;
        if (factors && step == 0) factors[0] = 0; /* M_0 has no D: its gradient is P_0 G_0 */
        if (a->log_forward && (a->grad_step || step + 1 == a->steps)) write_products(f, step);
    }
    for (int64_t r = 0; r < f->rows; r++) {
        double taken = f->shift.sum + f->shifts[r];
        if (!(taken < __builtin_inf() && taken > -__builtin_inf())) return 0;
    }
    if (a->leaving) write_leaving_products(f);
    return 1;
}

/* Calls `name` with the number of few states, up to 8 of them as a constant for the compiler, or 0 for many. */
#define OF_STATES(name, c, ...)                              \
    if (LANES >= 8 && (c) == 5) return name(5, __VA_ARGS__); \
    if (LANES >= 8 && (c) == 6) return name(6, __VA_ARGS__); \
    if (LANES >= 8 && (c) == 7) return name(7, __VA_ARGS__); \
    if (LANES >= 8 && (c) == 8) return name(8, __VA_ARGS__); \
    if (LANES >= 4 && (c) == 3) return name(3, __VA_ARGS__); \
    if (LANES >= 4 && (c) == 4) return name(4, __VA_ARGS__); \
    if ((c) == 2) return name(2, __VA_ARGS__);               \
    return (c) < LANES ? name(c, __VA_ARGS__) : name(0, __VA_ARGS__)

static int fold(Fold *f) { OF_STATES(fold_rows, f->a->states, f); }

/* Scratch for the rows of a set. */
static Fold fold_of(const Chain *a, Room *room) {
    int64_t c = a->states, bytes = sizeof(real);
    Fold f = {.a = a};
    f.exponentials = take(room, c * c * bytes);
    f.shifts = take(room, c * 8), f.exponents = take(room, c * 8);
    f.slots = take(room, 2 * (c * c + LANES) * bytes);
    return f;
}

INLINE void point_to_kept(Fold *f) {
    if (!f->a->messages) return;
    f->kept = f->a->messages + f->set * (f->a->steps * f->a->states * f->a->states + LANES);
    f->factors = f->a->factors + f->set * f->a->steps * f->a->states;
}

/* Products of the rows from `first` to before `last` of all sets; marks lossy rows and returns how many. */
EXPORT int64_t EXPORTED(logchain_fold)(const Chain *a) {
    int64_t lossy = 0, c = a->states;
    Room room = {.begin = a->room};
    Fold f = fold_of(a, &room);
    if (!a->room) return room.bytes;
    for (int64_t q = a->first; q < a->last; q += f.rows) {
        f.set = q / c, f.row = q % c, f.rows = c - f.row < a->last - q ? c - f.row : a->last - q;
        point_to_kept(&f);
        int lost = !fold(&f);
        for (int64_t r = 0; r < f.rows; r++) a->lossy[q + r] = (uint8_t)lost;
        lossy += lost ? f.rows : 0;
    }
    return lossy;
}

/* ------------------------------------------------------------------------------------------------------- gradients */

/* w of the products of a step (c, c), or null. */
INLINE const real *weights_at(const Fold *f, int64_t step) {
    const Chain *a = f->a;
    if (a->final_weights && step + 1 == a->steps) return a->final_weights + f->set * a->x_set;
    return a->x ? a->x + step * a->x_step + f->set * a->x_set : 0;
}

/* Whether G of the least weight is normal with GUARD bits to spare, so that what is flushed is negligible. */
static int have_ordinary_weights(const Fold *f) {
    double least = __builtin_inf();
    for (int64_t step = 0; step < f->a->steps; step++) {
        const real *weights = weights_at(f, step);
        for (int64_t j = 0; j < f->a->states * f->a->states && weights; j++) {
            double size = weights[j] < 0 ? -(double)weights[j] : (double)weights[j];
            least = size > 0 && size < least ? size : least;
        }
    }
    return least * (double)LIFT >= (double)(HIGH * power_of_two(GUARD + 1 - BIAS));
}

/* The last factor of all gradients: undoes LIFT. */
INLINE real gradient_scale(const Fold *f) { return (real)f->a->weight[0] / LIFT; }

/* with_weights: D G from G' and w. matrix_gradient: dM from P^T D G and E. */
INLINE reals with_weights(reals g, reals p, const real *weights, real factor) {
    if (weights) g += LIFT * load(weights) / p;
    return where(p == 0, (reals){0}, g * factor);
}
INLINE reals matrix_gradient(reals products, reals entries, real scale) {
    return where(entries == 0, (reals){0}, products * entries * scale);
}

/* with_weights and matrix_gradient for all entries of a matrix. The last vector overlaps the one before it, so that it
   is computed before that is stored. */
static void add_weights(const Fold *f, int64_t step, real *g) {
    int64_t c = f->a->states;
    const real *p = product_at(f, step), *factors = factors_at(f, step), *weights = weights_at(f, step);
    for (int64_t r = 0; r < c; r++, p += c, g += c, weights += weights ? c : 0) {
        real factor = factors[0] != 0 ? factors[r] : 1;
        int64_t last = c - LANES;
        reals end = with_weights(load(g + last), load(p + last), weights ? weights + last : 0, factor);
        for (int64_t j = 0; j < last; j += LANES)
            store(g + j, with_weights(load(g + j), load(p + j), weights ? weights + j : 0, factor));
        store(g + last, end);
    }
}
static void write_matrix_gradient(const Fold *f, int64_t step, const real *products, const real *entries) {
    real *out = matrix_slot(f, step), scale = gradient_scale(f);
    int64_t last = f->a->states * f->a->states - LANES;
    reals end = matrix_gradient(load(products + last), load(entries + last), scale);
    for (int64_t j = 0; j < last; j += LANES)
        store(out + j, matrix_gradient(load(products + j), load(entries + j), scale));
    store(out + last, end);
}

static void gradients_of_many(const Fold *f, real *g, real *next_g, real *products, real *transposed) {
    int64_t c = f->a->states;
    clear(c * c, g);
    for (int64_t step = f->a->steps - 1; step > 0; step--) {
        real *entries = matrix_slot(f, step), *last_g = g;
        add_weights(f, step, g);
        transpose(c, entries, c, transposed, c);
        multiply((Product){c, c, c, product_at(f, step - 1), 1, c, g, c, products, c});
        write_matrix_gradient(f, step, products, entries);
        multiply((Product){c, c, c, g, c, 1, transposed, c, next_g, c});
        g = next_g, next_g = last_g;
    }
    add_weights(f, 0, g);
    write_matrix_gradient(f, 0, g, product_at(f, 0));
}

/* Gradients for few states, each row one vector; `g` (c, LANES) is D G for access by entry. */
INLINE void gradients_of_few(const int64_t c, const Fold *f, real *g) {
    reals rows[LANES], own[LANES], entries[LANES], transposed[LANES], products[LANES];
    real scale = gradient_scale(f);
    for (int64_t r = 0; r < c; r++) rows[r] = (reals){0};
    for (int64_t step = f->a->steps - 1; step >= 0; step--) {
        const real *factors = factors_at(f, step), *weights = weights_at(f, step);
        real *to = matrix_slot(f, step);
        load_rows(c, product_at(f, step), c, 1, own);
        for (int64_t r = 0; r < c; r++) {
            if (weights) rows[r] += LIFT * load_some(weights + r * c, 1, c, 0) / own[r];
            rows[r] = with_weights(rows[r], own[r], 0, factors[0] != 0 ? factors[r] : 1);
            store(g + r * LANES, rows[r]), products[r] = rows[r], entries[r] = own[r];
        }
        if (step > 0) {
            load_rows(c, to, c, 1, entries), load_rows(c, to, 1, c, transposed);
            multiply_few(c, product_at(f, step - 1), 1, c, rows, products);
            multiply_few(c, g, LANES, 1, transposed, rows);
        }
        for (int64_t k = 0; k < c; k++)
            store_some(to + k * c, matrix_gradient(products[k], entries[k], scale), c);
    }
}

INLINE int gradients_by_states(const int64_t few, const Fold *f, real *g, real *next_g, real *products,
                               real *transposed) {
    if (few) gradients_of_few(few, f, g);
    else gradients_of_many(f, g, next_g, products, transposed);
    return 1;
}

static int fold_backward(const Fold *f, real *g, real *next_g, real *products, real *transposed) {
    OF_STATES(gradients_by_states, f->a->states, f, g, next_g, products, transposed);
}

/* Gradients of the matrices of sets, from products that `fold` has kept, skipping lossy sets; or with `folds`, after
   folding each set into scratch. Returns how many sets are lossy. */
static int64_t gradients(const Chain *a, int folds) {
    Room room = {.begin = a->room};
    Fold f = fold_of(a, &room);
    int64_t c = a->states, size = sizeof(real), bytes = c * width_of(a) * size, lossy = 0;
    real *g = take(&room, bytes), *next_g = take(&room, bytes), *products = take(&room, bytes);
    real *transposed = take(&room, bytes);
    if (folds) f.kept = take(&room, (a->steps * c * c + LANES) * size), f.factors = take(&room, a->steps * c * size);
    f.rows = c;
    if (!a->room) return room.bytes;
    for (f.set = a->first / c; f.set < a->last / c; f.set++) {
        if (folds) a->lossy[f.set * c] = (uint8_t)!fold(&f);
        else point_to_kept(&f);
        if (a->lossy[f.set * c]) {
            lossy++;
            continue;
        }
        Mode before = flush_to_zero(have_ordinary_weights(&f));
        fold_backward(&f, g, next_g, products, transposed);
        set_mode(before);
    }
    return lossy;
}

EXPORT int64_t EXPORTED(logchain_unfold)(const Chain *a) { return gradients(a, 0); }
EXPORT int64_t EXPORTED(logchain_fold_gradients)(const Chain *a) { return gradients(a, 1); }
