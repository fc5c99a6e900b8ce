/* Backward messages and gradients, from the forward messages that were kept.

       T_i = B_i E_i        B_{i-1} = T_i P_i^T        scaled to 2^TOP as S is, and believed on the same terms
       d/dx_i = w S_i B_i / sum S_i B_i        d/dP_i = w S_{i-1}^T T_i / sum S_{i-1} B_{i-1}

   A sequence that is lossy is left out; one that turns out to be, from there on: what was counted of it stands. */
#pragma once
#include "forward.h"

/* So many products are added up in a `real` before they go into a double: what that rounds stays below 2^-20. */
enum { ADDED = 256 };

typedef struct {
    Walk w;
    real *behind, *source, *ahead; /* (count, width): B, T, and S where messages are gathered */
    real *posterior;               /* (width) */
    real *turned;                  /* (width, width): the matrix's transpose */
    real *partial;                 /* (c, padded width): sums of S^T T of some rows; what pads them is anything */
    double *total;                 /* the same of all rows */
    real *shares, *scales;         /* (count): as `meet` finds them */
    uint8_t *skipped;              /* (count): turned out to be lossy */
    double weight;                 /* a power of two near the largest weight, which sources are without */
    int64_t added;                 /* rows in `partial` */
    /* (GROUP, width): S and T of some steps of few sequences, to be multiplied together */
    real *held_ahead, *held_source;
    int64_t held;
    int prepared, wary;            /* a matrix is held; every matrix is looked at */
} Back;

INLINE int logs(const Chain *a) { return a->by_log || a->logarithms; }
INLINE reals size_of(reals a) { return (reals)((wholes)a & ~((wholes){0} + bits_of((real)-0.0))); }

/* The largest of logarithms, or 0 where there is none. */
static double largest_log(int64_t c, const double *from) {
    double top = -__builtin_inf();
    for (int64_t j = 0; j < c; j++) top = from[j] > top ? from[j] : top;
    return top > -__builtin_inf() ? top : 0;
}

/* A row of logarithms as one of sums; whether that loses any. */
static int follow(int64_t c, const double *from, real *row) {
    double top = largest_log(c, from);
    int lost = 0;
    for (int64_t j = 0; j < c; j += LANES) {
        reals high, rest;
        UNROLL for (int l = 0; l < LANES; l++) {
            double value = j + l < c ? from[j + l] - top : -__builtin_inf();
            high[l] = (real)value, rest[l] = high[l] >= LOG_DEEPEST ? (real)(value - (double)high[l]) : 0;
        }
        reals value = exponential(high, rest) * power_of_two(TOP - 1);
        lost |= any(~((value == 0) | (value >= TRUSTED)));
        store_some(row + j, value, c - j);
    }
    return lost;
}

/* B after a sequence's last step. */
static void end_row(Back *b, int64_t place) {
    const Chain *a = b->w.a;
    int64_t q = sequence_of(&b->w, place), width = b->w.width;
    real *row = b->behind + place * width;
    for (int64_t j = 0; j < width; j++) row[j] = j < a->states ? power_of_two(TOP - 1) : 0;
    if (!a->following) return;
    if (follow(a->states, a->following + q * a->states, row)) a->lossy[q] = 2, b->skipped[place] = 1;
}

/* T of a row; whether an emission was raised. */
INLINE int emit(int64_t width, const real *x, const real *behind, real *source) {
    real top = top_of(x, width);
    reals a = load(x + width - LANES) - top, end = load(behind + width - LANES) * exponential(a, NO_REST);
    wholes deep = (a < LOG_DEEPEST) & (a > -INFINITE);
    for (int64_t j = 0; j + LANES < width; j += LANES) {
        reals d = load(x + j) - top;
        store(source + j, load(behind + j) * exponential(d, NO_REST));
        deep |= (d < LOG_DEEPEST) & (d > -INFINITE);
    }
    store(source + width - LANES, end);
    return any(deep);
}

