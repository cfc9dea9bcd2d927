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

// To the precision of T and back: where the reference stores an intermediate result.
template <typename T>
__m512 rounded(__m512 v);
template <>
inline __m512 rounded<float>(__m512 v) { return v; }
template <>
inline __m512 rounded<c10::BFloat16>(__m512 v) { return widen(narrow(v)); }

// f(i, mask) for every sixteen of [0, n), the last one masked.
template <typename F>
inline void each16(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, static_cast<__mmask16>(0xffff));
  if (i < n) f(i, first(n - i));
}

}  // namespace kvmesh
