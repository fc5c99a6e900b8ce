/* Backward messages B and gradients, from the forward messages S that were kept:

       B_{v-1} = 1, or exp(following)      T_i = B_i E_i      B_{i-1} = T_i P_i^T, scaled to near 2^TOP

       posterior_i = S_i B_i / sum S_i B_i      d/dx_i = w posterior_i      d/dp0 = w E_0 B_0 / sum p0 E_0 B_0

       d/dP_i = w S_{i-1}^T T_i / sum S_{i-1} B_{i-1}, in counts.h          E_i = exp(x_i - max x_i), w the weight

   B are sums of products as U of forward.h are, and pass the same underflow test. Flagged sequences are skipped; one
   that becomes flagged is skipped from that step on, and exact.h recomputes it, without the transitions already
   counted. */
#pragma once
#include "counts.h"

typedef struct {
    Pass w;
    Counts counts;
    real *backward, *source, *forward; /* (count, width): B, T, and copies of S unless w.in_place */
    real *transposed;                  /* (width, width): transpose of w.matrix */
    int prepared;                      /* w.matrix holds a matrix */
} BackwardPass;

/* B at a sequence's last step. */
static void last_row(BackwardPass *b, int64_t place) {
    const Chain *a = b->w.a;
    int64_t q = sequence_of(&b->w, place), width = b->w.width, c = a->states;
    real *row = b->backward + place * width;
    for (int64_t j = 0; j < width; j++) row[j] = j < c ? power_of_two(TOP - 1) : 0;
    if (!a->boundary.following) return;
    const double *following = a->boundary.following + q * c;
    double top = largest_log(c, following);
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles logs = read_doubles(following + j, c - j, -__builtin_inf()) - top;
        doubles value = exponential_or_zero(logs) * (double)power_of_two(TOP - 1);
        if (any_wide((logs != -__builtin_inf()) & ~(value >= (double)TRUSTED))) a->flagged[q] = 2;
        write_wide(row + j, value, c - j);
    }
}

/* Whether raised emissions of a last step matter to what follows it: no later sum has tested them. */
static int raised_matters(const Pass *w, int64_t place, int64_t step, const real *forward, const real *backward) {
    const real *x = x_at(w->a, sequence_of(w, place), step);
    double norm = 0, raised = 0;
    real top = top_of(x, w->a->states);
    for (int64_t j = 0; j < w->a->states; j++) {
        double both = (double)forward[j] * (double)backward[j] * (double)power_of_two(-TOP);
        norm += both, raised += x[j] - top < LOG_DEEPEST ? both : 0;
    }
    return !(raised <= norm * (double)power_of_two(-GUARD));
}

/* Scales B by `scale`, to a largest entry near 2^TOP, and writes the posterior w S B / sum S B, with 0 for denormal
   values. `inverse_sum` is 2^TOP / sum S B. Returns the range of B before scaling. */
INLINE Range row_posterior(int64_t c, int64_t width, const real *forward, real *backward, real weight, real *posterior,
                           Member *member) {
    Range range = range_of(width, backward);
    real factor = member->scale = scale_to_top(exponent_of(range.most)), down = power_of_two(-TOP);
    reals sum = {0};
    for (int64_t j = 0; j < width; j += LANES) {
        reals b = read_some(backward + j, 1, width - j, 0) * factor;
        write_some(backward + j, b, width - j);
        sum += read_some(forward + j, 1, width - j, 0) * (b * down);
    }
    real norm = total(sum), least_seen = norm * power_of_two(1 - BIAS), inverse_sum = norm > 0 ? 1 / norm : 0;
    for (int64_t k = 0; k < vectors_of(c) && posterior; k++) {
        int64_t j = start_of(k, c);
        reals both = load(forward + j) * (load(backward + j) * down);
        write_some(posterior + j, where(both < least_seen, (reals){0}, both * inverse_sum * weight), c);
    }
    member->inverse_sum = inverse_sum;
    return range;
}

/* S of the first `count` places, as contiguous rows. */
static const real *forward_rows(const BackwardPass *b, int64_t count, int64_t step) {
    const Pass *w = &b->w;
    const Chain *a = w->a;
    if (w->in_place) return message_at(a, sequence_of(w, 0), step);
    for (int64_t place = 0; place < count; place++)
        read_row(a->states, w->width, message_at(a, sequence_of(w, place), step), 1, 0, b->forward + place * w->width);
    return b->forward;
}

