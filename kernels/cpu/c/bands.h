/* Forward messages S and the log-partition of chains whose matrices have entries on a few diagonals only, the bands:

       U_0 = p0    U_i(j) = sum over bands d of S_{i-1}(j - o_d) V_{i-1}(d, j)    S_i = U_i E_i    E_i = exp x_i
       log Z = log sum S_{v-1}

   All are split numbers (wide.h), so that no state underflows, however far below the others it is. Exponents of S_i
   count from a total of its own, the largest exponents of all messages before it added up; E and V count from their
   largest entries, which are added to log Z. In these numbers a sum of bands grows by less than `growth` bits a step:
   what is lost is below 2^-DEPTH and has no part in Z unless Z is that small itself. Only then, and if something was
   lost, is a sequence `unknown`, and the caller computes it by logarithms. */
#pragma once
#include "chain.h"
#include "wide.h"

/* The arguments, mirrored by bands.py. Sequences are numbered in the order of the batch; a thread computes those at the
   places from `first` to before `last` of `order`. Strides and places count entries; states of x are contiguous. */
typedef struct {
    int64_t steps, states, bands, first, last;
    int64_t one_matrix, logarithms, by_log; /* all steps have one matrix; values and p0 are logarithms; so are those
                                               with respect to which gradients are */
    const int64_t *offsets;                 /* (bands): o */
    const real *x;                          /* (n, v, c) */
    const int64_t *x_at;                    /* (n): place of each sequence in x; likewise below */
    int64_t x_step;
    const real *values;                     /* (n, v - 1 or 1, bands, c): V */
    const int64_t *values_at;
    int64_t values_step, values_band, values_state;
    const real *p0;                         /* (n, c) */
    const int64_t *p0_at;
    int64_t p0_state;
    const int64_t *ends;                    /* (n): number of steps of each sequence */
    const int64_t *order;                   /* (n): sequences, those that share values side by side */
    real *mantissas;                        /* (n, v, c): S, of which the exponents count from totals; null: not kept */
    whole *exponents;                       /* (n, v, c) */
    int64_t *totals;                        /* (n, v) */
    double *log_norm;                       /* (n) */
    uint8_t *state;                         /* (n): bits LOST and FAINT */
    const double *weight;                   /* (n): factor of a sequence's gradients */
    real *grad_x;                           /* (n, v, c) */
    real *grad_values;                      /* (places, v - 1, bands, c), to which gradients are added; or null */
    double *counts;                         /* (places, bands, c): likewise in place of it for one matrix; or null */
    const int64_t *grad_at;                 /* (n): place of each sequence's gradient in either */
    double *grad_p0;                        /* (n, c) */
    char *room;                             /* scratch; null asks for its size */
} Bands;

/* Something that is not 0 was lost; Z is so small that this may have mattered. A sequence with both bits is unknown. */
enum { LOST = 1, FAINT = 2, UNKNOWN = LOST | FAINT };

/* Bands whose terms are held in registers at a time. */
enum { BANDS_HELD = 8 };

typedef struct { real *m; whole *e; } Splits;
INLINE Splits splits_at(Splits row, int64_t at) { return (Splits){row.m + at, row.e + at}; }

/* A matrix: rows of `across` values, one for each of `bands` offsets, `groups` times `held`. */
typedef struct {
    int64_t bands, groups, held, across;
    const int64_t *offsets;
    Splits rows;
    const real *of; /* the values that are in `rows`, or null */
    Level level;
    int bad;
} Banded;

/* A walk through one sequence, and what its thread has split already. */
typedef struct {
    const Bands *a;
    int64_t across;
    Banded matrix, unit; /* `unit`: the matrix that changes nothing */
    Splits x, message, next;      /* messages have zeros on both sides, as far as bands reach */
    Level level;                  /* of x */
    int bad, lost;
    const real *ahead;            /* the row of x that is read after the present one */
    real *counts;                 /* (bands, across): of a matrix, for each state that is left */
    int64_t counted;              /* steps whose counts are in `counts` */
} Band_walk;

