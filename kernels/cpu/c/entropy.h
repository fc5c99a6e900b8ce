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

/* Weights of the second chain from this, relative to its largest, are what they are, and not raised. */
#define ALLOWED 0x1p-900

/* Rows that meet a pair of matrices together: more of them where these do not stay near. */
INLINE int64_t rows_of_pair(const Chain *a) { return a->states >= 128 ? 4 * GROUP : GROUP; }

typedef struct {
    Walk p, q;        /* without a second chain, q.a is null */
    real *rows;       /* (count, 2 width): A, and S behind its c entries */
    real *stacked;    /* (2 c, width): P, and P d below it */
    real *sums;       /* (group, width): V */
    Sum *means;       /* (count): what has been taken out of A / S */
} Pair;

/* d, from weights of both chains, or of one; `forbidden` where the second has too little. */
INLINE reals log_ratio(reals p, const real *other, double scale, wholes *forbidden) {
    if (!other) return -logarithm_of(p, scale);
    reals q = load(other);
    *forbidden |= (p > 0) & ~(q >= ALLOWED * power_of_two((int64_t)scale));
    return logarithm_of(p, scale) - logarithm_of(q, scale);
}

/* P and P d of a step. True where the second chain has too little weight somewhere. */
static int stack(Pair *w, int64_t step) {
    Matrix *m = &w->p.matrix, *other = &w->q.matrix;
    int64_t c = m->c, width = m->width;
    wholes forbidden = {0};
    prepare(w->p.a, w->p.set, step, m), look(m), rescale(m);
    if (w->q.a) prepare(w->q.a, w->q.set, step, other), look(other), rescale(other);
    for (int64_t k = 0; k < c; k++)
        for (int64_t b = 0; b < vectors_of(width); b++) {
            int64_t j = start_of(b, width);
            const real *q = w->q.a ? other->entries + k * other->row + j : 0;
            reals p = load(m->entries + k * m->row + j), d = log_ratio(p, q, 0, &forbidden);
            store(w->stacked + k * width + j, p);
            store(w->stacked + (c + k) * width + j, where(p == 0, (reals){0}, p * d));
        }
    m->entries = w->stacked, m->row = width;
    return any(forbidden);
}

/* log E of a row is x - top - nats, with what scales it. */
typedef struct { const real *x; real top, nats; } Emission;

INLINE Emission emission_of(const Walk *w, int64_t place, int64_t step, int64_t exponent) {
    Emission found;
    rows_of_x(w, place, 1, step, &found.x);
    found.top = top_of(found.x, w->width);
    found.nats = (real)(w->exponents[place] - exponent) * (real)0.69314718055994531;
    return found;
}
INLINE reals log_emission(Emission a, int64_t j) { return load(a.x + j) - a.top - a.nats; }

/* A of a row, from V, U and S; true where the second chain forbids a state that has a weight in the first. */
static int weigh_terms(int64_t width, const real *v, const real *u, const real *s, Emission p, Emission q, real *out) {
    wholes forbidden = {0};
    for (int64_t b = 0; b < vectors_of(width); b++) {
        int64_t j = start_of(b, width);
        reals state = load(s + j), e = -log_emission(p, j);
        if (q.x) {
            forbidden |= (state > 0) & (load(q.x + j) == -INFINITE);
            e = -e - log_emission(q, j);
        }
        store(out + j, where(state == 0, (reals){0}, load(v + j) * (state / load(u + j)) + state * e));
    }
    return any(forbidden);
}

/* A of a first message; likewise. */
static int first_terms(int64_t width, const real *s, const real *other, real *out) {
    wholes forbidden = {0};
    for (int64_t b = 0; b < vectors_of(width); b++) {
        int64_t j = start_of(b, width);
        reals state = load(s + j), d = log_ratio(state, other ? other + j : 0, TOP, &forbidden);
        store(out + j, where(state == 0, (reals){0}, state * d));
    }
    return any(forbidden);
}

INLINE real *terms_at(const Pair *w, int64_t place) { return w->rows + place * 2 * w->p.width; }

/* U of up to a group of rows becomes S, of one chain. */
static void settle_all(Walk *w, int64_t place, int64_t rows, int64_t step, real common) {
    const real *states = state_at(w, place, step - 1);
    const Matrix *m = &w->matrix;
    if (rows > 1)
        multiply((Product){rows, w->a->states, w->width, states, w->width, 1, m->entries, m->row, w->sums, w->width});
    else row_times(w->a->states, w->width, states, m->entries, m->row, w->sums);
    for (int64_t done = 0; done < rows; done += LANES)
        settle(w, place + done, rows - done < LANES ? rows - done : LANES, step, w->sums + done * w->width, common);
}

/* A step of up to a group of places. */
static void step_pair(Pair *w, int64_t place, int64_t rows, int64_t step, real common) {
    Walk *p = &w->p, *q = &w->q;
    int64_t c = p->a->states, width = p->width, own[4 * GROUP], others[4 * GROUP];
    real *terms = terms_at(w, place);
    if (rows > 1)
        multiply((Product){rows, 2 * c, width, terms, 2 * width, 1, w->stacked, width, w->sums, width});
    else row_times(2 * c, width, terms, w->stacked, width, w->sums);
    for (int64_t r = 0; r < rows; r++) {
        own[r] = p->exponents[place + r] + p->matrix.exponent;
        others[r] = q->a ? q->exponents[place + r] + q->matrix.exponent : 0;
    }
    settle_all(p, place, rows, step, common);
    if (q->a) settle_all(q, place, rows, step, common);
    for (int64_t r = 0; r < rows; r++, terms += 2 * width) {
        const real *state = state_at(p, place + r, step), *u = p->sums + r * width;
        Emission e = emission_of(p, place + r, step, own[r]), other = {0};
        if (q->a) other = emission_of(q, place + r, step, others[r]);
        if (weigh_terms(width, w->sums + r * width, u, state, e, other, terms))
            p->a->lossy[sequence_of(p, place + r)] = 1;
        narrow(c, state, terms + c);
    }
}

