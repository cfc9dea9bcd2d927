// bf16 matrix products over weights packed once for VDPBF16PS: one layout and no second copy, for one row and for
// thousands.
//
// A packed weight is [panels][pairs][32][2]: 32 outputs side by side, two neighbouring inputs together, zeros past the
// ends. A panel is one contiguous stream, a thread's panels are too: with few rows the product runs at the memory's
// speed. A tile of up to 14 rows by one panel keeps its 28 sums in registers, so with many it runs at the multiplier's.
// Every output is one chain of sums in the order of its inputs: a row's result does not depend on its
// neighbours (where product_tiles.cpp takes products of many rows, it depends on whether it is one of many).
#include <ATen/Parallel.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "ops.h"
#include "product.h"
#include "vec.h"

namespace kvmesh {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr int64_t GROUP_BYTES = 384 << 10;  // inputs that stay in L2 while all panels pass by
constexpr int64_t THREAD_BYTES = 64 << 10;  // of weights that are worth a thread
constexpr int64_t RUNS = 8;                 // of panels for each thread

int64_t panels_of(int64_t outputs) { return (outputs + LANES - 1) / LANES; }
int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }

}  // namespace

// Up to sixteen rows side by side: pair p of row r goes to `to[p * stride + r]`; an odd last input is paired with zero.
void interleave(const at::BFloat16* const* rows, int64_t count, int64_t inputs, uint32_t* to, int64_t stride) {
  for (int64_t p = 0; p < pairs_of(inputs); p += 16) {
    const int64_t left = inputs - 2 * p;
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
    __m512i v[16] = {};
    for (int64_t r = 0; r < count; r++) v[r] = _mm512_maskz_loadu_epi16(mask, rows[r] + 2 * p);
    transpose(v);
    for (int64_t i = 0; i < std::min<int64_t>(16, pairs_of(left)); i++)
      _mm512_mask_storeu_epi32(to + (p + i) * stride, first(count), v[i]);
  }
}

namespace {

// R rows by one panel. `x` is [pairs][R], `w` [pairs][32], each element a pair of bf16.
template <int R>
void tile(const uint32_t* x, const uint32_t* w, int64_t pairs, Ahead ahead, const Output& out, int64_t row,
          int64_t column) {
  __m512 sums[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const auto step = [&](int64_t p) __attribute__((always_inline)) {
    const __m512bh w0 = (__m512bh)_mm512_load_si512(w + p * LANES);
    const __m512bh w1 = (__m512bh)_mm512_load_si512(w + p * LANES + 16);
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
      const __m512bh v = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[p * R + r]));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, v);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, v);
    }
  };
  int64_t p = 0;
  for (; p + STEP <= pairs; p += STEP) {
    for (int line = 0; line < ahead.lines; line++) _mm_prefetch(ahead.at + 64 * line, _MM_HINT_T1);
    ahead.at += 64 * ahead.lines;
#pragma GCC unroll 2
    for (int64_t q = p; q < p + STEP; q++) step(q);
  }
  for (; p < pairs; p++) step(p);
#pragma GCC unroll 14
  for (int r = 0; r < R; r++) {
    put(out, row + r, column, sums[r][0]);
    put(out, row + r, column + 16, sums[r][1]);
  }
}

using Tile = void (*)(const uint32_t*, const uint32_t*, int64_t, Ahead, const Output&, int64_t, int64_t);

template <size_t... R>
constexpr std::array<Tile, sizeof...(R)> tiles_of(std::index_sequence<R...>) {
  return {tile<static_cast<int>(R) + 1>...};
}
constexpr std::array<Tile, MAX_ROWS> TILES = tiles_of(std::make_index_sequence<MAX_ROWS>());

}  // namespace

void multiply_tile(const uint32_t* x, int64_t height, const uint32_t* w, int64_t pairs, Ahead ahead, const Output& out,
                   int64_t row, int64_t column) {
  TILES[height - 1](x, w, pairs, ahead, out, row, column);
}

