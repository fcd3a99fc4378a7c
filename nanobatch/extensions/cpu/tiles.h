/* AMX, Intel's tile unit: eight tiles, each up to 16 rows of 64 bytes.

   C += A * B, with a C of 16 x 16 floats and bfloat16 in A and B, 1 KiB each:

       A    16 rows m x 32 k, as they lie in memory
       B    16 pairs of k x 16 columns n x the two of the pair
       C    16 rows m x 16 columns n */

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "elem.h"

enum { SIDE = 16, STEP = 32, TILE = 512 }; /* rows; elements of a row of A; of a tile */

/* Ask Linux for the tile registers; returns 0 if the process may use them. */
int tiles_init(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

/* Tiles 0 to 3 are C, 4 and 5 A, 6 and 7 B. 0, 1, 4 have `upper` rows, 2, 3, 5 `lower`. */
static void configure(int upper, int lower) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    int rows[8] = {upper, upper, lower, lower, upper, lower, SIDE, SIDE};
    for (int i = 0; i < 8; i++) config.rows[i] = rows[i], config.bytes[i] = rows[i] ? 64 : 0;
    __asm__ volatile("" ::"r"(&config) : "memory"); /* gcc sees 8 of its 64 bytes used */
    _tile_loadconfig(&config);
}

static inline __m512 widen(__m256i x) { return _mm512_cvtpbh_ps((__m256bh)x); }

static inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

/* 32 bfloat16 of twice 16 floats. */
static inline void store_pair(elem *out, __m512 left, __m512 right) {
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

/* e^x as exp_ has it, for 16 at once and to 4e-5 of it: bfloat16 has 4e-3. */
static inline __m512 exp_16(__m512 x) {
    __m512 y = x * 1.44269504f, n = _mm512_roundscale_ps(y, 0), f = y - n;
    __m512 p = 1 + f * (0.693147180f + f * (0.240226507f + f * (0.0555041087f +
               f * 0.00961812911f)));
    return _mm512_scalef_ps(p, n);
}
