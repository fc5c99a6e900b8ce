/* Flush to zero: while it is set, a result below the least normal number becomes 0. Some processors take 150 cycles for
   an operation with a denormal operand or result. Products of messages and sources are such numbers wherever emissions
   are sharp, and most of them are negligible.

   It is set only while expected counts and posteriors are added up, whose contract allows c 2^-26 of the weight for
   what is flushed, and only if weights are neither tiny nor far apart, see are_ordinary. An exact 0 among the sums U
   means that no path leads to a state: sums are computed in the caller's mode, unless a comment proves them normal.

   x86-64 flushes results (bit 15 of MXCSR; operands only with bit 6, which is left to the caller). aarch64 flushes both
   (bit 24 of FPCR): what is compared with 0 is hence compared as an integer, see is_zero; build.py tells the compiler
   that the mode is dynamic, or it would turn that into a comparison of floats. */
#pragma once
#include "vector.h"

#if defined(__x86_64__)
typedef uint32_t Mode;
INLINE Mode mode_now(void) { Mode mode; __asm__ volatile("stmxcsr %0" : "=m"(mode)); return mode; }
/* No compiler moves this across reads and writes of memory. */
INLINE void load_mode(Mode mode) { __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
/* Keeps the marks of exceptions. */
INLINE void set_mode(Mode mode) {
    Mode marks = 0x3f;
    load_mode((mode & ~marks) | (mode_now() & marks));
}
enum { FLUSH = 1 << 15, ANY_FLUSH = 1 << 15 | 1 << 6 };
#elif defined(__aarch64__)
typedef uint64_t Mode;
INLINE Mode mode_now(void) { Mode mode; __asm__ volatile("mrs %0, fpcr" : "=r"(mode)); return mode; }
INLINE void load_mode(Mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
INLINE void set_mode(Mode mode) { load_mode(mode); }
enum { FLUSH = 1 << 24, ANY_FLUSH = 1 << 24 };
#else
#error "flush to zero: expected x86-64 or aarch64"
#endif

/* Sets flush to zero on this thread, unless weights are not `ordinary`; the mode before, for set_mode. */
INLINE Mode flush_to_zero(int ordinary) {
    Mode before = mode_now();
    if (ordinary) load_mode(before | FLUSH);
    return before;
}

/* Whether what is flushed is negligible for nonzero weights from `least` to `most`; also where there are none. Sources
   of counts.h, divided by `most`, then keep GUARD bits even for the least weight. */
INLINE int are_ordinary(double least, double most) {
    return least >= 0x1p-60 && least >= most * 0x1p-30;
}

/* The same row, which is read after the mode has been set. */
INLINE reals read_now(reals a) { __asm__ volatile("" : "+m"(a)); return a; }

/* Whether entries are 0, of either sign, in every mode. */
INLINE wholes is_zero(reals a) { return (wholes)((naturals)a << 1) == 0; }
