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

// What a tile fetches into L2 while it computes: a part of the panel that comes next, so many lines every STEP pairs.
struct Ahead {
  const char* at;
  int lines;
};

constexpr int MAX_ROWS = 14;  // of a tile: 28 sums, two weights and one input fill the 32 registers
constexpr int STEP = 8;       // pairs between two looks at what to prefetch

// Rows cut into tiles of nearly equal height.
struct Cut {
  int64_t rows, tiles;
  explicit Cut(int64_t rows) : rows(rows), tiles((rows + MAX_ROWS - 1) / MAX_ROWS) {}
  int64_t begin(int64_t tile) const { return rows * tile / tiles; }
};

// linear.cpp: up to MAX_ROWS rows side by side as [pairs][stride], and a tile of `height` rows by one panel: `x` is
// [pairs][height], `w` [pairs][32], each element a pair of bf16.
void interleave(const at::BFloat16* const* rows, int64_t count, int64_t inputs, uint32_t* to, int64_t stride);
void multiply_tile(const uint32_t* x, int64_t height, const uint32_t* w, int64_t pairs, Ahead ahead, const Output& out,
                   int64_t row, int64_t column);

// product_tiles.cpp: whether tiles take a product of so many rows and inputs, and the product.
bool tiles_take(int64_t rows, int64_t inputs);
void multiply_tiles(const at::Tensor& x, const at::Tensor& packed, const Output& out);

}  // namespace kvmesh
