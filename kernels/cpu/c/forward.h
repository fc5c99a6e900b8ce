/* Forward messages S, scaled row by row, and the log-partition log Z:

       U_0 = p0      U_i = S_{i-1} P_i      S_i = U_i E_i 2^(TOP - k_i)      E_i = exp(x_i - max x_i)

       log Z = log sum S_{v-1} + sum over i of (max x_i + (k_i - TOP) log 2)       max U_i is in [1/2, 1) 2^k_i

   In float32, TOP is 100 and DEEPEST 108. E below 2^-DEEPEST is raised to it, so that an S of 0 means that no path
   leads to the state. Sums U so small that raised emissions or underflow may have changed them mark their sequence as
   `lossy`: its states become 0, and the caller recomputes it exactly (exact.h).

   Sequences that share matrices take each step together: a matrix is prepared once and multiplied by GROUP rows at a
   time. Their `places` are sorted by length, longest first, so that the active ones are the first `count`. */
#pragma once
#include "few.h"
#include "doubles.h"
#include "step.h"

enum { GROUP = 48 }; /* rows per product: whole tiles, whose sums stay in the first-level cache until the emission */

/* Rows per product; more where each product copies the matrix. */
INLINE int64_t group_of(const Chain *a) { return is_packed(4 * GROUP, a->states) ? 4 * GROUP : GROUP; }

/* The pass over `count` places of a set, from its place `begin` on. */
typedef struct {
    const Chain *a;
    int64_t set, begin, count, width; /* width of a row: c, at least LANES */
    int in_place, few;                /* S is computed where messages are kept; one sequence of few states, see few.h */
    const int64_t *order;             /* member at each place of the set; null for the identity */
    real *states;                     /* (2, count, width): S of the last two steps, unless `in_place` */
    real *sums, *padded_x;            /* (group, width): U of a group, and copies of its x */
    real *initial;                    /* (width): U_0 */
    Matrix matrix;                    /* matrix into the current step */
    Sum *shifts;                      /* (count): logarithms taken out of S: of max x and of matrix shifts */
    int64_t *exponents;               /* (count): powers of two taken out of S: of k - TOP and of matrix exponents */
    uint8_t *raised;                  /* (count): the last step raised an emission */
} Walk;

INLINE const int64_t *order_of(const Chain *a, int64_t set) { return a->order ? a->order + set * a->members : 0; }
INLINE int64_t width_of(const Chain *a) { return a->states < LANES ? LANES : a->states; }
INLINE int64_t sequence_of(const Walk *w, int64_t place) {
    place += w->begin;
    return w->set * w->a->members + (w->order ? w->order[place] : place);
}

/* Number of lossy sequences of a thread. */
static int64_t lossy_places(const Chain *a) {
    int64_t lossy = 0;
    for (int64_t place = a->first; place < a->last; place++) lossy += a->lossy[sequence_in(a, place)] != 0;
    return lossy;
}

INLINE real *state_at(const Walk *w, int64_t place, int64_t step) {
    if (w->in_place) return message_at(w->a, w->set * w->a->members + w->begin + place, step);
    return w->states + ((step & 1) * w->count + place) * w->width;
}

/* Number of places whose sequences have a step `step`, at most `before`. */
INLINE int64_t active(const Walk *w, int64_t before, int64_t step) {
    if (!w->a->ends) return w->count;
    while (before > 0 && steps_of(w->a, sequence_of(w, before - 1)) <= step) before--;
    return before;
}

/* Pointers to the rows of x of `rows` places, copied where they need padding or conversion. */
INLINE void rows_of_x(const Walk *w, int64_t place, int64_t rows, int64_t step, const real **out) {
    const Chain *a = w->a;
    for (int64_t r = 0; r < rows; r++) {
        const real *x = x_at(a, sequence_of(w, place + r), step);
        real *to = w->padded_x + r * w->width;
        if (a->states < LANES) widen(a->states, w->width, x, 1, -INFINITE, to);
        out[r] = a->states < LANES ? to : x;
    }
}

/* Starts reading a row of x into the cache, a step before its use. The rows of a step lie far apart where each sequence
   has memory of its own: without this, forward steps of 64 states take up to 1.1 times as long, backward steps 1.1 to
   1.5 times. */
INLINE void fetch_x(const Walk *w, int64_t place, int64_t step) {
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place);
    if (w->count > 1 && step < steps_of(a, q)) fetch_row(a->states, x_at(a, q, step));
}

