/* Forward messages S, and log Z:

       U_0 = p0      U_i = S_{i-1} P_i      S_i = U_i E_i 2^(TOP - k_i)      E_i = exp(x_i - max x_i)

       log Z = log sum S_{v-1} + sum of max x_i + (k_i - TOP) log 2          max U_i is in [1/2, 1) 2^k_i

   The sequences that share matrices take each step together, in `places` of which those with more steps come first: a
   matrix is prepared once, and multiplied by the rows of a group of places. Rows of sums U that ask for it are looked
   at, see step.h. What is lossy is 0 from there on, and is left to exact.h. */
#pragma once
#include "lone.h"
#include "number.h"
#include "step.h"

enum { GROUP = 48 }; /* whole tiles of rows, of which the sums stay near between product and emission */

/* Rows that meet a matrix together: more of them where a matrix is copied for each group. */
INLINE int64_t group_of(const Chain *a) { return is_packed(4 * GROUP, a->states) ? 4 * GROUP : GROUP; }

/* `count` places of a set from its place `begin` on, and what is known of each. */
typedef struct {
    const Chain *a;
    int64_t set, begin, count, width; /* width: of a row, c or LANES */
    int direct, lone;                 /* states are where messages are kept; it is one sequence of few states */
    const int64_t *order;             /* the members in the set's places; null where they are in order */
    real *states;                     /* (2, count, width): S of two steps, unless `direct` */
    real *sums, *wide;                /* (group, width): a group's U, and its x where c < LANES */
    real *first;                      /* (width): U_0 */
    Matrix matrix;                    /* the one into the step */
    Sum *shifts;                      /* (count): what was taken out of S as logarithms, max x and those of matrices */
    int64_t *exponents;               /* (count): and as powers of two, k - TOP and those of matrices */
    uint8_t *deep;                    /* (count): the last emission was raised */
} Walk;

INLINE const int64_t *order_of(const Chain *a, int64_t set) { return a->order ? a->order + set * a->members : 0; }
INLINE int64_t width_of(const Chain *a) { return a->states < LANES ? LANES : a->states; }
INLINE int64_t sequence_of(const Walk *w, int64_t place) {
    place += w->begin;
    return w->set * w->a->members + (w->order ? w->order[place] : place);
}

/* How many of the places of a thread have lossy sequences. */
static int64_t lossy_places(const Chain *a) {
    int64_t lossy = 0;
    for (int64_t place = a->first; place < a->last; place++) lossy += a->lossy[sequence_in(a, place)] != 0;
    return lossy;
}

/* What log_norm adds to. */
INLINE Sum begun(const Chain *a, int64_t q) {
    return a->taken ? (Sum){a->taken[q], a->lacking[q]} : (Sum){0, 0};
}

INLINE void tell(const Chain *a, int64_t q, Sum log_norm) {
    double value = value_of(log_norm), lost = (log_norm.sum - value) + log_norm.lost;
    a->log_norm[q] = value;
    if (a->lost) a->lost[q] = lost == lost ? lost : 0;
}

/* The state of a place after a step. */
INLINE real *state_at(const Walk *w, int64_t place, int64_t step) {
    if (w->direct) return message_at(w->a, w->set * w->a->members + w->begin + place, step);
    return w->states + ((step & 1) * w->count + place) * w->width;
}

/* How many of the places have a step; they come first. */
INLINE int64_t active(const Walk *w, int64_t before, int64_t step) {
    if (!w->a->ends) return w->count;
    while (before > 0 && steps_of(w->a, sequence_of(w, before - 1)) <= step) before--;
    return before;
}

