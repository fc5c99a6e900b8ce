/* Sequences whose sums a format's exponents cannot hold, redone: forward and backward as in forward.h and backward.h.

   Every entry of a message is a number, see rows.h. Nothing underflows, and nothing takes a logarithm but a message
   that is kept: in log space, its largest entry near 0. */
#pragma once
#include "backward.h"
#include "rows.h"

enum { TOGETHER = 64 }; /* sequences that take a step together */

typedef struct {
    const Chain *a;
    int64_t set, count, across;
    int64_t steps;              /* of the longest of the sequences */
    int64_t *chosen;            /* (count): sequences of the set */
    Numbers matrix;
    Row messages, sums, kept;   /* (count, across): S or B; T, or what products become; S as it was kept */
    Row met;                    /* (across): S B of a sequence */
    double *digits;             /* (count): digits that have been taken out of messages */
    Sum *shifts;                /* (count): logarithms that have been */
    double *scratch, *entered;  /* (count, across); posteriors of the step after, likewise */
    int64_t *states;            /* (count, across): states that are entered */
    double *total;              /* (c, across): counts by (to, from) */
} Exact;

/* A row of c values of the format, linear or logarithms, as numbers. */
static void read_row(const Exact *w, const real *from, int64_t step, int logarithms, Row row) {
    double none = logarithms ? -__builtin_inf() : 0;
    for (int64_t j = 0; j < w->across; j += WIDE)
        store_number(row, j, number_of(read_wide(from + j * step, step, w->a->states - j, none), logarithms));
}

/* A sequence's row times exp(x) of a step. */
static void emit_into(Exact *w, int64_t f, int64_t step) {
    double digit;
    const real *x = x_at(w->a, w->set, w->chosen[f], step);
    add(&w->shifts[f], emit_numbers(w->a->states, x, row_from(w->messages, f * w->across), &digit));
    w->digits[f] += digit;
}

/* Messages become what they were times the matrix. */
static void multiply_all(Exact *w) {
    Row before = w->messages;
    multiply_rows(&w->matrix, w->count, before, w->scratch, w->states, w->sums);
    w->messages = w->sums, w->sums = before;
}

/* ------------------------------------------------------------------------------------------------------- messages */

/* Adds digits of numbers to a logarithm. */
static void add_digits(Sum *to, double digits, int64_t exponent) {
    if (digits < 0x1p40 && digits > -0x1p40) add_exponent(to, (int64_t)digits * 512 + exponent);
    else add(to, (digits * 512 + (double)exponent) * 0.69314718055994531);
}

/* A kept message: natural logarithms, the largest of them near 0. */
static void keep_numbers(const Exact *w, Row row, real *out) {
    double top = log_numbers(w->a->states, row, w->met.m);
    for (int64_t j = 0; j < w->a->states; j += WIDE)
        write_wide(out + j, load_wide(w->met.m + j) - top, w->a->states - j);
}

/* The same of a backward message that leaves. */
static void leave_numbers(const Exact *w, Row row, double *out) {
    double top = log_numbers(w->a->states, row, w->met.m);
    for (int64_t j = 0; j < w->a->states; j++) out[j] = w->met.m[j] - top;
}

/* A sequence's row as logarithms, with what has been taken out of it. One that holds a NaN is NaN, and so are the next:
   the sum of what has been taken out keeps it, for a row of zeros could not. */
static void write_log_numbers(const Exact *w, int64_t f, real *out) {
    Row row = row_from(w->messages, f * w->across);
    Sum taken = w->shifts[f];
    longs nan = {0};
    int64_t c = w->a->states;
    add_digits(&taken, w->digits[f], 0);
    log_numbers(c, row, w->met.m);
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles size = load_wide(row.m + j), logs = choose(size < __builtin_inf(), load_wide(w->met.m + j), size);
        logs = taken.sum + (taken.lost + logs);
        nan |= logs != logs;
        write_wide(out + j, logs, c - j);
    }
    if (!some(nan)) return;
    w->shifts[f].sum = __builtin_nan("");
    for (int64_t j = 0; j < c; j++) out[j] = (real)__builtin_nan("");
}

