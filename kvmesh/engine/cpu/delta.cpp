// Gated DeltaNet: the causal convolution over the last tokens, and the gated delta rule over a state of constant size
// (kvmesh/engine/attention/delta.py has the formulas). All arithmetic is float32.
//
// The rule is computed over blocks of up to 16 tokens of a sequence. With S the state before the block and G_i the
// product of decays up to token i, token i writes d_i = b_i (v_i - G_i k_i S - sum over j < i of G_i / G_j (k_i k_j) d_j)
// and answers G_i q_i S + sum over j <= i of G_i / G_j (q_i k_j) d_j. So S is read once for all queries and keys of the
// block, by a matrix product, and written once. A block of one token is the plain recurrence: decode and prompts share
// one path.
#include <ATen/Parallel.h>

#include <cmath>

#include "ops.h"
#include "scratch.h"
#include "vec.h"

namespace kvmesh {
namespace {

constexpr int64_t BLOCK = 16;  // tokens
constexpr float NORM_EPS = 1e-6f;

struct Run {
  int32_t first, length;
};

inline __m512 silu(__m512 v) {
  return _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), v))));
}

void check_runs(const at::Tensor& runs, const at::Tensor& slots, int64_t tokens, int64_t count) {
  TORCH_CHECK(runs.scalar_type() == at::kInt && runs.dim() == 2 && runs.size(1) == 2 && runs.is_contiguous() &&
                  slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.numel() == runs.size(0),
              "runs int32 [sequences, 2] and slots int64 [sequences]");
  const auto* of = reinterpret_cast<const Run*>(runs.const_data_ptr<int32_t>());
  const int64_t* at = slots.const_data_ptr<int64_t>();
  int64_t planned = 0;
  for (int64_t i = 0; i < runs.size(0); i++) {
    TORCH_CHECK(of[i].first == planned && of[i].length > 0, "sequences lie one behind the other");
    TORCH_CHECK(at[i] >= 0 && at[i] < count, "slot ", at[i], " is outside 0..", count - 1);
    planned += of[i].length;
  }
  TORCH_CHECK(planned == tokens, "x has ", tokens, " tokens, the step's sequences have ", planned);
}

// ── the convolution ────────────────────────────────────────────────────────────────────────────────

// One head's channels of a run: `known` holds the last taps - 1 inputs, `step` apart, and is moved on by the run's.
template <typename T>
void convolve_head(const T* x, int64_t stride, int64_t length, const float* weight, int64_t weight_step, int64_t taps,
                   T* known, int64_t step, T* out, int64_t out_stride, int64_t width) {
  each16(width, [&](int64_t i, __mmask16 m) {
    const auto input = [&](int64_t t) {  // of token t of the run, or of one before it
      return t < 0 ? load(known + (t + taps - 1) * step + i, m) : load(x + t * stride + i, m);
    };
    for (int64_t t = 0; t < length; t++) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t tap = 0; tap < taps; tap++)
        sum = _mm512_fmadd_ps(input(t + tap + 1 - taps), load(weight + tap * weight_step + i, m), sum);
      store(out + t * out_stride + i, silu(sum), m);
    }
    for (int64_t tap = 0; tap + 1 < taps; tap++)  // ascending: what is read lies behind what is written
      store(known + tap * step + i, input(length + tap + 1 - taps), m);
  });
}

template <typename T>
void convolve_runs(const at::Tensor& x, const at::Tensor& weight, at::Tensor& known, const at::Tensor& slots,
                   const at::Tensor& runs, at::Tensor& out) {
  const int64_t heads = x.size(1), width = x.size(2), taps = weight.size(0), row = heads * width;
  const auto* of = reinterpret_cast<const Run*>(runs.const_data_ptr<int32_t>());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const float* w = weight.const_data_ptr<float>();
  at::parallel_for(0, runs.size(0) * heads, runs.size(0) == x.size(0) ? 4 : 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
      const int64_t i = at / heads, h = at % heads;
      convolve_head<T>(x.const_data_ptr<T>() + of[i].first * x.stride(0) + h * x.stride(1), x.stride(0), of[i].length,
                       w + h * width, row, taps, known.data_ptr<T>() + slot[i] * known.stride(0) + h * width, row,
                       out.data_ptr<T>() + of[i].first * row + h * width, row, width);
    }
  });
}

