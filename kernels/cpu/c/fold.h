/* Products of a stack of matrices of logarithms, from the left, all rows together; and their gradients.

       P_0 = exp(M_0 - t_0)      P_i = D_i P_{i-1} E_i,  E_i = exp(M_i - t_i)      log of the product = log P_i + scales

   t_i is a number for each matrix, for each row of the first; D_i are powers of two, one for each row, mostly 1. With w
   the gradient of the logarithms of the last product, or w_i those of all P_i,

       G_i = w_i / P_i + G'_i      dM_i = (P_{i-1}^T D_i G_i) E_i      G'_{i-1} = (D_i G_i) E_i^T      dM_0 = P_0 G_0

   entry by entry where no matrix is multiplied. Weights may have any sign: nothing is divided by a sum of them.

   An exponential is 0 only where a matrix is -inf and is raised to 2^-DEEPEST where it is less, as in step.h. So a P
   that is 0 says that no path leads there as long as products with others are normal numbers, and what is raised adds at
   most 2^-DEEPEST times the row's largest P a term. From LOW to HIGH entries pass without a look at their row.
   Otherwise the row is scaled to near 2^TOP, and is lossy where an entry is not far above what raised ones add. G is 0
   where P is, and P G is no more than a row's weights: it leaves the format nowhere. */
#pragma once
#include "forward.h"

enum { HIGHEST = TOP + 8, LOWEST = HIGHEST - DEEPEST + FRACTION + 5 + 18 }; /* raised terms: up to 2^18 of them */
enum { MIDDLE = TOP - 16 };
#define HIGH power_of_two(HIGHEST)
#define LOW power_of_two(LOWEST)

/* What weights are multiplied by: G of a large P is a normal number, and P G of a small one is within the format. */
#if BITS == 32
#define LIFT power_of_two(24)
#else
#define LIFT power_of_two(97)
#endif

/* Rows of the products of one set, in the fields of a Chain: p0 is the first matrix (set, member = row, state), bulk the
   others. `messages` keeps P (sets, steps, c, c) with LANES entries behind each set, for the last vector of a row may
   reach beyond it; then `factors` keeps D (sets, steps, c), with a 0 in front where no row is scaled, and `grad_bulk` E. */
typedef struct {
    const Chain *a;
    int64_t set, row, rows; /* all rows of a set, where it has few states */
    real *kept, *factors; /* P (steps, c, c) and D (steps, c) of the set; or null */
    real *slots;        /* P of a step and of the one before it, where they are not kept */
    real *exponentials; /* (c, c): E, where it is not kept */
    Sum shift;          /* of the matrices behind the first */
    double *shifts;     /* (rows): of the first */
    int64_t *exponents; /* (rows): of what D took out */
} Fold;

/* P after a step, rows next to each other. */
INLINE real *product_at(const Fold *f, int64_t step) {
    int64_t square = f->rows * f->a->states;
    if (f->kept) return f->kept + step * square;
    return f->slots + (step & 1) * (square + LANES);
}

INLINE real *factors_at(const Fold *f, int64_t step) {
    return f->kept ? f->factors + step * f->a->states : 0;
}

INLINE real *uses_at(const Fold *f, int64_t step) {
    return f->a->grad_bulk + f->set * f->a->count_set + step * f->a->count_step;
}

INLINE const real *matrix_at(const Fold *f, int64_t step) {
    return f->a->bulk + first_matrix(f->a, f->set) + (step - 1) * f->a->bulk_step;
}

/* E of a step (c, c), and its t. */
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
    reals end = exponential(load(from + count - LANES) - most, NO_REST); /* what two vectors share */
    for (int64_t j = 0; j + LANES < count; j += LANES) store(out + j, exponential(load(from + j) - most, NO_REST));
    store(out + count - LANES, end);
    return most;
}

/* The least bits less 1 and the largest bits of entries: 0 becomes the largest there. */
typedef struct { naturals low, high; } Extent;

INLINE void observe(Extent *seen, reals entries) {
    naturals bits = (naturals)entries, below = bits - 1;
    seen->high = above(bits, seen->high);
    seen->low = (naturals)which(below < seen->low, (wholes)below, (wholes)seen->low);
}

