/* Exact recomputation of lossy sequences: messages whose entries are numbers of unlimited exponent (number.h, rows.h).

       S_0 = p0 E_0      S_i = S_{i-1} P_i E_i      log Z = log sum S_{v-1} + sum of max x_i

       B_{v-1} = 1, or exp(following)      B_{i-1} = B_i E_i P_i^T      posterior_i = S_i B_i / sum S_i B_i

       d/dP_i = w S_{i-1}^T (B_i E_i) / sum S_{i-1} B_{i-1}      d/dp0 = w E_0 B_0 / sum p0 E_0 B_0

   with E_i = exp(x_i - max x_i) and the weight w. Nothing underflows. Kept messages are logarithms. */
#pragma once
#include "backward.h"
#include "rows.h"

enum { TOGETHER = 64 }; /* sequences that take a step together */

typedef struct {
    const Chain *a;
    int64_t set, count, across; /* across: width of rows, c rounded up to whole blocks */
    int64_t steps;              /* of the longest of the sequences */
    int64_t *chosen;            /* (count): the sequences */
    Numbers matrix;             /* matrix into the current step, backward its transpose */
    Row messages, sums, kept;   /* (count, across): S or B; the product, or T and sources; S as it was kept */
    Row work;                   /* (across): S B or logarithms of one sequence */
    double *digits;             /* (count): digits taken out of messages */
    Sum *shifts;                /* (count): logarithms taken out of messages */
    double *scratch, *entered;  /* (count, across): scratch; posteriors at the step after */
    int64_t *states;            /* (count, across): states with a source */
    double *total;              /* (c, across): counts, as (to, from) */
} Exact;

/* A row of c values, linear or logarithms, as numbers. */
static void read_row(const Exact *w, const real *from, int64_t step, int logarithms, Row row) {
    double none = logarithms ? -__builtin_inf() : 0;
    for (int64_t j = 0; j < w->across; j += WIDE)
        store_number(row, j, number_of(read_wide(from + j * step, step, w->a->states - j, none), logarithms));
}

/* Multiplies a sequence's message by its emissions, and takes out its largest digit. */
static void emit_into(Exact *w, int64_t f, int64_t step) {
    double digit;
    const real *x = x_at(w->a, w->set, w->chosen[f], step);
    add(&w->shifts[f], emit_numbers(w->a->states, x, row_from(w->messages, f * w->across), &digit));
    w->digits[f] += digit;
}

/* Multiplies all messages by the matrix; the old ones stay in w->sums. */
static void multiply_all(Exact *w) {
    Row before = w->messages;
    multiply_rows(&w->matrix, w->count, before, w->scratch, w->states, w->sums);
    w->messages = w->sums, w->sums = before;
}

/* ------------------------------------------------------------------------------------------------------- messages */

/* Adds log(2^(512 digits + exponent)). */
static void add_digits(Sum *to, double digits, int64_t exponent) {
    if (digits < 0x1p40 && digits > -0x1p40) add_exponent(to, (int64_t)digits * 512 + exponent);
    else add(to, (digits * 512 + (double)exponent) * 0.69314718055994531);
}

/* A message to keep: natural logarithms, the largest near 0. */
static void store_message(const Exact *w, Row row, real *out) {
    double top = log_numbers(w->a->states, row, w->work.m);
    for (int64_t j = 0; j < w->a->states; j += WIDE)
        write_wide(out + j, load_wide(w->work.m + j) - top, w->a->states - j);
}

/* A backward message that leaves: natural logarithms, the largest near 0. */
static void write_leaving_numbers(const Exact *w, Row row, double *out) {
    double top = log_numbers(w->a->states, row, w->work.m);
    for (int64_t j = 0; j < w->a->states; j++) out[j] = w->work.m[j] - top;
}

/* A message as natural logarithms, with all that was taken out of it. A NaN makes this message and all later ones NaN:
   the shift becomes NaN, because a later row of zeros would hide it. */
static void write_log_numbers(const Exact *w, int64_t f, real *out) {
    Row row = row_from(w->messages, f * w->across);
    Sum taken = w->shifts[f];
    longs nan = {0};
    int64_t c = w->a->states;
    add_digits(&taken, w->digits[f], 0);
    log_numbers(c, row, w->work.m);
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles size = load_wide(row.m + j), logs = choose(size < __builtin_inf(), load_wide(w->work.m + j), size);
        logs = taken.sum + (taken.error + logs);
        nan |= logs != logs;
        write_wide(out + j, logs, c - j);
    }
    if (!any_wide(nan)) return;
    w->shifts[f].sum = __builtin_nan("");
    for (int64_t j = 0; j < c; j++) out[j] = (real)__builtin_nan("");
}