/* A forward message in all forms that are asked for. */
static void write_forms(const Exact *w, int64_t f, int64_t step) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f];
    Row row = row_from(w->messages, f * w->across);
    real *shares = shares_at(a, q, step);
    if (a->messages) keep_numbers(w, row, message_at(a, q, step));
    if (a->log_forward) write_log_numbers(w, f, logarithms_at(a, a->log_forward, w->set, q, step));
    if (!shares) return;
    double digit, sum = sum_of(w->across, row, &digit);
    for (int64_t j = 0; j < a->states; j++) shares[j] = (real)share_of(row.m[j], row.e[j], sum, digit);
}

INLINE void write_none(const Chain *a, real *out) {
    for (int64_t j = 0; j < a->states; j++) out[j] = -INFINITE;
}

/* The same behind a sequence's end, where there is none. */
static void clear_forms(const Exact *w, int64_t q, int64_t step) {
    const Chain *a = w->a;
    real *shares = shares_at(a, q, step);
    if (a->messages && !a->starts) clear(a->states, message_at(a, q, step));
    if (a->log_forward && !a->starts) write_none(a, logarithms_at(a, a->log_forward, w->set, q, step));
    if (shares) clear(a->states, shares);
}

/* log Z of a sequence whose last step this is, and what leaves it. */
static void finish_numbers(const Exact *w, int64_t f) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], exponent;
    Row row = row_from(w->messages, f * w->across);
    double digit, sum = sum_of(w->across, row, &digit), part = mantissa(sum, &exponent);
    Sum log_norm = w->shifts[f];
    if (a->leaving) {
        double whole_sum = sum > 0 ? logarithm(sum) + digit * 512 * 0.69314718055994531 : sum;
        log_numbers(a->states, row, w->met.m);
        for (int64_t j = 0; j < a->states; j++) a->leaving[q * a->states + j] = w->met.m[j] - whole_sum;
    }
    if (sum == 0 || sum != sum) {
        int impossible = sum == 0 && log_norm.sum == log_norm.sum;
        tell(a, q, (Sum){impossible ? -__builtin_inf() : __builtin_nan(""), 0});
        return;
    }
    add_digits(&log_norm, digit + w->digits[f], exponent);
    add(&log_norm, logarithm(part));
    tell(a, q, log_norm);
}

static void walk_numbers_ahead(Exact *w) {
    const Chain *a = w->a;
    for (int64_t f = 0; f < w->count; f++) w->shifts[f] = begun(a, w->chosen[f]), w->digits[f] = 0;
    for (int64_t step = 0; step < w->steps; step++) {
        if (step == 1 || (step > 1 && !a->one_matrix)) read_numbers(a, w->set, step, 0, &w->matrix);
        if (step > 0) multiply_all(w);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f];
            Row row = row_from(w->messages, f * w->across);
            if (step >= steps_of(a, q)) {
                clear_numbers(w->across, row);
                clear_forms(w, q, step);
                continue;
            }
            if (step == 0) read_row(w, p0_at(a, q), a->p0_state, (int)a->logarithms, row);
            emit_into(w, f, step);
            write_forms(w, f, step);
            if (step + 1 == steps_of(a, q)) finish_numbers(w, f);
        }
    }
}

/* B after a sequence's last step: ones, or logarithms that follow, of which the largest is taken out. */
static void end_numbers(const Exact *w, const double *following, Row row) {
    int64_t c = w->a->states;
    double top = following ? largest_log(c, following) : 0;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles logs = both(-__builtin_inf());
        UNROLL for (int l = 0; l < WIDE; l++) if (j + l < c) logs[l] = following ? following[j + l] - top : 0;
        store_number(row, j, exponential_number(logs));
    }
}

