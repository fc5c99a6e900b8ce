/* Exact scans over chains, whatever their matrices are (entries.h), in split numbers (split.h):

       S_0 = p0 E_0        S_i = S_{i-1} P_i E_i        E_i = exp x_i        log Z = log sum S_{v-1}

       B_{v-1} = 1 or exp(following)        T_i = B_i E_i        B_{i-1} = P_i T_i

       posterior_i = S_i B_i / Z        d/dP_i = S_{i-1} T_i / Z        d/dp0 = T_0 / Z        each times a weight

   A row's exponents are relative to a double, `taken`, to which the largest exponent of each row is added one step
   later. Where bands or arcs are counted while they are summed, Z is the sum of S B of the step that was summed before;
   of dense matrices, whose messages are kept without their scale, it is that of the step itself. */
#pragma once
#include "flush.h"
#include "scale.h"
#include "durations.h"

/* Steps whose counts are added up in `real`; steps until rows are aligned again; sequences that share a step. */
enum { COUNTED_TOGETHER = 256, PATIENCE = 15, TOGETHER = 32 };

/* By which a sum may exceed its largest term. */
enum { BITS_OF_TERMS = 8 };

/* What is known of one of the sequences that take a step together. */
typedef struct {
    const Place *place;
    Row message, sums;    /* S or T, with zeros on both sides as far as sums reach; U or B (width) */
    Row forward;          /* S of a step, as it was kept; in scratch (width) of dense chains */
    real *aligned;        /* the message, see align */
    RowProduct product;
    Counting counting;
    Sum shift;            /* what potentials were taken relative to; of dense chains log Z before */
    double taken, whole;  /* the exponent that the message lacks; that of Z */
    double sum;           /* Z over 2^whole */
    real top;             /* the largest exponent of the message */
    double level;         /* how far below the largest state those are, at least, whose exponents were beyond EXACT */
    int has_nan, inexact; /* an operand is no number; exponents beyond EXACT matter */
    int careful;          /* see emit_split */
    int idle, waits;      /* there is nothing to compute; steps until rows are aligned again */
} Sequence;

typedef struct {
    const Exact *a;
    int64_t width;          /* of rows: whole vectors */
    int64_t next_row;       /* from a row of x to the one that is read next */
    int64_t count, steps;   /* of sequences; of the longest */
    int ordinary;           /* weights of sequences are: see flush.h */
    BlockMatrix matrix;
    Pair *pairs;            /* (width): scratch for arcs */
    EntryCounts counts;
    Sequence *sequence;
} Scan;

/* What a new message shows. */
typedef struct {
    real top, most; /* exponents: of its largest number, relative to the last message; of the largest emission */
    int low;        /* a number is so small that its exponent is not exact */
    int needs_care; /* so is one, or an x is beyond NEAR or NaN: see emit_split */
} Emission;

INLINE const operand *x_row(const Exact *a, const Place *place, int64_t step) {
    if (kind_of(a) == DENSE) return x_at(a->dense, place->index, step);
    return at_step(a->x, step) + place->x;
}
INLINE int64_t row_at(const Exact *a, const Place *place, int64_t step) { return place->index * a->steps + step; }
INLINE Row forward_row(const Scan *w, const Place *place, int64_t step) {
    int64_t at = row_at(w->a, place, step) * w->width;
    return w->a->mantissas ? (Row){w->a->mantissas + at, w->a->exponents + at} : (Row){0, 0};
}
INLINE int is_active(const Sequence *s, int64_t step) { return step < s->place->steps && !s->idle; }

/* U from S into a step, or B from T out of it, of the sequences that have it. Rows are aligned unless many blocks of
   the last one needed exponents of their own. */
