/* Paths over bands or arcs that are drawn from the posterior, from the last state back: the state k before a state j
   has a weight of S(k) P(k, j), of the forward messages S that logchain_exact_forward has kept. */
#pragma once
#include "exact.h"

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

/* The weights S P of what leads into a state as a row, and from where, in rising order; returns the width. The pattern
   of bands is (2, bands): offsets, and bands by falling offsets. */
static int64_t read_sources(const Exact *a, const operand *weights, Row message, int64_t state, Row to, int32_t *from) {
    const Graph *graph = a->pattern;
    const int64_t *offsets = a->pattern;
    int logs = (int)a->logarithms, bands = kind_of(a) == BANDS;
    int64_t begin = bands ? 0 : graph->first[state], count = bands ? a->terms : graph->first[state + 1] - begin;
    for (int64_t done = 0; done < count; done += LANES) {
        reals weight = splat(logs ? -INFINITE : 0);
        Split own = zero_split();
        for (int64_t l = 0; l < LANES && done + l < count; l++) {
            int64_t entry = bands ? offsets[a->terms + done + l] : graph->order[begin + done + l];
            int64_t k = bands ? state - offsets[entry] : graph->source[entry];
            if (k < 0 || k >= a->states) continue;
            weight[l] = (real)weights[entry * (bands ? a->weights_outer : a->weights_inner) +
                                      (bands ? state * a->weights_inner : 0)];
            own.m[l] = message.m[k], own.e[l] = message.e[k], from[done + l] = (int32_t)k;
        }
        Split product = weight_split(weight, logs);
        store_split(to, done, (Split){own.m * product.m, own.e + product.e});
    }
    return whole_vectors(count);
}

/* Paths (draws, n, v) by the numbers in `weight`, likewise; -1 after ends, and where log_norm is no finite number. */
EXPORT int64_t EXPORTED(logchain_draw)(const Exact *a) {
    Room room = {.begin = a->room};
    int64_t width = whole_vectors(a->states), most = larger_of(width, whole_vectors(a->terms)), v = a->steps;
    Row terms = take_row(&room, most);
    int32_t *from = take(&room, most * 4);
    if (!a->room) return room.bytes;
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
