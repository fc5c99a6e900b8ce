/* Entropies of paths, and divergences between the paths of two chains, in one walk forward:

       H = E[-log w] + log Z        KL = E[log w - log w'] - log Z + log Z'        expectations under the first chain

   Beside its forward message S, a walk carries A = S E[t | the state], where t is -log w, or log w - log w' of two
   chains, of the path up to there, without what has been taken out of S and of S':

       U = S P      V = A P + S (P d)      S <- U E      A <- V E + S e      d = -log P, or log P - log P'; e likewise of E

   What both log Z and the expectation contain is in neither, so that nothing large is subtracted. All is float64, of
   operands in either format. Sequences that are lossy, or of which the second chain forbids, or hardly allows, what the
   first may do, are left to the caller. */
#pragma once
#include "forward.h"

/* Steps after which the mean of A / S is taken out of it: numbers that are far larger would round more. */
enum { CENTRED = 64 };

/* Columns of a matrix that lie next to each other, row by row: rows of a wide one would be in too many pages. */
enum { PANEL = VECTORS * LANES };

/* Weights of the second chain from this, relative to its largest, are what they are, and not raised. */
#define ALLOWED 0x1p-900

typedef struct {
    Walk p, q;            /* without a second chain, q.a is null */
    real *terms;          /* (count, width): A */
    real *panels;         /* (panels, 2 c, PANEL): P, and P d below it */
    real *rows;           /* (group, 2 c): S beside A, in the order of panels */
    real *sums;           /* (group, width): V */
    Sum *means;           /* (count): what has been taken out of A / S */
} Pair;

/* d, from weights of both chains, or of one; `forbidden` where the second has less than `least`. */
INLINE reals log_ratio(reals p, const real *other, real least, wholes *forbidden) {
    if (!other) return -finite_logarithm_of(p, 0);
    reals q = load(other);
    *forbidden |= (p > 0) & ~(q >= least);
    return finite_logarithm_of(p / q, 0);
}

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
INLINE reals load_singles(const float *from) {
    Floats a;
    __builtin_memcpy(&a, from, sizeof a);
    return __builtin_convertvector(a, reals);
}

INLINE int64_t panels_of(int64_t width) { return (width + PANEL - 1) / PANEL; }
INLINE int64_t width_of_panel(int64_t width) { return width < PANEL ? width : PANEL; }
INLINE int64_t start_of_panel(int64_t k, int64_t width) {
    return (k + 1) * PANEL > width ? width - width_of_panel(width) : k * PANEL;
}

