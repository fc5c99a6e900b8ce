/* Forward messages S, scaled row by row, and the log-partition log Z:

       U_0 = p0      U_i = S_{i-1} P_i      S_i = U_i E_i 2^(TOP - k_i)      E_i = exp(x_i - max x_i)

       log Z = log sum S_{v-1} + sum over i of (max x_i + (k_i - TOP) log 2)       max U_i is in [1/2, 1) 2^k_i

   In float32, TOP is 100 and DEEPEST 108. E below 2^-DEEPEST is raised to it, so that an S of 0 means that no path
   leads to the state. A sequence with sums U so small that raised emissions or underflow may have changed them is
   flagged: its states become 0, and the caller recomputes it exactly (exact.h).

   Sequences that share matrices take each step together: a matrix is prepared once and multiplied by GROUP rows at a
   time. Their `places` are sorted by length, longest first, so that the active ones are the first `count`. */
#pragma once
#include "few.h"
#include "step.h"

enum { GROUP = 48 }; /* rows per product: whole tiles, whose sums stay in the first-level cache until the emission */

/* Rows per product; more where each product copies the matrix. */
INLINE int64_t group_of(const Chain *a) { return is_packed(4 * GROUP, a->states) ? 4 * GROUP : GROUP; }

/* What a pass knows of a sequence. */
typedef struct {
    Sum shift;               /* logarithms taken out of S: max x, and matrix shifts */
    int64_t exponent;        /* powers of two taken out of S: k - TOP, and matrix exponents */
    real inverse_sum, scale; /* see row_posterior */
    int raised;              /* the last step raised an emission */
} Member;

/* The pass over `count` places of a set, from its place `begin` on. */
typedef struct {
    const Chain *a;
    int64_t set, begin, count, width; /* width of a row: c, at least LANES */
    int in_place;                     /* S is computed where messages are kept */
    const int64_t *order;             /* member at each place of the set; null for the identity */
    real *states;                     /* (2, count, width): S of the last two steps, unless `in_place` */
    real *sums;                       /* (group, width): U of a group */
    real *initial;                    /* (width): U_0 */
    Matrix matrix;                    /* matrix into the current step */
    Member *members;                  /* (count) */
} Pass;

INLINE int is_few(const Pass *w) { return w->count == 1 && w->a->states <= FEW; } /* see few.h */
INLINE int64_t width_of(const Chain *a) { return a->states < LANES ? LANES : a->states; }
INLINE int64_t sequence_of(const Pass *w, int64_t place) {
    place += w->begin;
    return w->set * w->a->members + (w->order ? w->order[place] : place);
}

/* Number of flagged sequences of a thread. */
static int64_t flagged_places(const Chain *a) {
    int64_t flagged = 0;
    for (int64_t place = a->first; place < a->last; place++) flagged += a->flagged[sequence_in(a, place)] != 0;
    return flagged;
}

INLINE real *state_at(const Pass *w, int64_t place, int64_t step) {
    if (w->in_place) return message_at(w->a, w->set * w->a->members + w->begin + place, step);
    return w->states + ((step & 1) * w->count + place) * w->width;
}

/* Number of places whose sequences have a step `step`, at most `before`. */
INLINE int64_t active(const Pass *w, int64_t before, int64_t step) {
    if (!w->a->ends) return w->count;
    while (before > 0 && steps_of(w->a, sequence_of(w, before - 1)) <= step) before--;
    return before;
}

/* Starts reading a row of x into the cache, a step before its use. The rows of a step lie far apart where each sequence
   has separate memory: without this, forward steps of 64 states take up to 1.1 times as long, backward steps 1.1 to
   1.5 times. */
INLINE void fetch_x(const Pass *w, int64_t place, int64_t step) {
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place);
    if (w->count > 1 && step < steps_of(a, q)) fetch_row(a->states, x_at(a, q, step));
}

/* log(U E) of a last step, with U times 2^-exponent: from U and x, for U E itself may underflow. */
static void write_leaving(const Chain *a, int64_t q, const real *sums, const real *x, double shift, int64_t exponent) {
    double *out = a->boundary.leaving + q * a->states;
    for (int64_t j = 0, left = a->states; left > 0; j += WIDE, left -= WIDE) {
        doubles logs = logarithm_of(read_wide(sums + j, 1, left, 0), (double)exponent);
        write_doubles(out + j, logs + (read_wide(x + j, 1, left, 0) - shift), left);
    }
}