/* log(U E) of a last step, with U times 2^-exponent: from U and x, for U E itself may underflow. */
static void write_leaving(const Chain *a, int64_t q, const real *sums, const real *x, double shift, int64_t exponent) {
    for (int64_t j = 0; j < a->states; j++) {
        int64_t k;
        double part = mantissa(sums[j], &k), log = (double)(k - exponent) * 0.69314718055994531 + logarithm(part);
        a->around.leaving[q * a->states + j] = (sums[j] == 0 ? -__builtin_inf() : log) + ((double)x[j] - shift);
    }
}

/* The log messages that a pass writes, those of one direction; or null. */
INLINE real *logs_of(const Chain *a) { return a->out.log_forward ? a->out.log_forward : a->out.log_backward; }

/* Messages over their sums, and 0 after a sequence's end. */
static void write_filtered(const Walk *w, int64_t count, int64_t step) {
    const Chain *a = w->a;
    for (int64_t place = 0; place < w->count; place++) {
        real *out = filtered_at(a, sequence_of(w, place), step);
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

/* Up to LANES rows of sums U become messages S, and lossy ones are marked. Returns 1 if the matrix had to be rescaled:
   the caller multiplies by it again. */
static int settle(Walk *w, int64_t place, int64_t rows, int64_t step, const real *sums, real safe_entry) {
    const Chain *a = w->a;
    const real *x[LANES];
    Weighed weighed;
    rows_of_x(w, place, rows, step, x);
    if (rows == 1) weigh(1, 1, w->width, x, sums, state_at(w, place, step), &weighed);
    else weigh(0, rows, w->width, x, sums, state_at(w, place, step), &weighed);
    for (int64_t r = 0; r < rows && step > 0; r++) {
        int64_t q = sequence_of(w, place + r);
        if (a->lossy[q] || !needs_check(w->raised[place + r], weighed.least[r], weighed.most[r])) continue;
        if (rescale(&w->matrix)) return 1;
        a->lossy[q] = (uint8_t)is_lossy(a->states, sums + r * w->width, 1, weighed.most[r], &w->matrix, safe_entry);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t q = sequence_of(w, place + r), exponent = exponent_of(weighed.most[r]);
        fetch_x(w, place + r, step + 1);
        if (a->around.leaving && step + 1 == steps_of(a, q))
            write_leaving(a, q, sums + r * w->width, x[r], weighed.shift[r], exponent);
        Sum *shift = &w->shifts[place + r];
        int64_t *taken = &w->exponents[place + r];
        if (step > 0 && w->matrix.shift != 0) add(shift, w->matrix.shift);
        if (step > 0) *taken += w->matrix.exponent;
        real *logs = row_or_null(a, logs_of(a), q, step);
        if (logs) write_logarithms(a->states, sums + r * w->width, *shift, *taken, a->out.log_forward ? x[r] : 0, logs);
        add(shift, weighed.shift[r]);
        *taken += exponent - TOP;
        w->raised[place + r] = weighed.raised[r] != 0;
        if (a->lossy[q]) clear(w->width, state_at(w, place + r, step)); /* denormal numbers are slow */
    }
    return 0;
}

INLINE double sum_of_row(int64_t c, const real *row) {
    double sum = 0;
    for (int64_t j = 0; j < c; j++) sum += row[j];
    return sum;
}

/* log Z of a sequence after its last step. */
static void finish(Walk *w, int64_t place, int64_t step) {
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place), c = a->states;
    double sum = sum_of_row(c, state_at(w, place, step));
    if (!(sum < __builtin_inf()) || (sum > 0 && sum < (double)TRUSTED)) a->lossy[q] = 1;
    Sum log_norm = w->shifts[place];
    int64_t exponent;
    double part = mantissa(sum, &exponent);
    add_exponent(&log_norm, w->exponents[place] + exponent);
    add(&log_norm, logarithm(part));
    write_log_norm(a, q, sum == 0 ? (Sum){-__builtin_inf(), 0} : log_norm);
    for (int64_t j = 0; j < c && a->around.leaving && sum > 0; j++)
        a->around.leaving[q * c + j] -= (double)(exponent - TOP) * 0.69314718055994531 + logarithm(part);
}

/* Copies messages of places from `place` to before `stop` to where they are kept; 0 after a sequence's end. */
static void store_messages(const Walk *w, int64_t place, int64_t stop, int64_t step, int there) {
    const Chain *a = w->a;
    for (; place < stop; place++) {
        real *to = message_at(a, sequence_of(w, place), step);
        if (there) narrow(a->states, state_at(w, place, step), to);
        else clear(a->states, to);
    }
}

/* Step 0 of all places. Neighbours that share initial weights prepare them once. */
static void start_places(Walk *w, int64_t count, real safe_entry) {
    const Chain *a = w->a;
    const real *before = 0;
    int64_t exponent = 0;
    double shift = 0;
    int lossy = 0;
    for (int64_t place = 0; place < count; place++) {
        int64_t q = sequence_of(w, place);
        const real *p0 = p0_at(a, q);
        if (p0 != before)
            lossy = start_row(a->states, w->width, p0, a->p0.step, (int)a->logarithms, w->initial, &exponent, &shift);
        before = p0;
        a->lossy[q] = (uint8_t)lossy;
        add(&w->shifts[place], shift);
        w->exponents[place] += exponent;
        settle(w, place, 1, 0, w->initial, safe_entry);
    }
}

/* Arguments of few.h for a sequence, and the first step that few.h must not compute, 0 if it cannot compute any.
   `padded` (FEW, FEW) becomes the one matrix of all steps, or its transpose. */
static int64_t few_of(Walk *w, int transposed, real *padded, Few *l) {
    const Chain *a = w->a;
    int64_t c = a->states, q = sequence_of(w, 0), one = a->one_matrix;
    real *logs = logs_of(a);
    int64_t row = a->messages.step, for_x = logs ? 0 : unpadded_rows(c, a->x.step);
    int64_t for_matrices = one ? 0 : unpadded_rows(c, a->bulk.step);
    int64_t for_messages = a->messages.data ? unpadded_rows(c, row) : 0;
    if (!one && (logs || a->logarithms || a->bulk.to != 1)) return 0;
    if (one) rescale(&w->matrix), find_low(&w->matrix);
    const Matrix *m = &w->matrix;
    real limit = one ? least_unchanged(m->high) : TRUSTED;
    *l = (Few){.c = c, .one = (int)one, .x = x_at(a, q, 1) - a->x.step, .x_step = a->x.step,
               .entries = one ? padded : matrix_at(&a->bulk, w->set, 1), .row = a->bulk.from,
               .entries_step = a->bulk.step, .messages = a->messages.data ? message_at(a, q, 0) : 0,
               .filtered = a->out.filtered ? filtered_at(a, q, 1) - a->out.step : 0, .filtered_step = a->out.step,
               .message_step = row, .limits = {limit < TRUSTED ? limit : TRUSTED, limit},
               /* few_loops.h multiplies states before they are scaled to 2^TOP: they may be smaller by max P */
               .zeros = one && m->low * (m->high < 1 ? m->high : 1) >= least_safe_entry(),
               .matrix_shift = one ? m->shift : 0, .matrix_exponent = one ? m->exponent : 0};
    if (logs) l->logs = row_or_null(a, logs, q, 0), l->logs_step = a->out.step, l->with_x = a->out.log_forward != 0;
    for (int64_t k = 0; k < row_of(c) && one; k++)
        for (int64_t j = 0; j < row_of(c); j++)
            padded[k * row_of(c) + j] = k < c && j < c ? m->entries[transposed ? j * m->row + k : k * m->row + j] : 0;
    return steps_of(a, q) - larger_of(larger_of(for_x, for_matrices), for_messages);
}

/* Steps of a sequence of few states, up to one that fails the underflow test; returns that step. */
static int64_t few_forward(Walk *w, int64_t step) {
    Few l;
    real padded[FEW * FEW];
    int64_t stop = few_of(w, 0, padded, &l), last = steps_of(w->a, sequence_of(w, 0)) - 1;
    stop = stop < last ? stop : last;
    if (step >= stop) return step;
    narrow(w->a->states, state_at(w, 0, step - 1), l.state);
    l.shift = w->shifts[0], l.exponent = w->exponents[0], l.raised = w->raised[0];
    step = steps_forward(&l, step, stop);
    narrow(w->a->states, l.state, state_at(w, 0, step - 1));
    w->shifts[0] = l.shift, w->exponents[0] = l.exponent, w->raised[0] = (uint8_t)l.raised;
    return step;
}

/* One step of up to a group of places. */
static void step_places(Walk *w, int64_t place, int64_t rows, int64_t step, real safe_entry) {
    const Chain *a = w->a;
    Matrix *m = &w->matrix;
    const real *states = state_at(w, place, step - 1);
    int trusted = 0;
    for (int64_t r = 0; r < rows; r++) trusted |= !a->lossy[sequence_of(w, place + r)];
    for (int64_t r = 0; r < rows && !trusted; r++) clear(w->width, state_at(w, place + r, step));
    for (int64_t done = trusted ? 0 : rows; done < rows;) {
        if (rows > 1)
            multiply((Product){rows, a->states, w->width, states, w->width, 1, m->entries, m->row, w->sums, w->width});
        else if (w->raised[place] && !m->has_high) /* whose sums are compared with the largest entry */
            note_high(m, row_times_largest(a->states, w->width, states, m->entries, m->row, w->sums));
        else row_times(a->states, w->width, states, m->entries, m->row, w->sums);
        for (; done < rows; done += LANES) {
            int64_t settled = rows - done < LANES ? rows - done : LANES;
            if (settle(w, place + done, settled, step, w->sums + done * w->width, safe_entry)) break;
        }
    }
}

static void walk_forward(Walk *w) {
    const Chain *a = w->a;
    real safe_entry = least_safe_entry();
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place);
        w->shifts[place] = log_norm_before(a, q), w->exponents[place] = 0, w->raised[place] = 0;
        a->lossy[q] = 0, a->log_norm[q] = -__builtin_inf();
    }
    int64_t count = active(w, w->count, 0), group = group_of(a);
    start_places(w, count, safe_entry);
    if (a->one_matrix && a->steps > 1) prepare(a, w->set, 1, &w->matrix);
    for (int64_t step = 0; step < a->steps && (count > 0 || !a->packed); step++) {
        if (w->few && step > 0 && count > 0 && !a->lossy[sequence_of(w, 0)]) step = few_forward(w, step);
        if (step > 0 && count > 0 && !a->one_matrix) prepare(a, w->set, step, &w->matrix);
        for (int64_t place = 0; place < count && step > 0; place += group)
            step_places(w, place, count - place < group ? count - place : group, step, safe_entry);
        if (a->out.filtered) write_filtered(w, count, step);
        if (a->messages.data && !w->in_place) {
            store_messages(w, 0, count, step, 1);
            store_messages(w, count, a->packed ? count : w->count, step, 0);
        }
        int64_t still = step + 1 == a->steps ? 0 : active(w, count, step + 1);
        for (int64_t place = still; place < count; place++) finish(w, place, step);
        count = still;
    }
}

