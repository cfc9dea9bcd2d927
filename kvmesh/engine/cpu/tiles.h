// The AMX tile unit as matrix products use it: kernels that are found at run time, on hardware or in plain code.
#pragma once

#include <cstdint>

namespace kvmesh {

constexpr int64_t TILE_ROWS = 16;   // of a tile
constexpr int64_t TILE_DEPTH = 32;  // bf16 in a row of a tile: sixteen pairs

// One or two tiles of left-hand rows at each step of the depth: rows lie `stride` bytes apart, steps `step` bytes.
struct LeftTiles {
  const void* at[2];
  int64_t stride, step;
};

// sums[i][j] = Σ left[i][k] right[k][j] over `steps` tiles of depth, added to what `sums` holds where `add`. `right` are
// words of two bf16, inputs 2p and 2p + 1 of column j at [p][j]; its rows and those of `sums` lie `right_stride` and
// `sums_stride` words apart.
using TileProduct = void (*)(const LeftTiles& left, const uint32_t* right, int64_t right_stride, int64_t steps,
                             float* sums, int64_t sums_stride, bool add);

// Each thread begins before its first product and ends after its last. An element of `sums` depends on its row, its
// column and itself alone.
struct TileUnit {
  void (*begin)();
  void (*end)();
  TileProduct product[2][2];  // of 1 or 2 tiles of rows by 1 or 2 tiles of columns
};

// What is to be used now (`use_tiles` in ops.h); null: no tiles.
const TileUnit* tile_unit();

// A thread's time with tiles; of none, nothing.
class TileSession {
 public:
  explicit TileSession(const TileUnit* unit) : unit_(unit) {
    if (unit_) unit_->begin();
  }
  ~TileSession() {
    if (unit_) unit_->end();
  }
  TileSession(const TileSession&) = delete;

 private:
  const TileUnit* unit_;
};

}  // namespace kvmesh