/* 1 for the lanes of a row's last vector that the one before it does not hold. */
INLINE reals fresh_lanes(int64_t width) {
    reals fresh = {0};
    for (int64_t j = 0; j < LANES; j++) fresh[j] = j >= LANES - 1 - (width - 1) % LANES;
    return fresh;
}

typedef struct { real share, scale; whole least, most; } Met;

/* Where S and B meet: B is multiplied by `scale`, to 2^TOP, and `share` is 2^TOP / sum S B. The posterior w S B / sum S
   B is written, but for what would be denormal. */
INLINE Met meet(int64_t width, const real *ahead, real *behind, real weight, real *posterior, reals fresh) {
    reals end = load(behind + width - LANES);
    wholes low = (wholes)end, tall = (wholes)end;
    for (int64_t j = 0; j + LANES < width; j += LANES) {
        wholes bits = (wholes)load(behind + j);
        low = lower(low, bits), tall = higher(tall, bits);
    }
    Met met = {.least = lowest(low), .most = highest(tall)};
    real factor = met.scale = scale_to_top(exponent_of(met.most)), down = power_of_two(-TOP);
    end *= factor;
    reals both = load(ahead + width - LANES) * (end * down), sum = both * fresh;
    for (int64_t j = 0; j + LANES < width; j += LANES) {
        reals b = load(behind + j) * factor;
        store(behind + j, b);
        sum += load(ahead + j) * (b * down);
    }
    store(behind + width - LANES, end);
    real whole_sum = total(sum);
    met.share = whole_sum > 0 ? 1 / whole_sum : 0;
    if (posterior) {
        real least_seen = whole_sum * power_of_two(1 - BIAS), share = met.share;
        for (int64_t j = 0; j + LANES < width; j += LANES) {
            reals g = load(ahead + j) * (load(behind + j) * down);
            store(posterior + j, where(g < least_seen, (reals){0}, g * share * weight));
        }
        store(posterior + width - LANES, where(both < least_seen, (reals){0}, both * share * weight));
    }
    return met;
}

/* T as a source: 0 where that has faded, and within the format where no path is. The
   two factors are applied one after the other where their product may be no number. */
INLINE void share_out(int64_t width, real *source, real share, real scale, real weight) {
    real down = scale * power_of_two(-HALF), factor = down * share;
    int apart = !(factor > power_of_two(30 - BIAS) && factor < power_of_two(BIAS - 30));
    real first = apart ? down : factor, second = apart ? share : 1;
    real limit = apart ? 0 : power_of_two(-HALF - FADED) / factor,
             least = limit > power_of_two(1 - BIAS) ? limit : power_of_two(1 - BIAS);
    reals most = all(power_of_two(BIAS - 1)), end = load(source + width - LANES);
    end = smaller(smaller(where(end < least, (reals){0}, end) * first, most) * second, most) * weight;
    for (int64_t j = 0; j + LANES < width; j += LANES) {
        reals t = load(source + j);
        store(source + j, smaller(smaller(where(t < least, (reals){0}, t) * first, most) * second, most) * weight);
    }
    store(source + width - LANES, end);
}

/* 2^-exponent as two factors: it may be no number of the format, and 0 times it is 0. */
typedef struct { double first, second; } Factors;

INLINE double halved(double a, int64_t times) {
    for (; times > 0; times--) a *= 0.5;
    for (; times < 0; times++) a *= 2;
    return a;
}
INLINE Factors unscaled(int64_t exponent) {
    return (Factors){halved(1, exponent / 2), halved(1, exponent - exponent / 2)};
}

/* Sources of transitions by entries far above 1 may be gone where those transitions are the likely ones. */
#define LARGE power_of_two(FADED - GUARD)
INLINE void beware(Back *b, reals high) { b->wary |= largest(high) > LARGE; }

/* A step's gradient from sums of products in `partial`, and those in `total` if there are any: exactly 0 where the
   matrix is. */