/* B of all sequences at a step, from B at the one after it: times its emissions, and the matrix between. */
static void step_numbers_back(Exact *w, int64_t step) {
    const Chain *a = w->a;
    int64_t ahead = step + 1;
    if (ahead < w->steps) {
        if (!a->one_matrix || ahead + 1 == w->steps) read_numbers(a, w->set, ahead, 1, &w->matrix);
        for (int64_t f = 0; f < w->count; f++)
            if (ahead < steps_of(a, w->chosen[f])) emit_into(w, f, ahead);
        multiply_all(w);
    }
    for (int64_t f = 0; f < w->count; f++) {
        int64_t q = w->chosen[f], steps = steps_of(a, q);
        Row row = row_from(w->messages, f * w->across);
        if (step >= steps) clear_numbers(w->across, row);
        if (ahead == steps) end_numbers(w, a->following ? a->following + q * a->states : 0, row);
    }
}

/* ------------------------------------------------------------------------------------------------------ gradients */

/* Whether S T / sum S B of transitions are doubles, which are multiplied by P when all have been added up. */
static int plain_counts(const Exact *w) {
    int plain = !w->matrix.digits;
    for (int64_t f = 0; f < w->count; f++) {
        double weight = w->a->weight[w->chosen[f]];
        plain &= weight * weight > 0x1p-128 && weight * weight < 0x1p128;
    }
    return plain;
}

INLINE Number size_of_weight(double weight) {
    return settled(settled((Number){both(weight < 0 ? -weight : weight), both(0)}));
}

/* The states that a step enters, by their posteriors, and their T times the weight over sum S B: in place of T, next to
   each other. How many; states that are hardly ever entered are left out. */
static int64_t share_numbers(const Exact *w, const double *entered, double weight, double sum, double digit,
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

/* Adds a sequence's transitions from a block of states k, of which `ahead` are the kept messages: sums as doubles. */
static void count_block(const Exact *w, int64_t k, int64_t count, Row ahead, Row sources, const int64_t *states) {
    const Numbers *p = &w->matrix; /* the transpose */
    int64_t first = p->first[k / BLOCK], behind = p->behind[k / BLOCK], begin = 0;
    while (begin < count && states[begin] < first) begin++;
    while (begin < count && states[count - 1] >= behind) count--;
    if (begin == count) return;
    double level = next_digit(ahead.e, k, k + BLOCK, -NO_DIGIT);
    for (; level > NO_DIGIT; level = next_digit(ahead.e, k, k + BLOCK, level)) {
        doubles from[PARTS];
        UNROLL for (int l = 0; l < PARTS; l++) {
            Number state = load_number(ahead, k + l * WIDE);
            from[l] = choose(state.e == level, state.m, both(0));
        }
        for (int64_t t = begin; t < count; t++) {
            double m = sources.m[t], digit = sources.e[t] + level, *to = w->total + states[t] * p->across + k;
            if (m == m && (digit < -1.5 || digit > 1.5)) continue; /* nothing; no path */
            double share = digit == 0 ? m : digit > 0 ? m * DIGIT : m / DIGIT;
            UNROLL for (int l = 0; l < PARTS; l++)
                store_wide(to + l * WIDE, load_wide(to + l * WIDE) + share * from[l]);
        }
    }
}

/* The same of all states, with P where gradients are those of logarithms, and each product a number. */
static void count_numbers(const Exact *w, int64_t count, Row ahead, Row sources, const int64_t *states) {
    const Numbers *p = &w->matrix;
    int by_log = logs(w->a);
    for (int64_t t = 0; t < count; t++) {
        double *to = w->total + states[t] * p->across, size = sources.m[t] < 0 ? -sources.m[t] : sources.m[t];
        Row entries = row_from(p->all, states[t] * p->across);
        for (int64_t k = 0; k < p->across; k += WIDE) {
            doubles entry = load_wide(entries.m + k);
            Number product = times_number(load_number(ahead, k), (Number){both(size), both(sources.e[t])});
            if (by_log) {
                product = settled(product);
                product.m *= entry;
                if (p->digits) product.e += load_wide(entries.e + k);
            }
            doubles value = choose((entry == 0) | (product.m == 0), both(0), value_of_number(product));
            store_wide(to + k, load_wide(to + k) + (sources.m[t] < 0 ? -value : value));
        }
    }
}

/* Adds what has been counted to a gradient (from, to), exactly 0 where the matrix is, or where no path is: behind all
   ends a matrix may be NaN. `times`: after a product with P. */
static void write_counted(Exact *w, int64_t step, int times) {
    const Chain *a = w->a;
    const Numbers *p = &w->matrix;
    int64_t c = a->states;
    for (int64_t k = 0; k < c * w->across; k += WIDE) {
        doubles entry = load_wide(p->all.m + k), count = load_wide(w->total + k);
        store_wide(w->total + k, choose((entry == 0) | (count == 0), both(0), times ? count * entry : count));
    }
    for (int64_t k = 0; k < c && a->counts; k++)
        for (int64_t j = 0; j < c; j++) a->counts[(w->set * c + k) * c + j] += w->total[j * w->across + k];
    real *to = a->counts ? 0 : a->grad_bulk + first_count(a, w->set) + step * a->count_step;
    for (int64_t k = 0; k < c && to; k++, to += c)
        for (int64_t j = 0; j < c; j++) to[j] += (real)w->total[j * w->across + k];
    for (int64_t k = 0; k < c * w->across; k++) w->total[k] = 0;
}

/* The transitions out of a step; `counts`: states that each sequence enters. */
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

/* The gradient of the initial weights, from B at the first step. */
static void start_numbers(Exact *w, int64_t f) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], c = a->states;
    Row row = row_from(w->messages, f * w->across), p0 = row_from(w->kept, f * w->across);
    double *out = a->grad_p0 + q * c, weight = a->weight[q], digit;
    emit_into(w, f, 0);
    read_row(w, p0_at(a, q), a->p0_state, (int)a->logarithms, p0);
    multiply_numbers(w->across, p0, row, w->met);
    double sum = sum_of(w->across, w->met, &digit);
    Number size = size_of_weight(weight);
    Row shared = logs(a) ? w->met : row;
    for (int64_t j = 0; j < c; j++) {
        Number share = settled((Number){both(shared.m[j] / sum), both(shared.e[j] - digit)});
        double value = value_of_number(times_number(share, size))[0];
        int none = p0.m[j] == 0 || shared.m[j] == 0 || sum == 0;
        out[j] = sum != sum ? sum : none ? 0 : weight < 0 ? -value : value;
    }
}