INLINE int64_t steps_in(const Bands *a, int64_t q) { return a->ends ? a->ends[q] : a->steps; }
INLINE int64_t kept_at(const Bands *a, int64_t q, int64_t step) { return (q * a->steps + step) * a->states; }
INLINE int64_t growth(const Bands *a) { return 3 + 64 - __builtin_clzll((uint64_t)a->bands); }

static void clear_splits(Splits row, int64_t count) {
    for (int64_t j = 0; j < count; j++) row.m[j] = 0, row.e[j] = (whole)NOTHING;
}

static Splits take_splits(Room *room, int64_t count) {
    Splits row = {.m = take(room, count * (int64_t)sizeof(real))};
    row.e = take(room, count * (int64_t)sizeof(whole));
    if (room->begin) clear_splits(row, count);
    return row;
}

static Banded new_banded(int64_t bands, int64_t across, Room *room) {
    int64_t held = bands < BANDS_HELD ? bands : BANDS_HELD, groups = (bands + held - 1) / held;
    int64_t *offsets = take(room, groups * held * 8);
    for (int64_t d = 0; d < groups * held && room->begin; d++) offsets[d] = 0;
    return (Banded){bands, groups, held, across, offsets, take_splits(room, groups * held * across), 0, {0}, 0};
}

/* Scratch for the passes of a thread, and how far bands reach from a state. */
static Band_walk new_bands_walk(const Bands *a, Room *room, int backward) {
    int64_t c = a->states, reach = 0, across = whole_vectors(c) + LANES;
    for (int64_t d = 0; d < a->bands; d++) {
        int64_t o = a->offsets[d] < 0 ? -a->offsets[d] : a->offsets[d];
        if (o > reach) reach = o;
    }
    reach = whole_vectors(reach);
    Band_walk w = {.a = a, .across = across};
    w.matrix = new_banded(a->bands, across, room), w.unit = new_banded(1, across, room);
    w.x = take_splits(room, across);
    w.message = splits_at(take_splits(room, across + 2 * reach), reach);
    w.next = splits_at(take_splits(room, across + 2 * reach), reach);
    int64_t counts = backward ? w.matrix.groups * w.matrix.held * across : 0;
    w.counts = take(room, counts * (int64_t)sizeof(real));
    if (!room->begin) return w;
    for (int64_t d = 0; d < a->bands; d++) ((int64_t *)w.matrix.offsets)[d] = a->offsets[d];
    for (int64_t j = 0; j < c; j++) w.unit.rows.m[j] = 1, w.unit.rows.e[j] = 0;
    for (int64_t k = 0; k < counts; k++) w.counts[k] = 0;
    return w;
}

/* The targets that a band of offset o has: from `begin` to before `stop`. */
INLINE int64_t begin_of(int64_t o) { return o > 0 ? o : 0; }
INLINE int64_t stop_of(int64_t o, int64_t c) { return o < 0 ? c + o : c; }

/* Splits the values of the matrix into step `index` + 1, unless they are split already. Forward they stand where they
   lead to, and backward where they come from. */
static void find_matrix(Band_walk *w, int64_t q, int64_t index, int backward) {
    const Bands *a = w->a;
    Banded *p = &w->matrix;
    const real *values = a->values + a->values_at[q] + (a->one_matrix ? 0 : index) * a->values_step;
    Span span = no_span((int)a->logarithms);
    if (values == p->of) return;
    for (int64_t d = 0; d < a->bands; d++) {
        int64_t o = a->offsets[d], begin = begin_of(o);
        const real *from = values + d * a->values_band + begin * a->values_state;
        extend(&span, stop_of(o, a->states) - begin, from, a->values_state, (int)a->logarithms);
    }
    p->of = values, p->bad = span.bad, p->level = level_of(span, (int)a->logarithms);
    for (int64_t d = 0; d < a->bands && !p->bad; d++) {
        int64_t o = a->offsets[d], begin = begin_of(o), count = stop_of(o, a->states) - begin;
        const real *from = values + d * a->values_band + begin * a->values_state;
        Splits row = splits_at(p->rows, d * p->across + begin - (backward ? o : 0));
        split_row(count, from, a->values_state, &p->level, row.m, row.e);
    }
}

