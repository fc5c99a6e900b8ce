/* Gradients of log Z of chains of bands, from the messages S of bands.h:

       B_{v-1} = 1    T_i = B_i E_i    B_{i-1}(j) = sum over bands d of V_{i-1}(d, j + o_d) T_i(j + o_d)

   A posterior is S B / sum S B, with the sum of the step after, which differs by rounding alone. The expected count of
   a value is the sum over steps of S_{i-1}(j) V T_i(j + o) / sum S B, and the gradient that over V. Its summands are
   those of B without the digits of V, by which the sum over steps is multiplied; for the gradient the exponent of V is
   taken out of it instead. Where exponents of values are too far apart for that, each summand has one of its own. */
#pragma once
#include "bands.h"
#include "flush.h"

/* The range of exponents of values that summands of B allow, and the steps whose counts are added up in `real`. */
#if BITS == 32
enum { RANGE = 60 };
#else
enum { RANGE = 500 };
#endif
enum { TOGETHER_IN_COUNTS = 32 };

/* What S B of a step is multiplied by: its exponents lack `shift`, and `share` is the weight over sum S B. */
typedef struct { whole shift; real share; } Scale;

/* T of a step and posteriors from T of the step after, whose largest exponent is `top`. Adds to `counts`, and writes
   posteriors to `grad`, unless they are null. Returns the new largest exponent, and sum S B. */
INLINE whole step_bands_backward(Band_walk *w, const Banded *p, int held, whole top, Scale scale, Splits kept,
                                 real *grad, real *counts, double *sum) {
    int64_t c = w->a->states, across = p->across, groups = held < BANDS_HELD ? 1 : p->groups, offsets[BANDS_HELD];
    Splits message = w->message, next = w->next, emission = w->x, values = p->rows;
    wholes high = splat_whole((whole)NOTHING), lost = {0};
    reals sums = {0}, terms[BANDS_HELD];
    const real *ahead = w->ahead;
    read_offsets(p, 0, held, 1, offsets);
    for (int64_t j = 0; j < c; j += LANES) {
        Split u = {0}, x = load_split(emission.m + j, emission.e + j);
        __builtin_prefetch(ahead + j), __builtin_prefetch(kept.m - c + j), __builtin_prefetch(kept.e - c + j);
        Split s = {read_some(kept.m + j, 1, c - j, 0), read_some_whole(kept.e + j, c - j, (whole)NOTHING)};
        s.e += scale.shift;
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = g * held * across + j;
            if (groups > 1) read_offsets(p, g * held, held, 1, offsets);
            Split more = sum_group(held, across, values, at, splits_at(message, j), offsets, terms);
            reals factor = s.m * power(s.e + more.e) * scale.share;
            if (counts)
                UNROLL for (int d = 0; d < held; d++) {
                    real *to = counts + at + d * across;
                    store(to, load(to) + terms[d] * factor);
                }
            u = g ? plus_split(u, more) : more;
        }
        reals both = s.m * power(s.e + u.e) * u.m;
        sums += both;
        if (grad) write_some(grad + j, both * scale.share, c - j);
        Split t = settled_split(u.m * x.m, u.e + x.e - top, &lost);
        store_split(next.m + j, next.e + j, t);
        high = larger_whole(high, t.e);
    }
    *sum = (double)total(sums), w->lost |= any(lost), w->message = next, w->next = message;
    return highest(high);
}

static whole step_bands_backward_by(Band_walk *w, const Banded *p, whole top, Scale scale, Splits kept, real *grad,
                                    real *counts, double *sum) {
    switch (p->held) {
    case 1: return step_bands_backward(w, p, 1, top, scale, kept, grad, counts, sum);
    case 2: return step_bands_backward(w, p, 2, top, scale, kept, grad, counts, sum);
    case 3: return step_bands_backward(w, p, 3, top, scale, kept, grad, counts, sum);
    case 4: return step_bands_backward(w, p, 4, top, scale, kept, grad, counts, sum);
    case 5: return step_bands_backward(w, p, 5, top, scale, kept, grad, counts, sum);
    case 6: return step_bands_backward(w, p, 6, top, scale, kept, grad, counts, sum);
    case 7: return step_bands_backward(w, p, 7, top, scale, kept, grad, counts, sum);
    default: return step_bands_backward(w, p, BANDS_HELD, top, scale, kept, grad, counts, sum);
    }
}

