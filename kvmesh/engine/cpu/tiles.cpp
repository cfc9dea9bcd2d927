// bf16 products on AMX tiles (TDPBF16PS), and on tiles in plain code: one source for both, over the few operations that a
// tile has. Before the hardware's are used they have to agree with the plain ones.
#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops.h"

namespace kvmesh {
namespace {

constexpr int REQUEST_PERMISSION = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int TILE_DATA = 18;

struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr Shape SHAPE;

#define KVMESH_AMX __attribute__((target("amx-tile,amx-bf16"), always_inline)) static inline

// Not the compiler's intrinsics: those of some versions do not say that they read memory, and none takes a template's
// number of a tile.
struct HardwareTiles {
  template <int I>
  KVMESH_AMX void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(I));
  }
  template <int I>
  KVMESH_AMX void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
  }
  template <int I>
  KVMESH_AMX void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(I) : "memory");
  }
  template <int SUM, int LEFT, int RIGHT>
  KVMESH_AMX void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
  }
};

float wide(uint32_t bf16) {
  const uint32_t bits = bf16 << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The same registers in memory, with the instruction's order of sums: even and odd inputs apart, then both together.
// (The hardware takes numbers below 2^-126 for zero, too.)
struct PlainTiles {
  alignas(64) static thread_local inline uint32_t at[8][16][16];

  template <int I>
  static void zero() {
    std::memset(at[I], 0, sizeof at[I]);
  }
  template <int I>
  static void load(const void* from, int64_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy(at[I][r], static_cast<const char*>(from) + r * stride, 64);
  }
  template <int I>
  static void store(void* to, int64_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy(static_cast<char*>(to) + r * stride, at[I][r], 64);
  }
  template <int SUM, int LEFT, int RIGHT>
  static void multiply() {
    for (int r = 0; r < 16; r++) {
      float even[16] = {}, odd[16] = {}, sums[16];
      for (int k = 0; k < 16; k++) {
        const float low = wide(at[LEFT][r][k] & 0xffff), high = wide(at[LEFT][r][k] >> 16);
        for (int n = 0; n < 16; n++) {
          even[n] = std::fma(low, wide(at[RIGHT][k][n] & 0xffff), even[n]);
          odd[n] = std::fma(high, wide(at[RIGHT][k][n] >> 16), odd[n]);
        }
      }
      std::memcpy(sums, at[SUM][r], 64);
      for (int n = 0; n < 16; n++) sums[n] += even[n] + odd[n];
      std::memcpy(at[SUM][r], sums, 64);
    }
  }
};

// Sums are tiles 0 to 3, row by row; left-hand rows 4 and 5; right-hand columns 6 and 7.
template <typename Tiles, int M, int N>
__attribute__((target("amx-tile,amx-bf16"))) void product(const LeftTiles& left, const uint32_t* right,
                                                          int64_t right_stride, int64_t steps, float* sums,
                                                          int64_t sums_stride, bool add) {
  const int64_t down = sums_stride * 4, width = right_stride * 4;
  float* below = sums + TILE_ROWS * sums_stride;
  if (add) {
    Tiles::template load<0>(sums, down);
    if constexpr (N == 2) Tiles::template load<1>(sums + 16, down);
    if constexpr (M == 2) Tiles::template load<2>(below, down);
    if constexpr (M == 2 && N == 2) Tiles::template load<3>(below + 16, down);
  } else {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
  }
  const char *upper = static_cast<const char*>(left.at[0]), *lower = static_cast<const char*>(left.at[1]);
  for (int64_t i = 0; i < steps; i++, upper += left.step, right += TILE_DEPTH / 2 * right_stride) {
    Tiles::template load<4>(upper, left.stride);
    Tiles::template load<6>(right, width);
    Tiles::template multiply<0, 4, 6>();
    if constexpr (N == 2) {
      Tiles::template load<7>(right + 16, width);
      Tiles::template multiply<1, 4, 7>();
    }
    if constexpr (M == 2) {
      Tiles::template load<5>(lower, left.stride);
      Tiles::template multiply<2, 5, 6>();
      if constexpr (N == 2) Tiles::template multiply<3, 5, 7>();
      lower += left.step;
    }
  }
  Tiles::template store<0>(sums, down);
  if constexpr (N == 2) Tiles::template store<1>(sums + 16, down);
  if constexpr (M == 2) Tiles::template store<2>(below, down);
  if constexpr (M == 2 && N == 2) Tiles::template store<3>(below + 16, down);
}

void begin_hardware() { asm volatile("ldtilecfg %0" ::"m"(SHAPE)); }
void end_hardware() { asm volatile("tilerelease" ::: "memory"); }
void nothing() {}

template <typename Tiles>
constexpr TileUnit unit_of(void (*begin)(), void (*end)()) {
  return {begin, end, {{product<Tiles, 1, 1>, product<Tiles, 1, 2>}, {product<Tiles, 2, 1>, product<Tiles, 2, 2>}}};
}
constexpr TileUnit HARDWARE_UNIT = unit_of<HardwareTiles>(begin_hardware, end_hardware);
constexpr TileUnit PLAIN_UNIT = unit_of<PlainTiles>(nothing, nothing);

enum Mode : int64_t { OFF = 0, HARDWARE = 1, PLAIN = 2 };
std::atomic<const TileUnit*> used{nullptr};

bool permitted() {
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Whether tiles do what plain code does, in every shape; asked once.
bool agree() {
  constexpr int64_t steps = 3, inputs = steps * TILE_DEPTH, columns = 40;
  std::vector<uint16_t> x(2 * TILE_ROWS * inputs);
  std::vector<uint32_t> w(inputs / 2 * columns);
  for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<uint16_t>(0x3f00 + i * 37 % 256);
  for (size_t i = 0; i < w.size(); i++) w[i] = static_cast<uint32_t>(0x3f00bf00u + (i * 53 % 256) * 0x10001u);
  const LeftTiles left{{x.data(), x.data() + TILE_ROWS * inputs}, inputs * 2, TILE_DEPTH * 2};
  for (int shape = 0; shape < 8; shape++) {
    const int m = shape & 1, n = shape >> 1 & 1;
    std::vector<float> seen(2 * TILE_ROWS * columns, 1.5f), expected = seen;
    const TileSession session(&HARDWARE_UNIT);
    HARDWARE_UNIT.product[m][n](left, w.data(), columns, steps, seen.data(), columns, shape >> 2);
    PLAIN_UNIT.product[m][n](left, w.data(), columns, steps, expected.data(), columns, shape >> 2);
    for (size_t i = 0; i < seen.size(); i++)
      if (!(std::abs(seen[i] - expected[i]) <= 1e-3f * (1 + std::abs(expected[i])))) return false;
  }
  return true;
}

}  // namespace

const TileUnit* tile_unit() { return used; }

bool use_tiles(int64_t wanted) {
  const auto hardware = [] {
    static const bool works = permitted() && agree();
    return works;
  };
  used = wanted == PLAIN ? &PLAIN_UNIT : wanted == HARDWARE && hardware() ? &HARDWARE_UNIT : nullptr;
  return used != nullptr;
}

}  // namespace kvmesh