static void write_counts(Back *b, const double *total, real *out) {
    const Matrix *m = &b->w.matrix;
    reals high = {0};
    int64_t c = m->c, across = padded(b->w.width);
    int by_log = logs(b->w.a);
    Factors unscale = unscaled(by_log ? 0 : m->exponent);
    double factor = (double)UNSHARE * b->weight;
    for (int64_t k = 0; k < c; k++) {
        const real *p = m->entries + k * m->row, *rest = b->partial + k * across;
        if (total || c < LANES || !(m->exponent == 0 || by_log)) {
            for (int64_t j = 0; j < c; j++) {
                high[0] = p[j] > high[0] ? p[j] : high[0];
                double sum = ((total ? total[k * across + j] : 0) + (double)rest[j]) * factor;
                out[k * c + j] =
                    p[j] == 0 ? 0 : (real)(by_log ? sum * (double)p[j] : sum * unscale.first * unscale.second);
            }
        } else
            for (int64_t v = 0; v < vectors_of(c); v++) {
                int64_t j = start_of(v, c);
                reals entries = load(p + j), found = load(rest + j) * (real)factor;
                high = larger(entries, high);
                store(out + k * c + j, where(entries == 0, (reals){0}, by_log ? found * entries : found));
            }
    }
    beware(b, high);
}

static void flush(Back *b) {
    for (int64_t k = 0; k < b->w.a->states * padded(b->w.width) && b->added; k++)
        b->total[k] += (double)b->partial[k], b->partial[k] = 0;
    b->added = 0;
}

/* One step's transitions of one sequence: an outer product, written at once. */
static void write_outer(Back *b, const real *ahead, int64_t step) {
    const Walk *w = &b->w;
    reals high = {0};
    const Chain *a = w->a;
    int64_t c = a->states;
    real *out = a->grad_bulk + first_count(a, w->set) + (step - 1) * a->count_step;
    int by_log = logs(a);
    Factors unscale = unscaled(by_log ? 0 : w->matrix.exponent);
    real first = UNSHARE * (real)b->weight * (real)unscale.first, second = (real)unscale.second;
    for (int64_t k = 0; k < c; k++) {
        const real *p = w->matrix.entries + k * w->matrix.row;
        real s = ahead[k], *to = out + k * c;
        /* products below are no normal numbers */
        double limit = (double)power_of_two(8 - BIAS) / (s > 0 ? (double)s : 1);
        real least = limit < (double)power_of_two(BIAS) ? (real)limit : power_of_two(BIAS);
        if (c < LANES) {
            reals t = load(b->source), entries = load(p);
            high = larger(entries, high);
            reals found = where(size_of(t) < least, (reals){0}, t) * s * first * second;
            store_some(to, where(entries == 0, (reals){0}, by_log ? found * entries : found), c);
        } else for (int64_t v = 0; v < vectors_of(c); v++) {
            int64_t j = start_of(v, c);
            reals t = load(b->source + j), entries = load(p + j);
            reals found = where(size_of(t) < least, (reals){0}, t) * s * first * second;
            high = larger(entries, high);
            store(to + j, where(entries == 0, (reals){0}, by_log ? found * entries : found));
        }
    }
    beware(b, high);
}

/* Adds S^T T of some rows. */
static void add_rows(Back *b, int64_t count, const real *ahead, const real *source) {
    int64_t c = b->w.a->states, width = b->w.width, across = padded(width);
    for (int64_t row = 0; row < count;) {
        int64_t rows = count - row < ADDED - b->added ? count - row : ADDED - b->added;
        multiply_add((Product){c, rows, across, ahead + row * width, 1, width,
                              source + row * width, width, b->partial, across});
        b->added += rows, row += rows;
        if (b->added == ADDED) flush(b);
    }
}

static void release(Back *b) {
    add_rows(b, b->held, b->held_ahead, b->held_source);
    b->held = 0;
}

/* The same of few rows, but not before there are some. */
static void hold_rows(Back *b, int64_t count, const real *ahead) {
    int64_t width = b->w.width;
    if (b->held + count > GROUP) release(b);
    for (int64_t row = 0; row < count; row++)
        for (int64_t k = 0; k < vectors_of(width); k++) {
            int64_t from = row * width + start_of(k, width), to = b->held * width + from;
            store(b->held_ahead + to, load(ahead + from)), store(b->held_source + to, load(b->source + from));
        }
    b->held += count;
}

