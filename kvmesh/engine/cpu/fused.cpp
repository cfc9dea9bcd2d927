// Norms, rotary embedding and gated activations: one pass over memory each, in float32 inside, rounded to the tensor's
// dtype exactly where transformers rounds.
#include <ATen/Parallel.h>

#include "ops.h"
#include "vec.h"

namespace kvmesh {
namespace {

constexpr int64_t GRAIN = 65536;  // elements that are worth a thread of their own

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

// Sixteen normed elements, still to be rounded to T. Weights of T multiply what is rounded already (Llama and its kin),
// float32 weights of a bf16 model what is not (Gemma).
template <typename T, typename W>
__m512 weighted(__m512 v, __m512 scale, const W* weight, __mmask16 m) {
  v = _mm512_mul_ps(v, scale);
  return _mm512_mul_ps(std::is_same_v<T, W> ? rounded<T>(v) : v, load(weight, m));
}

template <typename T>
__m512 inverse_rms(const T* x, int64_t n, float eps) {
  return _mm512_set1_ps(1.0f / std::sqrt(mean_square(x, n) + eps));
}

template <typename T, typename W>
void norm_rows(const at::Tensor& x, const at::Tensor& weight, at::Tensor& out, float eps) {
  const int64_t n = x.size(1), stride = x.stride(0);
  const T* from = x.const_data_ptr<T>();
  const W* w = weight.const_data_ptr<W>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, x.size(0), grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const __m512 scale = inverse_rms(from + t * stride, n, eps);
      each16(n, [&](int64_t i, __mmask16 m) {
        store(to + t * n + i, weighted<T>(load(from + t * stride + i, m), scale, w + i, m), m);
      });
    }
  });
}

// One head in place: the norm (where there is a weight), then the rotation of pairs (i, i + turned / 2) of its first
// `turned` elements; `sin` carries the sign of the first half.
template <typename T, typename W>
void rotate_head(T* x, int64_t size, const W* weight, const T* cos, const T* sin, int64_t turned, float eps) {
  if (weight) {
    const __m512 scale = inverse_rms(x, size, eps);
    each16(size, [&](int64_t i, __mmask16 m) { store(x + i, weighted<T>(load(x + i, m), scale, weight + i, m), m); });
  }
  const int64_t half = turned / 2;
  each16(half, [&](int64_t i, __mmask16 m) {
    const int64_t j = i + half;
    const __m512 low = load(x + i, m), high = load(x + j, m);
    const auto turn = [&](__m512 v, __m512 other, int64_t at) {
      const __m512 straight = rounded<T>(_mm512_mul_ps(v, load(cos + at, m)));
      store(x + at, _mm512_add_ps(straight, rounded<T>(_mm512_mul_ps(other, load(sin + at, m)))), m);
    };
    turn(low, high, i);
    turn(high, low, j);
  });
}

template <typename T, typename W>
void rotate_rows(at::Tensor& qkv, int64_t heads, const at::Tensor& cos, const at::Tensor& sin,
                 const std::optional<at::Tensor>& weight, float eps) {
  const int64_t size = qkv.size(2), stride = qkv.stride(0), turned = cos.size(-1);
  const T *c = cos.const_data_ptr<T>(), *s = sin.const_data_ptr<T>();
  const W* w = weight ? weight->const_data_ptr<W>() : nullptr;
  T* x = qkv.data_ptr<T>();
  at::parallel_for(0, qkv.size(0), grain(heads * size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < heads; h++)
        rotate_head<T, W>(x + t * stride + h * size, size, w ? w + h * size : nullptr, c + t * turned, s + t * turned,
                          turned, eps);
  });
}

inline __m512 silu(__m512 v) {
  return _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), v))));
}

// x / (1 + e**(-2y)) with y = sqrt(2 / pi) (x + 0.044715 x**3): what 0.5 x (1 + tanh y) comes to.
inline __m512 gelu_tanh(__m512 v) {
  const __m512 inner = _mm512_fmadd_ps(_mm512_mul_ps(v, v), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  const __m512 y = _mm512_mul_ps(_mm512_mul_ps(v, inner), _mm512_set1_ps(-1.5957691216f));
  return _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(y)));
}

template <typename T>
void gate_rows(const at::Tensor& x, at::Tensor& out, bool gelu) {
  const int64_t n = out.size(1), stride = x.stride(0);
  const T* from = x.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, x.size(0), grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      each16(n, [&](int64_t i, __mmask16 m) {
        const __m512 gate = load(from + t * stride + i, m), up = load(from + t * stride + n + i, m);
        store(to + t * n + i, _mm512_mul_ps(rounded<T>(gelu ? gelu_tanh(gate) : silu(gate)), up), m);
      });
  });
}

// f(T(), W()) for the dtypes of x and of a weight, which may be float32 where x is not.
template <typename F>
void by_dtype(const at::Tensor& x, const at::Tensor& weight, F&& f) {
  const auto type = x.scalar_type(), kind = weight.scalar_type();
  if (type == at::kFloat && kind == at::kFloat) return f(float(), float());
  TORCH_CHECK(type == at::kBFloat16 && (kind == type || kind == at::kFloat), "x of ", type, ", weight of ", kind,
              ": bfloat16 or float32");
  kind == type ? f(at::BFloat16(), at::BFloat16()) : f(at::BFloat16(), float());
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && weight.is_contiguous() && weight.numel() == x.size(1),
              "rms_norm: x [rows, n] and weight [n]");
  at::Tensor out = at::empty(x.sizes(), x.options());
  by_dtype(x, weight, [&](auto t, auto w) { norm_rows<decltype(t), decltype(w)>(x, weight, out, float(eps)); });
  return out;
}

void rotate_heads(at::Tensor qkv, int64_t heads, const at::Tensor& cos, const at::Tensor& sin,
                  const std::optional<at::Tensor>& weight, double eps) {
  const int64_t tokens = qkv.size(0), turned = cos.size(-1);
  TORCH_CHECK(qkv.dim() == 3 && qkv.stride(2) == 1 && qkv.stride(1) == qkv.size(2) && heads <= qkv.size(1),
              "rotate_heads: qkv [T, heads, size], a token's heads side by side");
  for (const at::Tensor& t : {cos, sin})
    TORCH_CHECK(t.is_contiguous() && t.numel() == tokens * turned && t.scalar_type() == qkv.scalar_type() &&
                    turned % 2 == 0 && turned <= qkv.size(2),
                "rotate_heads: cos and sin [T, 1, even part of size] of qkv's dtype");
  TORCH_CHECK(!weight || (weight->is_contiguous() && weight->numel() == heads * qkv.size(2)),
              "rotate_heads: weight [heads, size]");
  by_dtype(qkv, weight ? *weight : qkv, [&](auto t, auto w) {
    rotate_rows<decltype(t), decltype(w)>(qkv, heads, cos, sin, weight, float(eps));
  });
}

at::Tensor gated(const at::Tensor& x, bool gelu) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % 2 == 0, "gated: x [rows, 2 n], gate and up side by side");
  at::Tensor out = at::empty({x.size(0), x.size(1) / 2}, x.options());
  by_dtype(x, x, [&](auto t, auto) { gate_rows<decltype(t)>(x, out, gelu); });
  return out;
}

}  // namespace kvmesh
