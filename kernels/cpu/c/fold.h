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
    int64_t set, row, rows, width;
    real *kept, *factors; /* P (steps, c, c) and D (steps, c) of the set; or null */
    real *slots;        /* P of a step and of the one before it, where they are not kept */
    real *exponentials; /* (c, c): E, where it is not kept */
    real *wide;         /* (c, LANES): E where c < LANES, with zeros behind its columns */
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

/* E of a step (c, c), and its t. */
static real exponentiate(const Fold *f, int64_t step, real *out) {
    const Chain *a = f->a;
    int64_t c = a->states, count = c * c;
    const real *from = a->bulk + first_matrix(a, f->set) + (step - 1) * a->bulk_step;
    if (a->bulk_to != 1 || a->bulk_from != c || count < LANES) {
        for (int64_t k = 0; k < c; k++)
            for (int64_t j = 0; j < c; j++) out[k * c + j] = from[k * a->bulk_from + j * a->bulk_to];
        from = out;
    }
    if (count < LANES) {
        reals all_of_it = load_some(from, 1, count, -INFINITE);
        real most = largest(all_of_it);
        store_some(out, exponential(all_of_it - (most == -INFINITE ? 0 : most), NO_REST), count);
        return most == -INFINITE ? 0 : most;
    }
    real most = top_of(from, count);
    reals end = exponential(load(from + count - LANES) - most, NO_REST); /* what two vectors share */
    for (int64_t j = 0; j + LANES < count; j += LANES) store(out + j, exponential(load(from + j) - most, NO_REST));
    store(out + count - LANES, end);
    return most;
}

/* E as products take it, in rows `row` apart. */
static const real *for_products(const Fold *f, const real *entries, int64_t *row) {
    int64_t c = f->a->states;
    *row = f->width;
    if (c >= LANES) return entries;
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < c; j++) f->wide[k * LANES + j] = entries[k * c + j];
    return f->wide;
}

/* Whether all entries are 0 or between LOW and HIGH. */
static int are_plain(const real *p, int64_t count) {
    naturals low = (naturals){0} - 1, high = {0};
    for (int64_t b = 0; b < vectors_of(count); b++) {
        naturals bits = (naturals)load(p + (count < LANES ? 0 : start_of(b, count))), below = bits - 1;
        high = above(bits, high);
        low = (naturals)which(below < low, (wholes)below, (wholes)low);
    }
    int outside = 0;
    UNROLL for (int l = 0; l < LANES; l++)
        outside |= low[l] < (natural)bits_of(LOW) - 1 || high[l] > (natural)bits_of(HIGH);
    return !outside;
}

/* The largest entry of a row as bits, and the least one that is not 0: the largest number of bits where there is none. */
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
    Sum found = f->shift;
    add(&found, f->shifts[r]);
    add_exponent(&found, f->exponents[r] + TOP);
    return found;
}

/* Logarithms of a step's products. */
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

/* Logarithms of the last products less what has been taken out of their rows, and that. False if it is infinite. */
static int leave_products(const Fold *f) {
    const Chain *a = f->a;
    int64_t c = a->states;
    for (int64_t r = 0; r < f->rows; r++) {
        const real *row = product_at(f, a->steps - 1) + r * c;
        int64_t q = f->set * c + f->row + r;
        Sum taken = taken_out(f, r);
        if (!(taken.sum < __builtin_inf() && taken.sum > -__builtin_inf())) return 0;
        tell(a, q, taken);
        for (int64_t j = 0; j < c; j += WIDE) {
            doubles found = logarithm_of(read_wide(row + j, 1, c - j, 0), TOP);
            UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) a->leaving[q * c + j + l] = found[l];
        }
    }
    return 1;
}

/* The first matrix; false where it does not fit. */
static int start_rows(Fold *f) {
    const Chain *a = f->a;
    for (int64_t r = 0; r < f->rows; r++) {
        const real *from = a->p0 + f->set * a->p0_set + (f->row + r) * a->p0_member;
        if (start_row(a->states, f->width, from, a->p0_state, 1, product_at(f, 0) + r * a->states, &f->exponents[r],
                      &f->shifts[r]))
            return 0;
    }
    f->shift = (Sum){0, 0};
    return 1;
}

