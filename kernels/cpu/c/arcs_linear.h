/* Messages of a chain of arcs as doubles with one scale a message, forward S and backward B, and gradients:

       U_0 = p0      U_i = S_{i-1} P_i      S_i = U_i E_i 2^a_i      E_i = exp(x_i - max x_i), max over U_i > 0

       B_{v-1} = 1   Q_i = B_i E_i 2^b_i where S_i > 0, else 0       B_{i-1} = P_i Q_i

       posterior_i = S_i B_i / Z_i     d/dw_i(j, k) = S_{i-1}(j) Q_i(k) / Z_{i-1}      Z_{i-1} = sum S_{i-1} B_{i-1}

   a_i and b_i bring the largest U_i and B_i near 2^FULL. Z_{i-1} is 2^(b_i - a_i) Z_i, so that counts need no second
   pass; the rounding of each step is taken out by the sum of its posteriors.

   Forward, emissions below 2^-FAINTEST are raised to it, so that an S of 0 means that no path leads there. A sequence
   is lossy, and recomputed by arcs_wide.h, if a product may underflow, or if a sum is so small that raised emissions may
   matter to it. A raised S is hence at most a 2^-SAFE of every sum that it enters, and so is its posterior; backward,
   raising loses nothing else, and only underflow does: there the walk stops, ahead of the first count that it loses. */
#pragma once
#include "arcs_counts.h"

/* Sums from 2^(FULL - FAINTEST + SAFE) to 2^FULL times emissions are normal doubles, and the largest S over a Z of at
   least 2^-MOST_OF_SHARE is finite. */
enum { FULL = 900, FAINTEST = 960, SAFE = 55, MOST_OF_SHARE = 100 };
#define LOG_FAINTEST (-FAINTEST * 0.69314718055994531)

/* 2^k as a double, for a k in the range of normal numbers. */
INLINE double double_power(int64_t k) {
    int64_t bits = (k + 1023) << 52;
    double a;
    __builtin_memcpy(&a, &bits, 8);
    return a;
}

/* The least sum that raised emissions of a message near 2^FULL do not change, for weights of at most 1. */
INLINE double least_trusted(int64_t terms) { return (double)terms * double_power(FULL - FAINTEST + SAFE); }

/* exp(a) 2^power for a from LOG_FAINTEST to 0, as exactly as `real` asks for. */
INLINE doubles rough_exponential(doubles a, int64_t power) {
    double rounder = 0x1.8p52 + (double)power;
    doubles rounded = a * 1.4426950408889634 + rounder, k = rounded - rounder;
    doubles r = (a - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
#if BITS == 32
    doubles q = r * 0.00137512791 + 0.00836895178;
    q = q * r + 0.0416695387, q = q * r + 0.166665182, q = q * r + 0.499999886;
    q = (q * r) * r + r + 1;
#else
    doubles q = exponential_of(r);
#endif
    return (doubles)((longs)q + ((longs)rounded << 52));
}

INLINE doubles read_message(const double *from, int64_t left) {
    doubles a = {0};
    if (left >= WIDE) return load_wide(from);
    UNROLL for (int l = 0; l < WIDE; l++) if (l < left) a[l] = from[l];
    return a;
}
INLINE void write_message(double *to, doubles a, int64_t left) {
    if (left >= WIDE) store_wide(to, a);
    else UNROLL for (int l = 0; l < WIDE; l++) if (l < left) to[l] = a[l];
}

/* What is known of a row of sums and of the x beside it. */
typedef struct {
    double top, most; /* the largest x of states that a path reaches; the largest sum */
    double least;     /* the least sum that is not 0, infinite if there is none */
    int bad;          /* an x is infinite or NaN */
} Seen;

/* Looks at sums where `reached`, another row or the sums themselves, is not 0. */
INLINE Seen look(int64_t c, const double *sums, const double *reached, const real *x) {
    doubles top = splat_wide(-__builtin_inf()), most = {0}, least = splat_wide(__builtin_inf());
    longs bad = {0};
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -INFINITE), u = read_message(sums + j, c - j);
        longs some = reached == sums ? u != 0 : read_message(reached + j, c - j) != 0;
        bad |= ~(a < __builtin_inf());
        top = choose(some & (a > top), a, top), most = choose(some & (u > most), u, most);
        least = choose(some & (u != 0) & (u < least), u, least);
    }
    Seen seen = {.top = highest_of(top), .most = highest_of(most), .least = -highest_of(-least), .bad = any_wide(bad)};
    if (seen.top == -__builtin_inf()) seen.top = 0;
    return seen;
}

/* The power of two that brings a largest sum near 2^FULL: any for 0, at most that of the least normal scale. */
INLINE int64_t power_to_full(double most) {
    int64_t power = most > 0 ? FULL - exponent_above(most) : 0;
    return power > 1000 ? 1000 : power;
}

/* No more than the least entry that emit_message writes, for the least sum; and whether its product with a weight may
   be no normal number. */
INLINE double least_emitted(double sum, int64_t power) { return sum * double_power(power) * double_power(-FAINTEST); }
INLINE int may_underflow(double least, const Weights *w) { return least * w->least < 0x1p-1022; }

