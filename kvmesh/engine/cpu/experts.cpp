// What a token's experts answer, weighted and summed: bf16 products over the packed weights of all experts of a layer,
// one after another in two tensors.
//
// An expert's gate and up lie panel by panel by turns, made up to whole panels by zeros: a thread that has taken a run
// of them reads one stream and has both halves of its columns, which it gates at once. Threads take runs of all touched
// experts as they come to them. So a token's products wait for two barriers, however many experts it has.
//
// Sums are float32, rounded to bf16 where they are the inputs of `down` only; a token's answers are added in the order
// of its choices. Each row's sums are one chain: a token's result does not depend on its neighbours (where
// product_tiles.cpp takes an expert's products, it depends on whether the expert has few or many).
#include <ATen/Parallel.h>

#include <atomic>
#include <vector>

#include "ops.h"
#include "product.h"
#include "vec.h"

namespace kvmesh {
namespace {

constexpr int64_t GROUP_BYTES = 384 << 10;  // inputs that stay in L2 while all panels pass by
constexpr int64_t THREAD_BYTES = 64 << 10;  // of weights that are worth a thread
constexpr int64_t RUNS = 128;               // of panels for each thread: one that is held up keeps back little

enum Activation { SILU, GELU, CLAMPED };

struct Gate {
  int64_t kind;
  __m512 alpha, limit;

  __m512 operator()(__m512 gate, __m512 up) const {
    __m512 slope = gate;
    if (kind == GELU) {  // x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
      const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
      slope = _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, gate));
    }
    if (kind == CLAMPED) {
      gate = _mm512_min_ps(gate, limit);
      up = _mm512_min_ps(_mm512_max_ps(up, _mm512_sub_ps(_mm512_setzero_ps(), limit)), limit);
      up = _mm512_add_ps(up, _mm512_set1_ps(1.0f));
      slope = _mm512_mul_ps(alpha, gate);
    }
    const __m512 under = _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), slope)));
    return _mm512_mul_ps(_mm512_div_ps(gate, under), up);
  }
};

// The rows of one expert: `count` from `begin` on, in the order of experts.
struct Job {
  int64_t expert, begin, count;
};

// A tile of a job's rows, as multiply_tile takes them.
struct RowTile {
  const uint32_t* x;
  int64_t begin, height;
};

struct Tiled {
  std::vector<RowTile> tiles;
  std::vector<int64_t> firsts;  // of each job, and the end
  at::Tensor memory;
};

// Packs the rows `from(i)` of all jobs as tiles. A single row is one as it lies.
template <typename From>
Tiled tiled(const std::vector<Job>& jobs, int64_t rows, int64_t inputs, From from) {
  Tiled made;
  const int64_t pairs = (inputs + 1) / 2;
  const bool whole = inputs % 2 == 0;
  bool packs = false;
  for (const Job& job : jobs) {
    made.firsts.push_back(static_cast<int64_t>(made.tiles.size()));
    const Cut cut(job.count);
    for (int64_t t = 0; t < cut.tiles; t++) {
      const int64_t begin = job.begin + cut.begin(t), height = job.begin + cut.begin(t + 1) - begin;
      made.tiles.push_back({nullptr, begin, height});
      packs |= height > 1 || !whole;
    }
  }
  made.firsts.push_back(static_cast<int64_t>(made.tiles.size()));
  uint32_t* to = nullptr;
  if (packs) {
    made.memory = at::empty({rows, pairs}, at::kInt);
    to = static_cast<uint32_t*>(made.memory.data_ptr());
  }
  const int64_t grain = std::max<int64_t>(1, THREAD_BYTES / (MAX_ROWS * inputs));
  at::parallel_for(0, static_cast<int64_t>(made.tiles.size()), grain, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      RowTile& tile = made.tiles[i];
      if (tile.height == 1 && whole) {
        tile.x = reinterpret_cast<const uint32_t*>(from(tile.begin));
        continue;
      }
      const at::BFloat16* found[MAX_ROWS];
      for (int64_t r = 0; r < tile.height; r++) found[r] = from(tile.begin + r);
      interleave(found, tile.height, inputs, to + tile.begin * pairs, tile.height);
      tile.x = to + tile.begin * pairs;
    }
  });
  return made;
}

