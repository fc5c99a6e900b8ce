/* The best paths, by additions and maxima of logarithms:

       t_i(j) = max_k (a_{i-1}(k) + log P_i(k, j))      a_i(j) = t_i(j) + (x_i(j) - max x_i), less its largest entry

   All messages a of the sequences that are computed together are kept. On the way back, the state before a state j is
   the lowest k that attains t_i(j). A sequence that holds a NaN or +inf is marked `lossy`. Both ways in one call keep
   messages in scratch, each way in a call of its own in `messages`. */
#pragma once
#include "forward.h"

/* The pass over places of a set, also that of topk.h. */
typedef struct {
    Walk walk;               /* without states, scales and matrix */
    int64_t ranks, read;     /* paths kept for each state; set and step of the matrix in `logs` */
    int64_t pitch;           /* places from the message of a step to that of the next */
    int unknown;             /* the matrix in `logs` has an entry that is NaN or +inf */
    real *logs, *transposed; /* (c, width): log matrix; its transpose, or one column */
    real *messages;          /* (v, pitch, width), in topk.h (2, count, ranks, width) */
    whole *choices;          /* (v, count, ranks, width): in topk.h */
    real *best;              /* (2, ranks, LANES): scratch of topk.h */
    double *start;           /* (width): sums of a first message */
} Best;

/* Replaces a row of weights by logarithms; whether one is NaN or +inf. */
static int to_logarithms(int64_t width, int logarithms_given, real *row) {
    int64_t last = width - LANES;
    reals end = load(row + last);
    if (!logarithms_given) end = logarithms(end);
    wholes bad = ~(end < INFINITE);
    for (int64_t j = 0; j < last; j += LANES) {
        reals logs = load(row + j);
        if (!logarithms_given) logs = logarithms(logs);
        bad |= ~(logs < INFINITE);
        store(row + j, logs);
    }
    store(row + last, end);
    return any(bad);
}

/* The logarithms of the matrix into a step, and their transpose where all steps have one matrix. */
static void read_logarithms(Best *b, int64_t step) {
    const Chain *a = b->walk.a;
    int64_t c = a->states, width = b->walk.width, index = a->one_matrix ? 0 : step - 1;
    const real *from = matrix_at(&a->bulk, b->walk.set, step);
    if (b->read == b->walk.set * a->steps + index) return;
    b->read = b->walk.set * a->steps + index, b->unknown = 0;
    for (int64_t k = 0; k < c; k++) {
        real *row = b->logs + k * width;
        widen(c, width, from + k * a->bulk.from, a->bulk.to, a->logarithms ? -INFINITE : 0, row);
        b->unknown |= to_logarithms(width, (int)a->logarithms, row);
    }
    if (!a->one_matrix) return;
    if (c >= LANES) transpose(c, b->logs, c, b->transposed, c);
    else for (int64_t k = 0; k < c * width; k++)
        b->transposed[k] = k % width < c ? b->logs[k % width * width + k / width] : -INFINITE;
}

/* The logarithms of the transitions into a state (width). */
INLINE const real *column_of_logarithms(Best *b, int64_t step, int64_t state) {
    const Chain *a = b->walk.a;
    if (a->one_matrix) return b->transposed + state * b->walk.width;
    const real *from = matrix_at(&a->bulk, b->walk.set, step) + state * a->bulk.to;
    widen(a->states, b->walk.width, from, a->bulk.from, a->logarithms ? -INFINITE : 0, b->transposed);
    to_logarithms(b->walk.width, (int)a->logarithms, b->transposed);
    return b->transposed;
}

