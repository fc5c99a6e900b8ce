/* Vectors of doubles, whatever `real` is; exponentials, logarithms and compensated sums. */
#pragma once
#include "vector.h"

typedef double doubles __attribute__((vector_size(BYTES)));
typedef int64_t longs __attribute__((vector_size(BYTES)));
typedef uint64_t natural_longs __attribute__((vector_size(BYTES)));
enum { WIDE = BYTES / 8 };

INLINE doubles load_wide(const double *from) { doubles a; __builtin_memcpy(&a, from, sizeof a); return a; }
INLINE void store_wide(double *to, doubles a) { __builtin_memcpy(to, &a, sizeof a); }
INLINE doubles splat_wide(double a) { return a - (doubles){0}; }
INLINE doubles choose(longs condition, doubles a, doubles b) {
    return (doubles)((condition & (longs)a) | (~condition & (longs)b));
}

INLINE int any_wide(longs a) { return __builtin_reduce_or(a) != 0; }

/* A vector of a row's entries, `step` apart, of which `left` remain; further lanes are `fill`. */
typedef real Part __attribute__((vector_size(WIDE * sizeof(real))));
INLINE doubles read_wide(const real *from, int64_t step, int64_t left, double fill) {
    doubles a = splat_wide(fill);
    if (step == 1 && left >= WIDE) {
        Part read;
        __builtin_memcpy(&read, from, sizeof read);
        return __builtin_convertvector(read, doubles);
    }
    UNROLL for (int l = 0; l < WIDE; l++) if (l < left) a[l] = (double)from[l * step];
    return a;
}
/* Stores the first `left` lanes. */
INLINE void write_wide(real *to, doubles a, int64_t left) {
    Part written = __builtin_convertvector(a, Part);
    if (left >= WIDE) __builtin_memcpy(to, &written, sizeof written);
    else UNROLL for (int l = 0; l < WIDE; l++) if (l < left) to[l] = written[l];
}

/* The same from and to contiguous doubles. */
INLINE doubles read_doubles(const double *from, int64_t left, double fill) {
    doubles a = splat_wide(fill);
    UNROLL for (int l = 0; l < WIDE; l++) if (l < left) a[l] = from[l];
    return a;
}
INLINE void write_doubles(double *to, doubles a, int64_t left) {
    UNROLL for (int l = 0; l < WIDE; l++) if (l < left) to[l] = a[l];
}

/* The rounding errors of sums a + b; 0 where a sum is not finite. */
INLINE doubles rounding_errors(doubles a, doubles b, doubles sum) {
    doubles back = sum - a, error = (a - (sum - back)) + (b - back);
    return choose(error == error, error, splat_wide(0));
}

/* exp(r) for |r| <= (log 2) / 2, within 0.001 units in the last place before rounding. */
INLINE doubles near_exponential_of(doubles r) {
    doubles q = r * 2.07977146532679341e-9 + 2.5112254608742596e-8;
    q = q * r + 2.75576912069113884e-7, q = q * r + 2.75572341705423482e-6, q = q * r + 2.48015867702574306e-5;
    q = q * r + 1.98412698971676727e-4, q = q * r + 1.3888888889219606e-3, q = q * r + 8.33333333331666335e-3;
    q = q * r + 4.16666666666657806e-2, q = q * r + 0.16666666666666684, q = q * r + 0.500000000000000008;
    return (q * r) * r + r + 1;
}

/* The same of `real`, in float32 within 0.06 units in the last place. */
INLINE reals near_exponential(reals r) {
#if BITS == 32
    reals q = r * 0.00137512791f + 0.00836895178f;
    q = q * r + 0.0416695387f, q = q * r + 0.166665182f, q = q * r + 0.499999886f;
    return (q * r) * r + r + 1;
#else
    return near_exponential_of(r);
#endif
}