/* The transitions into a step: S^T T of the first `count` places. */
static void count_step(Back *b, int64_t count, const real *ahead, int64_t step) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width, across = padded(width);
    if (a->grad_bulk && a->members == 1 && count == 1) {
        write_outer(b, ahead, step);
        return;
    }
    if (a->counts) {
        if (count <= GROUP / 4) hold_rows(b, count, ahead);
        else add_rows(b, count, ahead, b->source);
        return;
    }
    real *to = a->grad_bulk + first_count(a, w->set) + (step - 1) * a->count_step;
    if (count == 0) clear(c * c, to);
    else if (count <= ADDED) {
        multiply((Product){c, count, across, ahead, 1, width, b->source, width, b->partial, across});
        write_counts(b, 0, to);
    } else {
        for (int64_t k = 0; k < c * across; k++) b->partial[k] = 0, b->total[k] = 0;
        add_rows(b, count, ahead, b->source);
        write_counts(b, b->total, to);
        b->added = 0;
    }
}

/* S of the first places at a step, as rows next to each other. */
static const real *rows_ahead(const Back *b, int64_t count, int64_t step) {
    const Walk *w = &b->w;
    const Chain *a = w->a;
    if (w->direct) return message_at(a, sequence_of(w, 0), step);
    for (int64_t place = 0; place < count; place++)
        widen(a->states, w->width, message_at(a, sequence_of(w, place), step), 1, 0, b->ahead + place * w->width);
    return b->ahead;
}

INLINE real *gradient_at(const Chain *a, int64_t set, int64_t q, int64_t step) {
    if (!a->grad_x || (a->entering && step-- == 0)) return 0;
    if (a->starts) return a->grad_x + (a->starts[q] + step) * a->grad_step;
    int64_t at = a->grad_at ? a->grad_at[q] : set * a->grad_set + (q - set * a->members) * a->grad_member;
    return a->grad_x + step * a->grad_step + at;
}

/* Posteriors of the places from `from` to before `count`. `looks`: B are sums, of which some may be lossy. */
static void meet_all(Back *b, int64_t from, int64_t count, int64_t step, const real *ahead, int looks, real common) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width;
    reals fresh = fresh_lanes(width);
    for (int64_t place = from; place < count; place++) {
        int64_t q = sequence_of(w, place);
        real *gradient = gradient_at(a, w->set, q, step), *row = b->behind + place * width;
        if (!b->skipped[place]) {
            real *to = gradient && c < LANES ? b->posterior : gradient;
            Met met = meet(width, ahead + place * width, row, (real)a->weight[q], to, fresh);
            if (gradient && c < LANES) store_some(gradient, load(b->posterior), c);
            b->shares[place] = met.share, b->scales[place] = met.scale;
            int lost = !(met.share > 0 && met.share < power_of_two(TOP));
            int faint = a->grad_bulk || a->counts ? met.most < bits_of(power_of_two(TOP - 24)) : 0;
            if (looks && (lost || faint || asks(w->deep[place], met.least, met.most))) {
                if (!w->matrix.looked) look(&w->matrix);
                lost |= is_lossy(c, row, met.scale, met.most, &w->matrix, common);
                if ((lost || faint) && is_far(&w->matrix)) b->wary = 1;
            }
            if (!lost) continue;
            a->lossy[q] = 2, a->uncounted[q] = step + 1, b->skipped[place] = 1;
        }
        clear(width, row);
        if (gradient) clear(c, gradient);
    }
}

