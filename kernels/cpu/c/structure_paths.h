/* Paths over bands, arcs or durations. The best one in logarithms, by the state before each state on it:

       b_0 = log p0 + x_0      b_i(j) = max_k (b_{i-1}(k) + log P_i(k, j)) + x_i(j)      z_{i-1}(j): the lowest such k

   Rows are relative to their largest entry. Draws from the posterior go from the last state back: the state k before a
   state j has a weight of S(k) P(k, j), of the forward messages S that logchain_exact_forward has kept. */
#pragma once
#include "exact.h"

typedef int32_t Indices __attribute__((vector_size(LANES * 4)));

typedef struct { reals value; wholes from; } Choice;

INLINE Choice better_of(Choice a, Choice b) {
    wholes better = (b.value > a.value) | ((b.value == a.value) & (b.from < a.from));
    return (Choice){where(better, b.value, a.value), (b.from & better) | (a.from & ~better)};
}

/* What leads into the states of all blocks: the largest b + log P, and from where that comes. */
static void best_bands(const BlockMatrix *m, const real *from, real *to, int32_t *before) {
    for (int64_t block = 0; block < m->blocks; block++) {
        Choice best = {splat(-INFINITE), {0}};
        for (int64_t entry = m->start[block]; entry < m->start[block + 1]; entry++) {
            int64_t k = block * LANES + m->shift[entry - m->start[block]];
            reals term = load(from + k) + load(m->entries.m + entry * LANES);
            best = better_of(best, (Choice){term, lane_numbers() + (whole)k});
        }
        Indices sources = __builtin_convertvector(best.from, Indices);
        store(to + block * LANES, best.value), __builtin_memcpy(before + block * LANES, &sources, sizeof sources);
    }
}

static void best_arcs(const BlockMatrix *m, int64_t width, const real *from, real *to, int32_t *before) {
    const Slices *s = m->slices;
    for (int64_t j = 0; j < width; j++) to[j] = -INFINITE, before[j] = 0;
    for (int64_t block = 0; block < m->blocks; block++) {
        Choice best = {splat(-INFINITE), {0}};
        for (int64_t entry = m->start[block]; entry < m->start[block + 1]; entry++) {
            const int32_t *other = s->other + entry * LANES;
            Indices sources;
            __builtin_memcpy(&sources, other, sizeof sources);
            reals term = gather_reals(from, other) + load(m->entries.m + entry * LANES);
            best = better_of(best, (Choice){term, __builtin_convertvector(sources, wholes)});
        }
        for (int l = 0; l < LANES; l++) { /* a state may have several rows */
            int64_t j = s->state[block * LANES + l];
            int32_t k = (int32_t)best.from[l];
            if (!(best.value[l] > to[j] || (best.value[l] == to[j] && k < before[j]))) continue;
            to[j] = best.value[l], before[j] = k;
        }
    }
}

/* Entries to states from one of another segment, and from the same one with a step more. */
static void best_durations(const BlockMatrix *m, const real *from, real *to, int32_t *before) {
    int64_t longest = m->longest, states = m->segments * longest;
    const real *weight = durations_of(m).m;
    for (int64_t block = 0; block < m->matrix_blocks; block++) {
        Choice best = {splat(-INFINITE), {0}};
        for (int64_t k = 0; k < m->segments; k++) {
            reals term = from[k * longest] + load(m->entries.m + (m->start[block] + k) * LANES);
            best = better_of(best, (Choice){term, (wholes){0} + (whole)(k * longest)});
        }
        store(m->sums.m + block * LANES, best.value), store(m->sums.e + block * LANES, (reals)best.from);
    }
    for (int64_t s = 0; s < m->segments; s++)
        for (int64_t r = 0; r < longest; r += LANES, weight += LANES) {
            int64_t j = s * longest + r, left = smaller_of(states - j, LANES);
            Choice after = {load(from + j + 1), lane_numbers() + (whole)(j + 1)}, best = {splat(-INFINITE), {0}};
            after.value = where(lane_numbers() < (whole)(longest - 1 - r), after.value, splat(-INFINITE));
            best = better_of(better_of(best, after),
                             (Choice){m->sums.m[s] + load(weight), (wholes){0} + bits_of(m->sums.e[s])});
            Indices sources = __builtin_convertvector(best.from, Indices);
            store(to + j, best.value);
            if (left == LANES) __builtin_memcpy(before + j, &sources, sizeof sources);
            else for (int64_t l = 0; l < left; l++) before[j + l] = sources[l];
        }
}

/* Adds potentials to a row, less their largest where there is a path and less `top`, the largest entry of the row
   before, which becomes that of this one. Returns whether a potential is NaN or +inf. */
