/* What the KV cache holds: cells, which are elements, or numbers of 8 bits with a bfloat16 scale
   for each row of D. Rounding, LARGEST and SMALLEST_SCALE are those of
   extensions/quantized_cache.py. */

#pragma once
#include <float.h>

#include "elem.h"

#if defined CACHE_INT8 || defined CACHE_FP8
enum { IN_8_BITS = 1 };
#define SMALLEST_SCALE 1e-30
#ifdef CACHE_INT8
#define LARGEST 127
typedef int8_t cell;
static inline float load_cell(cell x) { return x; }
static inline cell store_cell(float f) { return (cell)floorf(f + 0.5f); }
#else
#define LARGEST 448
typedef uint8_t cell; /* e4m3: a float's sign, lowest 4 bits of exponent, highest 3 of mantissa */
static inline float load_cell(cell x) {
    uint32_t bits = (uint32_t)(x & 0x80) << 24 | (uint32_t)(x & 0x7f) << 20;
    float f;
    memcpy(&f, &bits, 4);
    return f * 0x1p120f; /* the difference of the exponents' biases; right for subnormals too */
}
static inline cell store_cell(float f) { /* to the nearest, ties to even */
    float small = f * 0x1p-120f;
    uint32_t bits;
    memcpy(&bits, &small, 4);
    uint32_t rounded = ((bits & 0x7fffffff) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
    return (bits >> 24 & 0x80) | rounded;
}
#endif
static inline float clamp(float f, float most) { return f > most ? most : f < -most ? -most : f; }

/* Store a row of D elements: its cells and its scale. A row with a NaN or an infinity gets the
   scale NaN and cells of 0, so that it is read as NaN. */
static inline void store_row(const elem *x_D, int d_end, cell *cell_D, uint16_t *scale) {
    float largest = 0;
    int is_finite = 1;
    for (int d = 0; d < d_end; d++) {
        float size = fabsf(load(x_D[d]));
        largest = size > largest ? size : largest;
        is_finite &= size <= FLT_MAX;
    }
    float smallest = SMALLEST_SCALE, wanted = largest / LARGEST;
    *scale = is_finite ? to_bf16(wanted > smallest ? wanted : smallest) : 0x7fc0;
    float by = from_bf16(*scale);
    for (int d = 0; d < d_end; d++)
        cell_D[d] = is_finite ? store_cell(clamp(load(x_D[d]) / by, LARGEST)) : 0;
}
#else
enum { IN_8_BITS = 0 };
typedef elem cell;
static inline float load_cell(cell x) { return load(x); }
static inline void store_row(const elem *x_D, int d_end, cell *cell_D, uint16_t *scale) {
    (void)scale;
    memcpy(cell_D, x_D, d_end * sizeof(elem));
}
#endif

/* A cache from some row on; without 8 bits the scales are NULL. */
typedef struct {
    const cell *k, *v;
    const uint16_t *k_scale, *v_scale;
} Rows;

static inline Rows rows_at(Rows cache, int64_t row, int d_end) {
    cache.k += row * d_end, cache.v += row * d_end;
    if (IN_8_BITS) cache.k_scale += row, cache.v_scale += row;
    return cache;
}

/* The factor of row p's numbers. */
static inline float scale_of(const uint16_t *scale_P, int p) {
    return IN_8_BITS ? from_bf16(scale_P[p]) : 1;
}