/* exp(a) for a up to 708; 0 below -708, NaN of NaN. */
INLINE doubles exponential_or_zero(doubles a) {
    longs is_high = a >= -708;
    doubles b = choose(is_high, a, splat_wide(0)), rounded = b * 1.4426950408889634 + 0x1.8p52, k = rounded - 0x1.8p52;
    doubles r = (b - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
    doubles power = (doubles)((longs)near_exponential_of(r) + ((longs)rounded << 52));
    return choose(is_high, power, choose(a < -708, splat_wide(0), a));
}

/* The mantissa of a positive double, in [1, 2), and its exponent. */
INLINE double mantissa(double a, int64_t *exponent) {
    int64_t bits, more = 0;
    if (!(a > 0) || a == __builtin_inf()) return *exponent = 0, a;
    if (a < 0x1p-1022) a *= 0x1p64, more = -64;
    __builtin_memcpy(&bits, &a, 8);
    *exponent = (bits >> 52) - 1023 + more;
    bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
    __builtin_memcpy(&a, &bits, 8);
    return a;
}

/* Natural logarithms of m 2^-less, within 2 units in the last place, for normal m; some finite value for 0.

   With m = 2^k f, f between the roots of 1/2 and of 2, and t = (f - 1) / (f + 1), log f = 2 t + t R(t t); the
   coefficients of R are those of fdlibm's e_log.c. */
INLINE doubles finite_logarithm_of(doubles m, doubles less) {
    natural_longs bits = (natural_longs)m + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
    doubles k = (doubles)((bits >> 52) + 0x4338000000000000) - (0x1.8p52 + 1023 + less);
    doubles f = (doubles)((bits & 0xfffffffffffff) + 0x3fe6a09e667f3bcd), t = (f - 1) / (f + 1), z = t * t, w = z * z;
    doubles odd = w * 1.479819860511658591e-1 + 1.818357216161805012e-1, even = w * 1.531383769920937332e-1;
    odd = odd * w + 2.857142874366239149e-1, even = (even + 2.222219843214978396e-1) * w;
    odd = odd * w + 6.666666666666735130e-1, even = (even + 3.999999999940941908e-1) * w;
    return k * 0x1.62e42feep-1 + (k * 0x1.a39ef35793c76p-33 + t * (odd * z + even + 2));
}

/* Natural logarithms of m 2^-less; -inf for 0. */
INLINE doubles logarithm_of(doubles m, double less) {
    return choose(m > 0, finite_logarithm_of(m, splat_wide(less)), choose(m == 0, splat_wide(-__builtin_inf()), m));
}

/* The same of a double, denormal or not; NaN of NaN. */
INLINE double logarithm(double a) {
    int64_t exponent;
    double part = mantissa(a, &exponent);
    if (!(a > 0) || a == __builtin_inf()) return a == 0 ? -__builtin_inf() : a;
    return finite_logarithm_of(splat_wide(part), splat_wide(-(double)exponent))[0];
}

/* Natural logarithms in `real`, within 2 units in the last place; -inf of 0, NaN of what is negative or NaN. */
INLINE reals logarithms(reals a) {
    wholes tiny = a < power_of_two(1 - BIAS);
    reals m = where(tiny, a * power_of_two(FRACTION + 1), a);
#if BITS == 32
    wholes more = ((wholes)m - 0x3f3504f3) >> FRACTION; /* from the root of 1/2 on */
    reals f = (reals)((wholes)m - (more << FRACTION)), t = (f - 1) / (f + 1), square = t * t, series = {0};
    reals k = __builtin_convertvector(more - (tiny & (whole)(FRACTION + 1)), reals);
    UNROLL for (int j = 9; j > 1; j -= 2) series = (series + (real)1 / (real)j) * square;
    reals log = k * LN2_HIGH + (k * LN2_LOW + 2 * t * (1 + series));
#else
    reals log = finite_logarithm_of(m, where(tiny, splat(FRACTION + 1), (reals){0}));
#endif
    reals other = where(a == 0, splat(-INFINITE), where(a < 0, splat(__builtin_nanf("")), a));
    return where((a > 0) & (a < INFINITE), log, other);
}

/* Logarithms of up to LANES weights, of which `left` are a row's; the weights themselves if they are logarithms. */
INLINE reals logs_of_weights(int are_logs, const operand *from, int64_t step, int64_t left) {
    reals weight = read_some(from, step, left, are_logs ? -INFINITE : 0);
    return are_logs ? weight : logarithms(weight);
}

/* The same of a row of c, and -inf in the lanes after fewer than LANES; whether one is NaN or +inf. */
INLINE int read_logarithms(int are_logs, int64_t c, const operand *from, int64_t step, real *to) {
    wholes bad = {0};
    for (int64_t k = 0; k < vectors_of(c); k++) {
        int64_t j = start_of(k, c);
        reals logs = logs_of_weights(are_logs, from + j * step, step, c - j);
        bad |= ~(logs < INFINITE), store(to + j, logs);
    }
    return any(bad);
}

/* A compensated sum of doubles: the sum, and its rounding error. */
typedef struct { double sum, error; } Sum;

INLINE void add(Sum *to, double term) {
    double sum = to->sum + term, back = sum - to->sum;
    to->error += (to->sum - (sum - back)) + (term - back);
    to->sum = sum;
}

/* Adds k log 2: k = h 2^16 + l, whose products with the first bits of log 2 are exact. */
INLINE void add_exponent(Sum *to, int64_t k) {
    int64_t low = k & 0xffff;
    add(to, (double)(k - low) * 0x1.62e42feep-1);
    add(to, (double)low * 0x1.62e42feep-1);
    add(to, (double)k * 0x1.a39ef35793c76p-33);
}

INLINE double value_of(Sum a) { return a.sum + a.error == a.sum + a.error ? a.sum + a.error : a.sum; }