// Calls unit(job, first tile, end tile, first panel, end panel) for all of them, `step` panels at a time or a multiple.
template <typename Unit>
void each_unit(const std::vector<Job>& jobs, const Tiled& rows, int64_t panels, int64_t step, int64_t pairs, Unit unit) {
  if (jobs.empty()) return;
  const int64_t count = static_cast<int64_t>(jobs.size()), panel_bytes = pairs * LANES * 4;
  const bool small = count * panels * panel_bytes < 2 * THREAD_BYTES;
  const int64_t threads = small ? 1 : at::get_num_threads();
  const int64_t run = std::max<int64_t>(1, count * panels / step / (threads * RUNS)) * step;
  const int64_t runs = (panels + run - 1) / run;
  const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (MAX_ROWS * pairs * 4));
  std::atomic<int64_t> taken{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = taken++; i < count * runs; i = taken++) {
      const int64_t job = i / runs, a = i % runs * run, b = std::min(panels, a + run);
      for (int64_t first = rows.firsts[job]; first < rows.firsts[job + 1]; first += group)
        unit(jobs[job], first, std::min(rows.firsts[job + 1], first + group), a, b);
    }
  });
}

// What tile `t` of [first, end) fetches of the panel that comes next.
Ahead ahead_of(const uint32_t* next, bool there, int64_t t, int64_t first, int64_t end, int64_t pairs) {
  const int lines = there ? static_cast<int>((2 * STEP + end - first - 1) / (end - first)) : 0;
  return {reinterpret_cast<const char*>(next) + (t - first) * (pairs / STEP) * lines * 64, lines};
}

}  // namespace