/* All products of some rows; false where something is lost. */
static int fold(Fold *f) {
    const Chain *a = f->a;
    int64_t c = a->states, row;
    real top = 0;
    if (!start_rows(f)) return 0;
    for (int64_t step = 0; step < a->steps; step++) {
        real *out = product_at(f, step), *factors = factors_at(f, step);
        if (step > 0) {
            const real *before = product_at(f, step - 1);
            real *exponentials = f->kept ? uses_at(f, step) : f->exponentials;
            if (step == 1 || f->kept || !a->one_matrix) top = exponentiate(f, step, exponentials);
            add(&f->shift, top);
            const real *entries = for_products(f, exponentials, &row);
            multiply((Product){f->rows, c, f->width, before, c, 1, entries, row, out, c});
        }
        if (factors) factors[0] = 0;
        if (!are_plain(out, f->rows * c) && !scale_rows(f, step)) return 0;
        if (factors && step == 0) factors[0] = 0; /* the gradient of the first matrix is P_0 G_0 as they are */
        if (a->log_forward) write_products(f, step);
    }
    return !a->leaving || leave_products(f);
}

/* Scratch of the rows that a thread has of a set. */
static Fold fold_of(const Chain *a, char **room) {
    int64_t c = a->states, width = width_of(a), bytes = sizeof(real);
    Fold f = {.a = a, .width = width};
    f.exponentials = take(room, c * c * bytes), f.wide = take(room, width * LANES * bytes);
    clear(width * LANES, f.wide);
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

/* G with the weights of a step's products, (rows, c) `apart` from each other, then that of P before D. */
static void seed(const Fold *f, int64_t step, const real *weights, int64_t apart, real *g) {
    int64_t c = f->a->states;
    const real *p = product_at(f, step), *factors = factors_at(f, step);
    for (int64_t r = 0; r < c; r++) {
        real *row = g + r * f->width, factor = factors[0] != 0 ? factors[r] : 1;
        for (int64_t j = 0; j < c; j++) {
            real sum = p[r * c + j], own = weights ? LIFT * weights[r * apart + j] / sum : 0;
            row[j] = sum == 0 ? 0 : (row[j] + own) * factor;
        }
    }
}

/* The gradient of a step's matrix: what its exponentials are multiplied by, in rows so far `apart`, times those. */
static void write_uses(const Fold *f, int64_t step, const real *found, int64_t apart, const real *entries) {
    int64_t c = f->a->states;
    real *out = uses_at(f, step), unlift = (real)f->a->weight[0] / LIFT;
    for (int64_t k = 0; k < c; k++)
        for (int64_t j = 0; j < c; j++) {
            real entry = entries[k * c + j];
            out[k * c + j] = entry == 0 ? 0 : found[k * apart + j] * entry * unlift;
        }
}

static void sweep(const Fold *f, real *g, real *behind, real *uses, real *turned) {
    const Chain *a = f->a;
    int64_t c = a->states, width = f->width, last = a->steps - 1;
    clear(c * width, g);
    for (int64_t step = last; step >= 0; step--) {
        const real *weights = a->x ? a->x + step * a->x_step + f->set * a->x_set : 0;
        if (a->final_weights && step == last) weights = a->final_weights + f->set * a->x_set;
        seed(f, step, weights, c, g);
        if (step == 0) {
            write_uses(f, 0, g, width, product_at(f, 0));
            return;
        }
        real *entries = uses_at(f, step);
        if (c >= LANES) transpose(c, entries, c, turned, c);
        else for (int64_t k = 0; k < c; k++)
            for (int64_t j = 0; j < c; j++) turned[j * LANES + k] = entries[k * c + j];
        multiply((Product){c, c, width, product_at(f, step - 1), 1, c, g, width, uses, width});
        write_uses(f, step, uses, width, entries);
        multiply((Product){c, c, width, g, width, 1, turned, width, behind, width});
        real *other = g;
        g = behind, behind = other;
    }
}

/* Gradients of the matrices of the sets whose rows are from `first` to before `last`: of those that `fold` has kept and
   nothing is lossy of, or of all, one set after the other in the same memory for what is kept. How many are lossy. */
static int64_t gradients(const Chain *a, int all) {
    char *room = a->room;
    Fold f = fold_of(a, &room);
    int64_t c = a->states, bytes = c * f.width * (int64_t)sizeof(real), lossy = 0;
    real *g = take(&room, bytes), *behind = take(&room, bytes), *uses = take(&room, bytes);
    real *turned = take(&room, bytes);
    clear(c * f.width, turned);
    f.rows = c, f.kept = a->messages, f.factors = a->factors;
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

/* Bytes of scratch that a thread takes, of either direction. */
EXPORT int64_t EXPORTED(logchain_fold_room)(const Chain *a) {
    int64_t c = a->states, width = width_of(a);
    return ((4 * c + LANES) * width + 3 * c * c + 2 * LANES) * (int64_t)sizeof(real) + 16 * c + 9 * 64;
}