/* A forward message as `messages`, `log_forward` and `filtered`. */
static void write_forward(const Exact *w, int64_t f, int64_t step) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f];
    Row row = row_from(w->messages, f * w->across);
    real *shares = filtered_at(a, q, step);
    if (a->messages) store_message(w, row, message_at(a, q, step));
    if (a->log_forward) write_log_numbers(w, f, logarithms_at(a, a->log_forward, w->set, q, step));
    if (!shares) return;
    double digit, sum = sum_of(w->across, row, &digit);
    for (int64_t j = 0; j < a->states; j++) shares[j] = (real)share_of(row.m[j], row.e[j], sum, digit);
}

INLINE void fill_impossible(const Chain *a, real *out) {
    for (int64_t j = 0; j < a->states; j++) out[j] = -INFINITE;
}

/* What these hold after a sequence's end. */
static void clear_forward(const Exact *w, int64_t q, int64_t step) {
    const Chain *a = w->a;
    real *shares = filtered_at(a, q, step);
    if (a->messages && !a->starts) clear(a->states, message_at(a, q, step));
    if (a->log_forward && !a->starts) fill_impossible(a, logarithms_at(a, a->log_forward, w->set, q, step));
    if (shares) clear(a->states, shares);
}

/* log Z of a sequence after its last step, and its leaving message. */
static void finish_numbers(const Exact *w, int64_t f) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], exponent;
    Row row = row_from(w->messages, f * w->across);
    double digit, sum = sum_of(w->across, row, &digit), part = mantissa(sum, &exponent);
    Sum log_norm = w->shifts[f];
    if (a->leaving) {
        double whole_sum = sum > 0 ? logarithm(sum) + digit * 512 * 0.69314718055994531 : sum;
        log_numbers(a->states, row, w->work.m);
        for (int64_t j = 0; j < a->states; j++) a->leaving[q * a->states + j] = w->work.m[j] - whole_sum;
    }
    if (sum == 0 || sum != sum) {
        int impossible = sum == 0 && log_norm.sum == log_norm.sum;
        write_log_norm(a, q, (Sum){impossible ? -__builtin_inf() : __builtin_nan(""), 0});
        return;
    }
    add_digits(&log_norm, digit + w->digits[f], exponent);
    add(&log_norm, logarithm(part));
    write_log_norm(a, q, log_norm);
}

static void walk_numbers_forward(Exact *w) {
    const Chain *a = w->a;
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = log_norm_before(a, w->chosen[f]), w->digits[f] = 0;
    for (int64_t step = 0; step < w->steps; step++) {
        if (step == 1 || (step > 1 && !a->one_matrix)) read_numbers(a, w->set, step, 0, &w->matrix);
        if (step > 0) multiply_all(w);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f];
            Row row = row_from(w->messages, f * w->across);
            if (step >= steps_of(a, q)) {
                clear_numbers(w->across, row);
                clear_forward(w, q, step);
                continue;
            }
            if (step == 0) read_row(w, p0_at(a, q), a->p0_state, (int)a->logarithms, row);
            emit_into(w, f, step);
            write_forward(w, f, step);
            if (step + 1 == steps_of(a, q)) finish_numbers(w, f);
        }
    }
}

/* B at a sequence's last step: ones, or the exponentials of `following` less its largest. */
static void last_numbers(const Exact *w, const double *following, Row row) {
    int64_t c = w->a->states;
    double top = following ? largest_log(c, following) : 0;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles logs = splat_wide(-__builtin_inf());
        UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) logs[l] = following ? following[j + l] - top : 0;
        store_number(row, j, exponential_number(logs));
    }
}

/* B of all sequences at a step, from B at the step after it. */
static void step_numbers_backward(Exact *w, int64_t step) {
    const Chain *a = w->a;
    int64_t next = step + 1;
    if (next < w->steps) {
        if (!a->one_matrix || next + 1 == w->steps) read_numbers(a, w->set, next, 1, &w->matrix);
        for (int64_t f = 0; f < w->count; f++)
            if (next < steps_of(a, w->chosen[f])) emit_into(w, f, next);
        multiply_all(w);
    }
    for (int64_t f = 0; f < w->count; f++) {
        int64_t q = w->chosen[f], steps = steps_of(a, q);
        Row row = row_from(w->messages, f * w->across);
        if (step >= steps) clear_numbers(w->across, row);
        if (next == steps) last_numbers(w, a->following ? a->following + q * a->states : 0, row);
    }
}