namespace {

// `x [rows, inputs]` as tiles of [pairs][height].
void pack_rows(const at::Tensor& x, const Cut& cut, uint32_t* to) {
  const int64_t inputs = x.size(1), pairs = pairs_of(inputs), stride = x.stride(0);
  const at::BFloat16* from = x.const_data_ptr<at::BFloat16>();
  at::parallel_for(0, cut.tiles, std::max<int64_t>(1, THREAD_BYTES / (MAX_ROWS * inputs)), [&](int64_t a, int64_t b) {
    for (int64_t t = a; t < b; t++) {
      const int64_t begin = cut.begin(t), height = cut.begin(t + 1) - begin;
      const at::BFloat16* rows[MAX_ROWS];
      for (int64_t r = 0; r < height; r++) rows[r] = from + (begin + r) * stride;
      interleave(rows, height, inputs, to + begin * pairs, height);
    }
  });
}

// Tiles [first, end) by panels [a, b): the tiles' inputs stay in L2, each panel is read once.
void multiply_part(const uint32_t* x, const Cut& cut, int64_t first, int64_t end, const uint32_t* weights,
                   int64_t pairs, int64_t a, int64_t b, const Output& out) {
  const int64_t panel = pairs * LANES;
  const int lines = static_cast<int>((2 * STEP + end - first - 1) / (end - first));
  for (int64_t n = a; n < b; n++) {
    const uint32_t* w = weights + n * panel;
    const char* next = reinterpret_cast<const char*>(w + panel);
    for (int64_t t = first; t < end; t++) {
      const int64_t begin = cut.begin(t), height = cut.begin(t + 1) - begin;
      const Ahead ahead{next + (t - first) * (pairs / STEP) * lines * 64, n + 1 < b ? lines : 0};
      TILES[height - 1](x + begin * pairs, w, pairs, ahead, out, begin, n * LANES);
    }
  }
}

// Threads take runs of neighbouring panels as they come to them: one that the system holds up holds up no other.
void multiply(const uint32_t* x, const Cut& cut, const at::Tensor& packed, const Output& out) {
  const int64_t panels = packed.size(0), pairs = packed.size(1);
  const auto* weights = static_cast<const uint32_t*>(packed.const_data_ptr());
  const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (MAX_ROWS * pairs * 4));
  const int64_t groups = (cut.tiles + group - 1) / group;
  const bool small = packed.nbytes() * cut.tiles < 2 * THREAD_BYTES;
  const int64_t threads = small ? 1 : at::get_num_threads();
  const int64_t run = std::max<int64_t>(1, panels / (threads * RUNS)), runs = (panels + run - 1) / run;
  std::atomic<int64_t> taken{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = taken++; i < groups * runs; i = taken++) {
      const int64_t first = i / runs * group, end = std::min(cut.tiles, first + group), a = i % runs * run;
      multiply_part(x, cut, first, end, weights, pairs, a, std::min(panels, a + run), out);
    }
  });
}

// Zeroed memory, huge pages for all of it but the tail that would not fill one.
at::Tensor allocate(at::IntArrayRef shape) {
  const size_t bytes = c10::multiply_integers(shape) * sizeof(at::BFloat16);
  const size_t mapped = bytes + HUGE_PAGE;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(base != MAP_FAILED, "no memory for a weight of ", bytes, " bytes");
  const auto address = reinterpret_cast<uintptr_t>(base);
  char* data = static_cast<char*>(base) + (-address & (HUGE_PAGE - 1));
  if (bytes >= HUGE_PAGE) madvise(data, bytes & ~(HUGE_PAGE - 1), MADV_HUGEPAGE);
  const auto release = [base, mapped](void*) { munmap(base, mapped); };
  return at::from_blob(data, shape, release, at::TensorOptions().dtype(at::kBFloat16));
}

void check_packed(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.scalar_type() == at::kBFloat16 &&
                  packed.size(0) == panels_of(outputs) && packed.size(1) == pairs_of(inputs) &&
                  packed.size(2) == LANES && packed.size(3) == 2,
              "packed weight ", packed.sizes(), " is not one of ", outputs, " outputs and ", inputs, " inputs");
}

}  // namespace

at::Tensor pack_room(int64_t outputs, int64_t inputs) {
  return allocate({panels_of(outputs), pairs_of(inputs), LANES, 2});
}

