// What a token's experts answer, weighted and summed: bf16 products over the packed weights of all experts of a layer,
// one after another in two tensors.
//
// An expert's gate and up lie panel by panel by turns, made up to whole panels by zeros: a thread that has taken a run
// of them reads one stream and has both halves of its columns, which it gates at once. Threads take runs of all touched
// experts as they come to them, of gate and up first and then of down, and fetch the run that they have next: they meet
// once, at the end, however many experts a token has.
//
// Sums are float32, rounded to bf16 where they are the inputs of `down` only; a token's answers are added in the order
// of its choices. Each row's sums are one chain: a token's result does not depend on its neighbours (where
// product_tiles.cpp takes an expert's products, it depends on whether the expert has few or many).
#include <ATen/Parallel.h>

#include <atomic>
#include <cstring>
#include <thread>
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

// A tile of a job's rows: `x` as multiply_tile takes them, [pairs][height], and where what `down` is given goes, as it
// takes it.
struct RowTile {
  const uint32_t* x;
  uint32_t* middle;
  int64_t begin, height;
};

struct Tiled {
  std::vector<RowTile> tiles;
  std::vector<int64_t> firsts;  // of each job, and the end
  at::Tensor memory;
};

// Packs the rows `from(i)` of all jobs as tiles. A single row is one as it lies.
template <typename From>
Tiled tiled(const std::vector<Job>& jobs, int64_t rows, int64_t inputs, uint32_t* middle, int64_t middle_pairs,
            From from) {
  Tiled made;
  const int64_t pairs = (inputs + 1) / 2;
  bool packs = false;
  for (const Job& job : jobs) {
    made.firsts.push_back(static_cast<int64_t>(made.tiles.size()));
    const Cut cut(job.count);
    for (int64_t t = 0; t < cut.tiles; t++) {
      const int64_t begin = job.begin + cut.begin(t), height = job.begin + cut.begin(t + 1) - begin;
      const bool as_it_lies = height == 1 && inputs % 2 == 0;
      const auto* x = as_it_lies ? reinterpret_cast<const uint32_t*>(from(begin)) : nullptr;
      made.tiles.push_back({x, middle + begin * middle_pairs, begin, height});
      packs |= !as_it_lies;
    }
  }
  made.firsts.push_back(static_cast<int64_t>(made.tiles.size()));
  if (!packs) return made;
  made.memory = at::empty({rows, pairs}, at::kInt);
  auto* to = static_cast<uint32_t*>(made.memory.data_ptr());
  const int64_t grain = std::max<int64_t>(1, THREAD_BYTES / (MAX_ROWS * inputs));
  at::parallel_for(0, static_cast<int64_t>(made.tiles.size()), grain, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      RowTile& tile = made.tiles[i];
      if (tile.x) continue;
      const at::BFloat16* found[MAX_ROWS];
      for (int64_t r = 0; r < tile.height; r++) found[r] = from(tile.begin + r);
      interleave(found, tile.height, inputs, to + tile.begin * pairs, tile.height);
      tile.x = to + tile.begin * pairs;
    }
  });
  return made;
}

// The panels of each job's matrix `[panels, pairs, LANES, 2]`, cut into runs that threads take.
struct Runs {
  const uint32_t* weights;
  int64_t panels, pairs, run, of_job;

  Runs(const at::Tensor& weights, int64_t jobs, int64_t panels, int64_t pairs, int64_t step, int64_t threads)
      : weights(static_cast<const uint32_t*>(weights.const_data_ptr())),
        panels(panels),
        pairs(pairs),
        run(std::max<int64_t>(1, jobs * panels / step / (threads * RUNS)) * step),
        of_job((panels + run - 1) / run) {}

  int64_t begin(int64_t i) const { return i % of_job * run; }
  int64_t end(int64_t i) const { return std::min(panels, begin(i) + run); }
  const uint32_t* panel(int64_t expert, int64_t n) const { return weights + (expert * panels + n) * pairs * LANES; }
};

// Calls part(first tile, end tile, last) for a job's tiles, as many at a time as stay in L2.
template <typename Part>
void each_group(const Tiled& rows, int64_t job, int64_t pairs, Part part) {
  const int64_t group = std::max<int64_t>(1, GROUP_BYTES / (MAX_ROWS * pairs * 4)), end = rows.firsts[job + 1];
  for (int64_t first = rows.firsts[job]; first < end; first += group)
    part(first, std::min(end, first + group), first + group >= end);
}