/* Whether all of them are 0 or between LOW and HIGH. */
INLINE int is_plain(const Extent *seen) {
    return !any((wholes)((seen->low < (natural)bits_of(LOW) - 1) | (seen->high > (natural)bits_of(HIGH))));
}

static int are_plain(const real *p, int64_t count) {
    Extent seen = {(naturals){0} - 1, {0}};
    for (int64_t b = 0; b < vectors_of(count); b++) observe(&seen, load(p + (count < LANES ? 0 : start_of(b, count))));
    return is_plain(&seen);
}

/* The largest entry of a row as bits, and the least one that is not 0: where there is none, the largest number. */
static natural extremes(const real *row, int64_t c, natural *least) {
    natural most = 0, low = (natural)-1;
    for (int64_t j = 0; j < c; j++) {
        natural bits = (natural)bits_of(row[j]), below = bits - 1;
        most = bits > most ? bits : most, low = below < low ? below : low;
    }
    *least = low + 1;
    return most;
}

/* The rows of a step near 2^MIDDLE; false where one has lost something. */
static int scale_rows(Fold *f, int64_t step) {
    int64_t c = f->a->states;
    real *p = product_at(f, step), *factors = factors_at(f, step);
    const real *before = step > 0 ? product_at(f, step - 1) : 0;
    for (int64_t r = 0; r < f->rows; r++) {
        real *row = p + r * c;
        natural least, ahead, most = extremes(row, c, &least);
        if (factors) factors[r] = 1;
        if (most == 0) continue;
        if (most >= (natural)bits_of(INFINITE)) return 0;
        real factor = scale_to_top(exponent_of((whole)most) + TOP - MIDDLE), low = real_of((whole)least), limit = 0;
        if (before) limit = real_of((whole)extremes(before + r * c, c, &ahead)) * power_of_two(FRACTION + 2 - DEEPEST);
        if (!(low >= limit * (real)c)) return 0; /* then products with raised exponentials are normal numbers */
        for (int64_t j = 0; j < c; j++) row[j] *= factor;
        f->exponents[r] += exponent_of((whole)most) - MIDDLE;
        if (factors) factors[r] = factor;
    }
    return 1;
}

/* What has been taken out of a row of P 2^-TOP. */
static Sum taken_out(const Fold *f, int64_t r) {
    Sum taken = f->shift;
    add(&taken, f->shifts[r]);
    add_exponent(&taken, f->exponents[r] + TOP);
    return taken;
}

/* Logarithms of a step's products: of the last step alone where their steps are 0 apart. */
static void write_products(const Fold *f, int64_t step) {
    const Chain *a = f->a;
    for (int64_t r = 0; r < f->rows; r++) {
        const real *row = product_at(f, step) + r * a->states;
        real *out = logarithms_at(a, a->log_forward, f->set, f->set * a->states + f->row + r, step);
        Sum taken = taken_out(f, r);
        for (int64_t j = 0; j < a->states; j += WIDE) {
            doubles small = logarithm_of(read_wide(row + j, 1, a->states - j, 0), TOP) + taken.lost;
            write_wide(out + j, small + taken.sum, a->states - j);
        }
    }
}

/* Logarithms of the last products less what has been taken out of the first row, and that, one for the set. */
static void leave_products(const Fold *f) {
    const Chain *a = f->a;
    int64_t c = a->states;
    Sum first = taken_out(f, 0);
    for (int64_t r = 0; r < f->rows; r++) {
        const real *row = product_at(f, a->steps - 1) + r * c;
        double *out = a->leaving + (f->set * c + r) * c;
        Sum taken = taken_out(f, r);
        double ahead = (taken.sum - first.sum) + (taken.lost - first.lost);
        for (int64_t j = 0; j < c; j += WIDE) {
            doubles logs = logarithm_of(read_wide(row + j, 1, c - j, 0), TOP) + ahead;
            UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) out[j + l] = logs[l];
        }
    }
    tell(a, f->set, first);
}

