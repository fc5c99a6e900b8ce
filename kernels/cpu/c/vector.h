/* Vectors of `real` by the compiler's vector extension: one source serves AVX-512, AVX2, SSE and NEON.

   BITS is 32 or 64: `real` is float or double, `whole` the integer of its size. An `operand` of the caller is a `real`,
   or with FLOAT32_OPERANDS a float, with which a loop in doubles computes. */
#pragma once
#include <stdint.h>

#if BITS == 32
typedef float real;
typedef int32_t whole;
typedef uint32_t natural;
#else
typedef double real;
typedef int64_t whole;
typedef uint64_t natural;
#endif

#if defined(FLOAT32_OPERANDS)
typedef float operand;
#else
typedef real operand;
#endif
#if defined(FLOAT32_OPERANDS) || BITS == 32
#define EXPORTED(name) name##32
#else
#define EXPORTED(name) name##64
#endif

#if defined(ROW) /* in few_loops.h: a vector is a row of ROW states, in any number of registers */
#define BYTES (ROW * BITS / 8)
#elif defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif

enum { LANES = BYTES * 8 / BITS };

/* Rows by vectors of a tile in product.h: what registers hold beside one entry and a row of columns. */
#if BYTES == 32
enum { ROWS = 6, VECTORS = 2 };
#elif defined(__AVX512F__) || defined(__aarch64__)
enum { ROWS = 8, VECTORS = 3 };
#else
enum { ROWS = 3, VECTORS = 3 };
#endif

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 16")
#define EXPORT __attribute__((visibility("default")))

typedef real reals __attribute__((vector_size(BYTES)));
typedef whole wholes __attribute__((vector_size(BYTES)));
typedef natural naturals __attribute__((vector_size(BYTES)));

/* Constants of the format, and of exponentials. */
#if BITS == 32
enum { FRACTION = 23, BIAS = 127 };
#define ROUNDER 0x1.8p23f     /* adding it rounds to an integer, which the last bits then are */
#define LN2_HIGH 0x1.62ep-1f  /* few bits: products with exponents are exact */
#define LN2_LOW 0x1.0bfbe8p-15f
#else
enum { FRACTION = 52, BIAS = 1023 };
#define ROUNDER 0x1.8p52
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#endif
#define LOG2_E ((real)1.4426950408889634)
#define INFINITE ((real)__builtin_inf())

INLINE reals load(const real *from) { reals a; __builtin_memcpy(&a, from, sizeof a); return a; }
INLINE void store(real *to, reals a) { __builtin_memcpy(to, &a, sizeof a); }
INLINE reals splat(real a) { return a - (reals){0}; }
INLINE reals where(wholes condition, reals a, reals b) {
    return (reals)((condition & (wholes)a) | (~condition & (wholes)b));
}
INLINE wholes where_whole(wholes condition, wholes a, wholes b) { return (condition & a) | (~condition & b); }
INLINE reals larger(reals a, reals b) { return where(a > b, a, b); }
INLINE reals smaller(reals a, reals b) { return where(a < b, a, b); }
INLINE naturals larger_bits(naturals a, naturals b) { return (naturals)where_whole(a > b, (wholes)a, (wholes)b); }
INLINE wholes larger_whole(wholes a, wholes b) { return where_whole(a > b, a, b); }
INLINE wholes smaller_whole(wholes a, wholes b) { return where_whole(a < b, a, b); }
INLINE reals plus(reals a, reals b) { return a + b; }

INLINE whole bits_of(real a) { whole bits; __builtin_memcpy(&bits, &a, sizeof a); return bits; }
INLINE real real_of(whole bits) { real a; __builtin_memcpy(&a, &bits, sizeof a); return a; }

/* 2^k, for a k in the range of normal numbers. */
INLINE real power_of_two(int64_t k) { return real_of((whole)(k + BIAS) << FRACTION); }

/* Sets all lanes to the reduction by `f`, in rounds with the lanes a half, a quarter, ... of the vector away. */
#define REDUCE(a, f)                                                     \
    UNROLL for (int apart = LANES / 2; apart > 0; apart /= 2) {          \
        __typeof__(a) beside;                                            \
        UNROLL for (int j = 0; j < LANES; j++) beside[j] = a[j ^ apart]; \
        a = f(a, beside);                                                \
    }