/* The gradient of the initial weights of a place. */
static void write_start(Back *b, int64_t place) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place), c = a->states, exponent;
    double *out = a->grad_p0 + q * c, sum = 0, shift;
    const real *p0 = a->p0 + q / a->members * a->p0_set + q % a->members * a->p0_member, *x;
    real *source = b->source + place * w->width;
    for (int64_t j = 0; j < c; j++) out[j] = 0;
    if (b->skipped[place]) return;
    start_row(c, w->width, p0, a->p0_state, (int)a->logarithms, w->first, &exponent, &shift);
    rows_of_x(w, place, 1, 0, &x);
    emit(w->width, x, b->behind + place * w->width, source);
    double down = (double)power_of_two(-TOP); /* of the weights: the least source is a number that has no room for it */
    Factors unscale = unscaled(exponent + TOP);
    for (int64_t j = 0; j < c; j++) sum += (double)w->first[j] * down * (double)source[j];
    for (int64_t j = 0; j < c; j++) {
        if (w->first[j] == 0 || !(sum > 0)) continue;
        double t = source[j], posterior = (double)w->first[j] * down * t / sum;
        out[j] = a->weight[q] * (logs(a) ? posterior : t / sum * unscale.first) * (logs(a) ? 1 : unscale.second);
    }
}

/* B of the step that entered. */
static void leave_back(const Back *b, int64_t place) {
    const Chain *a = b->w.a;
    const real *row = b->behind + place * b->w.width;
    double *out = a->leaving + sequence_of(&b->w, place) * a->states;
    for (int64_t j = 0; j < a->states && !b->skipped[place]; j++)
        out[j] = logarithm((double)row[j] * (double)power_of_two(-TOP));
}

/* The matrix into a step, and its transpose where products or a row want it. */
static void prepare_back(Back *b, int64_t count, int64_t step) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t width = w->width;
    if (b->prepared && a->one_matrix) return;
    prepare(a, w->set, step, &w->matrix);
    b->prepared = 1;
    if (b->wary || a->one_matrix) look(&w->matrix), rescale(&w->matrix);
    if (count == 1 && !a->one_matrix) return;
    if (w->matrix.c >= LANES) transpose(width, w->matrix.entries, w->matrix.row, b->turned, width);
    else for (int64_t k = 0; k < width; k++)
        for (int64_t j = 0; j < width; j++) b->turned[j * width + k] = w->matrix.entries[k * w->matrix.row + j];
}

/* B of the first places at the step before. */
static void pull(Back *b, int64_t count, int64_t step) {
    Walk *w = &b->w;
    int64_t c = w->a->states, width = w->width;
    for (int64_t place = 0, group = group_of(w->a); place < count; place += group) {
        int64_t rows = count - place < group ? count - place : group;
        const real *x[4 * GROUP];
        real *behind = b->behind + place * width, *source = b->source + place * width;
        rows_of_x(w, place, rows, step, x);
        for (int64_t r = 0; r < rows; r++)
            w->deep[place + r] = (uint8_t)emit(width, x[r], behind + r * width, source + r * width);
        if (count > 1) multiply((Product){rows, c, width, source, width, 1, b->turned, width, behind, width});
        else if (w->a->one_matrix) row_times(c, width, source, b->turned, width, behind);
        else row_times_transposed(width, source, w->matrix.entries, w->matrix.row, behind);
    }
}

/* Steps of a sequence of few states, as far as they ask for no care. */
static int64_t few_back(Back *b, int64_t step) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t q = sequence_of(w, 0);
    Lone l;
    real padded[FEW * FEW];
    if (a->one_matrix) prepare_back(b, 1, step);
    if (step >= lone_of(w, 1, padded, &l) || (a->grad_bulk && a->members > 1)) return step;
    l.by_log = logs(a);
    l.until = a->entering != 0; /* that step has no gradient */
    l.gradient = gradient_at(a, w->set, q, l.until), l.gradient_step = a->grad_step;
    if (l.gradient) l.gradient -= l.until * l.gradient_step;
    l.outer = a->grad_bulk ? a->grad_bulk + first_count(a, w->set) : 0, l.outer_step = a->count_step;
    l.held_ahead = a->counts ? b->held_ahead : 0, l.held_source = b->held_source;
    l.held_step = w->width, l.most_held = GROUP;
    l.weight = (real)a->weight[q], l.source_weight = (real)(a->weight[q] / b->weight);
    l.unshare = UNSHARE * (real)b->weight;
    narrow(a->states, b->behind, l.state);
    for (int full = 1; full && step > l.until;) {
        l.held = b->held;
        step = steps_back(&l, step);
        b->wary |= l.high > LARGE;
        b->held = l.held, full = l.held_ahead && l.held == GROUP;
        if (full) release(b);
    }
    narrow(a->states, l.state, b->behind);
    return step;
}