/* S from its sums U, times 2^power; whether an emission was raised. */
INLINE int emit_message(int64_t c, const double *sums, const real *x, double top, int64_t power, double *to) {
    longs raised = {0};
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles a = read_wide(x + j, 1, c - j, -INFINITE) - top, u = read_message(sums + j, c - j);
        longs low = a < LOG_FAINTEST, some = a > -__builtin_inf();
        doubles deep = choose(low, splat_wide(LOG_FAINTEST), a), shallow = choose(deep < 0, deep, splat_wide(0));
        raised |= low & some & (u != 0);
        write_message(to + j, (doubles)((longs)(u * rough_exponential(shallow, power)) & some), c - j);
    }
    return any_wide(raised);
}

/* ------------------------------------------------------------------------------------------------------- forward */

typedef struct {
    const ArcChain *a;
    Weights weights;  /* in the order of a->into */
    int64_t set;      /* whose weights of one matrix these are; -1 for none */
    double *sums;     /* (c): U */
    double *rows;     /* (2, c): S of two steps where they are not kept */
} ArcWalk;

/* The weights into a step, unless they are there. */
static void weights_into(const ArcChain *a, int64_t q, int64_t step, Weights *weights, int64_t *set) {
    if (a->one_matrix && *set == a->set[q]) return;
    read_weights(a, q, step, weights);
    *set = a->set[q];
}

static int finite_p0(const ArcChain *a, int64_t q) {
    real none = a->logarithms ? -INFINITE : 0;
    int finite = 1;
    for (int64_t j = 0; j < a->states; j++) {
        real entry = a->p0[a->p0_at[q] + j * a->p0_state];
        finite &= (entry < INFINITE) & (entry >= none);
    }
    return finite;
}

/* p0 as sums, the largest near 2^FULL: p0 is 2^exponent e^shift times them. Whether one may be lost. */
static int start_sums(const ArcChain *a, const real *p0, double *sums, int64_t *exponent, double *shift) {
    double none = a->logarithms ? -__builtin_inf() : 0, high = none;
    int lost = 0;
    for (int64_t j = 0; j < a->states; j++) high = p0[j * a->p0_state] > high ? p0[j * a->p0_state] : high;
    *shift = a->logarithms && high > none ? high : 0, *exponent = (a->logarithms ? 0 : exponent_above(high)) - FULL;
    Factors scale = factors_of(-*exponent);
    for (int64_t j = 0; j < a->states; j++) {
        double entry = p0[j * a->p0_state], log = entry - *shift;
        int some = entry != none;
        if (a->logarithms && some) entry = exponential_of(splat_wide(log < -700 ? -700 : log))[0];
        sums[j] = some ? entry * scale.first * scale.second : 0;
        lost |= some && (sums[j] == 0 || (a->logarithms && log < -700));
    }
    return lost;
}

enum { ARCS_KNOWN, ARCS_LOSSY, ARCS_NAN };

/* log Z and kept messages of a sequence. ARCS_LOSSY where a path may have been lost. */
static int walk_arcs(ArcWalk *w, int64_t q, Sum *log_norm) {
    const ArcChain *a = w->a;
    int64_t c = a->states, steps = steps_of_arcs(a, q), exponent, below;
    double shift, sum = 0, least = 0, *message = 0;
    if (!finite_p0(a, q)) return ARCS_NAN;
    int raised = 0, lost = start_sums(a, a->p0 + a->p0_at[q], w->sums, &exponent, &shift);
    *log_norm = (Sum){shift, 0};
    for (int64_t step = 0; step < steps && !lost; step++) {
        const real *x = arc_x_at(a, q, step);
        if (step > 0) {
            weights_into(a, q, step, &w->weights, &w->set);
            if (w->weights.bad) return ARCS_NAN;
            if (w->weights.lost || may_underflow(least, &w->weights)) return ARCS_LOSSY;
            for (int64_t j = 0; j < c && step == 1; j++) w->sums[j] = 0;
            sum_over_arcs(&w->weights, message, w->sums);
            exponent += w->weights.exponent;
        }
        Seen seen = look(c, w->sums, w->sums, x);
        if (seen.bad) return ARCS_NAN;
        int64_t power = power_to_full(seen.most);
        lost = raised && seen.least < least_trusted(a->degree);
        lost |= seen.least * double_power(power) < least_trusted(1);
        message = a->messages ? arc_message_at(a, q, step) : w->rows + (step & 1) * padded_states(c);
        raised = emit_message(c, w->sums, x, seen.top, power, message), least = least_emitted(seen.least, power);
        if (a->powers) a->powers[q * a->steps + step] = (double)(power - (step > 0 ? w->weights.exponent : 0));
        add(log_norm, seen.top), exponent -= power;
    }
    for (int64_t j = 0; j < c && !lost; j++) sum += message[j];
    if (lost) return ARCS_LOSSY;
    double part = mantissa(sum, &below);
    if (sum == 0) *log_norm = (Sum){-__builtin_inf(), 0};
    else add_exponent(log_norm, exponent + below), add(log_norm, logarithm(part));
    return ARCS_KNOWN;
}