/* Posteriors of the places from `from` to before `count`. `tests`: B are products that need the underflow test. */
static void posteriors_of_places(BackwardPass *b, int64_t from, int64_t count, int64_t step, const real *forward,
                                 int tests) {
    Pass *w = &b->w;
    const Chain *a = w->a;
    int64_t c = a->states, width = w->width;
    for (int64_t place = from; place < count; place++) {
        int64_t q = sequence_of(w, place);
        real *gradient = output_at(a, a->out.grad_x, q, step), *row = b->backward + place * width;
        if (!a->flagged[q]) {
            const real *state = forward + place * width;
            Member *member = &w->members[place];
            Range range = row_posterior(c, width, state, row, (real)a->weight[q], gradient, member);
            if (count > 1 && step > 1) { /* as fetch_x */
                fetch_row(c, message_at(a, q, step - 1));
                if (gradient) fetch_row(c, output_at(a, a->out.grad_x, q, step - 1));
            }
            int inexact = !(member->inverse_sum > 0 && member->inverse_sum < power_of_two(TOP));
            if (!tests && a->boundary.following) inexact |= raised_matters(w, place, step, state, row);
            int tiny = has_counts(a) ? range.most < bits_of(power_of_two(TOP - 24)) : 0;
            if (tests && (inexact || tiny || needs_check(member->raised, range))) {
                find_high(&w->matrix);
                inexact |= is_inexact(c, row, member->scale, range.most, &w->matrix);
                if ((inexact || tiny) && needs_rescaling(&w->matrix)) b->counts.unsafe_matrix = 1;
            }
            if (!inexact) continue;
            a->flagged[q] = 2, a->uncounted[q] = step + 1;
        }
        clear(width, row);
    }
}

/* The gradient of p0 of a place. */
static void write_grad_p0(BackwardPass *b, int64_t place) {
    Pass *w = &b->w;
    const Chain *a = w->a;
    int64_t q = sequence_of(w, place), c = a->states, exponent;
    double *out = a->grad_p0 + q * c, sum = 0, shift;
    real *source = b->source + place * w->width;
    if (a->flagged[q]) return;
    start_row(c, w->width, p0_at(a, q), a->p0.step, (int)a->logarithms, w->initial, &exponent, &shift);
    const real *x = x_at(a, q, 0);
    emit(c, x, top_of(x, c), b->backward + place * w->width, 1, source);
    double down = (double)power_of_two(-TOP); /* not on `source`, whose least entries would underflow */
    Factors unscale = factors_of(logs(a) ? 0 : -exponent - TOP);
    for (int64_t j = 0; j < c; j++) sum += (double)w->initial[j] * down * (double)source[j];
    for (int64_t j = 0; j < c; j++) {
        double t = source[j], posterior = (double)w->initial[j] * down * t / sum;
        out[j] = a->weight[q] * (logs(a) ? posterior : t / sum * unscale.first) * unscale.second;
        if (w->initial[j] == 0 || !(sum > 0)) out[j] = 0;
    }
}

/* log B at the step that entered. */
static void write_leaving_backward(const BackwardPass *b, int64_t place) {
    const Chain *a = b->w.a;
    int64_t q = sequence_of(&b->w, place);
    const real *row = b->backward + place * b->w.width;
    for (int64_t j = 0; j < a->states && !a->flagged[q]; j++)
        a->boundary.leaving[q * a->states + j] = logarithm((double)row[j] * (double)power_of_two(-TOP));
}

/* The matrix into a step, and its transpose unless row_times_rows is going to use the matrix itself. */
static void prepare_backward(BackwardPass *b, int64_t count, int64_t step) {
    Pass *w = &b->w;
    const Chain *a = w->a;
    int64_t width = w->width;
    if (b->prepared && a->one_matrix) return;
    prepare(a, w->set, step, &w->matrix);
    b->prepared = 1;
    if (b->counts.unsafe_matrix || a->one_matrix) rescale(&w->matrix);
    if (count == 1 && !a->one_matrix) return;
    transpose(width, w->matrix.entries, w->matrix.row, b->transposed, width);
}

/* T, then B at the step before, of the first `count` places. */
static void multiply_backward(BackwardPass *b, int64_t count, int64_t step) {
    Pass *w = &b->w;
    Matrix *m = &w->matrix;
    int64_t c = w->a->states, width = w->width;
    for (int64_t place = 0, group = group_of(w->a); place < count; place += group) {
        int64_t rows = count - place < group ? count - place : group;
        real *backward = b->backward + place * width, *source = b->source + place * width;
        for (int64_t r = 0; r < rows; r++) {
            const real *x = x_at(w->a, sequence_of(w, place + r), step);
            fetch_x(w, place + r, step - 1);
            int raised = emit(c, x, top_of(x, c), backward + r * width, 1, source + r * width);
            w->members[place + r].raised = raised;
        }
        if (count > 1) multiply((Product){rows, c, width, source, width, 1, b->transposed, width, backward, width});
        else if (w->a->one_matrix) row_times(c, width, source, b->transposed, width, backward);
        else if (w->members[place].raised && !m->has_high)
            note_high(m, row_times_rows(LARGEST, width, source, m->entries, m->row, backward));
        else row_times_rows(UNSEEN, width, source, m->entries, m->row, backward);
    }
}