INLINE int has_logarithms(const Bands *a) { return a->logarithms || a->by_log; }
INLINE int is_apart(const Band_walk *w) { return !has_logarithms(w->a) && w->matrix.level.range > RANGE; }

/* 2^e for any e, as a product of two. */
INLINE reals scaled_by(reals a, wholes e) {
    e = smaller_whole(larger_whole(e, splat_whole(-2 * BIAS)), splat_whole(2 * BIAS));
    return a * power(e >> 1) * power(e - (e >> 1));
}

/* Adds S T / sum S B of a step to the counts, each product with its own exponent. */
static void count_apart(Band_walk *w, Scale scale, Splits kept) {
    const Bands *a = w->a;
    int64_t c = a->states;
    for (int64_t d = 0; d < a->bands; d++)
        for (int64_t j = 0; j < c; j += LANES) {
            Split t = load_split(w->message.m + j + a->offsets[d], w->message.e + j + a->offsets[d]);
            reals s = read_some(kept.m + j, 1, c - j, 0) * scale.share;
            wholes e = read_some_whole(kept.e + j, c - j, (whole)NOTHING) + t.e;
            real *to = w->counts + d * w->across + j;
            store(to, load(to) + scaled_by(s * t.m, e + (scale.shift - w->matrix.level.exponent)));
        }
}

/* Moves the counts to the gradient of the matrix out of a step. */
static void settle_bands_counts(Band_walk *w, int64_t q, int64_t step) {
    const Bands *a = w->a;
    const Banded *p = &w->matrix;
    int64_t c = a->states, at = a->grad_at[q] + (a->one_matrix ? 0 : step * a->bands * c);
    int logarithms = has_logarithms(a), apart = is_apart(w);
    w->counted = 0;
    for (int64_t d = 0; d < a->bands; d++, at += c) {
        int64_t o = a->offsets[d], begin = begin_of(o), stop = stop_of(o, c);
        real *counts = w->counts + d * w->across;
        for (int64_t j = 0; j < c; j += LANES) {
            Split value = load_split(p->rows.m + d * p->across + j, p->rows.e + d * p->across + j);
            reals count = load(counts + j);
            if (logarithms) count *= value.m;
            else if (!apart) count = scaled_by(count, -(value.e + p->level.exponent));
            store(counts + j, where(value.m > 0, count, splat(0)));
        }
        for (int64_t j = begin; j < stop && a->counts; j++) a->counts[at + j] += (double)counts[j - o];
        for (int64_t j = begin; j < stop && a->grad_values; j++) a->grad_values[at + j] += counts[j - o];
        for (int64_t j = 0; j < c; j++) counts[j] = 0;
    }
}

/* The gradient of p0, from T of step 0, whose exponents lack `exponent`, over sum S B. */
static void write_p0_of_bands(const Band_walk *w, int64_t q, int64_t exponent, double share, int ordinary) {
    const Bands *a = w->a;
    int64_t c = a->states;
    Splits p0 = w->x;
    Span span = no_span((int)a->logarithms);
    extend(&span, c, a->p0 + a->p0_at[q], a->p0_state, (int)a->logarithms);
    Level level = level_of(span, (int)a->logarithms);
    split_row(c, a->p0 + a->p0_at[q], a->p0_state, &level, p0.m, p0.e);
    Mode before = flush_to_zero(ordinary);
    for (int64_t j = 0; j < c; j++) {
        double m = (double)w->message.m[j] * share;
        int64_t e = w->message.e[j] + exponent;
        double gradient = has_logarithms(a) ? value_of_split(m * (double)p0.m[j], e + p0.e[j])
                                            : value_of_split(m, e - level.exponent);
        a->grad_p0[q * c + j] = p0.m[j] > 0 ? gradient : 0;
    }
    set_mode(before);
}