// `x` bf16 [T, hidden]; `chosen` int64 and `weights` float32 [T, k]; `gate_up` and `down` packed, of the experts [first,
// first + count), those of others answer nothing; `bias` bf16 [count, 2 inner], gate's before up's, `down_bias` bf16
// [count, hidden]. Answers float32 [T, hidden].
at::Tensor experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const at::Tensor& gate_up,
                   const at::Tensor& down, int64_t count, int64_t first, int64_t inner,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& down_bias,
                   int64_t activation, double alpha, double limit, bool scale_input) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == at::kBFloat16, "experts: x [T, hidden] in bf16");
  const int64_t tokens = x.size(0), hidden = x.size(1), pairs = (hidden + 1) / 2, inner_pairs = (inner + 1) / 2;
  const int64_t panels = (inner + LANES - 1) / LANES, down_panels = (hidden + LANES - 1) / LANES;
  TORCH_CHECK(chosen.dim() == 2 && chosen.size(0) == tokens && chosen.scalar_type() == at::kLong &&
                  chosen.is_contiguous() && weights.sizes() == chosen.sizes() &&
                  weights.scalar_type() == at::kFloat && weights.is_contiguous(),
              "experts: chosen int64 and weights float32, both [T, k]");
  const auto packed = [](const at::Tensor& t, int64_t panels, int64_t pairs) {
    return t.dim() == 4 && t.is_contiguous() && t.scalar_type() == at::kBFloat16 && t.size(0) == panels &&
           t.size(1) == pairs && t.size(2) == LANES && t.size(3) == 2;
  };
  TORCH_CHECK(packed(gate_up, count * 2 * panels, pairs) && packed(down, count * down_panels, inner_pairs),
              "experts: packed weights of ", count, " experts of ", inner, " columns");
  const auto of_each = [&](const std::optional<at::Tensor>& t, int64_t columns) {
    return !t || (t->dim() == 2 && t->size(0) == count && t->size(1) == columns && t->is_contiguous() &&
                  t->scalar_type() == at::kBFloat16);
  };
  TORCH_CHECK(of_each(bias, 2 * inner) && of_each(down_bias, hidden), "experts: biases in bf16");
  const int64_t k = chosen.size(1), all = tokens * k;

  // Rows in the order of their experts: `places[i]` is where choice i has its row, -1 where another rank has it.
  const int64_t* choice = chosen.const_data_ptr<int64_t>();
  std::vector<int64_t> ends(count + 1, 0), places(all), sources(all);
  for (int64_t i = 0; i < all; i++) {
    TORCH_CHECK_INDEX(choice[i] >= 0, "experts: expert ", choice[i]);
    const int64_t own = choice[i] - first;
    if (own >= 0 && own < count) ends[own + 1]++;
  }
  std::vector<Job> jobs;
  for (int64_t e = 0; e < count; e++) {
    if (ends[e + 1]) jobs.push_back({e, ends[e], ends[e + 1]});
    ends[e + 1] += ends[e];
  }
  const int64_t rows = ends[count];
  for (int64_t i = 0; i < all; i++) {
    const int64_t own = choice[i] - first;
    places[i] = own >= 0 && own < count ? ends[own]++ : -1;
    if (places[i] >= 0) sources[places[i]] = i;
  }

  const float* scale = weights.const_data_ptr<float>();
  const at::BFloat16* given = x.const_data_ptr<at::BFloat16>();
  const int64_t stride = x.stride(0);
  at::Tensor scaled;
  if (scale_input) {
    scaled = at::empty({rows, hidden}, x.options());
    auto* to = scaled.data_ptr<at::BFloat16>();
    at::parallel_for(0, rows, 8, [&](int64_t a, int64_t b) {
      for (int64_t i = a; i < b; i++) {
        const __m512 by = _mm512_set1_ps(scale[sources[i]]);
        const at::BFloat16* row = given + sources[i] / k * stride;
        each16(hidden, [&](int64_t j, __mmask16 m) { store(to + i * hidden + j, _mm512_mul_ps(load(row + j, m), by), m); });
      }
    });
  }
  const at::BFloat16* ready = scale_input ? scaled.const_data_ptr<at::BFloat16>() : nullptr;
  const auto row_of = [&](int64_t i) { return ready ? ready + i * hidden : given + sources[i] / k * stride; };

  const Gate gate{activation, _mm512_set1_ps(static_cast<float>(alpha)), _mm512_set1_ps(static_cast<float>(limit))};
  at::Tensor middle = at::empty({rows, inner}, x.options());
  at::Tensor answers = at::empty({rows, hidden}, x.options().dtype(at::kFloat));
  auto* mid = middle.data_ptr<at::BFloat16>();
  auto* answer = answers.data_ptr<float>();
  const at::BFloat16* added = bias ? bias->const_data_ptr<at::BFloat16>() : nullptr;
  const at::BFloat16* down_added = down_bias ? down_bias->const_data_ptr<at::BFloat16>() : nullptr;

  // Experts of many rows, one after another, where there are AMX tiles.
  std::vector<Job> few;
  for (const Job& job : jobs) {
    if (!tiles_take(job.count, hidden) || !tiles_take(job.count, inner)) {
      few.push_back(job);
      continue;
    }
    at::Tensor gathered = at::empty({job.count, hidden}, x.options());
    auto* to = gathered.data_ptr<at::BFloat16>();
    at::parallel_for(0, job.count, 8, [&](int64_t a, int64_t b) {
      for (int64_t i = a; i < b; i++) std::memcpy(to + i * hidden, row_of(job.begin + i), hidden * 2);
    });
    at::Tensor both = at::empty({job.count, 2 * panels * LANES}, x.options().dtype(at::kFloat));
    auto* gated = both.data_ptr<float>();
    multiply_tiles(gathered, gate_up.narrow(0, job.expert * 2 * panels, 2 * panels),
                   {gated, both.size(1), both.size(1), true, nullptr, nullptr, 0});
    at::parallel_for(0, job.count, 8, [&](int64_t a, int64_t b) {
      for (int64_t i = a; i < b; i++)
        each16(inner, [&](int64_t j, __mmask16 m) {
          const float* at = gated + i * both.size(1) + j / LANES * 2 * LANES + j % LANES;
          __m512 g = load(at, m), u = load(at + LANES, m);
          if (added) {
            const at::BFloat16* own = added + job.expert * 2 * inner + j;
            g = _mm512_add_ps(g, load(own, m)), u = _mm512_add_ps(u, load(own + inner, m));
          }
          store(mid + (job.begin + i) * inner + j, gate(g, u), m);
        });
    });
    multiply_tiles(middle.narrow(0, job.begin, job.count), down.narrow(0, job.expert * down_panels, down_panels),
                   {answer + job.begin * hidden, hidden, hidden, true,
                    down_added ? down_added + job.expert * hidden : nullptr, nullptr, 0});
  }

  const auto* up_weights = static_cast<const uint32_t*>(gate_up.const_data_ptr());
  const Tiled inputs = tiled(few, rows, hidden, row_of);
  each_unit(few, inputs, 2 * panels, 2, pairs, [&](const Job& job, int64_t t0, int64_t t1, int64_t a, int64_t b) {
    alignas(64) float both[2][MAX_ROWS * LANES];
    for (int64_t n = a; n < b; n += 2) {
      const uint32_t* w = up_weights + (job.expert * 2 * panels + n) * pairs * LANES;
      const int64_t column = n / 2 * LANES, width = std::min(LANES, inner - column);
      for (int64_t t = t0; t < t1; t++) {
        const RowTile& tile = inputs.tiles[t];
        for (int64_t half = 0; half < 2; half++) {
          const uint32_t* panel = w + half * pairs * LANES;
          const bool there = half == 0 || n + 2 < b;
          const Output out{both[half], LANES, width, true,
                           added ? added + (job.expert * 2 + half) * inner + column : nullptr, nullptr, 0};
          multiply_tile(tile.x, tile.height, panel, pairs, ahead_of(panel + pairs * LANES, there, t, t0, t1, pairs), out,
                        0, 0);
        }
        for (int64_t r = 0; r < tile.height; r++)
          each16(width, [&](int64_t j, __mmask16 m) {
            const __m512 g = load(both[0] + r * LANES + j, m), u = load(both[1] + r * LANES + j, m);
            store(mid + (tile.begin + r) * inner + column + j, gate(g, u), m);
          });
      }
    }
  });

  const auto* down_weights = static_cast<const uint32_t*>(down.const_data_ptr());
  const Tiled between = tiled(few, rows, inner, [&](int64_t i) { return mid + i * inner; });
  each_unit(few, between, down_panels, 1, inner_pairs, [&](const Job& job, int64_t t0, int64_t t1, int64_t a, int64_t b) {
    const Output out{answer, hidden, hidden, true, down_added ? down_added + job.expert * hidden : nullptr, nullptr, 0};
    for (int64_t n = a; n < b; n++) {
      const uint32_t* w = down_weights + (job.expert * down_panels + n) * inner_pairs * LANES;
      for (int64_t t = t0; t < t1; t++) {
        const RowTile& tile = between.tiles[t];
        multiply_tile(tile.x, tile.height, w, inner_pairs,
                      ahead_of(w + inner_pairs * LANES, n + 1 < b, t, t0, t1, inner_pairs), out, tile.begin, n * LANES);
      }
    }
  });

  at::Tensor out = at::empty({tokens, hidden}, answers.options());
  auto* to = out.data_ptr<float>();
  at::parallel_for(0, tokens, std::max<int64_t>(1, 65536 / (hidden * k)), [&](int64_t a, int64_t b) {
    for (int64_t t = a; t < b; t++)
      each16(hidden, [&](int64_t j, __mmask16 m) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = t * k; i < (t + 1) * k; i++)
          if (places[i] >= 0)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(scale_input ? 1.0f : scale[i]), load(answer + places[i] * hidden + j, m),
                                  sum);
        store(to + t * hidden + j, sum, m);
      });
  });
  return out;
}

}  // namespace kvmesh