/* P, and P d below it, of a step. True where the second chain has too little weight somewhere. */
static int arrange(Pair *w, int64_t step) {
    Matrix *m = &w->p.matrix, *other = &w->q.matrix;
    int64_t c = m->c, across = width_of_panel(m->width);
    wholes forbidden = {0};
    prepare(w->p.a, w->p.set, step, m), look(m), rescale(m);
    if (w->q.a) prepare(w->q.a, w->q.set, step, other), look(other), rescale(other);
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

/* A matrix as it is read, and bounds of its entries. */
typedef struct { const real *entries; int64_t begin, row; reals high, low; } Reading;

INLINE Reading reading_of(const Walk *w, int64_t step) {
    const Chain *a = w->a;
    int64_t begin = first_matrix(a, w->set) + (step - 1) * a->bulk_step;
    return (Reading){a->bulk, begin, a->bulk_from, {0}, all(INFINITE)};
}
INLINE reals read_entries(const int single, Reading *m, int64_t k, int64_t j) {
    int64_t at = m->begin + k * m->row + j;
    reals p = single ? load_singles((const float *)m->entries + at) : load(m->entries + at);
    m->high = larger(p, m->high), m->low = where((p < m->low) & (p > 0), p, m->low);
    return p;
}
INLINE int has_been_read(Matrix *m, const Reading *from) {
    *m = (Matrix){.c = m->c, .width = m->width, .room = m->room, .looked = 1, .high = largest(from->high),
                  .low = least(from->low)};
    return !is_far(m);
}

/* The same of one row by matrices of its own, in one reading of them; 0, and nothing is done, where one is to be
   rescaled. `forbidden`: the second chain has too little weight somewhere. */
INLINE int multiply_once(const int two, const int single, Pair *w, int64_t step, const real *states, const real *terms,
                         const real *others, int *forbidden) {
    int64_t c = w->p.a->states;
    Reading p = reading_of(&w->p, step), q = two ? reading_of(&w->q, step) : p;
    wholes none = {0};
    for (int64_t b = 0; b < vectors_of(c); b++) {
        int64_t j = start_of(b, c);
        reals u = {0}, v = {0}, other = {0};
        for (int64_t k = 0; k < c; k++) {
            reals entry = read_entries(single, &p, k, j), divisor = two ? read_entries(single, &q, k, j) : entry;
            if (two) other += others[k] * divisor, none |= (entry > 0) & ~(divisor >= ALLOWED);
            reals log = finite_logarithm_of(two ? entry / divisor : entry, 0);
            u += states[k] * entry;
            v += (two ? terms[k] + states[k] * log : terms[k] - states[k] * log) * entry;
        }
        store(w->p.sums + j, u), store(w->sums + j, v);
        if (two) store(w->q.sums + j, other);
    }
    *forbidden = any(none);
    return has_been_read(&w->p.matrix, &p) & (!two || has_been_read(&w->q.matrix, &q));
}

/* log E of a row is x - top - nats, with what scales it. */
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
static int weigh_terms(int64_t width, const real *v, const real *u, const real *s, Emission p, Emission q, real *out) {
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

/* A of a first message; likewise. */
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

/* U of up to a group of rows becomes S. */
static void settle_all(Walk *w, int64_t place, int64_t rows, int64_t step, real common) {
    for (int64_t done = 0; done < rows; done += LANES)
        settle(w, place + done, rows - done < LANES ? rows - done : LANES, step, w->sums + done * w->width, common);
}

/* Whether every step of a chain has a matrix that is read as it lies. */
INLINE int is_read(const Chain *a) {
    return !a->one_matrix && !a->logarithms && a->states >= LANES && a->bulk_to == 1;
}

/* A step of up to a group of places. True where the second chain forbids too much of them all. */
static int step_pair(Pair *w, int64_t place, int64_t rows, int64_t step, int arranged, real common) {
    Walk *p = &w->p, *q = &w->q;
    int64_t width = p->width, own[GROUP], ahead[GROUP];
    const real *states = state_at(p, place, step - 1), *others = q->a ? state_at(q, place, step - 1) : 0;
    real *terms = w->terms + place * width;
    int lost = 0, single = is_single(p->a), once = p->count == 1 && is_read(p->a);
    if (q->a) once = once && is_read(q->a) && is_single(q->a) == single;
    if (once && q->a) once = single ? multiply_once(1, 1, w, step, states, terms, others, &lost)
                                    : multiply_once(1, 0, w, step, states, terms, others, &lost);
    else if (once) once = single ? multiply_once(0, 1, w, step, states, terms, others, &lost)
                                 : multiply_once(0, 0, w, step, states, terms, others, &lost);
    if (!once) {
        lost = arranged ? 0 : arrange(w, step);
        multiply_pair(w, rows, states, terms, others);
    }
    for (int64_t r = 0; r < rows; r++) {
        own[r] = p->exponents[place + r] + p->matrix.exponent;
        ahead[r] = q->a ? q->exponents[place + r] + q->matrix.exponent : 0;
    }
    settle_all(p, place, rows, step, common);
    if (q->a) settle_all(q, place, rows, step, common);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = r * width;
        Emission e = emission_of(p, place + r, step, own[r]), other = {0};
        if (q->a) other = emission_of(q, place + r, step, ahead[r]);
        if (weigh_terms(width, w->sums + at, p->sums + at, state_at(p, place + r, step), e, other, terms + at))
            p->a->lossy[sequence_of(p, place + r)] = 1;
    }
    return lost;
}

/* The sums of S and of A of a place. */
static void add_up(const Pair *w, int64_t place, int64_t step, double *weight, double *terms) {
    const real *row = w->terms + place * w->p.width, *state = state_at(&w->p, place, step);
    *weight = *terms = 0;
    for (int64_t j = 0; j < w->p.a->states; j++) *weight += state[j], *terms += row[j];
}

static void centre(Pair *w, int64_t place, int64_t step) {
    double weight, terms;
    real *row = w->terms + place * w->p.width;
    const real *state = state_at(&w->p, place, step);
    add_up(w, place, step, &weight, &terms);
    double mean = weight > 0 ? terms / weight : 0;
    add(&w->means[place], mean);
    for (int64_t j = 0; j < w->p.a->states; j++) row[j] -= mean * state[j];
}

/* log of a sum of states, without what was taken out of them. */
INLINE double log_sum(double sum) {
    int64_t exponent;
    double rest = mantissa(sum, &exponent);
    return (double)(exponent - TOP) * 0.69314718055994531 + logarithm(rest);
}

INLINE double last_sum(const Walk *w, int64_t place, int64_t step) {
    const real *state = state_at(w, place, step);
    double sum = 0;
    for (int64_t j = 0; j < w->a->states; j++) sum += state[j];
    return sum;
}

/* The entropy or the divergence of a place whose last step this is; 0 where no path is possible. */
static void finish_pair(Pair *w, int64_t place, int64_t step) {
    double weight, terms;
    int64_t q = sequence_of(&w->p, place);
    finish(&w->p, place, step);
    if (w->q.a) finish(&w->q, place, step);
    add_up(w, place, step, &weight, &terms);
    Sum entropy = w->means[place];
    add(&entropy, terms / weight);
    add(&entropy, w->q.a ? log_sum(last_sum(&w->q, place, step)) - log_sum(weight) : log_sum(weight));
    w->p.a->value[q] = weight > 0 ? value_of(entropy) : 0;
    if (w->q.a) w->p.a->lossy[q] |= w->q.a->lossy[q];
}

static void walk_pair(Pair *w) {
    Walk *p = &w->p, *both[] = {p, &w->q};
    const Chain *a = p->a;
    real common = ordinary();
    int64_t count = active(p, p->count, 0), one = a->one_matrix && (!w->q.a || w->q.a->one_matrix);
    for (int k = 0; k < 2 && both[k]->a; k++) {
        for (int64_t place = 0; place < p->count; place++) {
            both[k]->shifts[place] = (Sum){0, 0}, both[k]->exponents[place] = 0, both[k]->deep[place] = 0;
            both[k]->a->lossy[sequence_of(p, place)] = 0;
        }
        start(both[k], count, common);
    }
    for (int64_t place = 0; place < count; place++) {
        const real *state = state_at(p, place, 0);
        w->means[place] = (Sum){0, 0};
        if (first_terms(p->width, state, w->q.a ? state_at(&w->q, place, 0) : 0, w->terms + place * p->width))
            a->lossy[sequence_of(p, place)] = 1;
    }
    for (int64_t step = 0; step < a->steps && count > 0; step++) {
        for (int64_t place = 0; place < count && step > 0; place += GROUP) {
            int64_t rows = count - place < GROUP ? count - place : GROUP;
            int arranged = place > 0 || (one && step > 1);
            if (step_pair(w, place, rows, step, arranged, common))
                for (int64_t at = 0; at < count; at++) a->lossy[sequence_of(p, at)] = 1;
        }
        for (int64_t place = 0; place < count && step % CENTRED == CENTRED - 1; place++) centre(w, place, step);
        int64_t still = step + 1 == a->steps ? 0 : active(p, count, step + 1);
        for (int64_t place = still; place < count; place++) finish_pair(w, place, step);
        count = still;
    }
}

INLINE int64_t size_of_walk(const Chain *a) {
    return a->one_matrix && a->members > GROUP ? GROUP : a->members;
}

/* Entropies of all sequences, or divergences from the chain at `other`, into `value`; how many are left to the caller. */
EXPORT int64_t logchain_entropy64(const Chain *a) {
    int64_t lossy = 0, sequences = a->sets * a->members, size = size_of_walk(a), width = width_of(a), bytes = 8,
            panel = panels_of(width) * width_of_panel(width) * a->states;
    char *room = a->room;
    Chain chains[2] = {*a};
    if (a->other) chains[1] = *(const Chain *)a->other;
    Pair w = {.q.a = 0};
    for (int k = 0; k <= (a->other != 0); k++) {
        chains[k].log_norm = take(&room, sequences * 8);
        if (k) chains[k].lossy = take(&room, sequences);
        Walk *walk = k ? &w.q : &w.p;
        *walk = new_walk(chains + k, GROUP, size, &room);
        take_states(walk, GROUP, size, &room);
    }
    w.terms = take(&room, size * width * bytes);
    w.panels = take(&room, 2 * panel * bytes);
    w.sums = take(&room, GROUP * width * bytes), w.rows = take(&room, 2 * GROUP * a->states * bytes);
    w.means = take(&room, size * (int64_t)sizeof(Sum));
    for (int64_t q = a->first; q < a->last;) {
        int64_t begin = q % a->members, behind = a->members - begin < a->last - q ? a->members : begin + a->last - q;
        w.p.set = w.q.set = q / a->members, w.p.order = w.q.order = order_of(a, w.p.set);
        for (int64_t place = begin; place < behind; place += size) {
            w.p.begin = w.q.begin = place, w.p.count = w.q.count = behind - place < size ? behind - place : size;
            walk_pair(&w);
        }
        for (int64_t place = begin; place < behind; place++) lossy += a->lossy[w.p.set * a->members + place];
        q += behind - begin;
    }
    return lossy;
}

/* Bytes of scratch for them. */
EXPORT int64_t logchain_entropy_room64(const Chain *a) {
    int64_t width = width_of(a), size = size_of_walk(a), sequences = a->sets * a->members;
    int64_t panel = panels_of(width) * width_of_panel(width) * a->states;
    int64_t walk = (width * width + (2 * GROUP + 2 * size + 1) * width) * 8 + size * 25 + sequences * 17;
    return 2 * walk + (2 * panel + (size + 3 * GROUP) * width) * 8 + size * 16 + 32 * 64;
}