/* Splits x of a step, whose level is added to what log Z is made of. */
static void find_emission(Band_walk *w, int64_t q, int64_t step, int side) {
    const real *x = w->a->x + w->a->x_at[q] + step * w->a->x_step;
    w->ahead = x + side * w->a->x_step;
    Span span = no_span(1);
    extend(&span, w->a->states, x, 1, 1);
    w->level = level_of(span, 1), w->bad |= span.bad, w->lost |= w->level.lost;
    if (!span.bad) split_row(w->a->states, x, 1, &w->level, w->x.m, w->x.e);
}

/* The sum of from_d values_d over a group of bands, for a vector of states. `at`: where the values of the first band
   are, `o`: from where each band takes its factor. `terms`: the summands without the digits of the values. */
INLINE Split sum_group(int held, int64_t across, Splits values, int64_t at, Splits from, const int64_t *o,
                       reals *terms) {
    wholes powers[BANDS_HELD], e = {0};
    reals m = {0};
    UNROLL for (int d = 0; d < held; d++) {
        powers[d] = load_whole(from.e + o[d]) + load_whole(values.e + at + d * across);
        e = d ? larger_whole(e, powers[d]) : powers[d];
    }
    UNROLL for (int d = 0; d < held; d++) {
        terms[d] = load(from.m + o[d]) * power_beside(powers[d], e);
        m += terms[d] * load(values.m + at + d * across);
    }
    return (Split){m, e};
}

/* From where each band of a group takes its factor: `side` is -1 for j - o, 1 for j + o. */
INLINE void read_offsets(const Banded *p, int64_t first, int held, int side, int64_t *offsets) {
    UNROLL for (int d = 0; d < held; d++) offsets[d] = side * p->offsets[first + d];
}

/* S of a step from S of the step before, whose largest exponent is `top`. Returns the new one. */
INLINE whole step_bands_forward(Band_walk *w, const Banded *p, int held, whole top, real *m, whole *e) {
    int64_t c = w->a->states, across = p->across, groups = held < BANDS_HELD ? 1 : p->groups, offsets[BANDS_HELD];
    Splits message = w->message, next = w->next, emission = w->x, values = p->rows;
    wholes high = splat_whole((whole)NOTHING), lost = {0};
    reals terms[BANDS_HELD];
    const real *ahead = w->ahead;
    read_offsets(p, 0, held, -1, offsets);
    for (int64_t j = 0; j < c; j += LANES) {
        Split u = {0}, x = load_split(emission.m + j, emission.e + j);
        __builtin_prefetch(ahead + j);
        for (int64_t g = 0; g < groups; g++) {
            if (groups > 1) read_offsets(p, g * held, held, -1, offsets);
            Split more = sum_group(held, across, values, g * held * across + j, splits_at(message, j), offsets, terms);
            u = g ? plus_split(u, more) : more;
        }
        Split s = settled_split(u.m * x.m, u.e + x.e - top, &lost);
        store_split(next.m + j, next.e + j, s);
        if (m) write_some(m + j, s.m, c - j), write_some_whole(e + j, s.e, c - j);
        high = larger_whole(high, s.e);
    }
    w->lost |= any(lost), w->message = next, w->next = message;
    return highest(high);
}

