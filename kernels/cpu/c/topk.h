/* The k best paths: each state has k messages, one for each rank.

       a_i(j, .) = the k largest a_{i-1}(h, r) + log P_i(h, j), over states h and ranks r, + x_i(j)

   Each pair of state and rank stands for one path, so that no path comes twice; a rank without a path is -inf. The
   choices h k + r are kept, for the way back. Among equals the lower choice comes first: rank 0 is the path of
   viterbi.h. */
#pragma once
#include "viterbi.h"

/* The sorted ranks of LANES states: each term is inserted, and pushes down those that it exceeds. */
static void rank_block(const Best *b, const real *before, int64_t j, real *sums, whole *choices) {
    int64_t width = b->walk.width, ranks = b->ranks, filled = ranks - 1;
    real *best = b->best;
    whole *chosen = (whole *)(b->best + ranks * LANES);
    wholes none = {0};
    for (int64_t s = 0; s < ranks; s++) {
        store(best + s * LANES, splat(-INFINITE));
        __builtin_memcpy(chosen + s * LANES, &none, sizeof none);
    }
    for (int64_t h = 0; h < b->walk.a->states; h++) {
        reals logs = load(b->logs + h * width + j);
        for (int64_t r = 0; r < ranks; r++) { /* later ranks of a state are not larger */
            reals term = before[r * width + h] + logs;
            if (!any(term > load(best + filled * LANES))) break;
            wholes moved = {0}, choice = none + (whole)(h * ranks + r);
            for (int64_t s = r; s < ranks; s++) { /* the first r ranks are not less */
                reals there = load(best + s * LANES);
                wholes old;
                __builtin_memcpy(&old, chosen + s * LANES, sizeof old);
                moved |= term > there;
                store(best + s * LANES, where(moved, term, there));
                wholes new = where_whole(moved, choice, old);
                __builtin_memcpy(chosen + s * LANES, &new, sizeof new);
                term = where(moved, there, term), choice = where_whole(moved, old, choice);
            }
        }
    }
    for (int64_t s = 0; s < ranks; s++) {
        store(sums + s * width + j, load(best + s * LANES));
        __builtin_memcpy(choices + s * width + j, chosen + s * LANES, sizeof none);
    }
}

INLINE real *ranked_message(const Best *b, int64_t place, int64_t step) {
    return b->messages + ((step & 1) * b->walk.count + place) * b->ranks * b->walk.width;
}
INLINE whole *choices_at(const Best *b, int64_t place, int64_t step) {
    return b->choices + (step * b->walk.count + place) * b->ranks * b->walk.width;
}

/* The `ranks` largest entries of a last message, the largest first, as choices; returns how many there are. */
static int64_t last_choices(const Best *b, const real *message, real *values, whole *choices) {
    int64_t count = 0;
    for (int64_t j = 0; j < b->walk.a->states; j++)
        for (int64_t r = 0; r < b->ranks; r++) {
            real value = message[r * b->walk.width + j];
            if (!(value > -INFINITE) || (count == b->ranks && !(value > values[count - 1]))) break;
            int64_t s = count < b->ranks ? count++ : count - 1;
            for (; s > 0 && value > values[s - 1]; s--) values[s] = values[s - 1], choices[s] = choices[s - 1];
            values[s] = value, choices[s] = (whole)(j * b->ranks + r);
        }
    return count;
}

static void ranks_backward(const Best *b, int64_t place) {
    const Chain *a = b->walk.a;
    int64_t q = sequence_of(&b->walk, place), last = steps_of(a, q) - 1;
    whole *chosen = (whole *)(b->best + b->ranks * LANES);
    int64_t count = last_choices(b, ranked_message(b, place, last), b->best, chosen);
    for (int64_t rank = 0; rank < b->ranks; rank++) {
        int64_t *path = path_of(a, q, rank), choice = chosen[rank];
        for (int64_t step = end_path(a, q, rank < count && !a->lossy[q], path) - 1; step >= 0; step--) {
            path[step] = choice / b->ranks;
            if (step > 0) choice = choices_at(b, place, step)[choice % b->ranks * b->walk.width + path[step]];
        }
    }
}

static void best_ranks(Best *b) {
    Walk *w = &b->walk;
    const Chain *a = w->a;
    int64_t width = w->width, count = active(w, w->count, 0);
    for (int64_t place = 0; place < count; place++) {
        real *message = ranked_message(b, place, 0);
        a->lossy[sequence_of(w, place)] = (uint8_t)start_best(b, place, message);
        for (int64_t k = width; k < b->ranks * width; k++) message[k] = -INFINITE;
    }
    for (int64_t step = 0; step < a->steps && count > 0; step++) {
        int64_t still = active(w, count, step + 1);
        if (step > 0) read_logarithms(b, step);
        for (int64_t place = 0; place < count && step > 0; place++) {
            const real *x;
            for (int64_t k = 0; k < vectors_of(width); k++)
                rank_block(b, ranked_message(b, place, step - 1), start_of(k, width), w->sums,
                           choices_at(b, place, step));
            rows_of_x(w, place, 1, step, &x);
            int bad = weigh_best(b->ranks, width, x, w->sums, ranked_message(b, place, step));
            a->lossy[sequence_of(w, place)] |= (uint8_t)(bad | b->unknown);
        }
        if (step + 1 == a->steps) still = 0;
        for (int64_t place = still; place < count; place++) ranks_backward(b, place);
        count = still;
    }
}

EXPORT int64_t EXPORTED(logchain_topk_paths)(const Chain *a) { return each_best(a, 1, 0, best_ranks); }