/* The gradients of a sequence; only those of x where nothing is `counted`. */
static void walk_bands_backward(Band_walk *w, int64_t q, int counted) {
    const Bands *a = w->a;
    int64_t c = a->states, steps = steps_in(a, q), at = kept_at(a, q, steps - 1), total = 0;
    double sum, weight = a->weight[q] < 0 ? -a->weight[q] : a->weight[q];
    int ordinary = are_ordinary(weight, weight);
    whole top = top_of_splits(c, a->mantissas + at, a->exponents + at, &sum);
    int64_t whole_sum = a->totals[q * a->steps + steps - 1] + top;
    real *counts = counted && (a->counts || a->grad_values) ? w->counts : 0;
    clear_splits(w->message, whole_vectors(c));
    for (int64_t j = 0; j < c; j++) w->message.m[j] = 1, w->message.e[j] = 0;
    top = 0;
    for (int64_t step = steps - 1; step >= 0; step--, at -= c) {
        int last = step + 1 == steps;
        Splits kept = {a->mantissas + at, a->exponents + at};
        int64_t shift = a->totals[q * a->steps + step] + total - whole_sum;
        shift = shift > 4 * DEPTH ? 4 * DEPTH : shift < -4 * DEPTH ? -4 * DEPTH : shift;
        Scale scale = {(whole)shift, (real)(a->weight[q] / sum)};
        if (!last) find_matrix(w, q, step, 1);
        find_emission(w, q, step, -1);
        int apart = counts && !last && is_apart(w);
        if (apart) count_apart(w, scale, kept); /* counts over large values are denormal numbers, and add up */
        Mode before = flush_to_zero(ordinary);  /* mantissas of messages are normal numbers: no T and no B is flushed */
        total += top;
        top = step_bands_backward_by(w, last ? &w->unit : &w->matrix, top, scale, kept, a->grad_x ? a->grad_x + at : 0,
                               last || apart ? 0 : counts, &sum);
        if (top == (whole)NOTHING) top = 0;
        w->counted += counts && !last;
        int settle = !a->one_matrix || w->counted == TOGETHER_IN_COUNTS || step == 0;
        set_mode(before);
        if (w->counted && settle) settle_bands_counts(w, q, step);
    }
    if (counted && a->grad_p0) write_p0_of_bands(w, q, total - whole_sum, a->weight[q] / sum, ordinary);
}

/* Gradients that are the same number wherever a weight is not 0, and 0 elsewhere. */
static void fill_bands_gradients(const Bands *a, int64_t q, double number) {
    int64_t c = a->states, steps = steps_in(a, q), matrices = a->one_matrix && steps > 1 ? 1 : steps - 1;
    real zero = a->logarithms ? -INFINITE : 0;
    const real *p0 = a->p0 + a->p0_at[q];
    for (int64_t j = 0; j < steps * c && a->grad_x; j++) a->grad_x[kept_at(a, q, 0) + j] = (real)number;
    for (int64_t j = 0; j < c && a->grad_p0; j++)
        a->grad_p0[q * c + j] = p0[j * a->p0_state] == zero ? 0 : number;
    if (number == 0 || !(a->counts || a->grad_values)) return;
    for (int64_t k = 0; k < matrices * a->bands; k++) {
        int64_t d = k % a->bands, at = a->grad_at[q] + k * c;
        const real *value = a->values + a->values_at[q] + k / a->bands * a->values_step + d * a->values_band;
        for (int64_t j = begin_of(a->offsets[d]); j < stop_of(a->offsets[d], c); j++) {
            if (value[j * a->values_state] == zero) continue;
            if (a->counts) a->counts[at + j] += number;
            else a->grad_values[at + j] += (real)number;
        }
    }
}

static void find_bands_gradients(Band_walk *w, int64_t q) {
    const Bands *a = w->a;
    int64_t steps = steps_in(a, q), c = a->states;
    double log_norm = a->log_norm[q], weight = a->weight[q];
    for (int64_t j = steps * c; j < a->steps * c && a->grad_x; j++) a->grad_x[kept_at(a, q, 0) + j] = 0;
    if (weight != 0 && log_norm != log_norm) {
        fill_bands_gradients(a, q, log_norm);
        return;
    }
    int none = weight == 0 || log_norm == -__builtin_inf() || a->state[q] == UNKNOWN;
    w->lost = 0;
    if (!none && a->state[q] & FAINT) { /* whether the way back loses something is known only behind it */
        walk_bands_backward(w, q, 0);
        if (w->lost) none = 1, a->state[q] = UNKNOWN;
    }
    if (none) fill_bands_gradients(a, q, 0);
    else walk_bands_backward(w, q, 1);
}

/* Gradients; those of unknown sequences are 0. */
EXPORT int64_t EXPORTED(logchain_bands_backward)(const Bands *a) {
    Room room = {.begin = a->room};
    Band_walk w = new_bands_walk(a, &room, 1);
    if (!a->room) return room.bytes;
    for (int64_t place = a->first; place < a->last; place++) find_bands_gradients(&w, a->order[place]);
    return 0;
}
