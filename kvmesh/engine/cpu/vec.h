// Sixteen floats at a time, from and to float32 and bfloat16 memory.
#pragma once

#include <c10/util/BFloat16.h>
#include <immintrin.h>

namespace kvmesh {

inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, __m512 v, __mmask16 m) { _mm512_mask_storeu_ps(p, m, v); }

inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline __m512 load(const c10::BFloat16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load(const c10::BFloat16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(c10::BFloat16* p, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
inline void store(c10::BFloat16* p, __m512 v, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(v)); }

// Sixteen vectors of sixteen 32-bit elements, rows for columns.
inline void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // v[i + j]: rows i to i + 3 of columns j, 4 + j, 8 + j and 12 + j
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  constexpr int EVEN = 0x88, ODD = 0xdd;
  for (int j = 0; j < 4; j++) {
    const __m512i even = _mm512_shuffle_i32x4(v[j], v[4 + j], EVEN), odd = _mm512_shuffle_i32x4(v[j], v[4 + j], ODD);
    const __m512i even8 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], EVEN);
    const __m512i odd8 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], ODD);
    v[j] = _mm512_shuffle_i32x4(even, even8, EVEN);
    v[4 + j] = _mm512_shuffle_i32x4(odd, odd8, EVEN);
    v[8 + j] = _mm512_shuffle_i32x4(even, even8, ODD);
    v[12 + j] = _mm512_shuffle_i32x4(odd, odd8, ODD);
  }
}

// To the precision of T and back: where the reference stores an intermediate result.
template <typename T>
__m512 rounded(__m512 v);
template <>
inline __m512 rounded<float>(__m512 v) { return v; }
template <>
inline __m512 rounded<c10::BFloat16>(__m512 v) { return widen(narrow(v)); }

// e**v to a unit in the last place or two: v = n ln 2 + r with |r| <= ln 2 / 2, Taylor's series of e**r, times 2**n.
inline __m512 exp(__m512 v) {
  v = _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(89.0f));  // beyond lie 0 and infinity
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);  // ln 2 in two parts, the first with few bits
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(sum, n);
}

// f(i, mask) for every sixteen of [0, n), the last one masked.
template <typename F>
inline void each16(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, static_cast<__mmask16>(0xffff));
  if (i < n) f(i, first(n - i));
}

}  // namespace kvmesh