/* The first message of a place, summed in float64 because p0 may be far from 1. Whether it holds NaN or +inf. */
static int start_best(Best *b, int64_t place, real *message) {
    const Chain *a = b->walk.a;
    int64_t q = sequence_of(&b->walk, place), c = a->states;
    const real *p0 = p0_at(a, q), *x = x_at(a, q, 0);
    double *sums = b->start, high = -__builtin_inf(), top = high, most = high;
    int bad = 0;
    for (int64_t j = 0; j < c; j++) {
        double weight = p0[j * a->p0.step];
        bad |= !(x[j] < INFINITE) | !(weight < __builtin_inf()) | (!a->logarithms & (weight < 0));
        sums[j] = a->logarithms ? weight : logarithm(weight);
        high = sums[j] > high ? sums[j] : high;
        top = sums[j] > -__builtin_inf() && x[j] > top ? x[j] : top;
    }
    high = high > -__builtin_inf() ? high : 0, top = top > -__builtin_inf() ? top : 0;
    for (int64_t j = 0; j < c; j++) {
        sums[j] = (sums[j] - high) + (sums[j] > -__builtin_inf() ? x[j] - top : 0);
        most = sums[j] > most ? sums[j] : most;
    }
    most = most > -__builtin_inf() ? most : 0;
    for (int64_t j = 0; j < b->walk.width; j++) message[j] = j < c ? (real)(sums[j] - most) : -INFINITE;
    return bad;
}

/* Messages of `ranks` rows from sums and x, less their largest entry, which is in the first row. Whether x holds NaN or
   +inf. */
INLINE int weigh_best(int64_t ranks, int64_t width, const real *x, const real *sums, real *message) {
    real top = top_of(x, width);
    reals high = splat(-INFINITE);
    wholes bad = {0};
    for (int64_t k = 0; k < vectors_of(width); k++) {
        int64_t j = start_of(k, width);
        reals potential = load(x + j);
        bad |= ~(potential < INFINITE);
        high = larger(load(sums + j) + (potential - top), high);
    }
    real most = largest(high);
    most = most > -INFINITE ? most : 0;
    for (int64_t rank = 0; rank < ranks; rank++, sums += width, message += width)
        for (int64_t k = 0; k < vectors_of(width); k++) {
            int64_t j = start_of(k, width);
            store(message + j, (load(sums + j) + (load(x + j) - top)) - most);
        }
    return any(bad);
}

/* The lowest state of the largest a + b; of the largest a where b is null. */
INLINE int64_t lowest_best(int64_t width, const real *a, const real *b) {
    reals high = splat(-INFINITE);
    for (int64_t k = 0; k < vectors_of(width); k++) {
        int64_t j = start_of(k, width);
        high = larger(b ? load(a + j) + load(b + j) : load(a + j), high);
    }
    real most = largest(high);
    wholes lane, first;
    UNROLL for (int l = 0; l < LANES; l++) lane[l] = l, first[l] = (whole)width;
    for (int64_t k = 0; k < vectors_of(width); k++) {
        int64_t j = start_of(k, width);
        reals sum = b ? load(a + j) + load(b + j) : load(a + j);
        first = smaller_whole(where_whole(sum == most, lane + (whole)j, first), first);
    }
    return lowest(first);
}

INLINE int64_t *path_of(const Chain *a, int64_t q, int64_t rank) {
    return a->paths.data + a->paths.at[q] + rank * a->paths.rank;
}

/* Writes -1 after the end, or at all steps of a sequence without a path. Returns the number of steps of the path. */
static int64_t end_path(const Chain *a, int64_t q, int possible, int64_t *path) {
    int64_t steps = steps_of(a, q), stop = a->packed ? steps : a->paths.steps;
    for (int64_t step = possible ? steps : 0; step < stop; step++) path[step] = -1;
    return possible ? steps : 0;
}

INLINE real *best_message(const Best *b, int64_t place, int64_t step) {
    return b->messages + (step * b->pitch + place) * b->walk.width;
}

static void write_leaving_best(const Best *b) {
    const Chain *a = b->walk.a;
    for (int64_t place = 0; place < b->walk.count; place++) {
        int64_t q = sequence_of(&b->walk, place);
        const real *last = best_message(b, place, steps_of(a, q) - 1);
        for (int64_t j = 0; j < a->states; j++) a->around.leaving[q * a->states + j] = last[j];
    }
}

