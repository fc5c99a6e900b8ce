/* State paths drawn from their posterior, backwards from forward messages a:

       z_{v-1} ~ a_{v-1}(k)        z_{i-1} ~ a_{i-1}(k) P_i(k, z_i)

   A number -1 - z at a last step means that it is in state z. A number u from [0, 1) draws the first state whose cumulative weight reaches (1 - u) times the total, never one of
   weight 0. The weights for a next state z_i, a column, are computed when the first draw needs them. The kept messages
   of `lossy` sequences are logarithms, and so are their columns. Linear columns are scaled to entries near 1: products
   with messages do not overflow, and forward.h has marked as lossy all sequences where underflow or raised entries
   would matter. */
#pragma once
#include "topk.h"

enum { DRAWS = 512 }; /* draws per backward pass: eight states of all their paths fit into the second-level cache */

typedef struct {
    const Chain *a;
    int64_t set, width, blocks; /* c rounded up to whole vectors; number of vectors */
    int64_t transposed_set[2];  /* sets in `matrix`: linear, logarithms */
    real *matrix[2];            /* linear, logarithms: (c, width), all columns of one matrix; or (1, width), a column */
    real *weights;              /* (columns, width) */
    double *sums;               /* (columns, blocks): cumulative weight at the end of each vector */
    int64_t *slots, *made;      /* (c): column of a state z_i; the step that it belongs to */
} Sampler;

/* The transitions into a state: linear, divided by a power of two, or logarithms. */
static void read_column(const Sampler *s, int64_t step, int64_t state, int as_logarithms, real *out) {
    const Chain *a = s->a;
    const real *from = matrix_at(&a->bulk, s->set, step) + state * a->bulk.to;
    int given = a->logarithms != 0;
    for (int64_t k = 0; k < a->states; k++) out[k] = from[k * a->bulk.from];
    for (int64_t k = a->states; k < s->width; k++) out[k] = given ? -INFINITE : 0;
    if (as_logarithms && given) return;
    real top = top_of(out, s->width), factor = 1;
    int64_t exponent = exponent_of(bits_of(top));
    if (!given && top >= power_of_two(1 - BIAS) && top < INFINITE) factor = power_of_two(2 - exponent);
    for (int64_t k = 0; k < s->width; k += LANES) {
        reals entry = load(out + k);
        store(out + k, as_logarithms ? logarithms(entry) : given ? exponential(entry - top, NO_TAIL) : entry * factor);
    }
}

static const real *column_into(Sampler *s, int64_t step, int64_t state, int as_logarithms) {
    real *matrix = s->matrix[as_logarithms];
    if (!s->a->one_matrix) {
        read_column(s, step, state, as_logarithms, matrix);
        return matrix;
    }
    if (s->transposed_set[as_logarithms] != s->set)
        for (int64_t k = 0; k < s->a->states; k++) read_column(s, 1, k, as_logarithms, matrix + k * s->width);
    s->transposed_set[as_logarithms] = s->set;
    return matrix + state * s->width;
}

/* The weights of all states at a step before a drawn state, cumulated; without a column those of the last step. */
static void make_column(const Sampler *s, int64_t q, int64_t step, const real *column, int64_t slot) {
    const Chain *a = s->a;
    const real *message = message_at(a, q, step);
    real *weights = s->weights + slot * s->width;
    double *sums = s->sums + slot * s->blocks, sum = 0;
    int logs = a->lossy[q] != 0;
    reals high = splat(-INFINITE);
    for (int64_t k = 0; k < s->width; k += LANES) {
        int64_t left = a->states - k;
        reals weight = left >= LANES ? load(message + k) : load_some(message + k, 1, left, logs ? -INFINITE : 0);
        if (column) weight = logs ? weight + load(column + k) : weight * load(column + k);
        high = larger(weight, high);
        store(weights + k, weight);
    }
    real top = largest(high);
    for (int64_t k = 0; k < s->width; k += LANES) {
        reals weight = load(weights + k);
        if (logs) weight = exponential(weight - (top > -INFINITE ? top : 0), NO_TAIL), store(weights + k, weight);
        sums[k / LANES] = sum += total(weight);
    }
}

/* The state that u from [0, 1) draws. */
INLINE int64_t drawn_state(const Sampler *s, int64_t slot, double u) {
    const real *weights = s->weights + slot * s->width;
    const double *sums = s->sums + slot * s->blocks;
    double threshold = (1 - u) * sums[s->blocks - 1];
    int64_t block = 0, state;
    for (int64_t k = 0; k < s->blocks - 1; k++) block += !(sums[k] >= threshold && sums[k] > 0);
    double sum = block ? sums[block - 1] : 0;
    int passed = 0;
    state = block *= LANES;
    UNROLL for (int l = 0; l < LANES; l++) { /* without branches, which would be unpredictable */
        real weight = weights[block + l];
        sum += weight;
        state = (!passed & (weight > 0)) ? block + l : state;
        passed |= (weight > 0) & (sum >= threshold);
    }
    return state;
}

/* The draws from `first` to before `stop` of a sequence. */
static void draw_paths(Sampler *s, int64_t q, int64_t first, int64_t stop) {
    const Chain *a = s->a;
    int possible = a->log_norm[q] > -__builtin_inf() && a->log_norm[q] < __builtin_inf(), logs = a->lossy[q] != 0;
    for (int64_t z = 0; z < a->states; z++) s->made[z] = -1;
    for (int64_t d = first; d < stop; d++) end_path(a, q, possible, path_of(a, q, d));
    for (int64_t last = steps_of(a, q) - 1, step = last; step >= 0 && possible; step--) {
        int64_t count = 0, *at = path_of(a, q, first) + step;
        for (int64_t d = first; d < stop; d++, at += a->paths.rank) {
            int64_t state = step < last ? at[1] : 0;
            double u;
            __builtin_memcpy(&u, at, sizeof u);
            if (step == last && u < 0) {
                *at = (int64_t)(-1 - u);
                continue;
            }
            if (s->made[state] != step) {
                s->made[state] = step, s->slots[state] = count++;
                make_column(s, q, step, step < last ? column_into(s, step + 1, state, logs) : 0, s->slots[state]);
            }
            *at = drawn_state(s, s->slots[state], u);
        }
    }
}

INLINE int64_t blocks_of_draws(const Chain *a) { return (a->paths.ranks + DRAWS - 1) / DRAWS; }
INLINE int64_t columns_of(const Chain *a) {
    int64_t most = a->paths.ranks < DRAWS ? a->paths.ranks : DRAWS;
    return most < a->states ? most : a->states;
}

/* Draws of the places from `first` to before `last`, where each sequence has a place for each DRAWS draws. */
EXPORT int64_t EXPORTED(logchain_sample)(const Chain *a) {
    int64_t c = a->states, size = sizeof(real), matrix = a->one_matrix ? c : 1;
    Room room = {.begin = a->room};
    Sampler s = {.a = a, .width = padded(c), .blocks = vectors_of(c), .transposed_set = {-1, -1}};
    s.matrix[0] = take(&room, matrix * s.width * size), s.matrix[1] = take(&room, matrix * s.width * size);
    s.weights = take(&room, columns_of(a) * s.width * size), s.sums = take(&room, columns_of(a) * s.blocks * 8);
    s.slots = take(&room, c * 8), s.made = take(&room, c * 8);
    if (!a->room) return room.bytes;
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = place / blocks_of_draws(a), first = place % blocks_of_draws(a) * DRAWS;
        s.set = q / a->members;
        draw_paths(&s, q, first, a->paths.ranks - first < DRAWS ? a->paths.ranks : first + DRAWS);
    }
    return 0;
}
