/* The steps of few.h for at most ROW states, where a row is one vector:

       forward    U = (R F) P, R <- U E, F <- 2^(TOP - k)    S = R F, max U in [1/2, 1) 2^k    backward: by P^T

   The scale F multiplies the next step's sums, so that their products need not wait for it. `narrow`: the sequence has
   fewer than ROW states; entries beyond them are read and then masked. */
#include "few.h"
#include "flush.h"
#include "scale.h"

INLINE wholes within(int64_t c) { return lane_numbers() < (whole)c; }
INLINE reals read(const int narrow, int64_t c, const real *from, real fill) {
    return narrow ? where(within(c), load(from), splat(fill)) : load(from);
}
/* The row of a step of x. Where logarithms are written, x may run backwards: only c entries are read. */
INLINE reals read_x(const int narrow, int64_t c, const Few *l, int64_t step) {
    const real *from = at_step(l->x, step);
    return l->logs.data ? read_some(from, 1, c, -INFINITE) : read(narrow, c, from, -INFINITE);
}

/* Log sums U of a step, which are 2^exponent e^taken times `sums`, plus x. */
INLINE void write_logs(const Few *l, int64_t step, reals sums, reals x, Sum taken, int64_t exponent) {
    real row[LANES], emission[LANES];
    store(row, sums), store(emission, x);
    write_logarithms(l->c, row, taken, exponent, l->with_x ? emission : 0, at_step(l->logs, step));
}

/* Emissions exp(x - max x), max x as `shift`, and whether one was raised. */
INLINE reals emissions(reals row, real *shift, int *raised) {
    reals top = row;
    REDUCE(top, larger);
    top = where(top == -INFINITE, (reals){0}, top);
    reals a = row - top;
    *shift = top[0], *raised = any((a < LOG_DEEPEST) & (a > -INFINITE));
    return exponential(a, NO_TAIL);
}

/* A row times a matrix of `rows` rows, of which those from c on are 0. Independent partial sums hide latency, as many
   as registers allow; four of them are added in the order of product.h, so that both give the same bits. */