static void sum_all(Scan *w, int64_t step) {
    BlockMatrix *m = &w->matrix;
    RowProduct *products[TOGETHER], *others[TOGETHER];
    int64_t count = 0, apart = 0;
    for (int64_t f = 0; f < w->count; f++) {
        Sequence *s = w->sequence + f;
        int counts = s->counting.counts && kind_of(w->a) != DENSE;
        if (!is_active(s, step)) continue;
        s->product = (RowProduct){.row = s->message, .to = s->sums, .counting = counts ? &s->counting : 0};
        if (m->is_near && kind_of(w->a) != DURATIONS && s->waits-- <= 0)
            s->product.e = align(w->width, s->message, s->top, s->aligned), s->product.aligned = s->aligned;
        if (s->product.aligned) products[count++] = &s->product;
        else others[apart++] = &s->product;
    }
    for (int64_t f = 0; f < apart; f++) products[count++] = others[f];
    Mode mode = flush_to_zero(w->ordinary); /* of counts: operands and sums are normal */
    if (kind_of(w->a) == DENSE) sum_dense(m, count, products);
    for (int64_t f = 0; f < count && kind_of(w->a) == BANDS; f++) sum_bands(m, products[f]);
    for (int64_t f = 0; f < count && kind_of(w->a) == DURATIONS; f++) sum_durations(m, products[f]);
    for (int64_t f = 0; f < count && kind_of(w->a) == ARCS; f++) sum_arcs(m, w->width, products[f], w->pairs);
    set_mode(mode);
    for (int64_t f = 0; f < w->count; f++) {
        Sequence *s = w->sequence + f;
        if (is_active(s, step) && s->product.aligned) s->waits = 4 * s->product.failed > m->blocks ? PATIENCE : 0;
    }
}

/* p0 as a row; whether some entry is no weight. */
static int read_p0(const Exact *a, const Place *place, Row to) {
    int logs = (int)a->logarithms;
    wholes bad = {0};
    for (int64_t j = 0; j < a->states; j += LANES) {
        reals p = read_some(at_step(a->p0, j) + place->p0, a->p0.step, a->states - j, logs ? -INFINITE : 0);
        bad |= is_no_weight(p, logs);
        store_split(to, j, weight_split(p, logs));
    }
    return any(bad);
}

/* A message from sums and x - less, which is also written to `copy` if it is `copied`. Only a `careful` call determines
   the largest emission. */
INLINE Emission emit_split_by(const int careful, const int copied, const Scan *w, const Sequence *s, Row copy,
                             const operand *x, real less) {
    int64_t c = w->a->states, next_row = w->next_row;
    Row sums = s->sums, message = s->message;
    real before = s->top;
    wholes strange = {0}, low = {0};
    reals top = splat(-INFINITE), most = splat(-INFINITE);
    for (int64_t j = 0; j < c; j += LANES) {
        reals a = read_some(x + j, 1, c - j, -INFINITE);
        if (careful) a -= less;
        __builtin_prefetch(x + next_row + j);
        Split u = load_split(sums, j), e = exponential_split(a, careful), b = settled(u.m * e.m, (u.e + e.e) - before);
        strange |= is_far(a) | (a != a), low |= (b.e < (real)-EXACT) & (b.e > -INFINITE), top = larger(b.e, top);
        if (careful) most = larger(where(a > -INFINITE, e.e, a), most);
        store_split(message, j, b);
        if (copied) store_split(copy, j, b);
    }
    return (Emission){largest(top), careful ? largest(most) : 0, any(low), any(strange | low)};
}

/* The message of a step from its sums. Potentials beyond NEAR are taken relative to the largest, if that is beyond. A
   step that needs care is followed by others. */
INLINE void emit_split(Scan *w, Sequence *s, int64_t step, Row copy) {
    const operand *x = x_row(w->a, s->place, step);
    int64_t c = w->a->states;
    Emission emitted;
    if (!s->careful) {
        emitted = copy.m ? emit_split_by(0, 1, w, s, copy, x, 0) : emit_split_by(0, 0, w, s, copy, x, 0);
        s->careful = emitted.needs_care;
    }
    if (s->careful) {
        reals high = splat(-INFINITE);
        wholes numbers = {0};
        for (int64_t j = 0; j < c; j += LANES) {
            reals a = read_some(x + j, 1, c - j, -INFINITE);
            high = larger(a, high), numbers |= ~(a < INFINITE);
        }
        real less = largest(high);
        s->has_nan |= any(numbers);
        if (less < NEAR && (less > -NEAR || less == -INFINITE)) less = 0;
        emitted = emit_split_by(1, copy.m != 0, w, s, copy, x, less);
        add(&s->shift, (double)less);
        s->level += (double)emitted.most + (double)w->matrix.top + BITS_OF_TERMS;
        s->careful = emitted.needs_care || s->level > -__builtin_inf();
    }
    s->taken += (double)s->top, s->top = emitted.top > -INFINITE ? emitted.top : 0, s->level -= (double)s->top;
    if (emitted.low && s->level < -EXACT - (double)s->top) s->level = -EXACT - (double)s->top;
    s->inexact |= s->level > -BITS || s->top > (real)EXACT;
}