// What tile `t` of [first, end) fetches of the panel `next`, which may be none.
Ahead ahead_of(const uint32_t* next, int64_t t, int64_t first, int64_t end, int64_t pairs) {
  const int lines = next ? static_cast<int>((2 * STEP + end - first - 1) / (end - first)) : 0;
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
  at::Tensor middle = at::empty({rows, inner_pairs}, x.options().dtype(at::kInt));
  at::Tensor answers = at::empty({rows, hidden}, x.options().dtype(at::kFloat));
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
    at::Tensor between = at::empty({job.count, inner}, x.options());
    auto* mid = between.data_ptr<at::BFloat16>();
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
          store(mid + i * inner + j, gate(g, u), m);
        });
    });
    multiply_tiles(between, down.narrow(0, job.expert * down_panels, down_panels),
                   {answer + job.begin * hidden, hidden, hidden, true,
                    down_added ? down_added + job.expert * hidden : nullptr, nullptr, 0});
  }

  // The others at once: first all of gate and up, then all of down, in the order of jobs. A run of `down` waits for the
  // last of its job's gate and up, which were taken before it, by a thread that waits for nobody.
  const int64_t jobs_left = static_cast<int64_t>(few.size());
  const int64_t each = (2 * panels * pairs + down_panels * inner_pairs) * LANES * 4;
  const int64_t threads = jobs_left * each < 2 * THREAD_BYTES ? 1 : at::get_num_threads();
  const Tiled own = tiled(few, rows, hidden, static_cast<uint32_t*>(middle.data_ptr()), inner_pairs, row_of);
  const Runs ups(gate_up, jobs_left, 2 * panels, pairs, 2, threads);
  const Runs downs(down, jobs_left, down_panels, inner_pairs, 1, threads);
  std::vector<std::atomic<int64_t>> waits(few.size());  // for so many runs of a job's gate and up
  for (auto& runs : waits) runs = ups.of_job;

  const auto multiply_up = [&](int64_t i, const uint32_t* after) {
    alignas(64) float both[2][MAX_ROWS * LANES];
    alignas(64) at::BFloat16 gated[MAX_ROWS * LANES];
    const at::BFloat16* found[MAX_ROWS];
    for (int64_t r = 0; r < MAX_ROWS; r++) found[r] = gated + r * LANES;
    const int64_t expert = few[i / ups.of_job].expert, b = ups.end(i);
    each_group(own, i / ups.of_job, pairs, [&](int64_t t0, int64_t t1, bool last) {
      for (int64_t n = ups.begin(i); n < b; n += 2) {
        const int64_t column = n / 2 * LANES, width = std::min(LANES, inner - column);
        for (int64_t t = t0; t < t1; t++) {
          const RowTile& tile = own.tiles[t];
          for (int64_t half = 0; half < 2; half++) {
            const uint32_t* next = n + half + 1 < b ? ups.panel(expert, n + half + 1) : last ? after : nullptr;
            const Output out{both[half], LANES, width, true,
                             added ? added + (expert * 2 + half) * inner + column : nullptr, nullptr, 0};
            multiply_tile(tile.x, tile.height, ups.panel(expert, n + half), pairs, ahead_of(next, t, t0, t1, pairs),
                          out, 0, 0);
          }
          for (int64_t r = 0; r < tile.height; r++)
            each16(width, [&](int64_t j, __mmask16 m) {
              const __m512 g = load(both[0] + r * LANES + j, m), u = load(both[1] + r * LANES + j, m);
              store(gated + r * LANES + j, gate(g, u), m);
            });
          uint32_t* to = tile.middle + column / 2 * tile.height;
          if (tile.height == 1 && width % 2 == 0)
            std::memcpy(to, gated, width * 2);
          else
            interleave(found, tile.height, width, to, tile.height);
        }
      }
    });
  };
  const auto multiply_down = [&](int64_t i, const uint32_t* after) {
    const int64_t expert = few[i / downs.of_job].expert, b = downs.end(i);
    const Output out{answer, hidden, hidden, true, down_added ? down_added + expert * hidden : nullptr, nullptr, 0};
    each_group(own, i / downs.of_job, inner_pairs, [&](int64_t t0, int64_t t1, bool last) {
      for (int64_t n = downs.begin(i); n < b; n++) {
        const uint32_t* next = n + 1 < b ? downs.panel(expert, n + 1) : last ? after : nullptr;
        for (int64_t t = t0; t < t1; t++) {
          const RowTile& tile = own.tiles[t];
          multiply_tile(tile.middle, tile.height, downs.panel(expert, n), inner_pairs,
                        ahead_of(next, t, t0, t1, inner_pairs), out, tile.begin, n * LANES);
        }
      }
    });
  };
  const int64_t up_runs = jobs_left * ups.of_job, runs = up_runs + jobs_left * downs.of_job;
  const auto first_panel = [&](int64_t i) -> const uint32_t* {
    if (i >= runs) return nullptr;
    if (i < up_runs) return ups.panel(few[i / ups.of_job].expert, ups.begin(i));
    return downs.panel(few[(i - up_runs) / downs.of_job].expert, downs.begin(i - up_runs));
  };
  std::atomic<int64_t> taken{0};
  if (runs)
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t i = taken++, next; i < runs; i = next) {
        next = taken++;
        if (i < up_runs) {
          multiply_up(i, first_panel(next));
          waits[i / ups.of_job].fetch_sub(1, std::memory_order_release);
        } else {
          while (waits[(i - up_runs) / downs.of_job].load(std::memory_order_acquire)) std::this_thread::yield();
          multiply_down(i - up_runs, first_panel(next));
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