/* log Z of a thread's sequences; how many are lossy. */
EXPORT int64_t EXPORTED(logchain_arcs_forward)(const ArcChain *a) {
    Room room = {.begin = a->room};
    int64_t row = padded_states(a->states) * 8, lossy = 0;
    ArcWalk w = {.a = a, .weights = {.slices = &a->into}, .set = -1};
    w.sums = take(&room, row), w.rows = take(&room, 2 * row);
    w.weights.entries = take(&room, slots_of(&a->into) * (int64_t)sizeof(real));
    if (!a->room) return room.bytes;
    for (int64_t place = a->first; place < a->last; place++) {
        int64_t q = a->order[place];
        Sum log_norm;
        int found = walk_arcs(&w, q, &log_norm);
        a->log_norm[q] = found == ARCS_KNOWN ? value_of(log_norm) : __builtin_nan("");
        lossy += a->lossy[q] = found == ARCS_LOSSY;
    }
    return lossy;
}

/* ------------------------------------------------------------------------------------------------------ backward */

typedef struct {
    const ArcChain *a;
    ArcCounts to;
    double *backward, *source; /* (c): B and Q */
} ArcBack;

/* 1 / Z as a number in (1/2, 1] times a power of two, of which factors bring a kept message to counts over B. */
typedef struct { double part; int64_t exponent; } Share;
INLINE Factors factors_of_share(Share share) {
    int64_t least = share.exponent < -2000 ? -2000 : share.exponent;
    Factors factors = factors_of(least);
    factors.second *= share.part;
    return factors;
}

/* Posteriors of a step times weight; `share` is corrected so that the sum of posteriors is 1. */
static void write_posteriors(const ArcBack *b, int64_t q, int64_t step, Share *share) {
    const ArcChain *a = b->a;
    int64_t c = a->states;
    const double *kept = arc_message_at(a, q, step);
    Factors factors = factors_of_share(*share);
    doubles sum = {0};
    for (int64_t j = 0; j < c; j += WIDE)
        sum += read_message(kept + j, c - j) * factors.first * factors.second * read_message(b->backward + j, c - j);
    double total = 0;
    UNROLL for (int l = 0; l < WIDE; l++) total += sum[l];
    share->part /= total, factors.second *= a->weight[q] / total;
    real *gradient = a->grad_x ? a->grad_x + (q * a->steps + step) * c : 0;
    double *first = step == 0 && a->grad_p0 ? a->grad_p0 + q * c : 0;
    for (int64_t j = 0; j < c && (gradient || first); j += WIDE) {
        doubles posterior = read_message(kept + j, c - j) * factors.first;
        posterior = posterior * factors.second * read_message(b->backward + j, c - j);
        if (gradient) write_wide(gradient + j, posterior, c - j);
        if (first) write_message(first + j, posterior, c - j);
    }
}

/* Gradients of a sequence, for a B of ones; the step where the walk stopped because products may underflow, or -1. */
static int64_t walk_arcs_backward(ArcBack *b, int64_t q) {
    const ArcChain *a = b->a;
    int64_t c = a->states, step = steps_of_arcs(a, q) - 1, below;
    double weight = a->weight[q] < 0 ? -a->weight[q] : a->weight[q];
    int counted = a->counts || a->grad_weights, first = 1, ordinary = are_ordinary(weight, weight);
    const double *kept = arc_message_at(a, q, step);
    double sum = 0;
    for (int64_t j = 0; j < c; j++) sum += kept[j];
    Share share = {.part = 1 / mantissa(sum, &below), .exponent = -below};
    for (; step >= 0; step--) {
        Mode before = flush_to_zero(ordinary);
        write_posteriors(b, q, step, &share);
        set_mode(before);
        if (step == 0) break;
        weights_into(a, q, step, &b->to.weights, &b->to.set);
        Seen seen = look(c, b->backward, kept, arc_x_at(a, q, step));
        int64_t power = power_to_full(seen.most);
        for (int64_t j = 0; j < c; j++) b->source[j] = kept[j] == 0 ? 0 : b->backward[j];
        emit_message(c, b->source, arc_x_at(a, q, step), seen.top, power, b->source);
        if (may_underflow(least_emitted(seen.least, power), &b->to.weights)) return step;
        share.exponent += (int64_t)a->powers[q * a->steps + step] + b->to.weights.exponent - power;
        if (share.exponent > MOST_OF_SHARE) return step;
        kept = arc_message_at(a, q, step - 1);
        for (int64_t j = 0; j < c && first; j++) b->backward[j] = 0;
        first = 0;
        if (!counted) {
            sum_over_arcs(&b->to.weights, b->source, b->backward);
            continue;
        }
        Factors factors = factors_of_share(share);
        factors.second *= a->weight[q];
        before = flush_to_zero(ordinary); /* no sum is denormal: may_underflow */
        sum_and_count(&b->to.weights, b->source, kept, factors, b->backward, b->to.shares);
        set_mode(before);
        note_counts(a, q, step, &b->to);
    }
    return -1;
}
