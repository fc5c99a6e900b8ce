/* Entropies of paths, and divergences between the paths of two chains, in one forward pass in float64:

       H = E[-log w] + log Z        KL = E[log w - log w'] - log Z + log Z'        expectations under the first chain

   Beside its forward message S, the pass carries A = S E[t | state], where t is -log w, or log w - log w' for two
   chains, of the path so far, less the scales of S and S':

       U = S P      V = A P + S (P d)      S <- U E      A <- V E + S e

   with d = -log P, or log P - log P', and e likewise of E. Scales would cancel between log Z and the expectation: both
   leave them out, so that no large numbers are subtracted. Operands are float64 or float32. Lossy sequences, and those
   where the second chain forbids, or hardly allows, what the first may do, or where A overflows, are left to the caller.

   Where messages enter, in float64, the values are those of the steps behind them: A begins with 0. The terms that leave
   are, for each last state, A / S and the scales. */
#pragma once
#include "forward.h"

/* Steps between two subtractions of the mean of A / S: large A would round more. */
enum { CENTRED = 64 };

/* Columns per panel: rows of a wide matrix would be in too many memory pages. */
enum { PANEL = VECTORS * LANES };

/* Weights of the second chain above this, relative to its largest, are not raised ones. */
#define ALLOWED 0x1p-900

typedef struct {
    Walk p, q;    /* the two chains; q.a is null without a second */
    real *terms;  /* (count, width): A */
    real *panels; /* (panels, 2 c, width_of_panel): P, and P d below it */
    real *rows;   /* (group, 2 c): A beside S, to multiply panels with */
    real *sums;   /* (group, width): V */
    Sum *means;   /* (count): means taken out of A / S */
} Pair;

/* d, from weights of both chains or of one. `forbidden`: lanes where the second chain has less than `least`. */
INLINE reals log_ratio(reals p, const real *other, real least, wholes *forbidden) {
    if (!other) return -finite_logarithm_of(p, 0);
    reals q = load(other);
    *forbidden |= (p > 0) & ~(q >= least);
    return finite_logarithm_of(p / q, 0);
}

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
INLINE reals load_float32(const float *from) {
    Floats a;
    __builtin_memcpy(&a, from, sizeof a);
    return __builtin_convertvector(a, reals);
}

INLINE int64_t panels_of(int64_t width) { return (width + PANEL - 1) / PANEL; }
INLINE int64_t width_of_panel(int64_t width) { return width < PANEL ? width : PANEL; }
INLINE int64_t start_of_panel(int64_t k, int64_t width) {
    return (k + 1) * PANEL > width ? width - width_of_panel(width) : k * PANEL;
}

/* Panels of a step. True where the second chain has too little weight somewhere. */
static int prepare_panels(Pair *w, int64_t step) {
    Matrix *m = &w->p.matrix, *other = &w->q.matrix;
    int64_t c = m->c, across = width_of_panel(m->width);
    wholes forbidden = {0};
    prepare(w->p.a, w->p.set, step, m), rescale(m);
    if (w->q.a) prepare(w->q.a, w->q.set, step, other), rescale(other);
    for (int64_t panel = 0; panel < panels_of(m->width); panel++)
        for (int64_t k = 0; k < c; k++)
            for (int64_t b = 0; b < vectors_of(across); b++) {
                int64_t at = start_of(b, across), j = start_of_panel(panel, m->width) + at;
                const real *q = w->q.a ? other->entries + k * other->row + j : 0;
                reals p = load(m->entries + k * m->row + j);
                real *to = w->panels + (2 * panel * c + k) * across + at;
                store(to, p), store(to + c * across, p * log_ratio(p, q, ALLOWED, &forbidden));
            }
    return any(forbidden);
}

/* Products of up to a group of rows, `row` apart, with a matrix. */
INLINE void multiply_group(int64_t rows, int64_t depth, int64_t width, const real *a, int64_t row, const real *b,
                           int64_t b_row, real *out, int64_t out_row) {
    if (rows > 1) multiply((Product){rows, depth, width, a, row, 1, b, b_row, out, out_row});
    else row_times(depth, width, a, b, b_row, out);
}