/* All steps of the places. */
static void walk_back(Back *b) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width, count = 0;
    int counted = (a->counts || a->grad_bulk) && a->steps > 1;
    real common = ordinary();
    b->prepared = 0, b->added = b->held = 0, b->weight = 0;
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place);
        double weight = a->weight[q] < 0 ? -a->weight[q] : a->weight[q];
        a->lossy[q] = b->skipped[place] = w->deep[place] = 0;
        b->weight = weight > b->weight ? weight : b->weight;
    }
    int64_t exponent;
    b->weight = b->weight > 0 && b->weight < __builtin_inf() ? b->weight / mantissa(b->weight, &exponent) : 1;
    for (int64_t k = 0; k < c * padded(width) && counted; k++) b->partial[k] = 0, b->total[k] = 0;
    /* rows behind the ends of packed sequences are those of others */
    int64_t steps = !a->starts ? a->steps : w->count > 0 ? steps_of(a, sequence_of(w, 0)) : 0;
    for (int64_t step = steps - 1; step >= 0; step--) {
        int64_t before = count;
        while (count < w->count && steps_of(a, sequence_of(w, count)) > step)
            end_row(b, count++);
        for (int64_t place = count; place < w->count && a->grad_x && !a->starts; place++)
            clear(c, gradient_at(a, w->set, sequence_of(w, place), step));
        if (count > before) meet_all(b, before, count, step, rows_ahead(b, count, step), 0, common);
        if (step == 0) break;
        if (count == 0) {
            if (a->grad_bulk && counted) count_step(b, 0, b->ahead, step);
            continue;
        }
        if (w->lone && !b->skipped[0] && !b->wary) step = few_back(b, step);
        if (step == 0) break;
        prepare_back(b, count, step);
        pull(b, count, step);
        const real *ahead = rows_ahead(b, count, step - 1);
        meet_all(b, 0, count, step - 1, ahead, 1, common);
        for (int64_t place = 0; place < count && counted; place++) {
            real *source = b->source + place * width,
                 weight = (real)(a->weight[sequence_of(w, place)] / b->weight);
            if (b->skipped[place]) clear(width, source);
            else share_out(width, source, b->shares[place], b->scales[place], weight);
        }
        if (counted) count_step(b, count, ahead, step);
    }
    for (int64_t place = 0; place < w->count && a->entering && a->leaving; place++) leave_back(b, place);
    for (int64_t place = 0; place < w->count && a->grad_p0; place++) write_start(b, place);
}

/* Gradients of the places: once more where a matrix turns out to need care, for any that was added up may have. */
static void go_back(Back *b) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int wary;
    do wary = b->wary, walk_back(b);
    while (b->wary != wary);
    if (!a->counts || !b->prepared) return;
    release(b), flush(b);
    Factors unscale = unscaled(w->matrix.exponent);
    for (int64_t k = 0; k < a->states; k++)
        for (int64_t j = 0; j < a->states; j++) {
            real p = w->matrix.entries[k * w->matrix.row + j];
            double found = b->total[k * padded(w->width) + j] * ((double)UNSHARE * b->weight);
            found = logs(a) ? found * (double)p : found * unscale.first * unscale.second;
            if (p != 0) a->counts[(w->set * a->states + k) * a->states + j] += found;
        }
}

/* The members in the places from `begin` to before `behind` of a set that have gradients here. The others', of which
   some are redone, become 0. */
