/* Shared by the CPU's kernels: elements, and e^x.

   Elements are bfloat16 if ELEM_BF16 is defined, else float; sums are float in both. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

/* bfloat16 is the upper half of a float. */
static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint16_t to_bf16(float f) { /* to the nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    int is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return is_nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#ifdef ELEM_BF16
typedef uint16_t elem;
static inline float load(elem x) { return from_bf16(x); }
static inline elem store(float f) { return to_bf16(f); }
#else
typedef float elem;
static inline float load(elem x) { return x; }
static inline elem store(float f) { return f; }
#endif

/* e^x for x < 88, so that the compiler can vectorize it: 2^(n + f) by the bits of n and a
   polynomial for f in [-1/2, 1/2], to 2e-7 of it. */
static inline float exp_(float x) {
    float y = x * 1.44269504f;
    y = y < -126 ? -126 : y;
    float n = rintf(y), f = y - n;
    float p = 1 + f * (0.693147180f + f * (0.240226507f + f * (0.0555041087f +
              f * (0.00961812911f + f * (0.00133335581f + f * 0.000154035304f)))));
    int32_t bits, exponent = (int32_t)n;
    memcpy(&bits, &p, 4);
    bits += (uint32_t)exponent << 23;
    memcpy(&p, &bits, 4);
    return p;
}