static void best_forward(Best *b) {
    Walk *w = &b->walk;
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width, count = active(w, w->count, 0);
    for (int64_t place = 0; place < count; place++)
        a->lossy[sequence_of(w, place)] = (uint8_t)start_best(b, place, best_message(b, place, 0));
    for (int64_t step = 1; step < a->steps && (count = active(w, count, step)) > 0; step++) {
        read_logarithms(b, step);
        for (int64_t place = 0; place < count; place += GROUP) {
            int64_t rows = count - place < GROUP ? count - place : GROUP;
            const real *before = best_message(b, place, step - 1), *x;
            if (rows == 1) row_times_best(c, width, before, b->logs, width, w->sums);
            else multiply_best((Product){rows, c, width, before, width, 1, b->logs, width, w->sums, width});
            for (int64_t r = 0; r < rows; r++) {
                rows_of_x(w, place + r, 1, step, &x);
                int bad = weigh_best(1, width, x, w->sums + r * width, best_message(b, place + r, step));
                a->lossy[sequence_of(w, place + r)] |= (uint8_t)(bad | b->unknown);
            }
        }
    }
    if (a->around.leaving) write_leaving_best(b);
}

/* `given`: a path ends in the state that is its last entry, or where the last message is largest if that is negative. */
static void best_backward(Best *b, int given) {
    const Walk *w = &b->walk;
    const Chain *a = w->a;
    if (a->one_matrix && a->steps > 1) read_logarithms(b, 1);
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place), last = steps_of(a, q) - 1, *path = path_of(a, q, 0);
        const real *message = best_message(b, place, last);
        int64_t state = given && path[last] >= 0 ? path[last] : lowest_best(w->width, message, 0);
        int possible = !a->lossy[q] && message[state] > -INFINITE;
        for (int64_t step = end_path(a, q, possible, path) - 1; step >= 0; step--) {
            if (step < last)
                state = lowest_best(w->width, best_message(b, place, step), column_of_logarithms(b, step + 1, state));
            path[step] = state;
        }
    }
}

/* `kept`: messages lie in `messages`, in the order of places. */
static int64_t each_best(const Chain *a, int ranked, int kept, void walk(Best *)) {
    int64_t width = width_of(a), size = sizeof(real), most = most_places(a, ranked ? 1 : GROUP);
    Room room = {.begin = a->room};
    Best b = {.walk = {.a = a, .width = width}, .ranks = ranked ? a->paths.ranks : 1, .read = -1};
    b.logs = take(&room, a->states * width * size);
    b.transposed = take(&room, (a->one_matrix ? a->states : 1) * width * size);
    b.walk.sums = take(&room, (ranked ? b.ranks : GROUP) * width * size);
    b.walk.padded_x = take(&room, width * size);
    b.start = take(&room, width * 8);
    b.best = take(&room, 2 * b.ranks * LANES * size);
    if (!kept) b.messages = take(&room, (ranked ? 2 : a->steps) * most * b.ranks * width * size);
    if (ranked) b.choices = take(&room, a->steps * most * b.ranks * width * size);
    if (!a->room) return room.bytes;
    for (int64_t q = a->first; q < a->last; q += b.walk.count) {
        enter_set(&b.walk, q, most);
        b.pitch = kept ? a->sets * a->members : b.walk.count;
        if (kept) b.messages = a->messages.data + q * width;
        walk(&b);
    }
    return 0;
}

static void best_path(Best *b) { best_forward(b), best_backward(b, 0); }
static void given_path(Best *b) { best_backward(b, 1); }

EXPORT int64_t EXPORTED(logchain_viterbi)(const Chain *a) { return each_best(a, 0, 0, best_path); }
EXPORT int64_t EXPORTED(logchain_viterbi_forward)(const Chain *a) { return each_best(a, 0, 1, best_forward); }
EXPORT int64_t EXPORTED(logchain_viterbi_backward)(const Chain *a) { return each_best(a, 0, 1, given_path); }

/* Entries of the narrowest row of messages. */
EXPORT int64_t EXPORTED(logchain_narrowest)(void) { return LANES; }
