/* The best paths, by additions and maxima of logarithms:

       t_i(j) = max_k (a_{i-1}(k) + log P_i(k, j))      a_i(j) = t_i(j) + (x_i(j) - max x_i), less its largest entry

   All messages a of the sequences that are computed together are kept. On the way back, the state before a state j is
   the lowest k that attains t_i(j). A sequence that holds a NaN or +inf is flagged. Both ways in one call keep
   messages in scratch, separate calls in `messages`.

   Of the k best paths, each state has k messages, one for each rank:

       t_i(j, .) = the k largest a_{i-1}(h, r) + log P_i(h, j), over states h and ranks r

   Each pair of state and rank is one path, so that no path comes twice; a rank without a path is -inf. The choices
   h k + r are kept for the way back, and two messages. Among equals the lower choice comes first. */
#pragma once
#include "forward.h"

/* The pass over places of a set. */
typedef struct {
    Pass pass;               /* without states, scales and matrix */
    int64_t ranks, read;     /* paths kept for each state; set and step of the matrix in `logs` */
    int64_t pitch;           /* places from the message of a step to that of the next */
    int unknown;             /* the matrix in `logs` has an entry that is NaN or +inf */
    real *logs, *transposed; /* (width, width): log matrix, padded with -inf; its transpose, or one column */
    real *messages;          /* (v, pitch, width), or with choices (2, count, ranks, width) */
    whole *choices;          /* (v, count, ranks, width), or null */
    real *best;              /* (2, ranks, LANES): scratch for choices */
} Best;

/* The logarithms of the matrix into a step, and their transpose where all steps have one matrix. */
static void read_log_matrix(Best *b, int64_t step) {
    const Chain *a = b->pass.a;
    int64_t c = a->states, width = b->pass.width, index = b->pass.set * a->steps + (a->one_matrix ? 0 : step - 1);
    const real *from = matrix_at(&a->bulk, b->pass.set, step);
    if (b->read == index) return;
    b->read = index, b->unknown = 0;
    for (int64_t k = 0; k < c; k++)
        b->unknown |= read_logarithms((int)a->logarithms, c, from + k * a->bulk.from, a->bulk.to, b->logs + k * width);
    for (int64_t k = c * width; k < width * width; k++) b->logs[k] = -INFINITE;
    if (a->one_matrix) transpose(width, b->logs, width, b->transposed, width);
}

/* The logarithms of the transitions into a state (width). */
INLINE const real *column_of_logarithms(Best *b, int64_t step, int64_t state) {
    const Chain *a = b->pass.a;
    if (a->one_matrix) return b->transposed + state * b->pass.width;
    const real *from = matrix_at(&a->bulk, b->pass.set, step) + state * a->bulk.to;
    read_row(a->states, a->states, from, a->bulk.from, 0, b->pass.initial);
    read_logarithms((int)a->logarithms, a->states, b->pass.initial, 1, b->transposed);
    return b->transposed;
}

/* Messages of `ranks` rows from sums and x, less their largest entry, which is in the first row. Whether x holds NaN or
   +inf. */