/* ------------------------------------------------------------------------------------------------------ gradients */

/* Whether all S T / sum S B fit into doubles, so that P multiplies their sum over sequences. */
static int plain_counts(const Exact *w) {
    int plain = !w->matrix.digits;
    for (int64_t f = 0; f < w->count; f++) {
        double weight = w->a->weight[w->chosen[f]];
        plain &= weight * weight > 0x1p-128 && weight * weight < 0x1p128;
    }
    return plain;
}

INLINE Number size_of_weight(double weight) {
    return settled(settled((Number){splat_wide(weight < 0 ? -weight : weight), splat_wide(0)}));
}

/* Sources w T / sum S B, in place of T, of the states whose posterior `entered` at the step after is not negligible.
   Returns how many; they are compacted, and `states` says which state each is of. */
static int64_t find_sources(const Exact *w, const double *entered, double weight, double sum, double digit,
                            Row sources, int64_t *states) {
    const Numbers *p = &w->matrix;
    int64_t count = 0;
    double sign = weight < 0 ? -1 : 1, least = power_of_two(-FADED); /* of S T / sum S B, or of that times P */
    if (p->digits) least = 0x1p-120;
    else if (!logs(w->a) && p->low < 1) least *= p->low;
    Number size = size_of_weight(weight);
    for (int64_t j = 0; j < p->c; j++) {
        double m = sources.m[j], e = sources.e[j];
        sources.m[count] = m, sources.e[count] = e, states[count] = j;
        count += !(entered[j] < least) & (m != 0);
    }
    for (int64_t k = 0; k < count; k += WIDE) {
        Number source = load_number(sources, k);
        Number share = settled((Number){source.m / sum, source.e - digit});
        share = settled(times_number(share, size));
        share.m *= sign;
        store_number(sources, k, share);
    }
    return count;
}

/* Adds S times sources to the counts from a block of states k, in doubles. */
static void count_block(const Exact *w, int64_t k, int64_t count, Row forward, Row sources, const int64_t *states) {
    const Numbers *p = &w->matrix; /* the transpose */
    int64_t first = p->first[k / BLOCK], stop = p->stop[k / BLOCK], begin = 0;
    while (begin < count && states[begin] < first) begin++;
    while (begin < count && states[count - 1] >= stop) count--;
    if (begin == count) return;
    double level = next_digit(forward.e, k, k + BLOCK, -NO_DIGIT);
    for (; level > NO_DIGIT; level = next_digit(forward.e, k, k + BLOCK, level)) {
        doubles from[PARTS];
        UNROLL for (int l = 0; l < PARTS; l++) {
            Number state = load_number(forward, k + l * WIDE);
            from[l] = choose(state.e == level, state.m, splat_wide(0));
        }
        for (int64_t t = begin; t < count; t++) {
            double m = sources.m[t], digit = sources.e[t] + level, *to = w->total + states[t] * p->across + k;
            if (m == m && (digit < -1.5 || digit > 1.5)) continue; /* negligible, or no path: P is 0 there */
            double share = digit == 0 ? m : digit > 0 ? m * DIGIT : m / DIGIT;
            UNROLL for (int l = 0; l < PARTS; l++)
                store_wide(to + l * WIDE, load_wide(to + l * WIDE) + share * from[l]);
        }
    }
}

/* Adds S times sources, times P for gradients of logarithms, to the counts; each product is a number. */
static void count_numbers(const Exact *w, int64_t count, Row forward, Row sources, const int64_t *states) {
    const Numbers *p = &w->matrix;
    int by_log = logs(w->a);
    for (int64_t t = 0; t < count; t++) {
        double *to = w->total + states[t] * p->across, size = sources.m[t] < 0 ? -sources.m[t] : sources.m[t];
        Row entries = row_from(p->entries, states[t] * p->across);
        for (int64_t k = 0; k < p->across; k += WIDE) {
            doubles entry = load_wide(entries.m + k);
            Number source = {splat_wide(size), splat_wide(sources.e[t])};
            Number product = times_number(load_number(forward, k), source);
            if (by_log) {
                product = settled(product);
                product.m *= entry;
                if (p->digits) product.e += load_wide(entries.e + k);
            }
            doubles value = choose((entry == 0) | (product.m == 0), splat_wide(0), value_of_number(product));
            store_wide(to + k, load_wide(to + k) + (sources.m[t] < 0 ? -value : value));
        }
    }
}