static int64_t choose_members(const Walk *w, int64_t begin, int64_t behind, int64_t *chosen) {
    const Chain *a = w->a;
    int64_t count = 0;
    for (int64_t place = begin; place < behind; place++) {
        int64_t q = sequence_of(w, place);
        a->uncounted[q] = a->steps;
        if (!a->lossy[q] && a->weight[q] != 0 && a->log_norm[q] > -__builtin_inf()) {
            chosen[count++] = q - w->set * a->members;
            continue;
        }
        int64_t steps = a->starts ? steps_of(a, q) : a->steps;
        for (int64_t step = a->entering != 0; step < steps && a->grad_x; step++)
            clear(a->states, gradient_at(a, w->set, q, step));
        for (int64_t j = 0; j < a->states && a->grad_p0; j++) a->grad_p0[q * a->states + j] = 0;
        for (int64_t j = 0; j < a->states && a->entering && a->leaving; j++) a->leaving[q * a->states + j] = 0;
    }
    return count;
}

/* The places of each set that a thread has. How many are lossy, in either direction. */
EXPORT int64_t EXPORTED(logchain_backward)(const Chain *a) {
    int64_t lossy = 0;
    Back b = {.w = {.a = a, .width = width_of(a)}};
    Walk *w = &b.w;
    for (int64_t q = a->first; q < a->last;) {
        int64_t begin = q % a->members, behind = a->members - begin < a->last - q ? a->members : begin + a->last - q;
        int64_t group = group_of(a),
                size = a->one_matrix && behind - begin > group ? group : behind - begin, real_size = sizeof(real);
        char *room = a->room;
        w->set = q / a->members, w->begin = 0, w->order = order_of(a, w->set);
        w->matrix = (Matrix){.c = a->states, .width = w->width, .room = take(&room, w->width * w->width * real_size)};
        if (w->width > a->states) clear(w->width * w->width, w->matrix.room);
        w->wide = take(&room, group * w->width * real_size);
        w->first = take(&room, w->width * real_size);
        w->deep = take(&room, size);
        b.behind = take(&room, size * w->width * real_size);
        b.source = take(&room, (size * w->width + LANES) * real_size);
        b.ahead = take(&room, size * w->width * real_size);
        b.posterior = take(&room, w->width * real_size);
        b.turned = take(&room, w->width * w->width * real_size);
        b.partial = take(&room, w->width * padded(w->width) * real_size);
        b.held_ahead = take(&room, (GROUP * w->width + LANES) * real_size);
        b.held_source = take(&room, (GROUP * w->width + LANES) * real_size);
        b.total = take(&room, w->width * padded(w->width) * (int64_t)sizeof(double));
        b.shares = take(&room, size * real_size);
        b.scales = take(&room, size * real_size);
        b.skipped = take(&room, size);
        int64_t *chosen = take(&room, (behind - begin) * 8), count = choose_members(w, begin, behind, chosen);
        int64_t last = behind;
        w->begin = begin;
        if (count < behind - begin) w->order = chosen, w->begin = 0, last = count;
        w->direct = !w->order && !a->ends && w->width == a->states;
        do { /* without any, too: gradients of matrices become 0 */
            w->count = last - w->begin < size ? last - w->begin : size;
            w->lone = w->count == 1 && a->states <= FEW;
            go_back(&b);
        } while ((w->begin += size) < last);
        w->order = order_of(a, w->set);
        for (w->begin = begin; w->begin < behind; w->begin++) lossy += a->lossy[sequence_of(w, 0)] != 0;
        q += behind - begin;
    }
    return lossy;
}

/* Bytes of scratch that a thread takes, of either direction. */
EXPORT int64_t EXPORTED(logchain_room)(const Chain *a) {
    int64_t width = width_of(a), group = group_of(a), bytes = sizeof(real);
    int64_t size = a->one_matrix && a->members > group ? group : a->members;
    int64_t ahead = width * width * bytes + 2 * group * width * bytes + (2 * size + 1) * width * bytes + size * 40;
    int64_t back = 2 * width * width * bytes + width * padded(width) * (bytes + 8)
                   + (2 * GROUP + group + 3 * size + 2) * width * bytes + size * 32 + a->members * 8;
    return (ahead > back ? ahead : back) + 20 * 64;
}