static whole step_bands_forward_by(Band_walk *w, const Banded *p, whole top, real *m, whole *e) {
    switch (p->held) {
    case 1: return step_bands_forward(w, p, 1, top, m, e);
    case 2: return step_bands_forward(w, p, 2, top, m, e);
    case 3: return step_bands_forward(w, p, 3, top, m, e);
    case 4: return step_bands_forward(w, p, 4, top, m, e);
    case 5: return step_bands_forward(w, p, 5, top, m, e);
    case 6: return step_bands_forward(w, p, 6, top, m, e);
    case 7: return step_bands_forward(w, p, 7, top, m, e);
    default: return step_bands_forward(w, p, BANDS_HELD, top, m, e);
    }
}

/* The largest exponent of a message of c states, and the sum of its entries over 2 to the power of that. */
static whole top_of_splits(int64_t c, const real *m, const whole *e, double *sum) {
    wholes high = splat_whole((whole)NOTHING);
    reals sums = {0};
    for (int64_t j = 0; j < c; j += LANES)
        high = larger_whole(high, read_some_whole(e + j, c - j, (whole)NOTHING));
    whole top = highest(high);
    for (int64_t j = 0; j < c; j += LANES)
        sums += read_some(m + j, 1, c - j, 0) * power(read_some_whole(e + j, c - j, (whole)NOTHING) - top);
    *sum = (double)total(sums);
    return top;
}

INLINE void add_level(Sum *log_norm, int64_t *exponent, const Level *level) {
    add(log_norm, (double)level->shift);
    *exponent += level->exponent;
}

static void walk_bands_forward(Band_walk *w, int64_t q) {
    const Bands *a = w->a;
    int64_t c = a->states, total = 0, exponent = 0;
    Sum log_norm = {0, 0};
    Span span = no_span((int)a->logarithms);
    extend(&span, c, a->p0 + a->p0_at[q], a->p0_state, (int)a->logarithms);
    Level level = level_of(span, (int)a->logarithms);
    whole top = 0;
    w->bad = span.bad, w->lost = level.lost;
    add_level(&log_norm, &exponent, &level);
    if (!w->bad) split_row(c, a->p0 + a->p0_at[q], a->p0_state, &level, w->message.m, w->message.e);
    for (int64_t step = 0; step < steps_in(a, q) && !w->bad; step++) {
        if (step > 0) {
            find_matrix(w, q, step - 1, 0);
            w->bad |= w->matrix.bad, w->lost |= w->matrix.level.lost;
            add_level(&log_norm, &exponent, &w->matrix.level);
        }
        find_emission(w, q, step, 1);
        if (w->bad) break;
        add_level(&log_norm, &exponent, &w->level);
        real *m = a->mantissas ? a->mantissas + kept_at(a, q, step) : 0;
        whole *e = a->mantissas ? a->exponents + kept_at(a, q, step) : 0;
        total += top;
        if (a->mantissas) a->totals[q * a->steps + step] = total;
        top = step_bands_forward_by(w, step > 0 ? &w->matrix : &w->unit, top, m, e);
        if (top == (whole)NOTHING) top = 0; /* no path: all entries stay 0 */
    }
    double sum = 0;
    if (!w->bad) top = top_of_splits(c, w->message.m, w->message.e, &sum);
    int deep = sum == 0 || total + top < 64 + steps_in(a, q) * growth(a) - DEPTH;
    a->state[q] = w->bad ? 0 : (uint8_t)((w->lost ? LOST : 0) | (deep ? FAINT : 0));
    add_exponent(&log_norm, total + top + exponent);
    add(&log_norm, logarithm(sum));
    a->log_norm[q] = w->bad ? __builtin_nan("") : sum == 0 ? -__builtin_inf() : value_of(log_norm);
}

/* log Z, and S if it is kept. */
EXPORT int64_t EXPORTED(logchain_bands_forward)(const Bands *a) {
    Room room = {.begin = a->room};
    Band_walk w = new_bands_walk(a, &room, 0);
    if (!a->room) return room.bytes;
    for (int64_t place = a->first; place < a->last; place++) walk_bands_forward(&w, a->order[place]);
    return 0;
}
