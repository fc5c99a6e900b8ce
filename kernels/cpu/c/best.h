/* Best paths over bands or arcs, in logarithms, by the state before each state on the best path into it:

       b_0 = log p0 + x_0      b_i(j) = max_k (b_{i-1}(k) + log P_i(k, j)) + x_i(j)      z_{i-1}(j): the lowest such k

   Rows are relative to their largest entry. */
#pragma once
#include "exact.h"

typedef int32_t Indices __attribute__((vector_size(LANES * 4)));

typedef struct { reals value; wholes from; } Best;

INLINE Best better_of(Best a, Best b) {
    wholes better = (b.value > a.value) | ((b.value == a.value) & (b.from < a.from));
    return (Best){where(better, b.value, a.value), (b.from & better) | (a.from & ~better)};
}

/* What leads into the states of all blocks: the largest b + log P, and from where that comes. */
static void best_bands(const Matrix *m, const real *from, real *to, int32_t *before) {
    wholes lane;
    UNROLL for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int64_t block = 0; block < m->blocks; block++) {
        Best best = {splat(-INFINITE), {0}};
        for (int64_t entry = m->start[block]; entry < m->start[block + 1]; entry++) {
            int64_t k = block * LANES + m->shift[entry - m->start[block]];
            best = better_of(best, (Best){load(from + k) + load(m->entries.m + entry * LANES), lane + (whole)k});
        }
        Indices found = __builtin_convertvector(best.from, Indices);
        store(to + block * LANES, best.value), __builtin_memcpy(before + block * LANES, &found, sizeof found);
    }
}

static void best_arcs(const Matrix *m, int64_t width, const real *from, real *to, int32_t *before) {
    const Slices *s = m->slices;
    for (int64_t j = 0; j < width; j++) to[j] = -INFINITE, before[j] = 0;
    for (int64_t block = 0; block < m->blocks; block++) {
        Best best = {splat(-INFINITE), {0}};
        for (int64_t entry = m->start[block]; entry < m->start[block + 1]; entry++) {
            const int32_t *other = s->other + entry * LANES;
            Indices found;
            __builtin_memcpy(&found, other, sizeof found);
            reals term = gather_reals(from, other) + load(m->entries.m + entry * LANES);
            best = better_of(best, (Best){term, __builtin_convertvector(found, wholes)});
        }
        for (int l = 0; l < LANES; l++) { /* a state may have several rows */
            int64_t j = s->state[block * LANES + l];
            int32_t k = (int32_t)best.from[l];
            if (!(best.value[l] > to[j] || (best.value[l] == to[j] && k < before[j]))) continue;
            to[j] = best.value[l], before[j] = k;
        }
    }
}

/* log p0 as a row; whether some entry is no finite weight. */
static int read_log_p0(const Exact *a, const Place *place, real *to) {
    int logs = (int)a->logarithms;
    wholes bad = {0};
    for (int64_t j = 0; j < a->states; j += LANES) {
        reals p = read_some(a->p0 + place->p0 + j * a->p0_state, a->p0_state, a->states - j, logs ? -INFINITE : 0);
        bad |= is_no_weight(p, logs) | (p == INFINITE), store(to + j, logs ? p : logarithms(p));
    }
    return any(bad);
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

/* The path of a sequence from its last row; -1 after its end, and everywhere without a path or `unknown`. */
static void trace(const Exact *a, const Place *place, int unknown, const real *row, const int32_t *before) {
    int64_t *path = a->paths + place->index * a->steps, state = 0, width = whole_vectors(a->states);
    for (int64_t j = 1; j < a->states; j++) if (row[j] > row[state]) state = j;
    int64_t steps = unknown || row[state] == -INFINITE ? 0 : place->steps;
    for (int64_t step = steps; step < a->steps; step++) path[step] = -1;
    for (int64_t step = steps - 1; step >= 0; step--) {
        path[step] = state;
        if (step > 0) state = before[step * width + state];
    }
    a->log_norm[place->index] = unknown ? __builtin_nan("") : 0;
}

/* Paths, and NaN as log_norm where an operand is no finite weight or potential, so that no path is known. */
EXPORT int64_t EXPORTED(logchain_best)(const Exact *a) {
    Room room = {.begin = a->room};
    int64_t reach = reach_of(a), width = whole_vectors(a->states), bytes = (width + 2 * reach) * (int64_t)sizeof(real);
    Matrix m = new_matrix(a, 0, &room);
    real *rows[2] = {take(&room, bytes), take(&room, bytes)};
    int32_t *before = take(&room, a->steps * width * 4);
    if (!a->room) return room.bytes;
    m.as_logs = 1;
    for (int64_t j = 0; j < width + 2 * reach; j++) rows[0][j] = rows[1][j] = -INFINITE;
    for (const Place *place = a->places + a->first; place < a->places + a->last; place++) {
        real *row = rows[0] + reach, *next = rows[1] + reach, top = 0;
        int unknown = read_log_p0(a, place, row) | add_potentials(a->states, x_row(a, place, 0), row, &top);
        for (int64_t step = 1; step < place->steps; step++) {
            real *last = row;
            read_matrix(a, &m, place, step);
            if (kind_of(a) == BANDS) best_bands(&m, row, next, before + step * width);
            else best_arcs(&m, width, row, next, before + step * width);
            row = next, next = last;
            unknown |= m.has_nan | add_potentials(a->states, x_row(a, place, step), row, &top);
        }
        trace(a, place, unknown, row, before);
    }
    return 0;
}