/* Posteriors of a sequence at a step, from what was kept and from B. Returns their sum. */
static double meet_numbers(Exact *w, int64_t f, int64_t step, double *digit) {
    const Chain *a = w->a;
    int64_t q = w->chosen[f], at = f * w->across;
    Row kept = row_from(w->kept, at);
    real *gradient = gradient_at(a, w->set, q, step);
    read_row(w, message_at(a, q, step), 1, a->lossy[q] & 1, kept);
    multiply_numbers(w->across, kept, row_from(w->messages, at), w->met);
    double sum = sum_of(w->across, w->met, digit), over = sum == 0 ? 0 : 1 / sum;
    for (int64_t j = 0; j < w->across; j += WIDE) {
        doubles share = lowered(load_wide(w->met.m + j), *digit - load_wide(w->met.e + j)) * over;
        store_wide(w->entered + at + j, share);
        if (gradient) write_wide(gradient + j, share * a->weight[q], a->states - j);
    }
    return sum;
}

static void walk_numbers_back(Exact *w) {
    const Chain *a = w->a;
    int64_t c = a->states, counts[TOGETHER];
    int counted = (a->counts || a->grad_bulk) && w->steps > 1;
    for (int64_t k = 0; k < c * w->across && counted; k++) w->total[k] = 0;
    for (int64_t step = w->steps - 1; step >= 0; step--) {
        step_numbers_back(w, step);
        for (int64_t f = 0; f < w->count; f++) {
            int64_t q = w->chosen[f], steps = steps_of(a, q), at = f * w->across;
            real *gradient = gradient_at(a, w->set, q, step);
            double digit, *entered = w->scratch + at;
            counts[f] = 0;
            if (step >= steps && gradient && !a->starts) clear(c, gradient);
            if (step >= steps) continue;
            for (int64_t j = 0; j < w->across; j++) entered[j] = w->entered[at + j];
            double sum = meet_numbers(w, f, step, &digit);
            if (counted && step + 1 < steps && step + 1 <= a->uncounted[q] && sum != 0)
                counts[f] = share_numbers(w, entered, a->weight[q], sum, digit, row_from(w->sums, at), w->states + at);
        }
        if (counted && step + 1 < w->steps) count_transitions(w, step, counts);
    }
    for (int64_t f = 0; f < w->count && a->entering && a->leaving; f++)
        leave_numbers(w, row_from(w->messages, f * w->across), a->leaving + w->chosen[f] * c);
    for (int64_t f = 0; f < w->count && a->grad_p0; f++) start_numbers(w, f);
}