/* The largest exponent of S B. */
static real top_of_products(const Scan *w, const Sequence *s) {
    reals top = splat(-INFINITE);
    for (int64_t j = 0; j < w->width; j += LANES) {
        Split b = load_split(s->sums, j);
        top = larger(settled(b.m, b.e).e + load(s->forward.e + j), top);
    }
    return largest(top) > -INFINITE ? largest(top) : 0;
}

/* Posteriors of a step from S and the sums B; returns the sum of S B over 2^whole. */
static double write_posteriors(const Scan *w, const Sequence *s, operand *out) {
    reals total_of = {0};
    Row messages = s->forward, sums = s->sums;
    real shift = s->counting.shift, share = s->counting.share;
    int64_t c = w->a->states, width = w->width;
    for (int64_t j = 0; j < c; j += LANES) {
        Split forward = load_split(messages, j), b = load_split(sums, j);
        __builtin_prefetch(messages.m + j - width), __builtin_prefetch(messages.e + j - width);
        b = settled(b.m, b.e);
        reals both = forward.m * b.m * bounded_power((forward.e + b.e) + shift);
        total_of += both;
        if (out) write_some(out + j, both * share, c - j);
    }
    return (double)total(total_of);
}

INLINE double weight_of(const Exact *a, const Sequence *s) { return a->weight ? a->weight[s->place->index] : 1; }

/* Posteriors of a step, where Z is not known from another one. */
static void find_posteriors(const Scan *w, Sequence *s, operand *out) {
    real top = top_of_products(w, s);
    s->whole += (double)(s->counting.shift + top), s->counting.shift = -top;
    s->sum = write_posteriors(w, s, 0), s->counting.share = s->sum > 0 ? (real)(weight_of(w->a, s) / s->sum) : 0;
    if (out) write_posteriors(w, s, out);
}

/* Natural logarithms of numbers over 2^base. */
INLINE reals logarithms_of_split(Split a, real base) {
    reals e = a.e - base, log = e * LN2_HIGH + (e * LN2_LOW + logarithms(a.m));
    return where(a.e > -INFINITE, log, splat(-INFINITE));
}

/* The row of a step in an array with the strides of grad_x; null where there is none. */
INLINE operand *output_row(const Exact *a, operand *rows, const Sequence *s, int64_t step) {
    if (kind_of(a) == DENSE) return output_at(a->dense, rows, s->place->index, step);
    return rows ? rows + row_at(a, s->place, step) * a->states : 0;
}

/* Fills rows of such an array, which after the end of a packed sequence are those of others. */
static void fill_rows(const Exact *a, const Sequence *s, operand *rows, int64_t step, int64_t stop, operand value) {
    if (kind_of(a) == DENSE && a->dense->packed) stop = smaller_of(stop, s->place->steps);
    for (; step < stop; step++) {
        operand *row = output_row(a, rows, s, step);
        for (int64_t j = 0; j < a->states && row; j++) row[j] = value;
    }
}

/* A row as logarithms, with all that it lacks or with the largest near 0; NaN if an operand was no number. */
static void write_logs(const Scan *w, const Sequence *s, Row row, real base, Sum shift, operand *out) {
    for (int64_t j = 0; j < w->a->states; j += LANES) {
        reals logs = (real)shift.sum + ((real)shift.error + logarithms_of_split(load_split(row, j), base));
        write_some(out + j, s->has_nan ? splat((real)__builtin_nan("")) : logs, w->a->states - j);
    }
}
static void write_whole_logs(const Scan *w, const Sequence *s, Row row, operand *out) {
    Sum shift = s->shift;
    add_powers(&shift, s->taken);
    write_logs(w, s, row, 0, shift, out);
}

/* The message of a step divided by its sum. */
static void write_shares(const Scan *w, const Sequence *s, operand *out) {
    double sum = sum_of_split_row(w->width, s->message, s->top);
    real share = s->has_nan ? (real)__builtin_nan("") : sum > 0 ? (real)(1 / sum) : 0;
    for (int64_t j = 0; j < w->a->states; j += LANES) {
        Split b = load_split(s->message, j);
        write_some(out + j, b.m * power(b.e - s->top) * share, w->a->states - j);
    }
}