/* Reductions of a vector. */
INLINE real largest(reals a) { REDUCE(a, larger); return a[0]; }
INLINE real least(reals a) { REDUCE(a, smaller); return a[0]; }
INLINE real total(reals a) { REDUCE(a, plus); return a[0]; }
INLINE whole highest(wholes a) { REDUCE(a, larger_whole); return a[0]; }
INLINE whole lowest(wholes a) { REDUCE(a, smaller_whole); return a[0]; }
INLINE int any(wholes a) { return __builtin_reduce_or(a) != 0; }

/* Reductions of LANES vectors into the lanes of one: each round merges halves of two vectors into one. */
#define REDUCE_EACH(name, type, f)                                       \
    INLINE type name(type *a) {                                          \
        UNROLL for (int apart = LANES / 2; apart > 0; apart /= 2)        \
            UNROLL for (int k = 0; k < apart; k++) {                     \
                type own, beside;                                        \
                UNROLL for (int j = 0; j < LANES; j++) {                 \
                    own[j] = a[j & apart ? k + apart : k][j];            \
                    beside[j] = a[j & apart ? k + apart : k][j ^ apart]; \
                }                                                        \
                a[k] = f(own, beside);                                   \
            }                                                            \
        return a[0];                                                     \
    }
REDUCE_EACH(total_of_each, reals, plus)
REDUCE_EACH(largest_of_each, reals, larger)
REDUCE_EACH(highest_of_each, wholes, larger_whole)
REDUCE_EACH(lowest_of_each, wholes, smaller_whole)

/* The lower, and the upper, halves of two vectors with lanes interleaved. */
#if BYTES * 8 / BITS == 16
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif BYTES * 8 / BITS == 8
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif BYTES * 8 / BITS == 4
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#else
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 2)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 1, 3)
#endif

/* exp(r) for |r| <= (log 2) / 2, within 0.06 (float32) or 0.001 units in the last place before rounding. */
INLINE reals near_exponential(reals r) {
#if BITS == 32
    reals q = r * 0.00137512791f + 0.00836895178f;
    q = q * r + 0.0416695387f, q = q * r + 0.166665182f, q = q * r + 0.499999886f;
#else
    reals q = r * 2.07977146532679341e-9 + 2.5112254608742596e-8;
    q = q * r + 2.75576912069113884e-7, q = q * r + 2.75572341705423482e-6, q = q * r + 2.48015867702574306e-5;
    q = q * r + 1.98412698971676727e-4, q = q * r + 1.3888888889219606e-3, q = q * r + 8.33333333331666335e-3;
    q = q * r + 4.16666666666657806e-2, q = q * r + 0.16666666666666684, q = q * r + 0.500000000000000008;
#endif
    return (q * r) * r + r + 1;
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

/* The natural logarithm of a positive double, within 2 units in the last place; -inf of 0, NaN of NaN. */
INLINE double logarithm(double a) {
    int64_t exponent;
    double part = mantissa(a, &exponent), series = 0;
    if (!(a > 0) || a == __builtin_inf()) return a == 0 ? -__builtin_inf() : a;
    if (part >= 0x1.6a09e667f3bcdp0) part *= 0.5, exponent++; /* between the roots of 1/2 and of 2 */
    double t = (part - 1) / (part + 1), square = t * t;
    for (int k = 21; k > 1; k -= 2) series = (series + 1.0 / k) * square;
    return (double)exponent * 0x1.62e42feep-1 + ((double)exponent * 0x1.a39ef35793c76p-33 + 2 * t * (1 + series));
}

/* Natural logarithms in `real`, within 2 units in the last place; -inf of 0, NaN of what is negative or NaN. */
#if BITS == 32
#define ROOT_HALF 0x3f3504f3
enum { LOG_TERMS = 9 };
#else
#define ROOT_HALF 0x3fe6a09e667f3bcd
enum { LOG_TERMS = 21 };
#endif
INLINE reals logarithms(reals a) {
    wholes tiny = a < power_of_two(1 - BIAS);
    wholes bits = (wholes)where(tiny, a * power_of_two(FRACTION + 1), a), more = (bits - ROOT_HALF) >> FRACTION;
    reals f = (reals)(bits - (more << FRACTION)), t = (f - 1) / (f + 1), square = t * t, series = {0};
    reals k = __builtin_convertvector(more - (tiny & (whole)(FRACTION + 1)), reals);
    UNROLL for (int j = LOG_TERMS; j > 1; j -= 2) series = (series + (real)1 / (real)j) * square;
    reals log = k * LN2_HIGH + (k * LN2_LOW + 2 * t * (1 + series));
    reals other = where(a == 0, splat(-INFINITE), where(a < 0, splat(__builtin_nanf("")), a));
    return where((a > 0) & (a < INFINITE), log, other);
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
