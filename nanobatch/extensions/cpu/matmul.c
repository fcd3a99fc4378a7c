/* x [M, K] times the transpose of a weight [N, K], in bfloat16 on AMX, Intel's tile unit.

   A decode step reads every weight once for a few rows, so memory bandwidth is the limit. The
   weights lie in memory in the order in which they are read: panels of 32 columns n, each a
   sequence of steps of 32 k, each step two tiles B (CpuMatmul.pack).

   Sums of 32 rows by 32 columns are computed at a time: 4 tiles C, 2 A and 2 B, which is all 8
   tiles. With up to FEW rows all rows go through one panel before the next; each pass prefetches
   its share of the next panel. With more rows, GROUP bytes of panels stay in a core's L2 cache,
   and each 32 rows go through all of them, so that out is written row by row.

   Up to MANY rows: each core computes a range of columns. (Panels dealt out in turn made a
   64-row product a third slower: cores that write to neighbouring cache lines take them from
   each other.) More rows: each core computes a range of rows, the same one in every product and
   norm, so that they stay in its cache. */

#include <omp.h>

#include "tiles.h"

enum { FEW = 128, MANY = 256, GROUP = 1 << 19 };

typedef float block[2][2][SIDE][SIDE]; /* upper and lower rows, left and right columns */

/* The sums of a panel's 32 columns for up to 32 rows. Each step prefetches `lines` of 64 bytes
   from `ahead`. */
static inline void multiply(const elem *x, const elem *panel, int K, int lower,
                            const elem *ahead, int lines, block sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < K; k += STEP, panel += 2 * TILE) {
        for (int i = 0; i < lines; i++, ahead += 64 / sizeof(elem))
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
        _tile_loadd(4, x + k, K * sizeof(elem));
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + TILE, 64);
        if (lower) _tile_loadd(5, x + (int64_t)SIDE * K + k, K * sizeof(elem));
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (lower) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

/* The form in which sums are written. */
enum { BFLOAT16, FLOAT, GATED };

/* Write a block, plus bias, to its place in out; rows of out are `stride` elements apart. */
static inline void write_out(block sums, int rows, const elem *bias, int form, void *out,
                             int64_t stride) {
    __m512 left_bias = _mm512_setzero_ps(), right_bias = left_bias;
    if (bias) {
        __m512i both = _mm512_loadu_si512(bias);
        left_bias = widen(_mm512_castsi512_si256(both));
        right_bias = widen(_mm512_extracti64x4_epi64(both, 1));
    }
    for (int row = 0; row < rows; row++) {
        __m512 left = _mm512_load_ps(sums[row / SIDE][0][row % SIDE]) + left_bias;
        __m512 right = _mm512_load_ps(sums[row / SIDE][1][row % SIDE]) + right_bias;
        elem *to = (elem *)out + row * stride * (form == FLOAT ? 2 : 1);
        if (form == FLOAT) {
            _mm512_storeu_ps(to, left);
            _mm512_storeu_ps((float *)to + SIDE, right);
        } else if (form == GATED)
            _mm256_storeu_si256((__m256i *)to, narrow(left / (1 + exp_16(-left)) * right));
        else
            store_pair(to, left, right);
    }
}

/* out [M, N] of float or bfloat16, or GATED, bfloat16 [M, N / 2]: of each 32 columns the SiLU
   of the first 16 times the others. N and K are multiples of 32; bias_N may be NULL. */
void matmul(const elem *x_MK, const elem *packed, const elem *bias_N, int M, int N, int K,
            int form, void *out_MN, int num_threads) {
    int panel_bytes = 32 * K * sizeof(elem), many = GROUP < panel_bytes ? 1 : GROUP / panel_bytes;
    int group = 32 * (M <= FEW ? 1 : many), by_rows = M > MANY;
    int passes = (M + 31) / 32, lines = M <= FEW ? (32 + passes - 1) / passes : 0;
    int64_t stride = form == GATED ? N / 2 : N, panel_out = (form == GATED ? 16 : 32);
    panel_out *= form == FLOAT ? sizeof(float) : sizeof(elem);
#pragma omp parallel num_threads(num_threads)
    {
        block sums __attribute__((aligned(64)));
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads(), configured = 0;
        int64_t shares = by_rows ? (M + 31) / 32 : N / 32; /* 32 rows or columns each */
        int from = shares * me / all * 32, to = shares * (me + 1) / all * 32;
        int m_start = by_rows ? from : 0, m_end = by_rows && to < M ? to : M;
        int n_start = by_rows ? 0 : from, n_end = by_rows ? N : to;
        for (int first = n_start; first < n_end; first += group)
            for (int m = m_start; m < m_end; m += 2 * SIDE) {
                int rows = m_end - m < 2 * SIDE ? m_end - m : 2 * SIDE;
                int upper = rows < SIDE ? rows : SIDE, lower = rows - upper;
                if (rows != configured) configure(upper, lower), configured = rows;
                for (int n = first; n < first + group && n < n_end; n += 32) {
                    const elem *panel = packed + (int64_t)n * K;
                    const elem *ahead = panel + 32 * K + m / 32 * lines * K;
                    multiply(x_MK + (int64_t)m * K, panel, K, lower, ahead, lines, sums);
                    int64_t at = ((int64_t)m * (N / 32) + n / 32) * panel_out;
                    write_out(sums, rows, bias_N ? bias_N + n : NULL, form,
                              (char *)out_MN + at, stride);
                }
            }
        _tile_release();
    }
}