/* The log messages that a pass writes, those of one direction; or null. */
INLINE real *logs_of(const Chain *a) { return a->out.log_forward ? a->out.log_forward : a->out.log_backward; }

/* Messages over their sums, and 0 after a sequence's end. */
static void write_filtered(const Pass *w, int64_t count, int64_t step) {
    const Chain *a = w->a;
    for (int64_t place = 0; place < w->count; place++) {
        real *out = output_at(a, a->out.filtered, sequence_of(w, place), step);
        const real *state = state_at(w, place, step);
        if (!out) return;
        reals parts = {0};
        int64_t c = place < count ? a->states : 0;
        for (int64_t j = 0; j < c; j += LANES) parts += read_some(state + j, 1, c - j, 0);
        real sum = total(parts);
        real over = sum > 0 ? 1 / sum : sum; /* 0, or NaN */
        for (int64_t k = 0; k < vectors_of(c); k++)
            write_some(out + start_of(k, c), load(state + start_of(k, c)) * over, c);
        if (c == 0) clear(a->states, out);
    }
}

/* A row of sums U becomes a message S, or its sequence is flagged. Returns 1 if the matrix had to be rescaled: the
   caller multiplies by it again. */
static int settle(Pass *w, int64_t place, int64_t step, const real *sums) {
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place);
    Member *member = &w->members[place];
    const real *x = x_at(a, q, step);
    real *state = state_at(w, place, step);
    Range range = range_of(w->width, sums);
    if (step > 0 && !a->flagged[q] && needs_check(member->raised, range)) {
        if (rescale(&w->matrix)) return 1;
        a->flagged[q] = (uint8_t)is_inexact(a->states, sums, 1, range.most, &w->matrix);
        /* sums of 0 do not show whether the raised message before, which is written, is exact */
        if (a->out.filtered && member->raised && range.most == 0) a->flagged[q] = 1;
    }
    int64_t exponent = exponent_of(range.most);
    real top = top_of(x, a->states);
    fetch_x(w, place, step + 1);
    member->raised = emit(a->states, x, top, sums, scale_to_top(exponent), state);
    if (a->boundary.leaving && step + 1 == steps_of(a, q)) write_leaving(a, q, sums, x, top, exponent);
    if (step > 0 && w->matrix.shift != 0) add(&member->shift, w->matrix.shift);
    if (step > 0) member->exponent += w->matrix.exponent;
    real *logs = output_at(a, logs_of(a), q, step);
    const real *emission = a->out.log_forward ? x : 0;
    if (logs) write_logarithms(a->states, sums, member->shift, member->exponent, emission, logs);
    add(&member->shift, top);
    member->exponent += exponent - TOP;
    if (a->flagged[q]) clear(w->width, state); /* denormal numbers are slow */
    return 0;
}

/* log Z of a sequence after its last step. */
static void finish(Pass *w, int64_t place, int64_t step) {
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place), c = a->states;
    const real *state = state_at(w, place, step);
    double sum = 0;
    for (int64_t j = 0; j < c; j++) sum += state[j];
    if (!(sum < __builtin_inf()) || (sum > 0 && sum < (double)TRUSTED)) a->flagged[q] = 1;
    Sum log_norm = w->members[place].shift;
    int64_t exponent;
    double part = mantissa(sum, &exponent);
    add_exponent(&log_norm, w->members[place].exponent + exponent);
    add(&log_norm, logarithm(part));
    write_log_norm(a, q, sum == 0 ? (Sum){-__builtin_inf(), 0} : log_norm);
    for (int64_t j = 0; j < c && a->boundary.leaving && sum > 0; j++)
        a->boundary.leaving[q * c + j] -= (double)(exponent - TOP) * 0.69314718055994531 + logarithm(part);
}

/* Copies the messages of the first `count` places to where they are kept; 0 after a sequence's end. */
static void store_messages(const Pass *w, int64_t count, int64_t step) {
    const Chain *a = w->a;
    for (int64_t place = 0; place < (a->packed ? count : w->count); place++) {
        real *to = message_at(a, sequence_of(w, place), step);
        if (place < count) write_row(a->states, state_at(w, place, step), 1, to);
        else clear(a->states, to);
    }
}

