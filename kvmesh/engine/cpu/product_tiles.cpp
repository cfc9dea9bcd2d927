// bf16 products of many rows on tiles, over weights packed as linear.cpp has them: sixteen pairs of a panel by sixteen of
// its outputs are one tile, whose load steps from pair to pair. A block is 32 rows, or 16 where no more are left, by one
// panel.
//
// Sums are float32 as everywhere, in another order than VDPBF16PS has: results of many rows and of few may differ in the
// last bit of their float32 sums.
#include <ATen/Parallel.h>

#include <atomic>

#include "ops.h"
#include "product.h"
#include "tiles.h"

namespace kvmesh {
namespace {

constexpr int64_t ROWS = 2 * TILE_ROWS;     // of a block
constexpr int64_t MIN_ROWS = 5;             // fewer run at the memory's speed without tiles
constexpr int64_t GROUP_BYTES = 384 << 10;  // inputs that stay in L2 while panels pass by
constexpr int64_t THREAD_BYTES = 64 << 10;  // of weights that are worth a thread
constexpr int64_t RUNS = 8;                 // that a thread takes of the panels, about

// Blocks [first, end) of rows by panels [a, b). `tail`: the last rows, made up to whole tiles by zeros.
void multiply_part(const TileUnit& unit, const at::Tensor& x, const at::Tensor& tail, int64_t first, int64_t end,
                   const uint32_t* weights, int64_t pairs, int64_t a, int64_t b, const Output& out) {
  alignas(64) float sums[ROWS * LANES];
  const int64_t rows = x.size(0);
  for (int64_t n = a; n < b; n++)
    for (int64_t i = first; i < end; i++) {
      const int64_t height = std::min(ROWS, rows - i * ROWS);
      const at::Tensor& from = height < ROWS ? tail : x;
      const int64_t stride = from.stride(0) * 2;
      const char* at = static_cast<const char*>(from.const_data_ptr()) + (height < ROWS ? 0 : i * ROWS * stride);
      const LeftTiles left{{at, at + TILE_ROWS * stride}, stride, TILE_DEPTH * 2};
      unit.product[height > TILE_ROWS][1](left, weights + n * pairs * LANES, LANES, pairs * 2 / TILE_DEPTH, sums, LANES,
                                          false);
      for (int64_t r = 0; r < height; r++) {
        put(out, i * ROWS + r, n * LANES, _mm512_load_ps(sums + r * LANES));
        put(out, i * ROWS + r, n * LANES + 16, _mm512_load_ps(sums + r * LANES + 16));
      }
    }
}

}  // namespace

bool tiles_take(int64_t rows, int64_t inputs) {
  return rows >= MIN_ROWS && inputs > 0 && inputs % TILE_DEPTH == 0 && tile_unit();
}

void multiply_tiles(const at::Tensor& x, const at::Tensor& packed, const Output& out) {
  const TileUnit& unit = *tile_unit();
  const int64_t rows = x.size(0), inputs = x.size(1), panels = packed.size(0), pairs = packed.size(1);
  const int64_t blocks = (rows + ROWS - 1) / ROWS, left = rows % ROWS;
  at::Tensor tail;
  if (left) {
    tail = at::zeros({left > TILE_ROWS ? ROWS : TILE_ROWS, inputs}, x.options());
    tail.narrow(0, 0, left).copy_(x.narrow(0, rows - left, left));
  }
  const auto* weights = static_cast<const uint32_t*>(packed.const_data_ptr());
  const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (ROWS * inputs * 2)), groups = (blocks + group - 1) / group;
  const bool small = static_cast<int64_t>(packed.nbytes()) * blocks < 2 * THREAD_BYTES;
  const int64_t threads = small ? 1 : at::get_num_threads();
  const int64_t run = std::max<int64_t>(1, panels / (threads * RUNS)), runs = (panels + run - 1) / run;
  std::atomic<int64_t> taken{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const TileSession session(&unit);
    for (int64_t i = taken++; i < groups * runs; i = taken++) {
      const int64_t first = i / runs * group, end = std::min(blocks, first + group), a = i % runs * run;
      multiply_part(unit, x, tail, first, end, weights, pairs, a, std::min(panels, a + run), out);
    }
  });
}

}  // namespace kvmesh