static int add_potentials(int64_t c, const operand *x, real *row, real *top) {
    reals high = splat(-INFINITE), most = high;
    wholes bad = {0};
    for (int64_t j = 0; j < c; j += LANES) {
        reals a = read_some(x + j, 1, c - j, -INFINITE);
        bad |= ~(a < INFINITE), high = larger(where(load(row + j) > -INFINITE, a, splat(-INFINITE)), high);
    }
    real shift = largest(high) > -INFINITE ? largest(high) : 0;
    for (int64_t j = 0; j < c; j += LANES) {
        reals b = (load(row + j) - *top) + (read_some(x + j, 1, c - j, -INFINITE) - shift);
        most = larger(b, most), store(row + j, b);
    }
    *top = largest(most) > -INFINITE ? largest(most) : 0;
    return any(bad);
}

/* The pass over sequences. Of back-pointers, those of `every` steps are in memory: a block of steps that begins with a
   checkpoint, from which all blocks but the last are computed again on the way back. */
typedef struct {
    const Exact *a;
    BlockMatrix matrix;
    real *row, *next;         /* the message of a step, with -inf on both sides as far as sums reach, and scratch */
    real top;                 /* the largest entry of the row, or 0 */
    int unknown;              /* an operand is NaN or +inf */
    int32_t *before;          /* (every, width): the states before those of the steps of a block */
    real *checkpoints, *tops; /* (blocks, width) and (blocks): the first row of each block, and its `top` */
} BestScan;

/* The steps of the block that begins with step `first`, after that step. */
static void best_block(BestScan *w, const Place *place, int64_t first) {
    const Exact *a = w->a;
    int64_t width = whole_vectors(a->states), last = smaller_of(first + a->every, place->steps - 1);
    int32_t *before = w->before;
    for (int64_t step = first + 1; step <= last; step++, before += width) {
        real *row = w->row;
        read_matrix(a, &w->matrix, place, step);
        if (kind_of(a) == BANDS) best_bands(&w->matrix, row, w->next, before);
        else if (kind_of(a) == DURATIONS) best_durations(&w->matrix, row, w->next, before);
        else best_arcs(&w->matrix, width, row, w->next, before);
        w->row = w->next, w->next = row;
        w->unknown |= w->matrix.has_nan | add_potentials(a->states, x_row(a, place, step), w->row, &w->top);
    }
}

static void scan_best(BestScan *w, const Place *place) {
    const Exact *a = w->a;
    int64_t width = whole_vectors(a->states), block = 0;
    const operand *p0 = a->p0.data + place->p0;
    w->top = 0, w->unknown = read_logarithms((int)a->logarithms, a->states, p0, a->p0.step, w->row);
    w->unknown |= add_potentials(a->states, x_row(a, place, 0), w->row, &w->top);
    for (int64_t first = 0; first < place->steps - 1; first += a->every, block++) {
        write_row(width, w->row, 1, w->checkpoints + block * width);
        w->tops[block] = w->top;
        best_block(w, place, first);
    }
}

/* The path of a sequence from its last row; -1 after its end, and everywhere without a path or where it is unknown. */
static void follow_best(BestScan *w, const Place *place) {
    const Exact *a = w->a;
    int64_t *path = a->paths + place->index * a->steps, state = 0, width = whole_vectors(a->states);
    for (int64_t j = 1; j < a->states; j++) if (w->row[j] > w->row[state]) state = j;
    int64_t steps = w->unknown || w->row[state] == -INFINITE ? 0 : place->steps, last = steps - 1;
    a->log_norm[place->index] = w->unknown ? __builtin_nan("") : 0;
    for (int64_t step = steps; step < a->steps; step++) path[step] = -1;
    if (steps > 0) path[last] = state;
    for (int64_t block = last > 0 ? (last - 1) / a->every : -1; block >= 0; block--) {
        int64_t first = block * a->every, step = smaller_of(first + a->every, last);
        if (step < last) {
            write_row(width, w->checkpoints + block * width, 1, w->row);
            w->top = w->tops[block], best_block(w, place, first);
        }
        for (; step > first; step--) path[step - 1] = state = w->before[(step - first - 1) * width + state];
    }
}

/* Paths, and NaN as log_norm where an operand is no finite weight or potential, so that no path is known. */
EXPORT int64_t EXPORTED(logchain_exact_best)(const Exact *a) {
    Scratch scratch = {.begin = a->scratch};
    int64_t reach = reach_of(a), width = whole_vectors(a->states), padded = width + 2 * reach;
    int64_t blocks = (a->steps + a->every - 1) / a->every;
    BestScan w = {.a = a, .matrix = new_matrix(a, 0, &scratch)};
    real *rows = take_reals(&scratch, 2 * padded);
    w.before = take(&scratch, a->every * width * 4);
    w.checkpoints = take_reals(&scratch, blocks * width), w.tops = take_reals(&scratch, blocks);
    if (!a->scratch) return scratch.bytes;
    w.matrix.as_logs = 1, w.row = rows + reach, w.next = w.row + padded;
    for (int64_t j = 0; j < 2 * padded; j++) rows[j] = -INFINITE;
    for (const Place *place = a->places + a->first; place < a->places + a->last; place++)
        scan_best(&w, place), follow_best(&w, place);
    return 0;
}

