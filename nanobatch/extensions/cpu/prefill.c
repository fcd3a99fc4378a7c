/* Attention of prompts over the paged cache, in bfloat16 on AMX tiles (flash attention).

   Compiled for one HEAD_DIM, GROUP of query heads a KV head, BLOCK of slots, and MAX_ROWS.

   A piece of work is one KV head and some neighbouring tokens of one sequence. Its rows, at most
   ROWS, are the G query heads of the first token, then those of the next. KEYS keys and values at
   a time are copied out of their blocks, into the order in which tiles read them (those of 8 bits
   times their scales). Then, for every 16 rows:

       scores  = q * keys^T          products, 32 keys at a time
       weights = e^(scores - max)    in bfloat16; earlier sums are scaled down when max grows
       out    += weights * values    products

   The exponentials take most of the time. Nothing past a sequence's end is read. */

#include "cache.h"
#include "tiles.h"

enum { D = HEAD_DIM, G = GROUP, P = BLOCK, ROWS = MAX_ROWS, KEYS = 256 };

typedef struct {
    float max[ROWS], sum[ROWS], out[ROWS][D], scores[SIDE][KEYS];
    elem q[ROWS][D], weights[SIDE][KEYS], keys[KEYS * D], values[KEYS * D];
} Work;

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

/* ----------------------------------------------------------------- keys and values to tiles */

/* Eight elements of each of the rows i, i + 4, i + 8, i + 12. */
static inline __m512i quarters(const elem *const *row, int i, int d) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[i] + d)));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(row[i + 4] + d)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(row[i + 8] + d)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(row[i + 12] + d)), 3);
}

/* 16 keys as D / 32 tiles B: pairs of d x keys. Pairs are transposed as if they were floats. */
static inline void pack_keys(const elem *const *row, elem *out) {
    for (int d = 0; d < D; d += 8, out += 4 * 32) {
        __m512i a = quarters(row, 0, d), b = quarters(row, 1, d);
        __m512i c = quarters(row, 2, d), e = quarters(row, 3, d);
        __m512i ab = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
        __m512i ce = _mm512_unpacklo_epi32(c, e), ce_high = _mm512_unpackhi_epi32(c, e);
        _mm512_store_si512(out, _mm512_unpacklo_epi64(ab, ce));
        _mm512_store_si512(out + 32, _mm512_unpackhi_epi64(ab, ce));
        _mm512_store_si512(out + 64, _mm512_unpacklo_epi64(ab_high, ce_high));
        _mm512_store_si512(out + 96, _mm512_unpackhi_epi64(ab_high, ce_high));
    }
}

