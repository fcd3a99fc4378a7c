/* Everything of a step but the matrix products and the attention of prompts; each number is read
   once.

   Compiled at first use (extensions/cpu/kernels.py), for one number format and one shape:

       ELEM_BF16           elements are bfloat16, else float; sums are float in both
       CACHE_INT8, _FP8    the cache is in 8 bits, with scales; else of elements (cache.h)
       HEAD_DIM D          with these three, paged attention is compiled too: the compiler
       GROUP    G          unrolls and vectorizes loops of known length
       BLOCK    P

   Names carry shapes as in the Python files: T tokens, S sequences, K key/value heads, G query
   heads of each, D head dim, R = D / 2, P slots of a block, B blocks of a table row. */

#include "cache.h"

/* ----------------------------------------------------------- between the matrix products */

/* Up to this many numbers are faster on one core: waking the others costs more. */
enum { FEW = 1 << 14 };

/* sum = x + residual (0 if NULL); out = sum, scaled to root mean square 1, times weight. */
void rms_norm(const elem *x_TE, const float *residual_TE, const elem *weight_E, float eps, int T,
              int E, float *sum_TE, elem *out_TE, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if ((int64_t)T * E > FEW)
    for (int t = 0; t < T; t++) {
        const elem *x = x_TE + (int64_t)t * E;
        float *sum = sum_TE + (int64_t)t * E, squares = 0;
        for (int e = 0; e < E; e++) {
            sum[e] = load(x[e]) + (residual_TE ? residual_TE[(int64_t)t * E + e] : 0);
            squares += sum[e] * sum[e];
        }
        float scale = 1 / sqrtf(squares / E + eps);
        for (int e = 0; e < E; e++)
            out_TE[(int64_t)t * E + e] = store(sum[e] * scale * load(weight_E[e]));
    }
}

/* SiLU of the first half of each row times the second: x / (1 + e^-x) * up. */
void silu_mul(const elem *gate_up_TF, int T, int F, elem *out_TF, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if ((int64_t)T * F > FEW)
    for (int t = 0; t < T; t++) {
        const elem *gate = gate_up_TF + (int64_t)t * 2 * F, *up = gate + F;
        for (int f = 0; f < F; f++) {
            float x = load(gate[f]), y = exp_(x < 0 ? x : -x); /* e^-|x| */
            float silu = x * (x < 0 ? y : 1) / (1 + y);
            out_TF[(int64_t)t * F + f] = store(silu * load(up[f]));
        }
    }
}

/* Rotate one head's pairs (r, r + R) by its token's angles. */
static inline void rotate(const elem *x, const float *cos, const float *sin, int R, elem *out) {
    for (int r = 0; r < R; r++) {
        float a = load(x[r]), b = load(x[r + R]);
        out[r] = store(a * cos[r] - b * sin[r]);
        out[r + R] = store(b * cos[r] + a * sin[r]);
    }
}

/* Rotate queries into out; rotate keys and write them, and the values, to their slots of the
   cache. Slot -1 writes nothing. A token's heads are D apart; the strides are between tokens.
   The scales are NULL unless the cache is in 8 bits. */
void rope_and_write(const elem *q, const elem *k, const elem *v, int64_t q_stride,
                    int64_t k_stride, int64_t v_stride, const float *cos_TR, const float *sin_TR,
                    const int64_t *slot_T, int T, int H, int K, int P, int D, cell *k_cache_NKPD,
                    cell *v_cache_NKPD, uint16_t *k_scale_NKP, uint16_t *v_scale_NKP,
                    elem *out_THD, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if ((int64_t)T * H * D > FEW)
    for (int t = 0; t < T; t++) {
        int R = D / 2;
        const float *cos = cos_TR + (int64_t)t * R, *sin = sin_TR + (int64_t)t * R;
        for (int h = 0; h < H; h++)
            rotate(q + t * q_stride + h * D, cos, sin, R, out_THD + ((int64_t)t * H + h) * D);
        if (slot_T[t] < 0) continue;
        for (int h = 0; h < K; h++) {
            elem rotated_D[D];
            int64_t row = (slot_T[t] / P * K + h) * P + slot_T[t] % P;
            rotate(k + t * k_stride + h * D, cos, sin, R, rotated_D);
            store_row(rotated_D, D, k_cache_NKPD + row * D, k_scale_NKP + row);
            store_row(v + t * v_stride + h * D, D, v_cache_NKPD + row * D, v_scale_NKP + row);
        }
    }
}

