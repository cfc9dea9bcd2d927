// bf16 products of many rows on AMX tiles, over weights packed as linear.cpp has them: sixteen pairs of a panel by sixteen
// of its outputs are one tile, whose load steps from pair to pair. A block is 32 rows by one panel: four tiles of sums.
//
// Sums are float32 as everywhere, in another order than VDPBF16PS has: results of many rows and of few may differ in the
// last bit of their float32 sums. Before tiles are used they have to agree with plain code on a small product.
#include <ATen/Parallel.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops.h"
#include "product.h"

namespace kvmesh {
namespace {

constexpr int64_t ROWS = 32;                // of a block
constexpr int64_t DEPTH = 32;               // inputs of a tile
constexpr int64_t MIN_ROWS = 24;            // fewer run at the memory's speed without tiles
constexpr int64_t GROUP_BYTES = 384 << 10;  // inputs that stay in L2 while panels pass by
constexpr int64_t RUNS = 8;                 // that a thread takes of the panels, about
constexpr int REQUEST_PERMISSION = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int TILE_DATA = 18;

// `x`: 32 rows, `stride` bytes apart; `w`: a panel; `sums [32][32]`.
using Block = void (*)(const char* x, int64_t stride, const uint32_t* w, int64_t steps, float* sums);

struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#define KVMESH_AMX __attribute__((target("amx-tile,amx-bf16")))

// A constant: the intrinsic tells the compiler of its first bytes only, so a local one might be stored in part.
constexpr Shape SHAPE;

KVMESH_AMX void begin_tiles() { _tile_loadconfig(&SHAPE); }

KVMESH_AMX void end_tiles() { _tile_release(); }

KVMESH_AMX void tile_block(const char* x, int64_t stride, const uint32_t* w, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; step++, x += DEPTH * 2, w += DEPTH / 2 * LANES) {
    _tile_loadd(4, x, stride);
    _tile_loadd(5, x + 16 * stride, stride);
    _tile_loadd(6, w, LANES * 4);
    _tile_loadd(7, w + 16, LANES * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, LANES * 4);
  _tile_stored(1, sums + 16, LANES * 4);
  _tile_stored(2, sums + 16 * LANES, LANES * 4);
  _tile_stored(3, sums + 16 * LANES + 16, LANES * 4);
}

float wide(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The same, one product at a time.
void plain_block(const char* x, int64_t stride, const uint32_t* w, int64_t steps, float* sums) {
  std::memset(sums, 0, ROWS * LANES * sizeof(float));
  for (int64_t r = 0; r < ROWS; r++) {
    const auto* row = reinterpret_cast<const uint16_t*>(x + r * stride);
    for (int64_t pair = 0; pair < steps * DEPTH / 2; pair++)
      for (int64_t lane = 0; lane < LANES; lane++) {
        const uint32_t both = w[pair * LANES + lane];
        sums[r * LANES + lane] += wide(row[2 * pair]) * wide(static_cast<uint16_t>(both)) +
                                  wide(row[2 * pair + 1]) * wide(static_cast<uint16_t>(both >> 16));
      }
  }
}

enum Mode : int64_t { OFF = 0, HARDWARE = 1, PLAIN = 2 };
std::atomic<int64_t> mode{OFF};

bool permitted() {
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Whether tiles do what plain code does; asked once.
bool agree() {
  constexpr int64_t steps = 3;
  std::vector<uint16_t> x(ROWS * steps * DEPTH);
  alignas(64) static uint32_t w[steps * DEPTH / 2 * LANES];
  for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<uint16_t>(0x3f00 + i * 37 % 256);
  for (size_t i = 0; i < std::size(w); i++) w[i] = static_cast<uint32_t>(0x3f00bf00u + (i * 53 % 256) * 0x10001u);
  std::vector<float> seen(ROWS * LANES), expected(ROWS * LANES);
  const auto* rows = reinterpret_cast<const char*>(x.data());
  begin_tiles();
  tile_block(rows, steps * DEPTH * 2, w, steps, seen.data());
  end_tiles();
  plain_block(rows, steps * DEPTH * 2, w, steps, expected.data());
  for (size_t i = 0; i < seen.size(); i++)
    if (!(std::abs(seen[i] - expected[i]) <= 1e-3f * (1 + std::abs(expected[i])))) return false;
  return true;
}

// Blocks [first, end) of rows by panels [a, b). `tail`: the last rows, made up to a whole block by zeros.
void multiply_part(const at::Tensor& x, const at::Tensor& tail, int64_t first, int64_t end, const uint32_t* weights,
                   int64_t pairs, int64_t a, int64_t b, Block block, const Output& out) {
  alignas(64) float sums[ROWS * LANES];
  const int64_t rows = x.size(0);
  for (int64_t n = a; n < b; n++)
    for (int64_t i = first; i < end; i++) {
      const int64_t height = std::min(ROWS, rows - i * ROWS);
      const at::Tensor& from = height < ROWS ? tail : x;
      const int64_t stride = from.stride(0) * 2;
      const char* at = static_cast<const char*>(from.const_data_ptr()) + (height < ROWS ? 0 : i * ROWS * stride);
      block(at, stride, weights + n * pairs * LANES, pairs * 2 / DEPTH, sums);
      for (int64_t r = 0; r < height; r++) {
        put(out, i * ROWS + r, n * LANES, _mm512_load_ps(sums + r * LANES));
        put(out, i * ROWS + r, n * LANES + 16, _mm512_load_ps(sums + r * LANES + 16));
      }
    }
}

}  // namespace

bool use_tiles(int64_t wanted) {
  const auto hardware = [] {
    static const bool works = permitted() && agree();
    return works;
  };
  if (wanted == HARDWARE && !hardware()) wanted = OFF;
  mode = wanted;
  return wanted != OFF;
}

bool tiles_take(int64_t rows, int64_t inputs) { return mode != OFF && rows >= MIN_ROWS && inputs % DEPTH == 0; }

void multiply_tiles(const at::Tensor& x, const at::Tensor& packed, const Output& out) {
  const bool hardware = mode == HARDWARE;
  const Block block = hardware ? tile_block : plain_block;
  const int64_t rows = x.size(0), inputs = x.size(1), panels = packed.size(0), pairs = packed.size(1);
  const int64_t blocks = (rows + ROWS - 1) / ROWS, left = rows % ROWS;
  at::Tensor tail;
  if (left) {
    tail = at::zeros({ROWS, inputs}, x.options());
    tail.narrow(0, 0, left).copy_(x.narrow(0, rows - left, left));
  }
  const auto* weights = static_cast<const uint32_t*>(packed.const_data_ptr());
  const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (ROWS * inputs * 2)), groups = (blocks + group - 1) / group;
  const int64_t threads = at::get_num_threads();
  const int64_t run = std::max<int64_t>(1, panels / (threads * RUNS)), runs = (panels + run - 1) / run;
  std::atomic<int64_t> taken{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    if (hardware) begin_tiles();
    for (int64_t i = taken++; i < groups * runs; i = taken++) {
      const int64_t first = i / runs * group, end = std::min(blocks, first + group), a = i % runs * run;
      multiply_part(x, tail, first, end, weights, pairs, a, std::min(panels, a + run), block, out);
    }
    if (hardware) end_tiles();
  });
}

}  // namespace kvmesh