/* The first matrix; false where it does not fit. */
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

/* P of a step, from that before it; whether it is plain. */
INLINE int step_of_many(Fold *f, int64_t step, real *top) {
    const Chain *a = f->a;
    int64_t c = a->states;
    real *out = product_at(f, step), *exponentials = f->kept ? uses_at(f, step) : f->exponentials;
    if (step == 1 || f->kept || !a->one_matrix) *top = exponentiate(f, step, exponentials);
    add(&f->shift, *top);
    multiply((Product){f->rows, c, c, product_at(f, step - 1), c, 1, exponentials, c, out, c});
    return are_plain(out, f->rows * c);
}

/* Rows of a matrix (c, c) of few states, or of its transpose, as vectors with zeros behind. */
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

/* The same of few states, each row one vector. */
INLINE int step_of_few(const int64_t c, Fold *f, int64_t step) {
    reals entries[LANES], products[LANES], high = all(-INFINITE);
    wholes behind;
    Extent seen = {(naturals){0} - 1, {0}};
    real *kept = f->kept ? uses_at(f, step) : 0, *out = product_at(f, step);
    UNROLL for (int j = 0; j < LANES; j++) behind[j] = j < c ? 0 : -1;
    load_rows(c, matrix_at(f, step), f->a->bulk_from, f->a->bulk_to, entries);
    for (int64_t k = 0; k < c; k++) {
        entries[k] = where(behind, all(-INFINITE), entries[k]);
        high = larger(entries[k], high);
    }
    real most = largest(high);
    most = most == -INFINITE ? 0 : most;
    for (int64_t k = 0; k < c; k++) {
        entries[k] = exponential(entries[k] - most, NO_REST);
        if (kept) store_some(kept + k * c, entries[k], c);
    }
    multiply_few(c, product_at(f, step - 1), c, 1, entries, products);
    for (int64_t r = 0; r < c; r++) store_some(out + r * c, products[r], c), observe(&seen, products[r]);
    add(&f->shift, most);
    return is_plain(&seen);
}

/* All products of some rows; false where something is lost, or what is taken out is not finite. */
INLINE int fold_rows(const int64_t few, Fold *f) {
    const Chain *a = f->a;
    real top = 0;
    if (!start_rows(f)) return 0;
    for (int64_t step = 0; step < a->steps; step++) {
        real *factors = factors_at(f, step);
        int plain = step == 0 ? are_plain(product_at(f, 0), f->rows * a->states)
                    : few     ? step_of_few(few, f, step)
                              : step_of_many(f, step, &top);
        if (factors) factors[0] = 0;
        if (!plain && !scale_rows(f, step)) return 0;
        if (factors && step == 0) factors[0] = 0; /* the gradient of the first matrix is P_0 G_0 as they are */
        if (a->log_forward && (a->grad_step || step + 1 == a->steps)) write_products(f, step);
    }
    for (int64_t r = 0; r < f->rows; r++) {
        double taken = f->shift.sum + f->shifts[r];
        if (!(taken < __builtin_inf() && taken > -__builtin_inf())) return 0;
    }
    if (a->leaving) leave_products(f);
    return 1;
}

/* What `name` does of few states, up to 8 of them with their number known to the compiler; of many, as 0. */
#define OF_STATES(name, c, ...)                                                   \
    if (LANES >= 8 && (c) == 5) return name(5, __VA_ARGS__);                      \
    if (LANES >= 8 && (c) == 6) return name(6, __VA_ARGS__);                      \
    if (LANES >= 8 && (c) == 7) return name(7, __VA_ARGS__);                      \
    if (LANES >= 8 && (c) == 8) return name(8, __VA_ARGS__);                      \
    if (LANES >= 4 && (c) == 3) return name(3, __VA_ARGS__);                      \
    if (LANES >= 4 && (c) == 4) return name(4, __VA_ARGS__);                      \
    if ((c) == 2) return name(2, __VA_ARGS__);                                    \
    return (c) < LANES ? name(c, __VA_ARGS__) : name(0, __VA_ARGS__)

