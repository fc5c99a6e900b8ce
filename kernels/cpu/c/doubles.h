/* Vectors of doubles, whatever `real` is, with exponentials and logarithms. */
#pragma once
#include "scale.h"

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

/* The rounding errors of sums a + b; 0 where a sum is not finite. */
INLINE doubles rounding_errors(doubles a, doubles b, doubles sum) {
    doubles back = sum - a, error = (a - (sum - back)) + (b - back);
    return choose(error == error, error, splat_wide(0));
}

/* exp(a) for a from -708 to 708. */
INLINE doubles exponential_of(doubles a) {
    doubles rounded = a * 1.4426950408889634 + 0x1.8p52, k = rounded - 0x1.8p52;
    doubles r = (a - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
    doubles q = r * 2.07977146532679341e-9 + 2.5112254608742596e-8;
    q = q * r + 2.75576912069113884e-7, q = q * r + 2.75572341705423482e-6, q = q * r + 2.48015867702574306e-5;
    q = q * r + 1.98412698971676727e-4, q = q * r + 1.3888888889219606e-3, q = q * r + 8.33333333331666335e-3;
    q = q * r + 4.16666666666657806e-2, q = q * r + 0.16666666666666684, q = q * r + 0.500000000000000008;
    return (doubles)((longs)((q * r) * r + r + 1) + ((longs)rounded << 52));
}

/* Natural logarithms of m 2^-less, within 2 units in the last place, for normal m; some finite value for 0.

   With m = 2^k f, f between the roots of 1/2 and of 2, and t = (f - 1) / (f + 1), log f = 2 t + t R(t t); the
   coefficients of R are those of fdlibm's e_log.c. */
INLINE doubles finite_logarithm_of(doubles m, double less) {
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
    return choose(m > 0, finite_logarithm_of(m, less), choose(m == 0, splat_wide(-__builtin_inf()), m));
}

/* Natural logarithms of a row of sums times 2^exponent e^taken, plus x unless it is null. */
INLINE void write_logarithms(int64_t c, const real *row, Sum taken, int64_t exponent, const real *x, real *out) {
    add_exponent(&taken, exponent + TOP);
    doubles scale = splat_wide(taken.sum), rest = splat_wide(taken.error == taken.error ? taken.error : 0);
    for (int64_t j = 0; j < c; j += WIDE) {
        doubles emission = x ? read_wide(x + j, 1, c - j, 0) : splat_wide(0);
        doubles sum = scale + emission; /* either may be large, and their sum small */
        doubles logs = logarithm_of(read_wide(row + j, 1, c - j, 0), TOP);
        write_wide(out + j, sum + (logs + rounding_errors(scale, emission, sum) + rest), c - j);
    }
}