/* Rows of x of `rows` places, as wide as states. */
INLINE void rows_of_x(const Walk *w, int64_t place, int64_t rows, int64_t step, const real **out) {
    const Chain *a = w->a;
    for (int64_t r = 0; r < rows; r++) {
        const real *x = x_at(a, w->set, sequence_of(w, place + r), step);
        real *to = w->wide + r * w->width;
        if (is_single(a)) {
            widen_singles(a->states, w->width, single_of(a->x, x), 1, -INFINITE, to);
            x = to;
        } else if (a->states < LANES) {
            widen(a->states, w->width, x, 1, -INFINITE, to);
            x = to;
        }
        out[r] = x;
    }
}

static void forget(const Walk *w, int64_t place, int64_t step) {
    clear(w->width, state_at(w, place, step));
}

/* The logarithms of a last row of sums times 2^-exponent, with their emissions: what underflows in a state is there. */
static void leave(const Chain *a, int64_t q, const real *sums, const real *x, double shift, int64_t exponent) {
    for (int64_t j = 0; j < a->states; j++) {
        int64_t k;
        double part = mantissa(sums[j], &k), log = (double)(k - exponent) * 0.69314718055994531 + logarithm(part);
        a->leaving[q * a->states + j] = (sums[j] == 0 ? -__builtin_inf() : log) + ((double)x[j] - shift);
    }
}

/* Where a row of logarithms (v, g, m, c) is written; they lie as a gradient of x does. */
INLINE real *logarithms_at(const Chain *a, real *all, int64_t set, int64_t q, int64_t step) {
    int64_t offset = gradient_offset(a, set, q, step);
    return is_single(a) ? (real *)((float *)all + offset) : all + offset;
}

/* Natural logarithms of a row times 2^exponent e^taken: of its largest, near 2^TOP, a small one is added. */
static void write_logarithms(const Chain *a, const real *row, Sum taken, int64_t exponent, real *out) {
    add_exponent(&taken, exponent + TOP);
    double scale = value_of(taken);
    for (int64_t j = 0; j < a->states; j += WIDE) {
        doubles logs = logarithm_of(read_wide(row + j, 1, a->states - j, 0), TOP) + scale;
        if (is_single(a)) write_singles((float *)out + j, logs, a->states - j);
        else write_wide(out + j, logs, a->states - j);
    }
}

/* States over their sum, and 0 behind a sequence's end. */
static void share(const Walk *w, int64_t count, int64_t step) {
    const Chain *a = w->a;
    for (int64_t place = 0; place < w->count; place++) {
        real *out = shares_at(a, sequence_of(w, place), step);
        const real *state = state_at(w, place, step);
        if (!out) return;
        reals parts = {0};
        int64_t j = 0, c = place < count ? a->states : 0;
        for (; j + LANES <= c; j += LANES) parts += load(state + j);
        real sum = total(parts);
        for (; j < c; j++) sum += state[j];
        real over = sum > 0 ? 1 / sum : sum; /* 0, or NaN */
        if (c == 0) clear(a->states, out);
        else if (c < LANES) for (j = 0; j < c; j++) out[j] = state[j] * over;
        else for (int64_t k = 0; k < vectors_of(c); k++)
            store(out + start_of(k, c), load(state + start_of(k, c)) * over);
    }
}

/* Up to LANES rows of sums become states; rows that ask are looked at. True, and nothing is done, where the matrix
   has been rescaled, and the sums are to be made again. */