INLINE int weigh_best(int64_t ranks, const Pass *w, const real *x, const real *sums, real *message) {
    int64_t c = w->a->states, width = w->width;
    real top = top_of(x, c);
    reals high = splat(-INFINITE);
    wholes bad = {0};
    for (int64_t k = 0; k < vectors_of(c); k++) {
        int64_t j = start_of(k, c);
        reals potential = read_some(x + j, 1, c, -INFINITE);
        bad |= ~(potential < INFINITE);
        high = larger(load(sums + j) + (potential - top), high);
    }
    real most = largest(high);
    most = most > -INFINITE ? most : 0;
    for (int64_t rank = 0; rank < ranks; rank++, sums += width, message += width)
        for (int64_t k = 0; k < vectors_of(c); k++) {
            int64_t j = start_of(k, c);
            store(message + j, (load(sums + j) + (read_some(x + j, 1, c, -INFINITE) - top)) - most);
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
    wholes first = (wholes){0} + (whole)width;
    for (int64_t k = 0; k < vectors_of(width); k++) {
        int64_t j = start_of(k, width);
        reals sum = b ? load(a + j) + load(b + j) : load(a + j);
        first = __builtin_elementwise_min(where_whole(sum == most, lane_numbers() + (whole)j, first), first);
    }
    return lowest(first);
}

/* The first message of a place, from p0 relative to its largest weight. Whether it holds NaN or +inf. */
static int start_best(Best *b, int64_t place, real *message) {
    const Pass *w = &b->pass;
    const Chain *a = w->a;
    int64_t width = w->width, stop = b->ranks * width;
    real *row = w->initial;
    read_row(a->states, width, p0_at(a, sequence_of(w, place)), a->p0.step, a->logarithms ? -INFINITE : 0, row);
    real top = top_of(row, width), factor = factor_to_one(top);
    for (int64_t j = 0; j < width; j++) row[j] = a->logarithms ? row[j] - top : row[j] * factor;
    int bad = read_logarithms((int)a->logarithms, a->states, row, 1, w->sums);
    for (int64_t j = width; j < stop; j++) message[j] = -INFINITE;
    return bad | weigh_best(1, w, x_at(a, sequence_of(w, place), 0), w->sums, message);
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

/* Of ranked paths, the messages of two steps. */
INLINE real *best_message(const Best *b, const int ranked, int64_t place, int64_t step) {
    return b->messages + ((ranked ? step & 1 : step) * b->pitch + place) * (ranked ? b->ranks : 1) * b->pass.width;
}
INLINE whole *choices_at(const Best *b, int64_t place, int64_t step) {
    return b->choices + (step * b->pass.count + place) * b->ranks * b->pass.width;
}

/* The sorted ranks of LANES states: each term is inserted, and pushes down those that it exceeds. */
static void rank_block(const Best *b, const real *before, int64_t j, real *sums, whole *choices) {
    int64_t width = b->pass.width, ranks = b->ranks;
    reals *best = (reals *)b->best;
    wholes *chosen = (wholes *)(best + ranks), none = {0};
    for (int64_t s = 0; s < ranks; s++) best[s] = splat(-INFINITE), chosen[s] = none;
    for (int64_t h = 0; h < b->pass.a->states; h++) {
        reals logs = load(b->logs + h * width + j);
        for (int64_t r = 0; r < ranks; r++) { /* later ranks of a state are not larger */
            reals term = before[r * width + h] + logs;
            if (!any(term > best[ranks - 1])) break;
            wholes moved = none, choice = none + (whole)(h * ranks + r);
            for (int64_t s = r; s < ranks; s++) { /* the first r ranks are not less */
                reals there = best[s];
                wholes old = chosen[s];
                moved |= term > there;
                best[s] = where(moved, term, there), chosen[s] = where_whole(moved, choice, old);
                term = where(moved, there, term), choice = where_whole(moved, old, choice);
            }
        }
    }
    for (int64_t s = 0; s < ranks; s++) {
        store(sums + s * width + j, best[s]);
        __builtin_memcpy(choices + s * width + j, chosen + s, sizeof none);
    }
}

/* Sums of the messages of `rows` places into a step, of one place where paths are ranked. */
INLINE void sum_best(const Best *b, const int ranked, int64_t place, int64_t rows, int64_t step) {
    const real *before = best_message(b, ranked, place, step - 1);
    int64_t c = b->pass.a->states, width = b->pass.width;
    for (int64_t k = 0; k < vectors_of(width) && ranked; k++)
        rank_block(b, before, start_of(k, width), b->pass.sums, choices_at(b, place, step));
    if (ranked) return;
    if (rows == 1) row_tiles(1, UNSEEN, c, width, before, b->logs, width, b->pass.sums);
    else multiply_best((Product){rows, c, width, before, width, 1, b->logs, width, b->pass.sums, width});
}

INLINE void forward_by(Best *b, const int ranked) {
    Pass *w = &b->pass;
    const Chain *a = w->a;
    int64_t width = w->width, count = active(w, w->count, 0);
    for (int64_t place = 0; place < count; place++)
        a->flagged[sequence_of(w, place)] = (uint8_t)start_best(b, place, best_message(b, ranked, place, 0));
    for (int64_t step = 1; step < a->steps && (count = active(w, count, step)) > 0; step++) {
        read_log_matrix(b, step);
        for (int64_t place = 0, group = ranked ? 1 : GROUP; place < count; place += group) {
            int64_t rows = count - place < group ? count - place : group;
            sum_best(b, ranked, place, rows, step);
            for (int64_t r = 0; r < rows; r++) {
                int64_t q = sequence_of(w, place + r);
                real *sums = w->sums + r * width, *message = best_message(b, ranked, place + r, step);
                int bad = weigh_best(ranked ? b->ranks : 1, w, x_at(a, q, step), sums, message);
                a->flagged[q] |= (uint8_t)(bad | b->unknown);
            }
        }
    }
    for (int64_t place = 0; place < w->count && a->boundary.leaving; place++) {
        int64_t q = sequence_of(w, place);
        const real *last = best_message(b, ranked, place, steps_of(a, q) - 1);
        for (int64_t j = 0; j < a->states; j++) a->boundary.leaving[q * a->states + j] = last[j];
    }
}
static void best_forward(Best *b) { forward_by(b, 0); }
static void ranks_forward(Best *b) { forward_by(b, 1); }

/* The log-weight of a path; -inf without one, and NaN in a flagged sequence. */
static void write_weight(const Best *b, int64_t q, int64_t steps, const int64_t *path) {
    const Chain *a = b->pass.a;
    Sum total = {0, 0};
    for (int64_t step = 0; step < steps; step++) {
        const real *row = step ? matrix_at(&a->bulk, b->pass.set, step) + path[step - 1] * a->bulk.from : p0_at(a, q);
        double weight = row[path[step] * (step ? a->bulk.to : a->p0.step)];
        add(&total, a->logarithms ? weight : logarithm(weight));
        add(&total, x_at(a, q, step)[path[step]]);
    }
    a->log_norm[q] = steps ? value_of(total) : a->flagged[q] ? __builtin_nan("") : -__builtin_inf();
}

/* `has_end`: a path ends in the state in its last entry, or in the best one if that is negative. */
static void best_backward(Best *b, int has_end) {
    const Pass *w = &b->pass;
    const Chain *a = w->a;
    if (a->one_matrix && a->steps > 1) read_log_matrix(b, 1);
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place), last = steps_of(a, q) - 1, *path = path_of(a, q, 0);
        const real *message = best_message(b, 0, place, last);
        int64_t state = has_end && path[last] >= 0 ? path[last] : lowest_best(w->width, message, 0);
        int possible = !a->flagged[q] && message[state] > -INFINITE;
        int64_t steps = end_path(a, q, possible, path);
        for (int64_t step = steps - 1; step >= 0; step--) {
            message = best_message(b, 0, place, step);
            if (step < last) state = lowest_best(w->width, message, column_of_logarithms(b, step + 1, state));
            path[step] = state;
        }
        if (a->log_norm) write_weight(b, q, steps, path);
    }
}