/* U and V of up to a group of rows, and U of the second chain. */
static void multiply_pair(Pair *w, int64_t rows, const real *states, const real *terms, const real *others) {
    int64_t c = w->p.a->states, width = w->p.width, across = width_of_panel(width);
    const Matrix *other = &w->q.matrix;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < c; k++) {
            w->rows[(2 * r) * c + k] = terms[r * width + k];
            w->rows[(2 * r + 1) * c + k] = states[r * width + k];
        }
    for (int64_t panel = 0; panel < panels_of(width); panel++) {
        int64_t j = start_of_panel(panel, width);
        const real *p = w->panels + 2 * panel * c * across;
        multiply_group(rows, c, across, w->rows + c, 2 * c, p, across, w->p.sums + j, width);
        multiply_group(rows, 2 * c, across, w->rows, 2 * c, p, across, w->sums + j, width);
    }
    if (others) multiply_group(rows, c, width, others, width, other->entries, other->row, w->q.sums, width);
}

/* A matrix while its entries are read: first entry, stride, bounds of the entries so far, and which are below 0. */
typedef struct { const real *entries; int64_t begin, row; reals high, low; wholes below; } Reading;

INLINE Reading reading_of(const Walk *w, int64_t step) {
    const Chain *a = w->a;
    int64_t begin = first_matrix(a, w->set) + (step - 1) * a->bulk_step;
    return (Reading){a->bulk, begin, a->bulk_from, {0}, splat(INFINITE), {0}};
}
INLINE reals read_entries(const int float32, Reading *m, int64_t k, int64_t j) {
    int64_t at = m->begin + k * m->row + j;
    reals p = float32 ? load_float32((const float *)m->entries + at) : load(m->entries + at);
    m->below |= p < 0, m->high = larger(p, m->high), m->low = where((p < m->low) & (p > 0), p, m->low);
    return p;
}
INLINE int set_bounds(Matrix *m, const Reading *from) {
    *m = (Matrix){.c = m->c, .width = m->width, .room = m->room, .has_high = 1, .has_low = 1, .high = largest(from->high),
                  .low = least(from->low)};
    return !needs_rescaling(m);
}

/* U and V of one row, reading a step's own matrix once; 0, and the result is void, if a matrix needs rescaling.
   `forbidden`: the second chain has too little weight somewhere. */
INLINE int multiply_once(const int two, const int float32, Pair *w, int64_t step, const real *states, const real *terms,
                         const real *others, int *forbidden) {
    int64_t c = w->p.a->states;
    Reading p = reading_of(&w->p, step), q = two ? reading_of(&w->q, step) : p;
    wholes none = {0};
    for (int64_t b = 0; b < vectors_of(c); b++) {
        int64_t j = start_of(b, c);
        reals u = {0}, v = {0}, other = {0};
        for (int64_t k = 0; k < c; k++) {
            reals entry = read_entries(float32, &p, k, j), divisor = two ? read_entries(float32, &q, k, j) : entry;
            if (two) other += others[k] * divisor, none |= (entry > 0) & ~(divisor >= ALLOWED);
            reals log = finite_logarithm_of(two ? entry / divisor : entry, 0);
            u += states[k] * entry;
            v += (two ? terms[k] + states[k] * log : terms[k] - states[k] * log) * entry;
        }
        store(w->p.sums + j, u), store(w->sums + j, v);
        if (two) store(w->q.sums + j, other);
    }
    *forbidden = any(none);
    return set_bounds(&w->p.matrix, &p) & (!two || set_bounds(&w->q.matrix, &q));
}

/* log E plus the scale of a row: x - top - nats. */
typedef struct { const real *x; real top, nats; } Emission;

INLINE Emission emission_of(const Walk *w, int64_t place, int64_t step, int64_t exponent) {
    Emission emission;
    rows_of_x(w, place, 1, step, &emission.x);
    emission.top = top_of(emission.x, w->width);
    emission.nats = (real)(w->exponents[place] - exponent) * (real)0.69314718055994531;
    return emission;
}
INLINE reals log_emission(Emission a, int64_t j) { return load(a.x + j) - a.top - a.nats; }

/* A of a row, from V, U and S; true where the second chain forbids a state that has a weight. */
static int next_terms(int64_t width, const real *v, const real *u, const real *s, Emission p, Emission q, real *out) {
    wholes forbidden = {0};
    for (int64_t b = 0; b < vectors_of(width); b++) {
        int64_t j = start_of(b, width);
        reals state = load(s + j), e = -log_emission(p, j);
        if (q.x) {
            forbidden |= (state > 0) & (load(q.x + j) == -INFINITE);
            e = -e - log_emission(q, j);
        }
        reals sum = load(v + j) * (state / load(u + j));
        store(out + j, where(state == 0, (reals){0}, sum + state * e));
    }
    return any(forbidden);
}