/* Step 0 of all places. Neighbors that share initial weights prepare them once. */
static void start_places(Pass *w, int64_t count) {
    const Chain *a = w->a;
    const real *before = 0;
    int64_t exponent = 0;
    double shift = 0;
    int flagged = 0;
    for (int64_t place = 0; place < count; place++) {
        int64_t q = sequence_of(w, place);
        const real *p0 = p0_at(a, q);
        if (p0 != before)
            flagged = start_row(a->states, w->width, p0, a->p0.step, (int)a->logarithms, w->initial, &exponent, &shift);
        before = p0;
        a->flagged[q] = (uint8_t)flagged;
        add(&w->members[place].shift, shift);
        w->members[place].exponent += exponent;
        settle(w, place, 0, w->initial);
    }
}

/* Arguments of few.h for a sequence, and the first step that few.h must not compute, 0 if it cannot compute any.
   `padded` (FEW, FEW) becomes the one matrix of all steps, or its transpose. */
static int64_t few_of(Pass *w, int transposed, real *padded, Few *l) {
    const Chain *a = w->a;
    int64_t c = a->states, q = sequence_of(w, 0), one = a->one_matrix;
    Steps logs = output_of(a, logs_of(a), q), x = {row_at_step(&a->x, q, a->boundary.entering ? -1 : 0), a->x.step};
    Steps messages = {a->messages.data ? message_at(a, q, 0) : 0, a->messages.step};
    Steps entries = {one ? padded : matrix_at(&a->bulk, w->set, 0), a->bulk.step};
    int64_t for_x = logs.data ? 0 : unpadded_rows(c, x.step), for_matrices = one ? 0 : unpadded_rows(c, a->bulk.step);
    int64_t for_messages = messages.data ? unpadded_rows(c, messages.step) : 0;
    if (!one && (logs.data || a->logarithms || a->bulk.to != 1)) return 0;
    if (one) rescale(&w->matrix), find_low(&w->matrix);
    const Matrix *m = &w->matrix;
    real limit = one ? least_unchanged(m->high) : TRUSTED;
    *l = (Few){.c = c, .one = (int)one, .row = a->bulk.from, .x = x, .entries = entries, .messages = messages,
               .filtered = output_of(a, a->out.filtered, q), .logs = logs, .with_x = a->out.log_forward != 0,
               .limits = {limit < TRUSTED ? limit : TRUSTED, limit},
               /* few_loops.h multiplies states before they are scaled to 2^TOP: they may be smaller by max P */
               .zeros = one && m->low * (m->high < 1 ? m->high : 1) >= least_safe_entry(),
               .matrix_shift = one ? m->shift : 0, .matrix_exponent = one ? m->exponent : 0};
    for (int64_t k = 0; k < row_of(c) && one; k++)
        for (int64_t j = 0; j < row_of(c); j++)
            padded[k * row_of(c) + j] = k < c && j < c ? m->entries[transposed ? j * m->row + k : k * m->row + j] : 0;
    return steps_of(a, q) - larger_of(larger_of(for_x, for_matrices), for_messages);
}

/* Steps of a sequence of few states, up to one that fails the underflow test; returns that step. */
static int64_t few_forward(Pass *w, int64_t step) {
    Few l;
    real padded[FEW * FEW];
    int64_t stop = few_of(w, 0, padded, &l), last = steps_of(w->a, sequence_of(w, 0)) - 1;
    stop = stop < last ? stop : last;
    if (step >= stop) return step;
    write_row(w->a->states, state_at(w, 0, step - 1), 1, l.state);
    l.shift = w->members->shift, l.exponent = w->members->exponent, l.raised = w->members->raised;
    step = steps_forward(&l, step, stop);
    write_row(w->a->states, l.state, 1, state_at(w, 0, step - 1));
    *w->members = (Member){.shift = l.shift, .exponent = l.exponent, .raised = l.raised};
    return step;
}