void pack_into(at::Tensor packed, at::TensorList parts) {
  TORCH_CHECK(!parts.empty() && parts[0].dim() == 2, "pack: one or more matrices");
  const int64_t inputs = parts[0].size(1), pairs = pairs_of(inputs);
  std::vector<const at::BFloat16*> rows;
  for (const at::Tensor& part : parts) {
    TORCH_CHECK(part.dim() == 2 && part.size(1) == inputs && part.stride(1) == 1 && part.is_cpu() &&
                    part.scalar_type() == at::kBFloat16,
                "pack: bfloat16 matrices of ", inputs, " columns");
    const at::BFloat16* data = part.const_data_ptr<at::BFloat16>();
    for (int64_t row = 0; row < part.size(0); row++) rows.push_back(data + row * part.stride(0));
  }
  const int64_t outputs = static_cast<int64_t>(rows.size());
  check_packed(packed, outputs, inputs);
  auto* to = static_cast<uint32_t*>(packed.data_ptr());
  at::parallel_for(0, packed.size(0), 1, [&](int64_t a, int64_t b) {
    for (int64_t lane = a * LANES; lane < std::min(b * LANES, outputs); lane += 16) {
      uint32_t* column = to + lane / LANES * pairs * LANES + lane % LANES;
      interleave(rows.data() + lane, std::min<int64_t>(16, outputs - lane), inputs, column, LANES);
    }
  });
}

at::Tensor pack(at::TensorList parts) {
  int64_t outputs = 0;
  for (const at::Tensor& part : parts) outputs += part.size(0);
  TORCH_CHECK(!parts.empty() && parts[0].dim() == 2, "pack: one or more matrices");
  at::Tensor packed = pack_room(outputs, parts[0].size(1));
  pack_into(packed, parts);
  return packed;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& residual, bool wide) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == at::kBFloat16, "linear: x [rows, inputs] in bf16");
  const int64_t rows = x.size(0);
  check_packed(packed, outputs, x.size(1));
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kBFloat16 && bias->is_contiguous() && bias->numel() == outputs),
              "linear: bias [outputs] in bf16");
  TORCH_CHECK(!residual || (!wide && residual->scalar_type() == at::kBFloat16 && residual->dim() == 2 &&
                            residual->size(0) == rows && residual->size(1) == outputs && residual->stride(1) == 1),
              "linear: residual [rows, outputs] in bf16");
  at::Tensor out = at::empty({rows, outputs}, x.options().dtype(wide ? at::kFloat : at::kBFloat16));
  if (rows == 0) return out;
  const Output target{out.data_ptr(), outputs, outputs, wide,
                      bias ? bias->const_data_ptr<at::BFloat16>() : nullptr,
                      residual ? residual->const_data_ptr<at::BFloat16>() : nullptr,
                      residual ? residual->stride(0) : 0};
  if (tiles_take(rows, x.size(1))) {
    multiply_tiles(x, packed, target);
    return out;
  }
  const Cut cut(rows);
  if (rows == 1 && x.size(1) % 2 == 0) {  // one row is packed as it is
    multiply(static_cast<const uint32_t*>(x.const_data_ptr()), cut, packed, target);
    return out;
  }
  at::Tensor tiles = at::empty({rows, pairs_of(x.size(1))}, x.options().dtype(at::kInt));
  auto* packed_rows = static_cast<uint32_t*>(tiles.data_ptr());
  pack_rows(x, cut, packed_rows);
  multiply(packed_rows, cut, packed, target);
  return out;
}

at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& ids, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  TORCH_CHECK(ids.dim() == 1 && ids.scalar_type() == at::kLong && ids.is_contiguous(), "packed_rows: ids int64 [T]");
  at::Tensor out = at::empty({ids.size(0), inputs}, packed.options());
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < ids.size(0); t++)
    TORCH_CHECK_INDEX(id[t] >= 0 && id[t] < outputs, "packed_rows: ", id[t], " is outside 0..", outputs - 1);
  const auto* from = static_cast<const uint32_t*>(packed.const_data_ptr());
  const int64_t pairs = packed.size(1);
  at::BFloat16* to = out.data_ptr<at::BFloat16>();
  at::parallel_for(0, ids.size(0), 8, [&](int64_t a, int64_t b) {
    for (int64_t t = a; t < b; t++) {
      const uint32_t* column = from + id[t] / LANES * pairs * LANES + id[t] % LANES;
      at::BFloat16* row = to + t * inputs;
      for (int64_t p = 0; p < inputs / 2; p++) std::memcpy(row + 2 * p, column + p * LANES, 4);
      if (inputs % 2) std::memcpy(row + inputs - 1, column + (pairs - 1) * LANES, 2);
    }
  });
  return out;
}

}  // namespace kvmesh