/* The sums of S and of A of a place. */
static void add_up(const Pair *w, int64_t place, double *weight, double *terms) {
    const real *row = terms_at(w, place);
    *weight = *terms = 0;
    for (int64_t j = 0; j < w->p.a->states; j++) *weight += row[w->p.a->states + j], *terms += row[j];
}

static void centre(Pair *w, int64_t place) {
    double weight, terms;
    int64_t c = w->p.a->states;
    real *row = terms_at(w, place);
    add_up(w, place, &weight, &terms);
    double mean = weight > 0 ? terms / weight : 0;
    add(&w->means[place], mean);
    for (int64_t j = 0; j < c; j++) row[j] -= mean * row[c + j];
}

/* log of a sum of states, without what was taken out of them. */
INLINE double log_sum(double sum) {
    int64_t exponent;
    double rest = mantissa(sum, &exponent);
    return (double)(exponent - TOP) * 0.69314718055994531 + logarithm(rest);
}

/* The entropy or the divergence of a place whose last step this is; 0 where no path is possible. */
static void finish_pair(Pair *w, int64_t place, int64_t step) {
    double weight, terms;
    int64_t q = sequence_of(&w->p, place);
    finish(&w->p, place, step);
    if (w->q.a) finish(&w->q, place, step);
    add_up(w, place, &weight, &terms);
    Sum found = w->means[place];
    add(&found, terms / weight);
    add(&found, w->q.a ? log_sum(w->q.a->sums[q]) - log_sum(weight) : log_sum(weight));
    w->p.a->value[q] = weight > 0 ? value_of(found) : 0;
    if (w->q.a) w->p.a->lossy[q] |= w->q.a->lossy[q];
}

static void walk_pair(Pair *w) {
    Walk *p = &w->p, *both[] = {p, &w->q};
    const Chain *a = p->a;
    real common = ordinary();
    int64_t count = active(p, p->count, 0), group = rows_of_pair(a);
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
        if (first_terms(p->width, state, w->q.a ? state_at(&w->q, place, 0) : 0, terms_at(w, place)))
            a->lossy[sequence_of(p, place)] = 1;
        narrow(a->states, state, terms_at(w, place) + a->states);
    }
    for (int64_t step = 0; step < a->steps && count > 0; step++) {
        if (step > 0) {
            int one = a->one_matrix && (!w->q.a || w->q.a->one_matrix);
            if ((step == 1 || !one) && stack(w, step))
                for (int64_t place = 0; place < count; place++) a->lossy[sequence_of(p, place)] = 1;
            for (int64_t place = 0; place < count; place += group)
                step_pair(w, place, count - place < group ? count - place : group, step, common);
        }
        for (int64_t place = 0; place < count && step % CENTRED == CENTRED - 1; place++) centre(w, place);
        int64_t still = step + 1 == a->steps ? 0 : active(p, count, step + 1);
        for (int64_t place = still; place < count; place++) finish_pair(w, place, step);
        count = still;
    }
}

static void make_walk(Walk *w, const Chain *a, int64_t size, int64_t group, char **room) {
    int64_t bytes = sizeof(real);
    *w = (Walk){.a = a, .width = width_of(a)};
    w->matrix = (Matrix){.c = a->states, .width = w->width, .room = take(room, w->width * w->width * bytes)};
    if (w->width > a->states) clear(w->width * w->width, w->matrix.room);
    w->sums = take(room, group * w->width * bytes), w->wide = take(room, group * w->width * bytes);
    w->first = take(room, w->width * bytes), w->states = take(room, 2 * size * w->width * bytes);
    w->shifts = take(room, size * (int64_t)sizeof(Sum)), w->exponents = take(room, size * 8), w->deep = take(room, size);
}

INLINE int64_t size_of_walk(const Chain *a) {
    return a->one_matrix && a->members > rows_of_pair(a) ? rows_of_pair(a) : a->members;
}

/* Entropies of all sequences, or divergences from the chain at `other`, into `value`; how many are left to the caller. */
EXPORT int64_t logchain_entropy64(const Chain *a) {
    int64_t lossy = 0, sequences = a->sets * a->members, size = size_of_walk(a), width = width_of(a), bytes = 8;
    char *room = a->room;
    Chain chains[2] = {*a};
    if (a->other) chains[1] = *(const Chain *)a->other;
    Pair w = {.q.a = 0};
    for (int k = 0; k <= (a->other != 0); k++) {
        chains[k].log_norm = take(&room, sequences * 8), chains[k].sums = take(&room, sequences * 8);
        if (k) chains[k].lossy = take(&room, sequences);
        make_walk(k ? &w.q : &w.p, chains + k, size, rows_of_pair(a), &room);
    }
    w.rows = take(&room, (size + 1) * 2 * width * bytes);
    w.stacked = take(&room, 2 * width * width * bytes);
    w.sums = take(&room, rows_of_pair(a) * width * bytes), w.means = take(&room, size * (int64_t)sizeof(Sum));
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
    int64_t width = width_of(a), size = size_of_walk(a), group = rows_of_pair(a), sequences = a->sets * a->members;
    int64_t walk = (width * width + (2 * group + 2 * size + 1) * width) * 8 + size * 25 + sequences * 17;
    return 2 * walk + (2 * width * width + (2 * size + 2 + group) * width) * 8 + size * 16 + 32 * 64;
}