static int settle(Walk *w, int64_t place, int64_t rows, int64_t step, const real *sums, real common) {
    const Chain *a = w->a;
    const real *x[LANES];
    Weighed weighed;
    rows_of_x(w, place, rows, step, x);
    if (rows == 1) weigh(1, 1, w->width, x, sums, state_at(w, place, step), &weighed);
    else weigh(0, rows, w->width, x, sums, state_at(w, place, step), &weighed);
    for (int64_t r = 0; r < rows && step > 0; r++) {
        int64_t q = sequence_of(w, place + r);
        if (a->lossy[q] || !asks(w->deep[place + r], weighed.least[r], weighed.most[r])) continue;
        if (!w->matrix.looked) {
            look(&w->matrix);
            if (rescale(&w->matrix)) return 1;
        }
        a->lossy[q] = (uint8_t)is_lossy(a->states, sums + r * w->width, 1, weighed.most[r], &w->matrix, common);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t q = sequence_of(w, place + r), exponent = exponent_of(weighed.most[r]);
        if (a->leaving && step + 1 == steps_of(a, q))
            leave(a, q, sums + r * w->width, x[r], weighed.shift[r], exponent);
        Sum *shift = &w->shifts[place + r];
        int64_t *taken = &w->exponents[place + r];
        if (step > 0 && w->matrix.shift != 0) add(shift, w->matrix.shift);
        if (step > 0) *taken += w->matrix.exponent;
        if (a->log_backward)
            write_logarithms(a, sums + r * w->width, *shift, *taken,
                             logarithms_at(a, a->log_backward, w->set, q, step));
        add(shift, weighed.shift[r]);
        *taken += exponent - TOP;
        if (a->log_forward)
            write_logarithms(a, state_at(w, place + r, step), *shift, *taken,
                             logarithms_at(a, a->log_forward, w->set, q, step));
        if (weighed.raised[r] && (a->log_forward || a->log_backward)) a->lossy[q] = 1;
        w->deep[place + r] = weighed.raised[r] != 0;
        if (a->lossy[q]) forget(w, place + r, step); /* what is lost is denormal, and slow */
    }
    return 0;
}

/* log Z of a sequence whose last step this is. */
static void finish(Walk *w, int64_t place, int64_t step) {
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place), c = a->states;
    const real *state = state_at(w, place, step);
    double sum = 0;
    for (int64_t j = 0; j < c; j++) sum += state[j];
    if (!(sum < __builtin_inf()) || (sum > 0 && sum < (double)TRUSTED)) a->lossy[q] = 1;
    if (a->leaving && a->messages && w->deep[place]) a->lossy[q] = 1; /* no sums follow that would tell */
    Sum log_norm = w->shifts[place];
    int64_t exponent;
    double part = mantissa(sum, &exponent);
    add_exponent(&log_norm, w->exponents[place] + exponent);
    add(&log_norm, logarithm(part));
    tell(a, q, sum == 0 ? (Sum){-__builtin_inf(), 0} : log_norm);
    for (int64_t j = 0; j < c && a->leaving && sum > 0; j++)
        a->leaving[q * c + j] -= (double)(exponent - TOP) * 0.69314718055994531 + logarithm(part);
}

/* Messages that are not kept as they are walked are copied, and are 0 behind a sequence's end. */
static void keep(const Walk *w, int64_t place, int64_t behind, int64_t step, int there) {
    const Chain *a = w->a;
    for (; place < behind; place++) {
        real *to = message_at(a, sequence_of(w, place), step);
        if (there) narrow(a->states, state_at(w, place, step), to);
        else clear(a->states, to);
    }
}

/* The initial weights of all places; sequences often share them. */
static void start(Walk *w, int64_t count, real common) {
    const Chain *a = w->a;
    const real *before = 0;
    int64_t exponent = 0;
    double shift = 0;
    int lossy = 0;
    for (int64_t place = 0; place < count; place++) {
        int64_t q = sequence_of(w, place);
        const real *p0 = p0_at(a, q);
        if (p0 != before && is_single(a)) {
            widen_singles(a->states, a->states, single_of(a->p0, p0), a->p0_state, 0, w->sums);
            lossy = start_row(a->states, w->width, w->sums, 1, (int)a->logarithms, w->first, &exponent, &shift);
        } else if (p0 != before)
            lossy = start_row(a->states, w->width, p0, a->p0_state, (int)a->logarithms, w->first, &exponent, &shift);
        before = p0;
        a->lossy[q] = (uint8_t)lossy;
        add(&w->shifts[place], shift);
        w->exponents[place] += exponent;
        settle(w, place, 1, 0, w->first, common);
    }
}