/* A of a first message; true where the second chain forbids a state that has a weight. */
static int first_terms(int64_t width, const real *s, const real *other, real *out) {
    wholes forbidden = {0};
    real down = power_of_two(-TOP), up[LANES], least_allowed = ALLOWED;
    for (int64_t b = 0; b < vectors_of(width); b++) {
        int64_t j = start_of(b, width);
        reals state = load(s + j);
        if (other) store(up, load(other + j) * down);
        reals d = log_ratio(state * down, other ? up : 0, least_allowed, &forbidden);
        store(out + j, where(state == 0, (reals){0}, state * d));
    }
    return any(forbidden);
}

/* S of up to a group of rows, from U. */
static void settle_rows(Walk *w, int64_t place, int64_t rows, int64_t step, real safe_entry) {
    for (int64_t done = 0; done < rows; done += LANES)
        settle(w, place + done, rows - done < LANES ? rows - done : LANES, step, w->sums + done * w->width, safe_entry);
}

/* Whether each step has a matrix of its own that can be read in place. */
INLINE int is_read(const Chain *a) {
    return !a->one_matrix && !a->logarithms && a->states >= LANES && a->bulk_to == 1;
}

/* One step of up to a group of places. True where the second chain has too little weight somewhere. */
static int step_places_pair(Pair *w, int64_t place, int64_t rows, int64_t step, int has_panels, real safe_entry) {
    Walk *p = &w->p, *q = &w->q;
    int64_t width = p->width, own[GROUP], other_exponents[GROUP];
    const real *states = state_at(p, place, step - 1), *others = q->a ? state_at(q, place, step - 1) : 0;
    real *terms = w->terms + place * width;
    int lost = 0, float32 = is_float32(p->a), once = p->count == 1 && is_read(p->a);
    if (q->a) once = once && is_read(q->a) && is_float32(q->a) == float32;
    if (once && q->a) once = float32 ? multiply_once(1, 1, w, step, states, terms, others, &lost)
                                     : multiply_once(1, 0, w, step, states, terms, others, &lost);
    else if (once) once = float32 ? multiply_once(0, 1, w, step, states, terms, others, &lost)
                                  : multiply_once(0, 0, w, step, states, terms, others, &lost);
    if (!once) {
        lost = has_panels ? 0 : prepare_panels(w, step);
        multiply_pair(w, rows, states, terms, others);
    }
    for (int64_t r = 0; r < rows; r++) {
        own[r] = p->exponents[place + r] + p->matrix.exponent;
        other_exponents[r] = q->a ? q->exponents[place + r] + q->matrix.exponent : 0;
    }
    settle_rows(p, place, rows, step, safe_entry);
    if (q->a) settle_rows(q, place, rows, step, safe_entry);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = r * width;
        Emission e = emission_of(p, place + r, step, own[r]), other = {0};
        if (q->a) other = emission_of(q, place + r, step, other_exponents[r]);
        if (next_terms(width, w->sums + at, p->sums + at, state_at(p, place + r, step), e, other, terms + at))
            p->a->lossy[sequence_of(p, place + r)] = 1;
    }
    return lost;
}

static void subtract_mean(Pair *w, int64_t place, int64_t step) {
    int64_t c = w->p.a->states;
    real *row = w->terms + place * w->p.width;
    const real *state = state_at(&w->p, place, step);
    double weight = sum_of_row(c, state), mean = weight > 0 ? sum_of_row(c, row) / weight : 0;
    add(&w->means[place], mean);
    for (int64_t j = 0; j < c; j++) row[j] -= mean * state[j];
}

/* log of a sum of S over 2^TOP. */
INLINE double log_sum(double sum) {
    int64_t exponent;
    double part = mantissa(sum, &exponent);
    return (double)(exponent - TOP) * 0.69314718055994531 + logarithm(part);
}

/* log Z, or log Z' - log Z, without scales. */
INLINE double log_sums(const Pair *w, int64_t place, int64_t step) {
    double sum = log_sum(sum_of_row(w->p.a->states, state_at(&w->p, place, step)));
    return w->q.a ? log_sum(sum_of_row(w->p.a->states, state_at(&w->q, place, step))) - sum : sum;
}

/* A of a message that has entered; its sum is no part of the value. */
static void enter_terms(Pair *w, int64_t place) {
    clear(w->p.width, w->terms + place * w->p.width);
    add(&w->means[place], -log_sums(w, place, 0));
}

