/* Exact recomputation of chains of arcs: as arcs_linear.h, with messages whose entries are numbers m 2^e of a mantissa
   m from 1 to 2 and a whole exponent e, both `real`. Nothing underflows, and an e too large to be a whole `real` is as
   exact as a logarithm would be. 0 is m = 0 with e = -inf.

   Sums over arcs are `real`, and what is done once a state is in doubles. Exponents are powers of two over the largest
   of the sums before, so that a_i and b_i are minus the largest exponents of U_i and B_i. */
#pragma once
#include "arcs_linear.h"

enum { PARTS_OF_ENTRY = SLICE / LANES };
typedef double Lanes __attribute__((vector_size(LANES * 8)));

/* Counts are multiplied by 2^LIFT while they are `real`, so that those of the least weights are normal numbers. */
#if BITS == 32
enum { LIFT = 60 };
#define LEAST_EXPONENT -0x1.fffffep127
#else
enum { LIFT = 500 };
#define LEAST_EXPONENT -0x1.fffffffffffffp1023
#endif

typedef struct { doubles m, e; } Wide;
typedef struct { real *m, *e; } WideRow;

/* ------------------------------------------------------------------------------------------------------- numbers */

INLINE reals gather_reals(const real *from, const int32_t *index) {
    reals a;
    UNROLL for (int l = 0; l < LANES; l++) a[l] = from[index[l]];
    return a;
}

/* 2^e for an e up to BIAS; 0 where that is not a normal number, or where e is NaN: the difference of two zeros. */
INLINE reals power_of(reals e) {
    e = where(e > -BIAS, e, splat(-BIAS)) + (ROUNDER + BIAS);
    return (reals)((naturals)e << FRACTION);
}
INLINE doubles wide_power_of(doubles e) {
    e = choose(e > -1023, e, splat_wide(-1023)) + (0x1.8p52 + 1023);
    return (doubles)((natural_longs)e << 52);
}

/* m 2^e with its m in range, for an m of 0 or a positive normal one. */
INLINE Wide settled_wide(doubles m, doubles e) {
    longs some = m > 0;
    doubles more = (doubles)((longs)((natural_longs)m >> 52) + (longs)splat_wide(0x1.8p52)) - (0x1.8p52 + 1023);
    doubles part = (doubles)(((longs)m & 0xfffffffffffff) | (longs)splat_wide(1));
    return (Wide){choose(some, part, splat_wide(0)), choose(some, e + more, splat_wide(-__builtin_inf()))};
}

/* A finite weight that is not negative. */
INLINE Wide wide_of(doubles a) {
    longs denormal = a < 0x1p-1022;
    return settled_wide(choose(denormal, a * 0x1p64, a), choose(denormal, splat_wide(-64), splat_wide(0)));
}

