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

/* Rows by vectors of a tile in product.h: what registers hold in addition to one entry and a row of columns. */
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
INLINE reals plus(reals a, reals b) { return a + b; }

/* The numbers of the lanes. */
INLINE wholes lane_numbers(void) {
    wholes lanes;
    UNROLL for (int l = 0; l < LANES; l++) lanes[l] = l;
    return lanes;
}

INLINE whole bits_of(real a) { whole bits; __builtin_memcpy(&bits, &a, sizeof a); return bits; }
INLINE real real_of(whole bits) { real a; __builtin_memcpy(&a, &bits, sizeof a); return a; }

/* 2^k, for a k in the range of normal numbers. */
INLINE real power_of_two(int64_t k) { return real_of((whole)(k + BIAS) << FRACTION); }

typedef operand operands __attribute__((vector_size(LANES * sizeof(operand))));
typedef operand masked __attribute__((ext_vector_type(LANES)));
typedef _Bool mask __attribute__((ext_vector_type(LANES)));

/* The next entries of a row, `step` apart, of which `left` remain; further lanes are `fill`. A masked load waits for
   stores: entries whose number a compiler knows are copied. */
INLINE reals read_some(const operand *from, int64_t step, int64_t left, real fill) {
    operands next, some = __builtin_convertvector(splat(fill), operands);
    mask first = __builtin_convertvector(lane_numbers() < (whole)left, mask);
    if (step == 1 && left >= LANES) __builtin_memcpy(&next, from, sizeof next);
    else if (step == 1 && __builtin_constant_p(left)) {
        __builtin_memcpy(&some, from, (unsigned long)left * sizeof(operand));
        next = some;
    } else if (step == 1) next = (operands)__builtin_masked_load(first, from, (masked)some);
    else {
        for (int l = 0; l < LANES && l < left; l++) some[l] = from[l * step];
        next = some; /* apart from `some` in memory: loads would wait for stores */
    }
    return __builtin_convertvector(next, reals);
}
/* The first `left` lanes, in parts whose sizes a compiler knows: some processors take long for masked stores. */
INLINE void write_some(operand *to, reals a, int64_t left) {
    operands all = __builtin_convertvector(a, operands), some = all; /* the whole vector stays in its register */
    if (left >= LANES) __builtin_memcpy(to, &all, sizeof all);
    else UNROLL for (int part = LANES / 2, done = 0; part > 0; part /= 2)
        if (left & part) {
            __builtin_memcpy(to + done, (const operand *)&some + done, (unsigned long)part * sizeof(operand));
            done += part;
        }
}

/* Number of vectors of a row, of which the last one overlaps the one before it, and the column of the k-th. */
INLINE int64_t vectors_of(int64_t width) { return (width + LANES - 1) / LANES; }
INLINE int64_t start_of(int64_t k, int64_t width) {
    int64_t last = width < LANES ? 0 : width - LANES;
    return k * LANES < last ? k * LANES : last;
}

/* A row of `width` entries from `count` that are `step` apart, further ones being `fill`; and entries from a row. */
INLINE void read_row(int64_t count, int64_t width, const operand *from, int64_t step, operand fill, operand *to) {
    for (int64_t j = 0; j < width && step == 1; j += LANES)
        write_some(to + j, read_some(from + j, 1, count - j, fill), width - j);
    for (int64_t j = 0; j < count && step != 1; j++) to[j] = from[j * step];
    for (int64_t j = count; j < width && step != 1; j++) to[j] = fill;
}
INLINE void write_row(int64_t count, const operand *from, int64_t step, operand *to) {
    if (step != 1) for (int64_t j = 0; j < count; j++) to[j * step] = from[j];
    else for (int64_t j = 0; j < count; j += LANES) write_some(to + j, read_some(from + j, 1, count - j, 0), count - j);
}
INLINE void clear(int64_t count, operand *to) {
    for (int64_t j = 0; j < count; j++) to[j] = 0;
}

/* Sets all lanes to the reduction by `f`, in rounds with the lanes a half, a quarter, ... of the vector away. */
#define REDUCE(a, f)                                                     \
    UNROLL for (int apart = LANES / 2; apart > 0; apart /= 2) {          \
        __typeof__(a) other;                                             \
        UNROLL for (int j = 0; j < LANES; j++) other[j] = a[j ^ apart];  \
        a = f(a, other);                                                 \
    }

/* Reductions of a vector. */
INLINE real largest(reals a) { REDUCE(a, larger); return a[0]; }
INLINE real least(reals a) { REDUCE(a, smaller); return a[0]; }
INLINE real total(reals a) { REDUCE(a, plus); return a[0]; }
INLINE whole highest(wholes a) { return __builtin_reduce_max(a); }
INLINE whole lowest(wholes a) { return __builtin_reduce_min(a); }
INLINE int any(wholes a) { return __builtin_reduce_or(a) != 0; }

/* The totals of LANES vectors in the lanes of one: each round merges halves of two vectors into one. */
INLINE reals total_of_each(reals *a) {
    UNROLL for (int apart = LANES / 2; apart > 0; apart /= 2)
        UNROLL for (int k = 0; k < apart; k++) {
            reals near, far;
            UNROLL for (int j = 0; j < LANES; j++) {
                near[j] = a[j & apart ? k + apart : k][j];
                far[j] = a[j & apart ? k + apart : k][j ^ apart];
            }
            a[k] = near + far;
        }
    return a[0];
}