/* Moves the counts into the gradient (from, to): exactly 0 where the matrix is 0, and where nothing was counted, for a
   matrix after all ends may be NaN. `times_p`: multiplies them by P. */
static void write_counted(Exact *w, int64_t step, int times_p) {
    const Chain *a = w->a;
    const Numbers *p = &w->matrix;
    int64_t c = a->states;
    for (int64_t k = 0; k < c * w->across; k += WIDE) {
        doubles entry = load_wide(p->entries.m + k), count = load_wide(w->total + k);
        store_wide(w->total + k, choose((entry == 0) | (count == 0), splat_wide(0), times_p ? count * entry : count));
    }
    for (int64_t k = 0; k < c && a->counts; k++)
        for (int64_t j = 0; j < c; j++) a->counts[(w->set * c + k) * c + j] += w->total[j * w->across + k];
    real *to = a->counts ? 0 : a->grad_bulk + first_count(a, w->set) + step * a->count_step;
    for (int64_t k = 0; k < c && to; k++, to += c)
        for (int64_t j = 0; j < c; j++) to[j] += (real)w->total[j * w->across + k];
    for (int64_t k = 0; k < c * w->across; k++) w->total[k] = 0;
}

/* Counts the transitions out of a step; `counts`: number of sources of each sequence. */
static void count_transitions(Exact *w, int64_t step, const int64_t *counts) {
    const Chain *a = w->a;
    int plain = plain_counts(w);
    for (int64_t f = 0, at = 0; f < w->count && !plain; f++, at += w->across)
        count_numbers(w, counts[f], row_from(w->kept, at), row_from(w->sums, at), w->states + at);
    for (int64_t k = 0; k < w->across && plain; k += BLOCK)
        for (int64_t f = 0, at = 0; f < w->count; f++, at += w->across)
            count_block(w, k, counts[f], row_from(w->kept, at), row_from(w->sums, at), w->states + at);
    if (a->grad_bulk || step == 0) write_counted(w, step, plain && logs(a));
}

/* The gradient of p0, from B at step 0. */
static void write_exact_grad_p0(Exact *w, int64_t f) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], c = a->states;
    Row row = row_from(w->messages, f * w->across), p0 = row_from(w->kept, f * w->across);
    double *out = a->grad_p0 + q * c, weight = a->weight[q], digit;
    emit_into(w, f, 0);
    read_row(w, p0_at(a, q), a->p0_state, (int)a->logarithms, p0);
    multiply_numbers(w->across, p0, row, w->work);
    double sum = sum_of(w->across, w->work, &digit);
    Number size = size_of_weight(weight);
    Row shared = logs(a) ? w->work : row;
    for (int64_t j = 0; j < c; j++) {
        Number share = settled((Number){splat_wide(shared.m[j] / sum), splat_wide(shared.e[j] - digit)});
        double value = value_of_number(times_number(share, size))[0];
        int none = p0.m[j] == 0 || shared.m[j] == 0 || sum == 0;
        out[j] = sum != sum ? sum : none ? 0 : weight < 0 ? -value : value;
    }
}

/* Undoes the raising of emissions in a kept linear message: at a last step, no sum has told that they are negligible. */
static void lower_raised(const Exact *w, int64_t f, int64_t step, Row kept) {
    int64_t c = w->a->states;
    const real *x = x_at(w->a, w->set, w->chosen[f], step);
    real top = -INFINITE;
    for (int64_t j = 0; j < c; j++) top = x[j] > top ? x[j] : top;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles below = read_wide(x + j, 1, c - j, top) - (double)top - (double)LOG_DEEPEST;
        Number factor = exponential_number(choose(below < 0, below, splat_wide(0)));
        store_number(kept, j, settled(times_number(load_number(kept, j), factor)));
    }
}

/* Posteriors S B / sum S B of a sequence at a step; returns the sum over 2^(512 digit). */
static double posterior_of_numbers(Exact *w, int64_t f, int64_t step, double *digit) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], at = f * w->across;
    Row kept = row_from(w->kept, at);
    real *gradient = gradient_at(a, w->set, q, step);
    read_row(w, message_at(a, q, step), 1, a->lossy[q] & 1, kept);
    if (a->following && step + 1 == steps_of(a, q) && !(a->lossy[q] & 1)) lower_raised(w, f, step, kept);
    multiply_numbers(w->across, kept, row_from(w->messages, at), w->work);
    double sum = sum_of(w->across, w->work, digit), over = sum == 0 ? 0 : 1 / sum;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles share = lowered(load_wide(w->work.m + j), *digit - load_wide(w->work.e + j)) * over;
        store_wide(w->entered + at + j, share);
        if (gradient) write_wide(gradient + j, share * a->weight[q], a->states - j);
    }
    return sum;
}

