/* Backward messages B, and gradients, from the forward messages S that were kept:

       T_i = B_i E_i      B_{i-1} = T_i P_i^T, scaled to 2^TOP as S is      B_{v-1} = 1, or what follows

       d/dx_i = w S_i B_i / sum S_i B_i      d/dP_i = w S_{i-1}^T T_i / sum S_{i-1} B_{i-1}: see counts.h

       d/dp0 = w E_0 B_0 / sum p0 E_0 B_0

   B are sums as U are, and believed on the same terms. A sequence that is lossy is left out, and one that turns out to
   be, from there on: exact.h redoes it, but for the transitions that have been counted. */
#pragma once
#include "counts.h"

typedef struct {
    Walk w;
    Counts counts;
    real *behind, *source, *ahead; /* (count, width): B, T, and S where messages are gathered */
    real *posterior;               /* (width) */
    real *turned;                  /* (width, width): the matrix's transpose */
    real *shares, *scales;         /* (count): as `meet` finds them */
    uint8_t *skipped;              /* (count): turned out to be lossy */
    int prepared;                  /* a matrix is held */
} Back;

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

/* S of the first places at a step, as rows next to each other. */
static const real *rows_ahead(const Back *b, int64_t count, int64_t step) {
    const Walk *w = &b->w;
    const Chain *a = w->a;
    if (w->direct) return message_at(a, sequence_of(w, 0), step);
    for (int64_t place = 0; place < count; place++)
        widen(a->states, w->width, message_at(a, sequence_of(w, place), step), 1, 0, b->ahead + place * w->width);
    return b->ahead;
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
                if ((lost || faint) && is_far(&w->matrix)) b->counts.wary = 1;
            }
            if (!lost) continue;
            a->lossy[q] = 2, a->uncounted[q] = step + 1, b->skipped[place] = 1;
        }
        clear(width, row);
    }
}

/* The gradient of the initial weights of a place. */
static void write_start(Back *b, int64_t place) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place), c = a->states, exponent;
    double *out = a->grad_p0 + q * c, sum = 0, shift;
    const real *x;
    real *source = b->source + place * w->width;
    if (b->skipped[place]) return;
    start_row(c, w->width, p0_at(a, q), a->p0_state, (int)a->logarithms, w->first, &exponent, &shift);
    rows_of_x(w, place, 1, 0, &x);
    emit(w->width, x, b->behind + place * w->width, source);
    double down = (double)power_of_two(-TOP); /* of the weights: the least source is a number that has no room for it */
    Factors unscale = factors_of(logs(a) ? 0 : -exponent - TOP);
    for (int64_t j = 0; j < c; j++) sum += (double)w->first[j] * down * (double)source[j];
    for (int64_t j = 0; j < c; j++) {
        double t = source[j], posterior = (double)w->first[j] * down * t / sum;
        out[j] = a->weight[q] * (logs(a) ? posterior : t / sum * unscale.first) * unscale.second;
        if (w->first[j] == 0 || !(sum > 0)) out[j] = 0;
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
    if (b->counts.wary || a->one_matrix) look(&w->matrix), rescale(&w->matrix);
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
    Counts *t = &b->counts;
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
    l.outer = a->grad_bulk ? counts_at(w, 1) : 0, l.outer_step = a->count_step;
    l.held_ahead = a->counts ? t->held_ahead : 0, l.held_source = t->held_source;
    l.held_step = w->width, l.most_held = GROUP;
    l.weight = (real)a->weight[q], l.source_weight = (real)(a->weight[q] / t->weight);
    l.unshare = UNSHARE * (real)t->weight;
    narrow(a->states, b->behind, l.state);
    for (int full = 1; full && step > l.until;) {
        l.held = t->held;
        step = steps_back(&l, step);
        t->wary |= l.high > LARGE;
        t->held = l.held, full = l.held_ahead && l.held == GROUP;
        if (full) release(t, w);
    }
    narrow(a->states, l.state, b->behind);
    return step;
}

/* Nothing has been looked at or counted yet. */
static void begin_back(Back *b, int counted) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    double most = 0;
    int64_t exponent;
    b->prepared = 0, b->counts.added = b->counts.held = 0;
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place);
        double weight = a->weight[q] < 0 ? -a->weight[q] : a->weight[q];
        a->lossy[q] = b->skipped[place] = w->deep[place] = 0;
        most = weight > most ? weight : most;
    }
    b->counts.weight = most > 0 && most < __builtin_inf() ? most / mantissa(most, &exponent) : 1;
    if (counted) clear_counts(&b->counts, w);
}

/* The first places at the step before, with posteriors and transitions. */
static void step_back(Back *b, int64_t count, int64_t step, int counted, real common) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int64_t width = w->width;
    prepare_back(b, count, step);
    pull(b, count, step);
    const real *ahead = rows_ahead(b, count, step - 1);
    meet_all(b, 0, count, step - 1, ahead, 1, common);
    for (int64_t place = 0; place < count && counted; place++) {
        real *source = b->source + place * width, weight = (real)(a->weight[sequence_of(w, place)] / b->counts.weight);
        if (b->skipped[place]) clear(width, source);
        else share_out(width, source, b->shares[place], b->scales[place], weight);
    }
    if (counted) count_step(&b->counts, w, count, ahead, b->source, step);
}