static int fold(Fold *f) { OF_STATES(fold_rows, f->a->states, f); }

/* Scratch of the rows that a thread has of a set. */
static Fold fold_of(const Chain *a, char **room) {
    int64_t c = a->states, bytes = sizeof(real);
    Fold f = {.a = a};
    f.exponentials = take(room, c * c * bytes);
    f.shifts = take(room, c * 8), f.exponents = take(room, c * 8);
    f.slots = take(room, 2 * (c * c + LANES) * bytes);
    return f;
}

INLINE void keep_set(Fold *f) {
    if (!f->a->messages) return;
    f->kept = f->a->messages + f->set * (f->a->steps * f->a->states * f->a->states + LANES);
    f->factors = f->a->factors + f->set * f->a->steps * f->a->states;
}

/* Products of the rows from `first` to before `last` of all sets: those of a set that has lost something are marked.
   How many have. */
EXPORT int64_t EXPORTED(logchain_fold)(const Chain *a) {
    int64_t lossy = 0, c = a->states;
    char *room = a->room;
    Fold f = fold_of(a, &room);
    for (int64_t q = a->first; q < a->last; q += f.rows) {
        f.set = q / c, f.row = q % c, f.rows = c - f.row < a->last - q ? c - f.row : a->last - q;
        keep_set(&f);
        int lost = !fold(&f);
        for (int64_t r = 0; r < f.rows; r++) a->lossy[q + r] = (uint8_t)lost;
        lossy += lost ? f.rows : 0;
    }
    return lossy;
}

/* ------------------------------------------------------------------------------------------------------- gradients */

/* Weights of a step's products (c, c), or null. */
INLINE const real *weights_at(const Fold *f, int64_t step) {
    const Chain *a = f->a;
    if (a->final_weights && step + 1 == a->steps) return a->final_weights + f->set * a->x_set;
    return a->x ? a->x + step * a->x_step + f->set * a->x_set : 0;
}

/* What weights of gradients are multiplied by in the end. */
INLINE real unlift(const Fold *f) { return (real)f->a->weight[0] / LIFT; }

/* G with weights of products, then that of P before D; and the gradient of what E are exponentials of. */
INLINE reals seeded(reals g, reals p, const real *weights, real factor) {
    if (weights) g += LIFT * load(weights) / p;
    return where(p == 0, (reals){0}, g * factor);
}
INLINE reals used(reals uses, reals entries, real scale) {
    return where(entries == 0, (reals){0}, uses * entries * scale);
}

/* All of them. What two vectors share is found before either is written. */
static void seed(const Fold *f, int64_t step, real *g) {
    int64_t c = f->a->states;
    const real *p = product_at(f, step), *factors = factors_at(f, step), *weights = weights_at(f, step);
    for (int64_t r = 0; r < c; r++, p += c, g += c, weights += weights ? c : 0) {
        real factor = factors[0] != 0 ? factors[r] : 1;
        int64_t last = c - LANES;
        reals end = seeded(load(g + last), load(p + last), weights ? weights + last : 0, factor);
        for (int64_t j = 0; j < last; j += LANES)
            store(g + j, seeded(load(g + j), load(p + j), weights ? weights + j : 0, factor));
        store(g + last, end);
    }
}
static void write_uses(const Fold *f, int64_t step, const real *uses, const real *entries) {
    real *out = uses_at(f, step), scale = unlift(f);
    int64_t last = f->a->states * f->a->states - LANES;
    reals end = used(load(uses + last), load(entries + last), scale);
    for (int64_t j = 0; j < last; j += LANES) store(out + j, used(load(uses + j), load(entries + j), scale));
    store(out + last, end);
}

static void sweep_many(const Fold *f, real *g, real *behind, real *uses, real *turned) {
    int64_t c = f->a->states;
    clear(c * c, g);
    for (int64_t step = f->a->steps - 1; step > 0; step--) {
        real *entries = uses_at(f, step), *ahead = g;
        seed(f, step, g);
        transpose(c, entries, c, turned, c);
        multiply((Product){c, c, c, product_at(f, step - 1), 1, c, g, c, uses, c});
        write_uses(f, step, uses, entries);
        multiply((Product){c, c, c, g, c, 1, turned, c, behind, c});
        g = behind, behind = ahead;
    }
    seed(f, 0, g);
    write_uses(f, 0, g, product_at(f, 0));
}