/* The `ranks` largest entries of a last message, the largest first, as choices; returns how many there are. */
static int64_t last_choices(const Best *b, const real *message, real *values, whole *choices) {
    int64_t count = 0;
    for (int64_t j = 0; j < b->pass.a->states; j++)
        for (int64_t r = 0; r < b->ranks; r++) {
            real value = message[r * b->pass.width + j];
            if (!(value > -INFINITE) || (count == b->ranks && !(value > values[count - 1]))) break;
            int64_t s = count < b->ranks ? count++ : count - 1;
            for (; s > 0 && value > values[s - 1]; s--) values[s] = values[s - 1], choices[s] = choices[s - 1];
            values[s] = value, choices[s] = (whole)(j * b->ranks + r);
        }
    return count;
}

static void ranks_backward(const Best *b, int64_t place) {
    const Chain *a = b->pass.a;
    int64_t q = sequence_of(&b->pass, place), last = steps_of(a, q) - 1;
    whole *chosen = (whole *)(b->best + b->ranks * LANES);
    int64_t count = last_choices(b, best_message(b, 1, place, last), b->best, chosen);
    for (int64_t rank = 0; rank < b->ranks; rank++) {
        int64_t *path = path_of(a, q, rank), choice = chosen[rank];
        for (int64_t step = end_path(a, q, rank < count && !a->flagged[q], path) - 1; step >= 0; step--) {
            path[step] = choice / b->ranks;
            if (step > 0) choice = choices_at(b, place, step)[choice % b->ranks * b->pass.width + path[step]];
        }
    }
}

/* Runs `pass` on the places of each set; `in_messages`: messages are those of the caller, in the order of places. */
static int64_t run_best(const Chain *a, int ranked, int in_messages, void pass(Best *)) {
    int64_t width = width_of(a), most = most_places(a, ranked ? 1 : GROUP);
    Scratch scratch = {.begin = a->scratch};
    Best b = {.pass = {.a = a, .width = width}, .ranks = ranked ? a->paths.ranks : 1, .read = -1};
    b.logs = take_reals(&scratch, width * width);
    b.transposed = take_reals(&scratch, (a->one_matrix ? width : 1) * width);
    b.pass.sums = take_reals(&scratch, (ranked ? b.ranks : GROUP) * width);
    b.pass.initial = take_reals(&scratch, width);
    b.best = take_reals(&scratch, 2 * b.ranks * LANES);
    if (!in_messages) b.messages = take_reals(&scratch, (ranked ? 2 : a->steps) * most * b.ranks * width);
    if (ranked) b.choices = take(&scratch, a->steps * most * b.ranks * width * (int64_t)sizeof(whole));
    if (!a->scratch) return scratch.bytes;
    for (int64_t q = a->first; q < a->last; q += b.pass.count) {
        enter_set(&b.pass, q, most);
        b.pitch = in_messages ? a->sets * a->members : b.pass.count;
        if (in_messages) b.messages = a->messages.data + q * width;
        pass(&b);
    }
    return 0;
}

static void best_path(Best *b) { best_forward(b), best_backward(b, 0); }
static void best_ranks(Best *b) {
    ranks_forward(b);
    for (int64_t place = 0; place < b->pass.count; place++) ranks_backward(b, place);
}
static void path_to_end(Best *b) { best_backward(b, 1); }

EXPORT int64_t EXPORTED(logchain_viterbi)(const Chain *a) { return run_best(a, 0, 0, best_path); }
EXPORT int64_t EXPORTED(logchain_topk_paths)(const Chain *a) { return run_best(a, 1, 0, best_ranks); }
EXPORT int64_t EXPORTED(logchain_viterbi_forward)(const Chain *a) { return run_best(a, 0, 1, best_forward); }
EXPORT int64_t EXPORTED(logchain_viterbi_backward)(const Chain *a) { return run_best(a, 0, 1, path_to_end); }