// ── the rule ───────────────────────────────────────────────────────────────────────────────────────

// c[r] (+)= sum over i < depth of a[r * a_row + i * a_step] b[i], for ROWS rows and VECTORS vectors of columns; with
// `keep` what is in c is first multiplied by it.
template <int ROWS, int VECTORS>
inline void tile(const float* a, int64_t a_row, int64_t a_step, int64_t depth, const float* b, int64_t b_row, float* c,
                 int64_t c_row, const float* keep) {
  __m512 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++)
      sums[r][v] = keep ? _mm512_mul_ps(_mm512_set1_ps(*keep), load(c + r * c_row + 16 * v)) : _mm512_setzero_ps();
  for (int64_t i = 0; i < depth; i++) {
    __m512 column[VECTORS];
    for (int v = 0; v < VECTORS; v++) column[v] = load(b + i * b_row + 16 * v);
    for (int r = 0; r < ROWS; r++) {
      const __m512 factor = _mm512_set1_ps(a[r * a_row + i * a_step]);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_fmadd_ps(factor, column[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(c + r * c_row + 16 * v, sums[r][v]);
}

// The same for any number of rows, and columns that are a multiple of 16.
void product(const float* a, int64_t a_row, int64_t a_step, int64_t rows, int64_t depth, const float* b, int64_t b_row,
             int64_t columns, float* c, int64_t c_row, const float* keep = nullptr) {
  const auto pass = [&]<int VECTORS>(int64_t from, std::integral_constant<int, VECTORS>) {
    int64_t r = 0;
    const auto some = [&]<int ROWS>(std::integral_constant<int, ROWS>) {
      for (; r + ROWS <= rows; r += ROWS)
        tile<ROWS, VECTORS>(a + r * a_row, a_row, a_step, depth, b + from, b_row, c + r * c_row + from, c_row, keep);
    };
    some(std::integral_constant<int, 6>());
    some(std::integral_constant<int, 2>());
    some(std::integral_constant<int, 1>());
  };
  int64_t from = 0;
  for (; from + 64 <= columns; from += 64) pass(from, std::integral_constant<int, 4>());
  for (; from < columns; from += 16) pass(from, std::integral_constant<int, 1>());
}

template <typename T>
class Rule {
 public:
  Rule(const at::Tensor& x, const at::Tensor& log_decay, const at::Tensor& rate, at::Tensor& states, at::Tensor& out)
      : x_(x.const_data_ptr<T>()),
        decay_(log_decay.const_data_ptr<float>()),
        rate_(rate.const_data_ptr<float>()),
        states_(states.data_ptr<float>()),
        out_(out.data_ptr<T>()),
        slot_(states.stride(0)),
        heads_(states.size(1)),
        keys_(states.size(2)),
        values_(states.size(3)),
        padded_(round_up(values_, 16)),
        row_(x.size(1) * x.size(2)),
        width_(x.size(2)),
        repeats_(heads_ / x.size(1)) {}

  int64_t scratch() const {
    const int64_t floats = 2 * BLOCK * keys_ + 3 * BLOCK * padded_ + 2 * BLOCK * BLOCK + BLOCK * 3;
    return 4 * (floats + (in_place() ? 0 : keys_ * padded_)) + 64 * 12;
  }

  // All tokens of one sequence for one value head.
  void run(const Run& of, int64_t slot, int64_t head, Scratch& scratch) const {
    float* state = states_ + slot * slot_ + head * keys_ * values_;
    scratch.reset(this->scratch());
    float* padded = state;
    if (!in_place()) {  // rows of a state are padded to whole vectors
      padded = scratch.take<float>(keys_ * padded_);
      for (int64_t i = 0; i < keys_; i++) {
        std::memcpy(padded + i * padded_, state + i * values_, values_ * sizeof(float));
        std::memset(padded + i * padded_ + values_, 0, (padded_ - values_) * sizeof(float));
      }
    }
    for (int64_t from = 0; from < of.length; from += BLOCK) {
      const Scratch::Mark mark(scratch);
      block(of.first + from, std::min(BLOCK, of.length - from), head, padded, scratch);
    }
    if (!in_place())
      for (int64_t i = 0; i < keys_; i++)
        std::memcpy(state + i * values_, padded + i * padded_, values_ * sizeof(float));
  }

 private:
  bool in_place() const { return padded_ == values_; }

  void block(int64_t first, int64_t count, int64_t head, float* state, Scratch& scratch) const {
    float* const ask = scratch.take<float>(2 * count * keys_);  // keys, then queries
    float* const told = scratch.take<float>(2 * count * padded_);
    float* const written = scratch.take<float>(count * padded_);
    float* const near = scratch.take<float>(2 * BLOCK * BLOCK);  // products of keys and keys, of queries and keys
    float sums[BLOCK], since[BLOCK];
    const int64_t key_head = head / repeats_, value_at = 2 * keys_ + head % repeats_ * values_;
    float sum = 0;
    for (int64_t t = 0; t < count; t++) {
      const T* x = x_ + (first + t) * row_ + key_head * width_;
      unit(x + keys_, ask + t * keys_, 1.0f);
      unit(x, ask + (count + t) * keys_, 1.0f / std::sqrt(static_cast<float>(keys_)));
      sum += decay_[(first + t) * heads_ + head];
      sums[t] = sum;
      since[t] = std::exp(sum);
    }
    product(ask, keys_, 1, 2 * count, keys_, state, padded_, padded_, told, padded_);
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j <= i; j++) {
        const float between = std::exp(sums[i] - sums[j]);
        near[i * BLOCK + j] = between * dot(ask + i * keys_, ask + j * keys_);
        near[(BLOCK + i) * BLOCK + j] = between * dot(ask + (count + i) * keys_, ask + j * keys_);
      }
    for (int64_t i = 0; i < count; i++) {
      const T* v = x_ + (first + i) * row_ + key_head * width_ + value_at;
      const __m512 rate = _mm512_set1_ps(rate_[(first + i) * heads_ + head]);
      const __m512 old = _mm512_set1_ps(since[i]);
      T* out = out_ + ((first + i) * heads_ + head) * values_;
      each16(values_, [&](int64_t at, __mmask16 m) {
        __m512 d = _mm512_fnmadd_ps(old, load(told + i * padded_ + at), load(v + at, m));
        __m512 answer = _mm512_mul_ps(old, load(told + (count + i) * padded_ + at));
        for (int64_t j = 0; j < i; j++) {
          const __m512 other = load(written + j * padded_ + at);
          d = _mm512_fnmadd_ps(_mm512_set1_ps(near[i * BLOCK + j]), other, d);
          answer = _mm512_fmadd_ps(_mm512_set1_ps(near[(BLOCK + i) * BLOCK + j]), other, answer);
        }
        d = _mm512_maskz_mul_ps(m, d, rate);
        store(written + i * padded_ + at, d);
        store(out + at, _mm512_fmadd_ps(_mm512_set1_ps(near[(BLOCK + i) * BLOCK + i]), d, answer), m);
      });
    }
    for (int64_t j = 0; j < count; j++) {  // keys as the state after the block has them
      const __m512 kept = _mm512_set1_ps(std::exp(sums[count - 1] - sums[j]));
      each16(keys_, [&](int64_t i, __mmask16 m) {
        store(ask + j * keys_ + i, _mm512_mul_ps(kept, load(ask + j * keys_ + i, m)), m);
      });
    }
    product(ask, 1, keys_, keys_, count, written, padded_, padded_, state, padded_, &since[count - 1]);
  }

  // to = from / |from| * scale
  void unit(const T* from, float* to, float scale) const {
    __m512 squares = _mm512_setzero_ps();
    each16(keys_, [&](int64_t i, __mmask16 m) {
      const __m512 v = load(from + i, m);
      squares = _mm512_fmadd_ps(v, v, squares);
    });
    const __m512 factor = _mm512_set1_ps(scale / std::sqrt(_mm512_reduce_add_ps(squares) + NORM_EPS));
    each16(keys_, [&](int64_t i, __mmask16 m) { store(to + i, _mm512_mul_ps(factor, load(from + i, m)), m); });
  }

  float dot(const float* a, const float* b) const {
    __m512 sum = _mm512_setzero_ps();
    each16(keys_, [&](int64_t i, __mmask16 m) { sum = _mm512_fmadd_ps(load(a + i, m), load(b + i, m), sum); });
    return _mm512_reduce_add_ps(sum);
  }

  const T* x_;
  const float *decay_, *rate_;
  float* states_;
  T* out_;
  int64_t slot_, heads_, keys_, values_, padded_, row_, width_, repeats_;
};

template <typename F>
void by_type(const at::Tensor& x, F&& f) {
  if (x.scalar_type() == at::kFloat) return f(float());
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "x of ", x.scalar_type(), ": bfloat16 or float32");
  f(at::BFloat16());
}

}  // namespace

