// The inner loops of decoding: few query heads against a stretch of context that is read once, at memory's speed. Lanes
// run over head_dim, so K and V are used as they lie in the pages.
#pragma once

#include "attention_tiles.h"

namespace kvmesh::attention {

constexpr int64_t PART = 256;  // tokens of context that are one piece of work, whatever the batch

// Sums of sixteen registers: lane i of the result is the sum of x[i].
inline __m512 sums16(__m512* x) {
  const __m512i one = _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
  const __m512i two = _mm512_setr_epi32(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  const __m512i four = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
  const __m512i eight = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  const auto fold = [x](int count, __m512i from, int apart) {
    const __m512i other = _mm512_add_epi32(from, _mm512_set1_epi32(apart));
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const __m512 a = x[2 * i], b = x[2 * i + 1];
      x[i] = _mm512_add_ps(_mm512_permutex2var_ps(a, from, b), _mm512_permutex2var_ps(a, other, b));
    }
  };
  fold(8, one, 1);
  fold(4, two, 2);
  fold(2, four, 4);
  fold(1, eight, 8);
  return x[0];
}

// Rows of K, then those of V, are asked for this many tokens before they are used: a page's rows of one head are too
// few for the hardware to foresee the next ones.
constexpr int64_t AHEAD = 48;

// s[g][t] = q[g]·rows[t] for t < n, and up to the next multiple of 16 (of the last token again); rows [n, 2n) are V's,
// AHEAD more what comes after them.// `words` is a multiple of 16.
template <typename E>
void row_scores(const float* q, int64_t group, const E* const* rows, int64_t n, int64_t words, float* s) {
  for (int64_t t = 0; t < n; t += 16) {
    const float* k[16];
    for (int i = 0; i < 16; i++) k[i] = reinterpret_cast<const float*>(rows[std::min(t + i, n - 1)]);
    int64_t next = t + AHEAD, line = 0;  // in the order of memory, so that the hardware sees a stream
    for (int64_t g = 0; g < group; g++) {
      __m512 acc[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < words; d += 16) {
        const __m512 qv = _mm512_load_ps(q + g * words + d);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) acc[i] = dot<E>(acc[i], qv, _mm512_loadu_ps(k[i] + d));
        if (g > 0) continue;
        for (int i = 0; i < 16; i++, line += 16) {
          if (line == words) next++, line = 0;
          _mm_prefetch(reinterpret_cast<const float*>(rows[std::min(next, 2 * n + AHEAD - 1)]) + line, _MM_HINT_T0);
        }
      }
      _mm512_store_ps(s + g * PART + t, sums16(acc));
    }
  }
}

// Scores become weights; answers the largest score (log2) and the sum of weights. s has room up to a multiple of 16.
inline void row_weights(float* s, int64_t n, Bend bend, float& top, float& sum) {
  __m512 most = _mm512_set1_ps(NEVER), total = _mm512_setzero_ps();
  for (int64_t t = 0; t < n; t += 16) {
    const __m512 x = _mm512_mask_mov_ps(_mm512_set1_ps(NEVER), first(n - t), bend(_mm512_load_ps(s + t)));
    _mm512_store_ps(s + t, x);
    most = _mm512_max_ps(most, x);
  }
  top = _mm512_reduce_max_ps(most);
  const __m512 base = _mm512_set1_ps(top);
  for (int64_t t = 0; t < n; t += 16) {
    const __m512 p = exp2(_mm512_sub_ps(_mm512_load_ps(s + t), base));
    _mm512_store_ps(s + t, p);
    total = _mm512_add_ps(total, p);
  }
  sum = _mm512_reduce_add_ps(total);
}

// o[g][d] = Σ s[g][t] v[t][d] for GT heads and 16 DV columns from d on.
template <typename E, int GT, int DV>
void row_values_tile(const float* s, const E* const* v, int64_t n, int64_t d, float* o, int64_t width) {
  __m512 acc[GT][DV];
  for (int g = 0; g < GT; g++)
    for (int c = 0; c < DV; c++) acc[g][c] = _mm512_setzero_ps();
  for (int64_t t = 0; t < n; t++) {
    const E* row = v[t] + d;
    const E* ahead = v[t + AHEAD] + d;
    for (int64_t c = 0; c < DV * 16; c += 64 / sizeof(E)) _mm_prefetch(ahead + c, _MM_HINT_T0);
    __m512 vv[DV];
#pragma GCC unroll 8
    for (int c = 0; c < DV; c++) vv[c] = load(row + c * 16);
#pragma GCC unroll 4
    for (int g = 0; g < GT; g++) {
      const __m512 p = _mm512_set1_ps(s[g * PART + t]);
#pragma GCC unroll 8
      for (int c = 0; c < DV; c++) acc[g][c] = _mm512_fmadd_ps(p, vv[c], acc[g][c]);
    }
  }
  for (int g = 0; g < GT; g++)
    for (int c = 0; c < DV; c++) _mm512_store_ps(o + g * width + d + c * 16, acc[g][c]);
}

template <typename E, int GT>
void row_values_heads(const float* s, const E* const* v, int64_t n, float* o, int64_t width) {
  int64_t d = 0;
  if constexpr (GT <= 2)
    for (; width - d >= 128; d += 128) row_values_tile<E, GT, 8>(s, v, n, d, o, width);
  for (; width - d >= 64; d += 64) row_values_tile<E, GT, 4>(s, v, n, d, o, width);
  for (; width - d >= 16; d += 16) row_values_tile<E, GT, 1>(s, v, n, d, o, width);
}

// The same for all heads of the group and all columns.
template <typename E>
void row_values(const float* s, int64_t group, const E* const* v, int64_t n, float* o, int64_t width) {
  int64_t g = 0;
  for (; group - g >= 4; g += 4) row_values_heads<E, 4>(s + g * PART, v, n, o + g * width, width);
  if (group - g == 3) row_values_heads<E, 3>(s + g * PART, v, n, o + g * width, width);
  if (group - g == 2) row_values_heads<E, 2>(s + g * PART, v, n, o + g * width, width);
  if (group - g == 1) row_values_heads<E, 1>(s + g * PART, v, n, o + g * width, width);
}

}  // namespace kvmesh::attention