/* One step of up to a group of places. */
static void step_places(Pass *w, int64_t place, int64_t rows, int64_t step) {
    const Chain *a = w->a;
    Matrix *m = &w->matrix;
    const real *states = state_at(w, place, step - 1);
    int trusted = 0;
    for (int64_t r = 0; r < rows; r++) trusted |= !a->flagged[sequence_of(w, place + r)];
    for (int64_t r = 0; r < rows && !trusted; r++) clear(w->width, state_at(w, place + r, step));
    for (int64_t done = trusted ? 0 : rows; done < rows;) {
        if (rows > 1)
            multiply((Product){rows, a->states, w->width, states, w->width, 1, m->entries, m->row, w->sums, w->width});
        else if (w->members[place].raised && !m->has_high) /* whose sums are compared with the largest entry */
            note_high(m, row_tiles(0, LARGEST, a->states, w->width, states, m->entries, m->row, w->sums));
        else row_times(a->states, w->width, states, m->entries, m->row, w->sums);
        while (done < rows && !settle(w, place + done, step, w->sums + done * w->width)) done++;
    }
}

static void pass_forward(Pass *w) {
    const Chain *a = w->a;
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place);
        w->members[place] = (Member){.shift = log_norm_before(a, q)};
        a->flagged[q] = 0, a->log_norm[q] = -__builtin_inf();
    }
    int64_t count = active(w, w->count, 0), group = group_of(a);
    start_places(w, count);
    if (a->one_matrix && a->steps > 1) prepare(a, w->set, 1, &w->matrix);
    for (int64_t step = 0; step < a->steps && (count > 0 || !a->packed); step++) {
        if (is_few(w) && step > 0 && count > 0 && !a->flagged[sequence_of(w, 0)]) step = few_forward(w, step);
        if (step > 0 && count > 0 && !a->one_matrix) prepare(a, w->set, step, &w->matrix);
        for (int64_t place = 0; place < count && step > 0; place += group)
            step_places(w, place, count - place < group ? count - place : group, step);
        if (a->out.filtered) write_filtered(w, count, step);
        if (a->messages.data && !w->in_place) store_messages(w, count, step);
        int64_t still = step + 1 == a->steps ? 0 : active(w, count, step + 1);
        for (int64_t place = still; place < count; place++) finish(w, place, step);
        count = still;
    }
}

/* Places of a set per pass: one group where one matrix for all steps stays in the cache, otherwise all of them. */
INLINE int64_t most_places(const Chain *a, int64_t group) {
    return a->one_matrix && a->members > group ? group : a->members;
}

/* The same, or 1: sequences of few states whose messages stay in registers take a third of the time if they are
   computed one by one. With more than 8 states that is sure for few sequences only, and short ones do not gain. */
INLINE int64_t most_in_pass(const Chain *a, int64_t group) {
    int few = a->states <= FEW / 2 || (a->states <= FEW && a->last - a->first <= 8);
    return a->one_matrix && few && a->steps >= 32 ? 1 : most_places(a, group);
}

/* Scratch that both directions need. */
static Pass new_pass(const Chain *a, int64_t group, int64_t most, Scratch *scratch) {
    Pass w = {.a = a, .width = width_of(a)};
    w.matrix = (Matrix){.c = a->states, .width = w.width, .copy = take_reals(scratch, w.width * w.width)};
    if (w.width > a->states && scratch->begin) clear(w.width * w.width, w.matrix.copy);
    w.sums = take_reals(scratch, group * w.width);
    w.initial = take_reals(scratch, w.width);
    w.members = take(scratch, most * (int64_t)sizeof(Member));
    return w;
}

/* Points the pass to the thread's place q and, in the same set, to up to `most` places from there on. Returns how many
   places of that set the thread has from q on. */
INLINE int64_t enter_set(Pass *w, int64_t q, int64_t most) {
    const Chain *a = w->a;
    int64_t begin = q % a->members, left = a->members - begin < a->last - q ? a->members - begin : a->last - q;
    w->set = q / a->members, w->begin = begin, w->count = smaller_of(left, most);
    w->order = a->order ? a->order + w->set * a->members : 0;
    return left;
}

/* The forward pass of a thread's places; returns how many are flagged. */
EXPORT int64_t EXPORTED(logchain_forward)(const Chain *a) {
    Scratch scratch = {.begin = a->scratch};
    int64_t group = group_of(a), most = most_in_pass(a, group);
    Pass w = new_pass(a, group, most, &scratch);
    w.in_place = a->messages.data && !a->order && !a->ends && w.width == a->states;
    w.states = take_reals(&scratch, 2 * most * w.width);
    if (!a->scratch) return scratch.bytes;
    for (int64_t q = a->first; q < a->last; q += w.count) {
        enter_set(&w, q, most);
        pass_forward(&w);
    }
    return flagged_places(a);
}
