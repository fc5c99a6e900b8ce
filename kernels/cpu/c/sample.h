/* State paths drawn from their posterior, backwards from forward messages a:

       z_{v-1} ~ a_{v-1}(k)        z_{i-1} ~ a_{i-1}(k) P_i(k, z_i)

   A number -1 - z at a last step means that it is in state z. A number u from [0, 1) draws the first state whose
   cumulative weight reaches (1 - u) times the total, never one of weight 0. The weights for a next state z_i, a column,
   are computed when the first draw needs them. The kept messages of flagged sequences are logarithms, and so are their
   columns. Linear columns are scaled to entries near 1: products with messages do not overflow, and forward.h has
   flagged all sequences where underflow or raised entries would matter. */
#pragma once
#include "viterbi.h"

enum { DRAWS = 512 }; /* draws per backward pass: eight states of all their paths fit into the second-level cache */

typedef struct {
    const Chain *a;
    int64_t set, width, blocks; /* c rounded up to whole vectors; number of vectors */
    int64_t transposed_set[2];  /* sets in `matrix`: linear, logarithms */
    real *matrix[2];            /* linear, logarithms: (c, width), all columns of one matrix; or (1, width), a column */
    real *message, *weights;    /* (width): of a step; (columns, width) */
    double *sums;               /* (columns, blocks): cumulative weight at the end of each vector */
    int64_t *slots, *slot_steps;      /* (c): column of a state z_i; the step that it belongs to */
} Sampler;

/* The transitions into a state: linear, divided by a power of two, or logarithms. */
static void read_column(const Sampler *s, int64_t step, int64_t state, int as_logarithms, real *out) {
    const Chain *a = s->a;
    const real *from = matrix_at(&a->bulk, s->set, step) + state * a->bulk.to;
    int are_logs = a->logarithms != 0;
    read_row(a->states, s->width, from, a->bulk.from, are_logs ? -INFINITE : 0, out);
    real top = top_of(out, s->width), factor = factor_to_one(top);
    for (int64_t k = 0; k < s->width; k += LANES) {
        reals entry = load(out + k);
        if (!as_logarithms) entry = are_logs ? exponential(entry - top, NO_TAIL) : entry * factor;
        else if (!are_logs) entry = logarithms(entry);
        store(out + k, entry);
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
static void make_column(const Sampler *s, int logs, const real *column, int64_t slot) {
    real *weights = s->weights + slot * s->width;
    double *sums = s->sums + slot * s->blocks, sum = 0;
    reals high = splat(-INFINITE);
    for (int64_t k = 0; k < s->width; k += LANES) {
        reals weight = load(s->message + k);
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
    int possible = a->log_norm[q] > -__builtin_inf() && a->log_norm[q] < __builtin_inf(), logs = a->flagged[q] != 0;
    for (int64_t z = 0; z < a->states; z++) s->slot_steps[z] = -1;
    for (int64_t d = first; d < stop; d++) end_path(a, q, possible, path_of(a, q, d));
    for (int64_t last = steps_of(a, q) - 1, step = last; step >= 0 && possible; step--) {
        int64_t count = 0, *at = path_of(a, q, first) + step;
        read_row(a->states, s->width, message_at(a, q, step), 1, logs ? -INFINITE : 0, s->message);
        for (int64_t d = first; d < stop; d++, at += a->paths.rank) {
            int64_t state = step < last ? at[1] : 0;
            double u;
            __builtin_memcpy(&u, at, sizeof u);
            if (step == last && u < 0) {
                *at = (int64_t)(-1 - u);
                continue;
            }
            if (s->slot_steps[state] != step) {
                s->slot_steps[state] = step, s->slots[state] = count++;
                make_column(s, logs, step < last ? column_into(s, step + 1, state, logs) : 0, s->slots[state]);
            }
            *at = drawn_state(s, s->slots[state], u);
        }
    }
}

/* Draws of the places from `first` to before `last`, where each sequence has a place for each DRAWS draws. */
EXPORT int64_t EXPORTED(logchain_sample)(const Chain *a) {
    int64_t c = a->states, draws = a->paths.ranks, blocks = (draws + DRAWS - 1) / DRAWS, matrix = a->one_matrix ? c : 1;
    int64_t columns = smaller_of(smaller_of(draws, DRAWS), c);
    Scratch scratch = {.begin = a->scratch};
    Sampler s = {.a = a, .width = padded(c), .blocks = vectors_of(c), .transposed_set = {-1, -1}};
    s.matrix[0] = take_reals(&scratch, matrix * s.width), s.matrix[1] = take_reals(&scratch, matrix * s.width);
    s.weights = take_reals(&scratch, columns * s.width), s.sums = take(&scratch, columns * s.blocks * 8);
    s.message = take_reals(&scratch, s.width), s.slots = take(&scratch, c * 8), s.slot_steps = take(&scratch, c * 8);
    if (!a->scratch) return scratch.bytes;
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = place / blocks, first = place % blocks * DRAWS;
        s.set = q / a->members;
        draw_paths(&s, q, first, smaller_of(draws, first + DRAWS));
    }
    return 0;
}