/* Steps of a sequence of few states, down to one that fails the underflow test; returns that step. */
static int64_t few_backward(BackwardPass *b, int64_t step) {
    Pass *w = &b->w;
    Counts *t = &b->counts;
    const Chain *a = w->a;
    int64_t q = sequence_of(w, 0);
    Few l;
    real padded[FEW * FEW];
    if (a->one_matrix) prepare_backward(b, 1, step);
    if (step >= few_of(w, 1, padded, &l) || (a->grad_bulk.data && a->members > 1)) return step;
    if (a->means.data && a->one_matrix && !t->has_terms) find_terms(t, w, step);
    l.by_log = logs(a), l.ordinary = t->ordinary;
    l.first_step = a->boundary.entering != 0; /* the message that entered has no gradient */
    l.gradient = output_of(a, a->out.grad_x, q);
    if (a->grad_bulk.data) l.outer = (Steps){matrix_at(&a->grad_bulk, w->set, 0), a->grad_bulk.step};
    if (a->counts || a->means.data) l.held_forward = (Steps){t->held_forward, w->width};
    l.held_source = (Steps){t->held_source, w->width}, l.most_held = t->most_held;
    l.weight = (real)a->weight[q], l.source_weight = (real)(a->weight[q] / t->weight);
    l.unshare = UNSHARE * (real)t->weight;
    write_row(a->states, b->backward, 1, l.state);
    for (int full = 1; full && step > l.first_step;) {
        l.held = t->held;
        step = steps_backward(&l, step);
        t->unsafe_matrix |= l.high > LARGE;
        t->held = l.held, full = l.held_forward.data && l.held == t->most_held;
        if (full || (a->means.data && !a->one_matrix)) add_held_rows(t, w, step);
    }
    write_row(a->states, l.state, 1, b->backward);
    return step;
}

/* Prepares a pass: no sequence is flagged, nothing is counted. counts.weight is a power of two near the largest. */
static void begin_backward(BackwardPass *b) {
    Pass *w = &b->w;
    const Chain *a = w->a;
    double least = __builtin_inf(), most = 0;
    int64_t exponent;
    b->prepared = b->counts.flushed = 0, b->counts.added = b->counts.held = 0, b->counts.mode = mode_now();
    b->counts.has_terms = 0;
    for (int64_t place = 0; place < w->count; place++) {
        int64_t q = sequence_of(w, place);
        a->flagged[q] = 0, w->members[place].raised = 0;
        if (a->means.data) a->means.data[q] = 0;
        double size = a->weight[q] < 0 ? -a->weight[q] : a->weight[q];
        least = size > 0 && size < least ? size : least, most = size > most ? size : most;
    }
    b->counts.ordinary = are_ordinary(least, most);
    b->counts.weight = most > 0 && most < __builtin_inf() ? most / mantissa(most, &exponent) : 1;
}

/* One step back of the first `count` places: B, posteriors and transitions. */
static void step_backward(BackwardPass *b, int64_t count, int64_t step, int counted) {
    Pass *w = &b->w;
    const Chain *a = w->a;
    int64_t width = w->width;
    prepare_backward(b, count, step);
    multiply_backward(b, count, step);
    const real *forward = forward_rows(b, count, step - 1);
    posteriors_of_places(b, 0, count, step - 1, forward, 1);
    if (!counted) return;
    Mode before = flush_to_zero(b->counts.ordinary);
    for (int64_t place = 0; place < count; place++) {
        int64_t q = sequence_of(w, place);
        real *source = b->source + place * width;
        if (a->flagged[q]) clear(width, source);
        else scale_source(width, source, w->members[place], (real)(a->weight[q] / b->counts.weight));
    }
    count_step(&b->counts, w, count, forward, b->source, step);
    set_mode(before);
}

