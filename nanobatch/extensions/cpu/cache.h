/* What the KV cache holds for the CPU's kernels: cells, elements or numbers of 8 bits with a
   bfloat16 scale for each row of D (extensions/quantized_cache.py, whose rounding, LARGEST and SMALLEST_SCALE
   these are). */

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
    return f * 0x1p120f; /* the exponents count from others; small numbers come out right too */
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

/* A row of D elements into its cells and its scale. A row with NaN or infinity is read as such:
   its scale is none, and its cells are 0. */
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

/* Rows of a cache from some row on; the scales are NULL but in 8 bits. */
typedef struct {
    const cell *k, *v;
    const uint16_t *k_scale, *v_scale;
} Rows;

static inline Rows rows_at(Rows cache, int64_t row, int d_end) {
    cache.k += row * d_end, cache.v += row * d_end;
    if (IN_8_BITS) cache.k_scale += row, cache.v_scale += row;
    return cache;
}

/* What row p's numbers are to be multiplied by. */
static inline float scale_of(const uint16_t *scale_P, int p) {
    return IN_8_BITS ? from_bf16(scale_P[p]) : 1;
}