/* Places of a set per pass: one group where one matrix for all steps stays in the cache, otherwise all of them. */
INLINE int64_t most_places(const Chain *a, int64_t group) {
    return a->one_matrix && a->members > group ? group : a->members;
}

/* The same, or 1: sequences of few states whose messages stay in registers take a third of the time one after the other.
   With more than 8 states that is sure for few sequences alone, and short ones lose it to what each begins with. */
INLINE int64_t most_in_pass(const Chain *a, int64_t group) {
    int few = a->states <= FEW / 2 || (a->states <= FEW && a->last - a->first <= 8);
    return a->one_matrix && few && a->steps >= 32 ? 1 : most_places(a, group);
}

/* Scratch that both directions need; new_states has the rest of the forward pass. */
static Walk new_walk(const Chain *a, int64_t group, int64_t most, Room *room) {
    int64_t bytes = sizeof(real);
    Walk w = {.a = a, .width = width_of(a)};
    w.matrix = (Matrix){.c = a->states, .width = w.width, .room = take(room, w.width * w.width * bytes)};
    if (w.width > a->states && room->begin) clear(w.width * w.width, w.matrix.room);
    w.padded_x = take(room, group * w.width * bytes);
    w.initial = take(room, w.width * bytes);
    w.raised = take(room, most);
    return w;
}