at::Tensor delta_convolve(const at::Tensor& x, const at::Tensor& weight, at::Tensor known, const at::Tensor& slots,
                          const at::Tensor& runs) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && weight.is_contiguous() && weight.dim() == 3 &&
                  weight.scalar_type() == at::kFloat && weight.size(1) == x.size(1) && weight.size(2) == x.size(2),
              "delta_convolve: x [T, K, W] and weight [kernel, K, W], float32");
  TORCH_CHECK(known.dim() == 4 && known.scalar_type() == x.scalar_type() && known.size(1) == weight.size(0) - 1 &&
                  known.size(2) == x.size(1) && known.size(3) == x.size(2) && known[0].is_contiguous(),
              "delta_convolve: known [slots, kernel - 1, K, W] of x's dtype");
  check_runs(runs, slots, x.size(0), known.size(0));
  at::Tensor out = at::empty(x.sizes(), x.options());
  by_type(x, [&](auto t) { convolve_runs<decltype(t)>(x, weight, known, slots, runs, out); });
  return out;
}

at::Tensor delta_rule(const at::Tensor& x, const at::Tensor& log_decay, const at::Tensor& rate, at::Tensor states,
                      const at::Tensor& slots, const at::Tensor& runs) {
  TORCH_CHECK(x.dim() == 3 && x.is_contiguous() && states.dim() == 4 && states.scalar_type() == at::kFloat &&
                  states[0].is_contiguous() && states.size(1) % x.size(1) == 0 &&
                  x.size(2) == 2 * states.size(2) + states.size(1) / x.size(1) * states.size(3),
              "delta_rule: x [T, K, W] and states [slots, V, key dim, value dim], float32");
  for (const at::Tensor& t : {log_decay, rate})
    TORCH_CHECK(t.is_contiguous() && t.scalar_type() == at::kFloat && t.numel() == x.size(0) * states.size(1),
                "delta_rule: log_decay and rate float32 [T, V]");
  check_runs(runs, slots, x.size(0), states.size(0));
  const int64_t heads = states.size(1);
  at::Tensor out = at::empty({x.size(0), heads, states.size(3)}, x.options());
  const auto* of = reinterpret_cast<const Run*>(runs.const_data_ptr<int32_t>());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  by_type(x, [&](auto t) {
    const Rule<decltype(t)> rule(x, log_decay, rate, states, out);
    at::parallel_for(0, runs.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      for (int64_t at = begin; at < end; at++) rule.run(of[at / heads], slot[at / heads], at % heads, scratch);
    });
  });
  return out;
}

}  // namespace kvmesh
