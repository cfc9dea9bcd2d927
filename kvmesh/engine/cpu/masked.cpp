// Greedy choice under the masks of grammars: the best allowed logit of each row, without a masked copy of the logits.
#include <ATen/Parallel.h>

#include <limits>

#include "ops.h"
#include "vec.h"

namespace kvmesh {
namespace {

// Calls f(place, mask) for each sixteen of x [n] of which a bit is set. Stops where f answers true.
template <typename F>
void each_allowed(const int32_t* bits, int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += 32) {
    const uint32_t word = static_cast<uint32_t>(bits[i / 32]);
    if (!word) continue;
    const auto low = static_cast<__mmask16>(word & first(n - i));
    if (low && f(i, low)) return;
    if (i + 16 >= n) return;
    const auto high = static_cast<__mmask16>((word >> 16) & first(n - i - 16));
    if (high && f(i + 16, high)) return;
  }
}

// The first of the best among the allowed, the first allowed one where all are -inf.
template <typename T>
int64_t best_allowed(const T* x, const int32_t* bits, int64_t n) {
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  each_allowed(bits, n, [&](int64_t i, __mmask16 m) {
    top = _mm512_mask_max_ps(top, m, top, load(x + i, m));
    return false;
  });
  const __m512 best = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  int64_t found = -1;
  each_allowed(bits, n, [&](int64_t i, __mmask16 m) {
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(m, load(x + i, m), best, _CMP_EQ_OQ);
    if (equal) found = i + __builtin_ctz(equal);
    return equal != 0;
  });
  return found;
}

template <typename T>
void best_of_rows(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& bits, const at::Tensor& masks,
                  int64_t* out) {
  const T* x = logits.const_data_ptr<T>();
  const int64_t *row = rows.const_data_ptr<int64_t>(), *mask = masks.const_data_ptr<int64_t>();
  const int32_t* words = bits.const_data_ptr<int32_t>();
  at::parallel_for(0, rows.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++)
      out[at] = best_allowed(x + row[at] * logits.stride(0), words + mask[at] * bits.stride(0), logits.size(1));
  });
}

}  // namespace

at::Tensor best_allowed(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& bits,
                        const at::Tensor& masks) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "logits: rows that are contiguous");
  TORCH_CHECK(bits.dim() == 2 && bits.stride(1) == 1 && bits.scalar_type() == at::kInt, "bits: int32 rows");
  TORCH_CHECK(bits.size(1) * 32 >= logits.size(1), "bits: fewer than logits");
  TORCH_CHECK(rows.is_contiguous() && masks.is_contiguous() && rows.numel() == masks.numel(), "rows, masks: int64 [n]");
  at::Tensor out = at::empty_like(rows);
  if (logits.scalar_type() == at::kBFloat16)
    best_of_rows<c10::BFloat16>(logits, rows, bits, masks, out.data_ptr<int64_t>());
  else
    best_of_rows<float>(logits, rows, bits, masks, out.data_ptr<int64_t>());
  return out;
}

}  // namespace kvmesh