/* ------------------------------------------------------------------------------------------------------ sequences */

INLINE int64_t together_of(const Chain *a) { return a->members < TOGETHER ? a->members : TOGETHER; }

static Row take_row(char **room, int64_t bytes) {
    Row row = {.m = take(room, bytes)};
    row.e = take(room, bytes);
    return row;
}

static Exact new_exact(const Chain *a) {
    int64_t c = a->states, across = (c + BLOCK - 1) / BLOCK * BLOCK;
    int64_t together = together_of(a), matrix = c * across * 8, row = across * 8, rows = together * row;
    char *room = a->room;
    Exact w = {.a = a, .across = across, .chosen = take(&room, together * 8)};
    w.matrix = (Numbers){.c = c, .across = across, .all = take_row(&room, matrix), .plane = take(&room, matrix)};
    w.matrix.enough = take(&room, row), w.matrix.first = take(&room, across), w.matrix.behind = take(&room, across);
    w.messages = take_row(&room, rows), w.sums = take_row(&room, rows), w.kept = take_row(&room, rows);
    w.met = take_row(&room, row);
    w.entered = take(&room, rows), w.scratch = take(&room, rows), w.states = take(&room, rows);
    w.digits = take(&room, together * 8), w.shifts = take(&room, together * (int64_t)sizeof(Sum));
    w.total = take(&room, matrix);
    return w;
}

/* Walks with a thread's sequences that are lossy, `which` 1 in the forward pass, 3 in either and with gradients. */
static int64_t redo(const Chain *a, int which, void walk(Exact *)) {
    int64_t together = together_of(a);
    for (int64_t place = a->first; place < a->last;) {
        Exact w = new_exact(a);
        w.set = place / a->members, w.steps = a->starts ? 0 : a->steps;
        for (; place < a->last && place / a->members == w.set && w.count < together; place++) {
            int64_t q = sequence_in(a, place);
            if (!(a->lossy[q] & which) || (which == 3 && !has_gradient(a, q))) continue;
            w.chosen[w.count++] = q;
            if (steps_of(a, q) > w.steps) w.steps = steps_of(a, q);
        }
        if (w.count) walk(&w);
    }
    return 0;
}

/* Sequences of which the forward pass is lossy: their values, and their messages in log space. */
EXPORT int64_t EXPORTED(logchain_redo_forward)(const Chain *a) { return redo(a, 1, walk_numbers_ahead); }

/* Gradients of sequences that are lossy in either direction: written, or added to what others share. */
EXPORT int64_t EXPORTED(logchain_redo_backward)(const Chain *a) { return redo(a, 3, walk_numbers_back); }

/* Bytes of scratch for as many sequences of a set. */
EXPORT int64_t EXPORTED(logchain_redo_room)(const Chain *a) {
    int64_t across = (a->states + BLOCK - 1) / BLOCK * BLOCK;
    return (4 * a->states + 9 * together_of(a) + 5) * across * 8 + together_of(a) * 40 + 20 * 64;
}