/* A message that leaves: logarithms of a row over 2^base, less `less`. */
static void write_leaving_logs(const Scan *w, const Sequence *s, Row row, real base, double less) {
    int64_t c = w->a->states;
    double *out = w->a->dense->boundary.leaving + s->place->index * c;
    for (int64_t j = 0; j < c; j += LANES) {
        reals logs = logarithms_of_split(load_split(row, j), base);
        UNROLL for (int l = 0; l < LANES; l++) if (j + l < c) out[j + l] = (double)logs[l] - less;
    }
}

/* The message of a step: as it is kept, in logarithms, and divided by its sum. */
static void write_forward(const Scan *w, const Sequence *s, int64_t step) {
    const Exact *a = w->a;
    operand *logs = output_row(a, a->log_forward, s, step), *shares = output_row(a, a->filtered, s, step);
    if (kind_of(a) == DENSE && a->dense->messages.data)
        write_logs(w, s, s->message, s->top, (Sum){0, 0}, message_at(a->dense, s->place->index, step));
    if (logs) write_whole_logs(w, s, s->message, logs);
    if (shares) write_shares(w, s, shares);
}

/* Results after the last step; `sum`: that of the message over 2^top. */
static void finish_dense(const Scan *w, const Sequence *s, double sum, Sum log_norm) {
    const Chain *a = w->a->dense;
    int64_t q = s->place->index;
    write_log_norm(a, q, log_norm);
    double log_sum = s->has_nan ? log_norm.sum : sum == 0 ? 0 : logarithm(sum);
    if (a->boundary.leaving) write_leaving_logs(w, s, s->message, s->top, log_sum);
    for (int64_t step = s->place->steps; step < a->steps && a->messages.data && !a->packed; step++)
        clear(a->states, message_at(a, q, step));
}

/* Undoes the raising of emissions in a kept linear message of a last step: no sum has been tested for it. */
static void lower_raised(const Scan *w, const Sequence *s, int64_t step) {
    const operand *x = x_row(w->a, s->place, step);
    int64_t c = w->a->states;
    real top = -INFINITE;
    for (int64_t j = 0; j < c; j++) top = (real)x[j] > top ? (real)x[j] : top;
    for (int64_t j = 0; j < c; j += LANES) {
        reals below = read_some(x + j, 1, c - j, top) - top - LOG_DEEPEST;
        Split factor = exponential_split(smaller(below, splat(0)), 1), kept = load_split(s->forward, j);
        store_split(s->forward, j, settled(kept.m * factor.m, kept.e + factor.e));
    }
}

/* S of a step as it was kept: logarithms if the sequence was recomputed, otherwise linear. */
static void begin_dense(const Scan *w, Sequence *s, int64_t step) {
    const Chain *a = w->a->dense;
    int64_t q = s->place->index;
    int logs = a->flagged[q] & 1, last = step + 1 == s->place->steps;
    if (step + 1 > a->uncounted[q]) s->counting.counts = 0;
    for (int64_t j = 0; j < a->states; j += LANES) {
        reals kept = read_some(message_at(a, q, step) + j, 1, a->states - j, logs ? -INFINITE : 0);
        store_split(s->forward, j, weight_split(kept, logs));
    }
    if (a->boundary.following && last && !logs) lower_raised(w, s, step);
}

/* B at a last step: ones, or the exponentials of `following` less its largest. */
static void last_split_row(const Scan *w, Sequence *s) {
    int64_t c = w->a->states;
    const double *following = kind_of(w->a) == DENSE ? w->a->dense->boundary.following : 0;
    if (following) following += s->place->index * c;
    double top = following ? largest_log(c, following) : 0;
    for (int64_t j = 0; j < c; j += LANES) {
        reals logs = splat(-INFINITE);
        UNROLL for (int l = 0; l < LANES; l++)
            if (j + l < c) logs[l] = following ? (real)(following[j + l] - top) : 0;
        store_split(s->sums, j, weight_split(logs, 1));
    }
}

/* Posteriors and counts of a step. */
static void end_dense(const Scan *w, Sequence *s, int64_t step, operand *out) {
    find_posteriors(w, s, out);
    s->counting.forward = s->forward;
    if (s->counting.counts && s->sum > 0) count_dense(&w->matrix, &s->product, &s->counting);
    if (step == 0 && leaving_backward(w->a->dense)) write_leaving_logs(w, s, s->sums, top_of_row(w->width, s->sums), 0);
}