/* All steps of the places. */
static void walk_back(Back *b) {
    Walk *w = &b->w;
    const Chain *a = w->a;
    int counted = (a->counts || a->grad_bulk) && a->steps > 1;
    real common = ordinary();
    begin_back(b, counted);
    /* rows behind the ends of packed sequences are those of others */
    int64_t steps = !a->starts ? a->steps : w->count > 0 ? steps_of(a, sequence_of(w, 0)) : 0;
    for (int64_t step = steps - 1, count = 0; step >= 0; step--) {
        int64_t before = count;
        while (count < w->count && steps_of(a, sequence_of(w, count)) > step) end_row(b, count++);
        for (int64_t place = count; place < w->count && a->grad_x && !a->starts; place++)
            clear(a->states, gradient_at(a, w->set, sequence_of(w, place), step));
        if (count > before) meet_all(b, before, count, step, rows_ahead(b, count, step), 0, common);
        if (w->lone && count > 0 && step > 0 && !b->skipped[0] && !b->counts.wary) step = few_back(b, step);
        if (step == 0) break;
        if (count > 0) step_back(b, count, step, counted, common);
        else if (a->grad_bulk && counted) count_step(&b->counts, w, 0, b->ahead, b->source, step);
    }
    for (int64_t place = 0; place < w->count && a->entering && a->leaving; place++) leave_back(b, place);
    for (int64_t place = 0; place < w->count && a->grad_p0; place++) write_start(b, place);
}

/* Gradients of the places: once more where a matrix turns out to need care, for any that was added up may have. */
static void go_back(Back *b) {
    int wary;
    do wary = b->counts.wary, walk_back(b);
    while (b->counts.wary != wary);
    if (b->w.a->counts && b->prepared) add_counts(&b->counts, &b->w);
}

/* Whether a sequence has gradients: those of an impossible one are 0. */
INLINE int has_gradient(const Chain *a, int64_t q) { return a->weight[q] != 0 && a->log_norm[q] != -__builtin_inf(); }

static void clear_gradients(const Chain *a, int64_t set, int64_t q) {
    int64_t steps = a->starts ? steps_of(a, q) : a->steps;
    for (int64_t step = a->entering != 0; step < steps && a->grad_x; step++)
        clear(a->states, gradient_at(a, set, q, step));
    for (int64_t j = 0; j < a->states && a->grad_p0; j++) a->grad_p0[q * a->states + j] = 0;
    for (int64_t j = 0; j < a->states && a->entering && a->leaving; j++) a->leaving[q * a->states + j] = 0;
}

/* Of the walk's first `left` places, those of sequences that have gradients and are not lossy: how many, and which
   members of the set. */
static int64_t choose_members(const Walk *w, int64_t left, int64_t *chosen) {
    const Chain *a = w->a;
    int64_t count = 0;
    for (int64_t place = 0; place < left; place++) {
        int64_t q = sequence_of(w, place);
        a->uncounted[q] = a->steps;
        if (!has_gradient(a, q)) clear_gradients(a, w->set, q);
        else if (!a->lossy[q]) chosen[count++] = q - w->set * a->members;
    }
    return count;
}

/* The backward pass of a thread's places; how many are lossy, in either direction. */
EXPORT int64_t EXPORTED(logchain_backward)(const Chain *a) {
    char *room = a->room;
    int64_t most = most_places(a), bytes = sizeof(real);
    Back b = {.w = new_walk(a, group_of(a), most, &room)};
    Walk *w = &b.w;
    b.behind = take(&room, most * w->width * bytes);
    b.source = take(&room, (most * w->width + LANES) * bytes);
    b.ahead = take(&room, most * w->width * bytes);
    b.posterior = take(&room, w->width * bytes);
    b.turned = take(&room, w->width * w->width * bytes);
    b.shares = take(&room, most * bytes), b.scales = take(&room, most * bytes);
    b.skipped = take(&room, most);
    b.counts.partial = take(&room, w->width * padded(w->width) * bytes);
    b.counts.total = take(&room, w->width * padded(w->width) * 8);
    b.counts.held_ahead = take(&room, (GROUP * w->width + LANES) * bytes);
    b.counts.held_source = take(&room, (GROUP * w->width + LANES) * bytes);
    int64_t *chosen = take(&room, a->members * 8);
    for (int64_t q = a->first, left; q < a->last; q += left) {
        left = enter_set(w, q);
        int64_t count = choose_members(w, left, chosen), last = w->begin + left;
        if (count < left) w->order = chosen, w->begin = 0, last = count;
        w->direct = !w->order && !a->ends && w->width == a->states;
        do { /* without any, too: gradients of matrices become 0 */
            w->count = last - w->begin < most ? last - w->begin : most;
            w->lone = w->count == 1 && a->states <= FEW;
            go_back(&b);
        } while ((w->begin += most) < last);
    }
    return lossy_places(a);
}

/* Bytes of scratch that a thread takes, of either direction. */
EXPORT int64_t EXPORTED(logchain_room)(const Chain *a) {
    int64_t width = width_of(a), group = group_of(a), most = most_places(a), bytes = sizeof(real);
    int64_t ahead = width * width * bytes + 2 * group * width * bytes + (2 * most + 1) * width * bytes + most * 40;
    int64_t back = 2 * width * width * bytes + width * padded(width) * (bytes + 8)
                   + (2 * GROUP + group + 3 * most + 2) * width * bytes + most * 32 + a->members * 8;
    return (ahead > back ? ahead : back) + 20 * 64;
}
