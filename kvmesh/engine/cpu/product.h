// What products over packed weights share: where results go, and who multiplies many rows.
#pragma once

#include <ATen/ATen.h>

#include "vec.h"

namespace kvmesh {

constexpr int64_t LANES = 32;  // outputs of a panel

struct Output {
  void* data;
  int64_t stride;
  int64_t columns;
  bool wide;  // float32 instead of bf16
  const at::BFloat16* bias;
  const at::BFloat16* residual;
  int64_t residual_stride;
};

// One row's sixteen outputs: rounded as the reference rounds a product before it adds the residual.
inline void put(const Output& out, int64_t row, int64_t column, __m512 sum) {
  if (column >= out.columns) return;
  const __mmask16 mask = out.columns - column >= 16 ? 0xffff : first(out.columns - column);
  if (out.bias) sum = _mm512_add_ps(sum, load(out.bias + column, mask));
  if (out.wide) return store(static_cast<float*>(out.data) + row * out.stride + column, sum, mask);
  if (out.residual) {
    const __m512 before = load(out.residual + row * out.residual_stride + column, mask);
    sum = _mm512_add_ps(rounded<at::BFloat16>(sum), before);
  }
  store(static_cast<at::BFloat16*>(out.data) + row * out.stride + column, sum, mask);
}

// product_tiles.cpp: whether tiles take a product of so many rows and inputs, and the product.
bool tiles_take(int64_t rows, int64_t inputs);
void multiply_tiles(const at::Tensor& x, const at::Tensor& packed, const Output& out);

}  // namespace kvmesh
