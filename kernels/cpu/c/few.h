/* The steps of lone.h, of sequences of at most ROW states: a row is one vector.

   It is `narrow` where the sequence has fewer: then what lies behind is read along, and taken out again. A state is
   kept as sums times emissions, without the factor that takes it to 2^TOP: this meets the next step's sums, whose
   products need not wait for it. */
#include "lone.h"
#include "scale.h"

INLINE wholes within(int64_t c) {
    wholes lanes;
    UNROLL for (int j = 0; j < LANES; j++) lanes[j] = j;
    return lanes < (whole)c;
}
INLINE reals read(const int narrow, int64_t c, const real *from, real rest) {
    return narrow ? where(within(c), load(from), all(rest)) : load(from);
}
INLINE void write(const int narrow, int64_t c, reals row, real *to) {
    if (!narrow) store(to, row);
    else {
        int64_t done = 0;
        UNROLL for (int part = LANES / 2; part > 0; part /= 2)
            if (c & part) {
                __builtin_memcpy(to + done, (const real *)&row + done, (uint64_t)part * sizeof(real));
                done += part;
            }
    }
}

/* exp(x - max x), max x, and whether any was raised. */
INLINE reals emissions(const int narrow, int64_t c, const real *x, real *shift, int *deep) {
    reals row = read(narrow, c, x, -INFINITE), top = row;
    FOLDED(top, larger);
    top = where(top == -INFINITE, (reals){0}, top);
    reals a = row - top;
    *shift = top[0], *deep = any((a < LOG_DEEPEST) & (a > -INFINITE));
    return exponential(a, NO_REST);
}

/* A row times `rows` rows of a matrix, of which c are not 0, in sums that do not wait for each other, as far as there
   are registers: where four are, in the order of product.h, so that nobody sees which loop it was. */