/* The index drawn from a row of weights by a number in [0, 1): the first up to which their share is more than that. */
static int64_t drawn_from(int64_t width, Row weights, double number) {
    real top = top_of_row(width, weights);
    double left = number * sum_of_split_row(width, weights, top);
    int64_t drawn = 0;
    for (int64_t j = 0; j < width; j += LANES) {
        reals weight = load(weights.m + j) * power(load(weights.e + j) - top);
        for (int l = 0; l < LANES; l++) {
            if (!(weight[l] > 0)) continue;
            drawn = j + l, left -= (double)weight[l];
            if (left < 0) return drawn;
        }
    }
    return drawn;
}

/* The same for durations: ends (k, 0) of all segments, and after that of the state's own the state with a step more. */
static int64_t read_segment_sources(const Exact *a, const operand *weights, Row message, int64_t state, Row to,
                                    int32_t *from) {
    int64_t segments = a->terms, longest = a->states / segments, s = state / longest;
    int logs = (int)a->logarithms, is_longest = state % longest + 1 == longest;
    Split duration = weight_split(splat((real)weights[segments * segments + state]), logs);
    for (int64_t done = 0; done <= segments; done += LANES) {
        reals weight = splat(logs ? -INFINITE : 0);
        Split forward = zero_split(), factor = duration;
        for (int64_t l = 0; l < LANES && done + l <= segments; l++) {
            int64_t place = done + l, end = place - (place > s), stays = place == s + 1;
            int64_t k = stays ? state + 1 : end * longest;
            if (stays && is_longest) continue;
            if (stays) weight[l] = logs ? 0 : 1, factor.m[l] = 1, factor.e[l] = 0;
            else weight[l] = (real)weights[end * segments + s];
            forward.m[l] = message.m[k], forward.e[l] = message.e[k], from[place] = (int32_t)k;
        }
        Split product = weight_split(weight, logs);
        store_split(to, done, (Split){product.m * factor.m * forward.m, product.e + factor.e + forward.e});
    }
    return whole_vectors(segments + 1);
}

/* The weights S P of what leads into a state as a row, and from where, in rising order; returns the width. The pattern
   of bands is (2, bands): offsets, and bands by falling offsets. */
static int64_t read_sources(const Exact *a, const operand *weights, Row message, int64_t state, Row to, int32_t *from) {
    const Graph *graph = a->pattern;
    const int64_t *offsets = a->pattern;
    if (kind_of(a) == DURATIONS) return read_segment_sources(a, weights, message, state, to, from);
    int logs = (int)a->logarithms, bands = kind_of(a) == BANDS;
    int64_t begin = bands ? 0 : graph->first[state], count = bands ? a->terms : graph->first[state + 1] - begin;
    for (int64_t done = 0; done < count; done += LANES) {
        reals weight = splat(logs ? -INFINITE : 0);
        Split forward = zero_split();
        for (int64_t l = 0; l < LANES && done + l < count; l++) {
            int64_t entry = bands ? offsets[a->terms + done + l] : graph->order[begin + done + l];
            int64_t k = bands ? state - offsets[entry] : graph->source[entry];
            if (k < 0 || k >= a->states) continue;
            weight[l] = (real)weights[entry * (bands ? a->weights_outer : a->weights_inner) +
                                      (bands ? state * a->weights_inner : 0)];
            forward.m[l] = message.m[k], forward.e[l] = message.e[k], from[done + l] = (int32_t)k;
        }
        Split product = weight_split(weight, logs);
        store_split(to, done, (Split){forward.m * product.m, forward.e + product.e});
    }
    return whole_vectors(count);
}

/* Paths (draws, n, v) by the numbers in `weight`, likewise; -1 after ends, and where log_norm is no finite number. */
EXPORT int64_t EXPORTED(logchain_exact_draw)(const Exact *a) {
    Scratch scratch = {.begin = a->scratch};
    int64_t width = whole_vectors(a->states), most = larger_of(width, whole_vectors(a->terms + 1)), v = a->steps;
    Row terms = take_row(&scratch, most);
    int32_t *from = take(&scratch, most * 4);
    if (!a->scratch) return scratch.bytes;
    for (int64_t at = a->first; at < a->last; at++) {
        const Place *place = a->places + at;
        double log_norm = a->log_norm[place->index];
        int64_t steps = log_norm - log_norm == 0 ? place->steps : 0;
        for (int64_t draw = 0; draw < a->draws; draw++) {
            int64_t begin = (draw * a->sequences + place->index) * v, *path = a->paths + begin, state = 0;
            for (int64_t step = steps; step < v; step++) path[step] = -1;
            for (int64_t step = steps - 1; step >= 0; step--) {
                int64_t row = (place->index * v + step) * width, last = step + 1 == steps;
                Row message = {a->mantissas + row, a->exponents + row};
                const operand *weights = a->weights + place->weights + (a->one_matrix ? 0 : step) * a->weights_step;
                int64_t count = last ? width : read_sources(a, weights, message, state, terms, from);
                int64_t drawn = drawn_from(count, last ? message : terms, a->weight[begin + step]);
                path[step] = state = last ? drawn : from[drawn];
            }
        }
    }
    return 0;
}