static void walk_numbers_backward(Exact *w) {
    const Chain *a = w->a;
    int64_t c = a->states, counts[TOGETHER];
    int counted = (a->counts || a->grad_bulk) && w->steps > 1;
    for (int64_t k = 0; k < c * w->across && counted; k++) w->total[k] = 0;
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        step_numbers_backward(w, step);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f], steps = steps_of(a, q), at = f * w->across;
            real *gradient = gradient_at(a, w->set, q, step);
            double digit, *entered = w->scratch + at;
            counts[f] = 0;
            if (step >= steps && gradient && !a->starts) clear(c, gradient);
            if (step >= steps) continue;
            for (int64_t j = 0; j < w->across; j++) entered[j] = w->entered[at + j];
            double sum = posterior_of_numbers(w, f, step, &digit);
            if (counted && step + 1 < steps && step + 1 <= a->uncounted[q] && sum != 0)
                counts[f] = find_sources(w, entered, a->weight[q], sum, digit, row_from(w->sums, at), w->states + at);
        }
        if (counted && step + 1 < w->steps) count_transitions(w, step, counts);
    }
    for (int64_t f = 0; f < w->count && a->entering && a->leaving; f++)
        write_leaving_numbers(w, row_from(w->messages, f * w->across), a->leaving + w->chosen[f] * c);
    for (int64_t f = 0; f < w->count && a->grad_p0; f++) write_exact_grad_p0(w, f);
}

/* ------------------------------------------------------------------------------------------------------ sequences */

INLINE int64_t most_together(const Chain *a) { return a->members < TOGETHER ? a->members : TOGETHER; }

static Row take_row(Room *room, int64_t bytes) {
    Row row = {.m = take(room, bytes)};
    row.e = take(room, bytes);
    return row;
}

static Exact new_exact(const Chain *a, Room *room) {
    int64_t c = a->states, across = (c + BLOCK - 1) / BLOCK * BLOCK;
    int64_t together = most_together(a), matrix = c * across * 8, row = across * 8, rows = together * row;
    Exact w = {.a = a, .across = across, .chosen = take(room, together * 8)};
    w.matrix = (Numbers){.c = c, .across = across, .entries = take_row(room, matrix), .plane = take(room, matrix)};
    w.matrix.enough = take(room, row), w.matrix.first = take(room, across), w.matrix.stop = take(room, across);
    w.messages = take_row(room, rows), w.sums = take_row(room, rows), w.kept = take_row(room, rows);
    w.work = take_row(room, row);
    w.entered = take(room, rows), w.scratch = take(room, rows), w.states = take(room, rows);
    w.digits = take(room, together * 8), w.shifts = take(room, together * (int64_t)sizeof(Sum));
    w.total = take(room, matrix);
    return w;
}

/* Runs `walk` on batches of a thread's lossy sequences: those with a bit of `mask`, 1 forward, 3 forward or backward;
   for 3 only sequences with gradients. */
static int64_t recompute(const Chain *a, int mask, void walk(Exact *)) {
    int64_t together = most_together(a);
    Room room = {.begin = a->room};
    const Exact scratch = new_exact(a, &room);
    if (!a->room) return room.bytes;
    for (int64_t place = a->first; place < a->last;) {
        Exact w = scratch;
        w.set = place / a->members, w.steps = a->starts ? 0 : a->steps;
        for (; place < a->last && place / a->members == w.set && w.count < together; place++) {
            int64_t q = sequence_in(a, place);
            if (!(a->lossy[q] & mask) || (mask == 3 && !has_gradient(a, q))) continue;
            w.chosen[w.count++] = q;
            if (steps_of(a, q) > w.steps) w.steps = steps_of(a, q);
        }
        if (w.count) walk(&w);
    }
    return 0;
}

/* Forward: values, and kept messages as logarithms. */
EXPORT int64_t EXPORTED(logchain_redo_forward)(const Chain *a) { return recompute(a, 1, walk_numbers_forward); }

/* Backward: gradients, written or added to those that sequences share. */
EXPORT int64_t EXPORTED(logchain_redo_backward)(const Chain *a) { return recompute(a, 3, walk_numbers_backward); }