/* An integer for each number, in the same order, NaN last: the maximum of integers is vectorized. */
static inline int32_t order(elem x) {
    float f = load(x);
    int32_t bits;
    memcpy(&bits, &f, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* The ids of each row's k largest numbers, in no order; of equal ones the first. A run of 64
   whose largest is no larger than the smallest kept one is skipped: nearly all are. */
void top_ids(const elem *x_SV, int S, int V, int k, int64_t *ids_SX, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int s = 0; s < S; s++) {
        const elem *x_V = x_SV + (int64_t)s * V;
        int64_t *ids = ids_SX + (int64_t)s * k;
        for (int i = 0; i < k; i++) ids[i] = i;
        for (int worst = -1, run = 0; run < V; run += 64) {
            int end = run + 64 < V ? run + 64 : V;
            int32_t best = INT32_MIN;
            for (int v = run; v < end; v++) best = order(x_V[v]) > best ? order(x_V[v]) : best;
            for (int v = run > k ? run : k; v < end; v++) {
                if (worst < 0) /* of equal ones the last */
                    for (int i = worst = 0; i < k; i++)
                        worst = order(x_V[ids[i]]) <= order(x_V[ids[worst]]) ? i : worst;
                if (best <= order(x_V[ids[worst]])) break;
                if (order(x_V[v]) > order(x_V[ids[worst]])) ids[worst] = v, worst = -1;
            }
        }
    }
}

/* ------------------------------------------------------------------------- paged attention */

#ifdef HEAD_DIM
enum { D = HEAD_DIM, G = GROUP, P = BLOCK };

static inline void prefetch_row(const cell *row_D) {
    for (int d = 0; d < D; d += 64 / sizeof(cell)) __builtin_prefetch(row_D + d, 0, 2);
}

/* Attention of the G query heads of one KV head over positions start .. end - 1 of one sequence,
   block by block with an online softmax: out is the sum of the values so far, weighted by
   e^(score - max); it is scaled down when max grows. Nothing past `end` is read. */
static void attend(const elem *q_GD, Rows head, const int32_t *table_B, int block_rows, int start,
                   int end, float scale, elem *out_GD) {
    float q[G][D], out[G][D], score[G][P], max[G], sum[G];
    for (int g = 0; g < G; g++) {
        max[g] = -FLT_MAX, sum[g] = 0;
        for (int d = 0; d < D; d++) q[g][d] = load(q_GD[g * D + d]) * scale, out[g][d] = 0;
    }
    for (int b = start / P; b * P < end; b++) {
        int first = b * P < start ? start - b * P : 0, last = end - b * P < P ? end - b * P : P;
        int next = (b + 1) * P < end ? b + 1 : b; /* prefetched: blocks may lie anywhere */
        Rows here = rows_at(head, (int64_t)table_B[b] * block_rows, D);
        Rows there = rows_at(head, (int64_t)table_B[next] * block_rows, D);
        for (int p = first; p < last; p++) {
            prefetch_row(there.k + p * D);
            for (int g = 0; g < G; g++) {
                float dot = 0;
                for (int d = 0; d < D; d++) dot += q[g][d] * load_cell(here.k[p * D + d]);
                score[g][p] = dot * scale_of(here.k_scale, p);
            }
        }
        for (int g = 0; g < G; g++) {
            float old_max = max[g];
            for (int p = first; p < last; p++)
                max[g] = score[g][p] > max[g] ? score[g][p] : max[g];
            float shrink = exp_(old_max - max[g]);
            sum[g] *= shrink;
            for (int d = 0; d < D; d++) out[g][d] *= shrink;
            for (int p = first; p < last; p++) {
                score[g][p] = exp_(score[g][p] - max[g]);
                sum[g] += score[g][p];
                score[g][p] *= scale_of(here.v_scale, p);
            }
        }
        for (int p = first; p < last; p++) {
            prefetch_row(there.v + p * D);
            for (int g = 0; g < G; g++)
                for (int d = 0; d < D; d++)
                    out[g][d] += score[g][p] * load_cell(here.v[p * D + d]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d++) out_GD[g * D + d] = store(out[g][d] / sum[g]);
}

/* One query token of each of S sequences. token_S: its row of q and out; start_S, end_S: the
   positions that it sees. */
void paged_decode(const elem *q_THD, const cell *k_cache_NKPD, const cell *v_cache_NKPD,
                  const uint16_t *k_scale_NKP, const uint16_t *v_scale_NKP,
                  const int32_t *block_tables_SB, int B, const int64_t *token_S,
                  const int32_t *start_S, const int32_t *end_S, int S, int K, float scale,
                  elem *out_THD, int num_threads) {
    Rows cache = {k_cache_NKPD, v_cache_NKPD, k_scale_NKP, v_scale_NKP};
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int i = 0; i < S * K; i++) {
        int s = i / K, k = i % K;
        int64_t heads = (token_S[s] * K + k) * G * D;
        attend(q_THD + heads, rows_at(cache, k * P, D), block_tables_SB + (int64_t)s * B, K * P,
               start_S[s], end_S[s], scale, out_THD + heads);
    }
}
#endif
