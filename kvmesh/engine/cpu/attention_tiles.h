// The inner loops of attention over pages, on tiles that fit the first caches. Everything is counted in words of four
// bytes: one float, or two bfloat16 that VDPBF16PS multiplies and adds as a pair.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "vec.h"

namespace kvmesh::attention {

constexpr int64_t TILE = 120;  // tokens of context that a block of queries meets at once, a multiple of SIX
constexpr int SIX = 6;         // tokens, or rows, by four registers of the other: their sums fill 24 registers
constexpr int64_t ROWS = 64;   // (query, head) pairs of such a block
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

template <typename E>
constexpr int64_t PACK = 4 / sizeof(E);  // elements in a word

// acc + a·b over the elements of each word.
template <typename E>
inline __m512 dot(__m512 acc, __m512 a, __m512 b) {
  if constexpr (std::is_same_v<E, float>) {
    return _mm512_fmadd_ps(a, b, acc);
  } else {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
}

// 2^x to 2e-8 of the result before rounding; 0 below -200, NaN stays. The polynomial is a weighted least squares fit of
// 2^f over [-1/2, 1/2], weights raised where the relative error was largest.
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // in this order: of a number and NaN, MAXPS answers the second
  const __m512 n = _mm512_roundscale_ps(x, 0);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.534581097e-04f);
  for (const float c : {1.339993090e-03f, 9.618489072e-03f, 5.550328642e-02f, 2.402264625e-01f, 6.931471825e-01f, 1.0f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

// 2^x to 3e-6 of the result, for weights that bfloat16 will hold; 0 below -125. Half of the work is integer additions,
// which run beside the multiplications. Fitted as above.
inline __m512 exp2_short(__m512 x) {
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  const __m512 shift = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to an integer
  const __m512 n = _mm512_add_ps(x, shift);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(n, shift));
  __m512 y = _mm512_set1_ps(9.570079856e-03f);
  for (const float c : {5.591783673e-02f, 2.402474433e-01f, 6.931217909e-01f, 9.999992847e-01f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(some, _mm512_castps_si512(y), power));
}

// What a raw product becomes before the softmax, in units of log2: q·k * scale, bent towards ±softcap.
struct Bend {
  float scale, softcap;

  __m512 operator()(__m512 s) const {
    if (softcap == 0.0f) return _mm512_mul_ps(s, _mm512_set1_ps(scale * LOG2E));
    const __m512 e = exp2(_mm512_mul_ps(s, _mm512_set1_ps(2.0f * LOG2E * scale / softcap)));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
    return _mm512_mul_ps(tanh, _mm512_set1_ps(softcap * LOG2E));
  }
};

// ---- A block of queries: rows are lanes, so that nothing is ever summed across a register. ----

// s[t][row] = k[t]·q[row] and most[row], the largest of these; q [depth][16 MV] words, s [n + SIX][16 MV]. The `next`
// rows of K and V that follow the n are fetched meanwhile.
template <typename E, int MV>
void block_scores(const float* q, const E* const* k, const E* const* v, int64_t n, int64_t next, int64_t depth,
                  float* s, __m512* most) {
  constexpr int NR = SIX;
  for (int m = 0; m < MV; m++) most[m] = _mm512_set1_ps(NEVER);
  for (int64_t t = 0; t < n; t += NR) {
    __m512 acc[NR][MV];
    const float* rows[NR];
    for (int r = 0; r < NR; r++) {
      rows[r] = reinterpret_cast<const float*>(k[std::min(t + r, n - 1)]);
      for (int m = 0; m < MV; m++) acc[r][m] = _mm512_setzero_ps();
    }
    for (int64_t r = t; r < std::min(t + NR, next); r++) {
      for (int64_t d = 0; d < depth; d += 16) {
        _mm_prefetch(reinterpret_cast<const float*>(k[n + r]) + d, _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const float*>(v[n + r]) + d, _MM_HINT_T1);
      }
    }
    for (int64_t d = 0; d < depth; d++) {
      __m512 qv[MV];
#pragma GCC unroll 4
      for (int m = 0; m < MV; m++) qv[m] = _mm512_load_ps(q + (d * MV + m) * 16);
#pragma GCC unroll 6
      for (int r = 0; r < NR; r++) {
        const __m512 kv = _mm512_set1_ps(rows[r][d]);
#pragma GCC unroll 4
        for (int m = 0; m < MV; m++) acc[r][m] = dot<E>(acc[r][m], kv, qv[m]);
      }
    }
    for (int r = 0; r < NR; r++) {
      for (int m = 0; m < MV; m++) {
        _mm512_store_ps(s + ((t + r) * MV + m) * 16, acc[r][m]);
        most[m] = _mm512_max_ps(most[m], acc[r][m]);
      }
    }
  }
}

// Words of two bfloat16 each, `low` in the lower halves.
inline __m512i paired(__m512 low, __m512 high) {
  alignas(64) static constexpr uint16_t WOVEN[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(WOVEN), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// The running softmax of a block: the largest score so far, the sum of weights, and what the last tile's accumulators
// are to be multiplied by.
struct Running {
  alignas(64) float top[ROWS], sum[ROWS], fade[ROWS];
  alignas(64) int32_t last[ROWS];    // position of each row's query: what it sees last
  alignas(64) int32_t before[ROWS];  // the token before the first that it sees
};

// Turns a tile of scores into weights, in place: words [ceil(n / PACK)][16 MV]. `most` are the largest scores; `masked`:
// some row does not see all of the tokens [t0, t0 + n); `bounded`: rows do not see all tokens before their own.
template <typename E, int MV>
void block_weights(float* s, const __m512* most, int64_t t0, int64_t n, Bend bend, bool bounded, bool masked,
                   Running& run) {
  const __m512 never = _mm512_set1_ps(NEVER);
  const bool bent = bend.softcap != 0.0f;  // before the largest is known, not while weights are made
  const __m512 factor = _mm512_set1_ps(bent ? 1.0f : bend.scale * LOG2E);
  for (int m = 0; m < MV; m++) {
    float* column = s + m * 16;
    __m512 top = most[m];
    if (bent || masked) {
      const __m512i last = _mm512_load_si512(run.last + m * 16);
      const __m512i before = _mm512_load_si512(run.before + m * 16);
      top = never;
      for (int64_t t = 0; t < n; t++) {
        const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(t0 + t));
        __mmask16 hidden = _mm512_cmpgt_epi32_mask(at, last);
        if (bounded) hidden |= _mm512_cmple_epi32_mask(at, before);
        const __m512 x = _mm512_load_ps(column + t * MV * 16);
        const __m512 seen = _mm512_mask_mov_ps(bent ? bend(x) : x, hidden, never);
        _mm512_store_ps(column + t * MV * 16, seen);
        top = _mm512_max_ps(top, seen);
      }
    }
    const __m512 old = _mm512_load_ps(run.top + m * 16);
    top = _mm512_max_ps(old, _mm512_mul_ps(top, factor));
    const __mmask16 blind = _mm512_cmp_ps_mask(top, never, _CMP_EQ_OQ);
    const __m512 base = _mm512_mask_mov_ps(top, blind, _mm512_setzero_ps());
    const __m512 fade = exp2(_mm512_sub_ps(old, base));
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(run.sum + m * 16), fade);
    const auto weight = [&](int64_t t) {
      const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(column + t * MV * 16), factor, base);
      return PACK<E> == 1 ? exp2(x) : exp2_short(x);
    };
    if constexpr (PACK<E> == 1) {
      for (int64_t t = 0; t < n; t++) {
        const __m512 p = weight(t);
        sum = _mm512_add_ps(sum, p);
        _mm512_store_ps(column + t * MV * 16, p);
      }
    } else {
      for (int64_t t = 0; t < n; t += 2) {
        const __m512 a = weight(t), b = t + 1 < n ? weight(t + 1) : _mm512_setzero_ps();
        sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
        _mm512_store_si512(column + t / 2 * MV * 16, paired(a, b));
      }
    }
    _mm512_store_ps(run.top + m * 16, top);
    _mm512_store_ps(run.sum + m * 16, sum);
    _mm512_store_ps(run.fade + m * 16, fade);
  }
}

// Where column d of a tile's values begins: pairs of 64 columns lie together, as rows of a power of two would share few
// sets of the first cache; single floats lie as in the pages.
template <typename E>
int64_t column_of(int64_t d) {
  return PACK<E> == 2 ? d / 64 * 64 * (TILE / 2) + d % 64 : d;
}

// Values of two tokens as words (v[t][d], v[t + 1][d]); `b` may be null (zeros). `width` is a multiple of 32.
inline void pair_values(const c10::BFloat16* a, const c10::BFloat16* b, int64_t width, float* words) {
  alignas(64) static constexpr uint16_t LOW[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t d = 0; d < width; d += 32) {
    const __m512i x = _mm512_loadu_si512(a + d), y = b ? _mm512_loadu_si512(b + d) : _mm512_setzero_si512();
    float* to = words + column_of<c10::BFloat16>(d);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
    _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(x, high, y));
  }
}

// o[row][d] = o[row][d] * fade[row] + Σ p[t][row] v[t][d] for MR rows and 16 DV columns.
template <typename E, int MR, int DV>
void block_values_tile(const float* p, int64_t stride, const float* const* v, int64_t steps, int64_t d,
                       const float* fade, float* o, int64_t width) {
  __m512 acc[MR][DV];
  const int64_t column = column_of<E>(d);
  for (int r = 0; r < MR; r++)
    for (int c = 0; c < DV; c++)
      acc[r][c] = _mm512_mul_ps(_mm512_load_ps(o + r * width + d + c * 16), _mm512_set1_ps(fade[r]));
  for (int64_t t = 0; t < steps; t++) {
    __m512 vv[DV];
#pragma GCC unroll 4
    for (int c = 0; c < DV; c++) vv[c] = _mm512_loadu_ps(v[t] + column + c * 16);
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) {
      const __m512 pv = _mm512_set1_ps(p[t * stride + r]);
#pragma GCC unroll 4
      for (int c = 0; c < DV; c++) acc[r][c] = dot<E>(acc[r][c], pv, vv[c]);
    }
  }
  for (int r = 0; r < MR; r++)
    for (int c = 0; c < DV; c++) _mm512_store_ps(o + r * width + d + c * 16, acc[r][c]);
}

template <typename E, int DV>
void block_values_columns(const float* p, int64_t stride, const float* const* v, int64_t steps, int64_t rows, int64_t d,
                          const float* fade, float* o, int64_t width) {
  int64_t r = 0;
  const auto take = [&](auto tile, int64_t height) {
    for (; rows - r >= height; r += height) tile(p + r, stride, v, steps, d, fade + r, o + r * width, width);
  };
  take(block_values_tile<E, SIX, DV>, SIX);
  take(block_values_tile<E, 4, DV>, 4);
  take(block_values_tile<E, 2, DV>, 2);
}

// The same for all rows (an even number) and all columns.
template <typename E>
void block_values(const float* p, int64_t stride, const float* const* v, int64_t steps, int64_t rows, const float* fade,
                  float* o, int64_t width) {
  int64_t d = 0;
  for (; width - d >= 64; d += 64) block_values_columns<E, 4>(p, stride, v, steps, rows, d, fade, o, width);
  if (width - d >= 32) block_values_columns<E, 2>(p, stride, v, steps, rows, d, fade, o, width), d += 32;
  if (width - d >= 16) block_values_columns<E, 1>(p, stride, v, steps, rows, d, fade, o, width);
}

}  // namespace kvmesh::attention