/* What few.h takes of a sequence whose matrix, if all steps have one, is prepared; the step before which it stops.
   `padded` (FEW, FEW) becomes that matrix, or its transpose. */
static int64_t lone_of(Walk *w, int turned, real *padded, Lone *l) {
    const Chain *a = w->a;
    int64_t c = a->states, q = sequence_of(w, 0), one = a->one_matrix;
    int64_t row = a->starts ? c : a->sets * a->members * c, for_x = steps_kept_back(c, a->x_step);
    int64_t for_matrices = one ? 0 : steps_kept_back(c, a->bulk_step);
    int64_t for_messages = a->messages ? steps_kept_back(c, row) : 0;
    if (a->log_forward || a->log_backward || (!one && (a->logarithms || a->bulk_to != 1))) return 0;
    if (one && !w->matrix.looked) look(&w->matrix), rescale(&w->matrix);
    const Matrix *m = &w->matrix;
    real limit = one ? TRUSTED * m->high : INFINITE;
    limit = limit < SHALLOW ? SHALLOW : limit;
    *l = (Lone){.c = c, .one = (int)one, .x = x_at(a, w->set, q, 1) - a->x_step, .x_step = a->x_step,
                .entries = one ? padded : a->bulk + first_matrix(a, w->set), .row = a->bulk_from,
                .entries_step = a->bulk_step, .messages = a->messages ? message_at(a, q, 0) : 0,
                .shares = a->shares ? shares_at(a, q, 1) - a->grad_step : 0, .share_step = a->grad_step,
                .message_step = row, .limits = {limit < TRUSTED ? limit : TRUSTED, limit},
                /* states are met by a matrix before they are taken to 2^TOP, and may be as much lower as it is */
                .zeros = one && m->low * (m->high < 1 ? m->high : 1) >= ordinary(),
                .matrix_shift = one ? m->shift : 0, .matrix_exponent = one ? m->exponent : 0};
    for (int64_t k = 0; k < row_of(c) && one; k++)
        for (int64_t j = 0; j < row_of(c); j++)
            padded[k * row_of(c) + j] =
                k < c && j < c ? m->entries[turned ? j * m->row + k : k * m->row + j] : 0;
    int64_t for_operands = for_x > for_matrices ? for_x : for_matrices;
    return steps_of(a, q) - (for_operands > for_messages ? for_operands : for_messages);
}

/* Steps of a sequence of few states, as far as they ask for no care. */
static int64_t few_ahead(Walk *w, int64_t step) {
    Lone l;
    real padded[FEW * FEW];
    int64_t behind = lone_of(w, 0, padded, &l), last = steps_of(w->a, sequence_of(w, 0)) - 1;
    behind = behind < last ? behind : last;
    if (step >= behind) return step;
    narrow(w->a->states, state_at(w, 0, step - 1), l.state);
    l.shift = w->shifts[0], l.exponent = w->exponents[0], l.deep = w->deep[0];
    step = steps_ahead(&l, step, behind);
    narrow(w->a->states, l.state, state_at(w, 0, step - 1));
    w->shifts[0] = l.shift, w->exponents[0] = l.exponent, w->deep[0] = (uint8_t)l.deep;
    return step;
}

/* Up to a group of places takes a step. */
static void step_places(Walk *w, int64_t place, int64_t rows, int64_t step, real common) {
    const Chain *a = w->a;
    const Matrix *m = &w->matrix;
    const real *states = state_at(w, place, step - 1);
    int trusted = 0;
    for (int64_t r = 0; r < rows; r++) trusted |= !a->lossy[sequence_of(w, place + r)];
    for (int64_t r = 0; r < rows && !trusted; r++) forget(w, place + r, step);
    for (int64_t done = trusted ? 0 : rows; done < rows;) {
        if (rows > 1)
            multiply((Product){rows, a->states, w->width, states, w->width, 1, m->entries, m->row, w->sums, w->width});
        else row_times(a->states, w->width, states, m->entries, m->row, w->sums);
        for (; done < rows; done += LANES) {
            int64_t settled = rows - done < LANES ? rows - done : LANES;
            if (settle(w, place + done, settled, step, w->sums + done * w->width, common)) break;
        }
    }
}