/* 16 values as half of D / 16 tiles B: pairs of values x 16 of their elements. */
static inline void pack_values(const elem *const *row, elem *out) {
    static const uint16_t order[64] __attribute__((aligned(64))) = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (int pair = 0; pair < SIDE / 2; pair++, out += 32)
        for (int d = 0; d < D; d += 32) {
            __m512i a = _mm512_loadu_si512(row[2 * pair] + d);
            __m512i b = _mm512_loadu_si512(row[2 * pair + 1] + d);
            _mm512_store_si512(out + d / 16 * TILE, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(out + d / 16 * TILE + TILE, _mm512_permutex2var_epi16(a, high, b));
        }
}

/* A row of the cache as elements: in place, or converted into `made` if it is in 8 bits. */
static inline const elem *row_of(const cell *cell_D, const uint16_t *scale, elem *made) {
    if (!IN_8_BITS) return (const elem *)cell_D;
    for (int d = 0; d < D; d++) made[d] = store(load_cell(cell_D[d]) * from_bf16(*scale));
    return made;
}

/* Copy positions start .. end - 1 of one head, padded with zeros to a multiple of 32. */
static void pack(Rows head, const int32_t *table_B, int block_rows, int start, int end,
                 Work *w) {
    static const elem zeros[D];
    for (int i = 0; i < end - start || i % STEP != 0; i += SIDE) {
        const elem *k[SIDE], *v[SIDE];
        elem made[2][SIDE][D];
        for (int j = 0; j < SIDE; j++) {
            int position = start + i + j;
            k[j] = v[j] = zeros;
            if (position >= end) continue;
            Rows here = rows_at(head, (int64_t)table_B[position / P] * block_rows, D);
            here = rows_at(here, position % P, D);
            k[j] = row_of(here.k, here.k_scale, made[0][j]);
            v[j] = row_of(here.v, here.v_scale, made[1][j]);
        }
        pack_keys(k, w->keys + i * D);
        pack_values(v, w->values + i / STEP * STEP * D + i % STEP / 2 * 32);
    }
}

/* ------------------------------------------------ 16 rows over the packed keys from .. to - 1 */

static inline void score(Work *w, int row, int from, int to) {
    for (int key = from; key < to; key += STEP) {
        const elem *keys = w->keys + key * D;
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < D; d += STEP, keys += TILE) {
            _tile_loadd(4, &w->q[row][d], D * sizeof(elem));
            _tile_loadd(6, keys, 64);
            _tile_loadd(7, keys + SIDE * D, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, &w->scores[0][key], KEYS * sizeof(float));
        _tile_stored(1, &w->scores[0][key + SIDE], KEYS * sizeof(float));
    }
}

/* Which of 16 keys from `key` on lie in low .. high - 1. */
static inline __mmask16 seen(int key, int low, int high) {
    __m512i i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    i = _mm512_add_epi32(i, _mm512_set1_epi32(key - low));
    return _mm512_cmplt_epu32_mask(i, _mm512_set1_epi32(most(high - low, 0)));
}

/* Turn scores into weights; row i sees the keys low[i] .. high[i] - 1. */
static inline void weigh(Work *w, int row, int from, int to, const int *low, const int *high,
                         float scale) {
    float top[SIDE] __attribute__((aligned(64))), total[SIDE] __attribute__((aligned(64)));
    for (int i = 0; i < SIDE; i++) {
        __m512 best = _mm512_set1_ps(-FLT_MAX);
        for (int key = from; key < to; key += SIDE)
            best = _mm512_mask_max_ps(best, seen(key, low[i], high[i]),
                                      _mm512_load_ps(&w->scores[i][key]), best);
        top[i] = _mm512_reduce_max_ps(best) * scale;
    }
    __m512 old = _mm512_load_ps(&w->max[row]);
    __m512 new = _mm512_max_ps(_mm512_load_ps(top), old), shrink = exp_16(old - new);
    _mm512_store_ps(&w->max[row], new);
    for (int i = 0; i < SIDE; i++) {
        __m512 sum = _mm512_setzero_ps(), max = _mm512_set1_ps(w->max[row + i]);
        for (int key = from; key < to; key += STEP) {
            __m512 a = exp_16(_mm512_load_ps(&w->scores[i][key]) * scale - max);
            __m512 b = exp_16(_mm512_load_ps(&w->scores[i][key + SIDE]) * scale - max);
            a = _mm512_maskz_mov_ps(seen(key, low[i], high[i]), a);
            b = _mm512_maskz_mov_ps(seen(key + SIDE, low[i], high[i]), b);
            sum += a + b;
            store_pair(&w->weights[i][key], a, b);
        }
        total[i] = _mm512_reduce_add_ps(sum);
    }
    __m512 sums = _mm512_load_ps(&w->sum[row]) * shrink + _mm512_load_ps(total);
    _mm512_store_ps(&w->sum[row], sums);
    for (int i = 0; i < SIDE; i++)
        for (int d = 0; d < D; d++) w->out[row + i][d] *= shrink[i];
}

static inline void add_values(Work *w, int row, int from, int to) {
    for (int d = 0; d < D; d += 32) {
        _tile_loadd(0, &w->out[row][d], D * sizeof(float));
        _tile_loadd(1, &w->out[row][d + SIDE], D * sizeof(float));
        for (int key = from; key < to; key += STEP) {
            const elem *values = w->values + key * D + d / SIDE * TILE;
            _tile_loadd(4, &w->weights[0][key], KEYS * sizeof(elem));
            _tile_loadd(6, values, 64);
            _tile_loadd(7, values + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, &w->out[row][d], D * sizeof(float));
        _tile_stored(1, &w->out[row][d + SIDE], D * sizeof(float));
    }
}

/* ------------------------------------------------------------------------------------ a piece */

/* Attention of `num` tokens, the first at `position`. q and out begin at the first token's first
   head; tokens are H * D apart. window: keys that a query sees; 0: all before it. */
static void attend(const elem *q, Rows head, const int32_t *table_B, int block_rows, int position,
                   int num, int H, int window, float scale, elem *out, Work *w) {
    int rows = num * G, end = position + num;
    int filled = (rows + SIDE - 1) / SIDE * SIDE; /* always 16 rows at a time */
    memset(w->q[rows], 0, (filled - rows) * sizeof w->q[0]);
    memset(w->out, 0, filled * sizeof w->out[0]);
    for (int i = 0; i < filled; i++) w->max[i] = -FLT_MAX, w->sum[i] = 0;
    for (int t = 0; t < num; t++)
        memcpy(w->q[t * G], q + (int64_t)t * H * D, G * D * sizeof(elem));
    for (int start = window ? most(0, position - window + 1) : 0; start < end; start += KEYS) {
        int stop = least(end, start + KEYS);
        pack(head, table_B, block_rows, start, stop, w);
        for (int row = 0; row < rows; row += SIDE) {
            int low[SIDE], high[SIDE]; /* what each row sees of these keys */
            for (int i = 0; i < SIDE; i++) {
                int at = position + least(row + i, rows - 1) / G;
                high[i] = least(at + 1, stop) - start;
                low[i] = window ? most(0, at - window + 1 - start) : 0;
            }
            int from = low[0] / STEP * STEP, to = (high[SIDE - 1] + STEP - 1) / STEP * STEP;
            if (from >= to) continue;
            score(w, row, from, to);
            weigh(w, row, from, to, low, high, scale);
            add_values(w, row, from, to);
        }
    }
    for (int row = 0; row < rows; row++) {
        float share = 1 / w->sum[row];
        elem *to = out + (int64_t)(row / G) * H * D + row % G * D;
        for (int d = 0; d < D; d++) to[d] = store(w->out[row][d] * share);
    }
}

/* piece_I4: sequence, first token, number of tokens (G times that is at most ROWS), and the
   first's position. */
void paged_prefill(const elem *q_THD, const cell *k_cache_NKPD, const cell *v_cache_NKPD,
                   const uint16_t *k_scale_NKP, const uint16_t *v_scale_NKP,
                   const int32_t *block_tables_SB, int B, const int32_t *piece_I4, int I, int K,
                   int window, float scale, elem *out_THD, int num_threads) {
    Rows cache = {k_cache_NKPD, v_cache_NKPD, k_scale_NKP, v_scale_NKP};
#pragma omp parallel num_threads(num_threads)
    {
        Work work __attribute__((aligned(64)));
        configure(SIDE, 0);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < I * K; i++) {
            const int32_t *piece = piece_I4 + i / K * 4;
            int k = i % K, H = K * G;
            int64_t at = ((int64_t)piece[1] * H + k * G) * D;
            attend(q_THD + at, rows_at(cache, k * P, D), block_tables_SB + (int64_t)piece[0] * B,
                   K * P, piece[3], piece[2], H, window, scale, out_THD + at, &work);
        }
        _tile_release();
    }
}