enum { SUMS = BYTES > 64 ? 2 : 4 };
INLINE reals times(int64_t rows, int64_t c, reals a, const real *entries, int64_t row) {
    reals sum[SUMS] = {0};
    real each[LANES] __attribute__((aligned(64)));
    store(each, a);
    if (BYTES >= 64) __asm__("" : "+m"(each)); /* an entry is read again sooner than it is moved between registers */
    UNROLL for (int k = 0; k < LANES; k++) {
        if (k >= rows) break;
        if (k < c / SUMS * SUMS) sum[k % SUMS] += each[k] * load(entries + k * row);
        else sum[0] += each[k] * load(entries + k * row);
    }
    return SUMS == 2 ? sum[0] + sum[1] : (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The rows of a matrix that so many steps later is read, or written, are asked for: smaller ones come by themselves. */
enum { LATER = 4, LINE = 64 / sizeof(real) };
#define ASK(rows, row, write)                                  \
    UNROLL for (int k = 0; k < LANES && LANES >= LINE; k++)    \
        UNROLL for (int j = 0; j < LANES; j += LINE) __builtin_prefetch((rows) + k * (row) + j, write)

/* A row times the transpose of a matrix. */
INLINE reals times_transposed(const int narrow, int64_t c, reals a, const real *entries, int64_t row) {
    reals products[LANES];
    UNROLL for (int k = 0; k < LANES; k++)
        products[k] = narrow && k >= c ? (reals){0} : a * read(narrow, c, entries + k * row, 0);
    return total_of_each(products);
}

/* What bits of sums are compared with: bits less `taken`, 1 where a sum may be 0, are not below `least`. */
typedef struct { natural taken; naturals least[2]; } Bounds;
INLINE Bounds bounds_of(const int narrow, const Lone *l) {
    Bounds bounds = {.taken = (natural)l->zeros};
    UNROLL for (int deep = 0; deep < 2; deep++) {
        naturals limit = (naturals){0} + (natural)bits_of(l->limits[deep]);
        if (narrow) limit &= (naturals)within(l->c);
        bounds.least[deep] = limit - bounds.taken;
    }
    return bounds;
}

/* Whether all sums are believed, and the bits of the largest in all lanes. */
INLINE int believed(const int narrow, int64_t c, const Bounds *bounds, int deep, reals *sums, naturals *most) {
    naturals bits = (naturals)*sums;
    if (narrow) bits &= (naturals)within(c), *sums = (reals)bits;
    int low = any((wholes)(bits - bounds->taken < bounds->least[deep]));
    FOLDED(bits, above); /* as numbers that are not negative, and then NaN */
    *most = bits;
    return !low && bits[0] - 1 < (natural)bits_of(INFINITE) - 1;
}

/* 2^(TOP - k) for largest sums in [1/2, 1) 2^k that are believed. */
INLINE reals to_top(naturals most) {
    naturals exponent = most & ((natural)(2 * BIAS + 1) << FRACTION);
    return (reals)(((naturals){0} + ((natural)(TOP + 2 * BIAS - 1) << FRACTION)) - exponent);
}

INLINE int64_t ahead(const int narrow, const int one, Lone *lone, int64_t step, int64_t behind) {
    const Lone of = *lone, *l = &of; /* which no store can touch */
    const Bounds bounds = bounds_of(narrow, l);
    int64_t c = narrow ? l->c : LANES, begin = step, exponents = 0;
    reals state = load(l->state), factor = all(1);
    Sum shift = l->shift;
    int deep = l->deep;
    for (; step < behind; step++) {
        const real *entries = one ? l->entries : l->entries + (step - 1) * l->entries_step;
        if (!one) ASK(entries + LATER * l->entries_step, l->row, 0);
        reals sums = times(one ? LANES : c, c, state, entries, one ? LANES : l->row) * factor;
        naturals most;
        real top;
        if (!believed(narrow, c, &bounds, deep, &sums, &most)) break;
        state = sums * emissions(narrow, c, l->x + step * l->x_step, &top, &deep), factor = to_top(most);
        if (l->messages) write(narrow, c, state * factor, l->messages + step * l->message_step);
        if (l->shares) {
            reals message = state * factor, sum = all(total(message));
            write(narrow, c, where(sum > 0, message / sum, sum), l->shares + step * l->share_step);
        }
        add(&shift, top);
        exponents += most[0] >> FRACTION;
    }
    int64_t steps = step - begin;
    double high = (float)l->matrix_shift; /* steps times a double of few bits is one */
    add(&shift, high * (double)steps), add(&shift, (l->matrix_shift - high) * (double)steps);
    store(lone->state, state * factor);
    lone->shift = shift, lone->exponent += exponents - steps * (BIAS - 1 + TOP - l->matrix_exponent), lone->deep = deep;
    return step;
}

/* 0 for what is no normal number. */
INLINE reals without_tiny(reals a) {
    naturals size = (naturals)a & (natural)bits_of(INFINITE);
    return (reals)((naturals)a & (naturals)((wholes)size > 0));
}

/* The gradient of a matrix: an outer product of S and a source, exactly 0 where the matrix is. */
INLINE void write_transitions(const int narrow, int64_t c, const Lone *l, reals ahead, reals source,
                              const real *entries, reals *high, real *to) {
    UNROLL for (int k = 0; k < LANES; k++) {
        if (k >= c) break;
        reals entry = read(narrow, c, entries + k * l->row, 0), both = source * ahead[k];
        *high = larger(entry, *high);
        both = without_tiny(both) * l->unshare;
        write(narrow, c, where(entry == 0, (reals){0}, l->by_log ? both * entry : both), to + k * c);
    }
}

INLINE int64_t back(const int narrow, const int one, Lone *lone, int64_t step) {
    const Lone of = *lone, *l = &of; /* which no store can touch */
    const Bounds bounds = bounds_of(narrow, l);
    int64_t c = narrow ? l->c : LANES, counts = l->outer || l->held_ahead, held = l->held;
    reals behind = load(l->state), factor = all(1), high = {0};
    for (; step > l->until && (!l->held_ahead || held < l->most_held); step--) {
        const real *entries = one ? l->entries : l->entries + (step - 1) * l->entries_step;
        real top;
        int deep;
        if (!one) ASK(entries - LATER * l->entries_step, l->row, 0);
        reals source = behind * emissions(narrow, c, l->x + step * l->x_step, &top, &deep);
        reals sums = one ? times(LANES, c, source, entries, LANES)
                         : times_transposed(narrow, c, source, entries, l->row);
        naturals most;
        sums *= factor;
        if (!believed(narrow, c, &bounds, deep, &sums, &most)) break;
        reals next = to_top(most), ahead = read(narrow, c, l->messages + (step - 1) * l->message_step, 0);
        reals both = ahead * (sums * next * power_of_two(-TOP));
        real sum = total(both), share = 1 / sum;
        if (!(share > 0 && share < (counts ? 1 : power_of_two(TOP)))) break;
        if (counts && most[0] < (natural)bits_of(power_of_two(TOP - 24))) break;
        if (l->gradient) {
            reals seen = where(both < sum * power_of_two(1 - BIAS), (reals){0}, both * share * l->weight);
            write(narrow, c, seen, l->gradient + (step - 1) * l->gradient_step);
        }
        if (counts) {
            reals shared = without_tiny(source * factor * (next[0] * power_of_two(-HALF)) * share);
            shared = smaller(shared, all(power_of_two(BIAS - 1))) * l->source_weight;
            if (l->outer) {
                real *outer = l->outer + (step - 1) * l->outer_step;
                ASK(outer - LATER * l->outer_step, c, 1);
                write_transitions(narrow, c, l, ahead, shared, entries, &high, outer);
            } else {
                write(narrow, c, ahead, l->held_ahead + held * l->held_step);
                write(narrow, c, shared, l->held_source + held++ * l->held_step);
            }
        }
        behind = sums, factor = next;
    }
    store(lone->state, behind * factor), lone->held = held, lone->high = largest(high);
    return step;
}

/* Each is compiled for one matrix or many. */
#define OF_KINDS(name, ...)                                             \
    if (l->c < LANES) return l->one ? name(1, 1, __VA_ARGS__) : name(1, 0, __VA_ARGS__); \
    return l->one ? name(0, 1, __VA_ARGS__) : name(0, 0, __VA_ARGS__)
#define NAMED(name, row) EXPORTED(name##_##row##_)
#define OF_THIS_ROW(name, row) NAMED(name, row)
int64_t OF_THIS_ROW(steps_ahead, ROW)(Lone *l, int64_t step, int64_t behind) { OF_KINDS(ahead, l, step, behind); }
int64_t OF_THIS_ROW(steps_back, ROW)(Lone *l, int64_t step) { OF_KINDS(back, l, step); }
