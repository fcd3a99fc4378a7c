/* x [M, K] times the transpose of a weight [N, K], in bfloat16 on AMX, Intel's tile unit.

   A step that decodes reads every weight once for a few rows. So the memory sets the pace, and
   the weights lie in memory in the very order in which they are read: panels of 32 columns n,
   each a run of steps of 32 k, each two tiles B (CpuMatmul.pack).

       tile A, 1 KiB: 16 rows m x 32 k, read where they lie in x
       tile B, 1 KiB: 16 pairs of k x 16 columns n x the two of the pair
       tile C, 1 KiB: 16 rows m x 16 columns n of float sums; C += A * B

   32 rows by 32 columns are summed at a time: with 4 C, 2 A and 2 B these are all 8 tiles there
   are. A panel (36 KiB for K = 576) stays in the nearest cache while CHUNK rows pass by it. */

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu_elem.h"

enum { SIDE = 16, STEP = 32, TILE = 512, AHEAD = 8, CHUNK = 512 };

/* Asks Linux for the tile registers; 0 if they are to be had. */
int matmul_init(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

/* Tiles 0 to 3 are C, 4 and 5 A, 6 and 7 B. A and C have `upper` rows and, below them, `lower`. */
static void configure(int upper, int lower) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    int rows[8] = {upper, upper, lower, lower, upper, lower, SIDE, SIDE};
    for (int i = 0; i < 8; i++) config.rows[i] = rows[i], config.bytes[i] = rows[i] ? 64 : 0;
    _tile_loadconfig(&config);
}

/* The sums of a panel's 32 columns for up to 32 rows; is_first: it comes from memory. */
static inline void multiply(const elem *x, const elem *panel, int K, int lower, int is_first,
                            float c[4][SIDE][SIDE]) {
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < K; k += STEP, panel += 2 * TILE) {
        for (int i = 0; is_first && i < 2 * TILE; i += 64 / sizeof(elem)) /* ask in time */
            _mm_prefetch((const char *)(panel + AHEAD * 2 * TILE + i), _MM_HINT_T0);
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
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    if (lower) {
        _tile_stored(2, c[2], 64);
        _tile_stored(3, c[3], 64);
    }
}

/* out [M, N], float or bfloat16; N and K multiples of 32; bias_N may be NULL. */
void matmul(const elem *x_MK, const elem *packed, const elem *bias_N, int M, int N, int K,
            int is_float, void *out_MN, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        float c[4][SIDE][SIDE] __attribute__((aligned(64)));
        int configured = 0;
        for (int chunk = 0; chunk < M; chunk += CHUNK)
#pragma omp for schedule(dynamic) nowait
            for (int n = 0; n < N; n += 32) {
                int end = M - chunk < CHUNK ? M : chunk + CHUNK;
                for (int m = chunk; m < end; m += 2 * SIDE) {
                    int rows = end - m < 2 * SIDE ? end - m : 2 * SIDE;
                    int upper = rows < SIDE ? rows : SIDE, lower = rows - upper;
                    if (rows != configured) configure(upper, lower), configured = rows;
                    multiply(x_MK + (int64_t)m * K, packed + (int64_t)n * K, K, lower,
                             m == chunk, c);
                    for (int i = 0; i < 2 * rows; i++) { /* half a row of 32 each */
                        int row = i / 2, half = i % 2;
                        __m512 sum = _mm512_load_ps(c[row / SIDE * 2 + half][row % SIDE]);
                        int64_t column = n + half * SIDE, at = (int64_t)(m + row) * N + column;
                        if (bias_N) {
                            const __m256i *bias = (const __m256i *)(bias_N + column);
                            sum += _mm512_cvtpbh_ps((__m256bh)_mm256_loadu_si256(bias));
                        }
                        if (is_float)
                            _mm512_storeu_ps((float *)out_MN + at, sum);
                        else
                            _mm256_storeu_si256((__m256i *)((elem *)out_MN + at),
                                                (__m256i)_mm512_cvtneps_pbh(sum));
                    }
                }
            }
        _tile_release();
    }
}