static void pass_backward(BackwardPass *b) {
    Pass *w = &b->w;
    const Chain *a = w->a;
    int counted = has_counts(a) && a->steps > 1;
    begin_backward(b);
    /* rows after the ends of packed sequences belong to other sequences */
    int64_t steps = !a->packed ? a->steps : w->count > 0 ? steps_of(a, sequence_of(w, 0)) : 0;
    for (int64_t step = steps - 1, count = 0; step >= 0; step--) {
        int64_t before = count;
        while (count < w->count && steps_of(a, sequence_of(w, count)) > step) last_row(b, count++);
        for (int64_t place = count; place < w->count && a->out.grad_x && !a->packed; place++)
            clear(a->states, output_at(a, a->out.grad_x, sequence_of(w, place), step));
        if (count > before) posteriors_of_places(b, before, count, step, forward_rows(b, count, step), 0);
        if (is_few(w) && count > 0 && step > 0 && !a->flagged[sequence_of(w, 0)] && !b->counts.unsafe_matrix)
            step = few_backward(b, step);
        if (step == 0) break;
        if (count > 0) step_backward(b, count, step, counted);
        else if (a->grad_bulk.data && counted) count_step(&b->counts, w, 0, b->forward, b->source, step);
    }
    for (int64_t place = 0; place < w->count && leaving_backward(a); place++) write_leaving_backward(b, place);
    for (int64_t place = 0; place < w->count && a->grad_p0; place++) write_grad_p0(b, place);
}

/* Gradients of the places. If a matrix turns out to lose likely transitions, the pass is repeated with all matrices
   checked: counts that were added up cannot be corrected one by one. */
static void pass_until_safe(BackwardPass *b) {
    int checked;
    do checked = b->counts.unsafe_matrix, pass_backward(b);
    while (b->counts.unsafe_matrix != checked);
    if (b->counts.held) add_held_rows(&b->counts, &b->w, 0);
    if (adds_counts(&b->w) && b->prepared) add_counts(&b->counts, &b->w);
}

static void clear_gradients(const Chain *a, int64_t q) {
    int64_t steps = a->packed ? steps_of(a, q) : a->steps;
    for (int64_t step = a->boundary.entering != 0; step < steps && a->out.grad_x; step++)
        clear(a->states, output_at(a, a->out.grad_x, q, step));
    for (int64_t j = 0; j < a->states && a->grad_p0; j++) a->grad_p0[q * a->states + j] = 0;
    for (int64_t j = 0; j < a->states && leaving_backward(a); j++) leaving_backward(a)[q * a->states + j] = 0;
}

/* The members that the pass computes: of the first `left` places those that are not flagged and have gradients. Returns
   how many; writes zeros into the gradients of sequences without any. */
static int64_t choose_members(const Pass *w, int64_t left, int64_t *chosen) {
    const Chain *a = w->a;
    int64_t count = 0;
    for (int64_t place = 0; place < left; place++) {
        int64_t q = sequence_of(w, place);
        a->uncounted[q] = a->steps;
        if (!has_gradient(a, q)) clear_gradients(a, q);
        else if (!a->flagged[q]) chosen[count++] = q - w->set * a->members;
    }
    return count;
}

/* The backward pass of a thread's places; returns how many are flagged, in either direction. */
EXPORT int64_t EXPORTED(logchain_backward)(const Chain *a) {
    Scratch scratch = {.begin = a->scratch};
    int64_t most = most_in_pass(a, group_of(a)), width = width_of(a), across = padded(width), held = group_of(a);
    BackwardPass b = {.w = new_pass(a, held, most, &scratch)};
    Pass *w = &b.w;
    b.backward = take_reals(&scratch, most * width), b.source = take_reals(&scratch, most * width + LANES);
    b.forward = take_reals(&scratch, most * width), b.transposed = take_reals(&scratch, width * width);
    b.counts.partial = take_reals(&scratch, width * across), b.counts.total = take(&scratch, width * across * 8);
    b.counts.terms = take_reals(&scratch, a->means.data ? width * width : 0);
    b.counts.most_held = held, b.counts.held_forward = take_reals(&scratch, held * width + LANES);
    b.counts.held_source = take_reals(&scratch, held * width + LANES);
    int64_t *chosen = take(&scratch, a->members * 8);
    if (!a->scratch) return scratch.bytes;
    /* few_loops.h writes c entries of each row */
    if (has_counts(a) && width > a->states) clear(held * width, b.counts.held_source);
    for (int64_t q = a->first, left; q < a->last; q += left) {
        left = enter_set(w, q, most);
        int64_t count = choose_members(w, left, chosen), last = w->begin + left;
        if (count < left) w->order = chosen, w->begin = 0, last = count;
        w->in_place = !w->order && !a->ends && w->width == a->states;
        do { /* even for count 0: gradients of matrices become 0 */
            w->count = last - w->begin < most ? last - w->begin : most;
            pass_until_safe(&b);
        } while ((w->begin += most) < last);
    }
    return flagged_places(a);
}