static void new_states(Walk *w, int64_t group, int64_t most, Room *room) {
    int64_t bytes = sizeof(real);
    w->sums = take(room, group * w->width * bytes);
    w->states = take(room, 2 * most * w->width * bytes);
    w->shifts = take(room, most * (int64_t)sizeof(Sum));
    w->exponents = take(room, most * 8);
}

/* Points the pass to the thread's place q and, in the same set, to up to `most` places from there on. Returns how many
   places of that set the thread has from q on. */
INLINE int64_t enter_set(Walk *w, int64_t q, int64_t most) {
    const Chain *a = w->a;
    int64_t begin = q % a->members, left = a->members - begin < a->last - q ? a->members - begin : a->last - q;
    w->set = q / a->members, w->begin = begin, w->count = left < most ? left : most, w->order = order_of(a, w->set);
    return left;
}

/* The forward pass of a thread's places; returns how many are lossy. */
EXPORT int64_t EXPORTED(logchain_forward)(const Chain *a) {
    Room room = {.begin = a->room};
    int64_t group = group_of(a), most = most_in_pass(a, group);
    Walk w = new_walk(a, group, most, &room);
    w.in_place = a->messages.data && !a->order && !a->ends && w.width == a->states;
    new_states(&w, group, most, &room);
    if (!a->room) return room.bytes;
    for (int64_t q = a->first; q < a->last; q += w.count) {
        enter_set(&w, q, most);
        w.few = w.count == 1 && a->states <= FEW;
        walk_forward(&w);
    }
    return lossy_places(a);
}