enum { SUMS = BYTES > 64 ? 2 : 4 };
INLINE reals times(int64_t rows, int64_t c, reals a, const real *entries, int64_t row) {
    reals sum[SUMS] = {0};
    real scalars[LANES] __attribute__((aligned(64)));
    store(scalars, a);
    if (BYTES >= 64) __asm__("" : "+m"(scalars)); /* reloading an entry beats a lane shuffle */
    UNROLL for (int k = 0; k < LANES; k++) {
        if (k >= rows) break;
        sum[k < c / SUMS * SUMS ? k % SUMS : 0] += scalars[k] * load(entries + k * row);
    }
    return SUMS == 2 ? sum[0] + sum[1] : (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Prefetches the matrix that is read or written LATER steps on; the hardware prefetches smaller ones by itself. */
enum { LATER = 4, LINE = 64 / sizeof(real) };
#define PREFETCH(rows, row, write)                          \
    UNROLL for (int k = 0; k < LANES && LANES >= LINE; k++) \
        UNROLL for (int j = 0; j < LANES; j += LINE) __builtin_prefetch((rows) + k * (row) + j, write)

INLINE reals times_transposed(const int narrow, int64_t c, reals a, const real *entries, int64_t row) {
    reals products[LANES];
    UNROLL for (int k = 0; k < LANES; k++)
        products[k] = narrow && k >= c ? (reals){0} : a * read(narrow, c, entries + k * row, 0);
    return total_of_each(products);
}

/* A sum passes if its bits minus `taken` are at least `least[raised]`; `taken` is 1 where a sum of 0 passes. */
typedef struct { natural taken; naturals least[2]; } Bounds;
INLINE Bounds bounds_of(const int narrow, const Few *l) {
    Bounds bounds = {.taken = (natural)l->zeros};
    UNROLL for (int raised = 0; raised < 2; raised++) {
        naturals limit = (naturals){0} + (natural)bits_of(l->limits[raised]);
        if (narrow) limit &= (naturals)within(l->c);
        bounds.least[raised] = limit - bounds.taken;
    }
    return bounds;
}

/* The least bits of sums, less `taken`, that pass after a raised emission, under a matrix of this step alone; infinite
   for a matrix that has to be rescaled. */
INLINE naturals least_after_raised(const int narrow, const Few *l, const real *entries) {
    reals all = {0};
    UNROLL for (int k = 0; k < LANES; k++) {
        if (k >= (narrow ? l->c : LANES)) break;
        all = larger(read(narrow, l->c, entries + k * l->row, 0), all);
    }
    real high = largest(all), limit = is_far_from_one(high) ? INFINITE : least_unchanged(high);
    naturals least = (naturals){0} + (natural)bits_of(limit);
    return narrow ? least & (naturals)within(l->c) : least;
}

/* Whether all sums pass that are to be at least `least`; `most`: the bits of the largest in all lanes. */
INLINE int all_pass(const int narrow, int64_t c, natural taken, naturals least, reals *sums, naturals *most) {
    naturals bits = (naturals)*sums;
    if (narrow) bits &= (naturals)within(c), *sums = (reals)bits;
    int low = any((wholes)(bits - taken < least));
    REDUCE(bits, __builtin_elementwise_max); /* the order of non-negative numbers, NaN on top */
    *most = bits;
    return !low && bits[0] - 1 < (natural)bits_of(INFINITE) - 1;
}

/* 2^(TOP - k), for a largest sum in [1/2, 1) 2^k. */
INLINE reals to_top(naturals most) {
    naturals exponent = most & ((natural)(2 * BIAS + 1) << FRACTION);
    return (reals)(((naturals){0} + ((natural)(TOP + 2 * BIAS - 1) << FRACTION)) - exponent);
}

/* What has been taken out of S after some steps: logarithms, to which those of the matrices are added, and powers of
   two, from the sum of the biased exponents of the largest sums U. */
INLINE Sum shift_after(const Few *l, Sum shift, int64_t steps) {
    double high = (float)l->matrix_shift; /* few bits: its product with `steps` is exact */
    add(&shift, high * (double)steps), add(&shift, (l->matrix_shift - high) * (double)steps);
    return shift;
}
INLINE int64_t exponent_after(const Few *l, int64_t exponents, int64_t steps) {
    return l->exponent + exponents - steps * (BIAS - 1 + TOP - l->matrix_exponent);
}

INLINE int64_t forward_steps(const int narrow, const int one, Few *arguments, int64_t step, int64_t stop) {
    const Few of = *arguments, *l = &of; /* a copy that no store can alias */
    const Bounds bounds = bounds_of(narrow, l);
    int64_t c = narrow ? l->c : LANES, begin = step, exponents = 0;
    reals state = load(l->state), factor = splat(1);
    Sum shift = l->shift;
    int raised = l->raised;
    for (; step < stop; step++) {
        const real *entries = at_step(l->entries, one ? 0 : step);
        if (!one) PREFETCH(entries + LATER * l->entries.step, l->row, 0);
        reals sums = times(one ? LANES : c, c, state, entries, one ? LANES : l->row) * factor;
        naturals most;
        real top;
        naturals limit = !one && raised ? least_after_raised(narrow, l, entries) : bounds.least[raised];
        if (!all_pass(narrow, c, bounds.taken, limit, &sums, &most)) break;
        reals x = read_x(narrow, c, l, step);
        if (l->logs.data) {
            Sum taken = shift_after(l, shift, step + 1 - begin);
            write_logs(l, step, sums, x, taken, exponent_after(l, exponents, step - begin) + l->matrix_exponent);
        }
        state = sums * emissions(x, &top, &raised), factor = to_top(most);
        if (l->messages.data) write_some(at_step(l->messages, step), state * factor, c);
        if (l->filtered.data) {
            reals message = state * factor, sum = splat(total(message));
            write_some(at_step(l->filtered, step), where(sum > 0, message / sum, sum), c);
        }
        add(&shift, top);
        exponents += most[0] >> FRACTION;
    }
    store(arguments->state, state * factor);
    arguments->exponent = exponent_after(l, exponents, step - begin);
    arguments->shift = shift_after(l, shift, step - begin), arguments->raised = raised;
    return step;
}

/* The least T whose product with the factors of a source is no denormal number: smaller ones become 0. If its exponent
   is below the range of `real`, it is a negative number, and no T becomes 0. Sums of exponents may wrap around: for
   scales of to_top and a share below 1, the result is right all the same. */
INLINE real least_source(real factor, real next, real share) {
    natural bits = (natural)bits_of(factor) + (natural)bits_of(next) + (natural)bits_of(share);
    natural exponent = (natural)(1 + HALF + 3 * BIAS) - (bits >> FRACTION);
    return real_of((whole)(exponent << FRACTION));
}

/* The gradient of a matrix: the outer product of S and a source, exactly 0 where the matrix is 0. */
INLINE void write_transitions(const int narrow, int64_t c, const Few *l, reals forward, reals source,
                              const real *entries, reals *high, real *to) {
    UNROLL for (int k = 0; k < LANES; k++) {
        if (k >= c) break;
        reals entry = read(narrow, c, entries + k * l->row, 0), both = source * forward[k];
        *high = larger(entry, *high), both *= l->unshare;
        write_some(to + k * c, where(is_zero(entry), (reals){0}, l->by_log ? both * entry : both), c);
    }
}

INLINE int64_t backward_steps(const int narrow, const int one, Few *arguments, int64_t step) {
    const Few of = *arguments, *l = &of; /* a copy that no store can alias */
    const Bounds bounds = bounds_of(narrow, l);
    int64_t c = narrow ? l->c : LANES, counts = l->outer.data || l->held_forward.data, held = l->held;
    reals backward = load(l->state), factor = splat(1), high = {0};
    for (; step > l->first_step && (!l->held_forward.data || held < l->most_held); step--) {
        const real *entries = at_step(l->entries, one ? 0 : step);
        real top;
        int raised;
        if (!one) PREFETCH(entries - LATER * l->entries.step, l->row, 0);
        reals source = backward * emissions(read_x(narrow, c, l, step), &top, &raised);
        reals sums = one ? times(LANES, c, source, entries, LANES)
                         : times_transposed(narrow, c, source, entries, l->row);
        naturals most;
        sums *= factor;
        naturals limit = !one && raised ? least_after_raised(narrow, l, entries) : bounds.least[raised];
        if (!all_pass(narrow, c, bounds.taken, limit, &sums, &most)) break;
        reals next = to_top(most), forward = read(narrow, c, at_step(l->messages, step - 1), 0);
        reals both = forward * (sums * next * power_of_two(-TOP));
        real sum = total(both), share = 1 / sum;
        if (!(share > 0 && share < (counts ? 1 : power_of_two(TOP)))) break;
        if (counts && most[0] < (natural)bits_of(power_of_two(TOP - 24))) break;
        if (l->gradient.data) {
            reals seen = where(both < sum * power_of_two(1 - BIAS), (reals){0}, both * share * l->weight);
            write_some(at_step(l->gradient, step - 1), seen, c);
        }
        if (counts) {
            real limit = least_source(factor[0], next[0], share);
            reals shared = where(source < limit, (reals){0}, source) * factor * (next[0] * power_of_two(-HALF)) * share;
            shared = smaller(shared, splat(power_of_two(BIAS - 1))) * l->source_weight;
            if (l->outer.data) {
                Mode before = flush_to_zero(l->ordinary);
                real *outer = at_step(l->outer, step);
                PREFETCH(outer - LATER * l->outer.step, c, 1);
                write_transitions(narrow, c, l, forward, read_now(shared), entries, &high, outer);
                set_mode(before);
            } else {
                write_some(at_step(l->held_forward, held), forward, c);
                write_some(at_step(l->held_source, held++), shared, c);
            }
        }
        backward = sums, factor = next;
    }
    store(arguments->state, backward * factor), arguments->held = held, arguments->high = largest(high);
    return step;
}

/* Compiles a loop for fewer states than ROW or exactly ROW, and for one matrix or many. */
#define OF_KINDS(name, ...)                                                              \
    if (l->c < LANES) return l->one ? name(1, 1, __VA_ARGS__) : name(1, 0, __VA_ARGS__); \
    return l->one ? name(0, 1, __VA_ARGS__) : name(0, 0, __VA_ARGS__)
#define NAMED(name, row) EXPORTED(name##_##row##_)
#define OF_THIS_ROW(name, row) NAMED(name, row)
int64_t OF_THIS_ROW(steps_forward, ROW)(Few *l, int64_t step, int64_t stop) { OF_KINDS(forward_steps, l, step, stop); }
int64_t OF_THIS_ROW(steps_backward, ROW)(Few *l, int64_t step) { OF_KINDS(backward_steps, l, step); }