/* m 2^e exp(a), for an a below infinity. */
INLINE Wide times_exponential(Wide by, doubles a) {
    longs none = a == -__builtin_inf();
    doubles k = __builtin_elementwise_rint(choose(none, splat_wide(0), a) * 1.4426950408889634);
    doubles r = (a - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
    r = choose(r < 1, choose(r > -1, r, splat_wide(0)), splat_wide(0)); /* k is inexact: so is its rest */
    return settled_wide(choose(none, splat_wide(0), by.m * rough_exponential(r, 0)), by.e + k);
}

INLINE Wide load_number_of(WideRow row, int64_t j, int64_t left) {
    return (Wide){read_wide(row.m + j, 1, left, 0), read_wide(row.e + j, 1, left, -INFINITE)};
}
INLINE void store_number_of(WideRow row, int64_t j, Wide a, int64_t left) {
    write_wide(row.m + j, a.m, left);
    write_wide(row.e + j, choose((a.e < LEAST_EXPONENT) & (a.m != 0), splat_wide(LEAST_EXPONENT), a.e), left);
}

/* Weights, p0 or kept messages as numbers: linear entries or logarithms, `step` apart. */
static void read_numbers_of(int64_t count, const real *from, int64_t step, int logarithms, WideRow to) {
    double none = logarithms ? -__builtin_inf() : 0;
    Wide one = {splat_wide(1), splat_wide(0)};
    for (int64_t j = 0; j < count; j += WIDE) {
        doubles a = read_wide(from + j * step, step, count - j, (real)none);
        store_number_of(to, j, logarithms ? times_exponential(one, a) : wide_of(a), count - j);
    }
}

static void clear_numbers_of(int64_t count, WideRow row) {
    for (int64_t j = 0; j < count; j++) row.m[j] = 0, row.e[j] = -INFINITE;
}

/* The largest exponent of a row; 0 if there is none. */
static double highest_exponent(int64_t count, WideRow row) {
    real top = -INFINITE;
    for (int64_t j = 0; j < count; j++) top = row.e[j] > top ? row.e[j] : top;
    return top > -INFINITE ? top : 0;
}

/* The sum of the products of two rows as part 2^exponent. */
typedef struct { double part, exponent; } Total;
static Total total_of_products(int64_t count, WideRow a, WideRow b) {
    doubles top = splat_wide(-__builtin_inf()), sum = {0};
    for (int64_t j = 0; j < count; j += WIDE) {
        doubles e = load_number_of(a, j, count - j).e + load_number_of(b, j, count - j).e;
        top = choose(e > top, e, top);
    }
    double highest = highest_of(top), part = 0;
    for (int64_t j = 0; j < count; j += WIDE) {
        Wide one = load_number_of(a, j, count - j), other = load_number_of(b, j, count - j);
        sum += one.m * other.m * wide_power_of(one.e + other.e - highest);
    }
    UNROLL for (int l = 0; l < WIDE; l++) part += sum[l];
    return (Total){part, highest > -__builtin_inf() ? highest : 0};
}

/* ---------------------------------------------------------------------------------------------------------- sums */

/* Weights of a step in the order of slices. */
typedef struct {
    const Slices *slices;
    WideRow entries; /* (entries of slices, SLICE) */
    const real *from;
    int bad;
} WideWeights;

static void read_wide_weights(const ArcChain *a, int64_t q, int64_t step, WideWeights *w) {
    double high, least;
    w->from = arc_weights_at(a, q, step), w->bad = !bounds_of_weights(a, w->from, &high, &least);
    real none = a->logarithms ? -INFINITE : 0;
    for (int64_t k = 0; k < slots_of(w->slices); k++) {
        int64_t arc = w->slices->arc[k];
        w->entries.m[k] = arc < 0 ? none : w->from[arc * a->weight_arc];
    }
    read_numbers_of(slots_of(w->slices), w->entries.m, 1, (int)a->logarithms, w->entries);
}

/* The products of weights and messages of a row of each lane, until their sum is known. */
typedef struct { reals m[LONGEST_ROW], e[LONGEST_ROW], top; } Products;

INLINE void find_products(const WideWeights *w, WideRow message, int64_t k, int64_t length, Products *to) {
    to->top = splat(-INFINITE);
    for (int64_t t = 0; t < length; t++, k += SLICE) {
        const int32_t *other = w->slices->other + k;
        to->m[t] = gather_reals(message.m, other) * load(w->entries.m + k);
        to->e[t] = gather_reals(message.e, other) + load(w->entries.e + k);
        to->top = larger(to->top, to->e[t]);
    }
}

/* Adds a number to that of a state. */
static void add_number(WideRow to, int64_t j, real m, real e) {
    real top = to.e[j] > e ? to.e[j] : e;
    reals exponents = splat(to.e[j]);
    exponents[1] = e;
    reals powers = power_of(exponents - top);
    to.m[j] = to.m[j] * powers[0] + m * powers[1], to.e[j] = top;
}

/* Sums of a slice's rows to their states. `shared`: states may have more rows, or a row none. */
INLINE void write_sums(const int32_t *state, int shared, reals m, reals e, WideRow to) {
    UNROLL for (int l = 0; l < LANES; l++) {
        if (shared && m[l] != 0) add_number(to, state[l], m[l], e[l]);
        if (!shared) to.m[state[l]] = m[l], to.e[state[l]] = m[l] != 0 ? e[l] : -INFINITE;
    }
}

/* Sums over the arcs of each state, of mantissas that are not in range: U from S, or B from Q. `sources`, of which
   `kept` are messages times 2^lift: adds those times products, times `weight`, to counts. */
INLINE void wide_sums(const WideWeights *w, WideRow message, int64_t c, WideRow sums, const WideRow *kept, double lift,
                      double weight, double *counts) {
    const Slices *s = w->slices;
    Products products;
    clear_numbers_of(c, sums);
    for (int64_t slice = 0; slice < s->count; slice++) {
        int64_t length = s->start[slice + 1] - s->start[slice];
        UNROLL for (int p = 0; p < PARTS_OF_ENTRY; p++) {
            const int32_t *state = s->state + slice * SLICE + p * LANES;
            int64_t k = s->start[slice] * SLICE + p * LANES;
            reals sum = {0}, source = {0}, power = {0};
            find_products(w, message, k, length, &products);
            if (kept) source = gather_reals(kept->m, state), power = gather_reals(kept->e, state) + (real)lift;
            for (int64_t t = 0; t < length; t++, k += SLICE) {
                sum += products.m[t] * power_of(products.e[t] - products.top);
                if (!kept) continue;
                reals count = products.m[t] * source * power_of(products.e[t] + power);
                Lanes total, more = __builtin_convertvector(count, Lanes) * weight;
                __builtin_memcpy(&total, counts + k, sizeof total);
                total += more;
                __builtin_memcpy(counts + k, &total, sizeof total);
            }
            write_sums(state, is_shared(s, slice), sum, products.top, sums);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- forward */

typedef struct {
    const ArcChain *a;
    WideWeights weights;
    int64_t set;  /* whose weights of one matrix these are; -1 for none */
    WideRow sums; /* (c): U or B */
    WideRow rows; /* (2, c): S of two steps where they are not kept; Q and S backward */
} WideWalk;

INLINE WideRow wide_row(WideRow rows, int64_t at) { return (WideRow){rows.m + at, rows.e + at}; }

/* Where a sequence's message is kept: mantissas in the first half of its memory and exponents in the second, or in
   float64 in memory of their own. */
INLINE WideRow wide_message_at(const ArcChain *a, int64_t q, int64_t step) {
    real *row = (real *)arc_message_at(a, q, step);
    return (WideRow){row, BITS == 32 ? row + a->states : a->exponents + (q * a->steps + step) * a->states};
}

/* Weights into a step, unless they are there; whether all are finite. */
static int wide_weights_into(WideWalk *w, int64_t q, int64_t step) {
    if (w->a->one_matrix && w->set == w->a->set[q]) return !w->weights.bad;
    read_wide_weights(w->a, q, step, &w->weights);
    w->set = w->a->set[q];
    return !w->weights.bad;
}

/* The largest x of states that `reached` reaches; NaN if an x is infinite or NaN. */
static double top_of_x(int64_t c, const real *reached, const real *x) {
    real top = -INFINITE;
    int bad = 0;
    for (int64_t j = 0; j < c; j++) {
        bad |= !(x[j] < INFINITE);
        top = reached[j] != 0 && x[j] > top ? x[j] : top;
    }
    return bad ? __builtin_nan("") : top > -INFINITE ? top : 0;
}

/* sums exp(x - top) 2^power where `reached` is not 0; 0 elsewhere. */
static void emit_wide(int64_t c, WideRow sums, const real *reached, const real *x, double top, double power,
                      WideRow to) {
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -INFINITE) - top;
        Wide u = load_number_of(sums, j, c - j);
        u.e += power;
        a = choose(read_wide(reached + j, 1, c - j, 0) != 0, a, splat_wide(-__builtin_inf()));
        store_number_of(to, j, times_exponential(u, a), c - j);
    }
}

/* Adds k log 2. */
static void add_powers(Sum *to, double k) {
    if (k < 0x1p47 && k > -0x1p47) add_exponent(to, (int64_t)k);
    else add(to, k * 0.69314718055994531);
}

/* log Z and kept messages of a sequence. */
static int walk_wide_arcs(WideWalk *w, int64_t q, Sum *log_norm) {
    const ArcChain *a = w->a;
    int64_t c = a->states, steps = steps_of_arcs(a, q);
    double taken = 0, part = 0;
    WideRow message = w->sums;
    *log_norm = (Sum){0, 0};
    if (!finite_p0(a, q)) return ARCS_NAN;
    read_numbers_of(c, a->p0 + a->p0_at[q], a->p0_state, (int)a->logarithms, w->sums);
    for (int64_t step = 0; step < steps; step++) {
        if (step > 0) {
            if (!wide_weights_into(w, q, step)) return ARCS_NAN;
            wide_sums(&w->weights, message, c, w->sums, 0, 0, 0, 0);
        }
        double top = top_of_x(c, w->sums.m, arc_x_at(a, q, step)), highest = highest_exponent(c, w->sums);
        if (top != top) return ARCS_NAN;
        message = a->messages ? wide_message_at(a, q, step) : wide_row(w->rows, (step & 1) * padded_states(c));
        emit_wide(c, w->sums, w->sums.m, arc_x_at(a, q, step), top, -highest, message);
        if (a->powers) a->powers[q * a->steps + step] = -highest;
        add(log_norm, top), taken += highest;
    }
    double last = highest_exponent(c, message);
    for (int64_t j = 0; j < c; j += WIDE) {
        Wide one = load_number_of(message, j, c - j);
        doubles value = one.m * wide_power_of(one.e - last);
        UNROLL for (int l = 0; l < WIDE; l++) part += value[l];
    }
    if (part == 0) *log_norm = (Sum){-__builtin_inf(), 0};
    else add_powers(log_norm, taken + last), add(log_norm, logarithm(part));
    return ARCS_KNOWN;
}

static WideWalk new_wide_walk(const ArcChain *a, const Slices *slices, Room *room) {
    int64_t row = padded_states(a->states) * (int64_t)sizeof(real), slots = slots_of(slices) * (int64_t)sizeof(real);
    WideWalk w = {.a = a, .weights = {.slices = slices}, .set = -1};
    w.weights.entries.m = take(room, slots), w.weights.entries.e = take(room, slots);
    w.sums.m = take(room, row), w.sums.e = take(room, row);
    w.rows.m = take(room, 2 * row), w.rows.e = take(room, 2 * row);
    return w;
}

/* log Z and kept messages of a thread's lossy sequences. */
EXPORT int64_t EXPORTED(logchain_arcs_redo)(const ArcChain *a) {
    Room room = {.begin = a->room};
    WideWalk w = new_wide_walk(a, &a->into, &room);
    if (!a->room) return room.bytes;
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = a->order[place];
        Sum log_norm;
        if (!a->lossy[q]) continue;
        a->log_norm[q] = walk_wide_arcs(&w, q, &log_norm) == ARCS_KNOWN ? value_of(log_norm) : __builtin_nan("");
    }
    return 0;
}