/* All steps of the places. */
static void walk_ahead(Walk *w) {
    const Chain *a = w->a;
    real common = ordinary();
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place);
        w->shifts[place] = begun(a, q), w->exponents[place] = 0, w->deep[place] = 0;
        a->lossy[q] = 0, a->log_norm[q] = -__builtin_inf();
    }
    int64_t count = active(w, w->count, 0), group = group_of(a);
    start(w, count, common);
    if (a->one_matrix && a->steps > 1) prepare(a, w->set, 1, &w->matrix);
    for (int64_t step = 0; step < a->steps && (count > 0 || !a->starts); step++) {
        if (w->lone && step > 0 && count > 0 && !a->lossy[sequence_of(w, 0)]) step = few_ahead(w, step);
        if (step > 0 && count > 0 && !a->one_matrix) prepare(a, w->set, step, &w->matrix);
        for (int64_t place = 0; place < count && step > 0; place += group)
            step_places(w, place, count - place < group ? count - place : group, step, common);
        if (a->shares) share(w, count, step);
        if (a->messages && !w->direct) {
            keep(w, 0, count, step, 1);
            keep(w, count, a->starts ? count : w->count, step, 0);
        }
        int64_t still = step + 1 == a->steps ? 0 : active(w, count, step + 1);
        for (int64_t place = still; place < count; place++) finish(w, place, step);
        count = still;
    }
}

/* So many places of a set walk together at most: a group where all steps have one matrix, which then stays near. */
INLINE int64_t most_places(const Chain *a) {
    return a->one_matrix && a->members > group_of(a) ? group_of(a) : a->members;
}

/* A walk in either direction, with the scratch that both take. */
static Walk new_walk(const Chain *a, int64_t group, int64_t most, char **room) {
    int64_t bytes = sizeof(real);
    Walk w = {.a = a, .width = width_of(a)};
    w.matrix = (Matrix){.c = a->states, .width = w.width, .room = take(room, w.width * w.width * bytes)};
    if (w.width > a->states) clear(w.width * w.width, w.matrix.room);
    w.wide = take(room, group * w.width * bytes);
    w.first = take(room, w.width * bytes);
    w.deep = take(room, most);
    return w;
}

/* And that of a walk that keeps its states itself. */
static void take_states(Walk *w, int64_t group, int64_t most, char **room) {
    int64_t bytes = sizeof(real);
    w->sums = take(room, group * w->width * bytes);
    w->states = take(room, 2 * most * w->width * bytes);
    w->shifts = take(room, most * (int64_t)sizeof(Sum));
    w->exponents = take(room, most * 8);
}

/* How many places of a set a thread has from its place q on, which are the walk's first. */
INLINE int64_t enter_set(Walk *w, int64_t q) {
    const Chain *a = w->a;
    w->set = q / a->members, w->begin = q % a->members, w->order = order_of(a, w->set);
    return a->members - w->begin < a->last - q ? a->members - w->begin : a->last - q;
}

/* The forward pass of a thread's places; how many are lossy. */
EXPORT int64_t EXPORTED(logchain_forward)(const Chain *a) {
    char *room = a->room;
    int64_t group = group_of(a), most = most_places(a);
    Walk w = new_walk(a, group, most, &room);
    w.direct = a->messages && !a->order && !a->ends && w.width == a->states;
    take_states(&w, group, most, &room);
    for (int64_t q = a->first; q < a->last; q += w.count) {
        int64_t left = enter_set(&w, q);
        w.count = left < most ? left : most;
        w.lone = w.count == 1 && a->states <= FEW;
        walk_ahead(&w);
    }
    return lossy_places(a);
}