/* The same of few states, each row one vector; `g` (c, LANES) is G, to be read entry by entry. */
INLINE void sweep_few(const int64_t c, const Fold *f, real *g) {
    reals rows[LANES], own[LANES], entries[LANES], turned[LANES], uses[LANES];
    real scale = unlift(f);
    for (int64_t r = 0; r < c; r++) rows[r] = (reals){0};
    for (int64_t step = f->a->steps - 1; step >= 0; step--) {
        const real *factors = factors_at(f, step), *weights = weights_at(f, step);
        real *to = uses_at(f, step);
        load_rows(c, product_at(f, step), c, 1, own);
        for (int64_t r = 0; r < c; r++) {
            if (weights) rows[r] += LIFT * load_some(weights + r * c, 1, c, 0) / own[r];
            rows[r] = seeded(rows[r], own[r], 0, factors[0] != 0 ? factors[r] : 1);
            store(g + r * LANES, rows[r]), uses[r] = rows[r], entries[r] = own[r];
        }
        if (step > 0) {
            load_rows(c, to, c, 1, entries), load_rows(c, to, 1, c, turned);
            multiply_few(c, product_at(f, step - 1), 1, c, rows, uses);
            multiply_few(c, g, LANES, 1, turned, rows);
        }
        for (int64_t k = 0; k < c; k++)
            store_some(to + k * c, used(uses[k], entries[k], scale), c);
    }
}

INLINE int sweep_rows(const int64_t few, const Fold *f, real *g, real *behind, real *uses, real *turned) {
    if (few) sweep_few(few, f, g);
    else sweep_many(f, g, behind, uses, turned);
    return 1;
}

static int sweep(const Fold *f, real *g, real *behind, real *uses, real *turned) {
    OF_STATES(sweep_rows, f->a->states, f, g, behind, uses, turned);
}

/* Gradients of the matrices of the sets whose rows are from `first` to before `last`: of those that `fold` has kept and
   nothing is lossy of, or of all, one set after the other in the same scratch for what is kept. How many are lossy. */
static int64_t gradients(const Chain *a, int all) {
    char *room = a->room;
    Fold f = fold_of(a, &room);
    int64_t c = a->states, size = sizeof(real), bytes = c * width_of(a) * size, lossy = 0;
    real *g = take(&room, bytes), *behind = take(&room, bytes), *uses = take(&room, bytes);
    real *turned = take(&room, bytes);
    if (all) f.kept = take(&room, (a->steps * c * c + LANES) * size), f.factors = take(&room, a->steps * c * size);
    f.rows = c;
    for (f.set = a->first / c; f.set < a->last / c; f.set++) {
        if (all) a->lossy[f.set * c] = (uint8_t)!fold(&f);
        else keep_set(&f);
        if (a->lossy[f.set * c]) lossy++;
        else sweep(&f, g, behind, uses, turned);
    }
    return lossy;
}

EXPORT int64_t EXPORTED(logchain_unfold)(const Chain *a) { return gradients(a, 0); }
EXPORT int64_t EXPORTED(logchain_fold_gradients)(const Chain *a) { return gradients(a, 1); }

/* Bytes of scratch that a thread takes, of either direction, and of both. */
EXPORT int64_t EXPORTED(logchain_fold_room)(const Chain *a) {
    int64_t c = a->states, width = width_of(a);
    return (4 * c * width + 3 * c * c + 2 * LANES) * (int64_t)sizeof(real) + 16 * c + 8 * 64;
}
EXPORT int64_t EXPORTED(logchain_fold_gradients_room)(const Chain *a) {
    int64_t c = a->states;
    return EXPORTED(logchain_fold_room)(a) + (a->steps * c * (c + 1) + LANES) * (int64_t)sizeof(real) + 2 * 64;
}
