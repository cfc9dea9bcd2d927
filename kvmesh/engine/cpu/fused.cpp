// Norms, rotary embedding and gated activations: one pass over memory each, in float32 inside, rounded to the tensor's
// dtype exactly where transformers rounds.
#include <ATen/Parallel.h>

#include "ops.h"
#include "vec.h"

namespace kvmesh {
namespace {

constexpr int64_t GRAIN = 16384;  // elements that are worth a thread of their own

int64_t grain(int64_t columns) { return std::max<int64_t>(1, GRAIN / columns); }

// Sum of squares in four chains: short dependency, and the same order whatever the number of rows.
template <typename T>
float mean_square(const T* x, int64_t n) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; j++) {
      const __m512 v = load(x + i + 16 * j);
      sums[j] = _mm512_fmadd_ps(v, v, sums[j]);
    }
  each16(n - i, [&](int64_t j, __mmask16 m) {
    const __m512 v = load(x + i + j, m);
    sums[0] = _mm512_fmadd_ps(v, v, sums[0]);
  });
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
  return _mm512_reduce_add_ps(sum) / static_cast<float>(n);
}

// unit_offset: x / rms * (1 + weight), rounded once (Gemma); else round(x / rms) * weight (Llama and its kin).
template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t n, float eps, bool unit_offset) {
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean_square(x, n) + eps));
  const __m512 one = _mm512_set1_ps(1.0f);
  each16(n, [&](int64_t i, __mmask16 m) {
    const __m512 v = _mm512_mul_ps(load(x + i, m), scale);
    const __m512 w = load(weight + i, m);
    store(out + i, unit_offset ? _mm512_mul_ps(v, _mm512_add_ps(w, one)) : _mm512_mul_ps(rounded<T>(v), w), m);
  });
}

template <typename T>
void norm_rows(const at::Tensor& x, const at::Tensor& weight, at::Tensor& out, float eps, bool unit_offset) {
  const int64_t n = x.size(1), stride = x.stride(0);
  const T *from = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, x.size(0), grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) norm_row(from + row * stride, w, to + row * n, n, eps, unit_offset);
  });
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool unit_offset) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && weight.is_contiguous() && weight.numel() == x.size(1) &&
                  weight.scalar_type() == x.scalar_type(),
              "rms_norm: x [rows, n] and weight [n] of one dtype");
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.scalar_type() == at::kBFloat16) {
    norm_rows<at::BFloat16>(x, weight, out, static_cast<float>(eps), unit_offset);
  } else {
    norm_rows<float>(x, weight, out, static_cast<float>(eps), unit_offset);
  }
  return out;
}

}  // namespace kvmesh