/* The entropy or divergence of a place after its last step; 0 where no path is possible. */
static void finish_pair(Pair *w, int64_t place, int64_t step) {
    const Chain *a = w->p.a;
    int64_t q = sequence_of(&w->p, place), c = a->states;
    const real *state = state_at(&w->p, place, step), *terms = w->terms + place * w->p.width;
    double weight = sum_of_row(c, state);
    finish(&w->p, place, step);
    if (w->q.a) finish(&w->q, place, step);
    Sum entropy = w->means[place];
    add(&entropy, log_sums(w, place, step));
    for (int64_t j = 0; j < c && a->terms; j++)
        a->terms[q * c + j] = state[j] > 0 ? value_of(entropy) + terms[j] / state[j] : 0;
    add(&entropy, sum_of_row(c, terms) / weight);
    a->value[q] = weight > 0 ? value_of(entropy) : 0;
    if (w->q.a) a->lossy[q] |= w->q.a->lossy[q];
    if (!(a->value[q] - a->value[q] == 0)) a->lossy[q] = 1; /* A has overflowed, as a ratio of weights may make it */
}

static void walk_pair(Pair *w) {
    Walk *p = &w->p, *both[] = {p, &w->q};
    const Chain *a = p->a;
    real safe_entry = least_safe_entry();
    int64_t count = active(p, p->count, 0), one = a->one_matrix && (!w->q.a || w->q.a->one_matrix);
    for (int k = 0; k < 2 && both[k]->a; k++) {
        for (int64_t place = 0; place < p->count; place++) {
            both[k]->shifts[place] = (Sum){0, 0}, both[k]->exponents[place] = 0, both[k]->raised[place] = 0;
            both[k]->a->lossy[sequence_of(p, place)] = 0;
        }
        start_places(both[k], count, safe_entry);
    }
    for (int64_t place = 0; place < count; place++) {
        const real *state = state_at(p, place, 0);
        w->means[place] = (Sum){0, 0};
        if (a->entering) enter_terms(w, place);
        else if (first_terms(p->width, state, w->q.a ? state_at(&w->q, place, 0) : 0, w->terms + place * p->width))
            a->lossy[sequence_of(p, place)] = 1;
    }
    for (int64_t step = 0; step < a->steps && count > 0; step++) {
        for (int64_t place = 0; place < count && step > 0; place += GROUP) {
            int64_t rows = count - place < GROUP ? count - place : GROUP;
            int has_panels = place > 0 || (one && step > 1);
            if (step_places_pair(w, place, rows, step, has_panels, safe_entry))
                for (int64_t at = 0; at < count; at++) a->lossy[sequence_of(p, at)] = 1;
        }
        for (int64_t place = 0; place < count && step % CENTRED == CENTRED - 1; place++) subtract_mean(w, place, step);
        int64_t still = step + 1 == a->steps ? 0 : active(p, count, step + 1);
        for (int64_t place = still; place < count; place++) finish_pair(w, place, step);
        count = still;
    }
}

/* Entropies, or divergences from the chain at `other`, into `value`; returns how many are left to the caller. */
EXPORT int64_t logchain_entropy64(const Chain *a) {
    int64_t sequences = a->sets * a->members, size = most_places(a, GROUP), width = width_of(a), bytes = 8,
            panel = panels_of(width) * width_of_panel(width) * a->states;
    Room room = {.begin = a->room};
    Chain chains[2] = {*a};
    if (a->other) chains[1] = *(const Chain *)a->other;
    Pair w = {.q.a = 0};
    for (int k = 0; k <= (a->other != 0); k++) {
        chains[k].log_norm = take(&room, sequences * 8);
        if (k) chains[k].lossy = take(&room, sequences);
        Walk *walk = k ? &w.q : &w.p;
        *walk = new_walk(chains + k, GROUP, size, &room);
        new_states(walk, GROUP, size, &room);
    }
    w.terms = take(&room, size * width * bytes);
    w.panels = take(&room, 2 * panel * bytes);
    w.sums = take(&room, GROUP * width * bytes), w.rows = take(&room, 2 * GROUP * a->states * bytes);
    w.means = take(&room, size * (int64_t)sizeof(Sum));
    if (!a->room) return room.bytes;
    for (int64_t q = a->first; q < a->last; q += w.p.count) {
        enter_set(&w.p, q, size);
        w.q.set = w.p.set, w.q.order = w.p.order, w.q.begin = w.p.begin, w.q.count = w.p.count;
        walk_pair(&w);
    }
    return lossy_places(a);
}
